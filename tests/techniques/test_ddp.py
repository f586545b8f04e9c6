"""DistributedDataParallel, SyncBatchNorm and DataParallel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline import environment
from pipeline.data.prepared import Dataset
from pipeline.distributed import WorkerError, World
from pipeline.techniques.sync_batchnorm import SyncBatchNorm
from pipeline.training.loop import Training
from tests.nets import ALONE, batch, changed, chosen, conv_net, gradients, make_plan
from tests.ranks import run_ranks
from tests.test_training import make_training, weights


def _options(joined: World, dataset: Dataset) -> dict[str, dict[str, Any]]:
    """Return, for each set of options, what DDP does after three steps, and the gradients of the third step."""
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "small": {"bucket_mb": 0.001},
        "beside": {"gradient_as_bucket_view": False},
        "static": {"static_graph": True},
    }
    found = {}
    for name, applied in options.items():
        training = make_training(dataset, joined, **applied)
        training.advance(3)
        wrapped = training.setup.model
        assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
        logged = wrapped._get_ddp_logging_data()
        parameters = list(training.model.parameters())
        found[name] = {
            "gradients": gradients(training.model),
            "buckets": len(str(logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]).split(",")),
            "storages": len({p.grad.untyped_storage().data_ptr() for p in parameters if p.grad is not None}),
            "static": wrapped.static_graph,
            "kept": sum(kept() for kept in training.setup.kept_bytes),
            "parameter_bytes": sum(parameter.nbytes for parameter in parameters),
        }
    return found


def test_ddp_options_take_effect_and_change_no_gradient_of_two_ranks(digits: Dataset) -> None:
    for found in run_ranks(_options, digits):
        plain = found["plain"]
        assert all(torch.equal(*pair) for other in found.values() for pair in zip(
            other["gradients"], plain["gradients"], strict=True
        ))  # fmt: skip
        assert (plain["buckets"], plain["storages"], plain["kept"]) == (1, 1, 0)
        assert found["small"]["buckets"] == found["small"]["storages"] > 2
        assert found["beside"]["storages"] == 6, "every parameter's gradient has memory of its own"
        assert found["beside"]["kept"] == plain["parameter_bytes"]
        assert [name for name, each in found.items() if each["static"]] == ["static"]


class Spare(nn.Module):
    """A model with a parameter that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = conv_net(), nn.Linear(2, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(images)
        return logits


def _unused(joined: World, dataset: Dataset, static_graph: bool) -> int:
    training = make_training(dataset, joined, model=Spare(), static_graph=static_graph)
    training.advance(5)
    return training.steps


def test_a_static_graph_allows_parameters_that_no_step_uses(digits: Dataset) -> None:
    with pytest.raises(WorkerError, match=r"variants\.tried\.parallelism: found 'ddp', .* set static_graph: true if"):
        run_ranks(_unused, digits, False)
    assert run_ranks(_unused, digits, True) == [5, 5]


# SyncBatchNorm


def test_every_batchnorm_is_replaced_and_names_in_the_state_dict_stay() -> None:
    model = changed(conv_net(norm=True), [SyncBatchNorm(make_plan(sync_batchnorm=True, parallelism="ddp"), ALONE)])
    assert sum(isinstance(module, nn.SyncBatchNorm) for module in model.modules()) == 2
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert list(model.state_dict()) == list(conv_net(norm=True).state_dict())


def _statistics(joined: World, sync: bool) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return gradients and buffers after a backward pass over this rank's share of 32 samples. Ranks share a GPU."""
    here = World(joined.rank, joined.size, torch.device("cuda", 0), joined.backend)
    plan = make_plan(parallelism="ddp" if joined.size > 1 else "none", processes=joined.size, sync_batchnorm=sync)
    model = conv_net(norm=True).to(here.device)
    wrapped = changed(model, chosen(plan, here))
    images, labels = (part.chunk(joined.size)[joined.rank].to(here.device) for part in batch(32))
    F.cross_entropy(wrapped(images), labels).backward()
    return [each.cpu() for each in gradients(model)], {name: each.cpu() for name, each in model.named_buffers()}


@pytest.mark.gpu
def test_two_ranks_have_the_gradients_and_statistics_of_one_device() -> None:
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
def test_every_gpu_computes_its_part_and_the_gradients_are_the_whole_batch_s() -> None:
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
def test_a_resumed_run_draws_as_before_on_every_gpu_and_the_largest_memory_counts(digits: Dataset) -> None:
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
