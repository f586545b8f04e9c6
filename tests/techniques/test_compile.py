from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from pipeline.measurement.detectors.compiler import Recompilation
from pipeline.profiling.ledger import measured
from pipeline.techniques import of_plan
from pipeline.techniques.compile import Compile
from pipeline.training.losses import HostLosses
from tests.nets import ALONE, GPU, LooksAtValues, batch, changed, chosen, conv_net, make_plan, make_step
from tests.ranks import run_ranks
from tests.test_training import TRAIN, make_training, rows_of

ROOT = Path(__file__).parent.parent.parent
HERE = environment.machine()

builds = pytest.mark.skipif(HERE.no_cpu_kernels is not None, reason=str(HERE.no_cpu_kernels))


@builds
def test_the_model_runs_as_one_generated_graph_and_learns_the_same(digits: Dataset) -> None:
    counters = torch._dynamo.utils.counters
    counters.clear()
    plain, compiled = make_training(digits), make_training(digits, compile="default")
    losses = [[row.train_loss for row in rows_of(each.run())] for each in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert counters["stats"]["unique_graphs"] == 1  # only of the training: the evaluations ran the model itself
    made = counters["inductor"]["fxgraph_cache_hit"] + counters["inductor"]["fxgraph_cache_miss"]
    assert made == 2, "one for the forward and one for the backward pass"
    assert not counters["graph_break"]
    assert list(compiled.model_state.read()) == list(plain.model_state.read())


@pytest.mark.slow
@builds
def test_max_autotune_does_without_cuda_graphs_on_a_cpu_and_learns_the_same(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles, asked = torch.compile, []

    def noted(*arguments: Any, options: dict[str, Any], **more: Any) -> Any:
        asked.append(options)
        return compiles(*arguments, options=options, **more)

    monkeypatch.setattr(torch, "compile", noted)
    plain, tuned = make_training(digits), make_training(digits, compile="max-autotune")
    for training in (plain, tuned):
        training.advance(8)
    assert asked == [{"max_autotune": True, "coordinate_descent_tuning": True, "deterministic": False}]
    assert tuned.losses.read_and_reset() == pytest.approx(plain.losses.read_and_reset(), rel=1e-3)


@pytest.mark.gpu("what the compiler makes for it")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("more", [{}, {"precision": "bf16", "channels_last": True}, {"activation_checkpointing": True}])
def test_each_mode_learns_the_same_on_a_gpu(digits: Dataset, mode: str, more: dict[str, Any]) -> None:
    plain, compiled = (
        make_training(digits, GPU, model=conv_net(norm=True), compile=how, **more) for how in ("none", mode)
    )
    replays: list[int] = []
    with _counted_replays(replays):
        losses = [[row.train_loss for row in rows_of(each.run())] for each in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05 if more.get("precision") else 0.01)
    assert bool(replays) is (mode != "default")


@contextmanager
def _counted_replays(replays: list[int]) -> Iterator[None]:
    """Append to ``replays`` whenever a CUDA graph is replayed."""
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(1)
        replay(graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "replay", counted)
        yield


@pytest.mark.slow
@builds
def test_a_deterministic_job_compiles_deterministically_in_the_backward_pass_s_thread_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


@pytest.mark.slow
@builds
@pytest.mark.parametrize(
    "more",
    [
        {"channels_last": True},
        {"gradient_accumulation": 2},
        {"activation_checkpointing": True},
        {"precision": "bf16", "gradient_accumulation": 2, "channels_last": True, "activation_checkpointing": 0.5},
    ],
)
def test_compiling_with_other_techniques_learns_the_same(
    digits: Dataset, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch runs the forward and backward graphs that the compiler would get."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    nets = [conv_net(norm=True) for _ in range(2)]
    plain, compiled = (
        make_training(digits, model=nets[0], **more),
        make_training(digits, model=nets[1], compile="default", **more),
    )
    for training in (plain, compiled):
        training.advance(8)
    found, expected = (training.losses.read_and_reset() for training in (compiled, plain))
    assert found == pytest.approx(expected, rel=0.02 if "precision" in more else 1e-3)
    for name, buffer in nets[0].named_buffers():  # BatchNorm counts a batch once, even if a block is repeated
        torch.testing.assert_close(nets[1].get_buffer(name), buffer, rtol=1e-2, atol=1e-3)


def _steps(joined: World, applied: list[dict[str, Any]]) -> list[tuple[float, int, int]]:
    """Return, for each of ``applied``, the sum of three steps' losses, and the numbers of graphs that the compiler
    captured and generated."""
    found = []
    images, labels = (part.chunk(joined.size)[joined.rank] for part in batch(32))
    for each in applied:
        counters = torch._dynamo.utils.counters
        counters.clear()
        plan = make_plan(parallelism="ddp" if joined.size > 1 else "none", processes=joined.size, **each)
        techniques, net = chosen(plan, joined), conv_net()
        wrapped = changed(net, techniques)
        optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), HostLosses(joined)
        step = make_step(wrapped, techniques, optimizer=optimizer, losses=losses, micro_batches=plan.micro_batches)
        for _ in range(3):
            step(zip(images.chunk(plan.micro_batches), labels.chunk(plan.micro_batches), strict=True))
        made = counters["inductor"]["fxgraph_cache_hit"] + counters["inductor"]["fxgraph_cache_miss"]
        found.append((losses.read_and_reset(), int(counters["stats"]["unique_graphs"]), made))
    return found


@pytest.mark.slow
@builds
def test_two_ranks_compile_under_ddp_and_have_the_losses_of_one_device() -> None:
    applied = [{"compile": "default"}, {"compile": "default", "gradient_accumulation": 2, "channels_last": True}]
    [(loss, _, _)] = _steps(ALONE, [{}])
    for rank in run_ranks(_steps, applied):
        for rank_loss, graphs, made in rank:
            assert rank_loss == pytest.approx(loss, rel=1e-4)
            assert (graphs, made) == (1, 2)  # one for the forward and one for the backward pass


class _Changes(nn.Module):
    """Doubles its result if ``doubles`` is set, for which the compiler has to compile again."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.doubles = conv_net(), False

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(images)
        return 2 * logits if self.doubles else logits


@pytest.mark.slow
@builds
def test_compiling_belongs_to_the_first_step_and_after_the_warm_up_it_is_a_rejection(digits: Dataset) -> None:
    model = _Changes()
    training = make_training(digits, model=model, compile="default")
    detector = Recompilation()
    training.detectors = (detector,)
    training.advance(TRAIN.warmup_steps + 10)
    assert training.clock.first_step_seconds is not None
    assert training.clock.first_step_seconds > 10 * max(training.clock.step_seconds)
    assert not [*detector.rejections()]
    model.doubles = True
    training.advance(5)
    [rejection] = detector.rejections()
    assert "torch.compile compiled for" in rejection.reason


@builds
def test_a_model_that_is_not_one_graph_is_refused(digits: Dataset) -> None:
    training = make_training(digits, model=LooksAtValues(), compile="default")
    with pytest.raises(
        PipelineError, match=r"variants\.tried\.compile: found 'default', but the model does not compile"
    ):
        training.advance(1)


@pytest.mark.slow
@builds
def test_the_measured_ledger_counts_the_memory_of_generated_code(digits: Dataset) -> None:
    plain, compiled = (make_training(digits, compile=mode) for mode in ("none", "default"))
    found = []
    for training in (plain, compiled):
        training.advance(5)
        ledger = measured(training, 100 * 2**20)
        assert ledger is not None
        found.append(ledger)
    # These are the gradients that exist at the peak.
    assert found[1].gradients_bytes == pytest.approx(found[0].gradients_bytes, rel=0.1)
    assert found[1].parameters_bytes == found[0].parameters_bytes
    assert 0.2 * found[0].activations_bytes < found[1].activations_bytes < 2 * found[0].activations_bytes


@pytest.mark.slow
@builds
def test_a_second_process_finds_the_generated_code_in_the_checkout(tmp_path: Path) -> None:
    program = (
        "import json, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import torch\n"
        "from pipeline.techniques.compile import Compile\n"
        "from tests.nets import ALONE, changed, make_plan\n"
        "Compile.prepare_process()\n"
        "net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())\n"
        "with torch.no_grad():\n"  # otherwise there would be a second graph
        "    changed(net, [Compile(make_plan(compile='default'), ALONE)])(torch.ones(4, 8))\n"
        "print(json.dumps(torch._dynamo.utils.counters['inductor']))\n"
    )
    places = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    clean = {name: value for name, value in os.environ.items() if name not in places}
    counts = []
    for _ in range(2):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=tmp_path, env=clean, check=True, capture_output=True, text=True)
        counts.append(json.loads(done.stdout.splitlines()[-1]))
    assert "fxgraph_cache_hit" not in counts[0]
    assert counts[0]["fxgraph_cache_miss"] == counts[1]["fxgraph_cache_hit"] == 1
    assert "fxgraph_cache_miss" not in counts[1]
    assert (tmp_path / ".cache" / "inductor" / "fxgraph").is_dir()


def test_compile_is_applied_after_the_parallelism() -> None:
    applied: dict[str, Any] = {"compile": "default", "channels_last": True, "activation_checkpointing": True}
    plan = make_plan(parallelism="ddp", processes=2, communication_hook="fp16", precision="bf16", **applied)
    names = [technique.name for technique in of_plan(plan)]
    assert names == ["channels_last", "activation_checkpointing", "ddp", "fp16_compression", "compile", "bf16"]


def test_what_the_machine_lacks_to_build_kernels_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    monkeypatch.delenv("CC", raising=False)
    found = environment.machine()
    assert found.no_cpu_kernels is not None
    assert "there is no compiler 'no-such-compiler -O2'" in found.no_cpu_kernels
    assert "apt-get install g++" in found.no_cpu_kernels
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    found = environment.machine()
    assert found.no_cpu_kernels is not None
    assert "apt-get install python3-dev" in found.no_cpu_kernels
    assert found.no_gpu_kernels is not None
    (tmp_path / "Python.h").touch()
    assert environment.machine().no_cpu_kernels is None
