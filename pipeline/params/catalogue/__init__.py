"""What is known of every technique before any runs: how it is asked for, what it changes, what it cannot run with.

The techniques themselves are classes under ``pipeline/techniques``, one for each entry here, of the same name; fsdp's
own options are a part of its class. Other packages can bring more (``outside``). This half imports no torch, so that a
combination that cannot be is refused in the first second.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from pydantic import ValidationError

from pipeline.errors import ConfigError
from pipeline.params import outside
from pipeline.params.catalogue.base import Changes, Entry
from pipeline.params.catalogue.communication import COMMUNICATION
from pipeline.params.catalogue.data_loading import DATA_LOADING
from pipeline.params.catalogue.memory import MEMORY
from pipeline.params.catalogue.parallelism import PARALLELISM
from pipeline.params.catalogue.precision import PRECISION
from pipeline.params.catalogue.speed import SPEED
from pipeline.params.sections import Variant

GROUPS = {
    "Parallelism": PARALLELISM,
    "Communication": COMMUNICATION,
    "Precision": PRECISION,
    "Memory": MEMORY,
    "Speed": SPEED,
    "Data loading": DATA_LOADING,
}
CATALOGUE = tuple(replace(each, group=group) for group, members in GROUPS.items() for each in members)
"""Every technique that the package knows, in the order in which people read of them."""


def entries() -> tuple[Entry, ...]:
    """All that can be asked for here: the package's own, and those that other packages bring. Raises ConfigError."""
    return (*CATALOGUE, *(_from_outside(name) for name in outside.names()))


def entry(name: str) -> Entry:
    """The entry of that name. Raises ConfigError if there is none, or the package that brings it is broken."""
    return _BY_NAME.get(name) or _from_outside(name)


def asked(variant: Variant) -> tuple[Entry, ...]:
    """What the variant applies, in the catalogue's order. Raises ConfigError for an extra that is not installed."""
    own = (each for each in CATALOGUE if each.asked(variant))
    return (*own, *(_from_outside(name) for name in variant.extra))


def techniques(variant: Variant) -> dict[str, tuple[str, ...]]:
    """What is applied beyond single-device fp32, by the name people use -> the keys that ask for it.

    In the order of the variant's fields. What needs a parallelism goes with it. Packages that bring an extra are not
    asked: the variant may be one that a result names.

    >>> techniques(Variant(parallelism="ddp", processes=2, channels_last=True, gradient_accumulation=4))
    {'ddp': ('parallelism', 'processes', 'replicas', 'schedule'), 'channels_last': ('channels_last',), \
'gradient_accumulation=4': ('gradient_accumulation',)}
    """
    order = list(Variant.model_fields)
    applied = sorted((each for each in CATALOGUE if each.asked(variant)), key=lambda each: order.index(each.key))
    options = tuple(each.key for each in applied if each.needs)
    details = {"parallelism": ("processes", "replicas", "schedule", *options), "data_loading": ("loader_workers",)}
    found = {each.label(variant): (each.key, *details.get(each.key, ())) for each in applied}
    return found | ({"+".join(variant.extra): ("extra",)} if variant.extra else {})  # they come and go together


def exclusions(technique: Entry, among: Sequence[Entry] = CATALOGUE) -> dict[str, str]:
    """Names of the techniques that ``technique`` cannot run with -> why, whichever of the two says it."""
    apart = {other.name: _why_apart(technique, other) or _why_apart(other, technique) for other in among}
    others = {other.name: other.excludes[technique.name] for other in among if technique.name in other.excludes}
    return {name: reason for name, reason in apart.items() if reason} | others | dict(technique.excludes)


def _why_apart(technique: Entry, other: Entry) -> str | None:
    """Why the two cannot share a parallelism, of which the technique needs one; None if they can, or it needs none."""
    if not technique.needs or any(_runs_in(other, entry(name)) for name in technique.needs):
        return None
    needed = f"{technique.name} needs parallelism: {' or '.join(technique.needs)}"
    return needed if other.key == "parallelism" else f"{needed}, with which {other.name} cannot run"


def _runs_in(technique: Entry, parallelism: Entry) -> bool:
    if technique.key == "parallelism":
        return technique.name == parallelism.name
    if technique.needs and parallelism.name not in technique.needs:
        return False
    return technique.name not in parallelism.excludes and parallelism.name not in technique.excludes


def misplaced(variant: Variant) -> dict[str, str]:
    """Key -> what is wrong with it, for what needs another parallelism than the variant's."""
    return {
        each.key: f"found {each.value(variant)!r} with parallelism {variant.parallelism!r}; it needs "
        f"{' or '.join(map(repr, each.needs))}: set that, or take {each.key} out."
        for each in asked(variant)
        if each.needs and variant.parallelism not in each.needs
    }


def unasked(variant: Variant, technique: Entry) -> dict[str, Any]:
    """The key that asks for the technique, with the value with which the variant does not."""
    if technique.name in variant.extra:
        return {"extra": {name: options for name, options in variant.extra.items() if name != technique.name}}
    return {technique.key: getattr(Variant(), technique.key)}


def without(variant: Variant, techniques: Iterable[Entry]) -> Variant:
    """The variant with these techniques not applied. The rest need not be able to run alone."""
    for technique in techniques:
        variant = variant.model_copy(update=unasked(variant, technique))
    return variant


def contradiction(variant: Variant) -> str | None:
    """Why the variant's techniques cannot run together; None if they can."""
    together = asked(variant)
    for one in together:
        for other in together:
            if other.name in one.excludes:
                return (
                    f"found {one.key} {one.value(variant)!r} with {other.key} {other.value(variant)!r}, which exclude "
                    f"each other: {one.excludes[other.name]}; take one of them out."
                )
    return None


def extra_problems(variant: Variant) -> list[str]:
    """What is wrong with the variant's techniques of other packages, by key: not installed, or with other options."""
    return [problem for name, options in variant.extra.items() for problem in _problems_of(name, options)]


def _problems_of(name: str, options: Mapping[str, Any]) -> list[str]:
    try:
        model = _from_outside(name).options
    except ConfigError as error:
        return [f"extra.{name}: {error}"]
    if model is None:
        return [f"extra.{name}: found {dict(options)}, but it takes no options; write {name}: {{}}"] if options else []
    try:
        model.model_validate(options)
    except ValidationError as error:
        return [
            f"extra.{'.'.join(map(str, (name, *each['loc'])))}: found {each['input']!r}; {each['msg']}. "
            f"Options of {name}: {', '.join(model.model_fields) or 'none'}."
            for each in error.errors(include_url=False)
        ]
    return []


@functools.cache
def _from_outside(name: str) -> Entry:
    found = outside.load(outside.CATALOGUE, name)
    if not isinstance(found, Entry) or found.name != name:
        raise ConfigError(f"the entry point {name!r} of the group {outside.CATALOGUE} is {found!r}, not its Entry.")
    where = f"the entry point {name!r} of the group {outside.CATALOGUE}"
    if found.changes not in get_args(Changes):
        raise ConfigError(f"{where}: found changes {found.changes!r}; expected one of {', '.join(get_args(Changes))}.")
    if found.key != "extra":
        raise ConfigError(f"{where}: found setting {found.setting!r}; expected extra: {{{name}: ...}}.")
    if name in _BY_NAME:
        raise ConfigError(f"an installed package brings a technique {name!r}, which is the name of a built-in one.")
    return found


_BY_NAME = {each.name: each for each in CATALOGUE}
