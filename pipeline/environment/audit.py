"""Notice which modules and files the user's code uses, and refuse those that have no digest.

Imports that no statement makes are found in ``sys.modules``; files that are read are found by Python's audit hook.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline.environment import code, imports
from pipeline.environment.imports import PACKAGE, Unfollowed
from pipeline.files import PREPARED
from pipeline.params import Fetch, Train
from pipeline.plans import Plan


def unfollowed(plan: Plan) -> Callable[[], None]:
    """Return ``unfollowed_by`` for the modules and files of ``code.of_variant(plan)``."""
    return unfollowed_by(code.modules_of_the_user(plan), plan.train, code.files_read(plan))


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
        for path in sorted(filter(_is_input, read)):
            shown = os.path.relpath(path)
            imports.check_copy({shown: path})
            if path.resolve() not in followed:
                raise Unfollowed(
                    f"{shown} was read by the job's own code, but has no digest. So changes of {shown} would go "
                    "unnoticed, and old results would count as results of the present file. Add the file to "
                    f"params.yaml, as {code.key_of(section)}: [{', '.join([*section.files, shown])}]."
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


def _is_input(path: Path) -> bool:
    """True if the file is the user's own, and not one of Python, of a cache, of a tool such as git, or of the prepared
    data, whose digest is known."""
    relative = imports.relative(path, *imports.tops())
    if not relative or not path.is_file() or path.is_relative_to(PACKAGE) or imports.is_installed(path):
        return False
    return not imports.is_of_a_tool(relative.parts[:-1]) and not path.is_relative_to(PREPARED.absolute())
