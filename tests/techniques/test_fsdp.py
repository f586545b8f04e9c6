from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

from pipeline import environment
from pipeline.data.prepared import Dataset
from pipeline.distributed import ALONE, World
from pipeline.models import optimizers
from pipeline.results import Ledger
from tests.nets import batch, changed, chosen, conv_net, make_plan, make_step
from tests.parallel import (
    TRAIN,
    Observed,
    alone_and_on_ranks,
    assert_exact_resume,
    assert_same_training,
    copied,
    held_bytes,
    make_training,
    observe,
)
from tests.ranks import run_ranks

FSDP: dict[str, Any] = {"parallelism": "fsdp"}
SAME = [
    FSDP,
    FSDP | {"reshard_after_forward": False},
    FSDP | {"gradient_accumulation": 2},
]


def test_two_ranks_train_as_one_device_with_half_of_everything_each(digits: Dataset) -> None:
    alone, found = alone_and_on_ranks(digits, conv_net, SAME, size=2)
    for ranks in found:
        assert_same_training(ranks, alone)
        for rank in ranks:
            assert rank.parameter_bytes == alone.parameter_bytes / 2
            assert rank.optimizer_bytes == alone.optimizer_bytes / 2
    # It makes no difference to the result when parameters are gathered.
    assert found[1][0].straight_sha256 == found[0][0].straight_sha256


@pytest.mark.slow
def test_three_ranks_whose_shares_are_uneven_train_as_one_device(digits: Dataset) -> None:
    train = TRAIN.model_copy(update={"batch_size": 36})
    cases = [{"parallelism": "ddp"}, {"parallelism": "zero1"}, FSDP, FSDP | {"gradient_accumulation": 2}]
    cases += [FSDP | {"activation_checkpointing": True, "channels_last": True}]
    alone, found = alone_and_on_ranks(digits, conv_net, cases, size=3, train=train)
    for case, ranks in zip(cases, found, strict=True):
        assert_same_training(ranks, alone)
        if case["parallelism"] == "fsdp":
            for rank in ranks:  # shares of 8, 16 and 10 rows are padded to equal sizes
                assert alone.parameter_bytes / 3 < rank.parameter_bytes < alone.parameter_bytes / 2


@pytest.mark.slow
def test_adamw_and_batchnorm_resume_exactly(digits: Dataset) -> None:
    train = TRAIN.model_copy(update={"optimizer": "adamw", "learning_rate": 0.005})
    net = partial(conv_net, norm=True, dropout=True)
    cases = [FSDP | {"activation_checkpointing": True}, FSDP | {"parameter_precision": "bf16"}]
    cases += [FSDP | {"parameter_precision": "bf16", "activation_checkpointing": True, "gradient_accumulation": 2}]
    alone, found = alone_and_on_ranks(digits, net, cases, size=2, train=train)
    for ranks in found:
        assert_exact_resume(ranks[0])  # the other rank has BatchNorm statistics of its own, which are not saved
        for rank in ranks:
            torch.testing.assert_close(rank.resumed_optimizer_state, rank.optimizer_state, rtol=0, atol=0)
            assert list(rank.weights) == list(alone.weights)
            assert rank.accuracy > 0.2
            assert {value.dtype for value in rank.weights.values()} == {torch.float32, torch.int64}
            assert rank.parameter_bytes == alone.parameter_bytes / 2


@pytest.mark.slow
def test_four_ranks_in_two_replicas_train_as_one_device(digits: Dataset) -> None:
    cases = [FSDP | {"replicas": 2}, FSDP | {"replicas": 2, "gradient_accumulation": 2}]
    alone, found = alone_and_on_ranks(digits, conv_net, cases, size=4)
    for ranks in found:
        assert_same_training(ranks, alone)
        assert {rank.parameter_bytes for rank in ranks} == {alone.parameter_bytes // 2}
        assert {rank.optimizer_bytes for rank in ranks} == {alone.optimizer_bytes // 2}


def _gathered(joined: World) -> dict[str, Any]:
    """Return the bytes that a rank holds between its two passes, the dtypes, and whether gradients are reduced."""
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


def _measured(joined: World, dataset: Dataset, options: dict[str, Any]) -> tuple[Ledger, int]:
    from pipeline.profiling import ledger

    training = make_training(dataset, joined, conv_net, **FSDP | options)
    training.advance(4)
    found = ledger.measured(training, 10**9)
    assert found is not None
    return found, sum(parameter.numel() * parameter.element_size() for parameter in training.model.parameters())


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
def test_the_measured_ledger_counts_a_rank_s_own_shares(digits: Dataset, options: dict[str, Any]) -> None:
    for found, whole in run_ranks(_measured, digits, options):
        assert found.parameters_bytes == found.optimizer_state_bytes == whole / 2
        assert found.gradients_bytes <= 0.6 * whole
        assert found.communication_bytes >= (0.3 if not options else 1.0) * whole


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
