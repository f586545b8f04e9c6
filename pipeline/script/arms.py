"""The server of a script's arms, and whether they do the same job. An arm is the script's command in fresh processes,
which take steps on request.

``Scripts`` answers the requests of ``benchmark.server``: in the same process or, by ``serve``, in one of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from pipeline import environment
from pipeline.benchmark import arm
from pipeline.benchmark.arm import FEWEST_WARMUP_STEPS, MEMORY_STEPS, Measured
from pipeline.benchmark.server import Server
from pipeline.environment import hardware, stages
from pipeline.errors import PipelineError, say
from pipeline.measurement.detectors import Detector, cpu_detectors, gpu_detectors, of_clock, of_memory, of_turns
from pipeline.measurement.updates import relative_differences, rounding_errors
from pipeline.measurement.windows import Clock, Memory
from pipeline.params import Command, Config, Variant
from pipeline.results import SameJob
from pipeline.results.figures import OUTSIDE
from pipeline.results.rejections import rejection
from pipeline.script.jobs import Answers, Job, one_source
from pipeline.training.measured import OfRank, joined, of_rank

MOST_WARMUPS = 10
STEADY = 1.25
"""An arm is warm if nothing is compiled any more, and its steps did not get faster by more than this factor."""
LONG_STEP = 3.0
"""A step that takes longer than this many medians contains work that is not the step's, such as an evaluation or a
checkpoint. Its time beyond the median does not count as time of steps."""
EXAMINED_STEPS = 4
"""The first steps of each process. After them, an examined arm's parameters are compared with the baseline's."""
ROUNDING = 2.0**-5
"""Largest relative difference of a few steps' updates that is taken for rounding in the precision of the base. Numbers
of 16 bits can differ by more: Adam turns the sign of a small gradient into a whole step."""
OWN_FACTOR = 2.0
"""A difference up to this many times the base's from itself is no difference."""
LARGEST_OWN = 0.25
"""If the base differs from itself by more than this, no difference means anything."""


@dataclass
class OpenArm:
    """An open arm, with what was measured of it."""

    job: Job
    samples: int | None
    """Samples of one step over all ranks; None if unknown."""
    answers: Answers = field(default_factory=list)
    memory: Answers = field(default_factory=list)
    """The answers of steps in which only the memory counts, on a CPU."""
    detectors: list[Detector] = field(default_factory=list)

    def measured(self) -> Measured:
        first = self.job.ranks[0]
        ranks = [self._of_rank(number) for number in range(len(self.job.ranks))]
        for detector in self.detectors:
            ranks[0].rejections.extend(detector.rejections())
            ranks[0].figures.update(detector.figures())
        return Measured(
            applied={},
            skipped={},
            decided={},
            micro_batches=None,
            placement=None,
            batch_size=self.samples or 1,
            device=first["gpu"] or hardware.cpu_model(hardware.cpu_facts()),
            changed=self.job.command.changed,
            window=joined(ranks, requested_steps=0, warmup=0, on_cpu=not first["gpu"]),
            **first["conditions"],
        )

    def _of_rank(self, number: int) -> OfRank:
        answer, clock, memory = self.answers[number], Clock(torch.device("cpu")), Memory(torch.device("cpu"))
        clock.restore(answer["clock"])
        memory.restore((self.memory or self.answers)[number]["memory"])
        seconds, wall = clock.step_seconds, clock.measured_seconds
        median = statistics.median(seconds)
        clock.step_seconds = [median if step > LONG_STEP * median else step for step in seconds]
        outside = sum(seconds) - sum(clock.step_seconds)
        clock.measured_seconds -= outside
        aside, waited = answer["waits"]
        rejections = [*of_clock(clock, None, resident=True), *of_memory(memory), *of_turns(aside, waited, clock)]
        if compiled := answer["compile_seconds"]:
            rejections.append(rejection("recompiled", seconds=compiled))
        figures = of_rank(clock, memory, self.samples or 1)
        figures |= {OUTSIDE.field: outside / wall, "input_wait_fraction": None}  # nothing shows where a script waits
        return OfRank(figures, len(seconds), clock.measured_seconds, rejections)


