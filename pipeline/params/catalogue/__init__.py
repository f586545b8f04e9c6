"""The catalogue: for every technique, its key, what it changes, and which techniques it cannot run with.

Each group of techniques has its own file. The file declares the group's settings of a variant, and an ``Entry`` for
each technique. In the schema, a setting's description also says what its techniques do. So the docstring under a
setting says only what no technique says. The ``Entry`` names the class under ``pipeline/techniques`` that implements
the technique. Other packages can add techniques (``outside``). The catalogue does not import torch, so an impossible
combination is refused in the first second.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

from pydantic import Field, ValidationError

from pipeline.errors import ConfigError
from pipeline.params import outside
from pipeline.params.catalogue.base import Changes, Entry, Layer
from pipeline.params.catalogue.communication import COMMUNICATION, CommunicationSettings
from pipeline.params.catalogue.data_loading import DATA_LOADING, DataLoadingSettings
from pipeline.params.catalogue.memory import MEMORY, MemorySettings
from pipeline.params.catalogue.models import MODELS, ModelSettings
from pipeline.params.catalogue.parallelism import PARALLELISM, ParallelismSettings
from pipeline.params.catalogue.precision import PRECISION, PrecisionSettings
from pipeline.params.catalogue.speed import SPEED, SpeedSettings
from pipeline.params.sections import Section

GROUPS = {
    "Models": MODELS,
    "Parallelism": PARALLELISM,
    "Communication": COMMUNICATION,
    "Precision": PRECISION,
    "Memory": MEMORY,
    "Speed": SPEED,
    "Data loading": DATA_LOADING,
}
CATALOGUE = tuple(replace(each, group=group) for group, members in GROUPS.items() for each in members)
"""Every technique of this package, in the order in which lists show them."""


class Variant(
    DataLoadingSettings,
    MemorySettings,
    SpeedSettings,
    CommunicationSettings,
    PrecisionSettings,
    ParallelismSettings,
    ModelSettings,
):  # the last base's fields come first
    """One way to train the job: a choice of techniques. An empty variant trains on one device in fp32."""

    extra: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Techniques of other installed packages: name -> its options."""


def entries() -> tuple[Entry, ...]:
    """Return all available techniques, this package's first. Raises ConfigError if another package's entry is
    broken."""
    return (*CATALOGUE, *(_from_outside(name) for name in outside.names()))


def entry(name: str) -> Entry:
    """Return the technique's entry. Raises ConfigError if there is no such technique, or its package is broken."""
    return _BY_NAME.get(name) or _from_outside(name)


def requested(variant: Variant) -> tuple[Entry, ...]:
    """Return the variant's techniques, in the catalogue's order. Raises ConfigError if one is not installed."""
    own = (each for each in CATALOGUE if each.requested_by(variant))
    return (*own, *(_from_outside(name) for name in variant.extra))


def in_order(variant: Variant) -> list[Entry]:
    """Return the variant's techniques in the order in which they apply: by layer, then in the catalogue's order."""
    return sorted(requested(variant), key=lambda each: get_args(Layer).index(each.layer))


def in_effect(variant: Variant) -> list[Entry]:
    """Return the techniques that have an effect in the variant's training, in the order in which they apply."""
    parallelism = variant.parallelism
    return [
        each
        for each in in_order(variant)
        if parallelism not in each.done_by and (not each.needs or parallelism in each.needs)
    ]


def keys(technique: Entry) -> tuple[str, ...]:
    """Return the key that asks for the technique, and the keys that configure it."""
    details = (key for each in CATALOGUE if each.key == technique.key for key in each.details)
    return (technique.key, *dict.fromkeys(details))


def techniques(variant: Variant) -> dict[str, tuple[str, ...]]:
    """Return the variant's techniques: label -> the keys that ask for the technique or configure it.

    Techniques are in the order of the variant's fields. The keys of a parallelism include the keys of the techniques
    that need this parallelism. Packages of extra techniques are not loaded, because a variant from a stored result may
    name packages that are not installed.

    >>> techniques(Variant(parallelism="ddp", processes=2, channels_last=True, gradient_accumulation=4))
    {'ddp': ('parallelism', 'processes', 'replicas', 'schedule'), 'channels_last': ('channels_last',), \
'gradient_accumulation=4': ('gradient_accumulation',)}
    """
    order = list(Variant.model_fields)
    applied = sorted((each for each in CATALOGUE if each.requested_by(variant)), key=lambda each: order.index(each.key))
    options = {"parallelism": tuple(each.key for each in applied if each.needs)}
    found = {each.label(variant): (*keys(each), *options.get(each.key, ())) for each in applied}
    return found | ({"+".join(variant.extra): ("extra",)} if variant.extra else {})  # all extras count as one technique


