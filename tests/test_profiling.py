"""Where a step's time goes: the arithmetic with known answers, made-up traces and profiles, and real ones on digits."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import environment, results
from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.errors import PipelineError
from pipeline.params import Config, Train
from pipeline.profiling import steps, trace
from pipeline.profiling.steps import Facts, findings
from pipeline.profiling.trace import (
    ACCUMULATE,
    BACKWARD,
    FORWARD,
    INPUT,
    OPTIMIZER,
    PARTS,
    STEP,
    Event,
    StepTimes,
    Trace,
    covered,
    partition,
)
from tests.nets import ALONE, conv_net
from tests.ranks import run_ranks
from tests.trainings import make_training
from tests.workspaces import PREPARED, enter

TRAIN = Train(epochs=3, batch_size=32, learning_rate=0.05, warmup_steps=3, history_every_steps=10**9)


# The arithmetic of intervals.


def test_intervals_agree_with_counting_instants() -> None:
    drawn = random.Random(0)
    for _ in range(200):
        first, second = ([(s, s + drawn.randrange(6)) for s in drawn.sample(range(40), 6)] for _ in range(2))
        in_first, in_second = ({t for s, e in side for t in range(s, e)} & {*range(10, 30)} for side in (first, second))
        assert covered(first, (10, 30)) == len(in_first)
        shares = partition((10, 30), {"first": first, "second": second, "rest": [(0, 50)]})
        assert shares == {
            "first": len(in_first),
            "second": len(in_second - in_first),
            "rest": 20 - len(in_first | in_second),
        }


# Made-up traces.


def annotation(name: str, start: int, end: int, thread: int = 1) -> Event:
    return Event(name, "user_annotation", start, end, thread, {})


def operator(name: str, start: int, end: int, thread: int = 1, **arguments: Any) -> Event:
    return Event(name, "cpu_op", start, end, thread, arguments)


def kernel(
    name: str, start: int, end: int, launched: int, stream: int = 7, thread: int = 1, device: int = 0
) -> list[Event]:
    """A kernel and the call that launched it. ``launched`` is the call's start, and also their correlation."""
    facts = {"correlation": launched, "External id": launched, "device": device}
    return [
        Event("cudaLaunchKernel", "cuda_runtime", launched, launched + 1, thread, {"correlation": launched}),
        Event(name, "kernel", start, end, stream, facts),
    ]


def nanoseconds(parsed: Trace) -> dict[str, int]:
    """Return the time of the window, of each part, and of hidden communication."""
    times = parsed.times().model_dump()
    return {name.removesuffix("_ms"): round(value * 1e6 * parsed.steps) for name, value in times.items()}


def spent(parsed: Trace) -> dict[str, int]:
    """Return operator -> its nanoseconds in the window."""
    return {operator.name: round(operator.step_ms * 1e6 * parsed.steps) for operator in parsed.operators()}


ON_CPU = [
    annotation(STEP, 100, 200),
    annotation(INPUT, 100, 120),
    operator("aten::index_select", 105, 119),
    operator("aten::index_select", 100, 200, thread=5),  # a thread that reads ahead
    annotation(ACCUMULATE, 100, 180),
    annotation(FORWARD, 120, 140),
    operator("aten::conv2d", 122, 138),
    operator("aten::convolution", 124, 136),
    annotation(BACKWARD, 140, 180),
    operator("autograd::engine::evaluate_function: ConvolutionBackward0", 140, 165),
    operator("ConvolutionBackward0", 141, 150),
    operator("aten::convolution_backward", 142, 149),
    Event("gloo:all_reduce", "user_annotation", 145, 175, 9, {}),  # hidden from 145 to 150 behind the backward pass
    operator("c10d::allreduce_", 150, 160),
    annotation(OPTIMIZER, 182, 196),
    annotation("Optimizer.step#SGD.step", 183, 195),
    operator("aten::_fused_sgd_", 184, 194),
    operator("aten::zeros", 197, 199),
    operator("aten::elsewhere", 300, 400),  # after the step
]


def test_the_parts_of_a_step_on_a_cpu() -> None:
    parsed = Trace(ON_CPU, gpu=None)
    parts = {"forward": 16, "backward": 9, "optimizer": 10, "rest": 2, "communication": 25, "input": 20, "idle": 18}
    assert nanoseconds(parsed) == {"step": 100, "communication_hidden": 5} | parts
    assert sum(parts.values()) == 100
    expected = {"aten::convolution": 12, "aten::conv2d": 4, "aten::convolution_backward": 7, "ConvolutionBackward0": 2}
    assert expected.items() <= spent(parsed).items()
    assert "aten::elsewhere" not in spent(parsed)
    assert spent(parsed)["aten::index_select"] == 14, "reading ahead is not part of the step"


