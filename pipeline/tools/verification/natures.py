"""Why a model's training depends on the number of processes: random draws, and samples that influence each other.

Each process draws its own random numbers, and BatchNorm normalises by the samples of one process. So a distributed
training differs by design from a training on a single device. To show other differences, ``make_per_sample`` removes
both reasons from the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.models import keeping
from pipeline.processes import randomness

_MIXED = 1e-3
"""Samples influence each other if a sample's logits differ by more than this between the whole batch and a part of
it. The value is relative to the largest logit. Rounding causes far smaller differences."""


@dataclass(frozen=True)
class Nature:
    """The reasons why a model's training depends on the number of processes."""

    stochastic: bool
    """The model draws random numbers, as dropout does."""
    batch_dependent: bool
    """A sample's logits depend on the other samples of the batch, as with BatchNorm. False if the model is stochastic,
    because random draws hide this."""

    @property
    def per_sample(self) -> bool:
        return not (self.stochastic or self.batch_dependent)


def nature(model: nn.Module, inputs: torch.Tensor) -> Nature:
    """Return the nature of ``model``, found by running a copy, in its parts' own modes, on ``inputs`` [samples, ...].
    There must be at least four samples, in the form that the model takes. The model and the random state do not
    change."""
    with torch.no_grad(), keeping.trial(model) as tried:
        before = torch.get_rng_state()
        whole = tried(inputs)
        if not torch.equal(before, torch.get_rng_state()):
            return Nature(stochastic=True, batch_dependent=False)
        parts = torch.cat([tried(part) for part in inputs.chunk(2)])
    return Nature(stochastic=False, batch_dependent=bool((whole - parts).abs().max() > _MIXED * whole.abs().max()))


def statistics(model: nn.Module, batches: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return BatchNorm's running statistics, averaged over ``batches``: name in the state dict -> value.

    With its initial statistics (mean 0, variance 1) a BatchNorm would not normalise, and a deep model would diverge.
    A BatchNorm in evaluation mode is left out. The model changes, but not the random state.
    """
    norms = _norms(model)
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None  # the average over all batches
    with torch.no_grad(), randomness.kept():
        for batch in batches:
            model(batch)
    return {f"{name}.{key}": value.clone() for name, norm in norms.items() for key, value in norm.named_buffers()}


def make_per_sample(model: nn.Module, found: dict[str, torch.Tensor]) -> nn.Module:
    """Switch dropout off and fix BatchNorm to the statistics ``found``, in place, and return the model.

    The names in the state dict stay the same. Modules that draw random numbers or mix samples in other ways are not
    changed; ``nature`` detects them.
    """
    for module in model.modules():
        drops = "drop" in type(module).__name__.lower() or type(module).__name__ == "StochasticDepth"
        for key, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in key or (drops and key == "p")):
                setattr(module, key, 0.0)
    model.load_state_dict(found, strict=False)
    for name, norm in _norms(model).items():
        model.set_submodule(name, FixedNorm(norm))
    return model


def _norms(model: nn.Module) -> dict[str, _BatchNorm]:
    return {
        name: module
        for name, module in model.named_modules()
        if name and isinstance(module, _BatchNorm) and module.track_running_stats and module.training
    }


class FixedNorm(nn.Module):
    """A BatchNorm that normalises by its running statistics even in training. It has the parameters of ``norm``."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        for name, buffer in norm.named_buffers(recurse=False):
            self.register_buffer(name, buffer)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(inputs, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
