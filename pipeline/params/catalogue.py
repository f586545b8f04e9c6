"""The catalogue: for every technique, its key, what it changes, and which techniques it cannot run with.

``catalogue.yaml`` declares the techniques, ``Variant`` their settings, and ``conditions`` what cannot be said in data.
An ``Entry`` names the class under ``pipeline/techniques`` that implements the technique. Other packages can add
techniques (``outside``). The catalogue does not import torch, so an impossible combination is refused in the first
second.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from pipeline.errors import ConfigError
from pipeline.params import conditions, outside
from pipeline.params.conditions import Machine
from pipeline.params.sections import Section, Train
from pipeline.params.variants import Variant

Changes = Literal["nothing", "rounding", "statistics"]
"""How a technique changes the trained weights. nothing: they are the same, bit for bit. rounding: the same sums are
computed in another order or precision, so the weights agree within a tolerance that the technique's test states.
statistics: gradients or samples differ, so only averages over several runs agree, if at all."""

Layer = Literal["model", "blocks", "parallelism", "compiler", "forward", "step"]
"""Where a technique acts. Layers are applied in this order; within a layer, techniques are applied in the catalogue's
order.

model: the bare model, settings of its process, or the choice of optimizer. blocks: parts of the model. parallelism:
the whole model, which is wrapped or split, and the communication. compiler: the model inside the parallel wrapper.
forward: around the forward pass. step: around the whole step. If two techniques wrap the same part, the later technique
is outermost.
"""

Bound = Literal["arithmetic", "launches", "traffic", "input", "communication"]
"""What a step mostly waits for: the arithmetic units, the host that launches kernels, the device's memory, the next
batch, or other devices."""

COMPILER = "compiler"
"""The entry in ``relies_on`` that stands for the C++ compiler, which torch.compile calls."""

_Named = BeforeValidator(lambda condition: getattr(conditions, condition) if isinstance(condition, str) else condition)
"""In ``catalogue.yaml``, a condition is the name of a function in ``conditions``."""

WhyNot = Annotated[Callable[[Machine, bool], str | None], _Named]
"""(Machine, whether the job runs on GPUs) -> the reason why the technique cannot run on the machine; None if it can."""


class Entry(BaseModel):
    """One technique, or one form of parallelism."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """The technique's name in results and reports."""
    group: str = "Other packages"
    """The heading under which lists show the technique."""
    key: str = "extra"
    """The key of a variant that asks for the technique. ``extra`` for another package's technique, which a variant asks
    for by its name under this key."""
    value: Any = None
    """The value of the key that asks for the technique; None if there is an ``example``."""
    example: Any = None
    """One of the values that ask for the technique, if several do: all but the default and the values of other
    techniques. For another package's technique, an example of its options."""
    tries: tuple[Any, ...] | None = None
    """The values that ``advise`` tries; None: ``value`` or ``example``. Empty for a technique that needs a choice of
    the user's, that only shows what a default gains, or that does nothing within a step."""
    relieves: tuple[Bound, ...] = ()
    """What a step waits for less with this technique."""
    searched_for: tuple[str, ...] = ()
    """Names under which people look for the technique."""
    does: str
    pays: str
    """When the technique pays."""
    costs: str
    source: str
    changes: Changes
    implementation: str = ""
    """The technique's module under ``pipeline/techniques`` and its class: ``module.Class``. A job imports only the
    modules of the techniques that it applies, because some import much of torch. Empty if the technique has no class of
    its own, because the plan, the ``placement`` or a parallelism in ``needs`` does the work. Also empty for another
    package's technique, whose entry point names the class."""
    layer: Layer = "step"
    details: tuple[str, ...] = ()
    """Further keys of a variant, which only configure the technique."""
    excludes: Mapping[str, str] = {}
    """The name of another technique, or a key that several techniques share -> the reason why they cannot run with this
    technique. Only one of the two techniques has to declare the exclusion."""
    needs: tuple[str, ...] = ()
    """The technique needs one of these values of ``parallelism``; empty if it needs no parallelism."""
    why_not: WhyNot = conditions.never
    """Returns why the machine cannot run the technique; None if it can. If it cannot, the plan refuses the variant."""
    emulated: WhyNot = conditions.never
    """Returns why the machine can only emulate the technique; None if no emulation is needed. The emulation is slower
    than training without the technique. ``train.without_native`` decides whether an emulated technique is skipped,
    refused or run."""
    why_not_with: Annotated[Callable[[Train], str | None], _Named] = conditions.never
    """Job -> the reason why the technique cannot be applied to this job on any machine; None if it can."""
    why_not_value: Mapping[str, WhyNot] = {}
    """Value of the key -> a function like ``why_not`` for this value."""
    why_not_beside: Annotated[Callable[[Variant, bool], str | None], _Named] = conditions.never
    """(Variant, whether the job runs on GPUs) -> the reason why the technique cannot run with the variant's other
    settings; None if it can. Used for conditions that ``excludes`` cannot express."""
    done_by: tuple[str, ...] = ()
    """Values of ``parallelism`` that already do the technique's work, so that its class is not used."""
    placement: Literal["resident", "streamed", "dataloader"] | None = None
    """The placement of the training data if the technique is applied; None: ``train.placement`` decides."""
    evaluates_whole: bool = False
    """True if evaluation cannot run the model that a process trains. For example, this model is only one stage, or must
    be averaged with other processes' models. Evaluation then runs the single-device model, with the state that a
    checkpoint would have. ``Technique.for_evaluation`` can change this model."""
    shared_rng: bool = False
    """Whether the processes that hold one model together must draw the same random numbers."""
    max_step_skew: int = 0
    """The largest number of steps by which a process can be ahead of another. It is above 0 if processes do not wait
    for each other in every step."""
    recomputes: bool = False
    """Whether the technique makes a step repeat floating-point operations."""
    trains_less: bool = False
    """Whether the technique trains other parameters than the model's own. The operations that a step needs are then
    counted with it."""
    needs_measuring: bool = False
    """Whether the technique's memory must be measured, because the estimate with fake tensors cannot predict it."""
    roundoff: float = 2.0**-24
    """The unit roundoff (half the distance from 1 to the next number) of the coarsest format in which the technique
    computes or sends numbers; default: float32. Used if ``changes`` is rounding: ``verify`` derives its bounds from
    this value."""
    repeats: bool = True
    """Whether the same seed gives the same weights again, bit for bit."""
    without_effect: Annotated[Callable[[Variant], dict[str, Any]], _Named] | None = None
    """Variant -> changed settings with which the technique runs but does not affect the weights; ``verify`` tries these
    settings. None if there are no such settings."""
    relies_on: tuple[str, ...] = ()
    """The software, besides torch, whose versions affect the results: names of optional packages, or ``COMPILER``."""
    options: type[BaseModel] | None = None
    """For another package's technique: the options that ``extra: {name: options}`` may hold. None: no options."""

    @property
    def shown_value(self) -> str:
        """The value that asks for the technique, or the example, as params.yaml may write it."""
        if self.key == "extra":
            return _setting_shown({self.name: self.example or {}})
        return _setting_shown(self.value if self.example is None else self.example)

    @property
    def setting(self) -> str:
        """A line of a variant in params.yaml that asks for the technique."""
        return f"{self.key}: {self.shown_value}"

    def requested_by(self, variant: Variant) -> bool:
        """Return whether the variant applies the technique."""
        value = self.value_in(variant)
        if self.key == "extra":
            return self.name in variant.extra
        if self.example is None:
            return bool(value == self.value)
        others = (entry.value for entry in CATALOGUE if entry.key == self.key and entry.example is None)
        return value not in (Variant.model_fields[self.key].default, *others)

    def value_in(self, variant: Variant) -> object:
        """Return the variant's value of ``key``."""
        return getattr(variant, self.key)

    def why_refused(self, variant: Variant, machine: Machine, on_gpu: bool) -> str | None:
        """Return why the technique cannot run on the machine, or with the variant's other settings; None if it can."""
        of_value = self.why_not_value.get(str(self.value_in(variant)), conditions.never)
        return self.why_not(machine, on_gpu) or of_value(machine, on_gpu) or self.why_not_beside(variant, on_gpu)

    def excluding(self, other: Entry) -> str | None:
        """Return why ``other`` cannot run with this technique; None if this entry does not exclude it."""
        return self.excludes.get(other.name) or self.excludes.get(other.key)

    def label(self, variant: Variant) -> str:
        """Return the technique's name, followed by the variant's value if the name does not imply this value.

        >>> from pipeline.params import Variant, requested
        >>> variant = Variant(precision="bf16", gradient_accumulation=4)
        >>> [technique.label(variant) for technique in requested(variant)]
        ['bf16', 'gradient_accumulation=4']
        """
        value = self.value_in(variant)
        if isinstance(value, bool) or value == "default" or self.example is None:
            return self.name
        return f"{self.name}={value:g}" if isinstance(value, float) else f"{self.name}={value}"


