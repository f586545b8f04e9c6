"""A model as a chain of units, and the best places to cut the chain."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeline import models
from pipeline.techniques.model_chain import NotAChain, balanced, chain, joined
from tests.nets import ALONE, changed, chosen, conv_net, make_plan


def parts_of(costs: list[float], ends: list[int]) -> list[float]:
    return [sum(costs[begin:end]) for begin, end in pairwise((0, *ends))]


@given(costs=st.lists(st.integers(0, 50), min_size=1, max_size=9), data=st.data())
def test_no_other_cut_has_a_costliest_part_that_costs_less(costs: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    found = balanced(costs, parts)
    assert len(found) == parts
    assert found[-1] == len(costs)
    assert all(begin < end for begin, end in pairwise((0, *found)))
    cuts = combinations(range(1, len(costs)), parts - 1)
    assert max(parts_of(costs, found)) == min(max(parts_of(costs, [*inner, len(costs)])) for inner in cuts)


class _TwoBranches(nn.Module):
    """A sequence of blocks, and a branch that bypasses all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
        self.last = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        start = passing = self.first(images)
        for block in self.blocks:
            passing = block(passing)
        logits: torch.Tensor = self.last(passing + start)
        return logits


def built(name: str, side: int = 8, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    sizes = {"channels": 1, "height": side, "width": side, "classes": 10}
    model = models.build(name, options, sizes, inputs=torch.zeros(2, 1, side, side), outputs=(10,))
    return model, torch.randn(4, 1, side, side)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Return a vision transformer with two encoder blocks and a hook that resizes its images, and images for it."""
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(32, 16, num_layers=2, num_heads=2, hidden_dim=12, mlp_dim=8, dropout=0.1)
    model.register_forward_pre_hook(lambda _, inputs: F.interpolate(inputs[0], (32, 32)))
    return model, torch.randn(4, 3, 16, 16)


CHAINS = {
    "small_cnn": (lambda: built("small_cnn"), 4),
    "resnet9": (lambda: built("resnet9", base_width=4), 11),
    "conv_net with BatchNorm": (lambda: (conv_net(norm=True, dropout=True), torch.randn(4, 1, 8, 8)), 5),
    # Two units of the stem, eight residual blocks, and the last linear layer.
    "resnet18": (lambda: built("resnet18", 16), 11),
    # Patches, the class token, positions, two encoder blocks, a LayerNorm, and the last linear layer.
    "vision transformer": (lambda: transformer(), 7),
    "densenet121": (lambda: built("densenet121", 16), None),
    "vgg11": (lambda: built("vgg11", 16), 11),
    "a model of branches": (lambda: (_TwoBranches(), torch.randn(4, 8)), 3),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_computes_what_its_model_computes_with_the_same_parameters(name: str) -> None:
    make, count = CHAINS[name]
    model, images = make()  # type: ignore[no-untyped-call]
    units = chain(model)
    assert len(units) == count if count else len(units) > 4
    assert all(any(True for _ in unit.parameters()) for unit in units)
    own = [id(parameter) for unit in units for parameter in unit.parameters()]
    assert sorted(own) == sorted(id(parameter) for parameter in model.parameters())
    torch.manual_seed(1)
    expected = model(images)
    torch.manual_seed(1)
    assert torch.equal(nn.Sequential(*units)(images), expected)


def test_units_are_joined_to_the_one_before() -> None:
    model = conv_net(norm=True)
    units = joined(chain(model), (1, 3, 4))
    assert len(units) == 2
    images = torch.randn(4, 1, 8, 8)
    assert torch.equal(units[1](units[0](images)), model(images))


def test_a_checkpointed_block_stays_whole() -> None:
    model = changed(conv_net(norm=True), chosen(make_plan(activation_checkpointing=True), ALONE))
    units = chain(model)
    assert len(units) == 3
    assert any(module is model.get_submodule("1") for module in units[1].modules())


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(self.other(self.layer(images)))
        return logits


class _TwoInputs(nn.Module):
    def forward(self, images: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return images * scale


def _hooked() -> nn.Module:
    model = conv_net()
    model.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_Tied, "weight is used in more than one place"),
        (_TwoInputs, "_TwoInputs takes or returns more than one tensor"),
        (_hooked, "Sequential as a whole has hooks"),
    ],
)
def test_the_error_says_why_a_model_is_no_chain(make: Any, reason: str) -> None:
    with pytest.raises(NotAChain, match=reason):
        chain(make())
