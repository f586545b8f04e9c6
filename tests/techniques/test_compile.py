from __future__ import annotations

import logging
import os
import statistics
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache

from pipeline import environment
from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.errors import PipelineError
from pipeline.measurement.detectors import Recompilation
from pipeline.profiling.ledger import measured
from pipeline.techniques import compile as compiling
from pipeline.techniques import of_plan
from pipeline.techniques.compile import Compile
from tests.nets import ALONE, GPU, LooksAtValues, changed, conv_net, make_plan
from tests.ranks import run_ranks
from tests.trainings import TRAIN, make_training, rows_of

HERE = environment.machine()

builds = pytest.mark.skipif(HERE.no_cpu_kernels is not None, reason=str(HERE.no_cpu_kernels))


@builds
def test_the_model_runs_as_one_graph_and_learns(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "LONG_SECONDS", 0.0)
    counters = torch._dynamo.utils.counters
    counters.clear()
    plain, compiled = make_training(digits), make_training(digits, compile="default")
    losses = [[row.train_loss for row in rows_of(training.run())] for training in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert counters["stats"]["unique_graphs"] == 1  # only of the training: the evaluations ran the model itself
    made = counters["inductor"]["fxgraph_cache_hit"] + counters["inductor"]["fxgraph_cache_miss"]
    assert made == 2, "one for the forward and one for the backward pass"
    assert not counters["graph_break"]
    assert list(compiled.model_state.read()) == list(plain.model_state.read())
    lines = capsys.readouterr().out.splitlines()  # of the first step only, although all steps are called long
    assert set(lines) == {"tried: compiling the model ..."}
    assert len(lines) <= 2
    assert not logging.getLogger("torch.utils.cpp_extension").isEnabledFor(logging.WARNING)


def deep_net() -> nn.Sequential:
    """Return a net with four equal blocks."""
    torch.manual_seed(0)
    equal = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(4)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), *equal, nn.Linear(64, 10))


def _blocks_compiled(joined: World, dataset: Dataset, applied: dict[str, Any]) -> tuple[float, dict[str, int]]:
    """Return the sum of three steps' losses after an evaluation, and how many graphs were captured and generated."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    training = make_training(dataset, joined, model=deep_net(), compile="blocks", **applied)
    training.advance(1)
    training.evaluate()
    training.advance(2)
    assert not training.techniques[-1].why_idle()
    assert not counters["graph_break"]
    made = counters["inductor"]["fxgraph_cache_hit"] + counters["inductor"]["fxgraph_cache_miss"]
    return training.losses.read_and_reset(), {"captured": counters["stats"]["unique_graphs"], "generated": made}


@builds
@pytest.mark.parametrize("kept", [False, True, "selective"])
def test_equal_blocks_share_one_graph(digits: Dataset, kept: bool | str) -> None:
    loss, graphs = _blocks_compiled(ALONE, digits, {"activation_checkpointing": kept})
    assert loss == pytest.approx(_losses(digits, model=deep_net(), steps=3), rel=1e-4)
    assert graphs == {"captured": 1, "generated": 2}, "one for the forward and one for the backward pass"


@pytest.mark.slow
@builds
@pytest.mark.parametrize(("parallelism", "captured"), [("ddp", 1), ("fsdp", 1), ("tensor", 2)])
def test_ranks_compile_equal_blocks_once(digits: Dataset, parallelism: str, captured: int) -> None:
    expected = _losses(digits, model=deep_net(), steps=3)
    for loss, graphs in run_ranks(_blocks_compiled, digits, {"parallelism": parallelism}):
        assert loss == pytest.approx(expected, rel=1e-4)
        assert graphs["captured"] == captured


def test_max_autotune_does_without_cuda_graphs_on_a_cpu() -> None:
    assert Compile(make_plan(compile="max-autotune"), ALONE).mode == "max-autotune-no-cudagraphs"
    assert Compile(make_plan(compile="max-autotune"), GPU).mode == "max-autotune"


def _losses(dataset: Dataset, joined: World = ALONE, *, steps: int, **applied: Any) -> float:
    """Return the sum of the losses of the first steps."""
    training = make_training(dataset, joined, **applied)
    training.advance(steps)
    return training.losses.read_and_reset()


@pytest.mark.gpu("what the compiler makes for it")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("more", [{}, {"precision": "bf16", "channels_last": True}, {"activation_checkpointing": True}])
def test_each_mode_learns_the_same_on_a_gpu(
    digits: Dataset, mode: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    replays = Mock(wraps=torch.cuda.CUDAGraph.replay)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays(graph))
    plain, compiled = (
        [row.train_loss for row in rows_of(make_training(digits, GPU, model=net, compile=how, **more).run())]
        for net, how in ((conv_net(norm=True), "none"), (conv_net(norm=True), mode))
    )
    assert compiled == pytest.approx(plain, rel=0.05 if more.get("precision") else 0.01)
    assert replays.called is (mode != "default")


@pytest.mark.slow
@builds
def test_deterministic_jobs_compile_deterministically_in_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    lower, seen = GraphLowering.run, []

    def noted(graph: GraphLowering, *inputs: Any) -> Any:
        seen.append((graph.is_backward, inductor.deterministic, threading.current_thread() is threading.main_thread()))
        return lower(graph, *inputs)

    monkeypatch.setattr(GraphLowering, "run", noted)
    torch.use_deterministic_algorithms(True)
    try:
        technique = Compile(make_plan(compile="default"), ALONE)
        with fresh_cache():
            loss = changed(nn.Linear(3, 2), [technique])(torch.ones(5, 3)).sum()
            thread = threading.Thread(target=loss.backward)  # autograd has a thread for each GPU
            thread.start()
            thread.join()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [(False, True, True), (True, True, False)]


def _compiled(joined: World, dataset: Dataset, cases: list[dict[str, Any]]) -> list[tuple[float, int, int]]:
    """Return, for each case, the sum of three steps' losses, and how many graphs were captured and generated."""
    counts = []
    for applied in cases:
        counters = torch._dynamo.utils.counters
        counters.clear()
        losses = _losses(dataset, joined, steps=3, compile="default", **applied)
        made = counters["inductor"]["fxgraph_cache_hit"] + counters["inductor"]["fxgraph_cache_miss"]
        counts.append((losses, int(counters["stats"]["unique_graphs"]), made))
    return counts