def exclusions(technique: Entry, among: Sequence[Entry] = CATALOGUE) -> dict[str, str]:
    """Return name -> reason for each technique that cannot run with ``technique``. Either technique may declare the
    exclusion."""
    reasons = {
        other.name: technique.excluding(other)
        or other.excluding(technique)
        or _why_apart(technique, other)
        or _why_apart(other, technique)
        for other in among
    }
    return {name: reason for name, reason in reasons.items() if reason}


def _why_apart(technique: Entry, other: Entry) -> str | None:
    """Return why ``other`` cannot run in any parallelism that ``technique`` needs; None if it can."""
    if not technique.needs or any(_runs_in(other, entry(name)) for name in technique.needs):
        return None
    needed = f"{technique.name} needs parallelism: {' or '.join(technique.needs)}"
    return needed if other.key == "parallelism" else f"{needed}, but {other.name} cannot run with this parallelism"


def _runs_in(technique: Entry, parallelism: Entry) -> bool:
    if technique.key == "parallelism":
        return technique.name == parallelism.name
    if technique.needs and parallelism.name not in technique.needs:
        return False
    return not technique.excluding(parallelism) and not parallelism.excluding(technique)


def misplaced(variant: Variant) -> dict[str, str]:
    """Return key -> problem, for each key that needs a technique or a parallelism that the variant does not have."""
    applied, plain = requested(variant), Variant()
    needed = {
        each.key: ("parallelism", list(each.needs))
        for each in applied
        if each.needs and variant.parallelism not in each.needs
    }
    used = {key for each in applied for key in each.details}
    for each in CATALOGUE:
        for key in each.details:
            if key not in used and getattr(variant, key) != getattr(plain, key):
                needed.setdefault(key, (each.key, []))[1].append(each.setting.partition(": ")[2])
    return {
        key: f"found {getattr(variant, key)!r}; {key} needs {other} {' or '.join(map(repr, values))}: set {other}, or "
        f"remove {key}."
        for key, (other, values) in needed.items()
    }


def without(variant: Variant, techniques: Iterable[Entry]) -> Variant:
    """Return the variant without these techniques. A remaining technique may need a removed one."""
    plain = Variant()
    for technique in techniques:
        off: dict[str, Any] = {key: getattr(plain, key) for key in keys(technique)}
        if technique.key == "extra":
            off = {"extra": {name: options for name, options in variant.extra.items() if name != technique.name}}
        variant = variant.model_copy(update=off)
    return variant


def contradiction(variant: Variant) -> str | None:
    """Return why the variant's techniques cannot run together; None if they can."""
    together = requested(variant)
    for one in together:
        for other in together:
            if reason := one.excluding(other):
                return (
                    f"found {one.key} {one.value(variant)!r} with {other.key} {other.value(variant)!r}; the two "
                    f"exclude each other, because {reason}: remove one of them."
                )
    return None


def extra_problems(variant: Variant) -> list[str]:
    """Return the problems of the variant's ``extra`` techniques: missing packages, and invalid options."""
    found = []
    for name, options in variant.extra.items():
        try:
            model = _from_outside(name).options or Section
            model.model_validate(options)
        except ConfigError as error:
            found.append(f"extra.{name}: {error}")
        except ValidationError as error:
            found += [
                f"extra.{'.'.join(map(str, (name, *each['loc'])))}: found {each['input']!r}; {each['msg']}. "
                f"Options of {name}: {', '.join(model.model_fields) or 'none'}."
                for each in error.errors(include_url=False)
            ]
    return found


@functools.cache
def _from_outside(name: str) -> Entry:
    found = outside.load(outside.CATALOGUE, name)
    where = f"the entry point {name!r} of the group {outside.CATALOGUE}"
    if not isinstance(found, Entry):
        raise ConfigError(f"{where} is {found!r}; expected the technique's Entry.")
    expected = {
        "name": (name,),
        "key": ("extra",),
        "implementation": ("",),  # the entry point of the group TECHNIQUES names the class
        "changes": get_args(Changes),
        "layer": get_args(Layer),
    }
    for field, allowed in expected.items():
        if (value := getattr(found, field)) not in allowed:
            raise ConfigError(f"{where}: found {field} {value!r}; expected {' or '.join(map(repr, allowed))}.")
    if name in _BY_NAME:
        raise ConfigError(
            f"{where}: a built-in technique has this name; uninstall the package, or rename its technique."
        )
    return found


_BY_NAME = {each.name: each for each in CATALOGUE}
