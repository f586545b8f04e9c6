from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pipeline.data.prepared import Dataset
from pipeline.errors import ConfigError
from pipeline.models.gpt import GPT, Block
from pipeline.techniques.activation_checkpointing import (
    ActivationCheckpointing,
    SelectiveCheckpointing,
    blocks,
)
from pipeline.techniques.activation_offload import ActivationOffload
from pipeline.techniques.checkpointing_budget import CheckpointingBudget, Kept, measured
from tests.nets import ALONE, GPU, Counts, SmallTransformer, batch, changed, conv_net, gradients, make_plan, make_step
from tests.trainings import make_training, weights

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


def test_checkpointing_adds_exactly_the_repeated_flops() -> None:
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


class Remembering(nn.Module):
    """A layer whose output depends on state of all kinds, which each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.codes = nn.Buffer(torch.zeros(8, 1, 1)), nn.Buffer(torch.ones(8, 1, 1))
        self.replaced: torch.Tensor = nn.Buffer(torch.zeros(()))
        self.same_codes = self.codes
        self.calls, self.plain = 0, torch.zeros(())
        self.noted, self.counts = [1], {"calls": 1}
        self.generator, self.python, self.numpy = torch.Generator(), random.Random(1), np.random.default_rng(2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.average.lerp_(images.detach().mean((0, 2, 3))[:, None, None], 0.1)
        self.codes.data.mul_(1.25)  # without a trace in the tensor's version
        self.replaced = self.replaced + 1
        self.plain.add_(1)
        self.calls += 1
        self.noted.append(1)
        self.counts["calls"] += 1
        if not hasattr(self, "scale"):
            self.scale = images.std().item()
        kept = torch.rand(images.shape, generator=self.generator) < 0.8
        factor = (
            self.codes
            / (1 + self.replaced + self.plain + self.calls + len(self.noted) + self.counts["calls"])
            * self.python.random()
        )
        return torch.sin((images - self.average) * factor * self.same_codes * kept) / (self.scale + self.numpy.random())


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Buffer(torch.zeros(1, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.average.lerp_(images.detach().mean((0, 2, 3))[:, None, None], 0.1)
        return torch.sin(images - self.average)


def _with(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def net() -> nn.Module:
        model = conv_net()
        model[0].insert(1, layer())  # type: ignore[operator]
        return model

    net.__name__ = layer.__name__
    return net


def spectral_norm() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 1))


def old_spectral_norm() -> nn.Module:
    return nn.utils.spectral_norm(nn.Conv2d(8, 8, 1))


class Overwriting(nn.Module):
    """A block whose first operation changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Tanh())

    def forward(self, images: torch.Tensor, *, factor: torch.Tensor) -> torch.Tensor:
        return self.layers(images.sub_(0.5).mul_(factor))  # type: ignore[no-any-return]


class ReadsWhatIsOverwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.then, self.net = nn.Conv2d(1, 1, 1), Overwriting(), conv_net()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.first(images)
        return self.net(hidden + self.then(hidden, factor=images.new_full((), 2.0)))  # type: ignore[no-any-return]