@pytest.mark.slow
@builds
def test_two_compiled_ranks_have_one_device_s_losses(digits: Dataset) -> None:
    loss = _losses(digits, steps=3)
    for rank in run_ranks(_compiled, digits, [{}, {"gradient_accumulation": 2, "channels_last": True}]):
        for rank_loss, graphs, made in rank:
            assert rank_loss == pytest.approx(loss, rel=1e-4)
            assert (graphs, made) == (1, 2)  # one for the forward and one for the backward pass


class _Changes(nn.Module):
    """Doubles its result if ``doubles`` is set. When ``doubles`` changes, the compiler has to compile again."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.doubles = conv_net(), False

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(images)
        return 2 * logits if self.doubles else logits


@pytest.mark.slow
@builds
def test_compiling_after_the_warm_up_is_a_rejection(digits: Dataset) -> None:
    model, detector = _Changes(), Recompilation()
    training = make_training(digits, model=model, compile="default")
    training.detectors = (detector,)
    training.advance(TRAIN.warmup_steps + 10)
    assert training.clock.first_step_seconds is not None
    assert training.clock.first_step_seconds > 10 * statistics.median(training.clock.step_seconds)
    assert not [*detector.rejections()]
    model.doubles = True
    training.advance(5)
    assert [rejection.code for rejection in detector.rejections()] == ["recompiled"]


@builds
@pytest.mark.parametrize(("how", "part"), [("default", "the model"), ("blocks", "a block")])
def test_a_model_that_is_not_one_graph_is_refused(digits: Dataset, how: str, part: str) -> None:
    model = nn.Sequential(LooksAtValues(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))))
    training = make_training(digits, model=model, compile=how)
    with pytest.raises(PipelineError, match=rf"variants\.tried\.compile: found '{how}', but {part} does not"):
        training.advance(1)


@pytest.mark.slow
@builds
def test_the_measured_ledger_counts_the_memory_of_generated_code(digits: Dataset) -> None:
    peaks = []
    for mode in ("none", "default"):
        training = make_training(digits, compile=mode)
        training.advance(5)
        peaks.append(measured(training, 100 * 2**20))
    plain, compiled = peaks
    assert plain is not None
    assert compiled is not None
    # These are the gradients that exist at the peak.
    assert compiled.gradients_bytes == pytest.approx(plain.gradients_bytes, rel=0.1)
    assert compiled.parameters_bytes == plain.parameters_bytes
    assert 0.2 * plain.activations_bytes < compiled.activations_bytes < 2 * plain.activations_bytes


def _counters(_: World, folder: str) -> dict[str, int]:
    """Compile a net in this new process; return how often the compiler's cache was hit and missed."""
    os.chdir(folder)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.pop(name, None)
    Compile.prepare_process()
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with torch.no_grad():  # otherwise there would be a second graph
        changed(net, [Compile(make_plan(compile="default"), ALONE)])(torch.ones(4, 8))
    return dict(torch._dynamo.utils.counters["inductor"])


@pytest.mark.slow
@builds
def test_a_second_process_finds_the_generated_code(tmp_path: Path) -> None:
    [first], [second] = (run_ranks(_counters, str(tmp_path), size=1) for _ in range(2))
    assert "fxgraph_cache_hit" not in first
    assert first["fxgraph_cache_miss"] == second["fxgraph_cache_hit"] == 1
    assert "fxgraph_cache_miss" not in second
    assert (tmp_path / ".cache" / "inductor" / "fxgraph").is_dir()


def test_compile_is_applied_after_the_parallelism() -> None:
    applied: dict[str, Any] = {"compile": "default", "channels_last": True, "activation_checkpointing": True}
    plan = make_plan(parallelism="ddp", processes=2, communication_hook="fp16", precision="bf16", **applied)
    names = [technique.name for technique in of_plan(plan)]
    assert names == ["channels_last", "activation_checkpointing", "ddp", "fp16_compression", "compile", "bf16"]


def test_what_lacks_to_build_kernels_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    monkeypatch.delenv("CC", raising=False)
    why_not = str(environment.machine().no_cpu_kernels)
    assert "there is no compiler 'no-such-compiler -O2'" in why_not
    assert "apt-get install g++" in why_not
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    machine = environment.machine()
    assert "apt-get install python3-dev" in str(machine.no_cpu_kernels)
    assert machine.no_gpu_kernels is not None
    (tmp_path / "Python.h").touch()
    assert environment.machine().no_cpu_kernels is None
