"""Several hosts, each a helper in the same directory that the prefix ``env`` starts, as if on another machine."""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import psutil
import pytest
import yaml

from pipeline import hosts, results
from pipeline.distributed import WorkerError, forked, launching, world
from pipeline.errors import PipelineError
from pipeline.hosts import allocation, helper, link
from pipeline.params import Config, Launch, parse
from pipeline.training import job
from tests.commands import Command, executable
from tests.conftest import ROOT
from tests.workspaces import CPU_ONLY, PREPARED, enter, variables

T = TypeVar("T")
LAUNCH = {"hosts": ["one", "two"], "on_host": "env", "address": "127.0.0.1"}
PARAMS: dict[str, Any] = {
    "fetch": {"dataset": "digits"},
    "train": {"device": "cpu", "seeds": [0], "epochs": 2, "batch_size": 32, "learning_rate": 0.05},
    "bench": {"max_minutes": 0.01, "window_seconds": 0.1, "max_foreign_load": 1.0},
    "publish": {"live": False},
    "launch": LAUNCH,
    "variants": {"baseline": {}, "ddp": {"parallelism": "ddp"}},
}
PRELOAD = ["pipeline.training.loop"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    return enter(tmp_path, monkeypatch, PARAMS)


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[hosts.Host]]:
    with started_by("env", monkeypatch) as others:
        yield others


@contextmanager
def started_by(on_host: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[hosts.Host]]:
    """Let ``forked`` use two hosts; yield the other one."""
    monkeypatch.setattr(link, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(allocation, "_launch", None)
    monkeypatch.setattr(allocation, "_record", None)
    hosts.use(Launch.model_validate(LAUNCH | {"on_host": on_host}), dict)
    hosts.others.cache_clear()
    yield (others := hosts.others())
    hosts.others.cache_clear()
    for host in others:
        host._process.kill()


def ended(*processes: psutil.Process) -> bool:
    """Wait for at most a minute until the processes have ended."""
    return not psutil.wait_procs(processes, timeout=60)[1]


def until(found: Callable[[], T]) -> T:
    deadline = time.monotonic() + 100
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def ranks_elsewhere(command: Command) -> list[psutil.Process]:
    """Return the helper that the command has started, and its descendants, as soon as a rank is among them."""

    def seen() -> list[psutil.Process]:
        with suppress(psutil.Error):  # one has just ended
            for child in psutil.Process(command.pid).children():
                if child.cmdline()[-1:] == ["host"] and len(below := child.children(recursive=True)) > 2:
                    return [child, *below]
        return []

    return until(seen)


@pytest.mark.parametrize(
    ("of_step", "found", "idle"),
    [
        ({}, ["n2", "n1", "n3"], None),
        ({"SLURM_STEP_ID": "0"}, [platform.node()], "has 3 nodes, but only this one is used"),
    ],
    ids=["batch script", "step"],
)
def test_the_nodes_of_a_batch_script_are_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_step: dict[str, str], found: list[str], idle: str | None
) -> None:
    executable(tmp_path / "scontrol", "#!/bin/sh\nprintf 'n1\\nn2\\nn3\\n'\n")
    of_job = {"SLURMD_NODENAME": "n2", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]"}
    for name, value in (of_job | of_step | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(allocation, "_launch", Launch())
    allocation._scontrol.cache_clear()
    assert hosts.names() == found
    assert hosts.idle_nodes() is None if idle is None else idle in str(hosts.idle_nodes())
    allocation._scontrol.cache_clear()


def test_a_job_without_scontrol_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    of_job = {"SLURMD_NODENAME": "n2", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]", "PATH": ""}
    for name, value in of_job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(allocation, "_launch", Launch())
    with pytest.raises(PipelineError, match=r"scontrol does not answer .* list the nodes there, this one first"):
        hosts.names()


def _about(request: str) -> Generator[Any, Any, None]:
    with world("cpu") as joined:
        number = joined.size
        while number:
            number = yield joined.host, joined.rank, joined.local_rank, joined.gather(request * number)


def test_ranks_of_two_hosts_form_one_world(two_hosts: list[hosts.Host]) -> None:
    with forked(_about, ("x",), 4, preload=PRELOAD, on_hosts=2) as ask:
        places = [("one", 0, 0), ("one", 1, 1), ("two", 2, 0), ("two", 3, 1)]
        assert ask(None) == [(*place, ["xxxx"] * 4) for place in places]
        assert ask(1) == [(*place, ["x"] * 4) for place in places]
    assert not two_hosts[0]._ranks
    with forked(_about, ("y",), 2, preload=PRELOAD, on_hosts=2) as ask:  # by the same helper
        assert [place for place, *_ in ask(None)] == ["one", "two"]


def _wait_for_the_other(how: str) -> Generator[int, Any, None]:
    yield os.getpid()
    if os.environ["RANK"] == "1":
        if how == "fails":
            raise PipelineError("a planted failure")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_a_failure_elsewhere_ends_all_and_names_the_host(two_hosts: list[hosts.Host]) -> None:
    for how, says in (
        ("fails", "^rank 1 on two: a planted failure$"),
        ("is killed", "^rank 1 on two: the process was killed, most likely because"),
    ):  # by the same helper
        with (  # noqa: PT012
            pytest.raises(WorkerError, match=says),
            forked(_wait_for_the_other, (how,), 2, preload=PRELOAD, on_hosts=2) as ask,
        ):
            ranks = [psutil.Process(pid) for pid in ask(None)]
            ask(1)
        assert ended(*ranks)
        assert not two_hosts[0]._ranks


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGKILL, "^rank 1 on two: its helper has ended with exit code -9"),
        (signal.SIGSTOP, "^rank 1 on two: it is silent for 5 s: it hangs, or the network to it is broken"),
    ],
)
def test_a_helper_that_is_lost_ends_all(monkeypatch: pytest.MonkeyPatch, number: int, says: str) -> None:
    monkeypatch.setattr(helper, "LOST_SECONDS", 5.0)  # before the helper is watched
    monkeypatch.setattr(launching, "DEATH_ELSEWHERE_SECONDS", 600.0)  # a death is known at once
    with (  # noqa: PT012
        started_by("env", monkeypatch) as two_hosts,
        pytest.raises(WorkerError, match=says),
        forked(_wait_for_the_other, ("is killed",), 2, preload=PRELOAD, on_hosts=2) as ask,
    ):
        ranks = [psutil.Process(pid) for pid in ask(None)]
        ask.ranks[1][0].join(2 * link.BEAT_SECONDS)  # a beat comes after the answer
        two_hosts[0]._process.send_signal(number)
        until(lambda: two_hosts[0].why_lost)
        ask(1)
    assert ended(*ranks)


