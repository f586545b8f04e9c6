"""Read and check params.yaml. The message for a mistake names its key, the value found and what is allowed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import YAMLError

from pipeline.errors import ConfigError, did_you_mean
from pipeline.files import read_bytes
from pipeline.params import sections
from pipeline.params.catalogue import CATALOGUE, contradiction, extra_problems, misplaced
from pipeline.params.commands import SEED, Command, command_of
from pipeline.params.sections import Section, Train, VariantName
from pipeline.params.variants import Distillation, Lora, Variant

PARAMS_FILE = Path("params.yaml")
SCHEMA_FILE = Path("params.schema.json")

LIMIT_BYTES = 1 << 18
"""Largest size of a parameter file. A larger file is a mistake, and parsing it could take minutes."""

_OF_COMMAND = ("arguments", "command")
"""Keys of a variant of a script."""
_WITH_SCRIPT = {"seeds", "files"}
"""Keys of ``train`` that a script has, too."""
_OF_STEP = {"samples_per_step", "batch_differs", "optimizer"}
"""Keys of ``script`` that say what counts as a step and how many samples it has."""
_OF_MODEL = {"model", "model_options"}
_FUNCTION = r"[^:.][^:]*:[^:]+"
"""Regular expression that matches ``module:function``."""


class Config(Section):
    """The content of params.yaml."""

    fetch: sections.Fetch = sections.Fetch()
    prepare: sections.Prepare = sections.Prepare()
    train: Train = Train()
    script: sections.Script | None = None
    bench: sections.Bench = sections.Bench()
    profile: sections.Profile = sections.Profile()
    infer: sections.Infer = sections.Infer()
    compare: sections.Compare = sections.Compare()
    scale: sections.Scale = sections.Scale()
    gate: sections.Gate = sections.Gate()
    publish: sections.Publish = sections.Publish()
    launch: sections.Launch = sections.Launch()
    variants: Annotated[dict[VariantName, Variant], Field(min_length=1)]
    # In a configuration that ``load`` or ``parse`` returned, ``variants`` also includes the students.
    students: dict[VariantName, Variant] = Field(default_factory=dict)
    """Variants that learn from another variant (distillation). They have a section of their own, because the stage that
    trains them must wait until the teacher is trained."""

    def teacher_of(self, name: str) -> str | None:
        """Return the name of the variant that teaches ``variants.<name>``; None if no variant teaches it."""
        taught = self.variants[name].distillation
        return taught.variant if taught else None

    def train_of(self, name: str) -> Train:
        """Return the job of ``variants.<name>``: ``train``, with the variant's own model if it has one."""
        own = self.variants[name]
        new = own.model_dump(include=_OF_MODEL) | {"weights": None, "frozen": []}
        return self.train.model_copy(update=new if own.model else {})

    @property
    def job(self) -> dict[str, Any]:
        """The job as results record it: ``train`` or, of a script, the command, the seeds, what its score is, and
        what is set about its steps. A setting that has its default is left out, as in results of older versions."""
        if self.script is None:
            return self.train.model_dump(mode="json")
        seeds = self.train.model_dump(mode="json", include=_WITH_SCRIPT)
        score = self.script.metric.model_dump(mode="json")
        seeds |= self.script.model_dump(mode="json", include=_OF_STEP, exclude_defaults=True)
        return seeds | {"command": self.script.command, "metric": self.script.metric.name, "score": score}

    def command_of(self, name: str) -> Command:
        """Return what ``variants.<name>`` runs, with a script. Raises ConfigError."""
        assert self.script is not None
        own, where = self.variants[name], f"variants.{name}"
        made = command_of("script.command", self.script.command)
        if own.command is not None:
            made = command_of(f"{where}.command", own.command, made)
        if own.arguments:
            made = command_of(f"{where}.arguments", own.arguments, made, whole=False)
        changed = " ".join(filter(None, [own.command, own.arguments])) or self.script.command
        return made._replace(changed=changed, outputs=tuple(self.script.outputs))

    def with_train(self, **changes: Any) -> Config:
        """Return a copy with other values under ``train``; the values are not validated."""
        return self.model_copy(update={"train": self.train.model_copy(update=changes)})


