"""params.yaml, read into frozen, validated models; and what a machine makes of a variant.

Nothing here imports torch: a mistake in params.yaml is reported in the first second, before any
work, with the path of the key, what was found there and what is allowed.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

PARAMS_FILE = Path("params.yaml")
SCHEMA_FILE = Path("params.schema.json")

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
ProperFraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # what every generator takes
VariantName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]


class PipelineError(Exception):
    """What a person can put right: the command line prints its message alone.

    The message says what was wrong, where, and what to do.
    """


class ConfigError(PipelineError, ValueError):
    """params.yaml, or what it asks of this machine, cannot be. The message says where and what to do."""


class Section(BaseModel):
    """A part of params.yaml: read once, never changed, no unknown key, no silent conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class Fetch(Section):
    """Which data set, and where its raw files come from."""

    dataset: Literal["fashion_mnist", "mnist", "cifar10", "digits", "image_folder"] = Field(
        "fashion_mnist", description="The data set. digits comes with scikit-learn: no network."
    )
    mirror: str | None = Field(
        None,
        description="A directory, or a file:// address of one, that holds the raw files; tried first.",
    )
    image_folder: str | None = Field(
        None,
        description="For dataset image_folder: the directory with train/CLASS/* and, if there is one, test/CLASS/*.",
    )
    timeout_seconds: PositiveFloat = Field(20.0, description="Longest wait for a server's answer.")
    attempts: PositiveInt = Field(3, description="Attempts for each source, with growing pauses between.")


class Prepare(Section):
    """How raw files become packed arrays."""

    image_size: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] | None = Field(
        None, description="For image_folder: [height, width] to which every image is resized."
    )
    broken_images: Literal["fail", "skip"] = Field(
        "fail", description="For image_folder: what an unreadable image does; either way it is named."
    )
    test_fraction: ProperFraction = Field(
        0.2, description="Share of each class held out for testing where the data set has no test split."
    )
    train_limit: PositiveInt | None = Field(None, description="Keep only the first N training samples (for tries).")
    test_limit: PositiveInt | None = Field(None, description="Keep only the first N test samples (for tries).")
    workers: PositiveInt | Literal["auto"] = Field("auto", description="Decoding processes; auto: one a CPU core.")


class Augment(Section):
    """Random changes of the training images, drawn for a whole batch at once on the device."""

    crop_padding: NonNegativeInt = Field(0, description="Zero-pad by this many pixels, then crop back at random.")
    flip: bool = Field(False, description="Mirror left-right with probability one half.")
    cutout: NonNegativeInt = Field(0, description="Side in pixels of a square set to the mean; 0: none.")


class Train(Section):
    """The job. Every variant trains exactly this."""

    model: str = Field(
        "small_cnn",
        description="small_cnn, resnet9, a torchvision classification model's name, or module:factory of your own.",
    )
    model_options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for the model.")
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field(
        [0, 1, 2], description="One run a seed; every variant runs the same."
    )
    epochs: PositiveInt = Field(2, description="Passes over the training set.")
    batch_size: PositiveInt = Field(
        256, description="Global batch: samples an optimizer step, over all devices and micro-batches."
    )
    optimizer: Literal["sgd", "adamw"] = Field("sgd", description="sgd (with Nesterov momentum) or adamw.")
    learning_rate: PositiveFloat = Field(0.1, description="Peak learning rate.")
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.9, description="SGD's momentum, or AdamW's beta1.")
    weight_decay: NonNegativeFloat = Field(5e-4, description="Weight decay.")
    schedule: Literal["one_cycle", "cosine", "constant"] = Field(
        "one_cycle", description="After the warm-up: linear to zero, half a cosine to zero, or constant."
    )
    warmup_fraction: Fraction = Field(0.2, description="Share of all steps over which the rate rises from zero.")
    label_smoothing: Fraction = Field(0.0, description="Label smoothing of the training loss.")
    augment: Augment = Augment()
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is a GPU.")
    placement: Literal["auto", "resident", "streamed"] = Field(
        "auto",
        description="Data set on the device, or streamed from the memory map; auto: resident when it fits.",
    )
    without_native: Literal["leave_out", "refuse", "run"] = Field(
        "leave_out",
        description="A technique that this machine only emulates: left out (and reported as such), refused, or run.",
    )
    deterministic: bool = Field(True, description="cuDNN's deterministic algorithms, so that a seed repeats exactly.")
    warmup_steps: PositiveInt = Field(
        10, description="Steps before the measured window: compilation, autotuning and caches settle here."
    )
    history_every_steps: PositiveInt = Field(50, description="A row of history every N steps, besides one an epoch.")
    checkpoint_every_steps: PositiveInt | None = Field(
        None, description="A resume point every N steps, besides one an epoch; null: only every epoch."
    )


