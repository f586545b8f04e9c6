"""Which data ranks exchange with each communication hook, its effect on the training, and exact resumption."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.params import LOCAL_STEPS
from pipeline.params.catalogue import acting
from pipeline.techniques.communication import RANK
from pipeline.training.evaluation import evaluate
from pipeline.training.loop import Training
from pipeline.training.losses import DeviceLosses
from tests.nets import ALONE, conv_net, make_plan, stopped, task_of
from tests.ranks import run_ranks
from tests.test_training import TRAIN, make_training, weights

NUMEL = 8 * 9 + 8 + 16 * 72 + 16 + 10 * 64 + 10
"""Number of values in ``conv_net``'s parameters, three of which PowerSGD compresses as matrices."""
FACTORS = RANK * (8 + 16 + 10), RANK * (9 + 72 + 64)
WARMUP = 3
HOOKED = TRAIN.model_copy(update={"epochs": 1, "warmup_fraction": WARMUP / 44})
"""Settings with 3 steps of warm-up, out of 44 steps."""

Sent = list[tuple[str, int]]
"""For each all-reduce that Python code requested: type and number of the elements."""


@contextmanager
def _overheard(sent: Sent) -> Iterator[None]:
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append((str(tensor.dtype).removeprefix("torch."), tensor.numel()))
        return real(tensor, *arguments, **options)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = real


def _communicate(joined: World, dataset: Dataset, hook: str, steps: int) -> list[dict[str, Any]]:
    """Return, for each step, what this rank sent, the gradients, and all ranks' weights. Losses add up as on GPUs."""
    training = make_training(dataset, joined, train=HOOKED, communication_hook=hook)
    training.step.losses = DeviceLosses(joined)
    found = []
    batches = training.batches.epoch(0)
    for _ in range(steps):
        sent: Sent = []
        with _overheard(sent):
            training.step(batches)
        gradients = [parameter.grad.clone() for parameter in training.model.parameters() if parameter.grad is not None]
        found.append({"sent": sent, "gradients": gradients, "weights": joined.gather(weights(training))})
    return found


@pytest.mark.parametrize(("hook", "dtype", "digits_kept"), [("fp16", "float16", 11), ("bf16", "bfloat16", 8)])
def test_gradients_travel_in_16_bits_and_are_rounded_to_them(
    digits: Dataset, hook: str, dtype: str, digits_kept: int
) -> None:
    [exact], _ = run_ranks(_communicate, digits, "none", 1)
    for [rounded] in run_ranks(_communicate, digits, hook, 1):
        assert rounded["sent"] == [(dtype, NUMEL)]
        for gradient, whole in zip(rounded["gradients"], exact["gradients"], strict=True):
            assert gradient.dtype == torch.float32
            assert not torch.equal(gradient, whole)
            # Each rank's part and the sum of the parts are rounded. The parts of a small gradient can be large.
            torch.testing.assert_close(
                gradient, whole, rtol=0.0, atol=2.0 ** (1 - digits_kept) * whole.abs().max().item()
            )


def test_powersgd_sends_dense_gradients_first_and_then_factors_of_rank_two(digits: Dataset) -> None:
    steps, others = run_ranks(_communicate, digits, "powersgd", 6)
    dense, factored = steps[:WARMUP], steps[WARMUP:]
    assert [step["sent"] for step in dense] == [[("float32", NUMEL)]] * WARMUP
    vectors = 8 + 16 + 10
    assert [step["sent"] for step in factored] == [[("float32", count) for count in (vectors, *FACTORS)]] * 3

    def rank(step: dict[str, Any]) -> int:
        return int(torch.linalg.matrix_rank(step["gradients"][2].reshape(16, -1)))

    assert rank(dense[-1]) > RANK
    assert [rank(step) for step in factored] == [RANK] * 3
    assert all(len(set(step["weights"])) == 1 for step in steps), "all ranks take the same step"
    assert [step["weights"] for step in steps] == [step["weights"] for step in others]


def test_post_local_sgd_sends_weights_every_fourth_step(digits: Dataset) -> None:
    steps, _ = run_ranks(_communicate, digits, "post_local_sgd", WARMUP + 2 * LOCAL_STEPS)
    local: list[Sent] = [*([[]] * (LOCAL_STEPS - 1)), [("float32", NUMEL)]]
    assert [step["sent"] for step in steps] == [[("float32", NUMEL)]] * WARMUP + 2 * local
    apart = [len(set(step["weights"])) == 2 for step in steps]
    assert apart == [False] * WARMUP + 2 * [*([True] * (LOCAL_STEPS - 1)), False]


def _average(
    joined: World, dataset: Dataset
) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor], Any, Any]:
    """Train an epoch that ends between two averagings. Return the state of every rank, the state that would be saved,
    the training's score, and the score of this rank's own state."""
    train = HOOKED.model_copy(update={"batch_size": 48})  # 29 steps: 2 of warm-up, and 27 that are local
    training = make_training(
        dataset, joined, train=train, model=conv_net(norm=True), communication_hook="post_local_sgd"
    )
    list(training.run())
    own = {name: value.clone() for name, value in training.model.state_dict().items()}
    read = training.model_state.read()
    return joined.gather(own), read, training.score, evaluate(training.model, task_of(dataset), joined, 32)


