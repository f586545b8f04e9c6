"""Digests of the code that stages and variants run: one digest per file, computed without importing the file.

The digest of a Python file covers its syntax tree without docstrings, so comments, docstrings and formatting do not
change the digest. The files are found by following all import statements, also those inside functions. ``unfollowed``
detects modules of the user that are loaded in another way, and other files that the user's code reads.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from pipeline.errors import ConfigError, PipelineError
from pipeline.files import PREPARED, file_sha256
from pipeline.params import Fetch, Train, outside, requested
from pipeline.plans import Plan

PACKAGE = Path(__file__).parent.parent

FOUND_AS_VALUES = ("pipeline.errors", "pipeline.params", "pipeline.plans", "pipeline.environment", "pipeline.cli")
"""Modules that get no digest, and whose imports are not followed. Instead, the values that they produce are recorded:
plans, settings of stages and the environment's hash. So a changed text about a technique changes no digest."""

GATE_COPY = Path(".dvc", "gate-copy")
"""File in each of the gate's two copies of the project: the top of the copy, and the top of the original repository."""

COMMANDS_STARTED = {"bench": ("arms",)}
"""Stage -> the further commands that its command starts as processes."""


def of_stage(stage: str, own: Iterable[str] = ()) -> dict[str, str]:
    """Return file -> digest of the code that the stage's command runs for every variant, including the user's ``own``
    modules. Of cli.py, only the imports in the command's function count."""
    names = {f"_{command}" for command in (stage, *COMMANDS_STARTED.get(stage, ()))}
    tree = _tree(PACKAGE / "cli.py")
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    imports = [found for each in functions for node in ast.walk(each) for found in _imported(node)]
    return _digests({*_imports(imports, "pipeline.cli", is_package=False), *own})


def of_variant(plan: Plan) -> dict[str, str]:
    """Return file -> digest of the code that the variant adds: its techniques, the user's own modules and their
    imports, the files that the user's code reads (``train.files``), and the configuration files of models of
    ``transformers``. Raises ConfigError if a file of ``train.files`` is missing."""
    own = (each.implementation.partition(".")[0] for each in requested(plan.applied))
    modules = {*(f"pipeline.techniques.{name}" for name in own if name), *_of_the_user(plan)}
    return _digests(modules) | of_files(_read_files(plan))


def of_files(paths: Iterable[Path]) -> dict[str, str]:
    """Return file -> digest of its content."""
    return {path.as_posix(): _content(path, path.stat().st_mtime_ns) for path in paths}


@functools.cache  # variants share the files, which may be large
def _content(path: Path, mtime_ns: int) -> str:  # noqa: ARG001
    return file_sha256(path)[:16]


def of_function(name: str) -> str:
    """Return a digest of the user's function or class ``module:name``: of its definition, of all that the definition
    refers to in the same file, and of the files that it imports. So a change of a model leaves the digest of a metric
    in the same file as it was. Code of the pipeline is not covered."""
    module, _, attribute = name.partition(":")
    located = _located(module, (Path.cwd(), PACKAGE.parent, *map(Path, sys.path)))
    if not located:
        return ""  # the training reports a missing module
    path, names, used = located[1], {attribute}, list[ast.stmt]()
    statements = [statement for statement in _tree(path).body if not _is_text(statement)]
    while binding := [
        statement
        for statement in statements
        if statement not in used and not names.isdisjoint(_bound(statement) or names)
    ]:
        used += binding
        names |= {node.id for statement in binding for node in ast.walk(statement) if isinstance(node, ast.Name)}
    imports = [name for statement in used for node in ast.walk(statement) for name in _imported(node)]
    imported = _imports(imports, module, is_package=path.name == "__init__.py")
    files = {file for _, file in _files((), imported) if not file.is_relative_to(PACKAGE)}
    texts = [ast.dump(_without_texts(statement)) for statement in statements if statement in used]
    return _short("\n".join([*texts, *sorted(_source(file).digest for file in files)]).encode())


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a definition, an import or an assignment binds. An empty set means that the statement may
    change any name."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names} - {"*"}
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    return set()


