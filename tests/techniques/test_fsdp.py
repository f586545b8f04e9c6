from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

from pipeline import environment
from pipeline.data.prepared import Dataset
from pipeline.distributed import ALONE, World
from pipeline.models import build, optimizers
from tests.nets import batch, changed, chosen, conv_net, make_plan, make_step
from tests.parallel import TRAIN, Observed, assert_exact_resume, copied, held_bytes, make_training, observe
from tests.ranks import run_ranks

FSDP: dict[str, Any] = {"parallelism": "fsdp"}


def _observed(joined: World, dataset: Dataset, cases: list[dict[str, Any]]) -> list[Observed]:
    train, net = TRAIN.model_copy(update={"optimizer": "adamw", "learning_rate": 0.005}), partial(conv_net, norm=True)
    return [observe(joined, dataset, partial(net, dropout=True), train, FSDP | applied) for applied in cases]


@pytest.mark.slow
def test_adamw_and_batchnorm_resume_exactly(digits: Dataset) -> None:
    cases: list[dict[str, Any]] = [{"activation_checkpointing": True}, {"parameter_precision": "bf16"}]
    cases += [{"parameter_precision": "bf16", "activation_checkpointing": True, "gradient_accumulation": 2}]
    for ranks in zip(*run_ranks(_observed, digits, cases), strict=True):
        assert_exact_resume(ranks[0])  # the other rank has BatchNorm statistics of its own, which are not saved
        for rank in ranks:
            torch.testing.assert_close(rank.resumed_optimizer_state, rank.optimizer_state, rtol=0, atol=0)
            assert list(rank.weights) == list(conv_net(norm=True).state_dict())
            assert rank.accuracy > 0.2
            assert {value.dtype for value in rank.weights.values()} == {torch.float32, torch.int64}


def _gathered(joined: World) -> dict[str, Any]:
    """Return the bytes that a rank holds between and after its two passes, dtypes, and when gradients are reduced."""
    images, labels = (part.chunk(joined.size)[joined.rank] for part in batch(32))
    seen: dict[str, Any] = {}
    for name, options in (
        ("plain", {}),
        ("kept", {"reshard_after_forward": False}),
        ("bf16", {"parameter_precision": "bf16"}),
    ):
        plan = make_plan(parallelism="fsdp", processes=joined.size, **options)
        (technique,) = chosen(plan, joined)
        model: Any = conv_net(norm=True)
        changed(model, [technique])
        dtypes: list[torch.dtype] = []
        model[0][0].register_forward_hook(lambda _m, _i, output, to=dtypes: to.append(output.dtype))
        model[0][1].register_forward_hook(lambda m, i, _o, to=dtypes: to.extend([i[0].dtype, m.weight.dtype]))
        logits = model(images)
        seen[name] = {
            "units": sum(isinstance(part, FSDPModule) for part in model.modules()),
            "held": held_bytes(model[0].parameters()),
            "dtypes": list(dtypes),
            "logits": logits.dtype,
        }
        F.cross_entropy(logits, labels).backward()
        seen[name]["gradients"] = {parameter.grad.dtype for parameter in model.parameters()}
        seen[name]["after"] = held_bytes(model[0].parameters())
    with make_step(model, [technique]).no_sync():
        for parameter in model.parameters():
            parameter.grad = None
        F.cross_entropy(model(images), labels).backward()
        seen["held back"] = all(parameter.grad is None for parameter in model.parameters())
    F.cross_entropy(model(images), labels).backward()
    seen["then reduced"] = all(parameter.grad is not None for parameter in model.parameters())
    return seen


def test_parameters_are_gathered_freed_kept_and_in_the_requested_precision() -> None:
    whole = held_bytes(conv_net(norm=True)[0].parameters())
    for seen in run_ranks(_gathered):
        # Three blocks and the model; with bf16 also two BatchNorms.
        assert (seen["plain"]["units"], seen["bf16"]["units"]) == (4, 6)
        assert seen["plain"]["held"] == seen["plain"]["after"] == whole / 2
        assert seen["kept"]["held"] == whole
        assert seen["kept"]["after"] == whole / 2
        assert seen["plain"]["dtypes"] == [torch.float32] * 3
        assert seen["bf16"]["dtypes"] == [torch.bfloat16, torch.bfloat16, torch.float32]
        assert seen["bf16"]["logits"] == torch.float32
        assert seen["bf16"]["gradients"] == {torch.float32}
        assert seen["held back"]
        assert seen["then reduced"]