ON_GPU = [
    annotation(STEP, 0, 50),
    annotation(INPUT, 0, 5),
    annotation(ACCUMULATE, 0, 30),
    annotation(FORWARD, 5, 15),
    operator("aten::conv2d", 6, 14, **{"External id": 6}),
    annotation(BACKWARD, 15, 30),
    operator("autograd::engine::evaluate_function: ConvolutionBackward0", 16, 28, thread=2),
    annotation(OPTIMIZER, 31, 40),
    *kernel("index", 10, 20, launched=2),
    *kernel("conv_fprop", 20, 50, launched=6),
    *kernel("conv_dgrad", 55, 80, launched=17, thread=2),
    *kernel("ncclDevKernel_AllReduce_Sum_f32", 70, 95, launched=20, stream=13, thread=2),
    *kernel("fused_sgd", 96, 100, launched=33),
    *kernel("graph", 100, 110, launched=45),  # after the optimizer, in the step
    *kernel("of another GPU", 0, 110, launched=12, device=1),
    Event("cudaMemcpyAsync", "cuda_runtime", 7, 8, 5, {"correlation": 7}),
    Event("Memcpy HtoD", "gpu_memcpy", 15, 54, 20, {"correlation": 7, "device": 0}),  # by the thread that reads ahead
    *kernel("of the next window", 200, 210, launched=60),
]


def test_the_parts_of_a_step_on_a_gpu() -> None:
    parsed = Trace(ON_GPU, gpu=0)
    # Input: the host waits, the images are gathered, and the next ones are copied while nothing else is done.
    parts = {"forward": 30, "backward": 25, "optimizer": 4, "rest": 10, "communication": 15, "input": 5 + 10 + 4,
             "idle": 5 + 1 + 1}  # fmt: skip
    assert nanoseconds(parsed) == {"step": 110, "communication_hidden": 10} | parts
    assert sum(parts.values()) == 110
    assert spent(parsed)["aten::conv2d"] == 30, "the time of the operator's kernel"


OPTIMIZER_IN_BACKWARD = [
    annotation(BACKWARD, 0, 100),
    operator("MulBackward0", 10, 30),
    operator("torch::autograd::AccumulateGrad", 38, 72),
    annotation("Optimizer.step#SGD.step", 40, 70),
    operator("aten::_fused_sgd_", 45, 65),
]
OWN_SCHEDULE = [  # a pipeline runs its own passes, which only the engine's events show
    operator("aten::linear", 10, 20),
    operator("autograd::engine::evaluate_function: AddmmBackward0", 30, 60),
    operator("AddmmBackward0", 35, 55),
]
WAITING = [  # an operator that waits for others does no work meanwhile
    annotation(FORWARD, 0, 90),
    operator("aten::linear", 0, 20),
    operator("_c10d_functional::all_reduce", 20, 50),  # of DTensor, which waits for gloo
    operator("c10d::allreduce_", 21, 49),
    operator("aten::clone", 60, 90),
    operator("_c10d_functional::wait_tensor", 65, 80),
    Event("gloo:all_reduce", "user_annotation", 25, 45, 9, {}),
    Event("gloo:all_reduce", "user_annotation", 62, 75, 9, {}),  # hidden from 62 to 65 behind the clone
]


@pytest.mark.parametrize(
    ("events", "parts"),
    [
        (OPTIMIZER_IN_BACKWARD, {"backward": 34, "optimizer": 20, "idle": 46}),
        (OWN_SCHEDULE, {"forward": 10, "backward": 20}),
        (WAITING, {"forward": 35, "communication": 45, "idle": 20, "communication_hidden": 3}),
    ],
)
def test_work_is_told_apart_without_its_annotations(events: list[Event], parts: dict[str, int]) -> None:
    parsed = Trace([annotation(STEP, 0, 100), annotation(ACCUMULATE, 0, 100), *events], gpu=None)
    assert parts.items() <= nanoseconds(parsed).items()
    if events is WAITING:
        assert spent(parsed) == {"aten::linear": 20, "aten::clone": 15}


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no step"):
        Trace([operator("aten::add", 0, 1)], gpu=None)


# Made-up profiles.


def times_of(**milliseconds: float) -> StepTimes:
    """A step of 100 ms: the time that is not named is the backward pass."""
    values = {f"{part}_ms": float(milliseconds.pop(part, 0)) for part in PARTS if part != "backward"}
    values["backward_ms"] = 100 - sum(values.values())
    return StepTimes(step_ms=100, communication_hidden_ms=milliseconds.pop("hidden", 0), **values)


