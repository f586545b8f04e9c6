"""What the simulated GPUs detect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.as_if_cuda import Gpus, as_if_cuda

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
