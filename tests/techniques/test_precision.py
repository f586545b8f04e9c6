from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pipeline.techniques.precision import BFloat16, Float16
from tests.nets import ALONE, batch, conv_net, gradients, make_plan, make_step


@pytest.mark.parametrize(("technique", "dtype"), [(BFloat16, torch.bfloat16), (Float16, torch.float16)])
def test_convolutions_run_in_16_bits_and_loss_and_gradients_stay_in_32(
    technique: type[BFloat16], dtype: torch.dtype
) -> None:
    model, (images, labels) = conv_net(), batch()
    seen = []
    model[0][0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))  # type: ignore[index]
    loss = make_step(model, [technique(make_plan(precision=technique.name), ALONE)]).forward(images, labels)
    loss.backward()
    assert seen == [dtype]
    assert loss.dtype == torch.float32
    assert {gradient.dtype for gradient in gradients(model)} == {torch.float32}
    assert loss.item() == pytest.approx(F.cross_entropy(model(images), labels).item(), rel=0.02)


def _scaled_step(technique: Float16, parameter: torch.nn.Parameter, loss: torch.Tensor) -> None:
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.zero_grad()
    step = make_step(torch.nn.Identity(), [technique], optimizer=optimizer)
    step.backward(loss)
    step.update()


def test_the_scaler_saves_gradients_that_float16_would_lose() -> None:
    technique = Float16(make_plan(precision="fp16"), ALONE)
    parameter = torch.nn.Parameter(torch.zeros(()))
    tiny = 2.0**-30  # float16 has nothing between 0 and 2**-24
    _scaled_step(technique, parameter, parameter.half().float() * tiny)
    assert parameter.item() == -tiny
    assert technique.state()["scale"] == 2.0**16


def test_an_overflowing_step_is_left_out_and_the_scale_halved() -> None:
    technique = Float16(make_plan(precision="fp16"), ALONE)
    parameter = torch.nn.Parameter(torch.ones(()))
    _scaled_step(technique, parameter, parameter.half().float() * 100.0)  # 100 * 2**16 is infinite in float16
    assert parameter.item() == 1.0
    assert technique.state()["scale"] == 2.0**15


def test_the_scale_is_remembered() -> None:
    technique, resumed = (Float16(make_plan(precision="fp16"), ALONE) for _ in range(2))
    parameter = torch.nn.Parameter(torch.ones(()))
    _scaled_step(technique, parameter, parameter.half().float() * 100.0)
    resumed.restore(technique.state())
    assert resumed.state() == technique.state()