def load(path: Path = PARAMS_FILE) -> Config:
    """Return the validated configuration in the file ``path``. Raises ConfigError, which names the wrong keys."""
    values = read_yaml(path)
    config = parse(values, str(path))
    if problems := list(_misplaced(config, values)):
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return config


def read_yaml(path: Path) -> Any:
    """Return the content of the YAML file ``path``. Raises ConfigError if the file cannot be read or exceeds the limit,
    and for what ``parse_yaml`` refuses."""
    try:
        text = read_bytes(path, LIMIT_BYTES).decode()
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing: run in the folder that has it, or run `python -m pipeline init` in a repository of "
            "your own."
        ) from None
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}.") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Any:
    """Return the content of a text in YAML. Raises ConfigError, which names ``source``, if the text is not YAML, or has
    a key that is a duplicate or no text."""
    if re.search(r"\w{2000}", text):  # Python refuses to print a number of so many digits
        raise ConfigError(f"{source}: a word of more than 2,000 characters; this is not a params.yaml.")
    loader = YAML(typ="safe", pure=True)
    loader.Constructor = _Constructor
    try:
        return loader.load(text)
    except (YAMLError, RecursionError, AssertionError, LookupError, ValueError) as error:  # such as the date 2024-13-01
        raise ConfigError(f"{source} is not YAML: {error}") from None


def parse(values: Any, source: str = PARAMS_FILE.name) -> Config:
    """Return the validated configuration in ``values``, the content of a YAML file. Raises ConfigError, which names
    ``source`` and the wrong keys."""
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: found {_shown(values)}; expected a mapping of sections.")
    try:
        config = _with_students(Config.model_validate(values))
        problems = list(_contradictions(config))
    except ValidationError as error:
        problems = _mistakes(error, values)
    if problems:
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in problems))
    return config


def _with_students(config: Config) -> Config:
    """Return ``config`` with the students among its variants, and with each teacher's model filled in."""
    whole = config.model_copy(update={"variants": config.variants | config.students})
    for name, variant in whole.variants.items():
        if (learns := variant.distillation) and learns.model is None:
            teacher = whole.teacher_of(name)
            job = whole.train_of(teacher) if teacher in whole.variants else whole.train
            filled = learns.model_copy(update=job.model_dump(include=_OF_MODEL))
            whole.variants[name] = variant.model_copy(update={"distillation": filled})
    return whole


def _misplaced(config: Config, values: dict[str, Any]) -> Iterator[str]:
    """Yield the problems of teachers, and of variants that are in the wrong section, or in both sections."""
    for name, variant in config.variants.items():
        place = " and ".join(section for section in ("variants", "students") if name in values.get(section, {}))
        expected = "students" if config.teacher_of(name) else "variants"
        if place != expected:
            yield f"{place}.{name}: expected under {expected} only (students are variants that learn from a variant)."
        learns, others = variant.distillation, [teacher for teacher in config.variants if teacher != name]
        made_here = learns and learns.file and Path("models").resolve() in learns.file.resolve().parents
        if learns and (made_here or learns.variant not in (None, *others)):
            yield (
                f"{expected}.{name}.distillation.teacher: found {learns.teacher!r}; allowed: {', '.join(others)}, or "
                "the path of a file of weights outside of models, such as ./weights."
            )


def check_minutes(minutes: float) -> None:
    """Raise ConfigError unless a command may take so many ``--minutes``."""
    if not 0 < minutes <= sections.LONGEST:  # NaN is not
        raise ConfigError(f"--minutes: found {minutes:g}; expected a number above 0, at most {sections.LONGEST:,.0f}.")


