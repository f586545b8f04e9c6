"""The memory ledger: the parts of a training step's peak memory, measured on the device and predicted without it.

Measurement and prediction each watch one step of a ``Training``. The measurement reads the allocations that torch's
profiler records (``tracker``); the prediction runs the step on fake tensors (``estimate``), and ``show`` prints it. The
ledger is a sum. One part is memory that exists during the whole step, such as parameters and optimizer state. The other
part is the peak of the memory that the step itself allocates (``AllocationTrace``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, TypeAdapter

from pipeline import tasks
from pipeline.data import prepared
from pipeline.errors import ConfigError, say
from pipeline.params import Config, Machine, parse
from pipeline.plans import plan as plan_of
from pipeline.profiling.ledger.estimate import RESERVE_FRACTION, Estimate, PredictionError, predicted
from pipeline.profiling.ledger.tracker import measured
from pipeline.tasks.batches import Placement, placement_within

__all__ = ["Estimate", "PredictionError", "measured", "parse_bytes", "predicted", "show"]


COLUMNS = {
    "peak": "peak_bytes",
    "parameters": "parameters_bytes",
    "gradients": "gradients_bytes",
    "optimizer": "optimizer_state_bytes",
    "activations": "activations_bytes",
    "buckets": "communication_bytes",
    "data": "data_bytes",
    "rest": "rest_bytes",
}


def show(
    config: Config,
    machine: Machine,
    names: Sequence[str],
    data: Path,
    *,
    memory: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    batch_size: int | None = None,
) -> None:
    """Print the predicted ledgers of the variants ``names`` (of all variants, if empty).

    With ``memory``, also print the largest batch that fits.

    ``data`` is the prepared data set's directory. ``device`` and ``batch_size`` replace the values in params.yaml. For
    "cuda" this machine needs no GPU: without GPUs, the prediction assumes as many as the variants ask for, with native
    bf16, TF32 and float8. If a variant cannot run here or cannot be predicted, the reason is printed below the table.
    Raises PipelineError, also if no variant can be predicted.
    """
    memory_bytes = None if memory is None else parse_bytes(memory)
    dataset = prepared.read(data)
    requested = {"device": device, "batch_size": batch_size}
    values = config.model_dump(mode="json")
    values["train"] |= {key: value for key, value in requested.items() if value is not None}
    config = parse(values, "predict-memory")
    train = config.train
    task = tasks.of_job(train, dataset)
    if device == "cuda" and not machine.gpus:
        processes = [variant.processes for variant in config.variants.values() if isinstance(variant.processes, int)]
        machine = machine.model_copy(
            update={"gpus": max(processes, default=1), "gpu_native_bf16": True, "gpu_tf32": True, "gpu_float8": True}
        )
    placement: Placement | None = None
    if memory_bytes is not None and train.placement == "auto":
        placement = placement_within(memory_bytes, dataset)

    table = [["variant", *COLUMNS, *([] if memory is None else [f"in {memory}", "largest batch"])]]
    notes, reasons = [], []
    for name in names or config.variants:
        try:
            plan = plan_of(config, name, machine)
            estimate = Estimate(plan, replace(task, train=plan.train), placement)
            ledger = estimate.ledger(plan.micro_batch_size)
            largest = None if memory_bytes is None else estimate.largest_batch(memory_bytes)
        except (ConfigError, PredictionError) as error:
            if name not in config.variants:
                raise
            reasons.append(str(error))
            table.append([name, *("unknown" for _ in table[0][1:])])
            continue
        table.append([name, *(_in_words(getattr(ledger, field)) for field in COLUMNS.values())])
        if memory_bytes is not None:
            table[-1] += [
                "too large" if largest is None or largest < plan.train.batch_size else "fits",
                "none" if largest is None else str(largest),
            ]
            if largest and largest + plan.processes * plan.micro_batches > len(dataset.train):
                notes.append(f"{name}: the largest batch is the whole training set.")
        notes += [f"{name}: {technique} is skipped: {reason}." for technique, reason in plan.skipped.items()]

    if len(reasons) == len(table) - 1:
        raise PredictionError("\n".join(dict.fromkeys(reasons)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for name, *cells in table:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        say("  ".join((name.ljust(widths[0]), *numbers)))
    on = "cuda" if train.device != "cpu" and machine.gpus else "cpu"
    where = "on each GPU" if on == "cuda" else "in each process, without the memory that its imports take"
    of = "" if task.unit == "samples" else f" samples of {task.units_per_sample} {task.unit}"
    say(f"\nPredicted for a global batch of {train.batch_size}{of}: the peak memory of a step {where}.")
    if memory is not None:
        say(f"{RESERVE_FRACTION[on]:.0%} of {memory} is kept free for memory that no prediction includes.")
    for note in [*notes, *reasons]:
        say(note)


def parse_bytes(text: str) -> int:
    """Return the number of bytes in ``24GiB``, ``80GB``, ``512 MiB`` or a plain number. Raises ConfigError."""
    size = 0
    if re.fullmatch(r"\d+(\.\d+)? *([kmgt]i?b?)?", text.strip(), re.IGNORECASE):  # ByteSize also reads other text
        size = int(TypeAdapter(ByteSize).validate_python(text.strip()))
    if not size:
        raise ConfigError(f"memory: found {text!r}; expected a size such as 24GiB, 80GB or 512MiB.")
    return size


def _in_words(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
