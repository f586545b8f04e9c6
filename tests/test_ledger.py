"""The memory ledger: known answers, predicted against measured, and the command's table."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline import environment
from pipeline.data import DataError
from pipeline.data.prepared import Dataset, Statistics
from pipeline.distributed import World
from pipeline.errors import ConfigError
from pipeline.params import Config, Machine, parse
from pipeline.plans import Plan, plan
from pipeline.profiling import ledger, prediction
from pipeline.profiling.ledger import AllocationTrace
from pipeline.results import Ledger
from pipeline.tools import beforehand
from pipeline.training.loop import Training
from tests.nets import ALONE, GPU, LooksAtValues, batches_of, labelled, task_of, training_of
from tests.ranks import run_ranks
from tests.trainings import needs_library

PEAK = 10**9
LAPTOP = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=True, installed=frozenset({"bitsandbytes"}))
SERVER = LAPTOP.model_copy(update={"gpus": 1, "gpu_native_bf16": True})
PARTS = (
    *("parameters_bytes", "gradients_bytes", "optimizer_state_bytes", "activations_bytes"),
    *("communication_bytes", "data_bytes", "rest_bytes"),
)
WIDTH = 256


def linear(*, channels: int, height: int, width: int, classes: int) -> nn.Module:
    """A model of one linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, classes, bias=False))


def stack(*, channels: int, height: int, width: int, classes: int, layers: int = 8) -> nn.Module:
    """Linear layers, with an activation that saves only its output: almost all saved tensors are the layers' inputs."""
    hidden = [part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(inplace=True))]
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, WIDTH), *hidden, nn.Linear(WIDTH, classes))


def normalised(*, channels: int, height: int, width: int, classes: int) -> nn.Module:
    norms = [nn.LayerNorm(WIDTH) for _ in range(8)]
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, WIDTH), *norms, nn.Linear(WIDTH, classes))


def looking(**sizes: int) -> nn.Module:
    return LooksAtValues(linear(**sizes))


def asked(
    model: str = "small_cnn", batch_size: int = 64, variant: dict[str, Any] | None = None, **train: Any
) -> Config:
    """Return the config of one variant, ``tried``. It runs on the CPU unless ``device`` says otherwise."""
    values = {"model": model, "batch_size": batch_size, "device": "cpu", "seeds": [0], "epochs": 100} | train
    return parse({"train": values, "compare": {"baseline": "tried"}, "variants": {"tried": variant or {}}})


def rehearsed(config: Config, dataset: Dataset, machine: Machine = LAPTOP) -> Ledger:
    return prediction.predicted(plan(config, "tried", machine), task_of(dataset, config.train))


def trained(config: Config, how: Plan, dataset: Dataset, world: World = ALONE, steps: int = 2) -> Training:
    """A training on this rank after some steps."""
    torch.manual_seed(0)
    task = task_of(dataset, config.train)
    training = training_of(how, task.model(), task, batches_of(dataset, how, world), world, seed=0)
    for _ in islice(training.run(), steps):
        pass
    return training


def watched(config: Config, dataset: Dataset) -> Ledger:
    measured = ledger.measured(trained(config, plan(config, "tried", LAPTOP), dataset), PEAK)
    assert measured is not None
    return measured


def added_up(parts: Ledger) -> int:
    return sum(int(getattr(parts, part)) for part in PARTS)


def endless(count: int) -> Dataset:
    """A data set of 3x224x224 images that takes almost no memory."""
    images = torch.zeros((), dtype=torch.uint8).expand(count, 3, 224, 224)
    split = labelled(images, torch.zeros((), dtype=torch.int64).expand(count))
    known = {"inputs": Statistics(mean=(0.5,) * 3, std=(0.5,) * 3)}
    return Dataset("endless", "0" * 64, tuple("abcdefghij"), None, known, split, split)


def test_the_tape_keeps_the_highest_point() -> None:
    trace = AllocationTrace()
    trace.free(9)  # allocated before the trace began
    trace.section("data", begins=True)
    trace.allocate(1, 10)
    trace.section("data", begins=False)
    trace.allocate(2, 90)
    trace.free(2)
    trace.allocate(2, 70)  # the same address again
    trace.allocate(3, 30)
    trace.gradients([3, 8])  # 110 bytes: the highest point
    trace.free(2)
    trace.allocate(4, 60)
    assert [trace.at_peak(kind) for kind in ("data", "gradients", "activations")] == [10, 30, 70]
    assert set(trace.held) == {1, 3, 4}


