"""DistributedDataParallel, SyncBatchNorm and DataParallel."""

from __future__ import annotations

import copy
import gc
import math
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from pipeline import environment
from pipeline.data.prepared import Dataset
from pipeline.distributed import WorkerError, World
from pipeline.errors import ConfigError
from pipeline.params import Machine, parse
from pipeline.params.catalogue import in_effect
from pipeline.plans import plan
from pipeline.techniques.communication import LOCAL_STEPS, RANK
from pipeline.techniques.sync_batchnorm import SyncBatchNorm
from pipeline.training.loop import Training
from pipeline.training.outcomes import evaluate
from tests.nets import (
    ALONE,
    Spare,
    assembly_of,
    batch,
    batches_of,
    changed,
    chosen,
    conv_net,
    gradients,
    make_plan,
    stopped,
    task_of,
    training_of,
)
from tests.ranks import run_ranks
from tests.trainings import TRAIN, make_training, weights
from tests.workspaces import CPU_ONLY


def _options(joined: World, dataset: Dataset) -> dict[str, dict[str, Any]]:
    """Return, for each set of options, what DDP does after three steps, and the gradients of the third step."""
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "small": {"bucket_mb": 0.001},
        "beside": {"gradient_as_bucket_view": False},
        "static": {"static_graph": True},
    }
    by_case = {}
    for name, applied in options.items():
        training = make_training(dataset, joined, **applied)
        training.advance(3)
        wrapped = training.setup.model
        assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
        logged = wrapped._get_ddp_logging_data()
        parameters = list(training.model.parameters())
        by_case[name] = {
            "gradients": gradients(training.model),
            "buckets": len(str(logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]).split(",")),
            "storages": len({p.grad.untyped_storage().data_ptr() for p in parameters if p.grad is not None}),
            "static": wrapped.static_graph,
            "kept": sum(kept() for kept in training.setup.kept_bytes),
            "parameter_bytes": sum(parameter.nbytes for parameter in parameters),
        }
    return by_case


class _Slow(nn.Module):
    """A model whose forward pass takes a second on rank 1."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.net, self.seconds = conv_net(), float(rank)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        outputs: torch.Tensor = self.net(images)
        return outputs


def _arithmetic(joined: World, dataset: Dataset) -> tuple[float | None, float | None, bool]:
    training = make_training(dataset, joined, model=_Slow(joined.rank), gradient_accumulation=2)
    training.advance(1)
    before = copy.deepcopy([*training.model.parameters()])
    alone = training.arithmetic_seconds(1)
    unchanged = all(map(torch.equal, before, training.model.parameters())) and training.step.syncs == [False, True]
    return alone, make_training(dataset, joined, parallelism="fsdp").arithmetic_seconds(1), unchanged


def test_a_slow_rank_shows_only_in_its_own_arithmetic(digits: Dataset) -> None:
    (quick, *of_quick), (slow, *of_slow) = run_ranks(_arithmetic, digits)
    assert quick < 2.0 <= slow
    assert of_quick == of_slow == [None, True]


def test_ddp_options_change_no_gradient(digits: Dataset) -> None:
    for rank in run_ranks(_options, digits):
        plain = rank["plain"]
        assert all(torch.equal(*pair) for case in rank.values() for pair in zip(
            case["gradients"], plain["gradients"], strict=True
        ))  # fmt: skip
        assert (plain["buckets"], plain["storages"], plain["kept"]) == (1, 1, 0)
        assert rank["small"]["buckets"] == rank["small"]["storages"] > 2
        assert rank["beside"]["storages"] == 6, "every parameter's gradient has memory of its own"
        assert rank["beside"]["kept"] == plain["parameter_bytes"]
        assert [name for name, case in rank.items() if case["static"]] == ["static"]


def _unused(joined: World, dataset: Dataset, static_graph: bool) -> int:
    training = make_training(dataset, joined, model=Spare(), static_graph=static_graph)
    training.advance(5)
    return training.steps


def test_a_static_graph_allows_unused_parameters(digits: Dataset) -> None:
    with pytest.raises(WorkerError, match=r"variants\.tried\.parallelism: found 'ddp', .* set static_graph: true if"):
        run_ranks(_unused, digits, False)
    assert run_ranks(_unused, digits, True) == [5, 5]


# SyncBatchNorm


def test_every_batchnorm_is_replaced_and_names_stay() -> None:
    model = changed(conv_net(norm=True), [SyncBatchNorm(make_plan(sync_batchnorm=True, parallelism="ddp"), ALONE)])
    assert sum(isinstance(module, nn.SyncBatchNorm) for module in model.modules()) == 2
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert list(model.state_dict()) == list(conv_net(norm=True).state_dict())


def _statistics(joined: World, sync: bool) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return gradients and buffers after a backward pass over this rank's share of 32 samples. Ranks share a GPU."""
    joined_gpu = World(joined.rank, joined.size, torch.device("cuda", 0), joined.backend)
    plan = make_plan(parallelism="ddp" if joined.size > 1 else "none", processes=joined.size, sync_batchnorm=sync)
    model = conv_net(norm=True).to(joined_gpu.device)
    wrapped = changed(model, chosen(plan, joined_gpu))
    images, labels = (part.chunk(joined.size)[joined.rank].to(joined_gpu.device) for part in batch(32))
    F.cross_entropy(wrapped(images), labels).backward()
    return [gradient.cpu() for gradient in gradients(model)], {
        name: buffer.cpu() for name, buffer in model.named_buffers()
    }


