"""The stage ``profile``: run a short window of a variant's training under torch's profiler, and interpret the trace.

The profiler slows the training down, so ``bench`` measures the speed instead. There is one rule for each way in which a
step loses time.
"""

from __future__ import annotations

import gzip
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from pipeline import environment, files, results
from pipeline.distributed import launch
from pipeline.errors import PipelineError, say, spelled
from pipeline.pages import render
from pipeline.params import Config, Machine, Seed
from pipeline.plans import Plan
from pipeline.processes import default_environment
from pipeline.processes.malloc import keep_freed_memory
from pipeline.profiling import QUIET, each_within, trace
from pipeline.profiling.trace import StepTimes
from pipeline.results import Record, RunConditions, VariantDocument
from pipeline.step import MicroBatches, TrainingStep
from pipeline.training.assembly import assembled, planned
from pipeline.training.loop import Training
from pipeline.training.measured import conditions_of, dataset_of, device_name_of

LEAD_STEPS = 3
"""Steps under the profiler before the profiled window. They are left out, because they include the profiler's
start-up."""
SNAPSHOT_STEPS = 2
"""Steps whose allocations the memory snapshot records."""
OPERATORS = 15
"""Largest number of operators that the profile names."""
LONGEST_HISTORY = 200_000
"""Largest number of entries in the memory snapshot's history."""


class Finding(Record):
    """One result of the profile, with advice."""

    rule: str
    """The name of the rule, for programs."""
    share_fraction: float
    """Share of the step that the finding describes."""
    text: str


class Profile(RunConditions, VariantDocument):
    """The content of ``profile.json``."""

    seed: Seed
    steps: int
    """Number of steps in the profiled window, after the warm-up."""
    step_p50_ms: float
    """Median step time without the profiler, in windows just before and after the profiled window."""
    profiled_step_p50_ms: float
    """Median step time under the profiler. No throughput is computed from it."""
    ranks: tuple[StepTimes, ...]
    operators: tuple[trace.Operator, ...]
    """The operators of the main rank that take the most time."""
    findings: tuple[Finding, ...]
    """The finding with the largest share comes first."""
    has_memory_snapshot: bool

    def largest_share(self, part: str) -> float:
        """Return the largest share of a rank's step that one of ``PARTS`` takes."""
        return max(rank.fraction(part) for rank in self.ranks)

    @property
    def overhead_fraction(self) -> float:
        """Slowdown of the step by the profiler: 0.1 for 10%."""
        return self.profiled_step_p50_ms / self.step_p50_ms - 1


def run(config: Config, name: str, machine: Machine, prepared: Path) -> None:
    """Profile ``variants.<name>`` on the data set in ``prepared`` and write ``profiles/<name>/``.

    Starts the processes that the variant needs, unless a launcher such as torchrun started this process as one of them.
    Raises PipelineError.
    """
    plan = planned(config, name, machine, prepared)
    launch(_work, (config, plan, prepared, environment.read()), plan.processes, plan.hosts)


def annotated(step: TrainingStep) -> AbstractContextManager[None]:
    """Annotate the parts of ``step`` in the profiler's trace while the block runs."""

    def taking(whole: Callable[[MicroBatches], None]) -> Callable[[MicroBatches], None]:
        def take(micro_batches: MicroBatches) -> None:
            with record_function(trace.STEP):
                whole(each_within(partial(record_function, trace.INPUT), micro_batches))

        return take

    def named(name: str) -> Callable[[Any], Any]:
        def naming(part: Any) -> Any:
            def annotated(*arguments: Any) -> Any:
                with record_function(name):
                    return part(*arguments)

            return annotated

        return naming

    return step.instrument(
        whole=taking,
        accumulate=named(trace.ACCUMULATE),
        forward=named(trace.FORWARD),
        backward=named(trace.BACKWARD),
        update=named(trace.OPTIMIZER),
    )


def window(training: Training, steps: int, file: Path) -> tuple[trace.Trace, float, float]:
    """Warm up the training, profile at most ``steps`` steps of one epoch, and write a Chrome trace to ``file``.

    The training must be new, and made with ``steady=True``. All ranks must call this function together.

    Returns the trace, and this rank's median step time in seconds: without the profiler, and under it.
    """
    device, per_epoch = training.world.device, training.batches.steps_per_epoch
    # An epoch ends with an evaluation, and its first step draws the order of the samples. The window must fit between
    # the two.
    steps = max(1, min(steps, per_epoch - 1))

    def steps_of_epoch() -> int:
        return per_epoch - training.steps % per_epoch

    def advance() -> list[float]:
        if steps_of_epoch() < steps:
            training.advance(steps_of_epoch() + 1)
        training.advance(steps)
        return training.clock.step_seconds[-steps:]

    training.restart_measuring(training.train.warmup_steps)
    training.advance(training.train.warmup_steps)
    plain = advance()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    windows = schedule(wait=0, warmup=1, active=1, repeat=1)
    with (
        annotated(training.step),
        default_environment(QUIET if device.type == "cpu" else {}),
        profile(activities=activities, schedule=windows) as profiler,
    ):
        training.advance(LEAD_STEPS if steps_of_epoch() >= LEAD_STEPS + steps else steps_of_epoch() + 1)
        profiler.step()
        profiled = advance()
    profiler.export_chrome_trace(str(file))
    if not file.exists():  # torch only logs an error
        raise PipelineError(f"{file} could not be written: make room there, or set TMPDIR to another directory.")
    plain += advance()
    gpu = (device.index or 0) if device.type == "cuda" else None
    return trace.Trace(trace.read(file), gpu), statistics.median(plain), statistics.median(profiled)