def schema() -> str:
    """Return the JSON Schema of params.yaml (``params.schema.json``), which editors use for completion and checks.

    A key's description is the docstring under its field. For a variant's key, it also says what the techniques do.
    """
    described = Config.model_json_schema()
    keys = described["$defs"]["Variant"]["properties"]
    for technique in CATALOGUE:
        description = keys[technique.key].get("description", "")
        keys[technique.key]["description"] = f"{description} {technique.shown_value}: {technique.does}.".lstrip()
    for section in ("variants", "students"):
        described["properties"][section]["additionalProperties"] = False  # refuses names that do not match VariantName
    text = json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **described}, indent=2) + "\n"
    return text.replace(r"\n", " ")  # the ends of a docstring's lines


def _contradictions(config: Config) -> Iterator[str]:
    """Yield the problems that pydantic does not find, such as contradictions between keys. None of these problems
    depends on the machine's hardware."""
    if config.compare.margins.energy and not config.bench.energy:
        yield f"compare.margins.energy: found {config.compare.margins.energy}, which needs bench.energy: true."
    listed = {
        "compare.baseline": [config.compare.baseline],
        "bench.ablate": config.bench.ablate,
        "gate.variants": config.gate.variants,
        "profile.variants": config.profile.variants,
        "infer.variants": config.infer.variants,
    }
    for key, names in listed.items():
        for name in names:
            if name not in config.variants:
                yield f"{key}: found {name!r}, which is not under variants; allowed: {', '.join(config.variants)}."
    dataset = config.fetch.dataset
    if getattr(config.fetch, dataset, "") is None:
        yield f"fetch.{dataset}: found null; dataset {dataset} needs the path of the data."
    if dataset == "image_folder" and config.prepare.image_size is None:
        yield "prepare.image_size: found null; dataset image_folder needs [height, width]."
    made_up = config.fetch.synthetic
    if made_up.targets == "tokens" and (len(made_up.shape) > 1 or made_up.shape[0] < 2):
        yield f"fetch.synthetic.shape: found {made_up.shape}; tokens need [length + 1], at least [2]."
    if config.launch.hosts != "auto" and len(set(config.launch.hosts)) < len(config.launch.hosts):
        yield f"launch.hosts: found {config.launch.hosts}; allowed: each host once."
    if len(set(config.train.seeds)) < len(config.train.seeds):
        yield f"train.seeds: found {config.train.seeds}; allowed: each seed once."
    yield from _own_code(config.train)
    yield from _with_script(config) if config.script else _without_script(config)
    if config.launch.slurm.container and config.launch.slurm.nodes > 1:
        yield (
            f"launch.slurm.nodes: found {config.launch.slurm.nodes} with a container, from which no other "
            "node can be reached; set nodes: 1, or container: null."
        )
    for name, variant in config.variants.items():
        yield from _model_problems(f"variants.{name}.model", variant.model)
        unknown = extra_problems(variant)
        yield from (f"variants.{name}.{problem}" for problem in unknown)
        if unknown:
            continue
        yield from (f"variants.{name}.{key}: {problem}" for key, problem in misplaced(variant).items())
        if problem := contradiction(variant):
            yield f"variants.{name}: {problem}"
        if variant.scaling == "weak" and not (config.train.lr_warmup_steps or config.train.warmup_fraction):
            # The technique's entry does not declare this condition, because ``verify`` runs steps without a warm-up.
            yield (
                f"variants.{name}.scaling: found 'weak' with train.warmup_fraction {config.train.warmup_fraction}; a "
                "learning rate that is multiplied must be warmed up: set train.warmup_fraction above 0."
            )


def _without_script(config: Config) -> Iterator[str]:
    for name, variant in config.variants.items():
        for key in _OF_COMMAND:
            if value := getattr(variant, key):
                yield f"variants.{name}.{key}: found {value!r}, but no script.command; add it, or take {key} out."


