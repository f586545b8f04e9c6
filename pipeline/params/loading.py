"""params.yaml, read and checked: every mistake named with its key, what was found there and what is allowed."""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pipeline.errors import ConfigError
from pipeline.params.catalogue import contradiction, extra_problems, misplaced
from pipeline.params.sections import Config, Train, Variant

PARAMS_FILE = Path("params.yaml")
SCHEMA_FILE = Path("params.schema.json")

_FUNCTION = r"[^:.][^:]*:[^:]+"
"""module:function, as a regular expression."""


def load(path: Path = PARAMS_FILE) -> Config:
    """Read and validate ``path``. Raises ConfigError, naming every offending key."""
    return parse(read(path), str(path))


def read(path: Path) -> Any:
    """What the YAML file ``path`` holds. Raises ConfigError if it cannot be read, is no YAML, or has a key twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: run from the top of the checkout.") from None
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}.") from None
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a date such as 2024-13-01
        raise ConfigError(f"{path} is not YAML: {error}") from None


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


def schema() -> str:
    """The JSON Schema of params.yaml (``params.schema.json``), with which editors complete and check it."""
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **_schema()}, indent=2) + "\n"


@functools.cache
def _schema() -> dict[str, Any]:
    described = Config.model_json_schema()
    described["properties"]["variants"]["additionalProperties"] = False  # a name that does not fit is no variant
    return described


def _contradictions(config: Config) -> Iterator[str]:
    """What each key allows alone but the whole cannot mean, on any machine."""
    if config.compare.baseline not in config.variants:
        yield (
            f"compare.baseline: found {config.compare.baseline!r}, which is not under variants; "
            f"allowed: {', '.join(config.variants)}."
        )
    listed = {
        "bench.ablate": config.bench.ablate,
        "profile.variants": config.profile.variants,
        "infer.variants": config.infer.variants,
    }
    for key, names in listed.items():
        for name in names:
            if name not in config.variants:
                yield f"{key}: found {name!r}, which is not under variants; allowed: {', '.join(config.variants)}."
    if config.fetch.dataset == "image_folder":
        if config.fetch.image_folder is None:
            yield "fetch.image_folder: found null; dataset image_folder needs the directory's path."
        if config.prepare.image_size is None:
            yield "prepare.image_size: found null; dataset image_folder needs [height, width]."
    if len(set(config.train.seeds)) < len(config.train.seeds):
        yield f"train.seeds: found {config.train.seeds}; each seed may stand there once."
    yield from _own_code(config.train)
    for name, variant in config.variants.items():
        if variant.parallelism == "none" and variant.processes not in ("auto", 1):
            yield (
                f"variants.{name}.processes: found {variant.processes} without a parallelism; "
                "set parallelism: ddp, or take processes out."
            )
        if variant.data_loading != "dataloader" and variant.loader_workers != Variant().loader_workers:
            yield (
                f"variants.{name}.loader_workers: found {variant.loader_workers} with data_loading "
                f"{variant.data_loading!r}; set data_loading: dataloader, or take loader_workers out."
            )
        if variant.parallelism == "none" and variant.replicas > 1:
            yield (
                f"variants.{name}.replicas: found {variant.replicas} without a parallelism; "
                "set parallelism: fsdp, or take replicas out."
            )
        unknown = extra_problems(variant)
        yield from (f"variants.{name}.{problem}" for problem in unknown)
        if unknown:
            continue
        yield from (f"variants.{name}.{key}: {problem}" for key, problem in misplaced(variant).items())
        if variant.parallelism == "data_parallel" and variant.processes not in ("auto", 1):
            yield (
                f"variants.{name}.processes: found {variant.processes} with parallelism 'data_parallel', which is one "
                "process for all GPUs; take processes out."
            )
        if variant.parallelism != "pipeline" and variant.schedule != "1f1b":
            yield (
                f"variants.{name}.schedule: found {variant.schedule!r} without a pipeline; set parallelism: pipeline, "
                "or take schedule out."
            )
        if variant.compile != "none" and variant.bucket_mb is not None and variant.bucket_mb < 1:
            yield (
                f"variants.{name}.bucket_mb: found {variant.bucket_mb} with compile {variant.compile!r}, whose graphs "
                "end where buckets end, the first of which has 1 MiB; allowed: 1 or more."
            )
        problem = contradiction(variant)
        if problem:
            yield f"variants.{name}: {problem}"
        if variant.scaling == "weak" and not config.train.warmup_fraction:
            yield (
                f"variants.{name}.scaling: found 'weak' with train.warmup_fraction {config.train.warmup_fraction}; a "
                "learning rate that is multiplied must be warmed up: set train.warmup_fraction above 0."
            )


def _own_code(train: Train) -> Iterator[str]:
    """What is wrong with the names of model, loss and metric, as far as it shows without their modules."""
    if not re.fullmatch(rf"\w+|{_FUNCTION}", train.model):
        yield (
            f"train.model: found {train.model!r}; expected the name of a model, or module:factory of your own, such as "
            "my_models:mlp."
        )
    for key, known, example in (("loss", "cross_entropy", "my_losses:focal"), ("metric", "accuracy", "my_scores:top")):
        found = getattr(train, key)
        if found != known and not re.fullmatch(_FUNCTION, found):
            yield f"train.{key}: found {found!r}; expected {known!r} or module:function, such as {example}."
    if train.loss == "cross_entropy" and train.loss_options:
        yield (
            f"train.loss_options: found {train.loss_options}, but cross_entropy takes none; label smoothing is "
            "train.label_smoothing."
        )
    if train.loss != "cross_entropy" and train.label_smoothing:
        yield (
            f"train.label_smoothing: found {train.label_smoothing}, but train.loss is {train.loss!r}, which it does "
            "not reach; set 0.0, and smooth in your own loss."
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
    if found is None and _allowed(node) == "a mapping":
        return f" {'Leave it out' if len(path) > 1 else f'Write {path[0]}: {{}}'} to take its defaults."
    return ""


def _shown(value: Any) -> str:
    """``value`` as a person wrote it, shortened."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