def _work(config: Config, plan: Plan, prepared: Path, fingerprint: dict[str, Any]) -> None:
    """Profile a window in each process; the main process writes the files."""
    keep_freed_memory()
    with assembled(plan, prepared, steps=config.profile.steps) as assembly, tempfile.TemporaryDirectory() as scratch:
        world, seed = assembly.world, plan.train.seeds[0]
        steps = plan.train.warmup_steps + LEAD_STEPS + SNAPSHOT_STEPS + 3 * (config.profile.steps + 1)
        epochs = steps + 4  # enough, because a window that does not fit into an epoch begins in the next epoch
        longer = plan.with_train(epochs=max(epochs, plan.train.epochs), history_every_steps=10**9)
        with replace(assembly, plan=longer).training(seed, steady=True) as training:
            trace_of_window, plain, profiled = window(training, config.profile.steps, Path(scratch, "trace.json"))
            ranks = tuple(world.gather(trace_of_window.times()))
            snapshot = _memory_snapshot(training, Path(scratch, "memory.pickle"))
            setup = conditions_of(training, device_name_of(world, fingerprint))
        if world.is_main:
            facts = Facts(ranks, plan.device == "cuda", setup.placement or "unknown", setup.applied)
            recorded = Profile(
                **dict(setup),
                variant=plan.name,
                environment=environment.hash_of(fingerprint, "variants", plan.name),
                config={
                    "train": config.train.model_dump(mode="json"),
                    "variant": plan.requested.model_dump(mode="json"),
                },
                dataset=dataset_of(assembly.task.dataset),
                seed=seed,
                steps=trace_of_window.steps,
                step_p50_ms=plain * 1e3,
                profiled_step_p50_ms=profiled * 1e3,
                ranks=ranks,
                operators=tuple(trace_of_window.operators()[:OPERATORS]),
                findings=findings(facts),
                has_memory_snapshot=snapshot,
            )
            _write(recorded, Path(scratch), on_gpu=facts.on_gpu)
            for finding in recorded.findings:
                say(f"{plan.name}: {finding.text}")
            say(f"profile: {results.profile_directory(plan.name) / 'profile.md'}")


def _memory_snapshot(training: Training, file: Path) -> bool:
    """On CUDA, take ``SNAPSHOT_STEPS`` steps and write their memory snapshot to ``file``; on a CPU, do nothing.

    Returns True if a snapshot was written. All ranks must call this function together."""
    if training.world.device.type != "cuda":
        return False
    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=LONGEST_HISTORY, stacks="python")
    training.advance(SNAPSHOT_STEPS)
    memory._dump_snapshot(str(file))
    memory._record_memory_history(enabled=None)
    return True


def _write(made: Profile, scratch: Path, *, on_gpu: bool) -> None:
    """Write the variant's files, all or none."""
    with files.whole_directory(results.profile_directory(made.variant)) as directory:
        with (scratch / "trace.json").open("rb") as plain, gzip.open(directory / "trace.json.gz", "wb") as packed:
            shutil.copyfileobj(plain, packed)
        if made.has_memory_snapshot:
            shutil.move(scratch / "memory.pickle", directory / "memory.pickle")
        files.write_text(directory / "profile.md", spelled(render("profile.md", profile=made, on_gpu=on_gpu)))
        files.write_text(directory / "profile.json", made.to_json())


# What the profile says of the step.


NOTABLE_IMBALANCE = 0.20
"""Smallest difference between the ranks' working times, as a share of the step, that is a finding."""
RULES = {
    "waits_for_input": ("input", 0.10),
    "waits_for_others": ("communication", 0.10),
    "idles": ("idle", 0.15),
    "updates": ("optimizer", 0.15),
}
"""Rule -> a part of the step, and the smallest share, on the rank where it is largest, that is a finding."""


@dataclass(frozen=True)
class Facts:
    """The facts from which the rules make findings."""

    ranks: Sequence[StepTimes]
    on_gpu: bool
    placement: str
    """resident, streamed or dataloader."""
    applied: Mapping[str, Any]
    """The variant's settings that were applied."""


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Return all notable findings, the largest share first. If there is none, return the finding ``computes``."""
    busy, main = [rank.busy_ms for rank in facts.ranks], facts.ranks[0]
    imbalance = (max(busy) - min(busy)) / max(rank.step_ms for rank in facts.ranks)
    made = [_finding(facts, "is_uneven", imbalance)] if imbalance >= NOTABLE_IMBALANCE else []
    for rule, (part, notable) in RULES.items():
        shares = [rank.fraction(part) for rank in facts.ranks]
        worst = max(shares)
        if worst >= notable:
            made.append(_finding(facts, rule, worst, shares.index(worst)))
    by_share = tuple(sorted(made, key=lambda finding: -finding.share_fraction))
    return by_share or (_finding(facts, "computes", main.busy_ms / main.step_ms),)


def _finding(facts: Facts, rule: str, share: float, rank: int = 0) -> Finding:
    text = render("findings.md", facts=facts, rule=rule, share=share, rank=rank)
    return Finding(rule=rule, share_fraction=share, text=" ".join(text.split()))