def test_a_linear_net_has_bytes_counted_by_hand(digits: Dataset) -> None:
    matrix = 64 * 10 * 4
    draws = len(digits.train) * (5 * 8 + 1)  # of an epoch: five int64 and a bool for each sample
    many = watched(asked("tests.test_ledger:linear", batch_size=128), digits)
    assert (many.parameters_bytes, many.optimizer_state_bytes, many.communication_bytes) == (matrix, matrix, 0)
    assert many.data_bytes == 128 * (64 * 4 + 8) + draws
    # The peak is in the backward pass of the loss: there are the logits, their log-softmax and its gradient, and two
    # scalars, the loss and its divisor. The matrix has no gradient yet.
    assert (many.activations_bytes, many.gradients_bytes) == (3 * 128 * 10 * 4 + 4 + 4, 0)
    few = watched(asked("tests.test_ledger:linear", batch_size=2), digits)
    # With few samples, the peak is when the matrix has its gradient: the logits' gradient is the last activation.
    assert few.gradients_bytes == matrix
    assert few.activations_bytes < 3 * 2 * 10 * 4


def test_adamw_keeps_twice_what_momentum_does(digits: Dataset) -> None:
    sgd, adamw = (watched(asked(optimizer=name), digits) for name in ("sgd", "adamw"))
    tensors = 8
    assert adamw.optimizer_state_bytes == 2 * sgd.optimizer_state_bytes + 4 * tensors  # and one count per tensor
    assert watched(asked(momentum=0.0), digits).optimizer_state_bytes == 0


def mostly_frozen(**data: int) -> nn.Module:
    frozen, trained = nn.Linear(64, 130, bias=False).requires_grad_(False), nn.Linear(130, data["classes"], bias=False)
    return nn.Sequential(nn.Flatten(), frozen, trained)


@pytest.mark.parametrize("variant", [{}, {"optimizer_kernel": "for_loop"}])
def test_frozen_parameters_have_no_momentum(digits: Dataset, variant: dict[str, Any]) -> None:
    config = asked("tests.test_ledger:mostly_frozen", variant=variant)
    assert watched(config, digits).optimizer_state_bytes == 130 * 10 * 4
    assert rehearsed(config, digits).optimizer_state_bytes == 130 * 10 * 4


def test_the_parts_add_up_to_the_peak(digits: Dataset) -> None:
    measured = watched(asked(), digits)
    assert added_up(measured) == measured.peak_bytes == PEAK
    assert added_up(measured) - measured.rest_bytes == measured.tensors_bytes
    foreseen = rehearsed(asked(), digits)
    assert added_up(foreseen) == foreseen.peak_bytes == foreseen.tensors_bytes


def test_measuring_leaves_the_training_as_it_was(digits: Dataset) -> None:
    training = trained(asked(), plan(asked(), "tried", LAPTOP), digits)
    backward, variables = training.step.backward, dict(os.environ)
    assert ledger.measured(training, None) is None  # without a known peak there is no ledger
    assert training.step.backward is backward
    assert dict(os.environ) == variables
    assert len(list(islice(training.run(), 2))) == 2


@pytest.mark.parametrize(
    "config",
    [
        asked(),
        asked(batch_size=256, variant={"gradient_accumulation": 4}, optimizer="adamw"),
        asked(batch_size=5),
        asked("resnet9", model_options={"base_width": 8}),
        asked("resnet9", model_options={"base_width": 8}, variant={"activation_checkpointing": True}),
        asked("resnet9", model_options={"base_width": 8}, variant={"channels_last": True}, optimizer="adamw"),
        asked("resnet9", 128, {"gradient_accumulation": 2}, model_options={"base_width": 8}, augment={"flip": True}),
        asked("tests.test_ledger:stack", 4, optimizer="adamw"),  # its peak is when all gradients exist
        asked("small_cnn", variant={"precision": "bf16", "channels_last": True, "activation_checkpointing": True}),
        asked("resnet9", model_options={"base_width": 8}, variant={"activation_checkpointing": "selective"}),
        asked("resnet9", model_options={"base_width": 8}, variant={"activation_checkpointing": 0.7}),
        asked("tests.test_ledger:stack", 4, {"optimizer_kernel": "foreach"}, optimizer="adamw"),
        asked("tests.test_ledger:stack", 4, {"optimizer_kernel": "for_loop"}, optimizer="adamw"),
        asked("tests.test_ledger:stack", 4, {"set_to_none": False}, optimizer="adamw"),
        asked("resnet9", model_options={"base_width": 8}, variant={"set_to_none": False}),
        asked("tests.test_ledger:stack", 4, {"optimizer_in_backward": True}, optimizer="adamw"),
    ],
)
def test_the_prediction_is_what_is_measured(config: Config, digits: Dataset) -> None:
    measured, foreseen = watched(config, digits), rehearsed(config, digits)
    assert foreseen.peak_bytes == pytest.approx(measured.tensors_bytes, rel=0.05)
    assert foreseen.parameters_bytes == measured.parameters_bytes
    assert foreseen.optimizer_state_bytes == measured.optimizer_state_bytes
    assert foreseen.data_bytes == measured.data_bytes


