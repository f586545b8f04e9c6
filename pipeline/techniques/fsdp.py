"""Fully sharded data parallelism: ranks hold shares of the model, and gather a block's parameters before it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from pipeline.distributed import own_part
from pipeline.errors import ConfigError
from pipeline.techniques.activation_checkpointing import blocks
from pipeline.techniques.base import Setup, Technique
from pipeline.techniques.lockstep import keep_in_step, keep_parameters
from pipeline.techniques.sharded_state import in_parts


class FSDP(Technique):
    """Applies ``fully_shard`` (FSDP2) to each of the model's blocks, and to the whole model for the other parameters.

    N consecutive ranks share one model. Each rank holds 1/N of every parameter, gradient and optimizer state, split
    along the first dimension. With ``replicas`` there are several such models, which average their gradients. BatchNorm
    normalises a rank's share of the batch, as in DDP, and evaluation uses the main rank's running statistics.

    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.
    """

    name = "fsdp"

    def change_model(self, setup: Setup) -> None:
        model = setup.model
        units = list(blocks(model))
        self._check(model, units)
        model.to(memory_format=torch.contiguous_format)  # FSDP shards only this format; inputs can be channels_last
        # With None, FSDP reshards blocks, but not the model's other parameters, which the backward pass needs first.
        reshard = None if self.plan.applied.reshard_after_forward else False
        inside = outside = MixedPrecisionPolicy()
        if self.plan.applied.parameter_precision == "bf16":
            inside = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            outside = replace(inside, output_dtype=torch.float32)  # the loss is computed in float32
            for norm in list(model.modules()):
                if isinstance(norm, _BatchNorm) and any(True for _ in norm.parameters()):
                    # BatchNorm's kernels support only one mix of types: 16-bit inputs, float32 parameters and
                    # statistics.
                    self._shard(norm, MixedPrecisionPolicy(cast_forward_inputs=False), reshard)
        for unit in units:
            self._shard(unit, inside, reshard)
        self.model: FSDPModule = self._shard(model, outside, reshard)
        where, self._evaluated = self.where("parallelism"), list[str]()
        keep_in_step(model, FSDPModule, self.world, where, [])
        setup.shard_group = self._mesh().get_group("shares")
        names = {part: name for name, part in model.named_modules()}
        for whole in (*units, model):  # a hook inside of a block could not be compiled
            keep_parameters(whole, partial(whole.named_parameters, names[whole]), where)

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        """Shard ``model`` like the trained model, but gather parameters in float32; reshard each part after its run."""
        model.to(memory_format=torch.contiguous_format)
        for part in (*blocks(model), model):
            self._shard(part, MixedPrecisionPolicy(), reshard=True)
        keep_in_step(model, FSDPModule, self.world, self.where("parallelism"), self._evaluated, training=False)
        return model

    def _shard(self, part: nn.Module, policy: MixedPrecisionPolicy, reshard: bool | None) -> FSDPModule:
        offload = CPUOffloadPolicy() if self.plan.applied.cpu_offload else OffloadPolicy()
        return fully_shard(
            part, mesh=self._mesh(), mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard
        )

    def _mesh(self) -> DeviceMesh:
        replicas = self.plan.applied.copies
        shares = {"shares": self.plan.processes // replicas}  # the ranks that share one model
        mesh = self.world.mesh(**{"replicas": replicas} | shares if replicas > 1 else shares)
        return mesh if self.plan.reduces else mesh["shares"]

    def change_optimizer(self, setup: Setup) -> None:
        choice = setup.optimizer_choice

        def make(parameters: Iterable[torch.Tensor], **options: Any) -> torch.optim.Optimizer:
            optimizer = choice.cls(parameters, **options)
            step = optimizer.step

            def on_own_parts(*arguments: Any, **keywords: Any) -> Any:
                with _FusedOnOwnParts():
                    return step(*arguments, **keywords)

            optimizer.step = on_own_parts  # type: ignore[method-assign]
            return optimizer

        setup.optimizer_choice = replace(choice, cls=make)

    def change_step(self, setup: Setup) -> None:
        @contextmanager
        def no_sync() -> Iterator[None]:
            self.model.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                self.model.set_requires_gradient_sync(True)

        setup.step.no_sync = no_sync

    def change_checkpoint(self, setup: Setup) -> None:
        assert isinstance(self.model, nn.Module)
        in_parts(setup, self.model, {}, self.world)

    def _check(self, model: nn.Module, units: list[nn.Module]) -> None:
        """Raise ConfigError for a model whose parameters cannot be sharded unit by unit."""
        where = f"{self.where('parallelism')}, but {type(model).__name__}"
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                raise ConfigError(f"{where} has a parameter, {name!r}, without dimensions; allowed: shape [1].")
        inside = {part for unit in units for part in unit.modules()}
        own = {weight for part in model.modules() if part not in inside for weight in part.parameters(recurse=False)}
        groups = [own, *(set(unit.parameters()) for unit in units)]
        for group in groups:
            types = {weight.dtype for weight in group}
            if len(types) > 1:
                raise ConfigError(
                    f"{where} has parameters of {' and '.join(sorted(map(str, types)))} in one block; allowed: 'ddp', "
                    "or parameters of one type."
                )
        homes = Counter(weight for group in groups for weight in group)
        if any(count > 1 for count in homes.values()):
            raise ConfigError(f"{where} uses one parameter in several of its blocks; allowed: 'ddp' or 'zero1'.")


class _FusedOnOwnParts(TorchFunctionMode):
    """Passes this rank's own parts of DTensors to the kernels of fused optimizers.

    The kernels work element by element, so they need only the parts. DTensor itself supports fused Adam, but not fused
    SGD.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "").startswith("_fused_"):
            args, kwargs = tree_map_only(DTensor, own_part, (args, kwargs))
        return func(*args, **(kwargs or {}))
