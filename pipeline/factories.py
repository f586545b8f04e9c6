"""Finds and calls the user's own functions, which params.yaml names as ``module:function``."""

from __future__ import annotations

import atexit
import gc
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError, did_you_mean, own_place


def find(name: str, key: str, returns: str, *, example: str, error: type[PipelineError]) -> Callable[..., Any]:
    """Return the function that ``name`` (``module:function``) names, from an installed module or the current directory.

    Adds the current directory to ``sys.path``. Raises ``error`` if there is no such function. For the messages:
    ``key`` is the key in params.yaml, and ``returns`` is the expected return value in words.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or module_name.startswith(".") or not attribute:
        raise error(f"{key}: found {name!r}; expected module:function, such as {example}.")
    folder = str(Path.cwd())
    if folder not in sys.path:
        # Permanently, because multiprocessing passes sys.path to workers, which import the module to unpickle a model.
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
        atexit.register(gc.unfreeze)  # so that Python's end collects its objects, which writes out their files
    except ImportError as caught:
        raise error(f"{key}: found {name!r}, but importing {module_name} failed: {caught}") from caught
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, dir(module))
        raise error(f"{key}: found {name!r}, but {module.__file__} has no {attribute!r}.{hint}")
    factory = getattr(module, attribute)
    if not callable(factory):
        raise error(f"{key}: found {name!r}, which is {factory!r}; expected a function that returns {returns}.")
    function: Callable[..., Any] = factory
    return function


def library(name: str, user: str, error: type[PipelineError]) -> Any:
    """Return the module ``name`` of a library that only some data and models need. Raises ``error`` if the library is
    missing; the message begins with ``user``, which says what needs the library."""
    try:
        return importlib.import_module(name)
    except ImportError as caught:
        raise error(f"{user}, but {name} cannot be imported ({caught}): pip install '.[text]'.") from None


def call(
    factory: Callable[..., Any],
    name: str,
    key: str,
    options: Mapping[str, Any],
    *,
    error: type[PipelineError],
    **given: Any,
) -> Any:
    """Call ``factory``, which ``key`` of params.yaml names as ``name``, with the ``given`` arguments and ``options``.

    Raises ``error`` if the factory's signature does not accept these arguments, or the factory raises an exception.
    """
    if both := ", ".join(sorted(given.keys() & options.keys())):
        raise error(f"{key}_options: found {both}, which {name} gets from the data; remove {both} from {key}_options.")
    signature = inspect.signature(factory)
    try:
        signature.bind(**given, **options)
    except TypeError as mismatch:
        named = ", ".join(sorted(options)) or "none"
        raise error(
            f"{key}: {name} is called with {', '.join(given)} and {key}_options ({named}), but its signature is "
            f"{signature}: {mismatch}."
        ) from None
    with naming(name, key, error):
        return factory(**given, **options)


@contextmanager
def naming(name: str, key: str, error: type[PipelineError]) -> Iterator[None]:
    """Turn an exception in the block, which calls the user's function ``name``, into ``error``, which names the line.
    PipelineErrors stay as they are."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as failure:
        place = own_place("".join(traceback.format_exception(failure))) or "in an installed package"
        raise error(f"{key}: {name} raised {type(failure).__name__}: {failure} ({place})") from failure
