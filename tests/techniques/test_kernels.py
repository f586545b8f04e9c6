from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._inductor.utils import fresh_cache
from torch.nn.attention import flex_attention as flex_module

from pipeline import environment
from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.errors import ConfigError, PipelineError
from pipeline.measurement.windows import graphs_bytes
from pipeline.models.gpt import GPT
from pipeline.params import GRAPH_WARMUP_STEPS, Config, Machine, Train, Variant, entry, requested
from pipeline.plans import plan
from pipeline.profiling import prediction
from pipeline.profiling.ledger import measured
from pipeline.techniques import Technique
from pipeline.techniques.attention import Attention, _is_earlier, flexible
from pipeline.techniques.cuda_graph import CudaGraph
from pipeline.techniques.cudnn_benchmark import CudnnBenchmark
from pipeline.techniques.precision import BFloat16, Float8, Float16
from pipeline.techniques.tf32 import TF32
from pipeline.training.loop import Training
from pipeline.training.outcomes import NonFiniteLoss
from tests.nets import (
    ALONE,
    GPU,
    Attending,
    Counts,
    LooksAtValues,
    attending_net,
    batch,
    changed,
    chosen,
    conv_net,
    gradients,
    make_plan,
    make_step,
    setup_of,
    take_within,
    task_of,
)
from tests.trainings import TRAIN, make_training, rows_of, weights

HERE = environment.machine()
IMAGES = {"channels": 1, "height": 8, "width": 8, "classes": 10}
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
BATCH, HEADS, TOKENS = 32, 2, 4
"""Sizes of the attention in ``attending_net``; the tokens are the pixels after two poolings."""


class Kernels(Counts):
    """Records the operations that compute attention."""

    @property
    def seen(self) -> set[str]:
        return {name for name in self.calls if "scaled_dot_product" in name or name in ("_softmax", "_safe_softmax")}


def training_of(digits: Dataset, attention: str = "auto", **applied: Any) -> Training:
    torch.manual_seed(0)
    few = replace(digits, train=digits.train[: 6 * BATCH], test=digits.test[:BATCH])
    return make_training(few, model=attending_net(**IMAGES), attention=attention, **applied)


