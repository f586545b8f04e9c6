"""What a machine makes of the forms of parallelism that shard state, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.errors import ConfigError
from pipeline.params import Config, Machine, parse, techniques
from pipeline.plans import Plan, plan

CPU = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=True)
SETS = Path(__file__).parent.parent.parent / "variants"


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


@pytest.mark.parametrize(
    ("machine", "tried", "message"),
    [
        (
            CPU,
            {"parallelism": "fsdp", "replicas": 4, "processes": 4},
            "variants.tried.replicas: found 4, which cannot divide 4 processes into groups of two or more; "
            "allowed: 1, 2.",
        ),
        (
            gpus(3),
            {"parallelism": "tensor", "replicas": 2},
            "variants.tried.replicas: found 2, which cannot divide 2 processes into groups of two or more; allowed: 1.",
        ),
        *(
            (
                gpus(1),
                {"parallelism": parallelism, "replicas": 2},
                "variants.tried.replicas: found 2, which cannot divide 1 process into groups of two or more; "
                "allowed: 1.",
            )
            for parallelism in ("fsdp", "pipeline", "tensor")
        ),
        (
            CPU,
            {"parallelism": "zero1", "replicas": 2},
            "variants.tried.replicas: found 2 with parallelism 'zero1'; allowed: 1, or parallelism 'fsdp', "
            "'pipeline' or 'tensor'.",
        ),
        (
            CPU,
            {"parallelism": "fsdp", "cpu_offload": True},
            "variants.tried.cpu_offload: found True, but it needs a GPU, and this run is on the CPU; take it out.",
        ),
        (
            CPU,
            {"parallelism": "tensor", "replicas": 3},
            "train.batch_size: found 256, which variants.tried cannot divide into 3 replica(s) x 1 micro-batch(es); "
            "allowed: a multiple of 3, such as 255.",
        ),
    ],
)
def test_what_cannot_be_is_refused(machine: Machine, tried: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(machine, **tried)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("tried", "message"),
    [
        (
            {"parallelism": "ddp", "reshard_after_forward": False},
            "variants.tried.reshard_after_forward: found False with parallelism 'ddp'; it needs 'fsdp': set that, or "
            "take reshard_after_forward out.",
        ),
        (
            {"parameter_precision": "bf16"},
            "variants.tried.parameter_precision: found 'bf16' with parallelism 'none'; it needs 'fsdp': set that, or "
            "take parameter_precision out.",
        ),
        (
            {"replicas": 2},
            "variants.tried.replicas: found 2 without a parallelism; set parallelism: fsdp, or take replicas out.",
        ),
        (
            {"parallelism": "tensor", "precision": "fp16"},
            "variants.tried: found parallelism 'tensor' with precision 'fp16', which exclude each other: each process "
            "would find the overflows of its own share of the gradients, and scale by those; take one of them out.",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_when_it_is_read(tried: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**tried)
    assert str(caught.value) == f"params.yaml: {message}"


def test_a_launcher_decides_the_processes() -> None:
    made = planned(gpus(2), launched=16, parallelism="tensor", replicas=4)
    assert (made.processes, made.model_processes) == (16, 4)
    with pytest.raises(
        ConfigError, match=r"allowed: parallelism 'ddp', 'zero1', 'fsdp', 'pipeline' or 'tensor' with processes"
    ):
        planned(gpus(2), launched=16)


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


def test_the_ready_made_set_can_be_planned_for() -> None:
    values = {"baseline": {}} | yaml.safe_load((SETS / "sharded.yaml").read_text(encoding="utf-8"))
    read = parse({"variants": values})
    for machine in (CPU, gpus(4), gpus(8)):
        for name in values.keys() - ({"fsdp-offloaded"} if machine is CPU else set()):  # for GPUs alone
            assert plan(read, name, machine).skipped == {}
