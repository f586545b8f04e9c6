from __future__ import annotations

import copy
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pipeline.errors import ConfigError
from pipeline.techniques.activation_checkpointing import blocks
from pipeline.techniques.checkpointing_budget import CheckpointingBudget, Kept, measured
from tests.nets import ALONE, batch, changed, conv_net, gradients, make_plan


def _technique(fraction: float) -> CheckpointingBudget:
    return CheckpointingBudget(make_plan(activation_checkpointing=fraction), ALONE)


def _kept_bytes(model: nn.Module, images: torch.Tensor) -> int:
    """Return the bytes that a real forward pass saves, apart from parameters, buffers and the images."""
    standing = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), images)}
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in standing:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(images)
    del logits
    return sum(found.values())


def _flops(model: nn.Module, images: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("parts", [{}, {"norm": True, "dropout": True}])
def test_the_bytes_that_a_forward_pass_keeps_are_measured_without_a_real_pass(parts: dict[str, bool]) -> None:
    model, (images, _) = conv_net(**parts), batch(32)
    assert measured(model, list(blocks(model)), tuple(images.shape)).bytes(()) == _kept_bytes(model, images)


@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.8])
def test_kept_activations_are_within_the_budget_and_no_bit_of_gradients_and_buffers_changes(fraction: float) -> None:
    plain = conv_net(norm=True, dropout=True)
    technique = _technique(fraction)
    limited = changed(copy.deepcopy(plain), [technique])
    images, labels = batch(32)
    everything = _kept_bytes(copy.deepcopy(plain), images)
    within = _kept_bytes(changed(copy.deepcopy(plain), [_technique(fraction)]), images)
    assert within <= fraction * everything
    assert technique.findings()["kept_activations_fraction"] == pytest.approx(within / everything)
    for model in (plain, limited):
        torch.manual_seed(7)  # for dropout
        F.cross_entropy(model(images), labels).backward()
    assert all(map(torch.equal, gradients(plain), gradients(limited)))
    assert all(map(torch.equal, plain.state_dict().values(), limited.state_dict().values()))


def test_a_small_saving_recomputes_less_than_a_large_one() -> None:
    images, _ = batch(32)
    plain, little, much = (_flops(model, images) for model in (
        conv_net(), changed(conv_net(), [_technique(0.8)]), changed(conv_net(), [_technique(0.3)])
    ))  # fmt: skip
    assert plain < little < much


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8])
def test_the_flops_recomputed_in_a_resnet_are_near_the_minimum(share: float) -> None:
    import torchvision.models as zoo

    with torch.device("meta"):
        model = zoo.resnet18()
    kept = measured(model, list(blocks(model)), (2, 3, 64, 64))
    assert len(kept.inside) == 8
    least = kept.bytes(range(8)) / kept.bytes(())
    fraction = least + share * (1 - least)
    budget = fraction * kept.bytes(())
    chosen = kept.cheapest(fraction)
    assert kept.bytes(chosen) <= budget
    best = min(
        sum(kept.flops[index] for index in some)
        for count in range(9)
        for some in combinations(range(8), count)
        if kept.bytes(some) <= budget
    )
    assert sum(kept.flops[index] for index in chosen) <= 1.5 * best


def test_a_tensor_that_two_blocks_share_is_counted_once() -> None:
    kept = Kept(
        sizes={1: 10, 2: 20, 3: 40}, outside={3}, inside=[{1, 2}, {2}], inputs=[{1}, {2}], flops=[5, 5]
    )  # fmt: skip
    assert [kept.bytes(chosen) for chosen in ((), (0,), (1,), (0, 1))] == [70, 70, 70, 70]


def test_a_budget_that_is_too_small_is_refused_with_the_smallest_possible_one() -> None:
    with pytest.raises(
        ConfigError, match=r"variants\.tried\.activation_checkpointing: found 0\.01, but with all 3 "
    ) as no:
        changed(conv_net(), [_technique(0.01)])
    least = float(str(no.value).split("still keeps ")[1].split()[0])
    assert changed(conv_net(), [_technique(least + 0.001)])
