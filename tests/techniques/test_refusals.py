"""Refusals of techniques that do not fit each other, the job, the machine or the model. Each message names the key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.errors import ConfigError
from pipeline.params import CATALOGUE, GRAPH_WARMUP_STEPS, Entry, Machine
from pipeline.params.conditions import needs_gpu
from pipeline.profiling import prediction
from tests.factories import alone, planned, setting_of
from tests.nets import LooksAtValues, changed, chosen, conv_net, make_plan, task_of
from tests.ranks import run_ranks

CPU = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=True)
PLAIN_CPU = CPU.model_copy(update={"cpu_native_bf16": False})
WITH_8BIT = CPU.model_copy(update={"installed": frozenset({"bitsandbytes"})})
OLD_GPUS = Machine(gpus=2, gpu_native_bf16=False, cpu_native_bf16=True)
OLD_WITH_TORCHAO = OLD_GPUS.model_copy(update={"installed": frozenset({"torchao"})})
GPUS = Machine(gpus=4, gpu_native_bf16=True, cpu_native_bf16=True, gpu_tf32=True)
NO_COMPILER = GPUS.model_copy(update={"no_cpu_kernels": "there is no compiler 'g++'", "no_gpu_kernels": "no triton"})
ON_CPU = {"device": "cpu"}
A_GPU = "needs a GPU"
APART = "exclude each other"
RECORDED = ("reduce-overhead", "max-autotune")
KEPT: list[dict[str, Any]] = [{"gradient_accumulation": 2}, {"gradient_accumulation": "auto"}, {"set_to_none": False}]


def case(key: str, says: str, machine: Machine = CPU, train: dict[str, Any] | None = None, **tried: Any) -> Any:
    """Return a test case. ``key``: a key of the variant; with a dot, a path in params.yaml; if empty, the variant."""
    path = key if "." in key else f"variants.tried.{key}".removesuffix(".")
    return pytest.param(path, says, machine, train or {}, tried, id=f"{path}: {says}, {tried}")


@pytest.mark.parametrize(
    ("path", "says", "machine", "train", "tried"),
    [
        # Refused for the machine
        *(case(technique.key, A_GPU, **alone(technique)) for technique in CATALOGUE if technique.why_not is needs_gpu),
        case("attention", A_GPU, attention="cudnn"),
        case("attention", A_GPU, GPUS, ON_CPU, attention="efficient"),
        case("precision", A_GPU, GPUS, ON_CPU, precision="tf32"),
        case("precision", "a GPU with TF32", OLD_GPUS, precision="tf32"),
        case("precision", "'leave_out' or 'run'", PLAIN_CPU, {"without_native": "refuse"}, precision="bf16"),
        case("precision", "torchao is not installed (pip install '.[float8]')", precision="float8"),
        case("precision", "capability 8.9", OLD_WITH_TORCHAO, {"without_native": "refuse"}, precision="float8"),
        case("release_cache", "no malloc_trim", CPU.model_copy(update={"trims_memory": False}), release_cache=True),
        case("optimizer_state", "pip install '.[low-bit]'", CPU, {"optimizer": "adamw"}, optimizer_state="8bit"),
        case("base_weights", "pip install '.[low-bit]'", base_weights="nf4", lora={"targets": ["*"]}),
        case("compile", A_GPU, compile="reduce-overhead"),
        case("compile", "no compiler 'g++'", NO_COMPILER, ON_CPU, compile="default"),
        case("compile", "no triton", NO_COMPILER, compile="max-autotune"),
        case("processes", "allowed: 1 to 4, or 'auto'", GPUS, parallelism="ddp", processes=5),
        case("train.device", "'auto', 'cpu'", CPU, {"device": "cuda"}),
        # Refused for the job
        case("optimizer_state", "train.optimizer is sgd", WITH_8BIT, optimizer_state="8bit"),
        case("optimizer_state", "train.optimizer is sgd", optimizer_state="factored"),
        case("optimizer", "train.optimizer is sgd", optimizer="muon"),
        case("cuda_graph", "must be above 3", GPUS, {"warmup_steps": GRAPH_WARMUP_STEPS}, cuda_graph=True),
        case("scaling", "train.warmup_fraction 0.0", CPU, {"warmup_fraction": 0.0}, parallelism="ddp", scaling="weak"),
        case(
            "train.batch_size", "3 processes x 2 micro-batches; allowed: a multiple of 6, such as 258",
            CPU, {"batch_size": 256}, parallelism="ddp", processes=3, gradient_accumulation=2,
        ),
        case(
            "train.batch_size", "1 process x 3 micro-batches; allowed: a multiple of 3, such as 99",
            CPU, {"batch_size": 100}, parallelism="ddp", scaling="weak", gradient_accumulation=3,
        ),
        case("train.batch_size", "a multiple of 3, ", CPU, {"batch_size": 256}, parallelism="tensor", replicas=3),
        case("train.batch_size", "into 4 processes x 1", GPUS, {"batch_size": 6}, parallelism="fsdp", replicas=2),
        case("train.batch_size", "1 replica x 3", CPU, {}, parallelism="pipeline", gradient_accumulation=3),
        # Refused for another setting: several processes
        case("gradient_accumulation", "with 16, stages", parallelism="pipeline", processes=4, gradient_accumulation=2),
        case("replicas", "divide 4 processes into", parallelism="fsdp", processes=4, replicas=4),
        case("replicas", "more; allowed: 1, 2.", parallelism="fsdp", processes=4, replicas=4),
        case("replicas", "divide 8 processes into", parallelism="pipeline", processes=8, replicas=3),
        case("replicas", "more; allowed: 1, 2, 4.", parallelism="pipeline", processes=8, replicas=3),
        case("replicas", "allowed: 1.", GPUS.model_copy(update={"gpus": 3}), parallelism="tensor", replicas=2),
        *(
            case("replicas", "divide 1 process into", GPUS.model_copy(update={"gpus": 1}), parallelism=name, replicas=2)
            for name in ("fsdp", "pipeline", "tensor")
        ),
        *(case(entry.key, "needs parallelism", **setting_of(entry)) for entry in CATALOGUE if entry.needs),
        case("replicas", "needs parallelism 'fsdp'", parallelism="zero1", replicas=2),
        case("replicas", "needs parallelism 'fsdp' or 'pipeline' or 'tensor': set", replicas=2),
        case("processes", "needs parallelism 'ddp'", GPUS, parallelism="data_parallel", processes=2),
        case("schedule", "needs parallelism 'pipeline': set parallelism", schedule="gpipe"),
        case("bucket_mb", "so bucket_mb must be at least 1", parallelism="ddp", compile="default", bucket_mb=0.5),
        case("bucket_mb", "greater than 0", parallelism="ddp", bucket_mb=0),
        case("communication_hook", "'fp16', 'bf16', 'powersgd' or", parallelism="ddp", communication_hook="int8"),
        case("", APART, parallelism="ddp", static_graph=True, gradient_accumulation=2),
        # Refused for another setting: one process
        *(case("attention", "needs precision: bf16 or", GPUS, attention=kernel) for kernel in ("flash", "cudnn")),
        case("attention", "generated by compile: set compile", GPUS, attention="flex"),
        case("base_weights", "needs lora", WITH_8BIT, base_weights="nf4"),
        case("loader_workers", "needs data_loading 'dataloader'", loader_workers=4),
        *(case("compile", "need these gradients", GPUS, compile=mode, **kept) for mode in RECORDED for kept in KEPT),
    ],
)  # fmt: skip
def test_a_variant_that_cannot_run_is_refused(
    path: str, says: str, machine: Machine, train: dict[str, Any], tried: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(machine, tried, **train)
    (line,) = str(refused.value).removeprefix("params.yaml: ").splitlines()
    assert line.startswith(f"{path}: found ")
    assert says in line


@pytest.mark.parametrize(
    ("machine", "train", "tried"),
    [
        (GPUS, {}, {"activation_offload": True}),
        (CPU, {}, {"attention": "flash"}),
        (GPUS, {}, {"attention": "efficient"}),
        (GPUS, {}, {"attention": "flash", "precision": "fp16"}),
        (GPUS, {}, {"attention": "cudnn", "parallelism": "fsdp", "parameter_precision": "bf16"}),
        (GPUS, {}, {"attention": "flex", "compile": "blocks"}),
        (GPUS, {}, {"precision": "tf32"}),
        (OLD_GPUS, {}, {"precision": "fp16"}),
        (GPUS, {"warmup_steps": GRAPH_WARMUP_STEPS + 1}, {"cuda_graph": True}),
        (CPU, {}, {"compile": "default"}),
        (GPUS, {}, {"compile": "reduce-overhead"}),
        *((GPUS, {}, {"compile": "default"} | kept) for kept in KEPT),
        *((GPUS, ON_CPU, {"compile": "max-autotune"} | kept) for kept in KEPT),  # on a CPU it records no graphs
    ],
)
def test_a_variant_that_can_run_is_applied(machine: Machine, train: dict[str, Any], tried: dict[str, Any]) -> None:
    made = planned(machine, tried, **train)
    assert (made.applied, made.skipped) == (made.requested, {})


@pytest.mark.parametrize("parallelism", ["none", "data_parallel"])
def test_one_process_is_refused_under_a_launcher(parallelism: str) -> None:
    with pytest.raises(ConfigError, match=r"variants\.tried: found parallelism .* launcher started 16 .*'fsdp'"):
        planned(GPUS, {"parallelism": parallelism}, launched=16)


@pytest.mark.parametrize("entry", [entry for entry in CATALOGUE if entry.needs_measuring], ids=lambda entry: entry.name)
def test_the_memory_of_some_techniques_cannot_be_predicted(entry: Entry, digits: Dataset) -> None:
    machine = GPUS.model_copy(update={"installed": frozenset({"bitsandbytes", "torchao"}), "gpu_float8": True})
    with pytest.raises(
        prediction.PredictionError, match=f"variants.tried: the memory of {entry.name} cannot be predicted"
    ):
        prediction.predicted(planned(machine, alone(entry), optimizer="adamw"), task_of(digits))


def scaled() -> nn.Module:
    net = conv_net()
    net.register_parameter("scale", nn.Parameter(torch.ones(())))
    return net


def tied() -> nn.Module:
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 64))
    return nn.Sequential(first, nn.Sequential(nn.ReLU(), first[1]), nn.Sequential(nn.Linear(64, 10)))


SHARED = nn.Linear(64, 64)
FLAT = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
MIXED = nn.Sequential(*conv_net(), nn.Linear(10, 10), nn.Linear(10, 10).double())
POWERSGD = {"communication_hook": "powersgd", "parallelism": "ddp"}
MODELS: list[tuple[dict[str, Any], nn.Module, str]] = [
    ({"activation_checkpointing": True}, nn.Linear(2, 2), "Linear has no blocks"),
    ({"activation_checkpointing": True}, FLAT, "none of its submodules has submodules of its own"),
    ({"activation_checkpointing": 0.5}, LooksAtValues(), "without values"),
    ({"activation_checkpointing": 0.5}, nn.Sequential(FLAT), "keeps no activations; allowed: false"),
    ({"loss_chunks": 2}, nn.Sequential(conv_net(), nn.ReLU()), "does not return the unchanged outputs of an nn.Linear"),
    ({"loss_chunks": 2}, nn.Sequential(nn.Flatten(), SHARED, SHARED), "that it calls only once"),
    ({"loss_chunks": 2}, nn.Sequential(nn.Flatten(), nn.Linear(64, 10).eval()), "nn.Linear in training mode"),
    ({"attention": "math"}, conv_net(), "Sequential does not call scaled_dot_product_attention; allowed: 'auto'"),
    ({"sync_batchnorm": True, "parallelism": "ddp"}, conv_net(), "has no Batch"),
    ({"optimizer": "muon"}, conv_net(), "Sequential trains no matrix of a linear layer before its last layer"),
    ({"compile": "blocks"}, FLAT, "Sequential has no blocks to compile"),
    ({"optimizer_state": "8bit"}, conv_net(), "no parameter of 4096 values or more"),
    (POWERSGD, scaled(), "module.scale"),
    (POWERSGD, nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), "factors of rank 2 would shrink no"),
    ({"parallelism": "zero1"}, MIXED, "torch.float32 and torch.float64; allowed: 'ddp'"),
    ({"parallelism": "fsdp"}, MIXED, "torch.float32 and torch.float64 in one block; allowed: 'ddp'"),
    ({"parallelism": "fsdp"}, tied(), "in several of its blocks; allowed: 'ddp' or 'zero1'"),
    ({"parallelism": "fsdp"}, scaled(), "'scale', without dimensions; allowed: shape [1]"),
    ({"parallelism": "tensor"}, conv_net(), "no two linear layers"),
    ({"parallelism": "tensor"}, nn.Sequential(nn.Linear(64, 15), nn.ReLU(), nn.Linear(15, 10)), "15 values or"),
    ({"parallelism": "pipeline"}, FLAT, "1 part at most; allowed: fewer processes"),
    ({"parallelism": "pipeline"}, LooksAtValues(), "torch.fx cannot record LooksAtValues"),
]  # fmt: skip


def _refused(joined: World, cases: list[tuple[dict[str, Any], nn.Module, str]]) -> list[str]:
    said = []
    for applied, model, _ in cases:
        try:
            changed(model, chosen(make_plan(processes=joined.size, **applied), joined))
            said.append("nothing")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_an_unfit_model_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(_refused, MODELS)
    assert first == second
    for (applied, _, says), line in zip(MODELS, first, strict=True):
        assert line.startswith(f"variants.tried.{next(iter(applied))}: found ")
        assert says in line
