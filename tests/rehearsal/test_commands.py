"""The commands other than ``train`` on simulated GPUs. The test of gpu-check runs ``doctor`` and ``verify``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from pipeline import environment, results
from pipeline.benchmark.arm import Measured, _rank_of_arm
from pipeline.distributed import forked
from pipeline.measurement import energy
from pipeline.params import Config
from pipeline.plans import plan
from pipeline.profiling import steps
from pipeline.tools import beforehand
from tests.as_if_cuda import NAME, Gpus, as_if_cuda
from tests.factories import known
from tests.rehearsal.jobs import READY_MADE, SETS, furnished, job_of, result_of, train
from tests.workspaces import PREPARED

STEPS = 6
ALONE = ("none", "data_parallel")
SINGLE = [job for job in READY_MADE if SETS[job[0]][job[1]].get("parallelism", "none") in ALONE]


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    monkeypatch.chdir(tmp_path)
    with as_if_cuda(2) as played:
        yield played


def configure(**variants: Any) -> Config:
    changes: dict[str, Any] = {}
    for variant in variants.values():
        changes |= job_of(variant)
    return furnished(Path.cwd(), variants=variants, **changes)


def check(measured: Measured, *, flops: bool = True) -> Measured:
    assert measured.device == NAME
    assert measured.window.measured_steps == STEPS
    assert measured.window.peak_memory_bytes
    assert not flops or known(measured.flops).model_per_sample > 0
    return measured


def arm_of(config: Config, name: str) -> Measured:
    """Measure ``variants.<name>`` in this process, as the bench measures an arm in one turn."""
    made = plan(config, name, environment.machine())
    arm = _rank_of_arm(config, made, PREPARED, environment.read(), STEPS, True, False)  # memory is measured anyway
    next(arm)
    arm.send(STEPS)
    measured = check(known(arm.send(None)))
    assert next(arm, None) is None
    return measured


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("name", "variant"),
    [pytest.param(*job, marks=() if job[1] in ("stacked", "graphed") else pytest.mark.rehearsal) for job in SINGLE],
)
def test_an_arm_is_measured_with_its_ledger(name: str, variant: str) -> None:
    measured = arm_of(configure(**{variant: SETS[name][variant]}), variant)
    if measured.applied["cuda_graph"] or measured.applied["compile"] in ("reduce-overhead", "max-autotune"):
        assert measured.ledgers is None
    else:
        ledgers = known(measured.ledgers)
        assert ledgers.measured.peak_bytes == measured.window.peak_memory_bytes
        assert (ledgers.predicted is None) is (ledgers.why_not_predicted is not None)


@pytest.mark.usefixtures("gpus")
def test_an_arms_energy_is_its_gpus_power_over_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(energy.SHORTEST_SECONDS, "cuda", 0.0)
    config = configure(baseline={})
    bench = config.bench.model_copy(update={"energy": True, "max_foreign_load": 1.0, "max_input_wait": 1.0})
    config = config.model_copy(update={"bench": bench})
    window = arm_of(config, "baseline").window
    watts = known(window.joules_per_sample) * known(window.samples_per_second)
    assert watts == pytest.approx(100.0, rel=0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("name", "variant"), [("ddp", "ddp"), ("sharded", "fsdp"), ("pipeline", "pipeline-1f1b")])
def test_two_ranks_are_an_arm_too(name: str, variant: str) -> None:
    config = configure(**{variant: SETS[name][variant]})
    made = plan(config, variant, environment.machine())
    arguments = (config, made, PREPARED.resolve(), environment.read(), STEPS, True)
    with forked(_rank_of_arm, arguments, 2, preload=[_rank_of_arm.__module__]) as ask:
        ask(None)
        ask(STEPS)
        measured = check(known(ask(None)[0]))
    assert (measured.backend, measured.world_size) == ("nccl", 2)
    assert measured.ledgers is not None


@pytest.mark.parametrize(("name", "variant"), [("ddp", "ddp"), ("sharded", "fsdp")])
def test_ranks_that_exchange_nothing_tell_their_buckets(
    name: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with as_if_cuda(8):
        config = configure(**{variant: SETS[name][variant]})
        made = plan(config, variant, environment.machine()).model_copy(update={"reduces": False})
        arguments = (config, made, PREPARED.resolve(), environment.read(), STEPS, False)
        with forked(_rank_of_arm, arguments, 8, preload=[_rank_of_arm.__module__]) as ask:
            ask(None)
            ask(STEPS)
            measured = check(known(ask(None)[0]), flops=False)
    alone = known(measured.window.arithmetic)
    assert len(alone.hosts) == len(alone.rank_seconds) == 8
    assert max(alone.rank_seconds) <= alone.latest_seconds * (1 + 1e-9)
    reduced = [bucket for bucket in alone.buckets if bucket.operation != "all_gather"]
    padded = sum(bucket.size_bytes for bucket in reduced) / (4 * measured.parameter_count)
    assert 1 <= padded <= (1.25 if variant == "fsdp" else 1)
    assert 0 < reduced[0].ready_seconds <= reduced[-1].ready_seconds < alone.latest_seconds
    assert ("all_gather" in {bucket.operation for bucket in alone.buckets}) is (variant == "fsdp")


@pytest.mark.usefixtures("gpus")
def test_two_ranks_are_profiled() -> None:
    config = configure(ddp=SETS["ddp"]["ddp"])
    steps.run(config, "ddp", environment.machine(), PREPARED)
    profile = json.loads((results.profile_directory("ddp") / "profile.json").read_text(encoding="utf-8"))
    assert (profile["device"], profile["backend"], len(profile["ranks"])) == (NAME, "nccl", 2)
    assert profile["has_memory_snapshot"]


@pytest.mark.slow
@pytest.mark.usefixtures("gpus")
def test_memory_is_foreseen_for_every_ready_made_variant(capsys: pytest.CaptureFixture[str]) -> None:
    whole = {name: values for variants in SETS.values() for name, values in variants.items()}
    variants = {
        name: part
        for name, part in whole.items()
        if part.keys().isdisjoint({"optimizer", "optimizer_state", "replicas"})
    }
    beforehand.show_memory(configure(**variants), environment.machine(), [], PREPARED, memory="80GiB")
    said = capsys.readouterr().out
    assert all(name in said for name in variants)


def test_gpus_that_throttle_are_refused(gpus: Gpus) -> None:
    config = configure(one={}, both={"parallelism": "data_parallel"})
    for bits, named in (
        (pynvml.nvmlClocksEventReasonSwPowerCap, {"one": [], "both": []}),
        (pynvml.nvmlClocksEventReasonSwThermalSlowdown, {"one": ["the GPU"], "both": ["GPU 0", "GPU 1"]}),
    ):
        gpus.throttling = bits
        for name, expected in named.items():
            train(config, name, environment.machine())
            (run,) = result_of(config, name).runs
            for sample in (run, arm_of(config, name).window):
                throttlings = [rejection.facts for rejection in sample.rejections if rejection.code == "gpu_throttled"]
                assert [facts["gpu"] for facts in throttlings] == expected
                assert {facts["slowdowns"] for facts in throttlings} <= {"software thermal slowdown"}
                assert sample.samples_per_second is None or not expected
