"""What a variant will do here, before it is trained: the command ``plan`` prints its techniques and what each of them
changes, and the command ``predict-memory`` the parts of its peak memory."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, TypeAdapter

from pipeline import pages, tasks
from pipeline.data.prepared import DESCRIPTION
from pipeline.data.prepared import read as read_dataset
from pipeline.distributed import forked
from pipeline.errors import ConfigError, count, say
from pipeline.params import Config, Machine
from pipeline.params.catalogue import in_effect, requested
from pipeline.plans import Plan
from pipeline.plans import plan as plan_of
from pipeline.profiling.prediction import RESERVE_FRACTION, Estimate, PredictionError
from pipeline.report.facts import LEDGER_PARTS
from pipeline.tasks.batches import Placement, placement_within
from pipeline.techniques import Technique
from pipeline.training.assembly import assembled, planned, preload_for

HOOKS = ("prepare_process", "change_model", "change_optimizer", "change_checkpoint", "for_evaluation")
"""Hooks of a technique, each named after the part of a training that it changes. ``Training.step_changes`` names the
parts that ``change_step`` changes."""


def show_plan(config: Config, name: str | None, machine: Machine, prepared: Path) -> None:
    """Print the plan of ``variants.<name>`` and its techniques in the order in which they apply. If ``name`` is None,
    list the variants.

    If ``prepared`` holds a data set, set up the training in the processes that the variant needs, and print which parts
    of the training each technique changes. Raises PipelineError if the variant cannot train here.
    """
    if name is None:
        for variant_name, variant in config.variants.items():
            named = ", ".join(technique.name for technique in requested(variant))
            say(f"{variant_name}: {named or 'no technique'}")
        say("To see the plan of one variant, run: python -m pipeline plan VARIANT")
        return
    plan = planned(config, name, machine, prepared)
    train = plan.train
    samples = f"{count(plan.micro_batches, 'micro-batch')} of {plan.micro_batch_size} samples a process"
    hosts = f" on {plan.hosts} hosts" if plan.hosts > 1 else ""
    say(f"{name}: {count(plan.processes, 'process')}{hosts} on {plan.device.upper()}, {samples}")
    say(
        f"job: {train.model}, {train.optimizer} at a learning rate of {train.learning_rate:g}, "
        f"{train.batch_size} samples a step, {count(train.epochs, 'epoch')}, {count(len(train.seeds), 'seed')}"
    )
    for skipped, reason in plan.skipped.items():
        say(f"skipped: {skipped}: {reason}")
    if not (prepared / DESCRIPTION).exists():
        say("\n".join(_lines(plan, (), {})))
        say("After `dvc repro prepare`, this command also prints which parts of the training each technique changes.")
        return
    preload = [__name__, *preload_for(plan)]
    with forked(_setting_up, (plan, prepared), plan.processes, preload=preload, on_hosts=plan.hosts) as ask:
        say("\n".join(ask(None)[0]))


def _setting_up(plan: Plan, prepared: Path) -> Generator[list[str], None, None]:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a user's model may print; stdout is for the plan
    with assembled(plan, prepared) as assembly, assembly.training(plan.train.seeds[0]) as training:
        yield _lines(training.plan, training.techniques, training.step_changes)


def _lines(plan: Plan, techniques: Sequence[Technique], step_changes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return lines about the techniques that the training applies, and about the decisions made during its setup."""
    applied, made = in_effect(plan.applied), {technique.name: technique for technique in techniques}
    lines = ["applied, in this order:" if applied else "applied: no technique; the training runs the plain step"]
    width = max((len(entry.name) for entry in applied), default=0)
    for entry in applied:
        changes = ["input"] * bool(entry.placement)
        if entry.name in made:
            changes += [hook.rpartition("_")[2] for hook in HOOKS if _overrides(made[entry.name], hook)]
            changes += [f"step.{part}" for part in step_changes[entry.name]]
        changed = f"[{', '.join(changes)}] " if changes else ""
        lines.append(f"  {entry.name:<{width}}  {changed}{entry.does}.")
    of_job = [(name, parts) for name, parts in step_changes.items() if name not in {entry.name for entry in applied}]
    lines += [f"of the job: train.{name} [{', '.join(f'step.{part}' for part in parts)}]" for name, parts in of_job]
    return lines + [f"decided: {what}: {choice}" for what, choice in plan.decided.items()]


def _overrides(technique: Technique, hook: str) -> bool:
    return any(hook in vars(kind) for kind in type(technique).__mro__ if kind not in Technique.__mro__)


def show_memory(
    config: Config,
    machine: Machine,
    names: Sequence[str],
    data: Path,
    *,
    memory: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
) -> None:
    """Print the predicted ledgers of the variants ``names`` (of all variants, if empty).

    With ``memory``, also print the largest batch that fits.

    ``data`` is the prepared data set's directory. ``device`` replaces ``train.device``. For "cuda" this machine needs
    no GPU: without GPUs, the prediction assumes as many as the variants ask for, with native bf16, TF32 and float8. If
    a variant cannot run here or cannot be predicted, the reason is printed below the table. Raises PipelineError, also
    if no variant can be predicted.
    """
    memory_bytes = None if memory is None else parse_bytes(memory)
    dataset = read_dataset(data)
    if device:
        config = config.model_copy(update={"train": config.train.model_copy(update={"device": device})})
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

    columns, of_memory = ("peak", *LEDGER_PARTS), [] if memory is None else [f"in {memory}", "largest batch"]
    table = [["variant", *(part.replace("_", " ") for part in columns), *of_memory]]
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
        table.append([name, *(pages.size(getattr(ledger, f"{part}_bytes")) for part in columns)])
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
