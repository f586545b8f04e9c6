from __future__ import annotations

import json
from pathlib import Path
from string import Formatter
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline import results
from pipeline.results import Window
from pipeline.results.rejections import KINDS, Rejection, by_kind, lines, most_common, rejection
from tests.factories import foreign_load, make_bench, make_window

FACTS: dict[str, float | str] = {
    "error": "Permission denied", "gpu": "GPU 1", "place": "/sys/class/powercap", "slowdowns": "power brake",
    "remedy": "raise bench.window_seconds", "steps": "4, 5", "text": "it throttled",
    "limit": 0.005, "share": 0.314, "of_measured": 0.05, "of_waited": 0.01, "credited": 1024, "model": 512, "loss": 256,
}  # fmt: skip
"""Fact -> its value in a golden sentence; other facts are 2."""
ADVICE: dict[str, tuple[str, float | str]] = {
    "foreign_load": ("bench.max_foreign_load", 0.5),
    "input_wait": ("train.placement", "resident"),
}


def worded(code: str, advice: tuple[str, float | str] | None = None) -> str:
    names = {name for _, name, _, _ in Formatter().parse(KINDS[code].sentence) if name} - {"advice"}
    return rejection(code, advice, **{name: FACTS.get(name, 2) for name in names}).text


def test_every_code_has_its_sentence() -> None:
    golden = Path(__file__).with_name("rejections.txt").read_text(encoding="utf-8").splitlines()
    advised = [f"{code}, advised: {worded(code, ADVICE[code])}" for code in ADVICE]
    assert golden == [*(f"{code}: {worded(code)}" for code in KINDS), *advised]
    assert {code for code, kind in KINDS.items() if kind.advice} == set(ADVICE)


def test_the_singular_and_the_plural_are_one_kind() -> None:
    once, twice = (rejection("gpu_shared", others=others, gpu="the GPU") for others in (1, 2))
    assert [rejection.text.partition(" used")[0] for rejection in (once, twice)] == [
        "1 other process",
        "2 other processes",
    ]
    rounds = [[], [foreign_load()], [once], [twice]]
    assert by_kind(enumerate(rounds, 1)) == [(foreign_load(), [2]), (once, [3, 4])]
    assert [line.partition(":")[0] for line in lines(rounds)] == [f"rejected in {n} of 4 rounds" for n in (1, 2)]
    assert most_common([foreign_load(), once, twice]) == once
    assert most_common([]) is None


def test_ranks_of_one_cause_are_one_kind() -> None:
    assert len(by_kind([(1, [foreign_load().of_rank(0)]), (2, [foreign_load(0.2).of_rank(1)])])) == 1
    assert len(by_kind([(1, [rejection("told", text=text) for text in ("too hot", "too full")])])) == 2


def test_a_bench_of_texts_is_read(tmp_path: Path) -> None:
    bench = make_bench(rejected={"ddp": {4: foreign_load()}})
    values = json.loads(bench.to_json()) | {"schema": 3}
    values["arms"][1]["samples"][4]["rejections"] = ["other processes took 31%."]
    (tmp_path / "bench.json").write_text(json.dumps(values))
    found = results.read_bench(tmp_path / "bench.json")
    (read,) = found.arms[1].samples[4].rejections
    assert (read, read.text) == (rejection("told", text="other processes took 31%."), "other processes took 31%")
    assert json.loads(found.to_json())["schema"] == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"code": "unheard_of"},
        {"code": "foreign_load"},
        {"code": "gpu_shared", "facts": {"others": "many", "gpu": "the GPU"}},
        {"code": "no_step", "facts": {"warmup": [1]}},
        {"code": "no_step", "facts": {"warmup": -1}},
        {"code": "no_step", "facts": {"warmup": 10**400}},
        {"code": "told", "facts": {"text": "a" * 100_000}},
        {"code": "told", "facts": {"text": "a"} | {str(number): 1 for number in range(99)}},
        {"code": "told", "facts": {"text": "a"}, "advice": {"setting": "bench", "value": float("nan")}},
        {"code": "told", "facts": {"text": "a"}, "advice": {"setting": "a" * 100_000, "value": 1.0}},
        "a" * 100_000,
        7,
    ],
    ids=str,
)
def test_a_rejection_that_cannot_be_worded_is_refused(wrong: Any) -> None:
    with pytest.raises(ValidationError):
        Window.model_validate({**dict(make_window()), "rejections": [wrong]})


def test_a_fact_is_text_and_no_template() -> None:
    text = "{0.__class__} %s {text}"
    assert Rejection.model_validate(text).text == text
