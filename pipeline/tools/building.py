"""Build the job's model for a few samples in the form of the data, and look at it before anything is prepared."""

from __future__ import annotations

import time
from contextlib import redirect_stderr
from io import StringIO
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from pipeline import tasks
from pipeline.data import arrays, own_files, packing, text
from pipeline.data.datasets import synthetic_chunks
from pipeline.data.prepared import Dataset, Split, Statistics
from pipeline.distributed import ALONE
from pipeline.errors import ConfigError
from pipeline.models.optimizers import parts_of
from pipeline.params import Config, Synthetic
from pipeline.plans import Plan
from pipeline.tasks.base import PROBES
from pipeline.techniques import Setup, of_plan
from pipeline.techniques.activation_checkpointing import ActivationCheckpointing, blocks
from pipeline.techniques.lora import Lora, LowBitBase

TRIED = 4, 32
"""Samples of the steps whose times are taken. A step of the larger number is left out if it would take long."""
LONG_SECONDS = 0.5
"""Of a step of the smaller number."""
SHAPES = {"cifar10": [3, 32, 32], "digits": [1, 8, 8], "fashion_mnist": [1, 28, 28], "mnist": [1, 28, 28]}
"""Shapes of the images of the data sets that have a name. They have ten classes."""


class Built(NamedTuple):
    """What the model shows."""

    has_blocks: bool
    """It has blocks to checkpoint."""
    attends: bool
    """It is a transformer: one of its modules is named after attention."""
    step_seconds: float
    """Time of a step of the job's batch on this CPU, about: those of fewer samples, continued in a straight line."""
    patterns: list[str]
    """Patterns of the names of its parameters, one for each part of the model."""


def imitation(config: Config) -> Dataset | None:
    """Return a few samples in the form of the job's data: the first ones of arrays in files, otherwise generated ones.
    Their statistics are 0 and 1. Return None if the form is known only when the data are prepared.

    Raises DataError if the user's data cannot be read.
    """
    fetch, prepare, vocabulary, classes = config.fetch, config.prepare, None, 0
    if fetch.dataset == "arrays" and not arrays.is_exported(fetch):
        held, test = arrays.splits(fetch, arrays.opened(fetch))
        types, vocabulary, classes = arrays.forms(held, test)
        few = {name: held[name][: TRIED[-1]].astype(dtype) for name, dtype in types.items()}
    elif fetch.dataset == "arrays" or prepare.tokenizer:
        return None
    else:
        like = Synthetic(shape=SHAPES.get(fetch.dataset, [1]))
        if fetch.dataset == "synthetic":
            like = fetch.synthetic
        elif fetch.dataset == "image_folder":
            with redirect_stderr(StringIO()):  # fetch says what is left out
                names = {name.split("/")[1] for name in own_files.images_of(fetch)[1]}
            like = Synthetic(shape=[3, *(prepare.image_size or ())], classes=max(2, len(names)))
        elif fetch.dataset in text.FOLDERS:
            like = Synthetic(shape=[prepare.window + 1], targets="tokens", classes=text.END + 1)
        few = dict(zip(("inputs", "targets"), next(synthetic_chunks(like, "train", TRIED[-1])), strict=False))
        vocabulary = like.classes if like.targets == "tokens" else None
        classes = like.classes if like.targets == "labels" else 0
    measured = {name: rows for name, rows in few.items() if packing.measures(name, rows)}
    channels = {name: rows.shape[1] if rows.ndim > 1 else 1 for name, rows in measured.items()}
    statistics = {name: Statistics(mean=(0.0,) * count, std=(1.0,) * count) for name, count in channels.items()}
    repeated = {name: np.resize(rows, (TRIED[-1], *rows.shape[1:])) for name, rows in few.items()}
    split = Split({name: torch.from_numpy(rows) for name, rows in repeated.items()})
    labels = tuple(map(str, range(classes)))
    return Dataset(fetch.dataset, "", labels, vocabulary, statistics, split, split, class_counts=(1,) * classes)


def built(config: Config, dataset: Dataset) -> Built:
    """Build the model of ``config`` for the few samples of ``dataset``, and take two steps. Raises PipelineError if the
    model cannot be built or trained."""
    task = tasks.of_job(config.train, dataset)
    model = task.model()
    task.try_step(model)

    def seconds_of(samples: int) -> float:
        inputs, targets = task.batch([dataset.train.arrays[name][:samples] for name in task.arrays])
        began = time.monotonic()
        task.objective.loss(model(inputs), targets).backward()
        return time.monotonic() - began

    few, many = TRIED
    least = min(seconds_of(few) for _ in range(2))
    a_sample = least / few
    if least < LONG_SECONDS:
        a_sample = max(0.0, min(seconds_of(many) for _ in range(2)) - least) / (many - few)
    seconds = least + (config.train.batch_size - few) * a_sample
    kinds = {type(module).__name__.lower() for module in model.modules()}
    attends = any("attention" in kind for kind in kinds) or any(isinstance(m, nn.Transformer) for m in model.modules())
    names = [name for name, _ in model.named_parameters()]
    patterns = [part if part in names else f"{part}.*" for part in parts_of(names)]
    return Built(any(True for _ in blocks(model)), attends, seconds, patterns)


def check_variant(plan: Plan, dataset: Dataset) -> None:
    """Let the variant's LoRA and checkpointing change the job's model, and take a step of a few samples without an
    update. Raises PipelineError where the training would: for a pattern that matches nothing, and for checkpointing
    that saves nothing, such as that of blocks that are frozen."""
    kinds = [kind for kind in of_plan(plan) if issubclass(kind, (ActivationCheckpointing, Lora, LowBitBase))]
    if kinds:
        task = tasks.of_job(plan.train, dataset)
        setup, made = Setup(task.model(), task), [kind(plan, ALONE) for kind in kinds]
        for technique in made:
            technique.change_model(setup)
        inputs, targets = task.batch([dataset.train.arrays[name][:PROBES] for name in task.arrays])
        task.objective.loss(setup.model(inputs), targets).backward()
        if idle := [reason for technique in made if (reason := technique.why_idle())]:
            raise ConfigError(idle[0])