SHARDS: dict[str, Any] = {"parallelism": "fsdp", "processes": 4}


@pytest.mark.slow
@pytest.mark.usefixtures("config")
def test_shards_within_a_host_train_as_on_one() -> None:
    config = settings(variants={"baseline": {}, "ddp": SHARDS | {"replicas": "hosts"}})
    apart = Command("train", "ddp", variables=variables())
    output = apart.communicate(100)
    assert apart.returncode == 0, output
    result = results.read(results.result_file("ddp"), config)
    assert (result.hosts, result.world_size) == (2, 4)
    config = settings(variants={"baseline": {}, "ddp": SHARDS | {"replicas": 2}})
    assert trained_alone(config, 4).model_sha256 == result.runs[0].model_sha256


def trained_alone(config: Config, processes: int) -> results.Run:
    """Train ddp on this host, in this process; return the record."""
    job.run(config, "ddp", CPU_ONLY, PREPARED)
    alone = results.read(results.result_file("ddp"), config)
    assert (alone.hosts, alone.world_size) == (1, processes)
    return alone.runs[0]


def settings(**sections: Any) -> Config:
    """Write and return the settings ``PARAMS`` with other ``sections``."""
    params = PARAMS | sections
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    return parse(params)


def longer(**changes: Any) -> Config:
    """Let trainings last until they are stopped."""
    return settings(train=PARAMS["train"] | {"epochs": 2000} | changes)


@pytest.mark.usefixtures("config")
def test_a_killed_command_leaves_nothing_on_other_hosts() -> None:
    longer()
    command = Command("train", "ddp", variables=variables())
    processes = ranks_elsewhere(command)
    os.kill(command.pid, signal.SIGKILL)
    command.communicate(100)
    assert ended(*processes)


