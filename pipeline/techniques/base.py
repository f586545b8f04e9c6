"""The base class of techniques: its hooks define what a technique may change in a training.

``Technique`` lists its hooks in the order of their calls. A hook is called on all techniques before the next hook is
called. The ``change_`` hooks are called when a run is set up (``pipeline.training.assembly``). Between
``change_optimizer`` and ``change_step`` the optimizer and the plain step are made. A step does not check which
techniques are applied, so a technique that is not applied takes no time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.distributed import World
from pipeline.errors import ConfigError
from pipeline.models.keeping import unchanged
from pipeline.models.optimizers import OptimizerChoice
from pipeline.plans import Plan, WhyNotHeldBy
from pipeline.step import Inputs, TrainingStep
from pipeline.tasks import Task


@dataclass(frozen=True)
class Stored:
    """Reads and loads one part of a training's state, for checkpoints. All ranks must call ``read`` together, and
    ``load`` together."""

    read: Callable[[], dict[str, Any]]
    """Returns the state on every rank, in the form of a single device's state. A tensor of which each rank holds a part
    is returned as a DTensor."""
    load: Callable[[dict[str, Any]], object]
    """Loads a whole state that the main rank has read from a checkpoint (``World.announced``)."""


def _no_sample() -> NoReturn:
    raise AssertionError("the model is only inspected; there is no batch for a trial")


@dataclass
class Setup:
    """The parts of one rank's training, as the techniques so far have changed them."""

    model: nn.Module
    """The model on its device, possibly wrapped."""
    task: Task
    sample: Callable[[], tuple[Inputs, torch.Tensor]] = _no_sample
    """Returns a micro-batch with the shape of the training's micro-batches. Ranks that train on the same samples get
    the same micro-batch. The call leaves the training's random draws unchanged."""
    delay_steps: int = 0
    """Number of steps in which the learning rate rises. A technique that must not act at a training's start waits until
    these steps are over. 0 if a steady state is measured."""
    teacher: Mapping[str, torch.Tensor] | None = None
    """The weights of the variant's teacher; None without a teacher, or if steps are only measured or checked."""
    trained_count: int = 0
    """Number of parameters that are trained, in all ranks' parts of the model together."""
    optimizer_choice: OptimizerChoice = field(init=False)
    """Makes the optimizer for the changed model's parameters."""
    step: TrainingStep = field(init=False)
    """The plain step of model and optimizer, whose parts techniques replace."""
    model_state: Stored = field(init=False)
    """Reads and loads the state of the single-device model, even if each rank holds only a part of the model."""
    optimizer_state: Stored = field(init=False)
    merged: Callable[[dict[str, Any]], dict[str, Any]] = lambda state: state
    """Turns the state that ``model_state`` reads into the state of the single-device model before any technique."""
    averages: Stored | None = None
    """Reads and loads the averages of the weights, in the form of ``model_state``; None without ``train.ema_decay``."""
    deployed: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context in which the model has the weights that are evaluated and kept."""
    shard_group: ProcessGroup | None = None
    """The ranks among which gradients are divided; None if each rank has whole gradients."""
    is_shard: Callable[[Any], bool] = lambda _: True
    """Parameter -> whether each rank of ``shard_group`` has another part of its gradient, instead of the same."""
    exchanges_only_gradients: bool = False
    """True if ranks need each other only to add up gradients, so that each can take a step alone under ``no_sync``."""
    replays: bool = False
    """True if steps are replayed from CUDA graphs. The allocator does not see the memory of a replayed step."""
    kept_models: list[nn.Module] = field(default_factory=list)
    """Models on the device in addition to the trained model."""
    kept_bytes: list[Callable[[], int]] = field(default_factory=list)
    """Functions that return the bytes kept between steps for exchanging gradients, not counting the gradients."""

    def inputs(self) -> Inputs:
        """Return the model's inputs of two samples, on the model's device."""
        device = next(self.model.parameters()).device
        inputs: Inputs = tree_map(lambda values: values.to(device), self.task.inputs(2))
        return inputs

    def outputs(self) -> torch.Tensor:
        """Return the model's outputs for ``inputs``. The model and the random state stay unchanged."""
        with torch.no_grad(), unchanged(self.model):
            outputs: torch.Tensor = self.model(self.inputs())
        return outputs


