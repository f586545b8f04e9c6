from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pipeline.techniques.activation_checkpointing import (
    ActivationCheckpointing,
    SelectiveCheckpointing,
    _statistics_held,
    blocks,
)
from tests.nets import ALONE, batch, changed, conv_net, gradients, make_plan
from tests.techniques.test_optimizer_choices import Counts

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [{}, {"norm": True}, {"dropout": True}, {"norm": True, "dropout": True}])
def test_checkpointing_changes_no_bit_of_gradients_and_buffers(
    kind: type[ActivationCheckpointing], parts: dict[str, bool]
) -> None:
    plain = conv_net(**parts)
    checkpointed = _checkpointed(plain, kind)
    assert all(map(torch.equal, _step(plain), _step(checkpointed)))
    assert all(map(torch.equal, plain.state_dict().values(), checkpointed.state_dict().values()))


@pytest.mark.parametrize("kind", KINDS)
def test_an_instance_norm_counts_a_batch_once_too(kind: type[ActivationCheckpointing]) -> None:
    norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    plain = conv_net()
    plain[0].insert(1, norm)  # type: ignore[operator]
    checkpointed = _checkpointed(plain, kind)
    assert all(map(torch.equal, _step(plain), _step(checkpointed)))
    assert all(map(torch.equal, plain.state_dict().values(), checkpointed.state_dict().values()))
    assert norm.running_mean is not None
    assert norm.running_mean.any()


def test_a_synchronised_batch_norm_counts_a_batch_once_too() -> None:
    norm: Any = nn.SyncBatchNorm(4)  # whose forward pass needs a GPU
    with _statistics_held([norm]):
        assert norm.momentum == 0.0
        norm.num_batches_tracked.add_(1)
    assert norm.momentum == 0.1
    assert norm.num_batches_tracked.item() == 0
    assert "num_batches_tracked" in norm.state_dict()


def test_checkpointing_keeps_fewer_activations() -> None:
    def kept_bytes(model: nn.Module) -> int:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):  # type: ignore[func-returns-value]
            model(batch()[0])
        return sum(sizes)

    assert kept_bytes(_checkpointed(conv_net())) < 0.5 * kept_bytes(conv_net())


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


def test_an_in_place_activation_does_not_overwrite_what_selective_checkpointing_keeps() -> None:
    plain = conv_net()
    in_place = copy.deepcopy(plain)
    for module in in_place.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = True
    expected = _step(plain)
    assert all(map(torch.equal, expected, _step(_checkpointed(in_place, SelectiveCheckpointing))))


@pytest.mark.parametrize("kind", KINDS)
def test_attention_and_its_random_draws_are_repeated(kind: type[ActivationCheckpointing]) -> None:
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32, "num_classes": 10}
    plain = VisionTransformer(image_size=8, patch_size=4, dropout=0.1, **sizes)
    checkpointed = _checkpointed(plain, kind)
    images = torch.randn(4, 3, 8, 8)
    for model in (plain, checkpointed):
        torch.manual_seed(7)
        model(images).square().sum().backward()
    assert all(map(torch.equal, gradients(plain), gradients(checkpointed)))


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


def test_checkpointing_keeps_the_names_in_the_state_dict() -> None:
    assert list(_checkpointed(conv_net(norm=True)).state_dict()) == list(conv_net(norm=True).state_dict())


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
    assert [type(block) for block in blocks(resnet)] == [BasicBlock] * 8
    assert [type(block) for block in blocks(transformer)] == [EncoderBlock] * 12 + [nn.Sequential]  # and the head
    assert [len(block) for block in blocks(conv_net())] == [3, 3, 2]  # type: ignore[arg-type]
