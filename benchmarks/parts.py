"""Measure by part what an arm of the bench costs in a round: start, set-ups, each kind of steps, the end.

    python -m benchmarks parts_default parts_resnet18

Every arm runs alone, once with its memory measured and once without, in alternation. For each part there are the wall
seconds and the CPU seconds of the main rank; on a busy machine, the CPU seconds say more. ``start`` begins when the
arm is asked for. The time in which the processes end is left out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import own_job
from benchmarks.pairs import ROOT
from benchmarks.stages import fashion_mnist, pack, write_images
from pipeline import environment, params
from pipeline.benchmark import arm
from pipeline.data import prepared
from pipeline.distributed import World, forked
from pipeline.params import Config
from pipeline.plans import plan
from pipeline.training import assembly
from pipeline.training.loop import Training

STEPS = {"default": 20, "resnet18": 5}
"""Steps of a window, fewer than in a bench: these show how long a step takes."""
PARTS = ("start", "imports and data", "process group", "model and optimizer", "first step", "memory steps",
         "warm-up", "window", "counted step", "closing")  # fmt: skip
Costs = dict[str, tuple[float, float]]
"""Part -> its wall seconds and the CPU seconds of the main rank."""


def _timed(arguments: Sequence[Any], began: float) -> Generator[Costs | None, int | None, None]:
    """Run ``arm._rank_of_arm``; the last request yields the costs of each part."""
    spent, last, kinds = {part: np.zeros(2) for part in PARTS}, np.array([began, 0.0]), ["warm-up", "window"]
    if arguments[-1]:
        kinds.insert(0, "memory steps")
    names: dict[str, Any] = vars(assembly)
    joined, training_of, advance = names["joined_world"], assembly.Assembly.training, Training.advance

    def end(part: str) -> None:
        now = np.array([time.monotonic(), time.process_time()])
        spent[part] += now - last
        last[:] = now

    @contextmanager
    def joined_world(*settings: Any) -> Iterator[World]:
        end("imports and data")
        with joined(*settings) as world:
            end("process group")
            yield world

    @contextmanager
    def training(self: Any, *settings: Any, **options: Any) -> Iterator[Training]:
        with training_of(self, *settings, **options) as made:
            end("model and optimizer")
            yield made

    def advancing(self: Training, steps: int) -> None:
        end("closing")
        if not self.steps:  # the first step of all; the generator goes on where this call leaves it
            advance(self, 1)
            end("first step")
            steps -= 1
        advance(self, steps)
        end(kinds.pop(0) if kinds else "counted step")

    names["joined_world"] = joined_world
    assembly.Assembly.training = training  # type: ignore[method-assign]
    Training.advance = advancing  # type: ignore[method-assign]
    end("start")
    inner = arm._rank_of_arm(*arguments)
    value, request = next(inner), None
    while value is None:
        request = yield None
        last[:] = time.monotonic(), time.process_time()
        value = inner.send(request)
    next(inner, None)
    end("closing")
    yield {part: (float(wall), float(cpu)) for part, (wall, cpu) in spent.items()}


def parts_of(config: Config, packed: Path, samples: int, steps: int) -> dict[str, list[Costs]]:
    """Return arm -> its costs in each sample. With " without memory", the arm did not measure its memory."""
    machine, fingerprint = environment.machine(), environment.fingerprint()
    spent: dict[str, list[Costs]] = {}
    for number in range(samples + 1):  # the first start the fork server, and fill caches
        for name in config.variants:
            for memory in (True, False):
                made, began = plan(config, name, machine), time.monotonic()
                arguments = (config, made, packed, fingerprint, steps, False, memory)
                preload = [arm.__name__, *assembly.preload_for(made), "benchmarks.parts"]
                with forked(_timed, (arguments, began), made.processes, preload=preload) as ask:
                    ask(None)
                    ask(steps)
                    costs = ask(None)[0]
                if number and costs:
                    spent.setdefault(name if memory else f"{name} without memory", []).append(costs)
    return spent


def job(name: str, folder: Path) -> tuple[Config, Path]:
    """Return the configuration and the prepared data of the job ``name`` (``STEPS``)."""
    packed = fashion_mnist(folder)[1]
    if name == "default":
        return params.load(ROOT / params.PARAMS_FILE), packed
    write_images(prepared.read(packed), folder / "images", own_job.IMAGES)
    sections = own_job.JOB | {"fetch": own_job.JOB["fetch"] | {"image_folder": str(folder / "images")}}
    pack(sections, folder / "listing", folder / "packed")
    return params.parse(sections), folder / "packed"


def medians(spent: Mapping[str, Sequence[Costs]]) -> dict[str, Costs]:
    """Return arm -> the medians of its costs."""

    def median(samples: Sequence[Costs], part: str) -> tuple[float, float]:
        wall, cpu = np.median([costs[part] for costs in samples], axis=0)
        return round(float(wall), 4), round(float(cpu), 4)

    return {name: {part: median(samples, part) for part in PARTS} for name, samples in spent.items()}


def costs_of(name: str, samples: int = 5) -> dict[str, Any]:
    """Measure the job ``name``; return the costs, and the CPU time of samples without memory over that with it."""
    with tempfile.TemporaryDirectory() as folder:
        config, packed = job(name, Path(folder))
        spent = parts_of(config, packed, samples, STEPS[name])
    costs, cpu = medians(spent), {True: 0.0, False: 0.0}
    for arm_name, parts in costs.items():
        cpu[arm_name in config.variants] += sum(of_part[1] for of_part in parts.values())
    return {"median_ratio": cpu[False] / cpu[True], "steps": STEPS[name], "medians": costs, "samples": spent}
