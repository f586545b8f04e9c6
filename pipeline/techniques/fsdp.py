"""Fully sharded data parallelism: every rank holds a share of the model, and gathers a block of it when it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from pipeline.distributed import own_part
from pipeline.errors import ConfigError
from pipeline.models.optimizers import OptimizerChoice
from pipeline.plans import Plan
from pipeline.step import TrainingStep
from pipeline.techniques.activation_checkpointing import blocks
from pipeline.techniques.base import Checkpointed, Inputs, Technique
from pipeline.techniques.sharded_state import whole_model, whole_optimizer


def _dimensions(plan: Plan) -> dict[str, int]:
    """Of the mesh: how many ranks share out the model and, where there are replicas of it, how many these are."""
    replicas = plan.applied.replicas
    shares = {"shares": plan.processes // replicas}
    return {"replicas": replicas} | shares if replicas > 1 else shares


class FSDP(Technique):
    """``fully_shard`` (FSDP2) on the model's blocks, and on the model for what is in none.

    Each rank holds 1/N of every parameter, along its first dimension, with its gradient and its optimizer state; with
    ``replicas``, 1/N of N ranks in a row, and the rows average their gradients. BatchNorm normalises a rank's share of
    the batch, as under DDP, and evaluation takes the main rank's running statistics.

    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.
    """

    name = "fsdp"
    shards_model = True
    estimable = False

    def change_model(self, model: nn.Module, inputs: Inputs) -> nn.Module:  # noqa: ARG002
        units = list(blocks(model))
        self._check(model, units)
        model.to(memory_format=torch.contiguous_format)  # all that it shards; channels_last is left to the input
        applied = self.plan.applied
        options: dict[str, Any] = {
            "mesh": self.world.mesh(**_dimensions(self.plan)),
            # None: blocks do, and the model's own parameters, with which the backward pass begins, do not.
            "reshard_after_forward": None if applied.reshard_after_forward else False,
            "offload_policy": CPUOffloadPolicy() if applied.cpu_offload else OffloadPolicy(),
        }
        inside = outside = MixedPrecisionPolicy()
        if applied.parameter_precision == "bf16":
            inside = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            outside = replace(inside, output_dtype=torch.float32)  # the loss is a float32 sum
            for norm in list(model.modules()):
                if isinstance(norm, _BatchNorm) and any(True for _ in norm.parameters()):
                    # Its kernels take 16-bit images with float32 parameters and statistics, and no other mixture.
                    fully_shard(norm, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **options)
        for unit in units:
            fully_shard(unit, mp_policy=inside, **options)
        self.model: FSDPModule = fully_shard(model, mp_policy=outside, **options)
        return model

    def change_optimizer(self, choice: OptimizerChoice) -> OptimizerChoice:
        def make(parameters: Iterable[torch.Tensor], **options: Any) -> torch.optim.Optimizer:
            optimizer = choice.cls(parameters, **options)
            step = optimizer.step

            def on_own_parts(*arguments: Any, **keywords: Any) -> Any:
                with _FusedOnOwnParts():
                    return step(*arguments, **keywords)

            optimizer.step = on_own_parts  # type: ignore[method-assign]
            return optimizer

        return replace(choice, cls=make)

    def change_step(self, step: TrainingStep) -> None:
        @contextmanager
        def no_sync() -> Iterator[None]:
            self.model.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                self.model.set_requires_gradient_sync(True)

        step.no_sync = no_sync

    def change_checkpoint(self, checkpoint: Checkpointed, optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(self.model, nn.Module)
        checkpoint.model = whole_model(checkpoint.model, self.model, {})
        checkpoint.optimizer = whole_optimizer(checkpoint.optimizer, optimizer, {})

    def _check(self, model: nn.Module, units: list[nn.Module]) -> None:
        """Raise ConfigError for a model whose parameters cannot be shared out unit by unit."""
        where = f"variants.{self.plan.name}.parallelism: found 'fsdp', but {type(model).__name__}"
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                raise ConfigError(f"{where} has a parameter, {name!r}, that is a single number; allowed: [1] too.")
        inside = {part for unit in units for part in unit.modules()}
        own = {each for part in model.modules() if part not in inside for each in part.parameters(recurse=False)}
        groups = [own, *(set(unit.parameters()) for unit in units)]
        for group in groups:
            types = {each.dtype for each in group}
            if len(types) > 1:
                raise ConfigError(
                    f"{where} has parameters of {' and '.join(sorted(map(str, types)))} in one block; allowed: 'ddp', "
                    "or parameters of one type."
                )
        homes = Counter(each for group in groups for each in group)
        if any(count > 1 for count in homes.values()):
            raise ConfigError(f"{where} uses one parameter in several of its blocks; allowed: 'ddp' or 'zero1'.")


class _FusedOnOwnParts(TorchFunctionMode):
    """Gives the fused optimizers' kernels each rank's own part of DTensors.

    They work element by element, so that nothing else need be known; DTensor itself knows Adam's and not SGD's.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "").startswith("_fused_"):
            args, kwargs = tree_map_only(DTensor, own_part, (args, kwargs))
        return func(*args, **(kwargs or {}))
