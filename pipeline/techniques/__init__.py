"""The techniques, a class each, made what they are of a plan. ``TECHNIQUE_CLASSES`` says in which order they apply."""

from __future__ import annotations

import importlib

from pipeline.distributed import World
from pipeline.errors import ConfigError
from pipeline.params import TECHNIQUE_CLASSES, entry, outside
from pipeline.plans import Plan
from pipeline.techniques.base import Checkpointed, Inputs, Stored, Technique

__all__ = ["Checkpointed", "Inputs", "Stored", "Technique", "chosen", "of_plan"]


def of_plan(plan: Plan) -> list[type[Technique]]:
    """The classes of the techniques that the plan applies, in order. Raises ConfigError for a broken one of outside."""
    own = (_own(name) for name in TECHNIQUE_CLASSES if entry(name).asked(plan.applied))
    return [*(each for each in own if each.is_asked(plan)), *map(_from_outside, plan.applied.extra)]


def _own(name: str) -> type[Technique]:
    module, _, attribute = TECHNIQUE_CLASSES[name].partition(".")
    found: type[Technique] = getattr(importlib.import_module(f"pipeline.techniques.{module}"), attribute)
    return found


def chosen(plan: Plan, world: World) -> list[Technique]:
    """The techniques that the plan applies, in order, ready to be set up."""
    return [technique(plan, world) for technique in of_plan(plan)]


def _from_outside(name: str) -> type[Technique]:
    found = outside.load(outside.TECHNIQUES, name)
    if not (isinstance(found, type) and issubclass(found, Technique) and found.name == name):
        raise ConfigError(
            f"the entry point {name!r} of the group {outside.TECHNIQUES} is {found!r}; expected a class derived from "
            "pipeline.techniques.Technique whose name it is."
        )
    return found