def _with_script(config: Config) -> Iterator[str]:
    """Yield the problems of ``script``, and the keys that a script does not have."""
    script = config.script
    assert script is not None
    yield from _of_metric(script.metric)
    paths = {"metric.file": [script.metric.file] if script.metric.file else [], "outputs": script.outputs}
    for key, path in ((key, path) for key, listed in paths.items() for path in listed):
        if Path(path).is_absolute() or ".." in Path(path).parts:
            yield f"script.{key}: found {path!r}; expected a path inside the directory in which the script runs."
    outputs = [Path(output) for output in script.outputs]
    for output in outputs:
        others = [*outputs, Path("output.txt")]
        others.remove(output)
        if output == Path() or any(map(output.is_relative_to, others)):
            yield (
                f"script.outputs: found '{output}'; allowed: paths of which none contains another, except . and "
                "output.txt, which holds what the script prints."
            )
    if script.batch_differs and script.samples_per_step:
        yield "script.samples_per_step: found with script.batch_differs; if batches differ, samples must be counted."
    for key, value in config.train.model_dump(exclude=_WITH_SCRIPT).items():
        if value != Train().model_dump().get(key):
            yield f"train.{key}: found {value!r}, which a script does not read; give it to script.command."
    for key in ("bench.ablate", "profile.variants", "infer.variants"):
        section, _, name = key.partition(".")
        if names := getattr(getattr(config, section), name):
            yield f"{key}: found {names}, but a script has no techniques and no model that the pipeline knows; set []."
    own = Variant().model_dump()
    for name, variant in config.variants.items():
        given = variant.model_dump(exclude={*_OF_COMMAND})
        for key in (key for key, value in given.items() if value != own[key]):
            yield f"variants.{name}.{key}: found with a script, which no technique changes; use arguments or command."
        try:
            command = config.command_of(name)
        except ConfigError as error:
            yield str(error)
            continue
        if len(config.train.seeds) > 1 and command.seeded(0)[:2] == command[:2]:
            yield f"variants.{name}: its command has no {SEED}, so all train.seeds would train the same; add it."


def _of_metric(metric: sections.Metric) -> Iterator[str]:
    given = [source is not None for source in (metric.file, metric.key, metric.pattern)]
    if given not in ([True, True, False], [False, False, True]):
        yield "script.metric: expected file and key, or pattern: where the script leaves its test score."
    try:
        one_group = metric.pattern is None or re.compile(metric.pattern).groups == 1
    except re.error:
        one_group = False
    if not one_group:
        yield (
            f"script.metric.pattern: found {metric.pattern!r}; expected a regular expression with one group, such as "
            "accuracy=(\\S+)."
        )


def _own_code(train: Train) -> Iterator[str]:
    """Yield the problems in the names of the task, model, loss and metric, and in the settings of the loss. Whether the
    named modules exist is not checked."""
    yield from _model_problems("train.model", train.model)
    loss, metric = sections.TASKS.get(train.task, sections.OF_OWN_TASK)
    for key, known in {"task": [*sections.TASKS], "loss": [loss], "metric": [metric]}.items():
        name = getattr(train, key)
        if name not in known and not re.fullmatch(_FUNCTION, name):
            yield f"train.{key}: found {name!r}; expected {', '.join(known)}, or module:name of your own."
    if train.loss == loss and train.loss_options:
        yield f"train.loss_options: found {train.loss_options}, but {train.loss} takes no options."
    if train.loss != "cross_entropy" and train.label_smoothing:
        yield f"train.label_smoothing: found {train.label_smoothing}, which {train.loss!r} ignores; set 0.0."
    if train.metric_over == "test_set" and ":" not in train.metric:
        yield f"train.metric_over: found 'test_set', but {train.metric!r} is a score per sample; set 'samples'."
    if train.class_weights and (train.task, train.loss) not in sections.WEIGH_CLASSES:
        yield f"train.class_weights: found {train.class_weights}, which {train.loss!r} ignores; set null."
    if train.class_weights and not any(train.class_weights):
        yield f"train.class_weights: found {train.class_weights}, with which nothing is learned; give a class a weight."
    for key in ("beta2", "epsilon"):
        if train.optimizer == "sgd" and getattr(train, key) != Train.model_fields[key].default:
            yield f"train.{key}: found {getattr(train, key)}, which sgd ignores; take it out, or set optimizer: adamw."