def facts_of(*ranks: StepTimes, on_gpu: bool = False, placement: str = "resident", **applied: Any) -> Facts:
    return Facts(ranks, on_gpu, placement, applied)


@pytest.mark.parametrize(
    ("facts", "rule", "share", "says"),
    [
        (facts_of(times_of(input=38), placement="streamed"), "waits_for_input", 0.38, "set train.placement: resident"),
        (facts_of(times_of(input=38)), "waits_for_input", 0.38, "train.augment"),
        (facts_of(times_of(input=12), data_loading="dataloader"), "waits_for_input", 0.12, "raise loader_workers"),
        (
            facts_of(times_of(communication=25, hidden=20), times_of(communication=30, hidden=35), parallelism="ddp"),
            "waits_for_others", 0.30, "30% of the step waits for other processes on rank 1, and 50% of the",
        ),
        (facts_of(times_of(communication=20), parallelism="pipeline"), "waits_for_others", 0.20, "more micro-batches"),
        (facts_of(times_of(communication=20), parallelism="fsdp"), "waits_for_others", 0.20, "reshard_after_forward"),
        (facts_of(times_of(communication=20), parallelism="tensor"), "waits_for_others", 0.20, "fewer processes"),
        (facts_of(times_of(idle=40), on_gpu=True), "idles", 0.40, "compile: reduce-overhead"),
        (facts_of(times_of(idle=40)), "idles", 0.40, "Python"),
        (facts_of(times_of(optimizer=25)), "updates", 0.25, "does not depend on the batch"),
        (facts_of(times_of(), times_of(communication=8, idle=14, input=9)), "is_uneven", 0.31,
         "Rank 0 works 100.0 ms a step, and rank 1 works 69.0 ms"),
        (facts_of(times_of(forward=30, idle=4)), "computes", 0.96, "96% of the step, the device works (30% forward"),
    ],
)  # fmt: skip
def test_each_rule_says_what_to_do(facts: Facts, rule: str, share: float, says: str) -> None:
    [finding] = findings(facts)
    assert finding.rule == rule
    assert finding.share_fraction == pytest.approx(share)
    assert says in finding.text


def test_the_weightiest_finding_comes_first() -> None:
    ranked = findings(facts_of(times_of(idle=20, input=35, optimizer=5)))
    assert [finding.rule for finding in ranked] == ["waits_for_input", "idles"]
    quiet = facts_of(times_of(input=9, communication=9, idle=14, optimizer=14))
    assert [finding.rule for finding in findings(quiet)] == ["computes"]


# Real ones.


def profiled(dataset: Dataset, file: Path, joined: World, wait: float = 0.0, **applied: Any) -> Trace:
    """Profile a training whose batches arrive ``wait`` seconds late."""
    training = make_training(dataset, joined, train=TRAIN, model=conv_net(norm=True), steady=True, **applied)
    epoch = training.batches.epoch

    def late(*arguments: int) -> Iterator[Any]:
        for batch in epoch(*arguments):
            time.sleep(wait)
            yield batch

    training.batches.epoch = late  # type: ignore[assignment,method-assign]
    profile, plain, under = steps.window(training, 5, file)
    assert min(plain, under) > 0
    return profile


def test_a_planted_slow_input_is_found(digits: Dataset, tmp_path: Path) -> None:
    profile = profiled(digits, tmp_path / "trace.json", ALONE, 0.3, activation_checkpointing=True)
    times = profile.times()
    assert profile.steps == 5
    assert sum(times.fraction(part) for part in PARTS) == pytest.approx(1)
    assert times.input_ms > 150, "most of the 300 ms; the profiler's own time is taken off"
    assert times.backward_ms > times.forward_ms > 0, "the backward pass includes the second forward pass"
    assert times.optimizer_ms > times.communication_ms == 0
    assert {"aten::mkldnn_convolution", "aten::convolution_backward"} <= spent(profile).keys()
    [finding] = [
        finding for finding in findings(Facts((times,), False, "streamed", {})) if finding.rule == "waits_for_input"
    ]
    assert "of the step waits for input: set train.placement: resident" in finding.text


def test_a_trace_that_cannot_be_written_is_said(digits: Dataset, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"missing/trace\.json could not be written: make room there"):
        profiled(digits, tmp_path / "missing" / "trace.json", ALONE)