def listed(section: Fetch | Train) -> Iterator[Path]:
    """Yield the files of ``fetch.files`` or ``train.files``, with all files of its folders. Raises ConfigError for a
    name without a file."""
    for name in section.files:
        path = Path(name)
        folders = ((file, file.relative_to(path).parts[:-1]) for file in (path, *path.rglob("*")))
        inside = sorted(file for file, parts in folders if file.is_file() and not _of_a_tool(parts))
        if not inside:
            raise ConfigError(f"{_key(section)}: found {name!r}, which is no file and no folder with files.")
        yield from inside


def _key(section: Fetch | Train) -> str:
    return f"{type(section).__name__.lower()}.files"


def _read_files(plan: Plan) -> Iterator[Path]:
    """Yield the files of ``train.files``, and the configurations of models of ``transformers``."""
    yield from listed(plan.train)
    for job in (plan.train, plan.applied.distillation):
        path = Path(str(job.model_options.get("config")) if job and job.model == "transformers" else "")
        if path.is_file():  # building the model reports a missing file
            yield path


def _of_the_user(plan: Plan) -> set[str]:
    """Return the modules that the plan names: the modules of the user's factories, and of other packages'
    techniques."""
    taught_by = plan.applied.distillation
    named = (plan.train.task, plan.train.model, plan.train.loss, plan.train.metric, taught_by and taught_by.model)
    factories = (name.partition(":")[0] for name in named if name and ":" in name)
    return {*factories, *(outside.module_of(name) for name in plan.applied.extra)}


class Unfollowed(PipelineError):
    """The user's code uses a file that has no digest, so changes of this file would go unnoticed."""


def unfollowed(plan: Plan) -> Callable[[], None]:
    """Return ``unfollowed_by`` for the modules and files of ``of_variant(plan)``."""
    return unfollowed_by(_of_the_user(plan), plan.train, _read_files(plan))


def unfollowed_by(named: Set[str], section: Fetch | Train, files: Iterable[Path]) -> Callable[[], None]:
    """Return a check that raises Unfollowed if the user's code uses one of the user's own files without a digest: a
    module to which no import leads from the modules ``named``, or a file that it opened for reading and that is not in
    ``files``.

    The user's own files are in the work tree or in a package that ``named`` names. What was used before this call, for
    example by tests, does not count. Python does not report files that a library opens in C or Rust. In a copy of the
    gate, the check also refuses modules and files of the original work tree, which base and head would share.
    ``section``: where a person lists files.
    """
    before = set(sys.modules)
    packages = {module.partition(".")[0] for module in named}
    followed = {path.resolve() for path in (*(path for _, path in _files(named)), *files)}
    if named:
        _add_hook(_note_opened)
    _packages.update(packages)
    _written.clear()
    start = next(_numbers)

    def check() -> None:
        loaded = ((name, getattr(module, "__file__", None)) for name, module in [*sys.modules.items()])
        modules = {name: Path(file) for name, file in loaded if file}
        _check_copy(modules)
        if not named:
            return
        read = {Path(name) for name, number in [*_opened.items()] if number > start}
        for name in sorted(modules.keys() - before):
            path = modules[name]
            if name.startswith("torch."):  # code that torch.compile generates, in a cache that may be in the checkout
                continue
            own = _is_own(path) or (name.partition(".")[0] in packages and not _is_installed(path))
            if path.suffix != ".py":
                read.add(path)
            elif own and not path.is_relative_to(PACKAGE) and path.resolve() not in followed:
                raise Unfollowed(
                    f"{name} ({path}) is in use, but no import statement leads to it from {', '.join(sorted(named))}. "
                    f"So changes of {name} would go unnoticed, and old results would count as results of the present "
                    f"code. Write `import {name}` at the top of the file that needs it. If {name} is not in the folder "
                    "of params.yaml, add its folder to PYTHONPATH."
                )
        for path in sorted(filter(_is_input, read)):
            shown = os.path.relpath(path)
            _check_copy({shown: path})
            if path.resolve() not in followed:
                raise Unfollowed(
                    f"{shown} was read by the job's own code, but has no digest. So changes of {shown} would go "
                    "unnoticed, and old results would count as results of the present file. Add the file to "
                    f"params.yaml, as {_key(section)}: [{', '.join([*section.files, shown])}]."
                )

    return check


