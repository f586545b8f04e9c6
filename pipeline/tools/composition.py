"""What a variant's training is composed of on this machine, for a person."""

from __future__ import annotations

from pipeline.distributed import launched_size
from pipeline.params import Config, Machine
from pipeline.params.catalogue import in_order
from pipeline.plans import plan as plan_of
from pipeline.techniques import Technique, of_plan

HOOKS = {
    "prepare_process": "process",
    "change_model": "model",
    "change_optimizer": "optimizer",
    "change_step": "step",
    "change_checkpoint": "checkpoint",
}
"""Hook -> what of a training it changes."""


def show(config: Config, name: str, machine: Machine) -> None:
    """Print the plan of ``variants.<name>``: the job, the techniques in the order in which they apply, and what each
    changes; what is left out, and why. Raises ConfigError."""
    plan = plan_of(config, name, machine, launched_size())
    train = plan.train
    samples = f"{plan.micro_batches} micro-batch(es) of {plan.micro_batch_size} samples a process"
    print(f"{name}: {plan.processes} process(es) on {plan.device.upper()}, {samples}")
    print(
        f"job: {train.model}, {train.optimizer} at a learning rate of {train.learning_rate:g}, "
        f"{train.batch_size} samples a step, {train.epochs} epoch(s), {len(train.seeds)} seed(s)"
    )
    applied, classes = in_order(plan.applied), {each.name: each for each in of_plan(plan)}
    print("applied, in this order:" if applied else "applied: nothing, it is the plain step")
    width = max((len(each.name) for each in applied), default=0)
    for technique in applied:
        changed = ", ".join(_changes(classes[technique.name])) if technique.name in classes else ""
        print(f"  {technique.name:<{width}}  {f'[{changed}] ' if changed else ''}{technique.does}.")
    for skipped, reason in plan.skipped.items():
        print(f"left out: {skipped}: {reason}")


def _changes(technique: type[Technique]) -> list[str]:
    """What its hooks change, beyond those that every technique has."""
    own = [what for hook, what in HOOKS.items() if _own(technique, hook) is not _own(Technique, hook)]
    return own + ["input"] * bool(technique.placement)


def _own(technique: type[Technique], hook: str) -> object:
    found = getattr(technique, hook)
    return getattr(found, "__func__", found)
