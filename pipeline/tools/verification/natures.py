"""What makes a model's training depend on who computes it: random draws, and samples that look at each other.

A process draws numbers of its own, and BatchNorm normalises by the samples that are there, so a training that is shared
out differs from one that is not, and means to. What it must not differ in shows when both are kept still.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_MIXED = 1e-3
"""Difference of a sample's logits in the whole batch and in a part of it, relative to the largest, above which the
samples look at each other; rounding stays far below it."""


@dataclass(frozen=True)
class Nature:
    """What a model does in training."""

    draws: bool
    """It draws random numbers: dropout, say."""
    mixes: bool
    """A sample's logits depend on the others of its batch: BatchNorm, say. False where random draws hide it."""

    @property
    def still(self) -> bool:
        return not (self.draws or self.mixes)


def nature(model: nn.Module, images: torch.Tensor) -> Nature:
    """By trying it on ``images`` float32 [n, C, H, W], at least four. Model and random state stay as they are."""
    tried = copy.deepcopy(model).train()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        whole = tried(images)
        if not torch.equal(before, torch.get_rng_state()):
            return Nature(draws=True, mixes=False)
        parts = torch.cat([tried(part) for part in images.chunk(2)])
    return Nature(draws=False, mixes=bool((whole - parts).abs().max() > _MIXED * whole.abs().max()))


def quieten(model: nn.Module) -> nn.Module:
    """The model, changed in place: dropout off."""
    for module in model.modules():
        drops = "drop" in type(module).__name__.lower() or type(module).__name__ == "StochasticDepth"
        for key, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in key or (drops and key == "p")):
                setattr(module, key, 0.0)
    return model


def statistics(model: nn.Module, batches: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What BatchNorm's running statistics come to, by their names in the state dict: the mean of those of ``batches``.

    A norm that keeps the ones it begins with (mean 0, variance 1) would not normalise, and a deep net would diverge.
    The random state stays as it is, the model does not.
    """
    norms = _norms(model)
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for images in batches if norms else ():
            model.train()(images)
    return {f"{name}.{key}": value.clone() for name, norm in norms.items() for key, value in norm.named_buffers()}


def keep_still(model: nn.Module, found: dict[str, torch.Tensor]) -> nn.Module:
    """The model, changed in place: dropout off, and BatchNorm fixed to the ``statistics`` that were found.

    The names in its state dict stay. What draws or mixes in other ways stays as it is: ``nature`` tells.
    """
    norms = _norms(quieten(model))
    model.load_state_dict(found, strict=False)
    for name, norm in norms.items():
        model.set_submodule(name, FixedNorm(norm))
    return model


def _norms(model: nn.Module) -> dict[str, _BatchNorm]:
    return {
        name: module
        for name, module in model.named_modules()
        if name and isinstance(module, _BatchNorm) and module.track_running_stats
    }


class FixedNorm(nn.Module):
    """A BatchNorm that normalises by its running statistics, also in training; what it learns is the norm's own."""

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
