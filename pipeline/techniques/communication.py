"""DistributedDataParallel's communication hooks: send gradients in fewer bits, as low-rank factors, or less often."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from pipeline.distributed import World
from pipeline.errors import ConfigError
from pipeline.plans import Plan
from pipeline.step import MicroBatches
from pipeline.techniques.base import Setup, Stored, Technique

RANK = 2
"""The rank of PowerSGD's factors. The PowerSGD paper uses this rank for its image classifiers."""
DENSE_STEPS = 2
"""Smallest number of steps before PowerSGD begins. torch requires two, because DDP rebuilds its buckets after the
first step."""
NEVER_ZERO = 1e-8
"""Added to the norms of the factors' columns, so that no norm is zero even if a gradient is all zeros."""
LOCAL_STEPS = 4
"""Number of steps from one averaging of the weights to the next in post-local SGD. It is one more than the entry's
``max_step_skew``."""
_ON_CPU = FunctionType(
    powerSGD_hook.powerSGD_hook.__code__,
    vars(powerSGD_hook)
    | {"torch": SimpleNamespace(**vars(torch) | {"cuda": SimpleNamespace(is_available=lambda: False)})},
)
"""torch's PowerSGD as it is on a machine without a GPU. If a GPU is visible, torch's own calls ``torch.cuda`` even to
wait for a bucket on the CPU, which fails."""
_REMEMBERED = ("iter", "error_dict", "p_memory_dict", "q_memory_dict")
"""The fields of torch's ``PowerSGDState`` that change from step to step, and that later steps depend on."""


class _Hook(Technique):
    """A communication hook: torch's ``hook`` with its ``torch_state`` sends a bucket's gradients."""

    hook: ClassVar[Callable[..., Future[torch.Tensor]]]
    torch_state: Any = None

    def change_model(self, setup: Setup) -> None:
        assert isinstance(setup.model, DistributedDataParallel)
        # A lambda, because DDP refuses a function whose annotations are strings. ``self`` must not refer to the model:
        # Python would never free a reference cycle through DDP's reducer, which is C++.
        setup.model.register_comm_hook(None, lambda _, bucket: self.reduce(bucket))

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Reduce the bucket's gradients over the ranks."""
        return self.hook(self.torch_state, bucket)


class FP16Compression(_Hook):
    """Gradients are divided by the number of ranks, sent and summed in float16, and converted back to float32."""

    name = "fp16_compression"
    hook = staticmethod(default_hooks.fp16_compress_hook)


class BF16Compression(_Hook):
    """Like ``FP16Compression``, but in bfloat16, which has float32's range and fewer digits than float16."""

    name = "bf16_compression"
    hook = staticmethod(default_hooks.bf16_compress_hook)