def test_post_local_sgd_evaluates_and_saves_the_average_of_the_ranks_weights(digits: Dataset) -> None:
    for ranks, read, score, own_score in run_ranks(_average, digits):
        names = [name for name, _ in conv_net(norm=True).named_parameters()]
        assert list(read) == list(ranks[0])
        for name in names:
            assert name.endswith("bias") or not torch.equal(ranks[0][name], ranks[1][name])
            torch.testing.assert_close(read[name], (ranks[0][name] + ranks[1][name]) / 2, rtol=1e-6, atol=0.0)
        judged = conv_net(norm=True)
        judged.load_state_dict({name: (read if name in names else ranks[0])[name] for name in read})
        assert evaluate(judged, task_of(digits), ALONE, 32).correct == score.correct
        assert score.accuracy > 0.8
        assert own_score.loss != score.loss


def _resume(joined: World, dataset: Dataset, hook: str, stops: list[int], applied: dict[str, Any]) -> list[list[str]]:
    """Return every rank's weights after an uninterrupted run, and after a run interrupted at each of ``stops``."""
    dataset = replace(dataset, train=dataset.train[: 16 * HOOKED.batch_size])
    train = HOOKED.model_copy(update={"warmup_fraction": WARMUP / 16})
    options: dict[str, Any] = {"train": train, "communication_hook": hook} | applied
    whole = make_training(dataset, joined, **options)
    list(whole.run())
    ends = [joined.gather(weights(whole))]
    for stop in stops:
        saved = stopped(make_training(dataset, joined, **options), stop)
        resumed = make_training(dataset, joined, model=conv_net(seed=5), **options)
        resumed.restore(saved)
        list(resumed.run())
        ends.append(joined.gather(weights(resumed)))
    return ends


@pytest.mark.parametrize("hook", ["powersgd", "post_local_sgd", "fp16"])
def test_a_resumed_run_ends_with_the_same_weights_on_every_rank(digits: Dataset, hook: str) -> None:
    # DDP rearranges several buckets after the first step of a resumed run: before, when and after the hook starts.
    stops = [1, WARMUP, WARMUP + 1, WARMUP + 6]
    whole, *resumed = run_ranks(_resume, digits, hook, stops, {"bucket_mb": 0.002})[0]
    assert resumed == [whole] * len(stops)
    assert len(set(whole)) == (2 if hook == "post_local_sgd" else 1)


def _buckets(joined: World, dataset: Dataset) -> tuple[int, int, int]:
    """Return the number of PowerSGD's small buckets, the bytes of its state, and the expected bytes of its state."""
    training = make_training(dataset, joined, train=HOOKED, communication_hook="powersgd", bucket_mb=0.002)
    training.advance(10)
    [technique] = [each for each in training.techniques if each.name == "powersgd"]
    kept = sum(kept() for kept in training.setup.kept_bytes)
    return len(technique.torch_state.error_dict), kept, 4 * (NUMEL + sum(FACTORS))  # type: ignore[attr-defined]


def test_powersgd_keeps_an_error_of_every_parameter_and_factors_of_matrices(digits: Dataset) -> None:
    for buckets, kept, expected in run_ranks(_buckets, digits):
        assert buckets > 1
        assert kept == expected


def _beside_a_gpu(joined: World, dataset: Dataset) -> bool:
    torch.cuda.is_available = lambda: True
    make_training(dataset, joined, train=HOOKED, communication_hook="powersgd").advance(WARMUP + 2)
    return torch.cuda.is_available()


def test_powersgd_trains_on_the_cpu_of_a_machine_with_a_gpu(digits: Dataset) -> None:
    assert run_ranks(_beside_a_gpu, digits) == [True, True]


def _leftovers(joined: World, dataset: Dataset) -> list[str]:
    """Return the hooks whose model is still in memory after its training was deleted."""
    left = []
    for hook in ("none", "fp16", "powersgd", "post_local_sgd"):
        training: Training | None = make_training(dataset, joined, train=HOOKED, communication_hook=hook)
        assert training is not None
        training.advance(8)
        model = weakref.ref(training.model)
        del training
        gc.collect()
        left += [hook] * (model() is not None)
    return left


def test_a_hook_does_not_keep_its_model_in_memory(digits: Dataset) -> None:
    assert run_ranks(_leftovers, digits) == [[], []]


def test_post_local_sgd_declares_by_how_many_steps_ranks_may_be_apart() -> None:
    plans = [make_plan(parallelism="ddp", processes=2, communication_hook=hook) for hook in ("none", "post_local_sgd")]
    assert [max(each.max_step_skew for each in acting(plan.applied)) for plan in plans] == [0, LOCAL_STEPS - 1]
