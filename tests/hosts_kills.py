"""Kill parts of trainings over two network namespaces (``tests.hosts_check``) at random instants. Needs root.

    python -m tests.hosts_kills --kills 10 --seed 1

First checks that a training over both hosts gives the weights of one host, also if an agent starts the helper. Then
kills the command, the helper or a rank, each time in the training that goes on where the last kill ended it: everything
must end on both hosts, and the weights must be those of a training without a kill.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

from pipeline import results
from tests.hosts_check import FIRST, HOSTS, MOST_SECONDS, PARAMS, ROOT, SECOND, begun, between_hosts, trained

ORPHAN_SECONDS = 20.0
"""How long a process may outlive its command."""


def trained_by_agent() -> results.Run:
    """Return the record of a training in which an agent starts the helper, as in pods."""
    Path("key").write_bytes(os.urandom(32))
    variables = {"PIPELINE_KEY_FILE": "key", "PIPELINE_PODS": f"{FIRST} 10.77.0.2"}
    os.environ.update(variables)
    prefix = PARAMS["launch"]["on_host"].format(host=SECOND).split()
    command = [*prefix, sys.executable, "-m", "pipeline", "host", "--listen", "10.77.0.2"]
    agent = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    launch, PARAMS["launch"] = PARAMS["launch"], {}
    try:
        return trained()
    finally:
        agent.kill()
        agent.wait()
        PARAMS["launch"] = launch
        for name in variables:
            del os.environ[name]


def check_weights() -> None:
    """Check that a training over both hosts has the weights of one host, also if an agent starts the helper."""
    over_two, by_agent = trained(), trained_by_agent()
    launch, PARAMS["launch"] = PARAMS["launch"], {}
    alone = trained()
    PARAMS["launch"] = launch
    assert len({run.model_sha256 for run in (over_two, by_agent, alone)}) == 1, "weights differ from those of one host"
    print("equal weights on one host, on two, and on two with an agent", flush=True)


def processes(victim: str) -> list[psutil.Process]:
    """Return the processes of a kind that run on either host: the command, the helper, the ranks, or "any"."""
    matching, networks = [], {Path("/var/run/netns", host).stat().st_ino for host in HOSTS}
    for process in psutil.process_iter():
        with suppress(OSError, psutil.NoSuchProcess):  # it has just ended
            if Path(f"/proc/{process.pid}/ns/net").stat().st_ino not in networks:
                continue
            words, parent = process.cmdline(), process.parent()
            kind = {"ddp": "command", "host": "helper"}.get(words[-1] if words else "")
            if parent and any("forkserver" in word for word in parent.cmdline()):
                kind = "rank"
            if victim in (kind, "any") and process.status() != psutil.STATUS_ZOMBIE:
                matching.append(process)
    return matching


def struck(victim: str, delay_seconds: float, command: subprocess.Popen[str], chance: random.Random) -> bool:
    """Kill a ``victim`` after ``delay_seconds``, or once there is one. Return False if the command ended first."""
    with suppress(subprocess.TimeoutExpired):
        command.wait(delay_seconds)
    while command.poll() is None:
        if running := processes(victim):
            chance.choice(running).kill()
            return True
    return False


def check_kills(kills: int, seed: int) -> None:
    """Kill parts of trainings ``kills`` times. Raises AssertionError if a training hangs, leaves a process behind,
    shows a traceback or ends with other weights."""
    of_training, chance = {"epochs": 12, "checkpoint_every_steps": 20}, random.Random(seed)
    began = time.monotonic()
    whole = trained(**of_training).model_sha256
    seconds, tried, slowest = time.monotonic() - began, Counter[str](), 0.0
    while tried.total() < kills:
        shutil.rmtree("models")
        done = False
        while not done:
            victim = chance.choice(["command", "helper", "rank"]) if tried.total() < kills else ""
            began = time.monotonic()
            config, command = begun("train", "ddp", **of_training)
            hit = bool(victim) and struck(victim, chance.uniform(0, seconds), command, chance)
            since = time.monotonic()
            try:
                output, _ = command.communicate(timeout=MOST_SECONDS if hit else None)
            except subprocess.TimeoutExpired as hung:
                raise AssertionError(f"seed {seed}, {victim}: {processes('any')} hang: {hung.stdout!r}") from None
            if done := command.returncode == 0:
                seconds = min(seconds, time.monotonic() - began)  # a machine may be less busy than it was
                continue
            about = f"seed {seed}, kill {tried.total() + 1} ({victim}): {output}"
            assert hit, about
            assert victim == "command" or (command.returncode == 2 and "error: " in output), about
            assert "Traceback" not in output, about
            while left := processes("any"):
                assert time.monotonic() - since < ORPHAN_SECONDS, f"left behind: {left}, {about}"
            slowest = max(slowest, time.monotonic() - since)
            tried[victim] += 1
            print(f"kill {tried.total()}: {victim}, after {output.count('epoch ')} epochs", flush=True)
        assert results.read(results.result_file("ddp"), config).runs[0].model_sha256 == whole, "other weights"
    print(f"killed, with the same weights in the end: {dict(tried)}; all ended within {slowest:.1f} s")


def check(kills: int, seed: int) -> None:
    check_weights()
    check_kills(kills, seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.hosts_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the kills; default: the time")
    arguments = parser.parse_args()
    sys.exit(between_hosts(functools.partial(check, arguments.kills, arguments.seed)))
