"""Read the imports of the package's modules from their source, including imports inside functions."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "pipeline"


@functools.cache
def modules() -> dict[str, Path]:
    """Return dotted name -> file for every module; a package's file is its ``__init__.py``."""
    by_name = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        by_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return by_name


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def imported(node: ast.AST, module: str) -> set[str]:
    """Return the dotted names of the modules that ``node``, a part of ``module``, imports, also by relative names."""
    known = modules()
    imports = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            imports |= {alias.name for alias in inner.names}
        elif isinstance(inner, ast.ImportFrom):
            base = inner.module or ""
            if inner.level:
                package = module if known[module].name == "__init__.py" else module.rpartition(".")[0]
                up = package.split(".")[: len(package.split(".")) - inner.level + 1]
                base = ".".join([*up, *filter(None, [inner.module])])
            names = {f"{base}.{alias.name}" for alias in inner.names}
            imports |= {name if name in known else base for name in names} if base.startswith("pipeline") else {base}
    return imports


def own(names: Iterable[str]) -> set[str]:
    """Return those ``names`` that are modules of the package, and the subpackages that Python imports with them."""
    inside = {name for name in names if name in modules() and name != "pipeline"}
    return inside | {parent for name in inside for parent in _parents(name)}


def _parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    for length in range(2, len(parts)):
        yield ".".join(parts[:length])
