"""The classes of the techniques. If a technique has a class, its entry in the catalogue names the class."""

from __future__ import annotations

import importlib

from pipeline.errors import ConfigError
from pipeline.params import outside
from pipeline.params.catalogue import in_effect
from pipeline.plans import Plan
from pipeline.techniques.base import Setup, Stored, Technique

__all__ = ["Setup", "Stored", "Technique", "of_plan"]


def of_plan(plan: Plan) -> list[type[Technique]]:
    """Return the classes of the techniques that the plan applies, in the order in which the techniques apply.

    Raises ConfigError if another package's technique cannot be loaded, or is not a class derived from ``Technique``.
    """
    return [
        _own(entry.implementation) if entry.implementation else _from_outside(entry.name)
        for entry in in_effect(plan.applied)
        if entry.implementation or entry.key == "extra"
    ]


def _own(implementation: str) -> type[Technique]:
    module, _, attribute = implementation.partition(".")
    technique: type[Technique] = getattr(importlib.import_module(f"pipeline.techniques.{module}"), attribute)
    return technique


def _from_outside(name: str) -> type[Technique]:
    loaded = outside.load(outside.TECHNIQUES, name)
    if not (isinstance(loaded, type) and issubclass(loaded, Technique) and loaded.name == name):
        raise ConfigError(
            f"the entry point {name!r} of the group {outside.TECHNIQUES} is {loaded!r}; expected a class derived from "
            f"pipeline.techniques.Technique with {name!r} as its `name`."
        )
    return loaded
