"""Whole pages of fixed results, as files beside this one: the Markdown, and the HTML as a screen reader reads it.

After a change of the pages' text, run ``python -m tests.report.golden``, which rewrites the files, and read
``git diff``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.comparison.advice import accuracy_reasons, correlation_reasons, ratio_reasons, seeds_outlook
from pipeline.comparison.compare import compare
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.stats import Difference
from pipeline.gate import decision
from pipeline.gate import markdown as gate_page
from pipeline.pages import render
from pipeline.params import Compare, Margins
from pipeline.profiling.steps import Finding, Profile
from pipeline.profiling.trace import Operator, StepTimes
from pipeline.report import facts, html, markdown
from pipeline.results import Bench, DatasetFacts, Result, ScoreName, Unit, Window
from pipeline.results.figures import THROUGHPUT
from pipeline.results.rejections import rejection
from pipeline.tools import verification
from pipeline.tools.inference import Inference
from pipeline.tools.verification.claims import UNMEASURABLE, UNPROMISED, Claim
from pipeline.training.measured import waits
from tests.factories import (
    ENVIRONMENT,
    TEN_IN_TEN_MINUTES,
    foreign_load,
    known,
    make_accuracy,
    make_bench,
    make_comparison,
    make_flops,
    make_histories,
    make_history,
    make_ledgers,
    make_ratio,
    make_result,
    make_results,
    make_run,
    make_session,
    ratio_of,
    with_samples,
)
from tests.report.conftest import REASON, Made, made
from tests.report.reader import Page

RETRIED = rejection("allocator_retried", retries=1)
THROTTLED = rejection("gpu_throttled", gpu="the GPU", slowdowns="power brake", slow=3, queries=20, limit=0.05)
FILES = Path(__file__).with_name("golden")


def every_verdict() -> Made:
    """One variant for each verdict on a GPU, effects of single techniques, and every kind of remark on a variant."""
    baseline, ddp, memory = make_results()
    seeds = {
        "costs": [make_run(seed, test_correct=8700 + 3 * seed) for seed in range(3)],
        "neutral": [make_run(seed, test_correct=9000 + 3 * seed) for seed in range(3)],
        "undecided": [make_run(seed, test_correct=9000 + off) for seed, off in enumerate((90, -90, 20))],
        "untrusted": [make_run(seed, test_correct=9250 + 30 * seed) for seed in range(3)],
    }
    disturbed = (
        make_run(0, test_correct=8990, samples_per_second=16_000.0),
        make_run(1, test_correct=9035, samples_per_second=None, rejections=(THROTTLED,)),
        make_run(2, test_correct=8995, rejections=(THROTTLED, rejection("recompiled", seconds=0.5)), resumes=1,
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
        "ddp": {4: REASON, 6: foreign_load(0.48, 0.6), 7: RETRIED},
        "untrusted": dict.fromkeys(range(2, 10), REASON),
    }
    bench = make_bench(measured, throughput=throughput, rejected=refused, ablate=True)
    arms = with_samples(bench, lambda arm: map(_on_gpu, arm.samples)).arms
    ledgers = bench.ledgers | {"ddp": make_ledgers(predicted=None, why_not_predicted="DDP is not predicted.")}
    del ledgers["untrusted"]
    flops = {result.variant: make_flops(result.applied, 1e12) for result in measured} | {"costs": make_flops({})}
    return made(measured, throughput=throughput, rejected=refused, ablate=True, arms=arms, ledgers=ledgers, flops=flops)


def _on_gpu(window: Window) -> Window:
    peak = window.peak_memory_bytes or 0
    held = {"peak_reserved_bytes": peak + 2**25, "driver_memory_bytes": peak + 2**28, "allocator_retries": 0}
    return window.model_copy(update=held | ({"allocator_retries": 1} if RETRIED in window.rejections else {}))


def stopped() -> Made:
    """An interrupted bench on a noisy machine, with one seed, few test images, and the user's own loss and metric."""
    dataset = DatasetFacts(name="digits", sha256="d" * 64, train_count=1_500, test_count=297)
    train = {"loss": "my_losses:focal", "metric": "my_scores:macro_f1", "metric_over": "test_set"}
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