@pytest.mark.usefixtures("config")
def test_an_interrupted_training_ends_as_on_one_host() -> None:
    longer(epochs=12)
    command = Command("train", "ddp", variables=variables())
    processes = ranks_elsewhere(command)
    history = results.history_file("ddp")
    until(lambda: history.exists() and len(history.read_text(encoding="utf-8").splitlines()) > 2)
    os.killpg(command.pid, signal.SIGINT)
    output = command.communicate(100)
    assert command.returncode == 130, output
    assert re.search("interrupted after step [0-9]+; run the same command", output)
    assert ended(*processes)
    again = Command("train", "ddp", variables=variables())
    assert "resuming after step" in again.communicate(100)
    config = longer(epochs=12)
    result = results.read(results.result_file("ddp"), config)
    assert (result.hosts, result.world_size, result.runs[0].resumes) == (2, 2, 1)
    shutil.rmtree("models")
    assert trained_alone(config, 2).model_sha256 == result.runs[0].model_sha256


def test_a_host_with_other_settings_or_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    first.mkdir()
    params = PARAMS | {"launch": LAUNCH | {"on_host": f"env -C {tmp_path}/{{host}} OMP_NUM_THREADS=2"}}
    params["train"] = params["train"] | {"model": "own:net"}
    (first / "own.py").write_text("from tests.nets import normed_net as net\n", encoding="utf-8")
    enter(first, monkeypatch, params)
    shutil.copytree(first, second)
    (second / "own.py").write_text("from tests.nets import normed_net as net\n\nMORE = 1\n", encoding="utf-8")
    params["train"] = params["train"] | {"learning_rate": 0.1}
    (second / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    for words in (["environment"], ["train", "ddp"]):
        command = Command(*words, variables=variables())
        output = command.communicate(100)
        assert command.returncode == 2
        assert "differ in 3 values on which its numbers depend" in output
        assert "\ntrain.learning_rate: 0.05 on one, 0.1 on two" in output
        assert '\nenvironment.OMP_NUM_THREADS: "1" on one, "2" on two' in output
        assert re.search(r'\ncode.own.py: "\w+" on one, "\w+" on two', output)
    assert not results.result_file("ddp").exists()


@pytest.mark.usefixtures("config")
def test_a_host_that_sees_another_directory_is_refused(tmp_path: Path) -> None:
    shutil.copytree(tmp_path, other := tmp_path / "other")
    launch = LAUNCH | {"on_host": f"env -C {other}"}
    for place in (tmp_path, other):
        (place / "params.yaml").write_text(yaml.safe_dump(PARAMS | {"launch": launch}), encoding="utf-8")
    command = Command("train", "ddp", variables=variables())
    assert f"error: a file in {tmp_path} of one is not in the directory of two" in command.communicate(100)
    assert command.returncode == 2


@pytest.mark.parametrize(
    ("on_host", "says"),
    [
        ("no-such-program {host}", "launch.on_host: found 'no-such-program {host}', which cannot be run"),
        ("ssh {user}@{host}", "launch.on_host: found"),
        ("ssh '{host}", "launch.on_host: found"),
        ("sh -c 'while echo waiting; do sleep 0.1; done'", "host two: it is silent for 4 s"),
        ("sh -c 'echo \x1epipeline:nonsense; cat'", "host two: its helper's output cannot be read"),
    ],
    ids=["no program", "unknown word", "open quote", "prints for ever", "prints the mark"],
)
def test_a_prefix_that_starts_no_helper_is_refused(on_host: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "ANSWER_SECONDS", 4.0)
    with pytest.raises(PipelineError, match=f"^{re.escape(says)}"), started_by(on_host, monkeypatch):
        pass


@pytest.mark.parametrize("printed", ["no end of line", "pipeline: welcome\\n"])
def test_a_prefix_may_print(printed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with started_by(f'sh -c \'printf "{printed}"; exec "$@"\' sh', monkeypatch) as others:
        assert [host.name for host in others] == ["two"]


def _input_and_spins() -> Generator[Any, Any, None]:
    yield subprocess.run(["cat"], capture_output=True, check=True).stdout, os.environ.get("GOMP_SPINCOUNT")


def test_ranks_elsewhere_have_no_input_and_the_same_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    with (
        started_by("env -u GOMP_SPINCOUNT", monkeypatch),
        forked(_input_and_spins, (), 2, preload=PRELOAD, on_hosts=2) as ask,
    ):
        assert ask(None)[1] == (b"", "7")


@pytest.mark.usefixtures("config")
def test_the_doctor_tries_the_hosts() -> None:
    assert re.search(
        "ok +hosts +one, two have the same settings", Command("doctor", variables=variables()).communicate(100)
    )


@pytest.mark.usefixtures("config")
def test_a_prefix_that_fails_names_the_host() -> None:
    settings(launch=LAUNCH | {"on_host": "false"})
    command = Command("train", "ddp", variables=variables())
    assert "error: host two: its helper has ended with exit code 1" in command.communicate(100)
    assert command.returncode == 2


@pytest.mark.slow
@pytest.mark.usefixtures("config")
def test_the_bench_gives_a_verdict_and_names_the_slow_host() -> None:
    Path("own.py").write_text(
        "import os, time\nfrom tests.nets import conv_net\n\n"
        "def net(**_):\n    model = conv_net()\n"
        "    seconds = 0.02 * (os.environ.get('PIPELINE_HOST') == 'two')\n"
        "    model.register_forward_pre_hook(lambda *_: time.sleep(seconds))\n    return model\n",
        encoding="utf-8",
    )
    settings(train=PARAMS["train"] | {"model": "own:net"})
    for words in (["environment"], ["train", "baseline"], ["train", "ddp"], ["bench"], ["compare"]):
        command = Command(*words, variables=variables())
        output = command.communicate(300)
        assert command.returncode == 0, output
    bench = results.read_bench()
    assert {arm.name: arm.hosts for arm in bench.arms} == {"baseline": 1, "ddp": 2, "baseline, A/A control": 1}
    ddp = bench.arm("variant", "ddp")
    assert ddp
    assert all(sample.samples_per_second for sample in ddp.samples)
    assert bench.session.hosts == ("one", "two")
    page, text = ((results.REPORTS / f"comparison.{kind}").read_text(encoding="utf-8") for kind in ("html", "md"))
    assert "2 processes on 2 hosts over gloo" in page
    assert "The other processes wait for process 1 on two" in page
    assert "The other processes wait for process 1 on two" in text
    assert re.search(r"\*\*ddp\*\*<br>on one \| [0-9.]+\s[KM]iB \| [0-9.,]+\sms \|", text)
    assert re.search(r"\*\*ddp\*\*<br>on two \| [0-9.]+\s[KM]iB \| [0-9.,]+\sms \|", text)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_an_ended_hosts_check_leaves_no_namespace(number: int, code: int) -> None:
    earlier = subprocess.Popen(["true"])
    earlier.wait()
    namespaces = Path("/var/run/netns")
    left = namespaces / f"hosts-check-{earlier.pid}-1"
    if not shutil.which("ip") or subprocess.run(["ip", "netns", "add", left.name], capture_output=True).returncode:
        pytest.skip("needs network namespaces")
    check = subprocess.Popen([sys.executable, "-m", "tests.hosts_kills", "--kills", "1"], cwd=ROOT)
    inside = ["ip", "netns", "pids", f"hosts-check-{check.pid}-2"]
    pids = until(lambda: subprocess.run(inside, capture_output=True, text=True).stdout.split())
    processes = [psutil.Process(int(pid)) for pid in pids]
    assert not left.exists()
    check.send_signal(number)
    assert check.wait(60) == code
    assert ended(*processes)
    assert not list(namespaces.glob(f"hosts-check-{check.pid}-*"))


def test_a_helper_that_nobody_hears_ends_in_silence() -> None:
    """The command was killed between its start and the helper's first word."""
    reader, writer = os.pipe()
    os.close(reader)
    helper = [sys.executable, "-m", "pipeline", "host"]
    ended = subprocess.run(helper, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_connection_that_breaks_is_silence(is_reset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "BEAT_SECONDS", 0.1)
    lost: list[float] = []
    patience = 1.0 if is_reset else 30.0
    ours, theirs = multiprocessing.Pipe()
    watching = Thread(target=link.watch, args=(ours, lost.append, patience))
    watching.start()
    assert theirs.recv_bytes(0) == b""
    if is_reset:  # by what the other end has not read
        theirs.send_bytes(b"")
        assert theirs.poll(5)
    theirs.close()
    watching.join()
    assert lost == [patience] * is_reset
