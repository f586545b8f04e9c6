"""DistributedDataParallel's communication hooks: send gradients in fewer bits, as low-rank factors, or less often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from pipeline.distributed import World
from pipeline.errors import ConfigError
from pipeline.params import LOCAL_STEPS
from pipeline.plans import Plan
from pipeline.step import MicroBatches
from pipeline.techniques.base import Setup, Stored, Technique

RANK = 2
"""The rank of PowerSGD's factors, as in the paper's image classifiers."""
DENSE_STEPS = 2
"""Smallest number of steps before PowerSGD begins. torch requires two, because DDP rebuilds its buckets after the
first step."""
NEVER_ZERO = 1e-8
"""Added to the norms of PowerSGD's columns, so that no norm is zero even if a gradient is all zeros."""


class _Hook(Technique):
    """A communication hook: ``reduce`` sends a bucket's gradients."""

    def change_model(self, setup: Setup) -> None:
        assert isinstance(setup.model, DistributedDataParallel)
        # A lambda, because DDP refuses a function whose annotations are strings. ``self`` must not refer to the model:
        # Python would never free a reference cycle through DDP's reducer, which is C++.
        setup.model.register_comm_hook(None, lambda _, bucket: self.reduce(bucket))

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Reduce the bucket's gradients over the ranks."""
        raise NotImplementedError


class FP16Compression(_Hook):
    """Gradients are divided by the number of ranks, sent and summed in float16, and converted back to float32."""

    name = "fp16_compression"

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        return default_hooks.fp16_compress_hook(None, bucket)  # type: ignore[arg-type]


class BF16Compression(_Hook):
    """Like ``FP16Compression``, but in bfloat16, which has float32's range and fewer digits."""

    name = "bf16_compression"

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        return default_hooks.bf16_compress_hook(None, bucket)  # type: ignore[arg-type]