@needs_library
@pytest.mark.parametrize(
    "how", [{}, {"precision": "bf16"}, pytest.param({"compile": "default"}, marks=pytest.mark.slow)]
)
def test_weights_in_4_bits_take_half_a_byte_each_and_leave_no_copy(how: dict[str, Any], digits: Dataset) -> None:
    applied = {"lora": {"targets": ["*"], "rank": 2}} | how
    settings = [
        asked("tests.test_ledger:stack", 8, variant, optimizer="adamw")
        for variant in (applied, applied | {"base_weights": "nf4"})
    ]
    plain, in_bits = (watched(each, digits) for each in settings)
    count = 64 * WIDTH + 8 * WIDTH * WIDTH + WIDTH * 10
    assert plain.parameters_bytes - in_bits.parameters_bytes == 4 * count - count // 2 - 4 * count // 64
    largest = WIDTH * WIDTH * (2 if "precision" in how else 4)
    assert in_bits.activations_bytes < 2 * largest < 8 * largest, "the weights of one layer at a time"
    for machine in [LAPTOP, SERVER] if "compile" not in how else []:  # compiled code's memory has to be measured
        foreseen = rehearsed(settings[1], digits, machine)
        assert foreseen.parameters_bytes == in_bits.parameters_bytes
        assert foreseen.peak_bytes == pytest.approx(in_bits.tensors_bytes, rel=0.05)


def test_a_prediction_leaves_the_random_state_alone(digits: Dataset) -> None:
    state = torch.get_rng_state()
    first = rehearsed(asked(), digits)
    assert torch.equal(torch.get_rng_state(), state)
    assert rehearsed(asked(), digits) == first


def test_gradients_that_are_zeroed_are_there_all_the_time(digits: Dataset) -> None:
    freed, zeroed = (watched(asked(batch_size=256, variant={"set_to_none": value}), digits) for value in (True, False))
    trained_bytes = freed.optimizer_state_bytes  # momentum is as large as the gradients
    assert freed.gradients_bytes < trained_bytes  # at the peak, only some of the gradients exist
    assert zeroed.gradients_bytes == trained_bytes
    assert zeroed.communication_bytes == 0
    assert zeroed.activations_bytes >= freed.activations_bytes


def test_gradients_used_at_once_never_add_up(digits: Dataset) -> None:
    config = asked("tests.test_ledger:stack", 4), asked("tests.test_ledger:stack", 4, {"optimizer_in_backward": True})
    plain, used_up = (watched(settings, digits) for settings in config)
    matrix = WIDTH * WIDTH * 4
    assert plain.gradients_bytes > 8 * matrix
    assert used_up.gradients_bytes == 0
    assert used_up.activations_bytes < plain.activations_bytes + 3 * matrix


@pytest.mark.parametrize("kernel", ["fused", "foreach", "for_loop"])
def test_every_kernel_s_memory_is_foreseen(digits: Dataset, kernel: str) -> None:
    config = asked("tests.test_ledger:stack", 4, {"optimizer_kernel": kernel}, optimizer="adamw", device="cuda")
    assert rehearsed(config, digits, SERVER).peak_bytes > 0


def test_accumulation_keeps_the_activations_of_one_micro_batch(digits: Dataset) -> None:
    small = rehearsed(asked(batch_size=256), digits)
    four = rehearsed(asked(batch_size=1024, variant={"gradient_accumulation": 4}), digits)
    whole = rehearsed(asked(batch_size=1024), digits)
    assert four.activations_bytes == pytest.approx(small.activations_bytes, rel=0.02)
    assert whole.activations_bytes == pytest.approx(4 * small.activations_bytes, rel=0.02)


