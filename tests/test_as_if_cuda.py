"""What the simulated GPUs detect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeline.distributed import World
from tests.as_if_cuda import Gpus, Traffic, as_if_cuda
from tests.ranks import run_ranks

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    with as_if_cuda(2) as played:
        yield played


@pytest.fixture
def strict(gpus: Gpus) -> Gpus:
    """Let every operation that waits for the device fail."""
    torch.cuda.set_sync_debug_mode("error")
    return gpus


def on_gpu(*values: float) -> torch.Tensor:
    return torch.tensor(values).pin_memory().to(GPU, non_blocking=True)


def test_a_new_thread_starts_on_the_first_gpu(gpus: Gpus) -> None:
    torch.cuda.set_device(1)
    devices: list[torch.device] = []
    thread = threading.Thread(target=lambda: devices.append(torch.ones(1, device="cuda").mul(2).device))
    thread.start()
    thread.join()
    assert (devices, gpus.current) == ([GPU], 1)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda values: values[0].item(),
    "tolist": lambda values: values.tolist(),
    "cpu": lambda values: values.cpu(),
    "to": lambda values: values.to("cpu"),
    "copy": lambda values: torch.empty(2).copy_(values),
    "nonzero": lambda values: values.nonzero(),
    "mask": lambda values: values[values > 0],
    "equal": lambda values: torch.equal(values, values),
    "picked": lambda values: values[[1, 0]],
    "synchronize": lambda _: torch.cuda.synchronize(),
}  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_an_operation_that_waits_is_reported(read: str, strict: Gpus) -> None:
    values = on_gpu(1.0, 2.0)
    with pytest.raises(RuntimeError, match=rf"called a synchronizing CUDA operation: .* at {__file__}:\d+"):
        READS[read](values)
    torch.cuda.set_sync_debug_mode("warn")
    READS[read](values)
    torch.cuda.set_sync_debug_mode("default")
    READS[read](values)
    assert len(strict.waits) == 2


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: on_gpu(1.0, 2.0) + torch.ones(2), "Expected all tensors to be on the same device"),
        (lambda: nn.Linear(2, 2)(on_gpu(1.0, 2.0)), "Expected all tensors to be on the same device"),
        (lambda: torch.cuda.set_device(2), "invalid device ordinal"),
        (lambda: on_gpu(1.0).numpy(), "can't convert cuda:0 device type tensor to numpy"),
    ],
)
def test_what_would_fail_on_gpus_raises_the_same_error(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=message):
        wrong()


def test_memory_counts_live_tensors_up_to_the_limit() -> None:
    with as_if_cuda(memory_bytes=1000):
        held = torch.zeros(100, device=GPU)
        view = held[:10]
        assert torch.cuda.memory_allocated() == 400
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.zeros(200, device=GPU)
        del held
        assert torch.cuda.memory_allocated() == 400, "the view has the same memory"
        del view
        assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (0, 400)


@pytest.mark.usefixtures("gpus")
def test_a_graph_replays_operations_on_the_same_memory() -> None:
    total, step, rate = (torch.zeros((), device=GPU) for _ in range(3))
    graph: Any = torch.cuda.CUDAGraph()
    number = 1.0
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total += rate * 10 + number
        step += 1
        with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
            total.item()
    graph.replay()
    rate.fill_(2.0)
    number = 100.0  # a replay uses the number that was recorded
    graph.replay()
    assert (total.item(), step.item()) == (1.0 + 21.0, 2.0)


def _sent(world: World, host: bool) -> dict[str, tuple[int, int]]:
    tensor = torch.ones(5, device="cpu" if host else world.device)
    with Traffic() as traffic:
        world.sum_(tensor)
        dist.broadcast(tensor, src=0)
    assert world.gather(world.rank) == [0, 1]
    assert tensor.tolist() == [2.0] * 5
    return {kind: (count, traffic.bytes[kind]) for kind, count in traffic.calls.items()}


@pytest.mark.usefixtures("gpus")
def test_simulated_nccl_counts_collectives() -> None:
    for sent in run_ranks(_sent, False, device="cuda"):
        assert sent == {"allreduce": (1, 20), "broadcast": (1, 20)}
    with pytest.raises(Exception, match="No backend type associated with device type cpu"):
        run_ranks(_sent, True, device="cuda")
