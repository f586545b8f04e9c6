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
        _own(each.implementation) if each.implementation else _from_outside(each.name)
        for each in in_effect(plan.applied)
        if each.implementation or each.key == "extra"
    ]


def _own(implementation: str) -> type[Technique]:
    module, _, attribute = implementation.partition(".")
    found: type[Technique] = getattr(importlib.import_module(f"pipeline.techniques.{module}"), attribute)
    return found


def _from_outside(name: str) -> type[Technique]:
    found = outside.load(outside.TECHNIQUES, name)
    if not (isinstance(found, type) and issubclass(found, Technique) and found.name == name):
        raise ConfigError(
            f"the entry point {name!r} of the group {outside.TECHNIQUES} is {found!r}; expected a class derived from "
            f"pipeline.techniques.Technique with {name!r} as its `name`."
        )
    return found
