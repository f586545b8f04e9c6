"""Digests of the code that stages and variants run: one digest per file, computed without importing the file.

The digest of a Python file covers its syntax tree without docstrings, so comments, docstrings and formatting do not
change the digest. The files are found by following all import statements (``imports``). ``unfollowed`` refuses modules
of the user that are loaded in another way, which are found in ``sys.modules``, and other files that the user's code
reads, which are found by Python's audit hook.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline.environment import imports
from pipeline.environment.imports import PACKAGE, Unfollowed
from pipeline.errors import ConfigError
from pipeline.files import PREPARED, file_sha256
from pipeline.params import Fetch, Train, outside, requested
from pipeline.plans import Plan

TEMPLATES = PACKAGE / "pages"

COMMANDS_STARTED = {"bench": ("arms",)}
"""Stage -> the further commands that its command starts as processes."""


def of_stage(stage: str, own: Iterable[str] = (), *, of_script: bool = False) -> dict[str, str]:
    """Return file -> digest of the code that the stage's command runs for every variant, including the user's ``own``
    modules. Of cli.py, only the imports in the command's function count or, ``of_script``, in its variant for scripts,
    if there is one (``_train_of_script``)."""
    defined = {
        node.name: node for node in imports.tree_of(PACKAGE / "cli.py").body if isinstance(node, ast.FunctionDef)
    }
    names = [f"_{command}" for command in (stage, *COMMANDS_STARTED.get(stage, ()))]
    functions = [(of_script and defined.get(f"{name}_of_script")) or defined[name] for name in names]
    return _digests({*imports.names_in(map(imports.source_of_tree, functions), "pipeline.cli"), *own})


def of_variant(plan: Plan) -> dict[str, str]:
    """Return file -> digest of the code that the variant adds: its techniques, the user's own modules and their
    imports, the files that the user's code reads (``train.files``), the weights with which training begins, and the
    configuration files of models of ``transformers``. Raises ConfigError if a file of ``train.files`` is missing."""
    own = (entry.implementation.partition(".")[0] for entry in requested(plan.applied))
    modules = {*(f"pipeline.techniques.{name}" for name in own if name), *modules_of_the_user(plan)}
    return _digests(modules) | of_files(files_read(plan))


def of_files(paths: Iterable[Path]) -> dict[str, str]:
    """Return file -> digest of its content."""
    return {path.as_posix(): _content(path, path.stat().st_mtime_ns) for path in paths}


def of_opened(paths: Iterable[Path]) -> dict[str, str]:
    """Return file -> digest of files that a script opens; empty for a file that is gone. Of a Python file, the digest
    covers the code with its docstrings, which a script may read as its options (docopt)."""
    digests = {}
    for path in paths:
        digests[path.as_posix()] = ""
        if path.suffix == ".py" and path.is_file():
            digests[path.as_posix()] = imports.short(ast.dump(imports.tree_of(path)).encode())
        elif path.is_file():
            digests |= of_files([path])
    return digests


@functools.cache  # variants share the files, which may be large
def _content(path: Path, mtime_ns: int) -> str:  # noqa: ARG001
    return file_sha256(path)[:16]


def of_function(name: str, listed_files: Iterable[Path] = ()) -> str:
    """Return a digest of the user's function or class ``module:name``: of its definition, of all that the definition
    refers to in the same file, of the files that it imports, and of those ``listed_files`` that this code names. So a
    change of a model leaves the digest of a metric in the same file as it was. Code of the pipeline is not covered."""
    module, _, attribute = name.partition(":")
    location = imports.located(module, imports.search_path())
    if not location:
        return ""  # the training reports a missing module
    path, names, used = location[1], {attribute}, list[ast.stmt]()
    statements = [statement for statement in imports.tree_of(path).body if not imports.is_text(statement)]
    while binding := [
        statement
        for statement in statements
        if statement not in used and not names.isdisjoint(_bound(statement) or names)
    ]:
        used += binding
        names |= {node.id for statement in binding for node in ast.walk(statement) if isinstance(node, ast.Name)}
    definitions = [imports.source_of_tree(statement) for statement in statements if statement in used]
    imported = imports.names_in(definitions, module, is_package=path.name == "__init__.py")
    files = {file for _, file in imports.followed((), imported) if not file.is_relative_to(PACKAGE)}
    sources = [*definitions, *sorted(map(imports.source_of, files), key=lambda source: source.digest)]
    named = {text.rpartition("/")[2] for source in sources for text in source.texts}
    read = of_files(path for path in listed_files if path.name in named)
    return imports.short("\n".join([*(source.digest for source in sources), *read.values()]).encode())


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
        inside = sorted(file for file, parts in folders if file.is_file() and not imports.is_of_a_tool(parts))
        if not inside:
            raise ConfigError(f"{key_of(section)}: found {name!r}, which is no file and no folder with files.")
        yield from inside


def key_of(section: Fetch | Train) -> str:
    return f"{type(section).__name__.lower()}.files"


def files_read(plan: Plan) -> Iterator[Path]:
    """Yield the files of ``train.files`` and of ``train.weights``, and the configurations of models of
    ``transformers``."""
    yield from listed(plan.train)
    if plan.train.weights:  # the training reports a missing file
        weights = Path(plan.train.weights).expanduser()
        yield from sorted(weights.glob("*.safetensors*")) if weights.is_dir() else [weights] * weights.is_file()
    for job in (plan.train, plan.applied.distillation):
        path = Path(str(job.model_options.get("config")) if job and job.model == "transformers" else "")
        if path.is_file():  # building the model reports a missing file
            yield path


def modules_of_the_user(plan: Plan) -> set[str]:
    """Return the modules that the plan names: the modules of the user's factories, and of other packages'
    techniques."""
    taught_by = plan.applied.distillation
    named = (plan.train.task, plan.train.model, plan.train.loss, plan.train.metric, taught_by and taught_by.model)
    factories = (name.partition(":")[0] for name in named if name and ":" in name)
    return {*factories, *(outside.module_of(name) for name in plan.applied.extra)}


def libraries_of(plan: Plan) -> set[str]:
    """Return the names of the installed packages that the user's modules import, at any place."""
    followed = (path for _, path in imports.followed(modules_of_the_user(plan)) if not path.is_relative_to(PACKAGE))
    statements = (statement for path in followed for statement in imports.source_of(path).imports)
    return {module.partition(".")[0] for level, module, _ in statements if not level}


