from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config import ConfigError
from pipeline.techniques.activation_checkpointing import ActivationCheckpointing, blocks
from tests.nets import ALONE, batch, conv_net, gradients, make_plan

PLAN = make_plan(activation_checkpointing=True)


def forward_backward_flops(model: nn.Module, images: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    return int(counter.get_total_flops())


def _checkpointed(model: nn.Module) -> nn.Module:
    return ActivationCheckpointing(PLAN, ALONE).wrap_model(copy.deepcopy(model))


def _step(model: nn.Module) -> list[torch.Tensor]:
    images, labels = batch()
    torch.manual_seed(7)  # for dropout
    F.cross_entropy(model(images), labels).backward()
    return gradients(model)


def test_it_adds_exactly_the_flops_that_the_backward_pass_needs_again() -> None:
    model, (images, _) = conv_net(), batch(32)
    with FlopCounterMode(display=False) as forward:
        model(images)
    # The last linear layer ends its block: its gradients need its input, which is at hand, and not its output.
    again = forward.get_total_flops() - 2 * 32 * 64 * 10
    assert again == 2 * 32 * (8 * 9 * 64 + 16 * 8 * 9 * 16)  # the two convolutions
    assert forward_backward_flops(_checkpointed(model), images) - forward_backward_flops(model, images) == again


@pytest.mark.parametrize("parts", [{}, {"norm": True}, {"dropout": True}, {"norm": True, "dropout": True}])
def test_it_changes_no_bit_of_gradients_and_buffers(parts: dict[str, bool]) -> None:
    plain = conv_net(**parts)
    checkpointed = _checkpointed(plain)
    assert all(map(torch.equal, _step(plain), _step(checkpointed)))
    assert all(map(torch.equal, plain.state_dict().values(), checkpointed.state_dict().values()))


def test_it_keeps_fewer_activations() -> None:
    def kept_bytes(model: nn.Module) -> int:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):  # type: ignore[func-returns-value]
            model(batch()[0])
        return sum(sizes)

    assert kept_bytes(_checkpointed(conv_net())) < 0.5 * kept_bytes(conv_net())


def test_names_in_the_state_dict_stay() -> None:
    assert list(_checkpointed(conv_net(norm=True)).state_dict()) == list(conv_net(norm=True).state_dict())


def test_blocks_are_residual_and_encoder_blocks() -> None:
    import torchvision.models as zoo
    from torchvision.models.resnet import BasicBlock
    from torchvision.models.vision_transformer import EncoderBlock

    with torch.device("meta"):
        resnet, transformer = zoo.resnet18(), zoo.vit_b_16()
    assert [type(block) for block in blocks(resnet)] == [BasicBlock] * 8
    assert [type(block) for block in blocks(transformer)] == [EncoderBlock] * 12 + [nn.Sequential]  # and the head
    assert [len(block) for block in blocks(conv_net())] == [3, 3, 2]  # type: ignore[arg-type]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"variants\.tried\.activation_checkpointing: .*Linear has no blocks"):
        _checkpointed(nn.Linear(2, 2))
