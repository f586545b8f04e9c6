"""The predicted ledgers as a table for a person."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pipeline.config import Config, ConfigError, Machine
from pipeline.config import plan as plan_of
from pipeline.data import prepared
from pipeline.ledger.rehearsal import RESERVE_FRACTION, Rehearsal


def parse_bytes(text: str) -> int:
    """``24GiB``, ``80GB``, ``512 MiB`` or a plain number of bytes. Raises ConfigError."""
    units: dict[str, int] = {"": 1} | {
        f"{prefix}{suffix}".lower(): base**power
        for suffix, base in (("B", 1000), ("iB", 1024))
        for power, prefix in enumerate("KMGT", start=1)
    }
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].lower() not in units or float(found[1]) == 0:
        raise ConfigError(f"memory: found {text!r}; expected a size such as 24GiB, 80GB or 512MiB.")
    return round(float(found[1]) * units[found[2].lower()])


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
    """Print the predicted ledgers of variants (none named: all) and, given a device's ``memory``, what fits in it.

    ``data`` is the prepared data set's directory. ``device`` and ``batch_size`` stand in for those of params.yaml; for
    "cuda" this machine needs no GPU, and a GPU with native bf16 is assumed then. Raises PipelineError.
    """
    memory_bytes = None if memory is None else parse_bytes(memory)
    dataset = prepared.read(data)
    asked = {"device": device, "batch_size": batch_size}
    train = config.train.model_copy(update={key: value for key, value in asked.items() if value is not None})
    config = config.model_copy(update={"train": train})
    if device == "cuda" and not machine.gpus:
        processes = [variant.processes for variant in config.variants.values() if isinstance(variant.processes, int)]
        machine = machine.model_copy(update={"gpus": max(processes, default=1), "gpu_native_bf16": True})
    plans = {name: plan_of(config, name, machine) for name in names or config.variants}

    table = [["variant", "peak", "parameters", "gradients", "optimizer", "activations", "buckets", "data", "rest"]]
    if memory is not None:
        table[0] += [f"in {memory}", "largest batch"]
    notes = []
    for name, plan in plans.items():
        rehearsal = Rehearsal(config, plan, dataset)
        found = rehearsal.ledger(plan.micro_batch_size)
        sizes = (
            *(found.peak_bytes, found.parameters_bytes, found.gradients_bytes, found.optimizer_state_bytes),
            *(found.activations_bytes, found.communication_bytes, found.data_bytes, found.rest_bytes),
        )
        table.append([name, *map(_in_words, sizes)])
        if memory_bytes is not None:
            largest = rehearsal.largest_batch(memory_bytes)
            fits = largest is not None and train.batch_size <= largest
            table[-1] += ["fits" if fits else "too large", str(largest or "none")]
            if largest is not None and largest + plan.processes * plan.micro_batches > len(dataset.train):
                notes.append(f"{name}: the largest batch is the whole training set")
        notes += [f"{name}: {technique} is left out: {reason}" for technique, reason in plan.left_out.items()]

    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for name, *cells in table:
        print(
            name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)), sep="  "
        )
    print(f"\nPredicted for a global batch of {train.batch_size}, at the highest moment of a step, in each process.")
    if memory is not None:
        print(f"{RESERVE_FRACTION:.0%} of {memory} is kept free for what no prediction sees.")
    print(*notes, sep="\n", end="\n" if notes else "")


def _in_words(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