class PowerSGD(_Hook):
    """torch's PowerSGD with factors of rank ``RANK``, error feedback and a warm start. The first steps are plain DDP.

    From step to step, PowerSGD keeps the error of the last factors and one of the factors (Q). torch stores both per
    bucket. A resumed training has the same buckets from its first step on (``ddp.arrange_buckets``).
    """

    name = "powersgd"
    hook = staticmethod(powerSGD_hook.powerSGD_hook)

    def __init__(self, plan: Plan, world: World) -> None:
        super().__init__(plan, world)
        self.torch_state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=RANK,
            start_powerSGD_iter=DENSE_STEPS,
            orthogonalization_epsilon=NEVER_ZERO,
        )

    def change_model(self, setup: Setup) -> None:
        where = self.where("communication_hook")
        scalars = [name for name, parameter in setup.model.named_parameters() if parameter.dim() == 0]
        if scalars:
            raise ConfigError(
                f"{where}, but {scalars[0]} has no dimension, so torch's PowerSGD cannot view it as a matrix; allowed: "
                "another hook, or parameters of shape [1]."
            )
        if not any(self._shrinks(parameter) for parameter in setup.model.parameters()):
            raise ConfigError(
                f"{where}, but factors of rank {RANK} would shrink no matrix of the model to less than half; allowed: "
                "another hook."
            )
        self.torch_state.start_powerSGD_iter = max(DENSE_STEPS, setup.delay_steps)
        setup.kept_bytes.append(self._memory_bytes)
        super().change_model(setup)

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        if self.world.backend != "gloo":
            return super().reduce(bucket)
        future: Future[torch.Tensor] = _ON_CPU(self.torch_state, bucket)
        # gloo's threads begin the reductions of a bucket's factors one after the other. Without the wait, the
        # reductions of two buckets could begin in different orders on different ranks. NCCL begins reductions at once
        # and in order.
        future.wait()
        return future

    def _memory_bytes(self) -> int:
        state = self.torch_state
        kept = (state.error_dict, state.p_memory_dict, state.q_memory_dict)
        return sum(tensor.nbytes for memory in kept for tensor in memory.values())

    def state(self) -> dict[str, Any]:
        kept = {name: getattr(self.torch_state, name) for name in _REMEMBERED}
        on_cpu: dict[str, Any] = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), kept)
        return on_cpu

    def restore(self, state: dict[str, Any]) -> None:
        on_device = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.world.device), state)
        for name in _REMEMBERED:
            setattr(self.torch_state, name, on_device[name])

    def _shrinks(self, parameter: torch.Tensor) -> bool:
        """Return whether PowerSGD sends factors in place of the parameter's gradient."""
        rows = len(parameter)
        columns = parameter.numel() // rows
        sent = (rows + columns) * min(rows, columns, RANK)
        return bool(sent * self.torch_state.min_compression_rate < rows * columns)


class PostLocalSGD(_Hook):
    """After the first steps, which are plain DDP, each rank updates its weights with its own gradients.

    The weights are averaged every ``LOCAL_STEPS`` steps. This is done in place, because torch's own averager would give
    the parameters new memory and lose their memory format. Evaluation and the saved model use the average of the ranks'
    models. A checkpoint also holds each rank's own weights and optimizer state. Source: Lin et al., ICLR 2020.
    """

    name = "post_local_sgd"
    hook = staticmethod(post_localSGD_hook.post_localSGD_hook)

    def __init__(self, plan: Plan, world: World) -> None:
        super().__init__(plan, world)
        self.torch_state = post_localSGD_hook.PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
        self.steps = 0

    def change_model(self, setup: Setup) -> None:
        super().change_model(setup)
        model, self.torch_state.start_localSGD_iter = setup.model, setup.delay_steps
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        named = model.module.named_parameters(remove_duplicate=False)  # type: ignore[union-attr]
        self._names = [name for name, parameter in named if parameter.requires_grad]

    def change_step(self, setup: Setup) -> None:
        take = setup.step.whole

        def averaged(micro_batches: MicroBatches) -> None:
            take(micro_batches)
            self.steps += 1
            local_steps = self.steps - self.torch_state.start_localSGD_iter
            if local_steps > 0 and local_steps % LOCAL_STEPS == 0:
                self.world.average_(self._parameters)

        setup.step.whole = averaged

    def change_checkpoint(self, setup: Setup) -> None:
        stored, self._optimizer = setup.model_state, setup.step.optimizer

        def read() -> dict[str, Any]:
            own = stored.read()
            mean = {name: own[name].clone() for name in self._names}
            self.world.average_(list(mean.values()))
            return own | mean

        setup.model_state = Stored(read, stored.load)

    def state(self) -> dict[str, Any]:
        own = {"parameters": [p.detach() for p in self._parameters], "optimizer": self._optimizer.state_dict()}
        on_cpu: dict[str, Any] = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), own)
        return {"steps": self.steps, "dense_steps": self.torch_state.iter, **on_cpu}

    def restore(self, state: dict[str, Any]) -> None:
        self.steps, self.torch_state.iter = state["steps"], state["dense_steps"]
        self._optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for parameter, own in zip(self._parameters, state["parameters"], strict=True):
                parameter.copy_(own)