def _digests(modules: Collection[str]) -> dict[str, str]:
    """Return file -> digest for ``modules``, everything they import, and the templates that this package's modules
    name."""
    templates = {file.name: file for file in (*TEMPLATES.glob("*.md"), *TEMPLATES.glob("*.html"))}
    digests: dict[str, str] = {}
    for root, path in imports.followed(modules):
        digests[path.relative_to(root).as_posix()] = imports.source_of(path).digest
        if path.is_relative_to(PACKAGE):
            for template in _templates(imports.source_of(path).texts, templates):
                digests[template.relative_to(root).as_posix()] = imports.short(template.read_bytes())
    return dict(sorted(digests.items()))


def _templates(names: Collection[str], templates: Mapping[str, Path]) -> Iterator[Path]:
    """Yield the ``templates`` (name -> file) with these ``names``, and the templates that they name."""
    for name in templates.keys() & names:
        yield templates[name]
        yield from _templates(re.findall(r'"([\w.]+)"', templates[name].read_text(encoding="utf-8")), templates)


def unfollowed(plan: Plan) -> Callable[[], None]:
    """Return ``unfollowed_by`` for the modules and files of ``of_variant(plan)``."""
    return unfollowed_by(modules_of_the_user(plan), plan.train, files_read(plan))


def unfollowed_by(named: Set[str], section: Fetch | Train, files: Iterable[Path]) -> Callable[[], None]:
    """Return a check that raises Unfollowed if the user's code uses one of the user's own files without a digest: a
    module to which no import leads from the modules ``named``, or a file that it opened for reading and that is not in
    ``files``.

    The user's own files are in the work tree or in a package that ``named`` names. What was used before this call, for
    example by tests, does not count. Python does not report files that a library opens in C or Rust. In a copy of the
    gate, the check also refuses modules and files of the original work tree, which base and head would share.
    ``section``: where a person lists files.
    """
    before, in_copy = set(sys.modules), imports.in_copy()
    packages = {module.partition(".")[0] for module in named}
    followed = {path.resolve() for path in (*(path for _, path in imports.followed(named)), *files)}
    if named:
        _add_hook(_note_opened)
    _packages.update(packages)
    _written.clear()
    start = next(_numbers)

    def check() -> None:
        loaded = ((name, getattr(module, "__file__", None)) for name, module in [*sys.modules.items()])
        # Thousands of modules were loaded before. To make their paths takes a tenth of a second.
        modules = {name: Path(file) for name, file in loaded if file and (in_copy or name not in before)}
        imports.check_copy(modules)
        if not named:
            return
        read = {Path(name) for name, number in [*_opened.items()] if number > start}
        for name in sorted(modules.keys() - before):
            path = modules[name]
            if name.startswith("torch."):  # code that torch.compile generates, in a cache that may be in the checkout
                continue
            own = imports.is_own(path) or (name.partition(".")[0] in packages and not imports.is_installed(path))
            if path.suffix != ".py":
                read.add(path)
            elif own and not path.is_relative_to(PACKAGE) and path.resolve() not in followed:
                raise Unfollowed(
                    f"{name} ({path}) is in use, but no import statement leads to it from {', '.join(sorted(named))}. "
                    f"So changes of {name} would go unnoticed, and old results would count as results of the present "
                    f"code. Write `import {name}` at the top of the file that needs it. If {name} is not in the folder "
                    "of params.yaml, add its folder to PYTHONPATH."
                )
        check_read(read, followed, section)

    return check