_opened: dict[str, int] = {}
"""File that the user's code opened for reading -> the number of its latest opening. A file that this process wrote
before (``_written``) is left out."""
_written: set[str] = set()
_numbers = itertools.count(1)
_add_hook = functools.cache(sys.addaudithook)  # a hook stays until the process ends
_packages: set[str] = set()
"""The packages that plans name. What they read counts as read by the user's code, although they are installed."""
_LIBRARIES = ("<", *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")))
_INSTALLED = ("site-packages", "dist-packages")
TOOLS = {"__pycache__", ".cache", ".dvc", ".git", ".hypothesis", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache",
         ".ruff_cache", ".venv"}  # fmt: skip
"""Folders of tools, whose files are no inputs of a job."""


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    """Record an opened file, unless the pipeline's own code, or a library that it called, opened the file."""
    if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    name, flags = os.path.abspath(os.fsdecode(arguments[0])), arguments[2] or 0  # noqa: PTH100
    if flags & (os.O_WRONLY | os.O_TRUNC | os.O_EXCL):
        _written.add(name)
        return
    frame: FrameType | None = sys._getframe(1)
    while frame and _is_of_library(frame):
        frame = frame.f_back
    by_pipeline = frame and frame.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}")
    if not by_pipeline and name not in _written:
        _opened[name] = next(_numbers)


def _is_of_library(frame: FrameType) -> bool:
    """True if the frame's code belongs neither to this package, wherever it is installed, nor to the user."""
    file = frame.f_code.co_filename
    named = str(frame.f_globals.get("__name__")).partition(".")[0] in _packages
    if named or file.startswith(f"{PACKAGE}{os.sep}"):
        return False
    return file.startswith(_LIBRARIES) or any(f"{os.sep}{name}{os.sep}" in file for name in _INSTALLED)


def _of_a_tool(folders: Collection[str]) -> bool:
    return not TOOLS.isdisjoint(folders) or any(name.endswith((".egg-info", ".dist-info")) for name in folders)


def _is_input(path: Path) -> bool:
    """True if the file is the user's own, and not one of Python, of a cache, of a tool such as git, or of the prepared
    data, whose digest is known."""
    relative = _relative(path, *_tops())
    if not relative or not path.is_file() or path.is_relative_to(PACKAGE) or _is_installed(path):
        return False
    return not _of_a_tool(relative.parts[:-1]) and not path.is_relative_to(PREPARED.absolute())


def _check_copy(files: Mapping[str, Path]) -> None:
    """Raise Unfollowed if this is a copy of the gate, but one of ``files`` (name -> path, links are resolved) is a file
    of the original work tree."""
    work_tree, repository = _tops()
    for name, path in files.items() if work_tree != repository else ():
        real = path.resolve()
        shared = real.is_relative_to(repository) and not _of_a_tool(real.relative_to(repository).parts)
        if shared and not real.is_relative_to(work_tree) and not _is_installed(real):
            raise Unfollowed(
                f"even in a copy of the project, {name} comes from the original work tree ({real}), so base and head "
                "would share it: remove the work tree from PYTHONPATH, uninstall the package that was installed from "
                "it (pip uninstall), or replace absolute paths and links into the work tree by relative ones."
            )


def _tops() -> tuple[Path, Path]:
    """Return the top of the work tree and the top of its repository. They differ only in a copy of the gate. Without
    git, both are the current directory."""
    if GATE_COPY.is_file():
        work_tree, repository = GATE_COPY.read_text(encoding="utf-8").splitlines()
        return Path(work_tree), Path(repository)
    current = Path.cwd()
    top = next((folder for folder in (current, *current.parents) if (folder / ".git").exists()), current)
    return top, top


