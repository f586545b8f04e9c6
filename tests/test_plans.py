"""The plan of a variant on a machine: processes, their shares of a batch, skipped techniques. Nothing runs."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import ConfigError
from pipeline.params import Machine
from tests.factories import planned


def gpus(count: int) -> Machine:
    """Return a machine with ``count`` GPUs. With 0, ``processes: auto`` means two processes on the CPU."""
    return Machine(gpus=count, gpu_native_bf16=True, cpu_native_bf16=True)


DDP, ZERO1, FSDP = ({"parallelism": name} for name in ("ddp", "zero1", "fsdp"))
TENSOR, STAGES, THREADS = ({"parallelism": name} for name in ("tensor", "pipeline", "data_parallel"))
OF_FSDP = {"reshard_after_forward": False, "parameter_precision": "bf16", "cpu_offload": True}
OF_DDP = {"processes": 1, "bucket_mb": 5, "communication_hook": "powersgd", "scaling": "weak"}


@pytest.mark.parametrize(
    ("count", "tried", "shape", "skipped"),
    [
        # GPUs, variant, (processes, processes per model, micro-batches, samples per micro-batch), skipped;
        # every step has 256 samples
        (8, {}, (1, 1, 1, 256), []),
        (0, DDP, (2, 1, 1, 128), []),
        (1, DDP, (1, 1, 1, 256), ["ddp"]),
        (0, DDP | OF_DDP, (1, 1, 1, 256), ["bucket_mb", "ddp", "powersgd", "weak_scaling"]),
        (3, DDP, (2, 1, 1, 128), ["1 of 3 GPUs"]),
        *((count, DDP, (4, 1, 1, 64), [f"{count - 4} of {count} GPUs"]) for count in (5, 6, 7)),
        (8, DDP, (8, 1, 1, 32), []),
        (8, DDP | {"gradient_accumulation": 4}, (8, 1, 4, 8), []),
        *((8, sharding, (8, 1, 1, 32), []) for sharding in (ZERO1, FSDP)),
        (1, FSDP | OF_FSDP, (1, 1, 1, 256), ["cpu_offload", "fsdp", "keep_gathered", "parameter_precision"]),
        (0, FSDP | {"replicas": 2}, (4, 1, 1, 64), []),
        (7, FSDP | {"replicas": 2}, (4, 1, 1, 64), ["3 of 7 GPUs"]),  # six processes cannot share 256 samples evenly
        (3, TENSOR, (3, 3, 1, 256), []),  # all three take the same samples
        (5, TENSOR | {"replicas": 2}, (4, 2, 1, 128), ["1 of 5 GPUs"]),
        (8, TENSOR | {"replicas": 2}, (8, 4, 1, 128), []),
        (0, STAGES | {"processes": 1}, (1, 1, 1, 256), ["pipeline"]),
        (0, STAGES | {"processes": 3}, (3, 3, 8, 32), []),  # of the numbers up to twelve, eight is the largest divisor
        (0, STAGES | {"replicas": 2}, (4, 2, 8, 16), []),
        (0, STAGES | {"gradient_accumulation": 2}, (2, 2, 2, 128), []),
        (5, STAGES | {"replicas": 2}, (4, 2, 8, 16), ["1 of 5 GPUs"]),
        (8, STAGES | {"gradient_accumulation": 16}, (8, 8, 16, 16), []),
        (8, STAGES | {"replicas": 2}, (8, 4, 16, 8), []),
        (1, THREADS, (1, 1, 1, 256), ["data_parallel"]),
        (4, THREADS | {"gradient_accumulation": 2}, (1, 1, 2, 128), []),
    ],
)
def test_what_a_variant_becomes(count: int, tried: dict[str, Any], shape: tuple[int, ...], skipped: list[str]) -> None:
    made = planned(gpus(count), tried)
    assert (made.processes, made.model_processes, made.micro_batches, made.micro_batch_size) == shape
    assert sorted(made.skipped) == skipped
    assert made.data_processes * made.micro_batches * made.micro_batch_size == 256
    assert made.device == ("cuda" if count else "cpu")
    alone = made.processes == made.devices_per_process == 1
    assert made.applied.parallelism == ("none" if alone else tried["parallelism"])
    if alone:
        assert made.applied == planned(gpus(count), {}).applied
    if "parallelism" in tried and tried["parallelism"] == "data_parallel":
        assert made.devices_per_process == count
    if made.applied.parallelism == "pipeline":
        assert made.applied.gradient_accumulation == made.micro_batches


@pytest.mark.parametrize(
    ("count", "hosts", "tried", "shape", "skipped"),
    [
        # GPUs of each host, hosts, variant, (processes, hosts, processes per model), skipped
        (4, 2, {}, (1, 1, 1), []),
        (4, 2, DDP, (8, 2, 1), []),
        (4, 3, DDP, (8, 2, 1), ["4 of 12 GPUs"]),  # twelve, and nine on three hosts, cannot share 256 samples
        (4, 2, DDP | {"processes": 4}, (4, 1, 1), []),
        (4, 2, DDP | {"processes": 8}, (8, 2, 1), []),
        (4, 2, TENSOR, (4, 1, 4), ["4 of 8 GPUs"]),
        (4, 2, TENSOR | {"replicas": 2}, (8, 2, 4), []),
        (0, 2, DDP, (2, 2, 1), []),
        (0, 4, DDP, (4, 4, 1), []),
        (0, 2, DDP | {"processes": 1}, (1, 1, 1), ["ddp"]),
        (0, 2, FSDP | {"replicas": 2}, (4, 2, 1), []),
        (4, 2, FSDP | {"replicas": "hosts"}, (8, 2, 1), []),
        (4, 2, TENSOR | {"replicas": "hosts"}, (8, 2, 4), []),
        (0, 1, FSDP | {"replicas": "hosts"}, (2, 1, 1), []),
        (0, 2, STAGES, (2, 1, 2), ["1 of 2 hosts"]),
        (0, 2, STAGES | {"replicas": 2}, (4, 2, 2), []),
    ],
)
def test_processes_are_divided_among_hosts(
    count: int, hosts: int, tried: dict[str, Any], shape: tuple[int, ...], skipped: list[str]
) -> None:
    made = planned(gpus(count).model_copy(update={"hosts": hosts}), tried)
    assert (made.processes, made.hosts, made.model_processes) == shape
    assert sorted(made.skipped) == skipped
    if tried.get("replicas") == "hosts":
        assert (made.applied.replicas, made.decided) == (hosts, {"replicas": f"{hosts}, one on each host"})


def test_processes_that_hosts_cannot_share_are_refused() -> None:
    two = gpus(4).model_copy(update={"hosts": 2})
    with pytest.raises(ConfigError, match="found 7, but each of the 2 hosts has 4 GPUs; allowed: 1 to 4, an equal"):
        planned(two, DDP | {"processes": 7})


@pytest.mark.parametrize(
    ("launched", "batch_size", "tried", "shape"),
    [
        (16, 256, DDP, (16, 1, 16)),
        (16, 256, TENSOR | {"replicas": 4}, (16, 4, 64)),
        (None, 255, TENSOR | {"replicas": 3}, (6, 2, 85)),
    ],
)
def test_a_launcher_or_the_variant_decides_the_processes(
    launched: int | None, batch_size: int, tried: dict[str, Any], shape: tuple[int, ...]
) -> None:
    made = planned(gpus(2 if launched else 0), tried, launched, batch_size=batch_size)
    assert (made.processes, made.model_processes, made.micro_batch_size) == shape


def test_emulated_bf16_parameters_are_left_out() -> None:
    old = gpus(2).model_copy(update={"gpu_native_bf16": False})
    made = planned(old, FSDP | {"parameter_precision": "bf16"})
    assert (made.applied.parameter_precision, list(made.skipped)) == ("fp32", ["parameter_precision"])
