"""Digests of the code that stages and variants run, by file, read from its source without importing it.

A digest is of a file's syntax tree without docstrings, so comments, docstrings and formatting change none. Which files
count is the static closure of imports, wherever in a file they stand.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.params import TECHNIQUE_CLASSES, asked, outside
from pipeline.plans import Plan

PACKAGE = Path(__file__).parent.parent

FOUND_AS_VALUES = ("pipeline.errors", "pipeline.params", "pipeline.plans", "pipeline.environment", "pipeline.cli")
"""What enters no digest, nor what it imports, because what it finds enters as values: plans, settings of stages and the
environment's hash. The texts that describe techniques are among them."""

COMMANDS_STARTED = {"bench": ("arms",)}
"""Stage -> the commands that its own starts as processes."""


def of_stage(stage: str) -> dict[str, str]:
    """File -> digest, of what the stage's command runs whatever the variant: of cli.py, what its function imports."""
    cli = _source(PACKAGE / "cli.py")
    names = {f"_{command}" for command in (stage, *COMMANDS_STARTED.get(stage, ()))}
    functions = [node for node in cli.tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    return _digests({name for each in functions for name in _imports(each, "pipeline.cli", is_package=False)})


def of_variant(plan: Plan) -> dict[str, str]:
    """File -> digest, of what the variant runs beyond that: its techniques, and what the user's own modules import."""
    own = (TECHNIQUE_CLASSES.get(each.name, "").partition(".")[0] for each in asked(plan.applied))
    named = (plan.train.model, plan.train.loss, plan.train.metric)
    factories = (name.partition(":")[0] for name in named if ":" in name)
    outsiders = (outside.module_of(name) for name in plan.applied.extra)
    return _digests({*(f"pipeline.techniques.{name}" for name in own if name), *factories, *outsiders})


def _digests(modules: Iterable[str]) -> dict[str, str]:
    """Of ``modules`` and all that they import: what lies in the current directory or beside this package, and, where it
    is installed, what is of a package that ``modules`` names."""
    named = {module.partition(".")[0] for module in modules}
    found: dict[str, str] = {}
    waiting, seen = set(modules), set[str]()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        waiting |= {module[:end] for end, letter in enumerate(module) if letter == "."} - seen
        if any(f"{module}.".startswith(f"{name}.") for name in FOUND_AS_VALUES):
            continue
        roots = [Path.cwd(), PACKAGE.parent, *(map(Path, sys.path) if module.partition(".")[0] in named else ())]
        if (located := _located(module, roots)) is None:
            continue
        root, path = located
        source = _source(path)
        found[path.relative_to(root).as_posix()] = source.digest
        if path.is_relative_to(PACKAGE):
            for template in path.parent.glob(f"{path.stem}.html"):  # which it fills in
                found[template.relative_to(root).as_posix()] = _short(template.read_bytes())
        waiting |= set(_imports(source.tree, module, is_package=path.name == "__init__.py")) - seen
    return dict(sorted(found.items()))


def _located(module: str, roots: Iterable[Path]) -> tuple[Path, Path] | None:
    """The first root that has the module, and its file there."""
    for root in roots:
        stem = root.joinpath(*module.split("."))
        for path in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
            if path.is_file():
                return root, path
    return None


@dataclass(frozen=True)
class _Source:
    tree: ast.Module
    digest: str


@functools.cache
def _source(path: Path) -> _Source:
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise ConfigError(f"{path}, which a stage would run, is no Python: {error}.") from None
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return _Source(tree, _short(ast.dump(tree).encode()))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _imports(node: ast.AST, module: str, *, is_package: bool) -> Iterator[str]:
    """Dotted names that ``node``, of ``module``, imports. Of ``from a import b`` both: b may be a module or not."""
    for each in ast.walk(node):
        if isinstance(each, ast.Import):
            yield from (alias.name for alias in each.names)
        elif isinstance(each, ast.ImportFrom):
            base = each.module or ""
            if each.level:
                parts = module.split(".")
                kept = parts[: len(parts) - each.level + is_package]
                base = ".".join([*kept, *filter(None, [each.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in each.names)
