from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pipeline.distributed import World
from pipeline.errors import ConfigError
from pipeline.models.gpt import GPT
from pipeline.techniques.precision import BFloat16, Float8, Float16
from tests.nets import ALONE, GPU, batch, changed, conv_net, gradients, make_plan, make_step, setup_of


def test_products_in_float8_leave_parameters_and_the_last_layer_as_they_are() -> None:
    model, reference = (GPT(vocabulary=32, length=16, width=64, depth=2, heads=2) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    before = dict(model.named_parameters())
    setup = setup_of(model, torch.zeros(2, 16, dtype=torch.int64))
    Float8(make_plan(precision="float8"), ALONE).change_model(setup)
    assert setup.model is model
    assert dict(model.named_parameters()) == before
    assert list(model.state_dict()) == list(reference.state_dict())
    assert [type(each).__name__ for each in model.modules() if isinstance(each, torch.nn.Linear)] == (
        ["Float8Linear"] * 8 + ["Linear"]
    )
    tokens = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(0))
    losses = [F.cross_entropy(each(tokens).flatten(0, 1), tokens.flatten()) for each in (model, reference)]
    for each in losses:
        each.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=0.02)
    for ours, theirs in zip(gradients(model), gradients(reference), strict=True):
        assert 2.0**-9 < (ours - theirs).norm() / theirs.norm() < 2.0**-3, "e4m3 and e5m2 round by 2^-4 and 2^-3"


def test_a_product_in_float8_equals_the_product_of_rounded_factors() -> None:
    layer = torch.nn.Linear(16, 16, bias=False)
    model = torch.nn.Sequential(layer, torch.nn.Linear(16, 16))
    technique = Float8(make_plan(precision="float8"), ALONE)
    technique.change_model(setup_of(model, torch.zeros(2, 16)))
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    factors = [_rounded(each) for each in (rows, layer.weight.detach())]
    torch.testing.assert_close(model[0](rows), factors[0] @ factors[1].T)
    with pytest.raises(ConfigError, match=r"precision: found 'float8', but Sequential has no linear layer"):
        changed(conv_net(), [technique])


@pytest.mark.parametrize(
    ("world", "capability", "emulated"), [(GPU, (8, 9), False), (GPU, (8, 6), True), (ALONE, (9, 0), True)]
)
def test_a_device_with_float8_kernels_uses_them(
    world: World, capability: tuple[int, int], emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    model: Any = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    Float8(make_plan(precision="float8"), world).change_model(setup_of(model, torch.zeros(2, 16)))
    assert model[0].config.emulate is emulated


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` rounded to e4m3, with a scale at which their largest magnitude is the largest of e4m3."""
    scale = torch.finfo(torch.float8_e4m3fn).max / values.abs().max()
    return (values * scale).to(torch.float8_e4m3fn).float() / scale


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


def test_an_overflowing_step_is_skipped_and_the_halved_scale_is_saved() -> None:
    technique, resumed = (Float16(make_plan(precision="fp16"), ALONE) for _ in range(2))
    parameter = torch.nn.Parameter(torch.ones(()))
    _scaled_step(technique, parameter, parameter.half().float() * 100.0)  # 100 * 2**16 is infinite in float16
    assert parameter.item() == 1.0
    resumed.restore(technique.state())
    assert resumed.state()["scale"] == 2.0**15