@pytest.mark.gpu
def test_two_ranks_have_one_device_s_statistics() -> None:
    expected, buffers = _statistics(ALONE, False)
    for ranks_gradients, ranks_buffers in run_ranks(_statistics, True):
        torch.testing.assert_close(ranks_gradients, expected, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(ranks_buffers, buffers, rtol=1e-4, atol=1e-6)
    plain, _ = run_ranks(_statistics, False)[0]
    assert any(not torch.allclose(*pair, rtol=1e-2) for pair in zip(plain, expected, strict=True))


# DataParallel on several GPUs


def on_gpus() -> tuple[World, int]:
    if environment.machine().gpus < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    return World(rank=0, size=1, device=torch.device("cuda", 0), backend=None), torch.cuda.device_count()


@pytest.mark.gpu
def test_every_gpu_computes_its_part_of_the_gradients() -> None:
    world, count = on_gpus()
    images, labels = (part.to(world.device) for part in batch(32))
    plain, parallel = conv_net().to(world.device), conv_net().to(world.device)
    made = make_plan(parallelism="data_parallel", devices_per_process=count)
    wrapped = changed(parallel, chosen(made, world))
    assert isinstance(wrapped, nn.DataParallel)
    seen: list[tuple[int, int]] = []
    parallel[0][0].register_forward_hook(lambda _, inputs, __: seen.append((inputs[0].get_device(), len(inputs[0]))))  # type: ignore[index]
    F.cross_entropy(plain(images), labels).backward()
    F.cross_entropy(wrapped(images), labels).backward()
    assert sorted(device for device, _ in seen) == list(range(min(count, 32)))
    assert sum(samples for _, samples in seen) == 32
    torch.testing.assert_close(gradients(parallel), gradients(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu("its random generator")
def test_a_resumed_run_draws_alike_on_every_gpu(digits: Dataset) -> None:
    world, count = on_gpus()

    def made(seed: int) -> Training:
        model = conv_net(dropout=True, seed=seed)
        return make_training(digits, world, model=model, parallelism="data_parallel", devices_per_process=count)

    whole = made(0)
    whole.advance(7)
    state = copy.deepcopy(whole.state())
    whole.advance(20)
    again = made(5)
    torch.cuda.manual_seed_all(12345)
    again.restore(state)
    again.advance(20)
    assert weights(again) == weights(whole)
    assert whole.memory.peak_bytes is not None
    assert whole.memory.peak_bytes >= max(torch.cuda.max_memory_allocated(index) for index in range(count))


NUMEL = 8 * 9 + 8 + 16 * 72 + 16 + 10 * 64 + 10
"""Number of values in ``conv_net``'s parameters. PowerSGD compresses three of the parameters as matrices."""
FACTORS = RANK * (8 + 16 + 10), RANK * (9 + 72 + 64)
WARMUP = 3
HOOKED = TRAIN.model_copy(update={"epochs": 1, "warmup_fraction": WARMUP / 44})
"""Settings with 3 steps of warm-up, out of 44 steps."""


def _communicate(joined: World, dataset: Dataset, hook: str, steps: int) -> list[tuple[list[torch.Tensor], list[str]]]:
    """Return, for each step, the gradients, and the digests of all ranks' weights."""
    training = make_training(dataset, joined, train=HOOKED, communication_hook=hook)
    sent, batches = [], training.batches.epoch(0)
    for _ in range(steps):
        training.step(batches)
        sent.append((gradients(training.model), joined.gather(weights(training))))
    return sent


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


def test_powersgd_gradients_have_rank_two_after_warm_up(digits: Dataset) -> None:
    steps, others = run_ranks(_communicate, digits, "powersgd", 6)
    ranks = [int(torch.linalg.matrix_rank(technique[2].reshape(16, -1))) for technique, _ in steps]
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
    model = conv_net(norm=True)
    training = make_training(dataset, joined, train=train, model=model, communication_hook="post_local_sgd")
    list(training.run())
    own = {name: value.clone() for name, value in training.model.state_dict().items()}
    read = training.model_state.read()
    return joined.gather(own), read, training.score, evaluate(training.model, task_of(dataset), joined, 32)


def test_post_local_sgd_evaluates_and_saves_average_weights(digits: Dataset) -> None:
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
def test_hooks_resume_exactly_on_every_rank(digits: Dataset, hook: str) -> None:
    # DDP rearranges several buckets after the first step of a resumed run: before, when and after the hook starts.
    stops = [1, WARMUP, WARMUP + 1, WARMUP + 6]
    whole, *resumed = run_ranks(_resume, digits, hook, stops, {"bucket_mb": 0.002})[0]
    assert resumed == [whole] * len(stops)
    assert len(set(whole)) == (2 if hook == "post_local_sgd" else 1)


def _buckets(joined: World, dataset: Dataset) -> tuple[int, int, int]:
    """Return the number of PowerSGD's small buckets, the bytes of its state, and the expected bytes of its state."""
    training = make_training(dataset, joined, train=HOOKED, communication_hook="powersgd", bucket_mb=0.002)
    training.advance(10)
    [technique] = [technique for technique in training.techniques if technique.name == "powersgd"]
    kept = sum(kept() for kept in training.setup.kept_bytes)
    return len(technique.torch_state.error_dict), kept, 4 * (NUMEL + sum(FACTORS))  # type: ignore[attr-defined]


def test_powersgd_keeps_errors_and_factors(digits: Dataset) -> None:
    for buckets, kept, expected in run_ranks(_buckets, digits):
        assert buckets > 1
        assert kept == expected


def _beside_a_gpu(joined: World, dataset: Dataset) -> set[bool]:
    """Return whether a GPU is visible, each time PowerSGD ends the reduction of a bucket."""
    visible, counted = set(), PowerSGDState.maybe_increase_iter

    def count_bucket(state: PowerSGDState, bucket: GradBucket) -> None:
        visible.add(torch.cuda.is_available())
        counted(state, bucket)  # type: ignore[no-untyped-call]

    vars(torch.cuda)["is_available"] = lambda: True
    setattr(PowerSGDState, "maybe_increase_iter", count_bucket)  # noqa: B010
    make_training(dataset, joined, train=HOOKED, communication_hook="powersgd").advance(WARMUP + 2)
    return visible


def test_powersgd_trains_on_the_cpu_beside_a_gpu(digits: Dataset) -> None:
    """And other threads go on seeing the GPU."""
    assert run_ranks(_beside_a_gpu, digits) == [{True}, {True}]


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


def test_post_local_sgd_declares_its_step_skew() -> None:
    plans = [make_plan(parallelism="ddp", processes=2, communication_hook=hook) for hook in ("none", "post_local_sgd")]
    assert [max(planned.max_step_skew for planned in in_effect(plan.applied)) for plan in plans] == [0, LOCAL_STEPS - 1]


GPUS = Machine(gpus=8, gpu_native_bf16=True, cpu_native_bf16=True)
WEAK = {"parallelism": "ddp", "scaling": "weak"}


def made(machine: Machine, *, train: dict[str, Any] | None = None, **values: Any) -> Any:
    config = parse({"train": train or {}, "variants": {"baseline": {}, "weak": WEAK | values}})
    planned = plan(config, "weak", machine)
    return planned, planned.train


def test_weak_scaling_multiplies_batch_and_rate() -> None:
    planned, job = made(GPUS, train={"batch_size": 100, "learning_rate": 0.1}, gradient_accumulation=4)
    assert (planned.processes, planned.scale, planned.micro_batches, planned.micro_batch_size) == (8, 8, 4, 25)
    assert (job.batch_size, job.learning_rate) == (800, pytest.approx(0.8))
    assert planned.skipped == {}, "no GPU is left out for a batch that does not divide among them"


def test_strong_scaling_leaves_the_job_as_it_is() -> None:
    planned, job = made(GPUS, train={"batch_size": 256}, scaling="strong")
    assert (planned.scale, planned.micro_batch_size, job.batch_size, job.learning_rate) == (1, 32, 256, 0.1)


def _train(joined: World, dataset: Dataset, weak: bool) -> tuple[list[float], list[float], int]:
    """Return the losses, the learning rates and the number of steps of a run."""
    size = 32 if weak else 64
    config = parse({
        "train": TRAIN.model_dump() | {"batch_size": size, "learning_rate": 0.05 if weak else 0.1},
        "variants": {"baseline": WEAK if weak else {}},
    })  # fmt: skip
    made = plan(config, "baseline", CPU_ONLY)
    training = training_of(made, conv_net(), task_of(dataset, made.train), batches_of(dataset, made, joined), joined)
    rows = [row for row in training.run() if row]
    return [row.train_loss or math.nan for row in rows], [row.learning_rate for row in rows], training.steps


def test_two_weak_ranks_train_as_a_doubled_batch(digits: Dataset) -> None:
    losses, rates, steps = _train(ALONE, digits, False)
    assert steps == 2 * (len(digits.train) // 64)
    for rank_losses, rank_rates, rank_steps in run_ranks(_train, digits, True):
        assert rank_losses == pytest.approx(losses, rel=1e-3)
        assert rank_rates == pytest.approx(rates)
        assert rank_steps == steps


def _beyond_the_data(joined: World, dataset: Dataset) -> str:
    config = parse({"train": {"batch_size": 1000}, "variants": {"baseline": WEAK}})
    made = plan(config, "baseline", CPU_ONLY)
    with (
        pytest.raises(ConfigError) as caught,
        assembly_of(made, joined, dataset).training(0),
    ):
        pass
    return str(caught.value)


def test_a_batch_beyond_the_data_is_refused(digits: Dataset) -> None:
    for said in run_ranks(_beyond_the_data, digits):
        assert said.startswith("variants.baseline.scaling: found 'weak'")
        assert "allowed: 'strong', or a train.batch_size of at most 719" in said
