"""What a technique may change of a training: its hooks.

Each ``change_`` hook is called when a run is set up, in the order in which they stand here: all techniques
change the model and the choice of the optimizer, one after the other; the optimizer and the plain step are made of
that; then all change the step and what a checkpoint holds. Nothing is asked again inside a step, so a technique that
is not applied costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from pipeline.data.batches import Placement
from pipeline.distributed import World
from pipeline.models.optimizers import OptimizerChoice
from pipeline.params import entry
from pipeline.plans import Plan, WhyNotHeldBy
from pipeline.step import TrainingStep


@dataclass(frozen=True)
class Stored:
    """How a part of the training goes into a checkpoint and comes back. All ranks call both together."""

    read: Callable[[], dict[str, Any]]
    """The whole of it, as a single device would have it; on every rank."""
    load: Callable[[dict[str, Any]], object]
    """Undo of ``read``, from the whole."""


@dataclass
class Checkpointed:
    """What of a training a checkpoint holds, as the techniques so far leave it."""

    model: Stored
    """The single-device model, whatever the ranks hold of it."""
    optimizer: Stored


@dataclass(frozen=True)
class Inputs:
    """What the model gets."""

    shape: tuple[int, int, int]
    """Of an image: channels, height, width."""
    sample: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    """Makes a micro-batch as training brings them, the same on every rank that takes the same samples. The training's
    own draws stay as they are."""


class Technique:
    """One change that a variant applies; this base changes nothing."""

    name: ClassVar[str]
    """That of its entry in ``pipeline.params.CATALOGUE``."""
    shards_model: ClassVar[bool] = False
    """Whether what a rank holds is not yet the model: a part of it, or one of several to average. ``change_checkpoint``
    reads the whole, which is evaluated."""
    shared_rng: ClassVar[bool] = False
    """Whether the ranks that hold one model together must draw the same random numbers."""
    max_step_skew: ClassVar[int] = 0
    """How many steps a rank may be ahead of another: more than none where not every step waits for all ranks."""
    recomputes: ClassVar[bool] = False
    """Whether a step then takes more floating-point operations."""
    estimable: ClassVar[bool] = True
    """Whether a rehearsal on tensors without values shows the memory it takes (``pipeline.profiling.ledger``)."""
    placement: ClassVar[Placement | None] = None
    """Where it reads the data set from; None: as ``train.placement`` says."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan = plan
        self.world = world
        self.replays = False
        """Whether steps are replayed from CUDA graphs, so that the allocator is not asked for what they take."""

    @classmethod
    def is_asked(cls, plan: Plan) -> bool:
        """Whether the plan applies this technique."""
        known = entry(cls.name)
        return known.asked_by(plan.applied) and (not known.needs or plan.applied.parallelism in known.needs)

    @classmethod
    def why_not_held_by(cls, model: nn.Module, shape: tuple[int, int, int]) -> WhyNotHeldBy:  # noqa: ARG003
        """Of what lets processes hold ``model`` together: which is as the techniques before leave it, on the CPU.
        ``shape``: that of an image, channels, height, width."""
        return lambda processes: None  # noqa: ARG005

    @classmethod
    def prepare_process(cls) -> None:
        """Called in each process of a job that applies this technique, before anything is on the process's device. What
        it imports here does not count as memory of the training."""

    def change_model(self, model: nn.Module, inputs: Inputs) -> nn.Module:  # noqa: ARG002
        """``model`` on its device, changed in place or wrapped, as the next technique gets it."""
        return model

    def change_optimizer(self, choice: OptimizerChoice) -> OptimizerChoice:
        """What makes the optimizer of the changed model's parameters."""
        return choice

    def change_step(self, step: TrainingStep) -> None:
        """Put other callables in the place of parts of the step, which may call those that were there."""

    def change_checkpoint(self, checkpoint: Checkpointed, optimizer: torch.optim.Optimizer) -> None:
        """For what keeps parts of the model or of the optimizer's state, or copies that differ."""

    def begin_after(self, warmup_steps: int) -> None:
        """Called before the first step. What is not for a training's start begins after ``warmup_steps``, during which
        the learning rate rises; 0 where a steady state is measured."""

    def communication_bytes(self) -> int:
        """Memory kept between steps for exchanging gradients, the gradients themselves not counted."""
        return 0

    def between_phases(self) -> None:
        """Called after an epoch's training, and again after the evaluation that follows; outside measured windows."""

    def findings(self) -> dict[str, float]:
        """What it found out during a run, for the result, by names that end in their unit or are counts."""
        return {}

    def state(self) -> dict[str, Any]:
        """What the technique must remember, on each rank, to resume exactly: plain values and tensors."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Undo of ``state``."""
