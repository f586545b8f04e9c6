"""Every ready-made parallel variant on several simulated GPUs: the traffic of its steps, none of which waits."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from pipeline import environment
from pipeline.distributed import forked
from pipeline.params import Variant, entry
from pipeline.results import Result
from tests.as_if_cuda import NAME, as_if_cuda
from tests.rehearsal.jobs import PARAMS, READY_MADE, SETS, Step, furnished, job_of, offered, on_rank, result_of

Sent = dict[str, tuple[int, int]]

SETTLED = 5
"""From this step on, all steps send the same: DDP has arranged its buckets, and late techniques have begun."""
BYTES = 4 * 15_100
"""Size of the net's parameters, and of their gradients."""
REDUCED: Sent = {"allreduce": (1, BYTES)}
HALVED: Sent = {"allreduce": (1, BYTES // 2)}
STAGES: tuple[Sent, ...] = tuple(dict.fromkeys(("send", "recv"), (8, 8 * 4 * cut * 4)) for cut in (320, 80, 50))
"""Eight micro-batches of 4 samples, each with ``cut`` values in float32: activations one way, gradients the other. The
pipeline measures where it cuts the net, so there are several right answers."""
GATHERED_TWICE: Sent = {"allgather_base": (6, 2 * BYTES), "reduce_scatter_base": (3, BYTES // 2)}
"""Three units are gathered for the forward and for the backward pass. Of the reduced gradients, a rank gets half."""
SENT: dict[str, tuple[Sent, ...]] = {
    **dict.fromkeys((name for name in SETS["ddp"]), (REDUCED,)),
    "ddp-fp16-compression": (HALVED,),
    "ddp-bf16-compression": (HALVED,),
    "ddp-powersgd": ({"allreduce": (3, 6_440)},),  # vectors without compression, then both factors of rank 2
    "ddp-post-local-sgd": ({}, REDUCED),
    # For each of two norms: mean, deviation and count of each rank, and two sums in the backward pass. Then gradients.
    "ddp-sync-batchnorm": ({"allgather": (2, 400), "allreduce": (3, 24_616)},),
    "pipeline-1f1b": STAGES,
    "pipeline-gpipe": STAGES,
    "pipeline-checkpointed": STAGES,
    "zero1": (REDUCED | {"broadcast": (8, BYTES)},),
    "fsdp": (GATHERED_TWICE,),
    "fsdp-kept": ({"allgather_base": (3, BYTES), "reduce_scatter_base": (3, BYTES // 2)},),
    "fsdp-bf16": ({"allgather_base": (6, BYTES), "reduce_scatter_base": (3, BYTES // 2)},),
    "fsdp-offloaded": (GATHERED_TWICE,),
    "fsdp-checkpointed": (GATHERED_TWICE,),
    "tensor": ({"all_reduce": (2, 32 * (80 + 10) * 4)},),  # the gradient of the pair's input, and the pair's output
}
"""Variant -> what a step on each of two ranks may send: kind of collective -> number of calls, number of bytes."""

WAITS = ("sync_batchnorm", "powersgd", "cpu_offload")
"""Techniques whose steps wait, as their ``costs`` say."""
LARGER = [
    ("pipeline", "pipeline-x-ddp", 4),
    ("sharded", "fsdp-replicas", 4),
    ("sharded", "tensor-replicas", 4),
    ("sharded", "fsdp-replicas", 8),
    ("ddp", "ddp", 8),
]
QUICK = ("ddp", "fsdp", "pipeline-1f1b")
PARALLEL = [
    pytest.param(name, variant, marks=() if variant in QUICK else pytest.mark.slow)
    for name, variant in READY_MADE
    if variant in SENT or (name == "unnamed" and SETS[name][variant].get("parallelism"))
]


def run(folder: Path, name: str, variant: str, gpus: int) -> tuple[Result, list[list[Step]]]:
    """Train on ``gpus`` simulated GPUs. Return the result, and each rank's steps."""
    with contextlib.chdir(folder), as_if_cuda(gpus):
        machine, values = environment.machine(), SETS[name][variant]
        samples = PARAMS["train"]["batch_size"] // (2 if "scaling" in values else 1)  # with weak scaling, each rank's
        furnished(folder, **job_of(values) | {"batch_size": samples})
        config = offered(name, variant, machine)
        assert config is not None, f"{variant} is not offered"
        preload = ["pipeline.training.loop", "torch._dynamo", "tests.as_if_cuda"]
        with forked(on_rank, (config, variant, machine, folder), gpus, preload=preload) as ask:
            steps = ask(None)
        return result_of(config, variant), steps


@pytest.mark.parametrize(("name", "variant"), PARALLEL)
def test_two_ranks_send_and_wait_for_nothing(name: str, variant: str, tmp_path: Path) -> None:
    result, ranks = run(tmp_path, name, variant, 2)
    assert (result.device, result.backend, result.world_size) == (NAME, "nccl", 2)
    applied = Variant.model_validate(result.applied)
    waiting = [wait for wait in WAITS if entry(wait).requested_by(applied)]
    for steps in ranks:
        assert len(steps) == 16
        for step in steps[SETTLED:]:
            assert step.sent in SENT.get(variant, (step.sent,))
            assert bool(step.waits) is bool(waiting), step.waits
    assert [step.sent for step in ranks[0][SETTLED:]] == [step.sent for step in ranks[1][SETTLED:]]


@pytest.mark.rehearsal
@pytest.mark.parametrize(("name", "variant", "gpus"), LARGER)
def test_four_and_eight(name: str, variant: str, gpus: int, tmp_path: Path) -> None:
    result, ranks = run(tmp_path, name, variant, gpus)
    assert (result.backend, result.world_size) == ("nccl", gpus)
    assert not [line for steps in ranks for step in steps[SETTLED:] for line in step.waits]


def test_what_waits_says_so() -> None:
    assert all("wait" in entry(name).costs for name in WAITS)


def test_every_variant_of_several_processes_is_run() -> None:
    alone = ("none", "data_parallel")
    several = {
        variant
        for name, variant in READY_MADE
        if name != "unnamed" and SETS[name][variant].get("parallelism", "none") not in alone
    }
    assert several == {*SENT, *(variant for _, variant, _ in LARGER)}
