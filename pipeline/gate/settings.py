"""For each setting, choose the stricter of the base's and the head's values, so that no change loosens its own gate."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from pipeline.gate.decision import differing
from pipeline.params import PARAMS_FILE, Config, parse
from pipeline.params.loading import read_yaml
from pipeline.results.figures import ALWAYS_MEASURED


def _more_rounds(base: int | None, head: int | None) -> int | None:
    return None if base is None or head is None else max(base, head)


def _more_variants(base: list[str], head: list[str]) -> list[str]:
    return list(dict.fromkeys([*base, *head])) if base and head else []


STRICTER: Mapping[str, Callable[[Any, Any], Any]] = {
    "compare.baseline": lambda base, _: base,  # its noise decides which figures are trusted
    **{
        f"compare.margins.{quantity}": min
        for quantity in sorted(("accuracy", *(figure.margin for figure in ALWAYS_MEASURED)))
    },
    "compare.max_spread": min,
    "gate.accuracy": max,
    "gate.max_minutes": max,
    "gate.must_see": min,
    "gate.variants": _more_variants,
    "bench.max_foreign_load": min,
    "bench.max_input_wait": min,
    "bench.max_minutes": max,
    "bench.max_rounds": _more_rounds,
    "bench.turns": max,
    "bench.window_seconds": max,
}
"""Key of params.yaml -> the rule that computes the value to use from the base's and the head's values.
``bench.hard_limit`` needs no rule, because the gate does not pass if this limit ends the rounds too soon."""


def stricter(base: Mapping[str, Any], head: Mapping[str, Any]) -> dict[str, Any]:
    """Return, for each key whose values differ, the value that counts."""
    pairs = {key: (at(base, key), at(head, key)) for key in STRICTER}
    return {key: STRICTER[key](*pair) for key, pair in pairs.items() if pair[0] != pair[1]}


def at(values: Mapping[str, Any], key: str) -> Any:
    """Return the value at the dotted ``key``."""
    value: Any = values
    for part in key.split("."):
        value = value[part]
    return value


def judging(config: Config, base: Mapping[str, Any], against: str) -> Config:
    """Return the head's ``config`` with the requirements of ``base``: the variants that only the base has, and the
    stricter values.

    ``base``: sections of the base's params.yaml. Raises ConfigError if this version cannot parse one of its variants.
    """
    values = config.model_dump(mode="json")
    for key, value in stricter(base, values).items():
        section, _, name = key.rpartition(".")
        at(values, section)[name] = value
    values["variants"] = {**base.get("variants", {}), **values["variants"]}
    return parse(values, f"{PARAMS_FILE}, with the stricter requirements of {against}")


def require(root: Path, effective: Config, own: Mapping[str, Any], lacking: Collection[str] = ()) -> bool:
    """Write the limits of ``effective`` for rejecting samples, and the variants that are ``lacking``, into the
    params.yaml of a side's copy; return True if it changed.

    ``root``: the copy. ``own``: sections of its params.yaml.
    """
    limits = {key: getattr(effective.bench, key) for key in ("max_foreign_load", "max_input_wait")}
    if not lacking and all(own["bench"][key] == value for key, value in limits.items()):
        return False
    values = read_yaml(root / PARAMS_FILE)  # the other keys stay as written, because DVC compares them
    for name in sorted(lacking):
        section = "students" if effective.teacher_of(name) else "variants"
        values.setdefault(section, {})[name] = effective.variants[name].model_dump(mode="json")
    values["bench"] = {**values.get("bench", {}), **limits}
    text = json.dumps(values, indent=2, ensure_ascii=False)  # JSON is YAML whose texts are quoted, also the text 1e-3
    (root / PARAMS_FILE).write_text(text, encoding="utf-8")
    return True


def differences(base: Mapping[str, Any], head: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting in which the sides differ, with the value that counts."""
    return [
        f"{line}; {json.dumps(value)} counts"
        for key, value in stricter(base, head).items()
        for line in differing(at(base, key), at(head, key), key)
    ]
