"""Show how a variant's training is composed on this machine."""

from __future__ import annotations

from pipeline.distributed import launched_size
from pipeline.params import Config, Machine
from pipeline.params.catalogue import acting, asked
from pipeline.plans import plan as plan_of
from pipeline.techniques import Technique, of_plan

HOOKS = {
    "prepare_process": "process",
    "change_model": "model",
    "change_optimizer": "optimizer",
    "change_step": "step",
    "change_checkpoint": "checkpoint",
    "for_evaluation": "evaluation",
}
"""Hook -> the part of a training that it changes."""


def show(config: Config, name: str | None, machine: Machine) -> None:
    """Print the plan of ``variants.<name>``: the job, the techniques in the order in which they apply with what each
    changes, and the techniques left out with the reasons. Without a name, list the variants. Raises ConfigError."""
    if name is None:
        for each, variant in config.variants.items():
            print(f"{each}: {', '.join(one.name for one in asked(variant)) or 'no technique'}")
        print("One with its step: python -m pipeline plan VARIANT")
        return
    plan = plan_of(config, name, machine, launched_size())
    train = plan.train
    samples = f"{plan.micro_batches} micro-batch(es) of {plan.micro_batch_size} samples a process"
    print(f"{name}: {plan.processes} process(es) on {plan.device.upper()}, {samples}")
    print(
        f"job: {train.model}, {train.optimizer} at a learning rate of {train.learning_rate:g}, "
        f"{train.batch_size} samples a step, {train.epochs} epoch(s), {len(train.seeds)} seed(s)"
    )
    applied, classes = acting(plan.applied), {each.name: each for each in of_plan(plan)}
    print("applied, in this order:" if applied else "applied: nothing, it is the plain step")
    width = max((len(each.name) for each in applied), default=0)
    for technique in applied:
        changes = _changes(classes[technique.name]) if technique.name in classes else []
        changed = ", ".join(changes + ["input"] * bool(technique.placement))
        print(f"  {technique.name:<{width}}  {f'[{changed}] ' if changed else ''}{technique.does}.")
    for skipped, reason in plan.skipped.items():
        print(f"left out: {skipped}: {reason}")


def _changes(technique: type[Technique]) -> list[str]:
    """The parts of a training that the technique's own hooks change."""
    return [what for hook, what in HOOKS.items() if _own(technique, hook) is not _own(Technique, hook)]


def _own(technique: type[Technique], hook: str) -> object:
    found = getattr(technique, hook)
    return getattr(found, "__func__", found)
