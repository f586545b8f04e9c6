"""LoRA: train low-rank changes of linear layers, while the layers themselves stay as they are, perhaps in 4 bits.

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
from pipeline.errors import ConfigError
from pipeline.models.optimizers import check_matching, matches
from pipeline.processes import load_bitsandbytes
from pipeline.techniques.base import Setup, Technique

PARTS = ("lora_a", "lora_b", "lora_scales")
"""Names of an adapted layer's trained parameters, and of the scales of a weight in 4 bits."""
NF4 = 64, "nf4"
"""Number of 4-bit values that share a scale, and what the values stand for."""


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
        check_matching(f"{where}.train", settings.train, dict(model.named_parameters()), f"parameter of {kind}")
        check_matching(f"{where}.targets", settings.targets, targets(model, ["*"], settings.train), of_its_own)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and matches(name, settings.train))
        for layer in targets(model, settings.targets, settings.train).values():
            _adapt(layer, settings.rank, self._scale)
        setup.trained_count = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)

    def change_checkpoint(self, setup: Setup) -> None:
        setup.merged = self._merged

    def _merged(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of the model without adapters, whose changes are added to the weights."""
        merged = {name: held for name, held in state.items() if not name.endswith(PARTS)}
        for layer in (name.removesuffix(PARTS[0]) for name in state if name.endswith(PARTS[0])):
            first, second = (state[layer + part] for part in PARTS[:2])
            changed, shape = merged[layer + "weight"].clone(), (len(second), first.shape[1])
            if (scales := state.get(layer + PARTS[2])) is not None:
                changed = torch.ops.bitsandbytes.dequantize_4bit(changed, scales, *NF4, shape, torch.float32)
            rows = own_part(second)  # of B, which make the rank's rows of W
            own_part(changed).add_(self._scale * (rows @ whole(first).to(rows.device)))
            merged[layer + "weight"] = changed
        return merged


class LowBitBase(Technique):
    """Keeps the frozen weights of adapted layers in 4 bits: NF4, with a float32 scale for each block of values.

    Both passes compute with the numbers that the bits stand for, and keep none of them. These numbers are W in the kept
    weights. A layer stays as it is unless its inputs are whole blocks: for other numbers of inputs, bitsandbytes 0.50
    computes wrong products on CPUs with AVX-512. Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized
    LLMs", NeurIPS 2023. Its second quantisation, that of the scales, is left out.
    """

    name = "low_bit_base"
    prepare_process = staticmethod(load_bitsandbytes)

    def change_model(self, setup: Setup) -> None:
        self.prepare_process()
        adapted = (part for part in setup.model.modules() if type(part) is _Adapted)
        layers = [layer for layer in adapted if layer.in_features % NF4[0] == 0]
        if not layers:
            none = f"lora adapts no layer whose number of inputs is a multiple of {NF4[0]}"
            raise ConfigError(f"{self.where('base_weights')}, but {none}; allowed: null.")
        for layer in layers:
            bits, scales = torch.ops.bitsandbytes.quantize_4bit(layer.weight, *NF4, torch.uint8)
            layer.weight = nn.Parameter(bits, requires_grad=False)
            layer.register_buffer("lora_scales", scales)
            layer.__class__ = _AdaptedInBits


def targets(model: nn.Module, patterns: Sequence[str], trained: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the linear layers that the ``patterns`` match, by name. A layer whose weight ``trained`` matches is left
    out. So is a layer that shares its weight, such as a tied head: the changed weight would not be that of the other
    layer."""
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    return {
        name: part
        for name, part in model.named_modules()
        if type(part) is nn.Linear and matches(name, patterns) and uses[id(part.weight)] == 1
        if not matches(f"{name}.weight", trained)
    }


class _Adapted(nn.Linear):
    lora_a: Tensor
    lora_b: Tensor
    lora_scale: float

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + F.linear(F.linear(input, self.lora_a), self.lora_b) * self.lora_scale


class _InBits(nn.Linear):
    lora_scales: Tensor

    def forward(self, input: Tensor) -> Tensor:
        from bitsandbytes import functional, matmul_4bit  # an optional extra

        device, shape = input.device.type, (self.out_features, self.in_features)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        held = functional.QuantState(self.lora_scales, shape, None, *NF4, dtype)
        product: Tensor = matmul_4bit(input.to(dtype), self.weight, held)
        # matmul_4bit's own bias gets a wrong gradient if the input has more than two dimensions.
        return product if self.bias is None else product + self.bias.to(dtype)


class _AdaptedInBits(_Adapted, _InBits):
    """Adds the low-rank change to the product of a weight in 4 bits."""


def _adapt(layer: nn.Linear, rank: int, scale: float) -> None:
    """Turn ``layer`` into an adapted layer, in place, so that names, hooks and modes stay the same."""
    first = nn.Linear(layer.in_features, rank, bias=False).weight.detach()  # drawn on the CPU: the same on each device
    device = layer.weight.device
    layer.register_parameter("lora_a", nn.Parameter(first.to(device)))
    layer.register_parameter("lora_b", nn.Parameter(torch.zeros(layer.out_features, rank, device=device)))
    layer.__class__, vars(layer)["lora_scale"] = _Adapted, scale
