"""Hosts that an agent reaches, such as pods; here an agent in the same directory of this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Client
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
import yaml

from pipeline import hosts, results
from pipeline.errors import PipelineError
from pipeline.hosts import allocation, link
from pipeline.params import Launch, parse
from pipeline.tools import agents
from pipeline.training import job
from tests.commands import Command
from tests.test_hosts import PARAMS, ended, until
from tests.workspaces import CPU_ONLY, PREPARED, enter, variables

JOB = PARAMS | {"launch": {"address": "127.0.0.1"}}
PYTHON = [sys.executable, "-m", "pipeline"]


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Enter a directory with a job, and start an agent there; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "key").write_bytes(b"0123456789abcdef")
    monkeypatch.setenv(agents.KEY_FILE, str(tmp_path / "key"))
    monkeypatch.setenv(allocation.PODS, f"{socket.gethostname()} {address}")
    enter(tmp_path, monkeypatch, JOB)
    process = subprocess.Popen([*PYTHON, "host", "--listen", address], cwd="/", env=variables())
    yield address
    process.terminate()
    process.wait()


def on(address: str, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PYTHON, "host", "--on", address, *words], capture_output=True, text=True, timeout=100, **more
    )


def test_a_command_runs_where_the_agent_is(agent: str, tmp_path: Path) -> None:
    text = "a" * 1_000_000
    done = on(agent, "sh", "-c", "pwd; cat", input=text)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}\n{text}")


@pytest.mark.parametrize("program", ["true", "no-such-program"])
def test_a_command_that_ends_early_is_a_failure(program: str, agent: str) -> None:
    with subprocess.Popen([*PYTHON, "host", "--on", agent, program], stdin=subprocess.PIPE) as process:
        assert process.wait(100) == 1


def test_another_key_is_refused(agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong").write_bytes(b"0123456789abcdeF")
    monkeypatch.setenv(agents.KEY_FILE, str(tmp_path / "wrong"))
    done = on(agent, "touch", "ran", input="")
    assert done.returncode == 2
    assert f"the agent of {agent} has another key" in done.stderr
    assert not Path("ran").exists()


@pytest.mark.parametrize(("content", "says"), [(None, "; found ''"), (b"short", "; found '.*key'")])
def test_a_key_is_needed(content: bytes | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(agents.KEY_FILE, raising=False)
    if content:
        (tmp_path / "key").write_bytes(content)
        monkeypatch.setenv(agents.KEY_FILE, str(tmp_path / "key"))
    with pytest.raises(PipelineError, match=says):
        agents.listen("127.0.0.1:1")


def test_a_silent_stranger_delays_nobody(agent: str) -> None:
    def connected() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(agent.partition(":")[2]))) == 0

    until(connected)
    with socket.create_connection(("127.0.0.1", int(agent.partition(":")[2]))):
        assert on(agent, "true", input="").returncode in (0, 1)


def test_a_silent_stranger_delays_no_sign_of_life() -> None:
    server, key, lost = socket.create_server(("127.0.0.1", 0)), b"key", list[float]()
    here = server.getsockname()
    with socket.create_connection(here):
        greet = partial(link.watch, lose=lost.append, patience_seconds=60.0)
        Thread(target=link.accept, args=(server, key, greet), daemon=True).start()

        def connect() -> None:
            with Client(here, authkey=key) as connection:
                connection.recv_bytes(0)

        helper = Thread(target=connect, daemon=True)
        helper.start()
        helper.join(60)
        assert not helper.is_alive()


def test_pods_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(allocation.PODS, "a-first-0-0.a a-others-0-0.a")
    monkeypatch.setattr(allocation, "_launch", Launch())
    assert hosts.names() == ["a-first-0-0.a", "a-others-0-0.a"]
    assert allocation.on_host().endswith(" -m pipeline host --on {host}")
    monkeypatch.setattr(allocation, "_launch", Launch(hosts=["one"]))
    assert (hosts.names(), allocation.on_host()) == (["one"], Launch().on_host)


@pytest.mark.usefixtures("agent")
def test_weights_equal_those_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["environment"], ["train", "ddp"]):
        command = Command(*words, variables=variables())
        output = command.communicate(300)
        assert command.returncode == 0, output
    monkeypatch.delenv(allocation.PODS)
    config = parse(JOB)
    over_two = results.read(results.result_file("ddp"), config)
    assert (over_two.hosts, over_two.world_size) == (2, 2)
    shutil.rmtree("models")
    job.run(config, "ddp", CPU_ONLY, PREPARED)
    assert results.read(results.result_file("ddp"), config).runs[0].model_sha256 == over_two.runs[0].model_sha256


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["command", "helper"])
def test_a_kill_ends_all(victim: str, agent: str) -> None:
    params = JOB | {"train": PARAMS["train"] | {"epochs": 2000}}
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    command = Command("train", "ddp", variables=variables())

    def ranks() -> list[psutil.Process]:
        helpers = [
            process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == [*PYTHON, "host"]
        ]
        mine = [helper for helper in helpers if helper.cwd() == str(Path.cwd())]
        return [*mine, *below] if mine and len(below := mine[0].children(recursive=True)) > 2 else []

    helper, *below = until(ranks)
    os.kill(command.pid if victim == "command" else helper.pid, signal.SIGKILL)
    output = command.communicate(300)
    assert ended(helper, *below)
    if victim == "helper":
        assert f"rank 1 on {agent}: its helper has ended" in output
