"""The optimizer of params.yaml and its learning rate. Techniques may change the optimizer before it is created."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.params import Train


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer's class, or a function that creates the optimizer, and the keyword arguments for the call."""

    cls: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]

    def make(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Create the optimizer for those ``parameters`` that require a gradient, at the peak learning rate.

        Fused kernels take no complex parameters; for a model that has some, PyTorch chooses the kernels.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        fits = not any(parameter.is_complex() for parameter in trained)
        # A stage of a pipeline may have only frozen parameters; torch refuses an empty list, but no empty group.
        groups: list[Any] = trained or [{"params": []}]
        return self.cls(groups, **{key: value for key, value in self.options.items() if fits or key != "fused"})


class SGD(torch.optim.SGD):
    """torch's SGD, except that the momentum starts as zeros.

    In torch's SGD, the momentum of the fused kernel is uninitialised until the first step fills it. If fp16's gradient
    scaler skipped the first step, the momentum would keep random memory content.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        super().__init__(parameters, **options)
        for group in self.param_groups:
            for parameter in group["params"] if group["momentum"] > 0 else ():
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def of_job(train: Train) -> OptimizerChoice:
    """Return the optimizer of ``train``, with torch's fused kernels, which exist for CPU and CUDA."""
    common = {"lr": train.learning_rate, "weight_decay": train.weight_decay, "fused": True}
    if train.optimizer == "adamw":
        return OptimizerChoice(torch.optim.AdamW, common | {"betas": (train.momentum, 0.999)})
    return OptimizerChoice(SGD, common | {"momentum": train.momentum, "nesterov": train.momentum > 0})


def rising_steps(train: Train, total_steps: int) -> int:
    """Return how many of ``total_steps`` are warm-up steps, in which the learning rate rises."""
    return round(train.warmup_fraction * total_steps)


def learning_rate(train: Train, step: int, total_steps: int) -> float:
    """Return the learning rate at ``step`` (from 0) of ``total_steps``: a linear warm-up, then the schedule."""
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
