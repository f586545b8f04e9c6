"""Counted FLOPs, compared with counts by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.data.prepared import Dataset, Statistics
from pipeline.params import Machine, Train, parse
from pipeline.plans import plan
from pipeline.profiling import flops
from pipeline.results import Flops
from pipeline.tasks import Task
from pipeline.techniques.activation_checkpointing import blocks
from tests.nets import LooksAtValues, labelled, task_of
from tests.workspaces import CPU_ONLY

SHAPE, CLASSES = (3, 8, 8), 10
WITH_GPUS = Machine(gpus=2, gpu_native_bf16=True, cpu_native_bf16=False)

FIRST = 2 * (8 * 8 * 16) * (3 * 3 * 3)  # a 3x3 convolution from 3 to 16 channels, of 8x8 pixels
SECOND = 2 * (8 * 8 * 32) * (16 * 3 * 3)
LINEAR = 2 * 32 * CLASSES
FORWARD = FIRST + SECOND + LINEAR
TRAINING = 3 * FORWARD - FIRST  # a gradient for the weights and one for the input; the images need none


def net(*, channels: int, height: int, width: int, classes: int) -> nn.Module:
    assert (height, width) == (8, 8)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes)),
    )


def looking(**data: int) -> nn.Module:
    return LooksAtValues(net(**data))


def small_images(train: Train) -> Task:
    split = labelled(torch.zeros(1, *SHAPE, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    known = {"inputs": Statistics(mean=(0.5,) * SHAPE[0], std=(0.5,) * SHAPE[0])}
    return task_of(Dataset("small", "0" * 64, tuple("abcdefghij"), None, known, split, split), train)


def counted(
    model: str = "tests.test_flops:net",
    machine: Machine = CPU_ONLY,
    device: str = "Some CPU",
    frozen: Sequence[str] = (),
    **variant: Any,
) -> Flops:
    train = {"model": model, "frozen": [*frozen]}
    config = parse({"train": train, "compare": {"baseline": "tried"}, "variants": {"tried": variant}})
    return flops.counted(plan(config, "tried", machine), small_images(config.train), device)


def test_convolutions_and_matrices_are_counted_as_by_hand() -> None:
    count = counted()
    assert count.model_per_sample == count.executed_per_sample == TRAINING
    assert counted("tests.test_flops:looking").model_per_sample == TRAINING, "a model that looks at values"


def test_a_frozen_part_computes_no_gradients() -> None:
    assert counted(frozen=["0.*"]).model_per_sample == FIRST + 2 * SECOND + 3 * LINEAR


def test_adapters_are_counted_in_place_of_the_weights() -> None:
    rank, inputs, outputs = 2, 32, CLASSES
    count = counted(lora={"targets": ["*"], "rank": rank})
    # A and its gradient; B, its gradient and that of its input. Nothing before A has a gradient.
    factors = 2 * (2 * inputs * rank) + 3 * (2 * rank * outputs)
    assert count.model_per_sample == count.executed_per_sample == FORWARD + factors


def test_checkpointing_computes_its_blocks_once_more() -> None:
    count = counted(activation_checkpointing=True)
    assert len(list(blocks(net(channels=3, height=8, width=8, classes=10)))) == 3
    assert count.model_per_sample == TRAINING
    # All blocks run again, each until it has what its backward pass needs: the last one up to the matrix's input.
    assert count.executed_per_sample == TRAINING + FORWARD - LINEAR


@pytest.mark.parametrize(
    "variant",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"channels_last": True},
        {"gradient_accumulation": 4},
        {"parallelism": "ddp", "processes": 2},
        {"parallelism": "pipeline", "processes": 2},
    ],
)
def test_other_techniques_compute_the_same(variant: dict[str, Any]) -> None:
    count = counted(machine=WITH_GPUS, **variant)
    assert (count.model_per_sample, count.executed_per_sample) == (TRAINING, TRAINING)


def test_counting_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    counted()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_peak_is_of_precision_and_devices() -> None:
    name = "NVIDIA A100-SXM4-40GB"
    assert counted(machine=WITH_GPUS, device=name).peak_per_second == 19.5e12
    assert counted(machine=WITH_GPUS, device=name, precision="bf16").peak_per_second == 312e12
    of_two = counted(machine=WITH_GPUS, device=name, precision="bf16", parallelism="ddp")
    assert of_two.peak_per_second == 2 * 312e12


def test_an_unknown_peak_is_unknown() -> None:
    assert counted(machine=WITH_GPUS, device="NVIDIA GeForce GTX 970").peak_per_second is None
    assert counted(machine=WITH_GPUS, device="Tesla T4", precision="bf16").peak_per_second is None  # it has no bf16
    assert counted(device="NVIDIA H200").peak_per_second is None  # a plan for the CPU


def test_flops_count_at_the_precision_that_runs() -> None:
    old = Machine(gpus=1, gpu_native_bf16=False, cpu_native_bf16=False)
    assert counted(machine=old, device="Tesla T4", precision="bf16").peak_per_second == 8.1e12


def test_sixteen_bits_are_never_slower() -> None:
    for name, peak in flops.PEAKS.items():
        assert peak.fp16 is not None, name
        assert peak.bf16 in (None, peak.fp16), name
        assert peak.fp32 is None or peak.fp32 < peak.fp16, name
