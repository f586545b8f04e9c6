from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pipeline.data.prepared import Dataset
from pipeline.techniques.tf32 import TF32
from tests.nets import ALONE, conv_net, make_plan, take_within
from tests.test_training import make_training


def allowed() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # as the job does
    assert allowed() == (False, False)


def test_tf32_is_on_in_a_training_step_and_off_in_evaluation(digits: Dataset) -> None:
    seen: dict[bool, set[tuple[bool, bool]]] = {True: set(), False: set()}
    model = conv_net()

    def note(module: torch.nn.Module, _: object, logits: torch.Tensor) -> None:
        seen[module.training].add(allowed())
        if logits.requires_grad:
            logits.register_hook(lambda _: seen[True].add(allowed()))  # in the backward pass

    model.register_forward_hook(note)
    training = make_training(digits, model=model, precision="tf32")
    training.advance(training.batches.steps_per_epoch)
    assert seen == {True: {(True, True)}, False: {(False, False)}}
    assert allowed() == (False, False)


def test_tf32_is_off_again_after_a_step_that_fails() -> None:
    def fails(_: object) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        take_within(TF32(make_plan(precision="tf32"), ALONE), fails)
    assert allowed() == (False, False)


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