def within(attention: str, world: World, part: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``part`` as the technique leaves it if it is a part of a step."""
    setup = setup_of(nn.Linear(1, 1))
    setup.step = make_step(setup.model)
    setup.step.forward = part
    Attention(make_plan(attention=attention), world).change_step(setup)
    return setup.step.forward


@pytest.mark.parametrize("attention", ["flash", "efficient", "math", "cudnn"])
def test_on_a_gpu_each_setting_allows_its_kernel_alone(attention: str) -> None:
    allowed: dict[str, Callable[[], bool]] = {
        "flash": torch.backends.cuda.flash_sdp_enabled,
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
        "math": torch.backends.cuda.math_sdp_enabled,
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    }
    assert within(attention, GPU, lambda: [name for name, is_allowed in allowed.items() if is_allowed()])() == [
        attention
    ]


@pytest.mark.parametrize(("attention", "op"), [("auto", FLASH), ("flash", FLASH), ("math", "softmax")])
@pytest.mark.parametrize("applied", [{}, {"activation_checkpointing": True}])
def test_a_step_runs_the_requested_kernel(digits: Dataset, attention: str, op: str, applied: dict[str, Any]) -> None:
    training, trial = (training_of(digits, attention, **applied) for _ in range(2))
    with Kernels() as step:
        training.advance(2)
    with Kernels() as tried:
        assert trial.fits()
    for seen in (step.seen, tried.seen):
        assert seen
        assert all(op in name for name in seen), seen
    with Kernels() as evaluation:
        training.advance(training.batches.steps_per_epoch - 2)
    assert FLASH in evaluation.seen


def test_the_losses_of_the_kernels_differ_only_by_rounding(digits: Dataset) -> None:
    usual, flash, math = (
        [row.train_loss for row in rows_of(training_of(digits, kernel).run())] for kernel in ("auto", "flash", "math")
    )
    assert flash == usual
    assert math == pytest.approx(usual, rel=1e-4)


def test_the_check_of_attention_leaves_no_trace() -> None:
    model = attending_net(**IMAGES)
    before = [value.clone() for value in model.state_dict().values()]
    random = torch.get_rng_state()
    assert changed(model, [Attention(make_plan(attention="math"), ALONE)]) is model
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert torch.equal(random, torch.get_rng_state())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # an error that attention does not cause
        changed(nn.Linear(3, 3), [Attention(make_plan(attention="math"), ALONE)])


@pytest.mark.filterwarnings("ignore:(Flash attention kernel not used|Both fused kernels do not)")
def test_a_kernel_that_cannot_compute_is_refused(digits: Dataset) -> None:
    model = attending_net(dropout=0.1, **IMAGES)
    training = make_training(digits, model=model, attention="flash")
    with pytest.raises(ConfigError, match=r"^variants\.tried\.attention: found 'flash', but this kernel cannot"):
        training.advance(1)
    make_training(digits, model=model, attention="math").advance(1)


@pytest.mark.slow
@pytest.mark.skipif(HERE.no_cpu_kernels is not None, reason=str(HERE.no_cpu_kernels))
def test_compiled_code_is_not_used_for_another_kernel() -> None:
    images = torch.randn(2, 16, 2, 2)
    with fresh_cache(), torch._functorch.config.patch(enable_autograd_cache=True):
        for attention in ("flash", "math"):
            torch._dynamo.reset()
            compiled = torch.compile(Attending(), fullgraph=True, dynamic=False)
            run = within(attention, ALONE, compiled)
            run(images)
            with torch.profiler.profile() as profile:
                run(images)
            names = {average.key for average in profile.key_averages()}
            assert (f"aten::{FLASH}" in names) is (attention == "flash")
            Attention.prepare_process()


@pytest.mark.parametrize("attention", ["flash", "efficient", "math", "cudnn"])
def test_a_prediction_for_gpus_counts_what_math_keeps(digits: Dataset, attention: str) -> None:
    """For the backward pass, fused kernels keep a sum per token, and math keeps the weight of each pair of tokens."""
    machine = Machine(gpus=1, gpu_native_bf16=True, cpu_native_bf16=True)
    train = Train(model="tests.nets:attending_net", batch_size=BATCH)
    kept = []
    for choice in ("auto", attention):
        variant = Variant.model_validate({"precision": "bf16", "attention": choice})
        config = Config(train=train, variants={"tried": variant})
        kept.append(prediction.predicted(plan(config, "tried", machine), task_of(digits, train)).activations_bytes)
    pairs = BATCH * HEADS * TOKENS * TOKENS
    assert kept[1] - kept[0] >= 2 * pairs if attention == "math" else kept[1] == kept[0]


@pytest.mark.parametrize(
    ("attention", "label"), [("auto", []), ("flash", ["attention=flash"]), ("math", ["attention=math"])]
)
def test_a_report_names_the_kernel(attention: str, label: list[str]) -> None:
    variant = Variant.model_validate({"attention": attention})
    assert [technique.label(variant) for technique in requested(variant)] == label


@pytest.mark.gpu("its own kernels")
@pytest.mark.parametrize(
    ("attention", "kernel"),
    [
        ("flash", "_scaled_dot_product_flash_attention"),
        ("efficient", "_scaled_dot_product_efficient_attention"),
        ("math", "softmax"),
        ("cudnn", "_scaled_dot_product_cudnn_attention"),
    ],
)
def test_a_gpu_runs_the_requested_kernel(attention: str, kernel: str) -> None:
    images = torch.randn(2, 64, 8, 8, device=GPU.device, dtype=torch.bfloat16, requires_grad=True)
    with Kernels() as kernels:
        within(attention, GPU, lambda: Attending()(images).sum().backward())()
    assert kernels.seen
    assert all(kernel in name for name in kernels.seen), kernels.seen


def test_the_cuda_graph_is_applied_late() -> None:
    techniques = chosen(make_plan(cuda_graph=True, cudnn_benchmark=True, gradient_accumulation=2), ALONE)
    assert [technique.name for technique in techniques][-2:] == ["cuda_graph", "cudnn_benchmark"]
    assert entry(CudaGraph.name).needs_measuring


# On a GPU.


def make(dataset: Dataset, train: Train = TRAIN, **applied: Any) -> Training:
    return make_training(dataset, GPU, train=train, model=conv_net(norm=True), **applied)


def technique_of(training: Training) -> CudaGraph:
    (graph,) = (technique for technique in training.techniques if isinstance(technique, CudaGraph))
    return graph


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "more", [{}, {"gradient_accumulation": 2}, {"precision": "bf16", "channels_last": True}, {"cudnn_benchmark": True}]
)
def test_replays_follow_the_learning_rate(digits: Dataset, optimizer: str, more: dict[str, Any]) -> None:
    train = TRAIN.model_copy(update={"optimizer": optimizer, "learning_rate": 0.05 if optimizer == "sgd" else 0.003})
    plain, graphed = make(digits, train, **more), make(digits, train, cuda_graph=True, **more)
    calls = []
    graphed.model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    rows = [rows_of(training.run()) for training in (plain, graphed)]
    tolerance = 0.05 if "precision" in more else 0.01
    assert [row.train_loss for row in rows[1]] == pytest.approx([row.train_loss for row in rows[0]], rel=tolerance)
    assert [row.learning_rate for row in rows[1]] == [row.learning_rate for row in rows[0]]
    # Python ran the model in the first steps and in the recording, and afterwards only in evaluations.
    assert calls.count(True) == (GRAPH_WARMUP_STEPS + 1) * more.get("gradient_accumulation", 1)
    assert technique_of(graphed).graph is not None
    assert all(isinstance(group["lr"], float) for group in graphed.optimizer.param_groups)


@pytest.mark.gpu
def test_each_replay_draws_dropout_anew_also_when_resumed(digits: Dataset) -> None:
    def made() -> Training:
        return make_training(digits, GPU, model=conv_net(dropout=True), cuda_graph=True)

    first = made()  # sets the generator that all trainings share, so one training must follow the other
    first.advance(60)
    again = made()
    again.advance(60)
    assert weights(first) == weights(again)
    plain = make_training(digits, first.world, model=conv_net(dropout=True))
    plain.advance(60)
    assert first.losses.read_and_reset() == pytest.approx(plain.losses.read_and_reset(), rel=0.05)
    half, resumed = made(), made()
    half.advance(30)
    resumed.restore(half.state())
    resumed.advance(30)
    torch.testing.assert_close(dict(resumed.model.state_dict()), dict(first.model.state_dict()), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_replays_count_the_steps_since_a_bad_loss(digits: Dataset) -> None:
    training = make(digits, cuda_graph=True)
    training.advance(8)
    training.losses.total.fill_(torch.nan)
    with pytest.raises(NonFiniteLoss, match="step 9: the loss became nan"):
        training.advance(8)


@pytest.mark.gpu("its allocator's pools")
def test_the_peak_includes_the_memory_of_replays(digits: Dataset) -> None:
    train = TRAIN.model_copy(update={"batch_size": 512, "epochs": 12})
    plain, graphed = make(digits, train), make(digits, train, cuda_graph=True)
    for training in (plain, graphed):
        training.advance(20)
    assert graphs_bytes(torch.device("cuda", 0)) > 0
    assert plain.memory.peak_bytes
    assert graphed.memory.peak_bytes
    assert graphed.memory.peak_bytes > 0.9 * plain.memory.peak_bytes
    assert measured(graphed, graphed.memory.peak_bytes) is None
    assert measured(plain, plain.memory.peak_bytes) is not None


@pytest.mark.gpu
def test_a_model_that_asks_for_a_value_is_refused(digits: Dataset) -> None:
    training = make_training(digits, GPU, model=LooksAtValues(), cuda_graph=True)
    with pytest.raises(PipelineError, match=r"variants\.tried\.cuda_graph: found true, but a step cannot be recorded"):
        training.advance(GRAPH_WARMUP_STEPS + 1)


def test_float8_leaves_parameters_and_the_last_layer() -> None:
    model, reference = (GPT(vocabulary=32, length=16, width=64, depth=2, heads=2) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    before = dict(model.named_parameters())
    setup = setup_of(model, torch.zeros(2, 16, dtype=torch.int64))
    Float8(make_plan(precision="float8"), ALONE).change_model(setup)
    assert setup.model is model
    assert dict(model.named_parameters()) == before
    assert list(model.state_dict()) == list(reference.state_dict())
    assert [type(module).__name__ for module in model.modules() if isinstance(module, torch.nn.Linear)] == (
        ["Float8Linear"] * 8 + ["Linear"]
    )
    tokens = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(0))
    losses = [F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()) for net in (model, reference)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=0.02)
    for ours, theirs in zip(gradients(model), gradients(reference), strict=True):
        assert 2.0**-9 < (ours - theirs).norm() / theirs.norm() < 2.0**-3, "e4m3 and e5m2 round by 2^-4 and 2^-3"


def test_a_float8_product_is_of_rounded_factors() -> None:
    layer = torch.nn.Linear(16, 16, bias=False)
    model = torch.nn.Sequential(layer, torch.nn.Linear(16, 16))
    technique = Float8(make_plan(precision="float8"), ALONE)
    technique.change_model(setup_of(model, torch.zeros(2, 16)))
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    factors = [_rounded(matrix) for matrix in (rows, layer.weight.detach())]
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
def test_convolutions_run_in_16_bits_and_losses_in_32(technique: type[BFloat16], dtype: torch.dtype) -> None:
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


def test_an_overflowing_step_is_skipped_and_halves_the_scale() -> None:
    technique, resumed = (Float16(make_plan(precision="fp16"), ALONE) for _ in range(2))
    parameter = torch.nn.Parameter(torch.ones(()))
    _scaled_step(technique, parameter, parameter.half().float() * 100.0)  # 100 * 2**16 is infinite in float16
    assert parameter.item() == 1.0
    resumed.restore(technique.state())
    assert resumed.state()["scale"] == 2.0**15


def switched() -> dict[str, tuple[bool, ...]]:
    """Return a variant's key -> whether its switches are on: TF32 for products and convolutions, cuDNN's search."""
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {"precision": (products.allow_tf32, cudnn.allow_tf32), "cudnn_benchmark": (cudnn.benchmark,)}


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # as the job does


@pytest.mark.parametrize("applied", [{"precision": "tf32"}, {"cudnn_benchmark": True}])
def test_a_switch_is_on_in_training_alone(digits: Dataset, applied: dict[str, Any]) -> None:
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
def test_a_switch_is_off_after_a_failed_step(technique: type[Technique]) -> None:
    def fails(_: object) -> None:
        assert any(map(any, switched().values()))
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        take_within(technique(make_plan(), ALONE), fails)
    assert not any(map(any, switched().values()))


@pytest.mark.parametrize(("applied", "words"), [
    ({"precision": "bf16"}, "precision: found 'bf16', but no operation of a step computed in torch.bfloat16"),
    ({"precision": "fp16"}, "precision: found 'fp16', but no operation of a step computed in torch.float16"),
    ({"cudnn_benchmark": True}, "cudnn_benchmark: found true, but a step runs no convolution"),
])  # fmt: skip
def test_a_setting_without_an_operation_to_change_is_refused(
    digits: Dataset, applied: dict[str, Any], words: str
) -> None:
    for model in (nn.Sequential(nn.Flatten(), ByHand()), conv_net()):
        training = make_training(digits, model=model, **applied)
        training.advance(1)
        with nullcontext() if "Conv2d" in repr(model) else pytest.raises(ConfigError, match=words):
            training.work()


class ByHand(nn.Module):
    """A linear layer without a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((64, 10), 0.01))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images[:, :, None] * self.weight).sum(1)