def load_share(optimizer: torch.optim.Optimizer, whole: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
    """Load the state of the optimizer's own parameters, and the groups' settings, from the state dict ``whole``. The
    keys of ``whole["state"]`` are places in ``parameters``."""
    place_of = {id(parameter): place for place, parameter in enumerate(parameters)}
    own = [place_of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    held = optimizer.state_dict()["param_groups"]
    groups = [{**group, "params": mine["params"]} for group, mine in zip(whole["param_groups"], held, strict=True)]
    state = {index: whole["state"][place] for index, place in enumerate(own) if place in whole["state"]}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


@contextmanager
def explained(sign: str, explanation: str) -> Iterator[None]:
    """Raise a ConfigError with ``explanation`` in place of a RuntimeError whose message has the pattern ``sign``."""
    try:
        yield
    except RuntimeError as error:
        if not re.search(sign, str(error)):
            raise
        raise ConfigError(explanation) from error


class FirstPass(TorchDispatchMode):
    """The operations of a step's first forward pass, and the number formats of the tensors that they returned. Nothing
    is noted of a compiled step, nor of a step on several GPUs, whose threads do not inherit this mode."""

    def __init__(self, step: TrainingStep, plan: Plan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self.dtypes: set[torch.dtype] = set()
        forward = step.forward

        def noted(inputs: Inputs, targets: torch.Tensor) -> torch.Tensor:
            if self.names:
                return forward(inputs, targets)
            with self:
                return forward(inputs, targets)

        if plan.applied.compile == "none" and plan.devices_per_process == 1:
            step.forward = noted

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: Any = (), named: Any = None) -> Any:
        outputs = operation(*inputs, **(named or {}))
        self.names.add(operation.name())
        self.dtypes |= {output.dtype for output in tree_leaves(outputs) if isinstance(output, torch.Tensor)}
        return outputs


class Technique:
    """One change that a variant applies; this base changes nothing."""

    name: ClassVar[str]
    """The name of the technique's entry in ``pipeline.params.CATALOGUE``."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan = plan
        self.world = world

    def where(self, key: str) -> str:
        """Return the beginning of an error about the variant's value of ``key``, such as "variants.a.compile: found
        'default'"."""
        value = getattr(self.plan.applied, key)
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        return f"variants.{self.plan.name}.{key}: found {shown}"

    @classmethod
    def why_not_held_by(cls, setup: Setup) -> WhyNotHeldBy:  # noqa: ARG003
        """Return a function of a number of processes. It returns the reason why so many processes cannot share the
        model, or None if they can. This method is called when the variant is planned. The model is on the CPU, and the
        techniques before this technique have changed it."""
        return lambda processes: None  # noqa: ARG005

    @classmethod
    def prepare_process(cls) -> None:
        """Prepare a process of a job that applies this technique, before anything is on the process's device. Modules
        imported here do not count as memory of the training."""

    def change_model(self, setup: Setup) -> None:
        """Change ``setup.model`` in place, or replace it by a wrapped model."""

    def change_optimizer(self, setup: Setup) -> None:
        """Change ``setup.optimizer_choice``."""

    def change_step(self, setup: Setup) -> None:
        """Replace parts of ``setup.step`` by other callables, which may call the parts that they replace."""

    def change_checkpoint(self, setup: Setup) -> None:
        """Change ``setup.model_state`` and ``setup.optimizer_state``, which read and load checkpoints. A technique must
        do so if ranks hold parts, or different copies, of the model or of the optimizer's state."""

    def restore(self, state: dict[str, Any]) -> None:
        """Restore ``state``, which the method ``state`` returned on this rank before the run was interrupted. The model
        and the optimizer are already restored."""

    def between_phases(self) -> None:
        """Act after an epoch's training, and again after the evaluation that follows, outside measured windows."""

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        """Change the single-device ``model``, on the meta device, and return it for the next technique. Afterwards
        evaluation loads the trained state into the model."""
        return model

    def state(self) -> dict[str, Any]:
        """Return the plain values and tensors that each rank must save for this technique, so that a run resumes
        exactly."""
        return {}

    def why_idle(self) -> str:
        """Return an error that says why the technique had no effect in the steps so far; empty if it had an effect, or
        if this cannot be seen. Asked after a counted step; the training ends if every rank returns an error."""
        return ""

    def findings(self) -> dict[str, float]:
        """Return the technique's own figures of a run, for the result. Each name ends with a unit or names a count."""
        return {}
