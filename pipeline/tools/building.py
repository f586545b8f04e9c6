"""Build the job's model for generated samples in the form of the data, and look at it before anything is prepared."""

from __future__ import annotations

import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from torch import nn

from pipeline import tasks
from pipeline.benchmark.arm import FEWEST_WARMUP_STEPS, MEMORY_STEPS
from pipeline.benchmark.rounds import FEWEST_STEPS, OPENING_SECONDS
from pipeline.comparison.planning import LONGEST_MINUTES
from pipeline.data import packing, sources
from pipeline.data.prepared import read as read_dataset
from pipeline.files import PREPARED, RAW
from pipeline.params import Config, Fetch, Synthetic
from pipeline.results.bench_file import FEWEST_PAIRS
from pipeline.tasks.base import CPU
from pipeline.techniques.activation_checkpointing import blocks

TRIED = 4, 32
"""Samples of the steps whose times are taken. A step of the larger number is left out if it would take long."""
LONG_SECONDS = 0.5
"""Of a step of the smaller number."""
GENERATED = {"train": TRIED[-1], "test": 8}
"""Generated samples."""


class Built(NamedTuple):
    """What the model shows."""

    has_blocks: bool
    """It has blocks to checkpoint."""
    of_images: bool
    """Its inputs have four dimensions, so that their layout matters."""
    attends: bool
    """It is a transformer: one of its modules is named after attention."""
    step_seconds: float
    """Time of a step of the job's batch on this CPU, about: those of fewer samples, continued in a straight line."""


def built(config: Config, like: Synthetic) -> Built:
    """Build the model of ``config`` for samples ``like`` these, and take two steps. Raises PipelineError if the model
    cannot be built or trained."""
    fetch = Fetch(dataset="synthetic", synthetic=like.model_copy(update=GENERATED))
    with tempfile.TemporaryDirectory(prefix="init-") as folder:
        raw, prepared = Path(folder) / RAW.name, Path(folder) / PREPARED.name
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            sources.fetch(fetch, raw)
            packing.prepare(config.model_copy(update={"fetch": fetch}), raw, prepared)
        task = tasks.of_job(config.train, read_dataset(prepared)).on(CPU)
        model = task.model()
        task.try_step(model)

        def seconds_of(samples: int) -> float:
            inputs, targets = task.batch([task.dataset.train.arrays[name][:samples] for name in task.arrays])
            began = time.monotonic()
            task.objective.loss(model(inputs), targets).backward()
            return time.monotonic() - began

        few, many = TRIED
        least = min(seconds_of(few) for _ in range(2))
        a_sample = least / few
        if least < LONG_SECONDS:
            a_sample = max(0.0, min(seconds_of(many) for _ in range(2)) - least) / (many - few)
        seconds = least + (config.train.batch_size - few) * a_sample
    names = {type(module).__name__.lower() for module in model.modules()}
    attends = any("attention" in name for name in names) or any(isinstance(m, nn.Transformer) for m in model.modules())
    return Built(any(True for _ in blocks(model)), len(like.shape) == 3, attends, seconds)


def minutes_of(config: Config, step_seconds: float) -> float:
    """Return how long the fewest rounds of a bench take, about, if a step of each variant takes so long, in minutes; at
    most the longest time that is ever advised."""
    window = max(FEWEST_STEPS, config.bench.window_seconds / step_seconds)
    warmup = sum(MEMORY_STEPS) + max(FEWEST_WARMUP_STEPS, config.train.warmup_steps - MEMORY_STEPS[0]) + 1
    of_arm = OPENING_SECONDS + (warmup + window) * step_seconds
    return min(LONGEST_MINUTES, FEWEST_PAIRS * (len(config.variants) + 1) * of_arm / 60)