def two_hosts() -> Made:
    """Four processes on two hosts, whose last one is slow; and as many whose parameters are divided, so that it is
    unknown how long each of them computes."""
    baseline, ddp, _ = make_results()
    apart = {"backend": "gloo", "world_size": 4, "hosts": 2, "threads_per_process": 1}
    sharded = {"applied": {**ddp.applied, "parallelism": "fsdp"}}
    measured = [baseline, ddp.model_copy(update=apart), make_result("fsdp", [*ddp.runs], **apart, **sharded)]
    session = make_session(hosts=("node-1", "node-2"))
    bench = make_bench(measured, rejected={})
    bench = with_samples(bench, lambda arm: map(_slowed if arm.variant == "ddp" else Window.model_copy, arm.samples))
    comparison, histories = made(measured, rejected={}, session=session, arms=bench.arms)
    links = [{"name": name, "machine": 0} for name in session.hosts]
    environment = ENVIRONMENT | {"hardware": ENVIRONMENT["hardware"] | {"hosts": links}}
    return Made(comparison.model_copy(update={"environment": environment}), histories)


def _slowed(window: Window) -> Window:
    times = (4.0, 4.5, 4.25, 6.0)
    return window.model_copy(
        update={"arithmetic_ms": 6.0, "arithmetic_rank_ms": times} | waits(times, known(window.step_p50_ms), 0.004)
    )


def student() -> Made:
    """A language model with a figure of its own, and its student, which takes 0.6 of the baseline's steps in the same
    time and reaches the target before its first evaluation. The task, loss and metric are the user's own."""
    unit, direction = Unit(name="tokens", per_sample=256), {"perplexity": "lower is better"}
    own = {"task": "my_tasks:Autoencoding", "loss": "loss", "metric": "token_accuracy"}
    taught = {"model": "resnet9", "distillation": {"teacher": "baseline"}}
    measured = []
    for name, right, applied, count in (("baseline", 9000, {}, 21_840), ("student", 9300, taught, 9)):
        runs = [make_run(seed, steps=705, test_correct=right) for seed in range(3)]
        runs = [run.model_copy(update={"findings": {"perplexity": 8.0}}) for run in runs]
        result = make_result(
            name, runs, applied=applied, parameter_count=count, trained_count=5 if applied else None, unit=unit,
            directions=direction,
            dataset=known(make_result().dataset).model_copy(
                update={"test_in_train_count": 12, "test_repeated_count": 3}
            ),
        )  # fmt: skip
        measured.append(result.model_copy(update={"config": result.config | {"train": result.config["train"] | own}}))
    histories = make_histories(measured) | {"student": make_history(accuracies=(0.9, 0.91, 0.93))}
    bench = make_bench(measured, throughput={"student": 0.6}, noise=0.0)
    return Made(make_comparison(measured, bench, histories), histories)


REPORTS: Mapping[str, Callable[[], Made]] = {
    "student": student,
    "every_verdict": every_verdict,
    "stopped": stopped,
    "alone": alone,
    "over_sessions": over_sessions,
    "two_hosts": two_hosts,
}