def _relative(path: Path, *tops: Path) -> Path | None:
    """Return ``path``, or the file to which its links lead, relative to the first of ``tops`` that contains it."""
    pairs = ((file, top) for file in (path, path.resolve()) for top in tops)
    return next((file.relative_to(top) for file, top in pairs if file.is_relative_to(top)), None)


def _is_own(path: Path) -> bool:
    return _relative(path, _tops()[0]) is not None and not _is_installed(path)


def _is_installed(path: Path) -> bool:
    """Return True if the file belongs to Python or to an installed package, wherever the package is."""
    if not set(_INSTALLED).isdisjoint(path.parts):
        return True
    return any(path.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def _digests(modules: Collection[str]) -> dict[str, str]:
    """Return file -> digest for ``modules``, everything they import, and the templates of this package's modules."""
    found: dict[str, str] = {}
    for root, path in _files(modules):
        found[path.relative_to(root).as_posix()] = _source(path).digest
        if path.is_relative_to(PACKAGE):
            for template in path.parent.glob(f"{path.stem}.html"):  # the template that the module fills in
                found[template.relative_to(root).as_posix()] = _short(template.read_bytes())
    return dict(sorted(found.items()))


def _files(modules: Collection[str], imported: Iterable[str] = ()) -> Iterator[tuple[Path, Path]]:
    """Yield (root, file) of ``modules``, of ``imported``, and of everything they import. A file counts if it is in the
    work tree, in the folder that contains this package, or in any package that ``modules`` names."""
    named = {module.partition(".")[0] for module in modules}
    anywhere = (Path.cwd(), PACKAGE.parent, *map(Path, sys.path))
    here = (*anywhere[:2], *filter(_is_own, anywhere[2:]))
    waiting, seen = {*modules, *imported}, set[str]()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        waiting |= {module[:end] for end, letter in enumerate(module) if letter == "."} - seen
        if any(f"{module}.".startswith(f"{name}.") for name in FOUND_AS_VALUES):
            continue
        if located := _located(module, anywhere if module.partition(".")[0] in named else here):
            _check_copy({module: located[1]})
            yield located
            imports, is_package = _source(located[1]).imports, located[1].name == "__init__.py"
            waiting |= set(_imports(imports, module, is_package=is_package)) - seen


@functools.cache  # stages share most modules
def _located(module: str, roots: tuple[Path, ...]) -> tuple[Path, Path] | None:
    """Return the first root that has the module, and the module's file there; None if no root has it."""
    for root in roots:
        stem = root.joinpath(*module.split("."))
        for path in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
            if path.is_file():
                return root, path
    return None


class _Source(NamedTuple):
    digest: str
    imports: list[tuple[int, str, list[str]]]
    """Level, module and names of each import statement, at any place in the file. ``import a`` has no names."""


@functools.cache
def _source(path: Path) -> _Source:
    tree = _tree(path)
    imports = [name for node in ast.walk(tree) for name in _imported(node)]
    return _Source(_short(ast.dump(_without_texts(tree)).encode()), imports)


def _without_texts(tree: ast.AST) -> ast.AST:
    """Return ``tree``, from which the docstrings have been removed."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return tree


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise ConfigError(f"{path}, which a stage would run, is not valid Python: {error}.") from None


def _imported(node: ast.AST) -> list[tuple[int, str, list[str]]]:
    if isinstance(node, ast.Import):
        return [(0, alias.name, []) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [(node.level, node.module or "", [alias.name for alias in node.names])]
    return []


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _imports(imports: Iterable[tuple[int, str, list[str]]], module: str, *, is_package: bool) -> Iterator[str]:
    """Yield the dotted names that ``module`` imports. ``from a import b`` yields a and a.b, as b may be a module."""
    for level, base, names in imports:
        if level:
            parts = module.split(".")
            kept = parts[: len(parts) - level + is_package]
            base = ".".join([*kept, *filter(None, [base])])
        yield base
        yield from (f"{base}.{name}" for name in names)