class Bench(Section):
    """Steady-state speed and memory of all variants, side by side."""

    max_minutes: PositiveFloat = Field(3.0, description="Rounds are measured until this time is spent.")
    max_rounds: PositiveInt | None = Field(None, description="Stop after this many rounds; null: time alone decides.")
    window_seconds: PositiveFloat = Field(
        1.5, description="Measured window of the baseline in a round; every variant takes as many steps as it does."
    )
    turns: PositiveInt = Field(
        10,
        description="On a CPU, a window's steps are taken in so many turns, between those of the other variants, so "
        "that what the machine does for some seconds hits all alike; 1: in one go. On a GPU always 1.",
    )
    ablate: list[VariantName] = Field(
        [], description="Variants whose techniques are measured one by one: added to the baseline, and left out."
    )
    max_input_wait: Fraction = Field(
        0.5, description="A sample that waits longer for input measures the input, not the technique, and is refused."
    )
    max_foreign_load: Fraction = Field(
        0.1, description="A sample beside which other processes took a larger share of the CPU's time is refused."
    )


class Margins(Section):
    """Differences up to here do not matter."""

    throughput: ProperFraction = Field(0.03, description="Of the ratio of samples a second.")
    memory: ProperFraction = Field(0.03, description="Of the ratio of peak memories.")
    accuracy: ProperFraction = Field(0.01, description="Of the test accuracy, absolute: 0.01 is one percentage point.")


class Compare(Section):
    """How results become a comparison."""

    baseline: VariantName = Field("baseline", description="The variant that the others are compared with.")
    target_accuracy: ProperFraction = Field(0.85, description="Time to this test accuracy is compared.")
    margins: Margins = Margins()
    max_spread: PositiveFloat = Field(
        0.15, description="Relative width of the baseline's interval against itself above which nothing is believed."
    )


class Gate(Section):
    """How a commit is held against another."""

    max_minutes: PositiveFloat = Field(
        10.0, description="Rounds of both commits are measured until this time is spent."
    )
    accuracy: bool = Field(True, description="Also compare accuracies, which both commits must have been trained for.")


class Publish(Section):
    """MLflow: the mirror of the files."""

    experiment: Annotated[str, Field(min_length=1)] = Field("training-performance", description="MLflow's experiment.")
    live: bool = Field(True, description="Follow training live; the final runs are published either way.")
    models: bool = Field(True, description="Log each run's trained model, ready for mlflow.pyfunc.")
    registered_model: Annotated[str, Field(pattern="^[^/:]+$")] = Field(
        "training-performance", description="The registry's name for what `python -m pipeline promote` registers."
    )


class Variant(Section):
    """One way to train the job: the techniques it applies. No key: single device, fp32, nothing applied."""

    parallelism: Literal["none", "ddp"] = Field(
        "none", description="none: one device. ddp: DistributedDataParallel, one process a device."
    )
    processes: PositiveInt | Literal["auto"] = Field(
        "auto", description="With a parallelism: how many; auto: one a GPU, two where there is none."
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Automatic mixed precision: bf16, or fp16 with a gradient scaler (GPU only)."
    )
    channels_last: bool = Field(False, description="NHWC memory format for the model and its input.")
    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass instead of keeping them."
    )
    gradient_accumulation: PositiveInt = Field(1, description="Micro-batches an optimizer step.")

    def techniques(self) -> dict[str, tuple[str, ...]]:
        """What is applied beyond single-device fp32, by the name people use -> the keys that ask for it.

        >>> Variant(parallelism="ddp", processes=2, channels_last=True, gradient_accumulation=4).techniques()
        {'ddp': ('parallelism', 'processes'), 'channels_last': ('channels_last',), \
'gradient_accumulation=4': ('gradient_accumulation',)}
        """
        plain = Variant()
        found: dict[str, tuple[str, ...]] = {}
        for key, value in self:
            if key == "processes" or value == getattr(plain, key):  # how many processes is a part of the parallelism
                continue
            name = key if value is True else value if isinstance(value, str) else f"{key}={value}"
            found[name] = (key, "processes") if key == "parallelism" else (key,)
        return found