class Scripts(Server):
    """The server of all arms of one script, in this process.

    An arm's first start also examines it: its parameters after a few steps, and its samples a step, which all later
    starts are credited with.
    """

    requests = ("describe", "plan", "open", "turn", "close", "same_jobs")

    def __init__(self, config: Config, content: dict[str, Any] | None = None) -> None:
        """``content``: that of environment.json; None: it is read, and must describe the present script."""
        assert config.script is not None
        self._config, self._script, self._content = config, config.script, content
        self._open: dict[str, OpenArm] = {}
        self._exits = ExitStack()
        self.examined: dict[str, Answers] = {}
        """Arm -> what its ranks said of its first steps."""

    def describe(self) -> dict[str, Any]:
        content = self._content or recorded(self._config)
        device = "cuda" if content["script"]["alone"] else "cpu"
        about = {"dataset": None, "device": device, "requests": self.requests}
        return arm.description(self._config, content) | about

    def plan(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        """Return the command of the variant ``name`` with the settings ``values``, as plain values."""
        alone = self._config.model_copy(update={"variants": {name: Variant.model_validate(values)}})
        return alone.command_of(name).seeded(self._config.train.seeds[0])._asdict()

    def open(self, name: str, plan: dict[str, Any], steps: int, **_more: Any) -> None:  # noqa: ARG002
        """Start an arm from its plan in fresh processes, and warm it up."""
        first, command = name not in self.examined, Command(**plan)
        job = self._exits.enter_context(Job(name, command, self._script, self._source, watched=False))
        job.meet()
        answers = job.take(EXAMINED_STEPS, keep=False, examine=first)
        self.examined.setdefault(name, answers)
        samples = self._script.samples_per_step or samples_of(self.examined[name])
        opened = self._open[name] = OpenArm(job, samples)
        on_cpu = not job.ranks[0]["gpu"]
        warm = job.take(MEMORY_STEPS[1], keep=not on_cpu)
        opened.memory = warm if on_cpu else []
        for _ in range(MOST_WARMUPS):
            before, warm = warm, job.take(FEWEST_WARMUP_STEPS)
            steady = median_step(before) < STEADY * median_step(warm)
            if steady and not any(answer["compile_seconds"] for answer in warm):
                break
        uuids, pid = [about["uuid"] for about in job.ranks if about["uuid"]], job.process.pid
        opened.detectors = [*cpu_detectors(pid, self._config.bench.max_foreign_load), *gpu_detectors(uuids, pid)]

    def turn(self, name: str, steps: int) -> None:
        """Let an open arm take ``steps`` steps."""
        opened = self._open[name]
        for detector in opened.detectors:
            detector.open()
        opened.answers = opened.job.take(steps, anew=not opened.answers)
        for detector in opened.detectors:
            detector.close(measured=True)

    def close(self, name: str) -> dict[str, Any]:
        """End an open arm; return its ``Measured`` as plain values, and what is known of its samples a step."""
        opened, seen = self._open.pop(name), samples_of(self.examined[name])
        values = opened.measured().model_dump(mode="json")
        opened.job.__exit__()
        samples = {"samples_per_step": opened.samples, "samples_seen": seen}  # None if unknown
        return values | samples | {"batch_differs": self._script.batch_differs}

    def same_jobs(self, base: str, control: str) -> dict[str, SameJob]:
        """Return arm -> its job beside that of ``base``. Prints what a person must know of them."""
        jobs = same_jobs(self.examined, base, control)
        say("\n".join(f"bench: {line}" for line in lines(jobs, self.examined, base)))
        return jobs

    def __enter__(self) -> Self:
        self._source = self._exits.enter_context(one_source(self._config))
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.__exit__(*error)


def median_step(answers: Answers) -> float:
    """Return the median step of the slowest rank, in seconds."""
    return max(float(statistics.median(answer["clock"]["step_seconds"])) for answer in answers)


def recorded(config: Config) -> dict[str, Any]:
    """Return the content of environment.json. Raises PipelineError if it does not describe the present script."""
    content = environment.read()
    if stages.script_seen(config, content) is None:
        raise PipelineError("environment.json does not describe the present script and its files: run `dvc repro`.")
    return content


def serve(config: Config) -> None:
    """Answer the requests of ``benchmark.server``."""
    with Scripts(config) as scripts:
        arm.answer_requests({name: getattr(scripts, name) for name in scripts.requests})


# Whether the arms do the same job: their parameters after a few steps, and their samples a step


def samples_of(answers: Answers) -> int | None:
    """Return the samples of one step over all ranks; None if unknown."""
    counts = [statistics.median_low(answer["samples"]) for answer in answers]
    return (all(counts) and sum(counts)) or None


def apart(ours: Answers, theirs: Answers) -> tuple[float, str]:
    """Return the largest relative difference of a parameter's update on a rank of both, and the parameter's name.
    Parameters whose gradients are rounding errors in both do not count."""
    largest = 0.0, ""
    for own, expected in zip(ours, theirs, strict=False):
        noise = rounding_errors(own["gradients"]) & rounding_errors(expected["gradients"])
        updates = (
            {place: torch.from_numpy(update) for place, update in side["updates"].items() if place not in noise}
            for side in (own, expected)
        )
        for place, difference in relative_differences(*updates).items():
            largest = max(largest, (difference, (own["names"] | expected["names"])[place]))
    return largest


def same_jobs(examined: Mapping[str, Answers], base: str, control: str) -> dict[str, SameJob]:
    """Return arm -> its job beside that of ``base``; for the base itself, that of ``control``."""

    def of(name: str, key: str) -> list[Any]:
        return [answer[key] for answer in examined[name]]

    own_difference, _ = apart(examined[control], examined[base])
    repeats = own_difference < LARGEST_OWN and of(control, "started") == of(base, "started")
    jobs = {}
    for name in (name for name in examined if name != control):
        beside = control if name == base else name
        difference, parameter = apart(examined[beside], examined[base])
        known = repeats and difference < float("inf")
        jobs[name] = SameJob(
            steps=EXAMINED_STEPS,
            equal_bits=of(beside, "ended") == of(base, "ended"),
            difference=difference if known else None,
            parameter=parameter if known else "",
            rounding=max(ROUNDING, OWN_FACTOR * own_difference) if repeats else 0.0,
            samples_per_step=samples_of(examined[name]),
        )
    return jobs


def lines(jobs: Mapping[str, SameJob], examined: Mapping[str, Answers], base: str) -> Iterator[str]:
    """Yield what a person must know of each arm's job."""
    for name, job in jobs.items():
        if (optimizers := examined[name][0]["optimizers"]) > 1:
            yield f"{name}: {optimizers} optimizers take steps; only the steps of one count (script.optimizer: which)"
        samples = "unknown samples" if job.samples_per_step is None else f"{job.samples_per_step:,} samples"
        who = "again, its parameters" if name == base else "its parameters"
        yield f"{name}: {samples} a step; after {job.steps} steps, {who} {job.in_words}"
    if not jobs[base].equal_bits:
        yield (
            f"{base} does not repeat itself, so small differences of the arms mean little; to see them, seed it before "
            "it makes the model (torch.manual_seed) and its data order, and set "
            "torch.use_deterministic_algorithms(True)"
        )