def _of_rank(world: World, dataset: Dataset, directory: Path, wait: float) -> tuple[StepTimes, list[str]]:
    profile = profiled(dataset, directory / f"{world.rank}.json", world, wait=wait * world.rank)
    return profile.times(), [operator.name for operator in profile.operators()]


def test_waiting_for_a_rank_shows_as_communication(digits: Dataset, tmp_path: Path) -> None:
    (first, operators), (second, _) = run_ranks(_of_rank, digits, tmp_path, 0.1)
    for times in (first, second):
        assert times.communication_ms + times.communication_hidden_ms > 0
    assert second.input_ms > 50, "the slow rank: most of its 100 ms"
    assert first.communication_ms > second.communication_ms, "the rank that waits"
    assert first.input_ms < second.input_ms
    assert not [name for name in operators if name.startswith("gloo:")]


def _reductions(world: World, dataset: Dataset, directory: Path) -> int:
    """Return the number of all-reduces in the profiled steps of post-local SGD."""
    profile = profiled(dataset, directory / f"{world.rank}.json", world, communication_hook="post_local_sgd")
    events = trace.read(directory / f"{world.rank}.json")
    return sum(event.name == "gloo:all_reduce" and profile.first <= event.start < profile.last for event in events)


def test_what_begins_after_the_warm_up_is_profiled(digits: Dataset, tmp_path: Path) -> None:
    for reductions in run_ranks(_reductions, digits, tmp_path):
        assert 1 <= reductions <= 2, "one step in four is followed by a reduction, and five steps were profiled"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The current directory, furnished like a checkout in which the stage can run."""
    params = {
        "fetch": {"dataset": "digits"},
        "train": {"device": "cpu", "seeds": [0], "epochs": 1, "batch_size": 32, "learning_rate": 0.05},
        "profile": {"steps": 4},
        "variants": {"baseline": {}, "ddp": {"parallelism": "ddp"}},
    }
    return enter(tmp_path, monkeypatch, params)


@pytest.mark.parametrize("variant", ["baseline", pytest.param("ddp", marks=pytest.mark.slow)])
def test_the_stage_writes_profile_page_and_trace(workspace: Config, variant: str) -> None:  # noqa: ARG001
    environment.write(environment.fingerprint({"variants": {variant: {"bitsandbytes"}}}))
    command = [sys.executable, "-m", "pipeline", "profile", variant]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    directory = results.profile_directory(variant)
    assert {file.name for file in directory.iterdir()} == {"profile.json", "profile.md", "trace.json.gz"}
    values = json.loads((directory / "profile.json").read_text())
    assert (values["schema"], values["variant"], values["steps"]) == (1, variant, 4)
    fingerprint = environment.read()
    assert values["environment"] == environment.hash_of(fingerprint, "variants", variant) != fingerprint["hash"]
    assert len(values["ranks"]) == values["world_size"] == (2 if variant == "ddp" else 1)
    for rank in values["ranks"]:
        assert sum(rank[f"{part}_ms"] for part in PARTS) == pytest.approx(rank["step_ms"])
    assert values["config"]["train"]["epochs"] == 1, "as params.yaml asks"
    assert values["step_p50_ms"] > 0
    assert values["profiled_step_p50_ms"] > 0
    assert not [key for key in values if "per_second" in key], "a profile is no measurement of speed"
    text = (directory / "profile.md").read_text()
    for finding in values["findings"]:
        assert finding["text"] in text
        assert finding["text"] in said
    assert f"profile: profiles/{variant}/profile.md\n" in said
    assert "The profiler slowed the step down by" in text
    assert "memory.pickle" not in text
    with gzip.open(directory / "trace.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert {STEP, INPUT, FORWARD, BACKWARD, OPTIMIZER} <= names
    parsed = Trace(trace.read(directory / "trace.json.gz"), gpu=None)
    assert parsed.times().model_dump() == values["ranks"][0], "the table's figures come from the trace"


@pytest.mark.gpu("the kernels in a trace")
def test_gpu_kernels_are_told_apart(workspace: Config) -> None:
    steps.run(workspace.with_train(device="cuda"), "baseline", environment.machine(), PREPARED)
    directory = results.profile_directory("baseline")
    values = json.loads((directory / "profile.json").read_text())
    [rank] = values["ranks"]
    assert sum(rank[f"{part}_ms"] for part in PARTS) == pytest.approx(rank["step_ms"])
    assert min(rank[f"{part}_ms"] for part in ("forward", "backward", "optimizer", "input")) > 0
    assert (directory / "memory.pickle").stat().st_size > 0
    assert "memory_viz" in (directory / "profile.md").read_text()