class Config(Section):
    """params.yaml."""

    fetch: Fetch = Fetch()
    prepare: Prepare = Prepare()
    train: Train = Train()
    bench: Bench = Bench()
    compare: Compare = Compare()
    gate: Gate = Gate()
    publish: Publish = Publish()
    variants: Annotated[dict[VariantName, Variant], Field(min_length=1)]


class Machine(BaseModel):
    """What the machine offers, as far as a variant's plan depends on it; see ``environment.machine``."""

    model_config = ConfigDict(frozen=True)

    gpus: int
    gpu_native_bf16: bool
    cpu_native_bf16: bool


class Plan(BaseModel):
    """What this machine makes of one variant; every worker follows it."""

    model_config = ConfigDict(frozen=True)

    name: str
    asked: Variant
    applied: Variant
    left_out: dict[str, str]
    """Technique -> why this machine leaves it out. Empty: everything asked is applied."""
    device: Literal["cpu", "cuda"]
    processes: int
    micro_batches: int
    micro_batch_size: int
    """Samples one process takes in one micro-step."""


def load(path: Path = PARAMS_FILE) -> Config:
    """Read and validate ``path``. Raises ConfigError, naming every offending key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: run from the top of the checkout.") from None
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}.") from None
    try:
        values = yaml.load(text, _UniqueKeyLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a date such as 2024-13-01
        raise ConfigError(f"{path} is not YAML: {error}") from None
    return parse(values, str(path))


def parse(values: Any, source: str = PARAMS_FILE.name) -> Config:
    """Validate already loaded values. Raises ConfigError, naming every offending key."""
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: found {_shown(values)}; expected a mapping of sections.")
    try:
        config = Config.model_validate(values)
        problems = list(_contradictions(config))
    except ValidationError as error:
        problems = _explained(error.errors(include_url=False))
    if problems:
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in problems))
    return config


def plan(config: Config, name: str, machine: Machine, launched: int | None = None) -> Plan:
    """Decide how ``variants.<name>`` runs on ``machine``. Raises ConfigError if it cannot.

    ``launched`` is the world size, over all hosts, if a launcher such as torchrun started this process.
    """
    if name not in config.variants:
        raise ConfigError(f"variants.{name}: no such variant; there are: {', '.join(config.variants)}.")
    asked, train = config.variants[name], config.train
    where = f"variants.{name}"
    if train.device == "cuda" and machine.gpus == 0:
        raise ConfigError("train.device: found 'cuda', but this machine shows no GPU; allowed here: 'auto', 'cpu'.")
    on_gpu = train.device != "cpu" and machine.gpus > 0
    processes = _processes(asked, machine, on_gpu, where, launched)

    left_out: dict[str, str] = {}
    changes: dict[str, Any] = {}
    if on_gpu and launched is None and asked.parallelism != "none" and asked.processes == "auto":
        available = processes
        while train.batch_size % (processes * asked.gradient_accumulation) and processes > 1:
            processes -= 1
        if processes < available:
            left_out[f"{available - processes} of {available} GPUs"] = (
                f"train.batch_size {train.batch_size} is shared out evenly among {processes} at most"
            )
    if asked.parallelism != "none" and processes == 1:
        left_out[asked.parallelism] = "there is one process, which has nobody to share the batch with"
        changes["parallelism"] = "none"
    if asked.precision == "fp16" and not on_gpu:
        raise ConfigError(
            f"{where}.precision: found 'fp16', which needs a GPU, and this run is on the CPU; "
            "allowed here: 'fp32', 'bf16'."
        )
    if asked.precision == "bf16" and not (machine.gpu_native_bf16 if on_gpu else machine.cpu_native_bf16):
        reason = (
            "this GPU has no native bf16 (compute capability below 8.0) and would emulate it"
            if on_gpu
            else "this CPU has no native bf16 (AVX-512, AMX or Arm BF16) and would emulate it, several times slower"
        )
        if train.without_native == "refuse":
            raise ConfigError(
                f"{where}.precision: found 'bf16', but {reason}; use 'fp32', or set train.without_native to "
                "'leave_out' or 'run'."
            )
        if train.without_native == "leave_out":
            left_out["bf16"] = reason
            changes["precision"] = "fp32"

    shares = processes * asked.gradient_accumulation
    if train.batch_size % shares:
        fitting = max(shares, round(train.batch_size / shares) * shares)
        raise ConfigError(
            f"train.batch_size: found {train.batch_size}, which {where} cannot divide into {processes} process(es) x "
            f"{asked.gradient_accumulation} micro-batch(es); allowed: a multiple of {shares}, such as {fitting}."
        )
    return Plan(
        name=name,
        asked=asked,
        applied=asked.model_copy(update=changes),
        left_out=left_out,
        device="cuda" if on_gpu else "cpu",
        processes=processes,
        micro_batches=asked.gradient_accumulation,
        micro_batch_size=train.batch_size // shares,
    )


def plans(config: Config, machine: Machine) -> dict[str, Plan]:
    """Every variant's plan, or one ConfigError that lists all that cannot run here."""
    made, problems = {}, []
    for name in config.variants:
        try:
            made[name] = plan(config, name, machine)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return made