def check_read(read: Iterable[Path], known: Set[Path], section: Fetch | Train) -> None:
    """Raise Unfollowed if an input of the job that was ``read`` has no digest, since it is not among the ``known``
    files; or as ``imports.check_copy`` does. ``section``: where a person lists files."""
    inputs = {os.path.relpath(path): path for path in filter(is_input, read)}
    imports.check_copy(inputs)
    if unknown := sorted(name for name, path in inputs.items() if path.resolve() not in known):
        raise Unfollowed(
            f"{unknown[0]} was read by the job's own code, but has no digest. So changes of {unknown[0]} would go "
            "unnoticed, and old results would count as results of the present file. Add what is missing to "
            f"params.yaml, as {key_of(section)}: [{', '.join([*section.files, *unknown])}]."
        )


_opened: dict[str, int] = {}
"""File that the user's code opened for reading -> the number of its latest opening. A file that this process wrote
before (``_written``) is left out."""
_written: set[str] = set()
_numbers = itertools.count(1)
_add_hook = functools.cache(sys.addaudithook)  # a hook stays until the process ends
_packages: set[str] = set()
"""The packages that plans name. What they read counts as read by the user's code, although they are installed."""


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
    return file.startswith("<") or imports.is_installed(file)


def is_input(path: Path) -> bool:
    """True if the file is the user's own, and not one of Python, of a cache, of a tool such as git, or of the prepared
    data, whose digest is known."""
    relative = imports.relative(path, *imports.tops())
    if not relative or not os.path.isfile(path):  # noqa: PTH113  (False for too long a name, such as an argument)
        return False
    if path.is_relative_to(PACKAGE) or imports.is_installed(path):
        return False
    return not imports.is_of_a_tool(relative.parts[:-1]) and not path.is_relative_to(PREPARED.absolute())
