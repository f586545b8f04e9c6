"""Read and check params.yaml. The message for a mistake names its key, the value found and what is allowed."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from pipeline.errors import ConfigError, did_you_mean
from pipeline.files import open_regular
from pipeline.params import sections
from pipeline.params.catalogue import CATALOGUE, Variant, contradiction, extra_problems, misplaced
from pipeline.params.catalogue.models import Distillation
from pipeline.params.sections import Section, Train, VariantName

PARAMS_FILE = Path("params.yaml")
SCHEMA_FILE = Path("params.schema.json")

LIMIT = 1 << 18
"""Maximum number of characters in a parameter file. A longer file is a mistake or an attack, and parsing it could take
minutes."""
VALUES = 10_000
"""Maximum number of keys and values in a parameter file, counted after every alias is expanded."""
CHARACTERS = 2000
"""Maximum number of characters of one value. Messages could not show much longer integers, because Python refuses to
print them."""

_OF_MODEL = {"model", "model_options"}
_FUNCTION = r"[^:.][^:]*:[^:]+"
"""Regular expression that matches ``module:function``."""


class Config(Section):
    """The content of params.yaml."""

    fetch: sections.Fetch = sections.Fetch()
    prepare: sections.Prepare = sections.Prepare()
    train: Train = Train()
    bench: sections.Bench = sections.Bench()
    profile: sections.Profile = sections.Profile()
    infer: sections.Infer = sections.Infer()
    compare: sections.Compare = sections.Compare()
    gate: sections.Gate = sections.Gate()
    publish: sections.Publish = sections.Publish()
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
        return self.train.model_copy(update=own.model_dump(include=_OF_MODEL) if own.model else {})

    def with_train(self, **changes: Any) -> Config:
        """Return a copy with other values under ``train``; the values are not validated."""
        return self.model_copy(update={"train": self.train.model_copy(update=changes)})


def load(path: Path = PARAMS_FILE) -> Config:
    """Return the validated configuration in the file ``path``. Raises ConfigError, which names the wrong keys."""
    values = read(path)
    config = parse(values, str(path))
    if problems := list(_misplaced(config, values)):
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return config


def read(path: Path) -> Any:
    """Return the content of the YAML file ``path``. Raises ConfigError if the file cannot be read, is not YAML, exceeds
    a limit, or has a key that is a duplicate or no text."""
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
            text = file.read(LIMIT + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing: run in the folder that has it, or run `python -m pipeline init` in a repository of "
            "your own."
        ) from None
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}.") from None
    if len(text) > LIMIT:
        raise ConfigError(f"{path}: more than {LIMIT:,} characters; this is not a params.yaml.")
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a date such as 2024-13-01
        raise ConfigError(f"{path} is not YAML: {error}") from None


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
        found = " and ".join(section for section in ("variants", "students") if name in values.get(section, {}))
        expected = "students" if config.teacher_of(name) else "variants"
        if found != expected:
            yield f"{found}.{name}: expected under {expected} only (students are variants that learn from a variant)."
        learns, others = variant.distillation, [each for each in config.variants if each != name]
        made_here = learns and learns.file and Path("models").resolve() in learns.file.resolve().parents
        if learns and (made_here or learns.variant not in (None, *others)):
            yield (
                f"{expected}.{name}.distillation.teacher: found {learns.teacher!r}; allowed: {', '.join(others)}, or "
                "the path of a file of weights outside of models, such as ./weights."
            )


def schema() -> str:
    """Return the JSON Schema of params.yaml (``params.schema.json``), which editors use for completion and checks.

    A key's description is the docstring under its field. For a variant's key, it also says what the techniques do.
    """
    described = Config.model_json_schema()
    keys = described["$defs"]["Variant"]["properties"]
    for each in CATALOGUE:
        said = keys[each.key].get("description", "")
        keys[each.key]["description"] = f"{said} {each.setting.partition(': ')[2]}: {each.does}.".lstrip()
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
    if len(set(config.train.seeds)) < len(config.train.seeds):
        yield f"train.seeds: found {config.train.seeds}; allowed: each seed once."
    yield from _own_code(config.train)
    for name, variant in config.variants.items():
        yield from _model_problems(f"variants.{name}.model", variant.model)
        unknown = extra_problems(variant)
        yield from (f"variants.{name}.{problem}" for problem in unknown)
        if unknown:
            continue
        yield from (f"variants.{name}.{key}: {problem}" for key, problem in misplaced(variant).items())
        if problem := contradiction(variant):
            yield f"variants.{name}: {problem}"
        if variant.scaling == "weak" and not config.train.warmup_fraction:
            # The technique's entry does not declare this condition, because ``verify`` runs steps without a warm-up.
            yield (
                f"variants.{name}.scaling: found 'weak' with train.warmup_fraction {config.train.warmup_fraction}; a "
                "learning rate that is multiplied must be warmed up: set train.warmup_fraction above 0."
            )


def _own_code(train: Train) -> Iterator[str]:
    """Yield the problems in the names of the task, model, loss and metric, and in the settings of the loss. Whether the
    named modules exist is not checked."""
    yield from _model_problems("train.model", train.model)
    loss, metric = sections.TASKS.get(train.task, sections.OF_OWN_TASK)
    for key, known in {"task": [*sections.TASKS], "loss": [loss], "metric": [metric]}.items():
        found = getattr(train, key)
        if found not in known and not re.fullmatch(_FUNCTION, found):
            yield f"train.{key}: found {found!r}; expected {', '.join(known)}, or module:name of your own."
    if train.loss == loss and train.loss_options:
        yield f"train.loss_options: found {train.loss_options}, but {train.loss} takes no options."
    if train.loss != "cross_entropy" and train.label_smoothing:
        yield f"train.label_smoothing: found {train.label_smoothing}, which {train.loss!r} ignores; set 0.0."


def _model_problems(key: str, name: str | None) -> Iterator[str]:
    if name is not None and not re.fullmatch(rf"\w+|{_FUNCTION}", name):
        yield f"{key}: found {name!r}; expected a model's name, or module:factory of your own, such as my_models:mlp."


class _UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys (PyYAML would silently keep the last value) and keys that are no text,
    such as ``no``. It also limits the length of a value, and the number of values. Values are counted after aliases are
    expanded, because a few lines of aliases can expand to more values than fit in RAM."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._counts: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        assert node is not None
        if not alias:
            inside = node.value if isinstance(node, yaml.CollectionNode) else ()
            if isinstance(node, yaml.MappingNode):
                inside = [each for pair in inside for each in pair]
            self._counts[node] = 1 + sum(self._counts[each] for each in inside)
        # A node without a count contains itself, so its values cannot be counted yet; it is refused too.
        if max(len(self._counts), self._counts.get(node, VALUES + 1)) > VALUES:
            raise yaml.composer.ComposerError(None, None, f"more than {VALUES:,} values", node.start_mark)
        if isinstance(node, yaml.ScalarNode) and len(node.value) > CHARACTERS:
            raise yaml.composer.ComposerError(None, None, f"more than {CHARACTERS:,} characters", node.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                kind = key.tag.rpartition(":")[2]  # YAML 1.1 reads no, on and 16 as other types than text
                typed = kind not in ("str", "merge")
                wrong = f"is of type {kind} in YAML; quote it" if typed else "occurs twice in one mapping"
                if typed or key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} {wrong}", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_UniqueKeyLoader.add_implicit_resolver(  # numbers such as 1e-3, which YAML 1.1 would read as text
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _mistakes(error: ValidationError, values: Any) -> list[str]:
    """Return a line for each wrong key in ``values``: its path, the value found, and what is allowed."""
    at: dict[tuple[Any, ...], list[Any]] = {}
    for each in error.errors(include_url=False):
        if each["type"] == "default_factory_not_called":  # another error is the reason
            continue
        at.setdefault(_path(each, values), []).append(each)
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
    found, kinds = errors[0]["input"], {each["type"] for each in errors}
    if "missing" in kinds:
        return "missing; it is required."
    if "extra_forbidden" in kinds:
        of_variant = Distillation if "distillation" in path[:-1] else Variant
        section: Any = of_variant if path[0] in ("variants", "students") else Config
        for key in path[:-1] if section is Config else ():
            section = section.model_fields[key].annotation
        return f"unknown key.{did_you_mean(path[-1], section.model_fields)} Allowed: {', '.join(section.model_fields)}."
    said = " or ".join(each["msg"] for each in errors).replace(" or Input should be ", " or ")
    allowed = re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping, such as {}", said)
    hint = did_you_mean(found, re.findall("'(.*?)'", allowed) if "literal_error" in kinds else ())
    if "string_type" in kinds and not isinstance(found, dict | list | None):
        hint = " If it is a name, quote it."
    return f"found {_shown(found)}; {allowed[0].lower()}{allowed[1:]}.{hint}"


def _shown(value: Any) -> str:
    """Return ``value`` for a message: null, true and false as in YAML, and at most 80 characters."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
