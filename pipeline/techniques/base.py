"""What a technique may change in a training: its hooks.

The ``change_`` hooks are called when a run is set up, in the order in which they are defined here. First each
technique changes the model and the choice of the optimizer. From these the optimizer and the plain step are made.
Then each technique changes the step and the contents of a checkpoint. A step does not check which techniques are
applied, so a technique that is not applied costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from pipeline.distributed import World
from pipeline.models.optimizers import OptimizerChoice
from pipeline.plans import Plan, WhyNotHeldBy
from pipeline.step import TrainingStep


@dataclass(frozen=True)
class Stored:
    """How a part of the training is read for a checkpoint and loaded from it. All ranks call each function together."""

    read: Callable[[], dict[str, Any]]
    """Return the whole state, as a single device would have it, on every rank; where each rank holds a part of a
    tensor, as a DTensor."""
    load: Callable[[dict[str, Any]], object]
    """Load a whole state that the main rank has read from a checkpoint (``World.announced``)."""


@dataclass
class Checkpointed:
    """The parts of a training that a checkpoint holds, as the techniques so far have changed them."""

    model: Stored
    """The single-device model, even if each rank holds only a part of it."""
    optimizer: Stored


class OfTask(Protocol):
    """What a technique may ask of the job's task."""

    def model(self, name: str | None = None, options: Mapping[str, Any] | None = None) -> nn.Module:
        """Build a model for the job's data, on the CPU; by default the job's own."""

    def distance(self, outputs: torch.Tensor, taught: torch.Tensor, temperature: float) -> torch.Tensor:
        """The distance of outputs from a teacher's, a scalar: the mean over the samples."""


@dataclass(frozen=True)
class Inputs:
    """The model's inputs."""

    shape: tuple[int, ...]
    """Of one sample."""
    sample: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    """Return a micro-batch like those of the training, the same on all ranks that train on the same samples. It leaves
    the training's random draws unchanged."""
    dtype: torch.dtype = torch.float32
    task: OfTask | None = None
    """None where only the model and its parts are looked at."""

    def tried(self, model: nn.Module) -> torch.Tensor:
        """Return the outputs of ``model`` for two samples of zeros. Its buffers and the random state stay unchanged."""
        device = next(model.parameters()).device
        buffers = {name: value.clone() for name, value in model.named_buffers()}
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            zeros = torch.zeros(2, *self.shape, dtype=self.dtype, device=device)
            outputs: torch.Tensor = torch.func.functional_call(model, buffers, (zeros,))
        return outputs


class Technique:
    """One change that a variant applies; this base changes nothing."""

    name: ClassVar[str]
    """The name of the technique's entry in ``pipeline.params.CATALOGUE``."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan = plan
        self.world = world
        self.replays = False
        """Whether steps are replayed from CUDA graphs, so that the allocator does not see the memory that they use."""

    @classmethod
    def why_not_held_by(cls, model: nn.Module, inputs: torch.Tensor) -> WhyNotHeldBy:  # noqa: ARG003
        """Return the function that says why a number of processes cannot hold ``model`` together. ``model`` is on the
        CPU, as the techniques before this one left it. ``inputs``: of two samples, on the CPU."""
        return lambda processes: None  # noqa: ARG005

    @classmethod
    def prepare_process(cls) -> None:
        """Called in each process of a job that applies this technique, before anything is on the process's device.
        Modules imported here do not count as memory of the training."""

    def change_model(self, model: nn.Module, inputs: Inputs) -> nn.Module:  # noqa: ARG002
        """Change ``model``, which is on its device, in place or wrap it; return it for the next technique."""
        return model

    def change_optimizer(self, choice: OptimizerChoice) -> OptimizerChoice:
        """Return the choice that makes the optimizer for the changed model's parameters."""
        return choice

    def change_step(self, step: TrainingStep) -> None:
        """Replace parts of the step by other callables, which may call the parts that they replace."""

    def change_checkpoint(self, checkpoint: Checkpointed, optimizer: torch.optim.Optimizer) -> None:
        """Change how checkpoints are read and loaded, if ranks hold parts, or differing copies, of model or state."""

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        """Change the single-device ``model``, on the meta device, before evaluation gives it the state that a
        checkpoint reads; return it for the next technique."""
        return model

    def begin_after(self, warmup_steps: int) -> None:
        """Called before the first step. A technique that must not act at a training's start begins after
        ``warmup_steps``, during which the learning rate rises; 0 where a steady state is measured."""

    def learn_from(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Called before the first step of a training whose variant names a teacher, with the teacher's weights; not
        called where steps are only measured or checked."""

    def further_models(self) -> Iterator[nn.Module]:
        """Yield the models that the technique keeps on the device beside the trained one."""
        return iter(())

    def communication_bytes(self) -> int:
        """Return the bytes kept between steps for exchanging gradients, not counting the gradients."""
        return 0

    def between_phases(self) -> None:
        """Called after an epoch's training, and again after the evaluation that follows; outside measured windows."""

    def findings(self) -> dict[str, float]:
        """Return the technique's own figures of a run, for the result. Each name ends in its unit or names a count."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what the technique must save, on each rank, to resume exactly: plain values and tensors."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned."""
