"""What a technique may change of a training: its hooks.

Each ``wrap_`` hook is called once, when a run is set up, with what is there so far, and returns what shall be there
instead. Nothing is asked again inside a step, so a technique that is not applied costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from pipeline.data.batches import Placement
from pipeline.distributed import World
from pipeline.models.optimizers import OptimizerChoice
from pipeline.params import entry
from pipeline.plans import Plan, WhyNotHeldBy

MicroBatches = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Images float32 [b, C, H, W] and labels int64 [b], on the device."""
Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits [b, classes] and labels int64 [b] to their mean loss, a scalar."""
Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Images float32 [b, C, H, W] and labels int64 [b] to this micro-batch's share of the loss, a scalar."""
Backward = Callable[[torch.Tensor], None]
"""Adds the gradients of a loss to the parameters'."""
HoldSync = Callable[[], AbstractContextManager[object]]
"""A context in which gradients stay on their rank: for every micro-batch of a step but the last."""
Accumulate = Callable[[MicroBatches], None]
"""Takes a step's micro-batches, notes their losses, and leaves the sum of their gradients in the parameters."""
ZeroGrad = Callable[[], None]
"""Forgets the last step's gradients."""
Update = Callable[[], object]
"""Changes the parameters by their gradients."""
Step = Callable[[MicroBatches], None]
"""One optimizer update from one global batch: all of the above in order."""


class Losses(Protocol):
    """Where the losses of micro-batches are noted. Their sum over a step, averaged over ranks, is the step's loss."""

    def add(self, loss: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class Stored:
    """How a part of the training goes into a checkpoint and comes back. All ranks call both together."""

    read: Callable[[], dict[str, Any]]
    """The whole of it, as a single device would have it; on every rank."""
    load: Callable[[dict[str, Any]], object]
    """Undo of ``read``, from the whole."""


class Technique:
    """One change that a variant applies; this base changes nothing."""

    name: ClassVar[str]
    """That of its entry in ``pipeline.params.CATALOGUE``."""
    shards_model: ClassVar[bool] = False
    """Whether what a rank holds is not yet the model: a part of it, or one of several to average. ``wrap_model_state``
    reads the whole, which is evaluated."""
    draws_alike: ClassVar[bool] = False
    """Whether the ranks that hold one model together must draw the same random numbers."""
    free_steps: ClassVar[int] = 0
    """How many steps a rank may be ahead of another: more than none where not every step waits for all ranks."""
    recomputes: ClassVar[bool] = False
    """Whether a step then takes more floating-point operations."""
    foreseen: ClassVar[bool] = True
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
        return known.asked(plan.applied) and (not known.needs or plan.applied.parallelism in known.needs)

    @classmethod
    def why_not_held_by(cls, model: nn.Module, shape: tuple[int, int, int]) -> WhyNotHeldBy:  # noqa: ARG003
        """Of what lets processes hold ``model`` together: which is as the techniques before leave it, on the CPU.
        ``shape``: that of an image, channels, height, width."""
        return lambda processes: None  # noqa: ARG005

    @classmethod
    def prepare_process(cls) -> None:
        """Called in each process of a job that applies this technique, before anything is on the process's device. What
        it imports here does not count as memory of the training."""

    def see_data(self, shape: tuple[int, int, int]) -> None:
        """Called before all ``wrap_`` hooks, with the shape of an image: channels, height, width."""

    def preview(self, sample: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Before ``wrap_model``, for what must try the model: ``sample()`` makes a micro-batch as training brings them.

        It is the same on every rank that takes the same samples, and the training's own draws stay as they are.
        """

    def wrap_criterion(self, criterion: Criterion) -> Criterion:
        """What is made of the wrapped model's output."""
        return criterion

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """``model`` on its device, changed in place or wrapped."""
        return model

    def change_optimizer(self, choice: OptimizerChoice) -> OptimizerChoice:
        """What makes the optimizer of the wrapped model's parameters."""
        return choice

    def wrap_forward(self, forward: Forward) -> Forward:
        return forward

    def wrap_backward(self, backward: Backward) -> Backward:
        return backward

    def wrap_hold_sync(self, hold_sync: HoldSync) -> HoldSync:
        return hold_sync

    def wrap_accumulate(self, accumulate: Accumulate, forward: Forward, losses: Losses) -> Accumulate:  # noqa: ARG002
        """For what does not take a step's micro-batches one by one, each forward and backward.

        ``forward`` is the step's as all techniques, later ones too, leave it.
        """
        return accumulate

    def wrap_zero_grad(self, zero_grad: ZeroGrad, optimizer: torch.optim.Optimizer) -> ZeroGrad:  # noqa: ARG002
        return zero_grad

    def wrap_update(self, update: Update, optimizer: torch.optim.Optimizer) -> Update:  # noqa: ARG002
        return update

    def trial_update(self, update: Update, optimizer: torch.optim.Optimizer) -> Update:  # noqa: ARG002
        """The update of a trial step, for which a rank may lack the memory: whatever makes ranks wait for each other
        must not be in it."""
        return update

    def wrap_step(self, step: Step) -> Step:
        return step

    def begin_after(self, warmup_steps: int) -> None:
        """Called before the first step. What is not for a training's start begins after ``warmup_steps``, during which
        the learning rate rises; 0 where a steady state is measured."""

    def communication_bytes(self) -> int:
        """Memory kept between steps for exchanging gradients, the gradients themselves not counted."""
        return 0

    def between_phases(self) -> None:
        """Called after an epoch's training, and again after the evaluation that follows; outside measured windows."""

    def wrap_model_state(self, stored: Stored) -> Stored:
        return stored

    def wrap_optimizer_state(self, stored: Stored, optimizer: torch.optim.Optimizer) -> Stored:  # noqa: ARG002
        return stored

    def findings(self) -> dict[str, float]:
        """What it found out during a run, for the result, by names that end in their unit or are counts."""
        return {}

    def state(self) -> dict[str, Any]:
        """What the technique must remember, on each rank, to resume exactly: plain values and tensors."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Undo of ``state``."""