@pytest.mark.gpu
def test_cudnn_s_search_changes_losses_by_rounding(digits: Dataset) -> None:
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


@pytest.mark.parametrize("kind", ["plain", "causal", "boolean", "bias", "grouped"])
def test_flex_attention_computes_the_model_s_attention(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operations have gradients on a CPU, but no kernel, so PyTorch refuses CPUs; here the refusal is lifted."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    generator = torch.Generator().manual_seed(0)
    shape = (2, 4, 24, 16)
    query, key, value = (torch.randn(shape, generator=generator, requires_grad=True) for _ in range(3))
    bias = torch.randn(4, 1, 24, generator=generator, requires_grad=kind == "bias")
    options: dict[str, dict[str, Any]] = {
        "plain": {"scale": 0.5},
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": bias > -1},
        "bias": {"attn_mask": bias},
        "grouped": {"enable_gqa": True},
    }
    if kind == "grouped":
        key, value = (heads[:, :2].detach().requires_grad_() for heads in (key, value))
    inputs = [query, key, value, *[bias] * (kind == "bias")]
    causal = {(24, 24): flex_module.create_block_mask(_is_earlier, None, None, 24, 24, device="cpu")}
    usual = Mock(wraps=F.scaled_dot_product_attention)
    attend = torch.compile(flexible(usual, causal), backend="eager", fullgraph=True)
    seen = []
    for function in (attend, F.scaled_dot_product_attention):
        outputs = function(query, key, value, **options[kind])
        slope = torch.linspace(0, 1, outputs.numel()).view_as(outputs)
        seen.append([outputs, *torch.autograd.grad(outputs, inputs, slope)])
    assert not usual.called
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-5)


def test_flex_attention_is_in_the_compiled_step_alone(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    graphs, compiled = list[str](), torch.compile

    def noted(graph: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        graphs.append(str(graph.graph))
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled(model, **options | {"backend": noted}))
    plain, flex = (training_of(digits, how, compile="default") for how in ("auto", "flex"))
    for training in (plain, flex):
        training.advance(3)
    assert flex.losses.read_and_reset() == pytest.approx(plain.losses.read_and_reset(), rel=1e-5)
    assert ["flex_attention" in graph for graph in graphs] == [False, True]
    with Kernels() as evaluation:
        flex.evaluate()
    assert FLASH in evaluation.seen
