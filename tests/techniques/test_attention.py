from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import environment
from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.errors import ConfigError
from pipeline.params import Config, Machine, Train, Variant, requested
from pipeline.plans import plan
from pipeline.profiling import ledger
from pipeline.techniques.attention import Attention
from pipeline.training.loop import Training
from tests.nets import ALONE, GPU, Attending, attending_net, changed, make_plan, make_step, setup_of, task_of
from tests.test_training import make_training, rows_of

HERE = environment.machine()
IMAGES = {"channels": 1, "height": 8, "width": 8, "classes": 10}
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
BATCH, HEADS, TOKENS = 32, 2, 4
"""Sizes of the attention in ``attending_net``; the tokens are the pixels after two poolings."""


class Kernels(TorchDispatchMode):
    """Records the operations that compute attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "scaled_dot_product" in name or name in ("_softmax", "_safe_softmax"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


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


@pytest.mark.parametrize(("attention", "found"), [("auto", FLASH), ("flash", FLASH), ("math", "softmax")])
@pytest.mark.parametrize("applied", [{}, {"activation_checkpointing": True}])
def test_a_step_runs_the_requested_kernel_and_evaluation_the_usual_one(
    digits: Dataset, attention: str, found: str, applied: dict[str, Any]
) -> None:
    training, trial = (training_of(digits, attention, **applied) for _ in range(2))
    with Kernels() as step:
        training.advance(2)
    with Kernels() as tried:
        assert trial.fits()
    for seen in (step.seen, tried.seen):
        assert seen
        assert all(found in name for name in seen), seen
    with Kernels() as evaluation:
        training.advance(training.batches.steps_per_epoch - 2)
    assert FLASH in evaluation.seen


def test_the_losses_of_the_kernels_differ_only_by_rounding(digits: Dataset) -> None:
    usual, flash, math = (
        [row.train_loss for row in rows_of(training_of(digits, each).run())] for each in ("auto", "flash", "math")
    )
    assert flash == usual
    assert math == pytest.approx(usual, rel=1e-4)


def test_the_check_leaves_the_model_and_the_random_state_as_they_were() -> None:
    model = attending_net(**IMAGES)
    before = [value.clone() for value in model.state_dict().values()]
    random = torch.get_rng_state()
    assert changed(model, [Attention(make_plan(attention="math"), ALONE)]) is model
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert torch.equal(random, torch.get_rng_state())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # an error that attention does not cause
        changed(nn.Linear(3, 3), [Attention(make_plan(attention="math"), ALONE)])


@pytest.mark.filterwarnings("ignore:(Flash attention kernel not used|Both fused kernels do not)")
def test_a_kernel_that_cannot_compute_the_model_s_attention_is_refused(digits: Dataset) -> None:
    model = attending_net(dropout=0.1, **IMAGES)
    training = make_training(digits, model=model, attention="flash")
    with pytest.raises(ConfigError, match=r"^variants\.tried\.attention: found 'flash', but this kernel cannot"):
        training.advance(1)
    make_training(digits, model=model, attention="math").advance(1)


@pytest.mark.slow
@pytest.mark.skipif(HERE.no_cpu_kernels is not None, reason=str(HERE.no_cpu_kernels))
def test_code_compiled_for_one_kernel_is_not_used_for_another() -> None:
    images = torch.randn(2, 16, 2, 2)
    with fresh_cache(), torch._functorch.config.patch(enable_autograd_cache=True):
        for attention in ("flash", "math"):
            torch._dynamo.reset()
            compiled = torch.compile(Attending(), fullgraph=True, dynamic=False)
            run = within(attention, ALONE, compiled)
            run(images)
            with torch.profiler.profile() as profile:
                run(images)
            names = {each.key for each in profile.key_averages()}
            assert (f"aten::{FLASH}" in names) is (attention == "flash")
            Attention.prepare_process()


@pytest.mark.parametrize("attention", ["flash", "efficient", "math", "cudnn"])
def test_a_memory_prediction_for_a_gpu_counts_what_math_keeps(digits: Dataset, attention: str) -> None:
    """For the backward pass, fused kernels keep a sum per token, and math keeps the weight of each pair of tokens."""
    machine = Machine(gpus=1, gpu_native_bf16=True, cpu_native_bf16=True)
    train = Train(model="tests.nets:attending_net", batch_size=BATCH)
    kept = []
    for each in ("auto", attention):
        variant = Variant.model_validate({"precision": "bf16", "attention": each})
        config = Config(train=train, variants={"tried": variant})
        kept.append(ledger.predicted(plan(config, "tried", machine), task_of(digits, train)).activations_bytes)
    pairs = BATCH * HEADS * TOKENS * TOKENS
    assert kept[1] - kept[0] >= 2 * pairs if attention == "math" else kept[1] == kept[0]


@pytest.mark.parametrize(
    ("attention", "label"), [("auto", []), ("flash", ["attention=flash"]), ("math", ["attention=math"])]
)
def test_a_report_names_the_kernel(attention: str, label: list[str]) -> None:
    variant = Variant.model_validate({"attention": attention})
    assert [each.label(variant) for each in requested(variant)] == label


@pytest.mark.gpu("its own kernels")
@pytest.mark.parametrize(
    ("attention", "found"),
    [
        ("flash", "_scaled_dot_product_flash_attention"),
        ("efficient", "_scaled_dot_product_efficient_attention"),
        ("math", "softmax"),
        ("cudnn", "_scaled_dot_product_cudnn_attention"),
    ],
)
def test_a_gpu_runs_the_requested_kernel(attention: str, found: str) -> None:
    images = torch.randn(2, 64, 8, 8, device=GPU.device, dtype=torch.bfloat16, requires_grad=True)
    with Kernels() as kernels:
        within(attention, GPU, lambda: Attending()(images).sum().backward())()
    assert kernels.seen
    assert all(found in name for name in kernels.seen), kernels.seen