def schema() -> str:
    """The JSON Schema of params.yaml (``params.schema.json``), with which editors complete and check it."""
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **_schema()}, indent=2) + "\n"


@functools.cache
def _schema() -> dict[str, Any]:
    described = Config.model_json_schema()
    described["properties"]["variants"]["additionalProperties"] = False  # a name that does not fit is no variant
    return described


def _processes(variant: Variant, machine: Machine, on_gpu: bool, where: str, launched: int | None) -> int:
    if launched is not None:
        if (variant.processes if variant.parallelism != "none" else 1) not in ("auto", launched):
            raise ConfigError(
                f"{where}: found parallelism {variant.parallelism!r} and processes {variant.processes!r}, but a "
                f"launcher started {launched} process(es); allowed: parallelism 'ddp' with processes 'auto' or "
                f"{launched}."
            )
        return launched
    if variant.parallelism == "none":
        return 1
    if variant.processes == "auto":
        return machine.gpus if on_gpu else 2
    if on_gpu and variant.processes > machine.gpus:
        raise ConfigError(
            f"{where}.processes: found {variant.processes}, but this machine shows {machine.gpus} GPU(s); "
            f"allowed: 1 to {machine.gpus}, or 'auto'."
        )
    return variant.processes


def _contradictions(config: Config) -> Iterator[str]:
    """What each key allows alone but the whole cannot mean, on any machine."""
    if config.compare.baseline not in config.variants:
        yield (
            f"compare.baseline: found {config.compare.baseline!r}, which is not under variants; "
            f"allowed: {', '.join(config.variants)}."
        )
    for name in config.bench.ablate:
        if name not in config.variants:
            yield f"bench.ablate: found {name!r}, which is not under variants; allowed: {', '.join(config.variants)}."
    if config.fetch.dataset == "image_folder":
        if config.fetch.image_folder is None:
            yield "fetch.image_folder: found null; dataset image_folder needs the directory's path."
        if config.prepare.image_size is None:
            yield "prepare.image_size: found null; dataset image_folder needs [height, width]."
    if len(set(config.train.seeds)) < len(config.train.seeds):
        yield f"train.seeds: found {config.train.seeds}; each seed may stand there once."
    for name, variant in config.variants.items():
        if variant.parallelism == "none" and variant.processes not in ("auto", 1):
            yield (
                f"variants.{name}.processes: found {variant.processes} without a parallelism; "
                "set parallelism: ddp, or take processes out."
            )


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML without its silence about a key that stands twice, of which only the last would count."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} stands twice in one mapping", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _explained(errors: list[Any]) -> list[str]:
    """Pydantic's errors, one line a key: path, what was found there, what is allowed."""
    lines: dict[tuple[Any, ...], str] = {}
    for error in errors:
        path, node = _located(error["loc"])
        where = ".".join(map(str, path))
        if error["type"] == "extra_forbidden":
            known = list(_resolved(_located(path[:-1])[1])["properties"])
            close = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            lines[path] = f"{where}: unknown key; allowed: {', '.join(known)}.{hint}"
        elif error["type"] == "missing":
            lines[path] = f"{where}: missing; it is required."
        elif error["loc"][-1] == "[key]":
            lines[path] = (
                f"{where}: not a variant's name; allowed: text of lower-case letters, digits, '-' and '_', "
                "which begins with a letter or digit."
            )
        elif error["type"] == "invalid_key":
            lines[path] = f"{where}: found the key {_shown(path[-1])}; expected text: quote it."
        else:
            found = error["input"]
            lines[path] = f"{where}: found {_shown(found)}; expected {_allowed(node)}.{_advice(found, node, path)}"
    return list(lines.values())


