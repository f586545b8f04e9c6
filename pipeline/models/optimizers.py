"""The optimizer of params.yaml, as a choice that techniques may change before it is created, and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.params import Train


@dataclass(frozen=True)
class OptimizerChoice:
    """The optimizer's class, or a function that creates it, and its keyword arguments."""

    cls: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]

    def make(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Create the optimizer of ``parameters``, at the peak learning rate."""
        return self.cls(parameters, **self.options)


class SGD(torch.optim.SGD):
    """torch's SGD whose momentum starts as zeros.

    torch's fused kernel leaves the momentum uninitialised until the first step fills it. A first step that is skipped,
    as the gradient scaler of fp16 may do, would leave garbage there.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        super().__init__(parameters, **options)
        for group in self.param_groups:
            for parameter in group["params"] if group["momentum"] > 0 else ():
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def of_job(train: Train) -> OptimizerChoice:
    """Return the optimizer of ``train``, fused: one kernel for all parameters, on CPU and CUDA."""
    common = {"lr": train.learning_rate, "weight_decay": train.weight_decay, "fused": True}
    if train.optimizer == "adamw":
        return OptimizerChoice(torch.optim.AdamW, common | {"betas": (train.momentum, 0.999)})
    return OptimizerChoice(SGD, common | {"momentum": train.momentum, "nesterov": train.momentum > 0})


def rising_steps(train: Train, total_steps: int) -> int:
    """Return the number of warm-up steps, over which the learning rate rises, of ``total_steps``."""
    return round(train.warmup_fraction * total_steps)


def learning_rate(train: Train, step: int, total_steps: int) -> float:
    """Return the rate at ``step`` (from 0) of ``total_steps``: a linear warm-up to the peak, then the schedule."""
    warmup = rising_steps(train, total_steps)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    match train.schedule:
        case "one_cycle":
            return train.learning_rate * (1 - progress)
        case "cosine":
            return train.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
        case "constant":
            return train.learning_rate
