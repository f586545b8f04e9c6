"""Digests of the code that stages and variants run: one digest per file, computed without importing the file.

The digest of a Python file covers its syntax tree without docstrings, so comments, docstrings and formatting do not
change the digest. The files are found by following all import statements, also those inside functions. ``unfollowed``
detects modules of the user that are loaded in another way.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import ConfigError, PipelineError
from pipeline.params import outside, requested
from pipeline.plans import Plan

PACKAGE = Path(__file__).parent.parent

FOUND_AS_VALUES = ("pipeline.errors", "pipeline.params", "pipeline.plans", "pipeline.environment", "pipeline.cli")
"""Modules that get no digest, and whose imports are not followed. Instead, the values that they produce are recorded:
plans, settings of stages and the environment's hash. So a changed text about a technique changes no digest."""

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
    imports, and the configuration files of models of ``transformers``."""
    own = (each.implementation.partition(".")[0] for each in requested(plan.applied))
    modules = {*(f"pipeline.techniques.{name}" for name in own if name), *_of_the_user(plan)}
    return _digests(modules) | {name: _short(Path(name).read_bytes()) for name in sorted(_configurations(plan))}


def _configurations(plan: Plan) -> Iterator[str]:
    for each in (plan.train, plan.applied.distillation):
        name = str(each.model_options.get("config")) if each and each.model == "transformers" else ""
        if Path(name).is_file():  # building the model reports a missing file
            yield name


def _of_the_user(plan: Plan) -> set[str]:
    """Return the modules that the plan names: the modules of the user's factories, and of other packages'
    techniques."""
    taught_by = plan.applied.distillation
    named = (plan.train.task, plan.train.model, plan.train.loss, plan.train.metric, taught_by and taught_by.model)
    factories = (name.partition(":")[0] for name in named if name and ":" in name)
    return {*factories, *(outside.module_of(name) for name in plan.applied.extra)}


class Unfollowed(PipelineError):
    """One of the user's own modules is in use, but has no digest, so changes of this module would go unnoticed."""


def unfollowed(plan: Plan) -> Callable[[], None]:
    """Return a check that raises Unfollowed if one of the user's own modules is loaded but not in ``of_variant(plan)``,
    for example because `importlib` loaded it. The user's own modules are in the current directory or in a package that
    the plan names. Modules loaded before this call, such as tests, do not count."""
    before, named = set(sys.modules), _of_the_user(plan)
    packages = {module.partition(".")[0] for module in named}
    followed = {path.resolve() for _, path in _files(named)}

    def check() -> None:
        for name in sorted(sys.modules.keys() - before if named else ()):
            path = Path(getattr(sys.modules[name], "__file__", None) or "")
            if name.startswith("torch."):  # code that torch.compile generates, in a cache that may be in the checkout
                continue
            own = _is_own(path) or (name.partition(".")[0] in packages and not _is_installed(path))
            if own and path.suffix == ".py" and not path.is_relative_to(PACKAGE) and path.resolve() not in followed:
                raise Unfollowed(
                    f"{name} ({path}) is in use, but no import statement leads to it from {', '.join(sorted(named))}. "
                    f"So changes of {name} would go unnoticed, and old results would count as results of the present "
                    f"code. Write `import {name}` at the top of the file that needs it. If {name} is not in the folder "
                    "of params.yaml, add its folder to PYTHONPATH."
                )

    return check


def _is_own(path: Path) -> bool:
    return path.is_relative_to(Path.cwd()) and not _is_installed(path)


def _is_installed(path: Path) -> bool:
    """Return True if the file belongs to Python or to an installed package, wherever the package is."""
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return True
    return any(path.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def _digests(modules: Iterable[str]) -> dict[str, str]:
    """Return file -> digest for ``modules``, everything they import, and the templates of this package's modules."""
    found: dict[str, str] = {}
    for root, path in _files(modules):
        found[path.relative_to(root).as_posix()] = _source(path).digest
        if path.is_relative_to(PACKAGE):
            for template in path.parent.glob(f"{path.stem}.html"):  # the template that the module fills in
                found[template.relative_to(root).as_posix()] = _short(template.read_bytes())
    return dict(sorted(found.items()))


def _files(modules: Iterable[str]) -> Iterator[tuple[Path, Path]]:
    """Yield (root, file) of ``modules`` and everything they import. A file counts if it is in the current directory, in
    the folder that contains this package, or in any package that ``modules`` names."""
    named = {module.partition(".")[0] for module in modules}
    anywhere = (Path.cwd(), PACKAGE.parent, *map(Path, sys.path))
    here = (*anywhere[:2], *filter(_is_own, anywhere[2:]))
    waiting, seen = set(modules), set[str]()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        waiting |= {module[:end] for end, letter in enumerate(module) if letter == "."} - seen
        if any(f"{module}.".startswith(f"{name}.") for name in FOUND_AS_VALUES):
            continue
        if located := _located(module, anywhere if module.partition(".")[0] in named else here):
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
    tree, imports = _tree(path), []
    for node in ast.walk(tree):
        imports += _imported(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return _Source(_short(ast.dump(tree).encode()), imports)


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
