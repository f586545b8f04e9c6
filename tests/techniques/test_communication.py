"""Which data ranks exchange with each communication hook, its effect on the training, and exact resumption."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.params import LOCAL_STEPS
from pipeline.params.catalogue import in_effect
from pipeline.techniques.communication import RANK
from pipeline.training.evaluation import evaluate
from tests.nets import ALONE, conv_net, gradients, make_plan, stopped, task_of
from tests.ranks import run_ranks
from tests.test_training import TRAIN, make_training, weights

NUMEL = 8 * 9 + 8 + 16 * 72 + 16 + 10 * 64 + 10
"""Number of values in ``conv_net``'s parameters. PowerSGD compresses three of the parameters as matrices."""
FACTORS = RANK * (8 + 16 + 10), RANK * (9 + 72 + 64)
WARMUP = 3
HOOKED = TRAIN.model_copy(update={"epochs": 1, "warmup_fraction": WARMUP / 44})
"""Settings with 3 steps of warm-up, out of 44 steps."""


def _communicate(joined: World, dataset: Dataset, hook: str, steps: int) -> list[tuple[list[torch.Tensor], list[str]]]:
    """Return, for each step, the gradients, and the digests of all ranks' weights."""
    training = make_training(dataset, joined, train=HOOKED, communication_hook=hook)
    found, batches = [], training.batches.epoch(0)
    for _ in range(steps):
        training.step(batches)
        found.append((gradients(training.model), joined.gather(weights(training))))
    return found


@pytest.mark.parametrize(("hook", "digits_kept"), [("fp16", 11), ("bf16", 8)])
def test_gradients_are_rounded_to_16_bits(digits: Dataset, hook: str, digits_kept: int) -> None:
    [(exact, _)], _ = run_ranks(_communicate, digits, "none", 1)
    for [(rounded, _)] in run_ranks(_communicate, digits, hook, 1):
        for gradient, whole in zip(rounded, exact, strict=True):
            assert gradient.dtype == torch.float32
            assert not torch.equal(gradient, whole)
            # Each rank's part and the sum of the parts are rounded. The parts of a small gradient can be large.
            largest = float(whole.abs().max())
            torch.testing.assert_close(gradient, whole, rtol=0.0, atol=2.0 ** (1 - digits_kept) * largest)


def test_powersgd_begins_after_the_warm_up_and_its_gradients_have_rank_two(digits: Dataset) -> None:
    steps, others = run_ranks(_communicate, digits, "powersgd", 6)
    ranks = [int(torch.linalg.matrix_rank(found[2].reshape(16, -1))) for found, _ in steps]
    assert min(ranks[:WARMUP]) > RANK
    assert ranks[WARMUP:] == [RANK] * 3
    assert all(len(set(digests)) == 1 for _, digests in steps), "all ranks take the same step"
    assert [digests for _, digests in steps] == [digests for _, digests in others]


def test_post_local_sgd_averages_weights_every_fourth_step(digits: Dataset) -> None:
    steps, _ = run_ranks(_communicate, digits, "post_local_sgd", WARMUP + 2 * LOCAL_STEPS)
    apart = [len(set(digests)) == 2 for _, digests in steps]
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
        training = make_training(dataset, joined, train=HOOKED, communication_hook=hook)
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
    assert [max(each.max_step_skew for each in in_effect(plan.applied)) for plan in plans] == [0, LOCAL_STEPS - 1]