@pytest.mark.parametrize("machine", [LAPTOP, SERVER])
def test_bf16_halves_what_matrix_products_keep(machine: Machine, digits: Dataset) -> None:
    def a_sample(precision: str) -> float:
        config = asked("tests.test_ledger:stack", variant={"precision": precision}, device="auto")
        estimate = prediction.Estimate(plan(config, "tried", machine), task_of(digits, config.train))
        return (estimate.ledger(1400).activations_bytes - estimate.ledger(900).activations_bytes) / 500

    assert a_sample("bf16") == pytest.approx(0.5 * a_sample("fp32"), rel=0.1)


def _watched_rank(world: World, config: Config, dataset: Dataset) -> Ledger | None:
    return ledger.measured(trained(config, plan(config, "tried", LAPTOP), dataset, world, steps=3), PEAK)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_ddp_has_buckets_all_the_time(micro_batches: int, digits: Dataset) -> None:
    variant = {"parallelism": "ddp", "processes": 2, "gradient_accumulation": micro_batches}
    config = asked("tests.test_ledger:stack", 64, variant)
    alone = rehearsed(asked("tests.test_ledger:stack", 64 // 2, {"gradient_accumulation": micro_batches}), digits)
    foreseen = rehearsed(config, digits)
    for rank in run_ranks(_watched_rank, config, digits):
        gradients = rank.parameters_bytes  # every parameter has one, and there are no buffers
        assert rank.gradients_bytes == foreseen.gradients_bytes == gradients
        assert rank.communication_bytes == foreseen.communication_bytes
        if micro_batches == 1:  # the gradients are in the buckets
            assert rank.communication_bytes == 0
        else:  # gradients accumulate outside of the buckets, which begin to fill in the last micro-batch
            assert 0.9 * gradients < rank.communication_bytes <= gradients
        assert foreseen.peak_bytes == pytest.approx(rank.tensors_bytes, rel=0.05)
        assert foreseen.peak_bytes > alone.peak_bytes
        assert added_up(rank) == PEAK


def test_the_largest_batch_fits_and_the_next_does_not(digits: Dataset) -> None:
    config = asked("resnet9", 64, {"gradient_accumulation": 2}, model_options={"base_width": 8})
    estimate = prediction.Estimate(plan(config, "tried", LAPTOP), task_of(digits, config.train))
    largest = estimate.largest_batch(8 * 2**20)
    assert largest is not None
    assert 2 < largest < len(digits.train)
    assert largest % 2 == 0
    limit = 0.6 * 8 * 2**20
    assert estimate.ledger(largest // 2).peak_bytes <= limit < estimate.ledger(largest // 2 + 1).peak_bytes


def test_nothing_fits_or_all_does(digits: Dataset) -> None:
    config = asked()
    estimate = prediction.Estimate(plan(config, "tried", SERVER), task_of(digits, config.train))
    assert (estimate.largest_batch(1000), estimate.largest_batch(2**40)) == (None, len(digits.train))


def test_a_gpu_is_foreseen_without_one() -> None:
    config = asked("resnet18", 100_000, {"precision": "fp16"}, device="auto")
    dataset = endless(200_000)
    foreseen = rehearsed(config, dataset, SERVER)
    assert foreseen.peak_bytes > 2**40  # more than any GPU has, predicted without a GPU
    assert foreseen.data_bytes > dataset.train.inputs.nbytes
    assert foreseen.rest_bytes >= 0
    streamed = rehearsed(asked("resnet18", 64, device="auto", placement="streamed"), dataset, SERVER)
    assert 64 * 3 * 224 * 224 * 4 < streamed.data_bytes < dataset.train.inputs.nbytes


def test_autocast_on_cuda_normalises_in_float32(digits: Dataset) -> None:
    half, full = (
        rehearsed(asked("tests.test_ledger:normalised", 1024, {"precision": p}, device="auto"), digits, SERVER)
        for p in ("bf16", "fp32")
    )
    assert half.activations_bytes > 0.9 * full.activations_bytes


def test_a_model_that_looks_at_values_is_not_foreseen(digits: Dataset) -> None:
    with pytest.raises(prediction.PredictionError, match=r"variants\.tried: tests\.test_ledger:looking with 64 sample"):
        rehearsed(asked("tests.test_ledger:looking"), digits)


def test_sizes_are_read_as_people_write_them() -> None:
    sizes = {"24GiB": 24 * 2**30, "80 gb": 80 * 10**9, "1.5MiB": 3 * 2**19, "4096": 4096}
    assert {text: beforehand.parse_bytes(text) for text in sizes} == sizes


@pytest.mark.parametrize("text", ["", "24 gigs", "GiB", "-1GiB", "0", "24,5GiB", "24.GiB", "1.5.3GiB", "24GiB/s"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="24GiB"):
        beforehand.parse_bytes(text)


VARIANTS = {"baseline": {}, "ddp": {"parallelism": "ddp"}, "half": {"precision": "bf16", "channels_last": True}}


def test_the_table_says_what_fits(digits_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = parse({"train": {"batch_size": 128}, "variants": VARIANTS})
    beforehand.show_memory(config, LAPTOP, ["baseline", "half"], digits_folder, memory="64MiB", device="cuda")
    header, baseline, half, *rest = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["variant", "peak"]
    assert header.endswith("in 64MiB  largest batch")
    assert len({len(line) for line in (header, baseline, half)}) == 1  # aligned
    assert "MiB" in baseline
    assert "fits" in baseline or "too large" in baseline
    assert "global batch of 128" in "\n".join(rest)
    assert "bf16 is skipped" not in "\n".join(rest)  # the assumed GPU has native bf16


def test_without_memory_all_variants_are_foreseen(digits_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beforehand.show_memory(
        parse({"train": {"batch_size": 64, "device": "cpu"}, "variants": VARIANTS}), LAPTOP, [], digits_folder
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["variant", *VARIANTS]
    assert "largest" not in lines[0]


def test_an_unforeseen_variant_stops_no_other(digits_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variants = {"baseline": {}, "compiled": {"compile": "default"}, "fp16": {"precision": "fp16"}}
    config = parse({"train": {"batch_size": 64, "device": "cpu"}, "variants": variants})
    beforehand.show_memory(config, LAPTOP, [], digits_folder, memory="1GiB")
    lines = capsys.readouterr().out.splitlines()
    header, baseline, *others = lines[:4]
    assert "fits" in baseline
    assert [line.split() for line in others] == [[name, *["unknown"] * 10] for name in ("compiled", "fp16")]
    assert len({len(line) for line in (header, baseline, *others)}) == 1
    compiled, fp16 = lines[-2:]
    assert compiled == "variants.compiled: the memory of compile cannot be predicted; measure it."
    assert fp16.startswith("variants.fp16.precision: found 'fp16', but ")
    with pytest.raises(
        prediction.PredictionError, match=r"variants\.compiled: the memory of compile cannot be predicted"
    ):
        beforehand.show_memory(config, LAPTOP, ["compiled"], digits_folder)


def test_what_cannot_be_shown_says_what_to_do(digits_folder: Path, tmp_path: Path) -> None:
    config = parse({"variants": VARIANTS})
    with pytest.raises(DataError, match="run `dvc repro prepare` first"):
        beforehand.show_memory(config, LAPTOP, [], tmp_path)
    with pytest.raises(ConfigError, match="no such variant"):
        beforehand.show_memory(config, LAPTOP, ["memry"], digits_folder)


@pytest.mark.gpu("what its allocator reports")
@pytest.mark.parametrize("variant", [{}, {"precision": "fp16", "channels_last": True, "gradient_accumulation": 2}])
def test_on_a_gpu(variant: dict[str, Any], digits: Dataset) -> None:
    config = asked("resnet9", 256, variant, device="cuda")
    how = plan(config, "tried", environment.machine())
    training = trained(config, how, digits, GPU)
    training.memory.open()
    training.step(training.batches.epoch(9))
    training.memory.close(measured=True)
    measured = ledger.measured(training, training.memory.peak_bytes)
    assert measured is not None
    assert added_up(measured) == measured.peak_bytes == measured.tensors_bytes == training.memory.peak_bytes
    assert measured.rest_bytes >= 0
    foreseen = prediction.predicted(how, task_of(digits, how.train))
    assert foreseen.parameters_bytes == measured.parameters_bytes
    assert foreseen.optimizer_state_bytes == measured.optimizer_state_bytes
    assert foreseen.activations_bytes > 0.5 * measured.activations_bytes  # cuDNN's workspaces are not predicted
