from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from pipeline.comparison.comparison_file import Comparison
from pipeline.results import Bench, Flops, HistoryRow, Result
from tests.factories import (
    foreign_load,
    make_bench,
    make_comparison,
    make_histories,
    make_result,
    make_results,
    make_run,
    with_samples,
)

REASON = foreign_load()
HOSTILE = "$\\x_1$<img src=x onerror=alert(1)>|`*\"'&"


def plain(text: str) -> str:
    """Return ``text`` with typographic characters replaced by ASCII."""
    return text.translate({0xA0: " ", ord("\N{MINUS SIGN}"): "-", ord("\N{MULTIPLICATION SIGN}"): "x"})


def without_memory(bench: Bench) -> Bench:
    """Return ``bench`` as it would be if the machine did not report memory."""
    unknown = {"peak_memory_bytes": None}
    return with_samples(bench, lambda arm: [sample.model_copy(update=unknown) for sample in arm.samples])


class Made(NamedTuple):
    """A comparison, and the histories from which it was made."""

    comparison: Comparison
    histories: Mapping[str, Sequence[HistoryRow]]


def made(measured: Sequence[Result], **bench: Any) -> Made:
    histories = make_histories(measured)
    return Made(make_comparison(measured, make_bench(measured, **bench), histories), histories)


@pytest.fixture(scope="session")
def usual() -> Made:
    """The variant ddp pays. The variant memory trades, and each of its techniques was measured on its own."""
    return made(make_results(), ablate=True)


@pytest.fixture(scope="session")
def mixed() -> Made:
    """One variant for each verdict, named after its verdict."""
    throughput = {"pays": 1.5, "costs": 0.7, "neutral": 1.0, "undecided": 1.04, "untrusted": 1.5, "trades": 1.5}
    measured = [
        make_result(name, [make_run(seed, test_correct=9000 + 3 * seed) for seed in range(3)])
        for name in ("baseline", *throughput)
    ]
    refused = {"untrusted": dict.fromkeys(range(2, 10), REASON)}
    return made(measured, throughput=throughput, memory={"trades": 1.5}, rejected=refused)


@pytest.fixture(scope="session")
def silent() -> Made:
    """A machine that reports no memory, and a model whose operations cannot be counted."""
    bench = without_memory(make_bench())
    flops = dict.fromkeys(bench.flops, Flops(model_per_sample=0, executed_per_sample=0, peak_per_second=None))
    return made(make_results(), arms=bench.arms, flops=flops)


@pytest.fixture(scope="session")
def hostile() -> Made:
    """Names and reasons that contain markup, which the report must show as text."""
    baseline = make_result("baseline")
    config = {**baseline.config, "train": {**baseline.config["train"], "model": HOSTILE}}
    applied: dict[str, Any] = {"extra": {HOSTILE: {}}}
    hostile_result = make_result("other", config=config, applied=applied, skipped={HOSTILE: HOSTILE}, device=HOSTILE)
    measured = [baseline.model_copy(update={"config": config, "device": HOSTILE}), hostile_result]
    return made(measured, rejected={"other": dict.fromkeys(range(8), HOSTILE)}, commit=HOSTILE)
