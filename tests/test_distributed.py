from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from pipeline.distributed import WorkerError, World, forked, interruption, launch, launched_size, launching, world
from pipeline.distributed.worlds import STORE
from pipeline.errors import PipelineError
from tests.commands import printed
from tests.ranks import run_ranks


def test_a_process_alone_is_a_world() -> None:
    with world("cpu") as alone:
        assert (alone.rank, alone.size, alone.backend, alone.is_main) == (0, 1, None, True)
        assert not dist.is_initialized()
        assert alone.gather("value") == ["value"]
        assert alone.broadcast("value") == "value"
        assert alone.sum_(torch.tensor(3.0)).item() == 3.0


@pytest.fixture
def as_if_cuda(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make a GPU visible, and let any GPU be selected; return the list that records the selected indices, in order."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    return chosen


@pytest.mark.parametrize(("visible", "local_rank", "taken"), [(1, 0, 0), (1, 3, 0), (4, 3, 3)])
def test_a_rank_takes_its_own_gpu(
    as_if_cuda: list[int], monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, taken: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    with world("cuda") as joined:
        assert joined.device == torch.device("cuda", taken)
    assert as_if_cuda == [taken]


@pytest.mark.parametrize("visible", [0, 2])
def test_a_rank_without_a_gpu_says_so(as_if_cuda: list[int], monkeypatch: pytest.MonkeyPatch, visible: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(PipelineError, match=f"local rank 2 has no GPU: PyTorch sees {visible}"), world("cuda"):
        pass
    assert as_if_cuda == []


def test_two_ranks_on_one_gpu_are_refused(
    as_if_cuda: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise dist.DistBackendError("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, STORE: str(tmp_path / "store")}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(PipelineError, match="rank 1 and another rank of this host were given the same GPU"),
        world("cuda"),
    ):
        pass
    assert as_if_cuda == [0]


@pytest.mark.parametrize("users", [None, ":16:8"])
def test_cublas_is_exact_in_the_world_alone(
    as_if_cuda: list[int],  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    users: str | None,
) -> None:
    if users:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", users)
    with world("cuda"):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (users or ":4096:8")
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == users


def test_launched_size_needs_both_launcher_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched_size() is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched_size() is None
    monkeypatch.setenv("RANK", "3")
    assert launched_size() == 4


def _collectives(joined: World) -> tuple[object, ...]:
    norm = nn.BatchNorm1d(2)
    nn.init.constant_(norm.running_mean, joined.rank + 5.0)  # type: ignore[arg-type]
    joined.broadcast_buffers_(norm)
    return (
        joined.backend,
        joined.is_main,
        joined.gather({"rank": joined.rank}),
        joined.broadcast(f"from {joined.rank}"),
        joined.sum_(torch.tensor([1.0, joined.rank])).tolist(),
        joined.max_(torch.tensor([1.0, -joined.rank])).tolist(),
        norm.running_mean.tolist(),  # type: ignore[union-attr]
        torch.get_num_threads(),
    )


def test_collectives_give_every_rank_the_same() -> None:
    ranks = run_ranks(_collectives, size=2)
    gathered = [{"rank": 0}, {"rank": 1}]
    shared = (gathered, "from 0", [2.0, 1.0], [1.0, 0.0], [5.0, 5.0], 1)
    assert ranks == [("gloo", True, *shared), ("gloo", False, *shared)]


def _in_a_row(joined: World) -> list[int]:
    """Return the number of collectives in which ranks gather an object."""
    names: list[str] = []

    def counted(name: str) -> Any:
        real = getattr(distributed_c10d, name)

        def call(*values: Any, **options: Any) -> Any:
            names.append(name)
            return real(*values, **options)

        return call

    for name in ("broadcast", "all_gather", "all_gather_single"):
        if hasattr(distributed_c10d, name):
            setattr(distributed_c10d, name, counted(name))
    assert joined.gather(str(joined.rank) * joined.rank) == ["", "1", "22"]
    return [len(names)]


def test_objects_are_gathered_in_two_collectives() -> None:
    assert run_ranks(_in_a_row, size=3) == [[2]] * 3


def _large(joined: World) -> tuple[Any, Any, int]:
    """Gather and broadcast tensors; return them and the most bytes that a rank sent as an object."""
    pickled: list[int] = []

    def noted(name: str, place: int) -> Any:
        real = getattr(dist, name)

        def call(*values: Any, **options: Any) -> None:
            pickled.append(len(pickle.dumps(values[place])))
            real(*values, **options)

        return call

    for name, place in (("broadcast_object_list", 0), ("all_gather_object", 1)):
        setattr(dist, name, noted(name, place))
    images = torch.full((8, 4, 32, 32), float(joined.rank)).to(memory_format=torch.channels_last)
    value = {
        "images": images[: 4 + joined.rank].requires_grad_(),
        joined.rank: [torch.tensor(joined.rank), (torch.empty(0, 3), True)],
        "types": [torch.arange(joined.rank, dtype=torch.uint8), torch.ones(3, dtype=torch.bfloat16).expand(2, 3) > 0],
    }
    return joined.gather(value), joined.broadcast(value), max(pickled)


def test_tensors_are_gathered_and_broadcast_unchanged() -> None:
    ranks = run_ranks(_large)
    for gathered, broadcast, pickled in ranks:
        assert pickled < 4096
        for rank, value in [*enumerate(gathered), (0, broadcast)]:
            assert list(value) == ["images", rank, "types"]
            images, (number, (empty, flag)), (small, truth) = value.values()
            assert images.shape == (4 + rank, 4, 32, 32)
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert (images == rank).all()
            assert (number.item(), number.dtype, empty.shape, flag) == (rank, torch.int64, (0, 3), True)
            assert torch.equal(small, torch.arange(rank, dtype=torch.uint8))
            assert torch.equal(truth, torch.ones(2, 3, dtype=torch.bool))


KEPT: list[int] = []
PRELOAD = ("pipeline.training.loop",)


def _note(value: int) -> Generator[Any, Any, None]:
    KEPT.append(value)
    with world("cpu") as joined:
        request = yield joined.rank, joined.size, len(KEPT)
        while request:
            request = yield joined.sum_(torch.tensor(request)).item()
        yield "the end"


def test_forked_processes_are_fresh_and_answer_in_rank_order() -> None:
    for _ in range(2):
        with forked(_note, (7,), 1, preload=PRELOAD) as ask:
            assert ask(None) == [(0, 1, 1)]
    with forked(_note, (7,), 2, preload=PRELOAD) as ask:
        assert ask(None) == [(0, 2, 1), (1, 2, 1)]
        assert [ask(3), ask(5), ask(None)] == [[6, 6], [10, 10], ["the end", "the end"]]
    assert KEPT == []
    assert multiprocessing.active_children() == []


def test_forked_processes_end_with_their_block() -> None:
    with forked(_note, (7,), 2, preload=PRELOAD):
        pass  # the generators are never started
    with forked(_note, (7,), 2, preload=PRELOAD) as ask:
        ask(None)  # the generators have not reached their end
    with pytest.raises(KeyboardInterrupt), forked(_note, (7,), 2, preload=PRELOAD) as ask:  # noqa: PT012
        ask(None)
        raise KeyboardInterrupt
    assert multiprocessing.active_children() == []


def _wait_for_the_lost(how: str) -> Generator[None, Any, None]:
    yield
    if os.environ.get("RANK") == "1":
        if how == "dies":
            os._exit(9)
        if how == "is killed":
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        raise (RuntimeError if how == "breaks" else PipelineError)("a planted failure")
    if how == "is killed":
        raise RuntimeError("Connection reset by peer")
    time.sleep(600)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("fails", "rank 1: a planted failure"),
        ("breaks", "rank 1: Traceback (?s:.*)a planted failure"),
        ("dies", "rank 1: .* ended with exit code 9"),
        ("is killed", "rank 1: .* was killed, most likely because .* out of memory.*lower train.batch_size"),
    ],
)
def test_a_forked_rank_that_fails_ends_the_others(how: str, message: str) -> None:
    with (  # noqa: PT012
        pytest.raises(WorkerError, match=message),
        forked(_wait_for_the_lost, (how,), 2, preload=PRELOAD) as ask,
    ):
        ask(None)
        ask(1)
    assert multiprocessing.active_children() == []


def test_a_rank_that_dies_while_it_answers_is_named() -> None:
    ours, theirs = multiprocessing.Pipe()
    ranks = launching.Ranks()
    ranks.ranks.append((SimpleNamespace(join=lambda _: theirs.close(), exitcode=9), ours))
    os.write(theirs.fileno(), b"\0\0\1\0the answer's begin")
    with socket.socket(fileno=os.dup(theirs.fileno())) as sending:
        sending.shutdown(socket.SHUT_WR)
    with pytest.raises(WorkerError, match="rank 0: the process ended with exit code 9"):
        ranks(None)


def test_the_server_of_forks_ends_with_the_job(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    (tmp_path / "slow.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(note)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    code = "from pipeline.distributed import forked\nwith forked(iter, (), 1, preload=['slow']): pass"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path.cwd())])}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as job:
        while not (note.exists() and note.read_text()):
            time.sleep(0.05)
        server = psutil.Process(int(note.read_text()))
        job.kill()
    server.wait(timeout=60)


def test_a_fork_scans_no_object_of_its_server(tmp_path: Path) -> None:  # the tests' own server freezes its objects
    (tmp_path / "counts.py").write_text(
        "import gc\ndef of_fork():\n    yield gc.get_freeze_count(), len(gc.get_objects())\n"
    )
    code = (
        "import counts; from pipeline.distributed import forked\n"
        "with forked(counts.of_fork, (), 1, preload=['numpy.random', 'counts']) as ask: print(*ask(None)[0])"
    )
    frozen, scanned = map(int, printed(code, PYTHONPATH=str(tmp_path)).split())
    assert frozen > 10_000 > scanned


def _fail_after_joining() -> None:
    with world("cpu") as joined:
        if joined.rank == 1:
            raise PipelineError("the data is not what it was")
        joined.gather(0)  # waits minutes for rank 1, unless ``launch`` ends this rank


def test_launch_ends_all_ranks_and_names_the_first_failure() -> None:
    with pytest.raises(WorkerError, match=r"^rank 1: the data is not what it was$"):
        launch(_fail_after_joining, (), processes=2)


def steps_until_interrupted(world: World, heard_at: list[int], meet_every: int = 1) -> int:
    with interruption(world, max_step_skew=meet_every - 1) as heard:
        for step in range(1, 100):
            if step % meet_every == 0:
                world.sum_(torch.ones(1))
            elif world.is_main:
                time.sleep(0.05)  # so that the other ranks are ahead
            if step == heard_at[world.rank]:
                os.kill(os.getpid(), signal.SIGTERM)
            if heard.agreed():
                assert heard.exit_code == 143
                return step
    return 0


@pytest.mark.parametrize("heard_at", [[3, 3, 3], [2, 9, 5], [9, 2, 2]])
def test_signalled_ranks_end_after_the_same_step(heard_at: list[int]) -> None:
    steps = run_ranks(steps_until_interrupted, heard_at, size=3)
    assert len(set(steps)) == 1
    assert max(heard_at) < steps[0] <= max(heard_at) + 3


def end_while_told_again(world: World) -> str:
    assert steps_until_interrupted(world, [1, 1]) > 0
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    return "ended by itself"


def test_an_ending_rank_ignores_late_signals() -> None:
    assert run_ranks(end_while_told_again) == ["ended by itself"] * 2


@pytest.mark.parametrize("heard_at", [[1, 1], [5, 5], [6, 8]])
def test_ranks_that_meet_seldom_end_together(heard_at: list[int]) -> None:
    first, second = run_ranks(steps_until_interrupted, heard_at, 4)
    assert first == second > max(heard_at)