class PowerSGD(_Hook):
    """torch's PowerSGD with factors of rank ``RANK``, error feedback and a warm start. The first steps are plain DDP.

    From step to step, PowerSGD keeps the error of the last factors and one of the factors (Q). torch stores both per
    bucket. But in a resumed training, the first step has other buckets than the later steps. So that a training resumes
    exactly, a checkpoint stores both per parameter.
    """

    name = "powersgd"

    def __init__(self, plan: Plan, world: World) -> None:
        super().__init__(plan, world)
        self.torch_state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=RANK,
            start_powerSGD_iter=DENSE_STEPS,
            orthogonalization_epsilon=NEVER_ZERO,
        )
        self._buckets: dict[int, list[int]] = {}
        """Index of a bucket -> the places of its parameters in the model, in the order of ``torch_state``'s memory."""
        self._memory: dict[int, dict[str, torch.Tensor]] = {}
        """Place of a parameter -> its error and Q, for parameters that are in no bucket yet."""

    def change_model(self, setup: Setup) -> None:
        model = setup.model
        self._parameters = list(model.parameters())
        self._places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
        if scalars:
            raise ConfigError(
                f"variants.{self.plan.name}.communication_hook: found 'powersgd', but {scalars[0]} has no dimension, "
                "so torch's PowerSGD cannot view it as a matrix; allowed: another hook, or parameters of shape [1]."
            )
        if not self._matrices(range(len(self._parameters))):
            raise ConfigError(
                f"variants.{self.plan.name}.communication_hook: found 'powersgd', but factors of rank {RANK} would "
                "shrink no matrix of the model to less than half; allowed: another hook."
            )
        self.torch_state.start_powerSGD_iter = max(DENSE_STEPS, setup.delay_steps)
        setup.kept_bytes.append(self._memory_bytes)
        super().change_model(setup)

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        if self.torch_state.iter >= self.torch_state.start_powerSGD_iter:
            self._put_memory_into(bucket)
        if self.world.backend != "gloo":
            return powerSGD_hook.powerSGD_hook(self.torch_state, bucket)
        with _gpus_unseen():
            # gloo's threads begin the reductions of a bucket's factors one after the other. Without the wait, the
            # reductions of two buckets could begin in different orders on different ranks. NCCL begins reductions at
            # once and in order.
            future = powerSGD_hook.powerSGD_hook(self.torch_state, bucket)
            future.wait()
        return future

    def _memory_bytes(self) -> int:
        state = self.torch_state
        kept = (state.error_dict, state.p_memory_dict, state.q_memory_dict)
        return sum(tensor.nbytes for memory in kept for tensor in memory.values())

    def state(self) -> dict[str, Any]:
        memory = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), self._memory | self._remembered())
        return {"steps": self.torch_state.iter, "memory": memory}

    def restore(self, state: dict[str, Any]) -> None:
        self.torch_state.iter = state["steps"]
        self._memory = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.world.device), state["memory"])

    def _put_memory_into(self, bucket: GradBucket) -> None:
        """Put the error and Q of the bucket's parameters into ``torch_state``, unless they are already there."""
        state, index = self.torch_state, bucket.index()
        places = [self._places[id(parameter)] for parameter in bucket.parameters()]
        if self._buckets.get(index) == places:
            return
        if index in self._buckets:  # DDP has rebuilt its buckets, and this is the first of the new buckets
            self._memory = self._remembered()
            for kept in (self._buckets, state.error_dict, state.p_memory_dict, state.q_memory_dict):
                kept.clear()
        self._buckets[index] = places
        own = {place: self._memory.pop(place, {}) or self._first_memory(place) for place in places}
        like, matrices = bucket.buffer(), self._matrices(places)
        state.error_dict[index] = torch.cat([own[place]["error"] for place in places])
        state.q_memory_dict[index] = torch.cat([like.new_empty(0), *(own[place]["q"] for place in matrices)])
        state.p_memory_dict[index] = like.new_empty(sum(rows * rank for rows, _, rank in map(self._shape, matrices)))

    def _remembered(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return the error and Q of every parameter that is in a bucket."""
        found: dict[int, dict[str, torch.Tensor]] = {}
        for index, places in self._buckets.items():
            sizes = [self._parameters[place].numel() for place in places]
            errors = self.torch_state.error_dict[index].split(sizes)
            found |= {place: {"error": error.clone()} for place, error in zip(places, errors, strict=True)}
            matrices = self._matrices(places)
            sizes = [columns * rank for _, columns, rank in map(self._shape, matrices)]
            for place, factor in zip(matrices, self.torch_state.q_memory_dict[index].split(sizes), strict=True):
                found[place]["q"] = factor.clone()
        return found

    def _first_memory(self, place: int) -> dict[str, torch.Tensor]:
        """Return an error of zero and a random Q, the same on every rank."""
        parameter, (_, columns, rank) = self._parameters[place], self._shape(place)
        factor = torch.randn(columns * rank, generator=torch.Generator().manual_seed(place))
        return {"error": parameter.new_zeros(parameter.numel()), "q": factor.to(parameter)}

    def _shape(self, place: int) -> tuple[int, int, int]:
        """Return the shape (rows, columns) of the matrix that PowerSGD makes of a parameter, and its factors' rank."""
        parameter = self._parameters[place]
        rows = len(parameter)
        columns = parameter.numel() // rows
        return rows, columns, min(rows, columns, RANK)

    def _matrices(self, places: Sequence[int]) -> list[int]:
        """Return the ``places`` whose parameters are compressed, grouped by shape, as torch orders the factors."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for place in places:
            rows, columns, rank = self._shape(place)
            if (rows + columns) * rank * self.torch_state.min_compression_rate < rows * columns:
                by_shape.setdefault((rows, columns), []).append(place)
        return [place for alike in by_shape.values() for place in alike]


@contextmanager
def _gpus_unseen() -> Iterator[None]:
    """Hide GPUs: if a GPU is visible, torch's PowerSGD calls ``torch.cuda`` even to wait for a bucket on the CPU."""
    real, torch.cuda.is_available = torch.cuda.is_available, lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = real


class PostLocalSGD(_Hook):
    """After the first steps, which are plain DDP, each rank updates its weights with its own gradients.

    The weights are averaged every ``LOCAL_STEPS`` steps. This is done in place, because torch's own averager would give
    the parameters new memory and lose their memory format. Evaluation and the saved model use the average of the ranks'
    models. A checkpoint also holds each rank's own weights and optimizer state. Source: Lin et al., ICLR 2020.
    """

    name = "post_local_sgd"

    def __init__(self, plan: Plan, world: World) -> None:
        super().__init__(plan, world)
        self.torch_state = post_localSGD_hook.PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
        self.steps = 0

    def change_model(self, setup: Setup) -> None:
        super().change_model(setup)
        model, self.torch_state.start_localSGD_iter = setup.model, setup.delay_steps
        self._parameters = list(model.parameters())
        self._names = [name for name, _ in model.module.named_parameters(remove_duplicate=False)]  # type: ignore[union-attr]

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        return post_localSGD_hook.post_localSGD_hook(self.torch_state, bucket)

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
