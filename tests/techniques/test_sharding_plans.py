"""What a machine makes of the forms of parallelism that shard state, without torch."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.params import Config, Machine, parse, techniques
from pipeline.plans import Plan, plan

CPU = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=True)


def gpus(count: int) -> Machine:
    return Machine(gpus=count, gpu_native_bf16=True, cpu_native_bf16=True)


def config(batch_size: int = 256, **tried: Any) -> Config:
    return parse({"train": {"batch_size": batch_size}, "variants": {"baseline": {}, "tried": tried}})


def planned(machine: Machine, launched: int | None = None, batch_size: int = 256, **tried: Any) -> Plan:
    return plan(config(batch_size, **tried), "tried", machine, launched)


@pytest.mark.parametrize("parallelism", ["zero1", "fsdp"])
def test_processes_that_hold_shares_of_a_model_share_the_batch(parallelism: str) -> None:
    made = planned(gpus(8), parallelism=parallelism)
    assert (made.processes, made.model_processes, made.data_processes, made.micro_batch_size) == (8, 1, 8, 32)
    assert planned(CPU, parallelism=parallelism).processes == 2
    assert planned(gpus(3), parallelism=parallelism).processes == 2  # 256 samples


def test_tensor_parallel_processes_take_the_same_samples() -> None:
    made = planned(gpus(8), parallelism="tensor")
    assert (made.processes, made.model_processes, made.data_processes, made.micro_batch_size) == (8, 8, 1, 256)
    made = planned(gpus(8), parallelism="tensor", replicas=2)
    assert (made.processes, made.model_processes, made.data_processes, made.micro_batch_size) == (8, 4, 2, 128)
    assert planned(gpus(3), parallelism="tensor").processes == 3


def test_replicas_take_the_same_number_of_processes_each() -> None:
    made = planned(gpus(8), parallelism="fsdp", replicas=2)
    assert (made.processes, made.model_processes, made.data_processes) == (8, 1, 8)
    assert planned(CPU, parallelism="fsdp", replicas=2).processes == 4
    assert planned(CPU, parallelism="tensor", replicas=3, batch_size=255).processes == 6
    made = planned(gpus(5), parallelism="tensor", replicas=2)
    assert (made.processes, list(made.skipped)) == (4, ["1 of 5 GPUs"])
    made = planned(gpus(7), parallelism="fsdp", replicas=2)  # six do not share out 256 samples evenly
    assert (made.processes, list(made.skipped)) == (4, ["3 of 7 GPUs"])


def test_a_launcher_decides_the_processes() -> None:
    made = planned(gpus(2), launched=16, parallelism="tensor", replicas=4)
    assert (made.processes, made.model_processes) == (16, 4)


def test_of_one_process_all_that_shards_is_left_out() -> None:
    made = planned(
        gpus(1),
        parallelism="fsdp",
        reshard_after_forward=False,
        parameter_precision="bf16",
        cpu_offload=True,
    )
    assert (made.processes, made.applied) == (1, config().variants["baseline"])
    assert list(made.skipped) == ["fsdp", "keep_gathered", "parameter_precision", "cpu_offload"]


def test_bf16_parameters_that_a_machine_would_emulate_are_left_out() -> None:
    old = gpus(2).model_copy(update={"gpu_native_bf16": False})
    made = planned(old, parallelism="fsdp", parameter_precision="bf16")
    assert (made.applied.parameter_precision, list(made.skipped)) == ("fp32", ["parameter_precision"])


def test_each_name_says_what_it_is() -> None:
    tried = config(parallelism="fsdp", replicas=2, processes=4, parameter_precision="bf16", reshard_after_forward=False)
    assert techniques(tried.variants["tried"]) == {
        "fsdp": ("parallelism", "processes", "replicas", "schedule", "reshard_after_forward", "parameter_precision"),
        "keep_gathered": ("reshard_after_forward",),
        "parameter_precision": ("parameter_precision",),
    }
