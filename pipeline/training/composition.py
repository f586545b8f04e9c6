"""Compose a training: model, techniques, optimizer, step and checkpoint, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from pipeline.distributed import World
from pipeline.measurement.detectors.base import Detector
from pipeline.models import optimizers
from pipeline.params import catalogue
from pipeline.plans import Plan
from pipeline.step import Losses, TrainingStep
from pipeline.tasks import Task
from pipeline.tasks.batches import Placement, TrainBatches
from pipeline.techniques import Setup, Stored, Technique
from pipeline.training.evaluation import without_weights
from pipeline.training.loop import Training
from pipeline.training.losses import DeviceLosses, HostLosses


def batches_of(plan: Plan, task: Task, world: World, seed: int, placement: Placement) -> TrainBatches:
    """Return the micro-batches that this rank trains on."""
    return TrainBatches(
        task,
        batch_size=plan.train.batch_size,
        micro_batches=plan.micro_batches,
        rank=world.rank // plan.model_processes,
        world_size=plan.data_processes,
        seed=seed,
        augment=plan.train.augment,
        placement=placement,
        workers=plan.applied.loader_workers,
    )


def compose(
    plan: Plan,
    model: nn.Module,
    task: Task,
    batches: TrainBatches,
    world: World,
    techniques: Sequence[type[Technique]],
    seed: int,
    detectors: Sequence[Detector] = (),
    *,
    losses: Losses | None = None,
    steady: bool = False,
    teacher: Mapping[str, torch.Tensor] | None = None,
) -> Training:
    """Compose the training of ``model``, which is moved to the rank's device. All ranks call this function together.

    ``model``: a single-device module with the same initial weights on every rank. ``losses``: adds up the losses;
    by default HostLosses on a CPU and DeviceLosses on a GPU. ``steady``: True if a steady state is measured; techniques
    then do not wait for the learning rate's warm-up. ``teacher``: the weights of the variant's teacher.
    """
    train, model = plan.train, model.to(world.device)
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    whole = without_weights(model) if any(each.evaluates_whole for each in catalogue.in_effect(plan.applied)) else None
    rising = optimizers.rising_steps(train, train.epochs * batches.steps_per_epoch)
    made = [each(plan, world) for each in techniques]
    setup = Setup(model, task, lambda: next(batches.epoch(0)), 0 if steady else rising, teacher)
    for technique in made:
        technique.change_model(setup)
    setup.optimizer_choice = optimizers.of_job(train)
    for technique in made:
        technique.change_optimizer(setup)
    optimizer = setup.optimizer_choice.make(setup.model.parameters())
    losses = losses or (HostLosses(world) if world.device.type == "cpu" else DeviceLosses(world))
    setup.step = step = TrainingStep(setup.model, task.objective.loss, optimizer, losses, plan.micro_batches)
    setup.model_state = Stored(model.state_dict, lambda state: model.load_state_dict(world.sent(state)))
    setup.optimizer_state = Stored(optimizer.state_dict, lambda state: optimizer.load_state_dict(world.sent(state)))
    changes = {}
    for technique in made:
        before = vars(step).copy()
        technique.change_step(setup)
        changes[technique.name] = [name for name, part in vars(step).items() if part is not before[name]]
    for technique in made:
        technique.change_checkpoint(setup)
    setup.teacher = None  # frees memory: the teacher model has these weights
    return Training(
        plan, world, task, batches, model, parameter_count, whole, made, setup, changes, seed=seed, detectors=detectors
    )