NETS = [
    *(with_instance_norm, with_activations_in_place, SmallTransformer, ReadsWhatIsOverwritten),
    *map(_with, (Remembering, spectral_norm, old_spectral_norm)),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", NETS)
def test_no_bit_of_gradients_and_state_changes(net: Any, kind: type[ActivationCheckpointing]) -> None:
    plain = net()
    checkpointed = _checkpointed(plain, kind)
    for _ in range(2):
        assert all(map(torch.equal, _step(plain), _step(checkpointed)))
        assert all(map(torch.equal, plain.state_dict().values(), checkpointed.state_dict().values()))
    counts = [[vars(module).get("calls") for module in model.modules()] for model in (plain, checkpointed)]
    assert counts[0] == counts[1]


def test_a_block_that_runs_twice_repeats_both_passes() -> None:
    plain = _with(old_spectral_norm)()
    checkpointed = _checkpointed(plain)
    images, _ = batch()
    for net in (plain, checkpointed):
        losses = [net(images).square().sum() for _ in range(2)]
        (losses[0] + losses[1]).backward()
    assert all(map(torch.equal, gradients(plain), gradients(checkpointed)))


class ReadsAfterRelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.then = nn.Conv2d(1, 1, 1, bias=False), nn.ReLU(True), nn.Conv2d(1, 1, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.first(images)
        return hidden + self.then(self.relu(hidden))  # type: ignore[no-any-return]


def test_selective_checkpointing_refuses_reads_of_overwritten_values() -> None:
    with pytest.raises(ConfigError, match="the outputs of Sequential differ if its modules with inplace=True"):
        _checkpointed(nn.Sequential(ReadsAfterRelu(), conv_net()), SelectiveCheckpointing)


class OverwritesAProduct(nn.Sequential):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.sin(super().forward(images).mul_(2))  # type: ignore[no-untyped-call]


class LooksOutside(nn.Sequential):
    passes: list[int] = []  # noqa: RUF012

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.passes.append(1)
        images = super().forward(images)  # type: ignore[no-untyped-call]
        return images if len(self.passes) % 2 else torch.sin(images)


class DrawsFromPython(nn.Sequential):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = super().forward(images)  # type: ignore[no-untyped-call]
        return torch.sin(images) if random.random() < 0.5 else images


class CallsAnotherMethod(nn.Sequential):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        block, *rest = self
        return nn.Sequential(*rest)(block.get_submodule("0")(images))  # type: ignore[no-any-return]


def _counted(digits: Dataset, model: nn.Module, value: object, **applied: Any) -> None:
    training = make_training(digits, model=model, activation_checkpointing=value, **applied)
    training.advance(2)
    training.work()


@pytest.mark.parametrize(
    ("value", "block", "says"),
    [
        (True, nn.Sequential(Averaging(), nn.Conv2d(1, 1, 1)), "does not repeat its forward pass"),
        ("selective", OverwritesAProduct(nn.Conv2d(1, 1, 1)), "does not repeat its forward pass"),
        (True, LooksOutside(nn.Conv2d(1, 1, 1)), "does not repeat its forward pass"),
        (True, DrawsFromPython(nn.Conv2d(1, 1, 1)), "draws from the generator of Python"),
    ],
)
def test_a_block_that_repeats_otherwise_is_refused(
    digits: Dataset, value: object, block: nn.Module, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    applied = {"compile": "default"} if isinstance(block[0], Averaging) else {}  # type: ignore[index]
    with pytest.raises(ConfigError, match=rf"^variants\.tried\.activation_checkpointing: found .*{says}"):
        _counted(digits, nn.Sequential(block, nn.Flatten(), nn.Linear(64, 10)), value, **applied)


@pytest.mark.parametrize("value", [True, "selective"])
@pytest.mark.parametrize(("kind", "trains"), [(CallsAnotherMethod, True), (nn.Sequential, False)])
def test_checkpointing_that_recomputes_nothing_is_refused(
    digits: Dataset, kind: type[nn.Sequential], trains: bool, value: object
) -> None:
    block = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Tanh()).requires_grad_(trains)
    with pytest.raises(ConfigError, match=f"but no block of {kind.__name__} ran again"):
        _counted(digits, kind(block, nn.Flatten(), nn.Linear(64, 10)), value)


def test_selective_checkpointing_repeats_only_the_operations_between_products() -> None:
    model, (images, _) = conv_net(norm=True), batch(32)
    seen = []
    for form in (model, _checkpointed(model, SelectiveCheckpointing), _checkpointed(model)):
        with Counts() as counts:
            form(images).sum().backward()
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
def test_a_compiled_checkpointed_model_has_the_same_gradients(kind: type[ActivationCheckpointing]) -> None:
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


def test_a_module_of_a_list_can_be_a_block() -> None:
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
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in standing:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(images)
    del logits
    return sum(kept.values())


@pytest.mark.parametrize("parts", [{}, {"norm": True, "dropout": True}])
def test_kept_bytes_are_measured_without_a_real_pass(parts: dict[str, bool]) -> None:
    model, (images, _) = conv_net(**parts), batch(32)
    assert measured(model, list(blocks(model)), images).bytes(()) == _kept_bytes(model, images)


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
def test_the_flops_recomputed_are_near_the_minimum(share: float) -> None:
    import torchvision.models as zoo

    with torch.device("meta"):
        model = zoo.resnet18()
    kept = measured(model, list(blocks(model)), torch.empty(2, 3, 64, 64))
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


def test_too_small_a_budget_is_refused_with_the_smallest() -> None:
    with pytest.raises(ConfigError, match=r"variants\.tried\.activation_checkpointing: found 0\.01, but with") as no:
        changed(conv_net(), [_technique(0.01)])
    least = float(str(no.value).split("still keeps ")[1].split()[0])
    assert changed(conv_net(), [_technique(least + 0.001)])


def test_a_budget_is_refused_where_a_frozen_model_keeps_little() -> None:
    model = conv_net()
    for parameter in [*model.parameters()][:-2]:
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"still keeps [1-9]\.\d+ times its activations' bytes; allowed: false"):
        changed(model, [_technique(0.5)])


@pytest.mark.gpu
def test_activations_leave_the_gpu_and_no_gradient_changes() -> None:
    images, labels = (part.cuda() for part in batch(4096))
    plain = conv_net(norm=True).cuda()
    away = copy.deepcopy(plain)
    technique = ActivationOffload(make_plan(activation_offload=True), GPU)
    away = changed(away, [technique])  # type: ignore[assignment]
    forward = make_step(away, [technique]).forward

    def kept(run: object) -> tuple[torch.Tensor, int]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = run(images, labels)  # type: ignore[operator]
        torch.cuda.synchronize()
        return loss, torch.cuda.memory_allocated() - before

    loss, everything = kept(lambda images, labels: F.cross_entropy(plain(images), labels))
    offloaded_loss, rest = kept(forward)
    assert rest < 0.2 * everything
    assert technique.why_idle() == ""
    loss.backward()
    offloaded_loss.backward()
    assert all(map(torch.equal, gradients(plain), gradients(away)))


def test_where_every_activation_is_small_offloading_has_no_effect() -> None:
    technique = ActivationOffload(make_plan(activation_offload=True), ALONE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda _: None)
        make_step(conv_net(), [technique]).forward(*batch())
    assert "no activation has 65,536 bytes or more" in technique.why_idle()


@pytest.mark.gpu
def test_offloading_changes_no_bit_of_the_weights(digits: Dataset) -> None:
    runs = [make_training(digits, GPU, activation_offload=offload) for offload in (False, True)]
    for training in runs:
        training.advance(20)
    assert weights(runs[0]) == weights(runs[1])
