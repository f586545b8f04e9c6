"""The command ``plan``: print which techniques a variant applies on this machine, and what each of them changes."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from pipeline.data.prepared import DESCRIPTION
from pipeline.distributed import forked, launched_size
from pipeline.errors import PipelineError, count, say
from pipeline.params import Config, Machine
from pipeline.params.catalogue import in_effect, requested
from pipeline.plans import Plan
from pipeline.techniques import Technique
from pipeline.training.assembly import assembled, planned

PRELOAD = ("pipeline.tools.show_plan", "torch._dynamo")
"""Modules that are imported once, before the processes are forked. Otherwise each process would import them itself:
torch imports ``torch._dynamo`` when it creates the first optimizer."""
HOOKS = {
    "prepare_process": "process",
    "change_model": "model",
    "change_optimizer": "optimizer",
    "change_checkpoint": "checkpoint",
    "for_evaluation": "evaluation",
}
"""Hook of a technique -> the part of a training that it changes. ``Training.step_changes`` names the parts that
``change_step`` changes."""


def show(config: Config, name: str | None, machine: Machine, prepared: Path) -> None:
    """Print the plan of ``variants.<name>`` and its techniques in the order in which they apply. If ``name`` is None,
    list the variants.

    If ``prepared`` holds a data set, set up the training in the processes that the variant needs, and print which parts
    of the training each technique changes. Raises PipelineError under a launcher, or if the variant cannot train here.
    """
    if name is None:
        for variant_name, variant in config.variants.items():
            named = ", ".join(technique.name for technique in requested(variant))
            say(f"{variant_name}: {named or 'no technique'}")
        say("To see the plan of one variant, run: python -m pipeline plan VARIANT")
        return
    if launched_size() is not None:
        raise PipelineError(
            "plan: found a launcher's environment, but plan starts the processes itself; run it without a launcher on "
            "one host."
        )
    plan = planned(config, name, machine, prepared)
    train = plan.train
    samples = f"{count(plan.micro_batches, 'micro-batch')} of {plan.micro_batch_size} samples a process"
    say(f"{name}: {count(plan.processes, 'process')} on {plan.device.upper()}, {samples}")
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
    with forked(_setting_up, (plan, prepared), plan.processes, preload=PRELOAD) as ask:
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
            changes += [what for hook, what in HOOKS.items() if _overrides(made[entry.name], hook)]
            changes += [f"step.{part}" for part in step_changes[entry.name]]
        changed = f"[{', '.join(changes)}] " if changes else ""
        lines.append(f"  {entry.name:<{width}}  {changed}{entry.does}.")
    return lines + [f"decided: {what}: {choice}" for what, choice in plan.decided.items()]


def _overrides(technique: Technique, hook: str) -> bool:
    return any(hook in vars(kind) for kind in type(technique).__mro__ if kind not in Technique.__mro__)