def inference() -> str:
    """Forms on two devices: each kind of figure that a form can lack, and a device that was too noisy for ratios."""

    def throughput(size: int, rate: float, ratio: float, why: str | None = None, **energy: Any) -> dict[str, Any]:
        ends = {"low_samples_per_second": 0.9 * rate, "high_samples_per_second": 1.1 * rate}
        difference = make_ratio(ratio, 0.95 * ratio, 1.05 * ratio, why_untrusted=why).model_dump()
        return {"batch_size": size, "samples_per_second": rate, "ratio": difference} | ends | energy

    def form(name: str, kind: str, ratios: Sequence[float], why: str | None = None, **changes: Any) -> dict[str, Any]:
        joules = {"joules_per_sample": 0.00123, "low_joules_per_sample": 0.00119, "high_joules_per_sample": 0.0013}
        measured = {
            "prepare_seconds": 12.34,
            "model_bytes": 88_840,
            "file_bytes": None,
            "latency": {"p50_ms": 0.2104, "p50_low_ms": 0.2, "p50_high_ms": 0.25, "p99_ms": 0.8, "calls": 400},
            "throughput": [
                throughput(1, 4_321.0, ratios[0], why, **joules),
                throughput(256, 98_765.4, ratios[1], why_no_energy="its counter stood still"),
            ],
            "agreement": {
                "equal_count": 9_990, "correct_count": 9_012.5, "test_count": 10_000,
                "largest_logit_difference": 0.0123,
            },
            "remarks": [],
        }  # fmt: skip
        about = {"name": name, "device": f"a {kind.upper()}", "device_type": kind, "does": f"the form {name}"}
        return about | {"why_not": None, "measured": measured | changes}

    absent = {"why_not": "it needs torchao, which is not installed: pip install torchao", "measured": None}
    unknown: dict[str, Any] = {
        "latency": {"p50_ms": 0.2, "p50_low_ms": 0.2, "p50_high_ms": 0.2, "p99_ms": None, "calls": 50}
    }
    large = {"joules_per_sample": 1_234.0, "low_joules_per_sample": 1_230.0, "high_joules_per_sample": 1_250.0}
    slow = [throughput(size, 0.42, 1.0, "the machine changed", **large) for size in (1, 256)]
    remark = "torch.compile broke the graph 2 times"
    return render(
        "inference.md",
        inference=Inference.model_validate(
            {
                "variant": "baseline",
                "environment": "e",
                "config": {"train": {}, "infer": {"energy": True}},
                "dataset": {"name": "digits", "sha256": "d" * 64, "train_count": 1_500, "test_count": 297},
                "seed": 3,
                "model_sha256": "m" * 64,
                "rounds": 8,
                "threads": 1,
                "forms": [
                    form("eager", "cpu", (1.004, 0.99)),
                    form("exported", "cpu", (1.23, 1.23), file_bytes=123_456),
                    form("compiled", "cpu", (1.5, 1.5), remarks=[remark]),
                    form("int8", "cpu", (1.0, 1.0)) | absent,
                    form("eager", "cuda", (1.2, 1.0), **unknown, throughput=slow),
                ],
            }
        ),
    )


def profile() -> str:
    """Two ranks whose communication is partly hidden, a profiler that costs much, and a memory snapshot."""
    times = {"step_ms": 10.0, "forward_ms": 2.0, "backward_ms": 4.0, "optimizer_ms": 1.0, "rest_ms": 0.5}
    times |= {"communication_ms": 1.0, "input_ms": 0.5, "idle_ms": 1.0, "communication_hidden_ms": 0.25}
    setup = make_result("ddp").model_copy(update={"backend": "gloo", "world_size": 2})
    return render(
        "profile.md",
        profile=Profile(
            **dict(setup.conditions),
            variant="ddp",
            environment="e",
            config={},
            dataset=setup.dataset,
            seed=0,
            steps=20,
            step_p50_ms=7.5,
            profiled_step_p50_ms=10.0,
            ranks=(StepTimes(**times), StepTimes(**times | {"idle_ms": 0.5, "communication_ms": 1.5})),
            operators=(Operator(name="aten::convolution_backward", calls_per_step=2.5, step_ms=1.23456),),
            findings=(
                Finding(rule="idles", share_fraction=0.1, text="For 10% of the step, no operator runs."),
                Finding(rule="updates", share_fraction=0.1, text="The optimizer takes 10% of the step."),
            ),
            has_memory_snapshot=True,
        ),
        on_gpu=True,
    )


def advice() -> str:
    """The advice of comparisons that differ in what is decided: a line for each."""
    untrusted, names = dict.fromkeys(range(2, 10), REASON), ("baseline", "small", "open")
    small = {"throughput": {"small": 0.8, "open": 1.04}, "memory": {"small": 0.5}}

    def job(count: int, seeds: int = 3, right: Sequence[int] = (9000, 9000, 9000)) -> list[Result]:
        return [
            make_result(name, [make_run(seed, test_correct=correct) for seed in range(seeds)])
            for name, correct in zip(names[:count], right, strict=False)
        ]

    unclear = {"throughput": {"small": 0.96}, "memory": {"small": 0.5}, "rejected": {}, "noise": 0.02}
    cases = {
        "one saves memory, the other is open": made(job(3), **small, rejected={}),
        "one saves memory, the other is untrusted": made(job(3), **small, rejected={"open": untrusted}),
        "one saves memory": made(job(2), **small, rejected={}),
        "one saves memory, with one seed": made(job(2, 1, right=(9000, 9001)), **small, rejected={}),
        "nothing is better": made(job(2), throughput={"small": 0.8}, rejected={}),
        "the price is open": made(job(2, right=(9000, 9001)), **unclear),
        "the price is open, one seed": made(job(2, 1, right=(9000, 9001)), **unclear),
        "only memory is trusted": made(
            job(2), memory={"small": 0.5}, rejected=dict.fromkeys(("baseline", "small"), untrusted)
        ),
        "only memory is trusted, the other equals": made(job(3), memory={"small": 0.5}, rejected={"small": untrusted}),
    }
    return "".join(f"{case}: {facts.advice(report.comparison)}\n" for case, report in cases.items())