def _setting_shown(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_setting_shown(inner)}" for key, inner in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _declared() -> tuple[Entry, ...]:
    text = Path(__file__).with_name("catalogue.yaml").read_text(encoding="utf-8")
    groups = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the loader in C takes 6 ms, not 50
    return tuple(
        Entry(name=name, group=group, **fields) for group, members in groups.items() for name, fields in members.items()
    )


CATALOGUE = _declared()
"""Every technique of this package, in the order in which lists show them."""


def entries() -> tuple[Entry, ...]:
    """Return all available techniques, this package's first. Raises ConfigError if another package's entry is
    broken."""
    return (*CATALOGUE, *(_from_outside(name) for name in outside.names()))


def entry(name: str) -> Entry:
    """Return the technique's entry. Raises ConfigError if there is no such technique, or its package is broken."""
    return _BY_NAME.get(name) or _from_outside(name)


def requested(variant: Variant) -> tuple[Entry, ...]:
    """Return the variant's techniques, in the catalogue's order. Raises ConfigError if one is not installed."""
    own = (technique for technique in CATALOGUE if technique.requested_by(variant))
    return (*own, *(_from_outside(name) for name in variant.extra))


def in_order(variant: Variant) -> list[Entry]:
    """Return the variant's techniques in the order in which they apply: by layer, then in the catalogue's order."""
    return sorted(requested(variant), key=lambda technique: get_args(Layer).index(technique.layer))


