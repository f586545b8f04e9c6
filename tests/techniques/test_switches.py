from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipeline.data.prepared import Dataset
from pipeline.techniques import Technique
from pipeline.techniques.cudnn_benchmark import CudnnBenchmark
from pipeline.techniques.tf32 import TF32
from tests.nets import ALONE, GPU, conv_net, make_plan, take_within
from tests.test_training import make_training, rows_of


def switched() -> dict[str, tuple[bool, ...]]:
    """Return a variant's key -> whether its switches are on: TF32 for products and convolutions, cuDNN's search."""
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {"precision": (products.allow_tf32, cudnn.allow_tf32), "cudnn_benchmark": (cudnn.benchmark,)}


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # as the job does


@pytest.mark.parametrize("applied", [{"precision": "tf32"}, {"cudnn_benchmark": True}])
def test_a_switch_is_on_in_a_training_step_and_off_in_evaluation(digits: Dataset, applied: dict[str, Any]) -> None:
    (key,) = applied
    seen: dict[bool, set[bool]] = {True: set(), False: set()}
    model = conv_net()

    def note(module: torch.nn.Module, _: object, logits: torch.Tensor) -> None:
        seen[module.training].update(switched()[key])
        if logits.requires_grad:
            logits.register_hook(lambda _: seen[True].update(switched()[key]))  # in the backward pass

    model.register_forward_hook(note)
    training = make_training(digits, model=model, **applied)
    training.advance(training.batches.steps_per_epoch)
    assert seen == {True: {True}, False: {False}}
    assert not any(switched()[key])


@pytest.mark.parametrize("technique", [TF32, CudnnBenchmark])
def test_a_switch_is_off_again_after_a_step_that_fails(technique: type[Technique]) -> None:
    def fails(_: object) -> None:
        assert any(map(any, switched().values()))
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        take_within(technique(make_plan(), ALONE), fails)
    assert not any(map(any, switched().values()))


@pytest.mark.gpu
def test_with_cudnn_s_search_the_losses_are_the_same_within_rounding(digits: Dataset) -> None:
    losses = [
        [row.train_loss for row in rows_of(make_training(digits, GPU, cudnn_benchmark=on).run())]
        for on in (False, True)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.gpu("TF32's rounding")
@pytest.mark.parametrize(
    "product",
    [
        lambda left, right: left @ right,
        lambda left, right: torch.conv2d(left[None, :, :, None], right.T[:, :, None, None])[0, :, :, 0].T,
    ],
)
def test_products_are_rounded_to_ten_bits(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    left, right = (torch.randn(512, 512, device="cuda", generator=generator) for _ in range(2))
    truth = product(left.double(), right.double())
    errors = []

    def step(_: object) -> None:
        errors.append(float((product(left, right) - truth).abs().max()))

    step(None)
    take_within(TF32(make_plan(precision="tf32"), ALONE), step)
    assert errors[0] < 1e-3 < errors[1] < 1.0
