from __future__ import annotations

import copy
from contextlib import nullcontext
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pipeline.errors import ConfigError
from pipeline.models.gpt import GPT, Block
from pipeline.techniques.activation_checkpointing import (
    ActivationCheckpointing,
    SelectiveCheckpointing,
    _statistics_held,
    blocks,
)
from pipeline.techniques.checkpointing_budget import CheckpointingBudget, Kept, measured
from tests.nets import ALONE, batch, changed, conv_net, gradients, make_plan
from tests.techniques.test_optimizer_choices import Counts
from tests.techniques.test_parallelisms import SmallTransformer

PLAN = make_plan(activation_checkpointing=True)
KINDS = [ActivationCheckpointing, SelectiveCheckpointing]


def forward_backward_flops(model: nn.Module, images: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    return int(counter.get_total_flops())


def _checkpointed(model: nn.Module, kind: type[ActivationCheckpointing] = ActivationCheckpointing) -> nn.Module:
    return changed(copy.deepcopy(model), [kind(PLAN, ALONE)])


def _step(model: nn.Module) -> list[torch.Tensor]:
    images, labels = batch()
    torch.manual_seed(7)  # for dropout
    F.cross_entropy(model(images), labels).backward()
    return gradients(model)


def test_checkpointing_adds_exactly_the_flops_that_the_backward_pass_repeats() -> None:
    model, (images, _) = conv_net(), batch(32)
    with FlopCounterMode(display=False) as forward:
        model(images)
    # The last linear layer ends its block. It is not repeated, because its gradients need only its input.
    again = forward.get_total_flops() - 2 * 32 * 64 * 10
    assert again == 2 * 32 * (8 * 9 * 64 + 16 * 8 * 9 * 16)  # the two convolutions
    assert forward_backward_flops(_checkpointed(model), images) - forward_backward_flops(model, images) == again


def with_instance_norm() -> nn.Module:
    net = conv_net()
    net[0].insert(1, nn.InstanceNorm2d(8, affine=True, track_running_stats=True))  # type: ignore[operator]
    return net


def with_activations_in_place() -> nn.Module:
    """Return a net whose activations would overwrite what selective checkpointing keeps."""
    net = conv_net()
    for module in net.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = True
    return net


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", [with_instance_norm, with_activations_in_place, SmallTransformer])
def test_no_bit_of_gradients_and_buffers_changes(net: Any, kind: type[ActivationCheckpointing]) -> None:
    plain = net()
    checkpointed = _checkpointed(plain, kind)
    assert all(map(torch.equal, _step(plain), _step(checkpointed)))
    assert all(map(torch.equal, plain.state_dict().values(), checkpointed.state_dict().values()))


def test_a_synchronised_batch_norm_counts_a_batch_once_too() -> None:
    norm: Any = nn.SyncBatchNorm(4)  # whose forward pass needs a GPU
    with _statistics_held([norm], nullcontext()):
        assert norm.momentum == 0.0
        norm.num_batches_tracked.add_(1)
    assert norm.momentum == 0.1
    assert norm.num_batches_tracked.item() == 0
    assert "num_batches_tracked" in norm.state_dict()


def test_selective_checkpointing_repeats_only_the_operations_between_products() -> None:
    model, (images, _) = conv_net(norm=True), batch(32)
    seen = []
    for each in (model, _checkpointed(model, SelectiveCheckpointing), _checkpointed(model)):
        with Counts() as counts:
            each(images).sum().backward()
        seen.append(counts.calls)
    plain, selective, full = seen
    assert plain["convolution"] == selective["convolution"] == 2
    assert full["convolution"] == 4
    assert plain["max_pool2d_with_indices"] == 2
    assert selective["max_pool2d_with_indices"] == full["max_pool2d_with_indices"] == 4
    assert forward_backward_flops(_checkpointed(model, SelectiveCheckpointing), images) == forward_backward_flops(
        model, images
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_checkpointed_model_has_the_same_gradients_and_counts_a_batch_once(
    kind: type[ActivationCheckpointing],
) -> None:
    plain = conv_net(norm=True)
    checkpointed = _checkpointed(plain, kind)
    compiled = torch.compile(checkpointed, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=False)
    images, labels = batch()
    for model, forward in ((plain, plain), (checkpointed, compiled)):
        for _ in range(2):
            model.zero_grad()
            F.cross_entropy(forward(images), labels).backward()
    torch.testing.assert_close(gradients(checkpointed), gradients(plain))
    torch.testing.assert_close(list(checkpointed.buffers()), list(plain.buffers()))


def test_a_list_or_a_dictionary_is_no_block_but_a_module_in_it_can_be() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.heads = nn.ModuleDict({"one": nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "two": nn.Linear(4, 4)})

    net = Net()
    assert list(blocks(net)) == [net.heads["one"]]


def test_blocks_are_residual_and_encoder_blocks() -> None:
    import torchvision.models as zoo
    from torchvision.models.resnet import BasicBlock
    from torchvision.models.vision_transformer import EncoderBlock

    with torch.device("meta"):
        resnet, transformer = zoo.resnet18(), zoo.vit_b_16()
        decoder = GPT(vocabulary=8, length=4, depth=3)
    assert [type(block) for block in blocks(resnet)] == [BasicBlock] * 8
    assert [type(block) for block in blocks(transformer)] == [EncoderBlock] * 12 + [nn.Sequential]  # and the head
    assert [type(block) for block in blocks(decoder)] == [Block] * 3
    assert [len(block) for block in blocks(conv_net())] == [3, 3, 2]  # type: ignore[arg-type]


# A budget


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


@pytest.mark.parametrize("parts", [{}, {"norm": True, "dropout": True}])
def test_the_bytes_that_a_forward_pass_keeps_are_measured_without_a_real_pass(parts: dict[str, bool]) -> None:
    model, (images, _) = conv_net(**parts), batch(32)
    assert measured(model, list(blocks(model)), tuple(images.shape)).bytes(()) == _kept_bytes(model, images)


@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.8])
def test_kept_activations_are_within_the_budget(fraction: float) -> None:
    technique, (images, _) = _technique(fraction), batch(32)
    everything = _kept_bytes(conv_net(norm=True, dropout=True), images)
    within = _kept_bytes(changed(conv_net(norm=True, dropout=True), [technique]), images)
    assert within <= fraction * everything
    assert technique.findings()["kept_activations_fraction"] == pytest.approx(within / everything)


def test_a_small_saving_recomputes_less_than_a_large_one() -> None:
    images, _ = batch(32)
    limited = (changed(conv_net(), [_technique(fraction)]) for fraction in (0.8, 0.3))
    plain, little, much = (forward_backward_flops(model, images) for model in (conv_net(), *limited))
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
