"""nn.DataParallel. These tests need several GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline import environment
from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.techniques.data_parallel import DataParallel
from pipeline.training.loop import Training
from tests.nets import batch, changed, conv_net, gradients, make_plan
from tests.test_training import make_training

# On several GPUs


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
    wrapped = changed(parallel, [DataParallel(made, world)])
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
    steps = whole.run()
    for _ in range(7):
        next(steps)
    with whole.paused():
        state = whole.state()
    state["model"] = {name: tensor.clone() for name, tensor in state["model"].items()}
    list(steps)
    again = made(5)
    torch.cuda.manual_seed_all(12345)
    again.restore(state)
    list(again.run())
    one, other = whole.model_state.read(), again.model_state.read()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert whole.memory.peak_bytes is not None
    assert whole.memory.peak_bytes >= max(torch.cuda.max_memory_allocated(index) for index in range(count))