def reasons() -> str:
    """What would decide an undecided figure, and how many seeds a training needs: a line for each case."""
    sums = ratio_of([1000.0, 1010.0, 1025.0, 1030.0, 1040.0, 1060.0], [1000.0] * 6)
    few, lost = ratio_of([9.0] * 3, [9.0] * 3), ratio_of([9.0, 9.0, 9.0, "hot", "hot"], [9.0] * 5)
    close, unused = ratio_of([10.3, 10.7, 10.4, 10.6, 10.2, 10.8], [10.0] * 6), TEN_IN_TEN_MINUTES._replace(seconds=1e2)
    sessions = {"parts": dict.fromkeys("123", sums)}

    def undecided(**changes: Any) -> Difference:
        return sums.model_copy(update={"more_pairs": 4} | changes)

    throughput: dict[str, tuple[Difference, RoundCost]] = {
        "decided": (ratio_of([12.0] * 6, [10.0] * 6), TEN_IN_TEN_MINUTES),
        # Ten rounds take ten minutes. One more minute is added, because some rounds take longer than the mean.
        "four more rounds": (undecided(), TEN_IN_TEN_MINUTES),
        "four more rounds of a second": (undecided(), RoundCost("bench.max_minutes", 100, 100.0)),
        "four more rounds where rounds are limited": (undecided(), RoundCost("bench.max_rounds", 6, 100.0)),
        "half of the rounds rejected": (undecided(rejected=6), TEN_IN_TEN_MINUTES),
        "eight rounds, two more": (undecided(pairs=8, more_pairs=2), TEN_IN_TEN_MINUTES),
        "eight rounds, no forecast": (undecided(pairs=8, more_pairs=None), TEN_IN_TEN_MINUTES),
        "an hour is enough": (undecided(more_pairs=53), TEN_IN_TEN_MINUTES),
        "more than an hour": (undecided(more_pairs=54), TEN_IN_TEN_MINUTES),
        "three sessions, two more": (undecided(more_sessions=2, **sessions), TEN_IN_TEN_MINUTES),
        "three sessions, no forecast": (undecided(more_sessions=None, **sessions), TEN_IN_TEN_MINUTES),
        "too few rounds": (few, TEN_IN_TEN_MINUTES),
        "too few rounds, because some were rejected": (lost, TEN_IN_TEN_MINUTES),
        "too few rounds of a slow job": (few, RoundCost("bench.max_minutes", 1, 900.0)),
        "minutes that were not used up": (close, unused),
        "fewer minutes, all used up": (close, unused._replace(minutes=2.0)),
    }
    some = make_accuracy([-0.009, 0.006, 0.004])
    accuracy = {
        "equal": make_accuracy([0.0] * 3),
        "one seed": make_accuracy([0.0]),
        "two seeds": make_accuracy([0.0] * 2),
        "three seeds": some,
        "three seeds, too many more": some.model_copy(update={"more_pairs": 21}),
        "three seeds, no forecast": some.model_copy(update={"more_pairs": None}),
    }
    # 12 rounds with a correlation of 1/2 count as 4: t_3 is 3.1824, t_11 2.2010, so 3.1824 / 2.2010 * sqrt(3).
    resembling = make_ratio(1.1, 1.05, 1.15, 12, correlation=0.5, margin=0.03)
    little = resembling.model_copy(update={"correlation": 0.1})
    deviating = make_accuracy([-0.006, 0.0, 0.006])
    said = {
        **{case: ratio_reasons(ratio, THROUGHPUT, cost) for case, (ratio, cost) in throughput.items()},
        **{f"accuracy, {case}": accuracy_reasons(difference) for case, difference in accuracy.items()},
        "correlated rounds": correlation_reasons(resembling, THROUGHPUT),
        "hardly correlated rounds": correlation_reasons(little, THROUGHPUT),
        "a first training": [seeds_outlook(3, 0.01, None)],
        "a training after one seed": [seeds_outlook(3, 0.01, make_accuracy([0.004]))],
        "a training whose deviation is known": [seeds_outlook(3, 0.01, deviating)],
        "a training with seeds enough": [seeds_outlook(5, 0.01, deviating)],
    }
    return "".join(f"{case}: {'; '.join(texts) or 'nothing'}\n" for case, texts in said.items())


