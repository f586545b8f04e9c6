"""Ranks that another launcher started, on hosts that have a checkout each: what they run must be the same."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipeline import results
from pipeline.data import packing
from pipeline.distributed import WorkerError, World, meeting
from pipeline.errors import PipelineError
from pipeline.hosts import refuse_differences
from pipeline.params import parse
from pipeline.training import job
from tests.commands import Command
from tests.conftest import ROOT
from tests.ranks import run_ranks
from tests.servers import LO
from tests.workspaces import CPU_ONLY, PREPARED, RAW, enter

PARAMS: dict[str, Any] = {
    "fetch": {"dataset": "digits"},
    "train": {"device": "cpu", "seeds": [0], "epochs": 1, "batch_size": 32, "model": "own:net"},
    "publish": {"live": False},
    "variants": {"baseline": {}, "ddp": {"parallelism": "ddp"}},
}
OWN = "from tests.nets import normed_net\n\n\ndef net(**data):\n    return normed_net(**data)\n"
HOST = platform.node()


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two checkouts with the same settings, data and model."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    (first / "own.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(first)
    enter(first, monkeypatch, PARAMS)
    shutil.copytree(first, second)
    return first, second


def change(host: Path, **sections: dict[str, Any]) -> None:
    params = PARAMS | {name: PARAMS.get(name, {}) | values for name, values in sections.items()}
    (host / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")


def port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def begin() -> None:
    """Do what a new process would do, whose torch was not loaded before."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    meeting.LOST_SECONDS = int(os.environ.get("TEST_LOST_SECONDS", meeting.LOST_SECONDS))


def trained(
    hosts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, command: str = "train", **of_second: str
) -> list[tuple[int | None, str]]:
    """Run the command on both hosts, as a scheduler does; return each rank's exit code and output.

    ``of_second``: variables of the second host.
    """
    meet, ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port()}, []
    for rank, host in enumerate(hosts):
        own = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": LO}
        path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{host}"}
        monkeypatch.chdir(host)
        variables = os.environ | meet | own | path | (of_second if rank else {})
        ranks.append(Command(command, "ddp", variables=variables, first=begin))
    monkeypatch.chdir(hosts[0])
    outputs = [rank.communicate(timeout=100) for rank in ranks]
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


@pytest.mark.slow
def test_equal_hosts_train_as_one_host_does(hosts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [code for code, _ in trained(hosts, monkeypatch)] == [0, 0]
    config = parse(PARAMS)
    apart = results.read(results.result_file("ddp"), config).runs[0].model_sha256
    job.run(config, "ddp", CPU_ONLY, PREPARED)
    assert results.read(results.result_file("ddp"), config).runs[0].model_sha256 == apart


def test_differences_between_hosts_are_refused(hosts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    train = {"learning_rate": 0.05, "seeds": [0, 1]}
    change(hosts[1], train=train, variants={"ddp": {"parallelism": "ddp", "static_graph": True}})
    (hosts[1] / "own.py").write_text(f"{OWN}\n\nMORE = 1\n", encoding="utf-8")
    packing.prepare(parse(PARAMS | {"prepare": {"train_limit": 1000}}), hosts[1] / RAW, hosts[1] / PREPARED)
    for code, output in trained(hosts, monkeypatch, OMP_NUM_THREADS="2"):
        assert code == 2
        listed = output.partition("error: the ranks of this job differ in 7 values on which its numbers depend.")[2]
        digest = r'"\w{16,64}"'
        values = {
            r"code\.own\.py": (digest, digest),
            r"data\.sha256": (digest, digest),
            r"environment\.OMP_NUM_THREADS": ('"1"', '"2"'),
            "threads": ("1", "2"),
            r"train\.learning_rate": (r"0\.1", r"0\.05"),
            r"train\.seeds\.1": ("nothing", "1"),
            r"variants\.ddp\.applied\.static_graph": ("false", "true"),
        }
        lines = [
            rf"{field}: {mine} on {HOST} \(rank 0\), {theirs} on {HOST} \(rank 1\)"
            for field, (mine, theirs) in values.items()
        ]
        assert re.fullmatch("\n".join(lines), listed.strip().partition("\n")[2]), listed
    assert not results.result_file("ddp").exists()


def test_profiled_hosts_take_the_same_steps(hosts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    change(hosts[1], profile={"steps": 3})
    for code, output in trained(hosts, monkeypatch, "profile"):
        assert code == 2
        assert "\nsteps: 10 on" in output


@pytest.mark.parametrize(
    ("failing", "how", "says"),
    [
        (1, "raise RuntimeError", rf"error: rank 1 on {HOST} ended before it joined the others; its output says why"),
        (1, "os.kill(os.getpid(), 9)", rf"error: rank 1 on {HOST} ended before it joined the others"),
        (0, "sys.exit(1)", "error: the host of rank 0 ended before all ranks met"),
    ],
)
def test_an_early_end_of_a_rank_ends_all(
    hosts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, failing: int, how: str, says: str
) -> None:
    (hosts[failing] / "own.py").write_text(f"import os, sys\n\n{how}\n", encoding="utf-8")
    monkeypatch.setenv("TEST_LOST_SECONDS", "2")
    ranks = trained(hosts, monkeypatch)
    assert ranks[failing][0] != 0
    code, output = ranks[1 - failing]
    assert code == 2
    assert says in output


def _compared(joined: World) -> None:
    joined.check_same(teacher_weights="same")
    joined.check_same(teacher_weights=joined.rank)


def test_a_late_difference_of_long_values_is_refused() -> None:
    ours = {"gpus": [{"watts": 700}] * 8, "text": "a" * 200, "same": []}
    theirs = ours | {"gpus": [*ours["gpus"][:7], {"watts": 300}], "text": "a" * 199 + "b"}
    refuse_differences([("one", ours), ("two", dict(ours))])
    with pytest.raises(PipelineError, match=r"differ in 2 values") as refused:
        refuse_differences([("one", ours), ("two", theirs)])
    assert "gpus.7.watts: 700 on one, 300 on two" in str(refused.value)


def test_joined_ranks_can_compare_more() -> None:
    with pytest.raises(WorkerError, match=r"teacher_weights: 0 on .* \(rank 0\), 1 on .* \(rank 1\)"):
        run_ranks(_compared)


@pytest.mark.slow
def test_torchrun_on_two_hosts_names_the_difference(hosts: tuple[Path, Path]) -> None:
    change(hosts[1], train={"learning_rate": 0.05})
    agents, meet = [], port()
    for rank, host in enumerate(hosts):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        where = ["--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", meet]
        command = [*torchrun, *where, "-m", "pipeline", "train", "ddp"]
        variables = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{host}", "GLOO_SOCKET_IFNAME": LO}
        agents.append(
            subprocess.Popen(
                command, cwd=host, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    for agent in agents:
        output, _ = agent.communicate(timeout=100)
        assert agent.returncode != 0
        assert f"train.learning_rate: 0.1 on {HOST} (rank 0), 0.05 on {HOST} (rank 1)" in output
