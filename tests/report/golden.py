"""Whole reports of fixed results, as files beside this one: the Markdown, and the page as a screen reader reads it.

After a change of the reports' text, run ``python -m tests.report.golden``, which rewrites the files, and read
``git diff``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.comparison.compare import compare
from pipeline.params import Compare
from pipeline.report import html, markdown
from pipeline.results import Bench, Dataset, Window
from tests.factories import (
    ENVIRONMENT,
    make_bench,
    make_flops,
    make_histories,
    make_ledgers,
    make_result,
    make_results,
    make_run,
    make_session,
    with_samples,
)
from tests.report.conftest import REASON, Made, made
from tests.report.reader import Page

FILES = Path(__file__).with_name("golden")


def every_verdict() -> Made:
    """One variant for each verdict on a GPU, effects of single techniques, and every kind of remark on a variant."""
    baseline, ddp, memory = make_results()
    seeds = {
        "costs": [make_run(seed, test_correct=8700 + 3 * seed) for seed in range(3)],
        "neutral": [make_run(seed, test_correct=9000 + 3 * seed) for seed in range(3)],
        "undecided": [make_run(seed, test_correct=9000 + off) for seed, off in enumerate((90, -90, 20))],
        "untrusted": [make_run(seed, test_correct=9150 + 30 * seed) for seed in range(3)],
    }
    disturbed = (
        make_run(0, test_correct=8990, samples_per_second=16_000.0),
        make_run(1, test_correct=9035, samples_per_second=None, rejections=("the GPU throttled",)),
        make_run(2, test_correct=8995, rejections=("the GPU throttled", "something recompiled."), resumes=1,
                 samples_per_second=None),
    )  # fmt: skip
    weak = {
        "applied": {**ddp.applied, "scaling": "weak", "gradient_accumulation": "auto", "data_loading": "dataloader"},
        "batch_size": 512, "learning_rate": 0.2, "micro_batches": 2,
        "decided": {"auto_micro_batch": "2 micro-batches of 128 samples per process, as 256 did not fit"},
    }  # fmt: skip
    measured = [
        baseline,
        ddp.model_copy(update=weak),
        memory.model_copy(update={"runs": disturbed}),
        make_result("costs", seeds["costs"]),
        make_result("neutral", seeds["neutral"], applied={"channels_last": True}),
        make_result("undecided", seeds["undecided"]),
        make_result("untrusted", seeds["untrusted"]),
    ]
    throughput = {"ddp": 1.6, "memory": 0.8, "costs": 0.7, "undecided": 1.04, "untrusted": 1.5}
    refused = {
        "ddp": {4: REASON, 6: REASON.replace("31", "48"), 7: "the allocator retried"},
        "untrusted": dict.fromkeys(range(2, 10), REASON),
    }
    bench = make_bench(measured, throughput=throughput, rejected=refused, ablate=True)
    arms = with_samples(bench, lambda arm: map(_on_gpu, arm.samples)).arms
    ledgers = bench.ledgers | {"ddp": make_ledgers(predicted=None, why_not_predicted="DDP is not predicted.")}
    del ledgers["untrusted"]
    flops = {each.variant: make_flops(each.applied, 1e12) for each in measured} | {"costs": make_flops({})}
    return made(measured, throughput=throughput, rejected=refused, ablate=True, arms=arms, ledgers=ledgers, flops=flops)


def _on_gpu(window: Window) -> Window:
    peak = window.peak_memory_bytes or 0
    held = {"peak_reserved_bytes": peak + 2**25, "driver_memory_bytes": peak + 2**28, "allocator_retries": 0}
    return window.model_copy(update=held | ({"allocator_retries": 1} if "retried" in str(window.rejections) else {}))


def stopped() -> Made:
    """An interrupted bench on a noisy machine, with one seed, few test images, and the user's own loss and metric."""
    dataset = Dataset(name="digits", sha256="d" * 64, train_count=1_500, test_count=297)
    train = {"loss": "my_losses:focal", "metric": "my_scores:top_two"}
    measured = []
    for name, right in (("baseline", 280.5), ("ddp", 281.25)):
        run = make_run(0, test_correct=0).model_copy(
            update={"test_correct": right, "test_count": 297, "test_accuracy": right / 297, "model_sha256": name}
        )
        result = make_result(name, [run], dataset=dataset, applied={} if name == "baseline" else {"parallelism": name})
        measured.append(result.model_copy(update={"config": result.config | {"train": result.config["train"] | train}}))
    return made(measured, rounds=4, noise=0.5, rejected={}, interrupted=True, commit=f"{'0123456789' * 4}+")


def alone() -> Made:
    """Only a baseline, most of whose figures are unknown."""
    runs = [make_run(seed, samples_per_second=None, peak_memory_bytes=None) for seed in range(3)]
    every = {"baseline": dict.fromkeys(range(12), REASON)}
    return made([make_result("baseline", runs)], rejected=every, ledgers={}, flops={}, commit=None)


def over_sessions() -> Made:
    """Four sessions of three variants: one session was noisy, and in the oldest one, ddp had other settings."""
    measured = make_results()

    def session(day: int, ddp: float, **changes: Any) -> Bench:
        start = make_session(f"2026-11-{day}T08:00", boot_id=f"{day}-boot", steal_fraction=0.012, load_average=0.5)
        return make_bench(measured, throughput={"ddp": ddp, "memory": 0.8}, rejected={}, session=start, **changes)

    before = {"baseline": "k", "ddp": "before", "memory": "k"}
    sessions = [session(20, 1.5), session(17, 1.02, keys=before), session(18, 1.3), session(19, 1.4, noise=0.5)]
    histories = make_histories(measured)
    return Made(compare(measured, histories, sessions, Compare(), ENVIRONMENT), histories)


REPORTS: Mapping[str, Callable[[], Made]] = {
    "every_verdict": every_verdict,
    "stopped": stopped,
    "alone": alone,
    "over_sessions": over_sessions,
}


def texts(name: str) -> dict[str, str]:
    """Return file -> the text that the file must contain."""
    found = REPORTS[name]()
    heard = Page(html(found.comparison, found.histories)).heard
    return {f"{name}.md": markdown(found.comparison), f"{name}.txt": heard}


if __name__ == "__main__":
    FILES.mkdir(exist_ok=True)
    for name in REPORTS:
        for file, text in texts(name).items():
            (FILES / file).write_text(text, encoding="utf-8")
