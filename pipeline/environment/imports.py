"""Follow the import statements of a Python file, also those inside functions, without importing it.

Only files of the user and of this package are followed: those in the work tree, in the folder that contains this
package, or in a package that a plan names. The same question, whose a file is, decides which opened files are inputs of
a job (``code.unfollowed``).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import ConfigError, PipelineError

PACKAGE = Path(__file__).parent.parent

FOUND_AS_VALUES = (
    *("pipeline.errors", "pipeline.params", "pipeline.plans", "pipeline.environment", "pipeline.cli"),
    "pipeline.results.figures",
)
"""Modules that get no digest, and whose imports are not followed. Instead, the values that they produce are recorded:
plans, settings of stages, declared figures and the environment's hash. So a changed text about a technique changes no
digest."""

GATE_COPY = Path(".dvc", "gate-copy")
"""File in each of the gate's two copies of the project: the top of the copy, and the top of the original repository."""

TOOLS = {"__pycache__", ".cache", ".dvc", ".git", ".hypothesis", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache",
         ".ruff_cache", ".venv"}  # fmt: skip
"""Folders of tools, whose files are no inputs of a job."""

_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))

Import = tuple[int, str, list[str]]
"""Level, module and names of an import statement. ``import a`` has no names."""


class Unfollowed(PipelineError):
    """The user's code uses a file that has no digest, so changes of this file would go unnoticed."""


def followed(modules: Collection[str], imported: Iterable[str] = ()) -> Iterator[tuple[Path, Path]]:
    """Yield (root, file) of ``modules``, of ``imported``, and of everything they import. A file counts if it is in the
    work tree, in the folder that contains this package, or in any package that ``modules`` names."""
    named = {module.partition(".")[0] for module in modules}
    anywhere = search_path()
    own = tuple(dict.fromkeys((*anywhere[:2], *filter(is_own, anywhere[2:]))))
    waiting, seen = {*modules, *imported}, set[str]()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        waiting |= {module[:end] for end, letter in enumerate(module) if letter == "."} - seen
        if any(f"{module}.".startswith(f"{name}.") for name in FOUND_AS_VALUES):
            continue
        if location := located(module, anywhere if module.partition(".")[0] in named else own):
            check_copy({module: location[1]})
            yield location
            is_package = location[1].name == "__init__.py"
            waiting |= set(names_in([source_of(location[1])], module, is_package=is_package)) - seen


def search_path() -> tuple[Path, ...]:
    """Return the folders in which a module may be: the work tree, the folder of this package, and Python's own."""
    return (Path.cwd(), PACKAGE.parent, *map(Path, sys.path))


@functools.cache  # stages share most modules
def located(module: str, roots: tuple[Path, ...]) -> tuple[Path, Path] | None:
    """Return the first root that has the module, and the module's file there; None if no root has it."""
    for root in roots:
        stem = root.joinpath(*module.split("."))
        for path in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
            if path.is_file():
                return root, path
    return None


class Source(NamedTuple):
    digest: str
    imports: list[Import]
    """Those of all import statements, at any place in the file."""
    texts: frozenset[str]
    """All string literals of the file, by which it may name a template."""


@functools.cache
def source_of(path: Path) -> Source:
    return source_of_tree(tree_of(path))


def source_of_tree(tree: ast.AST) -> Source:
    """Read ``tree`` without its docstrings, in one pass, because each `dvc repro` reads all files."""
    imports, texts, digested = list[Import](), set[str](), list[str]()
    waiting: list[Any] = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, ast.AST):
            digested.append(type(value).__name__)
            imports += _imported(value)
            waiting += [getattr(value, field, None) for field in value._fields if field != "ctx"]
        elif isinstance(value, list):
            kept = [item for item in value if not is_text(item)]
            digested.append(str(len(kept)))
            waiting += kept
        else:
            digested.append(repr(value))
            if isinstance(value, str):
                texts.add(value)
    return Source(short("\n".join(digested).encode()), imports, frozenset(texts))


def tree_of(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise ConfigError(f"{path}, which a stage would run, is not valid Python: {error}.") from None


def _imported(node: ast.AST) -> list[Import]:
    if isinstance(node, ast.Import):
        return [(0, alias.name, []) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [(node.level, node.module or "", [alias.name for alias in node.names])]
    return []


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def names_in(sources: Iterable[Source], module: str, *, is_package: bool = False) -> Iterator[str]:
    """Yield the dotted names that ``sources``, parts of ``module``, import. ``from a import b`` yields a and a.b, as b
    may be a module."""
    for level, base, names in (statement for source in sources for statement in source.imports):
        if level:
            parts = module.split(".")
            kept = parts[: len(parts) - level + is_package]
            base = ".".join([*kept, *filter(None, [base])])
        yield base
        yield from (f"{base}.{name}" for name in names)


def tops() -> tuple[Path, Path]:
    """Return the top of the work tree and the top of its repository. They differ only in a copy of the gate. Without
    git, both are the current directory."""
    if GATE_COPY.is_file():
        work_tree, repository = GATE_COPY.read_text(encoding="utf-8").splitlines()
        return Path(work_tree), Path(repository)
    current = Path.cwd()
    top = next((folder for folder in (current, *current.parents) if (folder / ".git").exists()), current)
    return top, top


def relative(path: Path, *folders: Path) -> Path | None:
    """Return ``path``, or the file to which its links lead, relative to the first of ``folders`` that contains it."""
    pairs = ((file, top) for file in (path, path.resolve()) for top in folders)
    return next((file.relative_to(top) for file, top in pairs if file.is_relative_to(top)), None)


def is_installed(path: Path | str) -> bool:
    """Return True if the file belongs to Python or to an installed package, wherever the package is."""
    folder = f"{path}{os.sep}"
    return folder.startswith(_LIBRARIES) or any(name in os.sep + folder for name in _INSTALLED)


def is_of_a_tool(folders: Collection[str]) -> bool:
    return not TOOLS.isdisjoint(folders) or any(name.endswith((".egg-info", ".dist-info")) for name in folders)


def is_own(path: Path) -> bool:
    """Return True if the file is in the work tree, and not of an installed package."""
    return relative(path, tops()[0]) is not None and not is_installed(path)


def in_copy() -> bool:
    """True if this is a copy of the gate."""
    work_tree, repository = tops()
    return work_tree != repository


def check_copy(files: Mapping[str, Path]) -> None:
    """Raise Unfollowed if this is a copy of the gate, but one of ``files`` (name -> path, links are resolved) is a file
    of the original work tree."""
    work_tree, repository = tops()
    for name, path in files.items() if in_copy() else ():
        real = path.resolve()
        shared = real.is_relative_to(repository) and not is_of_a_tool(real.relative_to(repository).parts)
        if shared and not real.is_relative_to(work_tree) and not is_installed(real):
            raise Unfollowed(
                f"even in a copy of the project, {name} comes from the original work tree ({real}), so base and head "
                "would share it: remove the work tree from PYTHONPATH, uninstall the package that was installed from "
                "it (pip uninstall), or replace absolute paths and links into the work tree by relative ones."
            )