def _model_problems(key: str, name: str | None) -> Iterator[str]:
    if name is not None and not re.fullmatch(rf"\w+|{_FUNCTION}", name):
        yield f"{key}: found {name!r}; expected a model's name, or module:factory of your own, such as my_models:mlp."


class _Constructor(SafeConstructor):
    """Refuses a key that occurs twice, also beside ``<<``, where ruamel.yaml keeps the last value, and a key that is no
    text, such as ``no``."""

    def flatten_mapping(self, node: Any) -> None:
        seen = set()
        for key, _ in node.value:
            kind = str(key.tag).rpartition(":")[2]
            if kind == "str" and key.style is None and key.value.lower() in ("yes", "no", "on", "off"):
                kind = "bool"  # for tools that read YAML 1.1; here, and for DVC, it is text
            typed = kind not in ("str", "merge")
            if typed or key.value in seen:
                wrong = f"is of type {kind} in YAML; quote it" if typed else "occurs twice in one mapping"
                raise ConstructorError(None, None, f"the key {key.value!r} {wrong}", key.start_mark)
            seen.add(key.value)
        super().flatten_mapping(node)


def _mistakes(error: ValidationError, values: Any) -> list[str]:
    """Return a line for each wrong key in ``values``: its path, the value found, and what is allowed."""
    at: dict[tuple[Any, ...], list[Any]] = {}
    for mistake in error.errors(include_url=False):
        if mistake["type"] != "default_factory_not_called":  # another error is the reason
            at.setdefault(_path(mistake, values), []).append(mistake)
    return [f"{'.'.join(map(str, path)).removesuffix('.[key]')}: {_mistake(path, at[path])}" for path in at]


def _path(error: Any, values: Any) -> tuple[Any, ...]:
    """Return the error's location in ``values``, without the branches of unions, which pydantic adds to a location."""
    path = []
    for part in error["loc"]:
        inside = values if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ()
        if part in inside or part == "[key]" or error["type"] == "missing":
            path.append(part)
        values = values[part] if part in inside else None
    return tuple(path)


def _mistake(path: tuple[Any, ...], errors: list[Any]) -> str:
    """Return what is wrong at ``path``. If the value may have several types, ``errors`` has one error for each type."""
    value, kinds = errors[0]["input"], {error["type"] for error in errors}
    if "missing" in kinds:
        return "missing; it is required."
    if "extra_forbidden" in kinds:
        own = {"distillation": Distillation, "lora": Lora}
        of_variant = next((own[key] for key in path[:-1] if key in own), Variant)
        section: Any = of_variant if path[0] in ("variants", "students") else Config
        for key in path[:-1] if section is Config else ():
            annotation = section.model_fields[key].annotation
            section = next(iter(get_args(annotation)), annotation)  # of an optional section, the section
        return f"unknown key.{did_you_mean(path[-1], section.model_fields)} Allowed: {', '.join(section.model_fields)}."
    expected = " or ".join(error["msg"] for error in errors).replace(" or Input should be ", " or ")
    allowed = re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping, such as {}", expected)
    hint = did_you_mean(value, re.findall("'(.*?)'", allowed) if "literal_error" in kinds else ())
    if "string_type" in kinds and not isinstance(value, dict | list | None):
        hint = " If it is a name, quote it."
    return f"found {_shown(value)}; {allowed[0].lower()}{allowed[1:]}.{hint}"


def _shown(value: Any) -> str:
    """Return ``value`` for a message: null, true and false as in YAML, and at most 80 characters."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