def in_effect(variant: Variant) -> list[Entry]:
    """Return the techniques that have an effect in the variant's training, in the order in which they apply."""
    parallelism = variant.parallelism
    return [
        technique
        for technique in in_order(variant)
        if parallelism not in technique.done_by and (not technique.needs or parallelism in technique.needs)
    ]


def keys(technique: Entry) -> tuple[str, ...]:
    """Return the key that asks for the technique, and the keys that configure it."""
    details = (key for sibling in CATALOGUE if sibling.key == technique.key for key in sibling.details)
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
    own = (technique for technique in CATALOGUE if technique.requested_by(variant))
    applied = sorted(own, key=lambda technique: order.index(technique.key))
    options = {"parallelism": tuple(technique.key for technique in applied if technique.needs)}
    labels = {technique.label(variant): (*keys(technique), *options.get(technique.key, ())) for technique in applied}
    return labels | ({"+".join(variant.extra): ("extra",)} if variant.extra else {})  # all extras are one technique


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
        technique.key: ("parallelism", list(technique.needs))
        for technique in applied
        if technique.needs and variant.parallelism not in technique.needs
    }
    used = {key for technique in applied for key in technique.details}
    for technique in CATALOGUE:
        for key in technique.details:
            if key not in used and getattr(variant, key) != getattr(plain, key):
                needed.setdefault(key, (technique.key, []))[1].append(technique.shown_value)
    return {
        key: f"found {getattr(variant, key)!r}; {key} needs {parent} {' or '.join(map(repr, values))}: set {parent}, "
        f"or remove {key}."
        for key, (parent, values) in needed.items()
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
    for technique, other in itertools.product(requested(variant), repeat=2):
        if reason := technique.excluding(other):
            return (
                f"found {technique.key} {technique.value_in(variant)!r} with {other.key} {other.value_in(variant)!r}; "
                f"the two exclude each other, because {reason}: remove one of them."
            )
    return None


def extra_problems(variant: Variant) -> list[str]:
    """Return the problems of the variant's ``extra`` techniques: missing packages, and invalid options."""
    problems = []
    for name, options in variant.extra.items():
        try:
            model = _from_outside(name).options or Section
            model.model_validate(options)
        except ConfigError as error:
            problems.append(f"extra.{name}: {error}")
        except ValidationError as error:
            problems += [
                f"extra.{'.'.join(map(str, (name, *mistake['loc'])))}: found {mistake['input']!r}; {mistake['msg']}. "
                f"Options of {name}: {', '.join(model.model_fields) or 'none'}."
                for mistake in error.errors(include_url=False)
            ]
    return problems


@functools.cache
def _from_outside(name: str) -> Entry:
    technique = outside.load(outside.CATALOGUE, name)
    where = f"the entry point {name!r} of the group {outside.CATALOGUE}"
    if not isinstance(technique, Entry):
        raise ConfigError(f"{where} is {technique!r}; expected the technique's Entry.")
    # The entry point of the group TECHNIQUES, and not the entry, names the class.
    for field, expected in {"name": name, "key": "extra", "implementation": ""}.items():
        if (value := getattr(technique, field)) != expected:
            raise ConfigError(f"{where}: found {field} {value!r}; expected {expected!r}.")
    if name in _BY_NAME:
        raise ConfigError(
            f"{where}: a built-in technique has this name; uninstall the package, or rename its technique."
        )
    return technique


_BY_NAME = {technique.name: technique for technique in CATALOGUE}
