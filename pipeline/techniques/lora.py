"""LoRA: train low-rank changes of linear layers, while the layers themselves stay as they are.

``peft.inject_adapter_in_model`` would save eight lines. But it renames a layer's ``weight`` to ``base_layer.weight``,
so patterns that fit the other variants match nothing; it moves the factors in a way that fake tensors refuse, so memory
could not be predicted; and each process would import ``transformers``, ``accelerate``, ``bitsandbytes`` and
``torchao``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.distributed import own_part, whole
from pipeline.models.optimizers import check_matching, matches
from pipeline.techniques.base import Setup, Technique

PARTS = ("lora_a", "lora_b")
"""Names of an adapted layer's trained parameters."""


class Lora(Technique):
    """Computes W x + alpha / rank B A x in place of W x, and trains A [rank, inputs] and B [outputs, rank].

    B begins with zeros, so the training begins with the model's own outputs; A begins as torch begins a linear layer.
    All other parameters are frozen, except those that ``train`` matches. Checkpoints hold all weights beside A and B.
    Evaluation, and the weights that are kept, have W + alpha / rank B A in place of W, and the model's own names.
    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
    """

    name = "lora"

    def change_model(self, setup: Setup) -> None:
        settings, model = self.plan.applied.lora, setup.model
        assert settings is not None
        self._scale = settings.alpha / settings.rank
        where, kind = f"variants.{self.plan.name}.lora", type(model).__name__
        of_its_own = f"linear layer with a weight of its own in {kind}"
        check_matching(f"{where}.targets", settings.targets, targets(model, ["*"]), of_its_own)
        check_matching(f"{where}.train", settings.train, dict(model.named_parameters()), f"parameter of {kind}")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and matches(name, settings.train))
        for layer in targets(model, settings.targets).values():
            _adapt(layer, settings.rank, self._scale)
        setup.trained_count = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)

    def change_checkpoint(self, setup: Setup) -> None:
        setup.merged = self._merged

    def _merged(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of the model without adapters, whose changes are added to the weights."""
        merged = {name: held for name, held in state.items() if not name.endswith(PARTS)}
        for layer in (name.removesuffix(PARTS[0]) for name in state if name.endswith(PARTS[0])):
            first, second = (state[layer + part] for part in PARTS)
            merged[layer + "weight"] = changed = merged[layer + "weight"].clone()
            rows = own_part(second)  # of B, which make the rank's rows of W
            own_part(changed).add_(self._scale * (rows @ whole(first).to(rows.device)))
        return merged


def targets(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the linear layers that the ``patterns`` match, by name. A layer that shares its weight, such as a tied
    head, is left out: the changed weight would not be that of the other layer."""
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    return {
        name: part
        for name, part in model.named_modules()
        if type(part) is nn.Linear and matches(name, patterns) and uses[id(part.weight)] == 1
    }


class _Adapted(nn.Linear):
    lora_a: Tensor
    lora_b: Tensor
    lora_scale: float

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + F.linear(F.linear(input, self.lora_a), self.lora_b) * self.lora_scale


def _adapt(layer: nn.Linear, rank: int, scale: float) -> None:
    """Turn ``layer`` into an adapted layer, in place, so that names, hooks and modes stay the same."""
    first = torch.empty(rank, layer.in_features)  # drawn on the CPU: the same on each device
    nn.init.kaiming_uniform_(first, a=5**0.5)
    device = layer.weight.device
    layer.register_parameter("lora_a", nn.Parameter(first.to(device)))
    layer.register_parameter("lora_b", nn.Parameter(torch.zeros(layer.out_features, rank, device=device)))
    layer.__class__, vars(layer)["lora_scale"] = _Adapted, scale