def gate() -> str:
    """A head that is worse in one variant, then one whose measurement is not trusted, then one that passes in part."""
    measured = make_results()[:2]
    correct = {name: {seed: 0.9 + seed / 1000 for seed in range(3)} for name in ("baseline", "ddp")}
    reports = []
    for throughput, noise, lower in (({"ddp": 1.3}, 0.005, 0.05), ({}, 0.5, 0.0), ({"ddp": 1.58}, 0.02, 0.0)):
        base = sorted(make_bench(measured, rejected={}, noise=noise).arms, key=lambda arm: arm.role != "aa_control")
        head = [arm for arm in make_bench(measured, throughput=throughput, rejected={}).arms if arm.role == "variant"]
        cost = RoundCost("bench.max_rounds", len(base[0].samples), 120.0)
        lowered = correct | {"ddp": {seed: fraction - lower for seed, fraction in correct["ddp"].items()}}
        accuracies = decision.accuracies(10_000, correct, lowered, 0.01)
        rounds = decision.rounds_of_sides(base, head, Compare(), cost)
        judged = decision.judge(rounds, accuracies, Compare(), must_see=0.1)
        about = {"environment": "e", "made_of": "m"}
        reports.append(
            gate_page(
                decision.Gated(
                    **dict(judged),
                    base=decision.Side(commit="b" * 40, arms=tuple(base), test_accuracies=correct, **about),
                    head=decision.Side(commit="h" * 40 + "+", arms=tuple(head), test_accuracies=lowered, **about),
                    against="main",
                    margins=Margins(),
                    dataset=known(measured[0].dataset),
                    score=ScoreName(name="accuracy"),
                    unit=Unit(),
                    remarks=("Interrupted after 12 rounds.",),
                    seconds=120.0,
                    budget=cost.key,
                )
            )
        )
    return "\n".join(reports)


def verify() -> str:
    """Claims that are true, false, not promised, undecidable, and whose reference fails; how they are summed up."""
    frames = ('File "/my/nets.py", line 7, in forward', f'File "{torch.__file__}", line 9, in conv2d')
    trace = "\n".join(["Traceback (most recent call last):", *(f"  {frame}\n    code" for frame in frames)])
    claims = [
        Claim("a", "one", 1.234e-7, 1e-4, True, "relative"),
        Claim("a", "two " * 30, 12, 0, False, "values", "because"),
        Claim("b", "three", math.inf, None, None, "relative", "why not", UNPROMISED),
        Claim("b", "four", 1e-3, 0.3, None, "relative", "", UNMEASURABLE, 0.4),
    ]
    failed = Claim("a", "five", note=f"nothing to hold it against: rank 1: {trace}\nKeyError: 1\nand more")
    lines = [line for claim in (*claims, failed) for line in verification.claim_lines(claim, 8)]
    ends = verification.summary(claims, 3.4), verification.progress(2, 5, 10.0, 15.0)
    return "\n".join([*lines, *ends, verification.claims_as_json(claims, {}), ""])


PAGES: Mapping[str, Callable[[], str]] = {
    "advice": advice,
    "gate": gate,
    "inference": inference,
    "profile": profile,
    "reasons": reasons,
    "verify": verify,
}


def texts(name: str) -> dict[str, str]:
    """Return file -> the text that the file must contain."""
    if name in PAGES:
        return {f"{name}.md": PAGES[name]()}
    report = REPORTS[name]()
    heard = Page(html(report.comparison, report.histories)).heard
    return {f"{name}.md": markdown(report.comparison), f"{name}.txt": heard}


if __name__ == "__main__":
    FILES.mkdir(exist_ok=True)
    for name in (*REPORTS, *PAGES):
        for file, text in texts(name).items():
            (FILES / file).write_text(text, encoding="utf-8")
