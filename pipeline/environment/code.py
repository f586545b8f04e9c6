"""Digests of the code that stages and variants run, by file, read from its source without importing it.

A digest is of a file's syntax tree without docstrings, so comments, docstrings and formatting change none. Which files
count is the static closure of imports, wherever in a file they stand.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import ConfigError
from pipeline.files import write_text
from pipeline.params import asked, outside
from pipeline.plans import Plan

PACKAGE = Path(__file__).parent.parent

FOUND_AS_VALUES = ("pipeline.errors", "pipeline.params", "pipeline.plans", "pipeline.environment", "pipeline.cli")
"""What enters no digest, nor what it imports, because what it finds enters as values: plans, settings of stages and the
environment's hash. The texts that describe techniques are among them."""

MEMO = Path(".cache/code.json")

COMMANDS_STARTED = {"bench": ("arms",)}
"""Stage -> the commands that its own starts as processes."""


def of_stage(stage: str) -> dict[str, str]:
    """File -> digest, of what the stage's command runs whatever the variant: of cli.py, what its function imports."""
    path = PACKAGE / "cli.py"
    names = {f"_{command}" for command in (stage, *COMMANDS_STARTED.get(stage, ()))}
    functions = [
        node for node in _tree(path, path.read_bytes()).body if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    imports = [found for each in functions for node in ast.walk(each) for found in _imported(node)]
    return _digests(set(_imports(imports, "pipeline.cli", is_package=False)))


def of_variant(plan: Plan) -> dict[str, str]:
    """File -> digest, of what the variant runs beyond that: its techniques, and what the user's own modules import."""
    own = (each.hooks.partition(".")[0] for each in asked(plan.applied))
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
        roots = (Path.cwd(), PACKAGE.parent, *(map(Path, sys.path) if module.partition(".")[0] in named else ()))
        if (located := _located(module, roots)) is None:
            continue
        root, path = located
        source = _source(path)
        found[path.relative_to(root).as_posix()] = source.digest
        if path.is_relative_to(PACKAGE):
            for template in path.parent.glob(f"{path.stem}.html"):  # which it fills in
                found[template.relative_to(root).as_posix()] = _short(template.read_bytes())
        waiting |= set(_imports(source.imports, module, is_package=path.name == "__init__.py")) - seen
    return dict(sorted(found.items()))


@functools.cache  # stages share most modules
def _located(module: str, roots: tuple[Path, ...]) -> tuple[Path, Path] | None:
    """The first root that has the module, and its file there."""
    for root in roots:
        stem = root.joinpath(*module.split("."))
        for path in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
            if path.is_file():
                return root, path
    return None


class _Source(NamedTuple):
    digest: str
    imports: list[tuple[int, str, list[str]]]
    """Of each statement that imports, wherever it stands: level, module and names. ``import a`` has no names."""


@functools.cache
def _source(path: Path) -> _Source:
    content = path.read_bytes()
    key = _short(content + sys.version.encode())
    _used[key] = _memo().get(key) or list(_read(path, content))
    return _Source(*_used[key])


def _read(path: Path, content: bytes) -> _Source:
    tree, imports = _tree(path, content), []
    for node in ast.walk(tree):
        imports += _imported(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return _Source(_short(ast.dump(tree).encode()), imports)


def _tree(path: Path, content: bytes) -> ast.Module:
    try:
        return ast.parse(content, filename=str(path))
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise ConfigError(f"{path}, which a stage would run, is no Python: {error}.") from None


def _imported(node: ast.AST) -> list[tuple[int, str, list[str]]]:
    if isinstance(node, ast.Import):
        return [(0, alias.name, []) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [(node.level, node.module or "", [alias.name for alias in node.names])]
    return []


@functools.cache
def _memo() -> dict[str, Any]:
    """What was read before, by the digest of a file's bytes: reading all files anew takes most of a second."""
    try:
        found = json.loads(MEMO.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    whole = isinstance(found, dict) and all(isinstance(each, list) and len(each) == 2 for each in found.values())
    return found if whole else {}


_used: dict[str, list[Any]] = {}
"""Of this process: what it will keep."""


def remember() -> None:
    """Keep what was read now, and nothing else, for the next process; where nothing can be written, nothing."""
    with suppress(OSError):
        if _memo().keys() != _used.keys():
            write_text(MEMO, json.dumps(_used, sort_keys=True))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _imports(imports: Iterable[tuple[int, str, list[str]]], module: str, *, is_package: bool) -> Iterator[str]:
    """Dotted names that ``module`` so imports. Of ``from a import b`` both: b may be a module or not."""
    for level, base, names in imports:
        if level:
            parts = module.split(".")
            kept = parts[: len(parts) - level + is_package]
            base = ".".join([*kept, *filter(None, [base])])
        yield base
        yield from (f"{base}.{name}" for name in names)