def _left_out(joined: World, dataset: Dataset) -> bool:
    """Return whether a step with ``found_inf`` leaves the weights unchanged."""
    training = make_training(dataset, joined, conv_net, **FSDP)
    steps = training.run()
    next(steps)
    before = copied(training.model_state.read())
    training.optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    next(steps)
    return all(map(torch.equal, before.values(), copied(training.model_state.read()).values()))


def test_an_overflow_skips_a_step(digits: Dataset) -> None:
    assert optimizers.of_job(TRAIN).options["fused"]
    assert run_ranks(_left_out, digits) == [True, True]


def _on_gpus(joined: World, dataset: Dataset, applied: dict[str, Any]) -> tuple[Observed, set[str]]:
    training = make_training(dataset, joined, conv_net, **applied)
    return observe(joined, dataset, conv_net, TRAIN, applied), {
        each.device.type for each in training.model.parameters()
    }


@pytest.mark.gpu
@pytest.mark.parametrize("applied", [FSDP, FSDP | {"cpu_offload": True}, FSDP | {"precision": "fp16"}])
def test_shares_on_gpus_and_in_host_memory_train_as_one_device(digits: Dataset, applied: dict[str, Any]) -> None:
    if environment.machine().gpus < 2:
        pytest.skip("needs two GPUs")
    alone = observe(ALONE, digits, conv_net, TRAIN, {})
    for rank, devices in run_ranks(_on_gpus, digits, applied, device="cuda"):
        assert devices == ({"cpu"} if "cpu_offload" in applied else {"cuda"})
        assert rank.accuracy == pytest.approx(alone.accuracy, abs=0.02)
        assert_exact_resume(rank)


class Uneasy(nn.Module):
    """A net with the old weight_norm, whose weight is computed, and with a buffer whose elements share memory."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Flatten(), *(self._block(size) for size in (inputs, 32)))
        self.head = nn.Linear(32, classes)
        self.register_buffer("scale", torch.ones(1).expand(32))

    @staticmethod
    def _block(inputs: int) -> nn.Module:
        with warnings.catch_warnings(action="ignore"):  # a newer form replaces it
            return nn.Sequential(nn.utils.weight_norm(nn.Linear(inputs, 32)), nn.ReLU())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(images) * self.scale)  # type: ignore[no-any-return]


def uneasy(channels: int, height: int, width: int, classes: int) -> nn.Module:
    return Uneasy(channels * height * width, classes)


def _uneasy(joined: World, dataset: Dataset, applied: dict[str, Any]) -> tuple[int, float]:
    torch.manual_seed(0)
    sizes = {"channels": 1, "height": 8, "width": 8, "classes": 10}
    model = build("tests.techniques.test_fsdp:uneasy", {}, sizes, inputs=torch.zeros(2, 1, 8, 8), outputs=(10,))
    training = make_training(dataset, joined, lambda: model, **applied)
    training.advance(training.total_steps)
    score = training.evaluate()
    return score.count, score.loss


@pytest.mark.parametrize("checkpointing", [{}, {"activation_checkpointing": True}, {"activation_checkpointing": 0.5}])
def test_a_computed_weight_and_an_expanded_buffer_train_on_ranks_as_alone(
    checkpointing: dict[str, Any], digits: Dataset
) -> None:
    alone = _uneasy(ALONE, digits, checkpointing)
    for parallelism in ("ddp", "zero1", "fsdp"):
        for count, loss in run_ranks(_uneasy, digits, checkpointing | {"parallelism": parallelism}):
            assert (count, loss) == (alone[0], pytest.approx(alone[1], rel=1e-4)), parallelism