def _located(location: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The keys of params.yaml in a pydantic location, which names union branches too, and the schema at its end."""
    path: list[Any] = []
    node = _schema()
    for part in location:
        below = _below(node, part)
        if below is not None:
            path.append(part)
            node = below
        elif "anyOf" not in node and part != "[key]":  # an unknown key
            path.append(part)
    return tuple(path), node


def _below(node: dict[str, Any], part: Any) -> dict[str, Any] | None:
    """The schema of key or index ``part`` in ``node``; None if ``node`` describes none."""
    node = _resolved(node)
    found: dict[str, Any] | None = None
    if part in node.get("properties", {}):
        found = node["properties"][part]
    elif "patternProperties" in node and part != "[key]":
        found = next(iter(node["patternProperties"].values()))
    elif isinstance(part, int):
        found = next((each["items"] for each in (node, *node.get("anyOf", [])) if "items" in each), None)
    return found


def _resolved(node: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = _schema()["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    return found


def _allowed(node: dict[str, Any]) -> str:
    """What a part of the schema allows, in words."""
    node = _resolved(node)
    if "anyOf" in node:
        return " or ".join(sorted(map(_allowed, node["anyOf"]), key=lambda words: (len(words), words)))
    if "const" in node:
        return repr(node["const"])
    if "enum" in node:
        *others, last = map(repr, node["enum"])
        return f"{', '.join(others)} or {last}"
    kind = node.get("type")
    if kind in ("integer", "number"):
        noun = "a whole number" if kind == "integer" else "a number"
        limits = (
            ("from", "minimum"),
            ("above", "exclusiveMinimum"),
            ("to", "maximum"),
            ("below", "exclusiveMaximum"),
        )
        return " ".join([noun, *(f"{word} {node[key]:.12g}" for word, key in limits if key in node)])
    if kind == "array":
        least = node.get("minItems", 0)
        count = least if least == node.get("maxItems") else f"{least} or more"
        return f"a list of {count}, each {_allowed(node['items'])}"
    words = {"boolean": "true or false", "null": "null", "string": "text", "object": "a mapping"}
    return words[str(kind)] + (" that is not empty" if node.get("minLength") or node.get("minProperties") else "")


def _advice(found: Any, node: dict[str, Any], path: tuple[Any, ...]) -> str:
    if isinstance(found, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", found) and "number" in _allowed(node):
        mantissa, exponent = re.split("[eE]", found)
        written = f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent):+d}"
        if "whole" in _allowed(node):
            written = "in digits alone"
        return f" YAML reads this as text; as a number it is written {written}."
    if isinstance(found, float) and not math.isfinite(found):
        return " It must be finite."
    if found is None and path[0] == "variants" and len(path) == 2:
        return f" For one device, fp32 and no technique write {path[1]}: {{}}"
    if found is None and _allowed(node).startswith("a mapping"):
        return " Leave the key out to take its defaults."
    return ""


def _shown(value: Any) -> str:
    """``value`` as a person wrote it, shortened."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
