"""Techniques of other installed packages, found by their entry points without importing the packages.

A package declares two entry points with the technique's name. The entry point in the group ``CATALOGUE`` is the
technique's ``Entry``, in a module that must not import torch. The entry point in the group ``TECHNIQUES`` is the
technique's class, derived from ``pipeline.techniques.Technique``.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pipeline.errors import ConfigError

CATALOGUE = "training_performance.catalogue"
TECHNIQUES = "training_performance.techniques"


def names() -> tuple[str, ...]:
    """Return the names of the techniques that other installed packages provide, in alphabetical order."""
    return tuple(sorted(_points(CATALOGUE)))


def package_of(name: str) -> str:
    """Return the name of the distribution that provides the technique ``name``. Raises ConfigError if there is none."""
    dist = _point(TECHNIQUES, name).dist
    assert dist is not None  # entry_points() finds entry points only in distributions
    return dist.name


def module_of(name: str) -> str:
    """Return the module that holds the class of the technique ``name``. Raises ConfigError if it is not installed."""
    return _point(TECHNIQUES, name).module


def load(group: str, name: str) -> Any:
    """Load the entry point ``name`` of ``group``. Raises ConfigError, which names the package, if loading fails."""
    point = _point(group, name)
    try:
        return point.load()
    except Exception as error:
        raise ConfigError(
            f"{_package(point)}: its technique {name!r} cannot be loaded from {point.value}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _point(group: str, name: str) -> EntryPoint:
    point = _points(group).get(name)
    if point is None:
        installed = ", ".join(sorted(_points(group))) or "none"
        raise ConfigError(
            f"no technique {name!r} is installed; the entry points of the group {group} are: {installed}."
        )
    return point


@functools.cache
def _points(group: str) -> dict[str, EntryPoint]:
    """Return the group's entry points by name. Raises ConfigError if two packages provide the same name."""
    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        earlier = points.setdefault(point.name, point)
        if earlier.value != point.value:
            packages = f"{_package(earlier)} and {_package(point)}"
            raise ConfigError(f"{packages} both provide the technique {point.name!r}; uninstall one of them.")
    return points


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value
