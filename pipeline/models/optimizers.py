"""The optimizer of params.yaml and its learning rate. Techniques may change the optimizer before it is created."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from pipeline.errors import ConfigError
from pipeline.params import Train


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer's class, or a function that creates the optimizer, and the keyword arguments for the call."""

    cls: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]

    def make(self, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """Create the optimizer for the ``groups`` of parameters (``grouped``), at the peak learning rate.

        Fused kernels take no complex parameters; for a model that has some, PyTorch chooses the kernels.
        """
        groups = list(groups)
        fits = not any(parameter.is_complex() for group in groups for parameter in group["params"])
        return self.cls(groups, **{key: value for key, value in self.options.items() if fits or key != "fused"})


def grouped(train: Train, named: Iterable[tuple[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """Return the groups of those ``named`` parameters that require a gradient: one group for each combination of
    learning rate and weight decay, and the plain one even without parameters.

    A parameter on the meta device counts, but is in no list: it is in another stage of a pipeline. So all stages have
    the same groups, some of which may be empty.
    """
    groups: dict[tuple[float, bool], list[torch.Tensor]] = {(1.0, True): []}
    for name, parameter in named:
        if parameter.requires_grad:
            decays = not (matches(name, train.no_decay) or ("vectors" in train.no_decay and parameter.dim() < 2))
            groups.setdefault((lr_factor(train, name), decays), []).extend([] if parameter.is_meta else [parameter])
    return [
        {"params": parameters, "lr_factor": factor} | ({} if decays else {"weight_decay": 0.0})
        for (factor, decays), parameters in sorted(groups.items(), key=lambda group: group[0])
    ]


def lr_factor(train: Train, name: str) -> float:
    """Return the factor of the learning rate of the parameter ``name``."""
    return math.prod(train.lr_factors[pattern] for pattern in sorted(train.lr_factors) if fnmatchcase(name, pattern))


def optimizer_of(train: Train, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of ``train`` for a model that no technique has changed."""
    return of_job(train).make(grouped(train, model.named_parameters()))


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(train: Train, names: Iterable[str], *keys: str) -> None:
    """Raise ConfigError for a pattern in these ``keys`` of ``train`` that matches none of the ``names`` of
    parameters."""
    names = list(names)
    for key in keys:
        patterns = [pattern for pattern in getattr(train, key) if (key, pattern) != ("no_decay", "vectors")]
        check_matching(f"train.{key}", patterns, names, f"parameter of {train.model}")


def check_matching(where: str, patterns: Iterable[str], names: Iterable[str], kind: str) -> None:
    """Raise ConfigError for one of the ``patterns`` at ``where`` that matches none of the ``names``. ``kind``: what has
    these names, such as "parameter of gpt"."""
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(names if len(names) < 5 else [*names[:3], "...", names[-1]])
            has = f"{some}, in its parts {', '.join(parts_of(names))}" if names else "none"
            raise ConfigError(f"{where}: {pattern!r} matches no {kind}, which has {has}.")


def parts_of(names: Iterable[str]) -> list[str]:
    """Return the parts of the model that has these ``names``, of which there is at least one: the outermost parts, or
    those of the only outermost part."""
    split = [name.partition(".") for name in names]
    first, *others = parts = [*dict.fromkeys(name for name, _, _ in split)]
    if others or not all(rest for _, _, rest in split):
        return parts
    return [f"{first}.{part}" for part in parts_of(rest for _, _, rest in split)]


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
        moments = {"betas": (train.momentum, train.beta2), "eps": train.epsilon}
        return OptimizerChoice(torch.optim.AdamW, common | moments)
    return OptimizerChoice(SGD, common | {"momentum": train.momentum, "nesterov": train.momentum > 0})


def rising_steps(train: Train, total_steps: int) -> int:
    """Return how many of ``total_steps`` are warm-up steps, in which the learning rate rises."""
    if train.lr_warmup_steps is not None:
        return min(train.lr_warmup_steps, total_steps)
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
