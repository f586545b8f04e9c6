"""Kill parts of trainings over two network namespaces (``tests.hosts_check``) at random instants. Needs root.

    python -m tests.hosts_kills --kills 10 --seed 1

First checks that a training over both hosts gives the weights of one host, also if an agent starts the helper. Then
kills the command, the helper or a rank, each time in the training that goes on where the last kill ended it: everything
must end on both hosts, and the weights must be those of a training without a kill.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil

from pipeline import results
from pipeline.params import Config
from tests.hosts_check import FIRST, HOSTS, MOST_SECONDS, PARAMS, ROOT, SECOND, begun, between_hosts, trained

Command = subprocess.Popen[str]
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


Running = Callable[[], Iterable[psutil.Process]]
"""Returns all processes of a training, or more."""


def in_namespaces() -> Iterator[psutil.Process]:
    """Yield the processes of both hosts."""
    networks = {Path("/var/run/netns", host).stat().st_ino for host in HOSTS}
    for process in psutil.process_iter():
        with suppress(OSError):  # it has just ended
            if Path(f"/proc/{process.pid}/ns/net").stat().st_ino in networks:
                yield process


def parts(running: Running, victim: str = "any") -> list[psutil.Process]:
    """Return the processes of a kind: the command, the helper (also its prefix), the ranks, or "any"."""
    matching = []
    for process in running():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            words, parent = process.cmdline(), process.parent()
            kind = {"ddp": "command", "host": "helper"}.get(words[-1] if words else "")
            if parent and any("forkserver" in word for word in parent.cmdline()):
                kind = "rank"
            if victim in (kind, "any") and process.status() != psutil.STATUS_ZOMBIE:
                matching.append(process)
    return matching


def struck(victims: Callable[[], list[psutil.Process]], delay_seconds: float, command: Command, chance: Random) -> bool:
    """Kill a victim after ``delay_seconds``, or once there is one. Return False if the command ended first."""
    with suppress(subprocess.TimeoutExpired):
        command.wait(delay_seconds)
    while command.poll() is None:
        if found := victims():
            with suppress(psutil.NoSuchProcess):  # it has just ended; another is struck
                chance.choice(found).kill()
                return True
    return False


def check_kills(kills: int, seed: int, begin: Callable[[], tuple[Config, Command]], running: Running) -> None:
    """Kill parts of trainings ``kills`` times. ``begin``: begins the training of ddp, or goes on with it.

    Raises AssertionError if a training hangs, leaves a process behind, shows a traceback or ends with other weights.
    """
    chance, seconds, tried, slowest = Random(seed), 0.0, Counter[str](), 0.0
    whole = ""
    """The weights of the first training, which is not killed."""
    while not whole or tried.total() < kills:
        shutil.rmtree("models", ignore_errors=True)
        for start in itertools.count():
            victim = chance.choice(["command", "helper", "rank"]) if whole and tried.total() < kills else ""
            began = time.monotonic()
            config, command = begin()
            delay = chance.uniform(0, seconds)
            hit = bool(victim) and struck(functools.partial(parts, running, victim), delay, command, chance)
            since = time.monotonic()
            try:
                output, _ = command.communicate(timeout=MOST_SECONDS if hit else None)
            except subprocess.TimeoutExpired as hung:
                raise AssertionError(f"seed {seed}, {victim}: {parts(running)} hang: {hung.stdout!r}") from None
            if command.returncode == 0:
                if start == 0:  # a machine may be less busy than it was
                    seconds = min(seconds or math.inf, time.monotonic() - began)
                break
            about = f"seed {seed}, kill {tried.total() + 1} ({victim}): {output}"
            assert hit, about
            assert victim == "command" or (command.returncode > 0 and "error: " in output), about
            assert "Traceback" not in output, about
            while left := parts(running):
                assert time.monotonic() - since < ORPHAN_SECONDS, f"left behind: {left}, {about}"
            slowest = max(slowest, time.monotonic() - since)
            tried[victim] += 1
            print(f"kill {tried.total()}: {victim}, after {output.count('epoch ')} epochs", flush=True)
        weights = results.read(results.result_file("ddp"), config).runs[0].model_sha256
        whole = whole or weights
        assert weights == whole, "other weights"
    print(f"killed, with the same weights in the end: {dict(tried)}; all ended within {slowest:.1f} s")


def check(kills: int, seed: int) -> None:
    check_weights()
    check_kills(kills, seed, lambda: begun("train", "ddp", epochs=12, checkpoint_every_steps=20), in_namespaces)


def drawn(program: str, description: str | None) -> tuple[int, int]:
    """Return the number of kills and the seed of a command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the kills; default: the time")
    arguments = parser.parse_args()
    print(f"{arguments.kills} kills, seed {arguments.seed}", flush=True)
    return arguments.kills, arguments.seed


if __name__ == "__main__":
    sys.exit(between_hosts(functools.partial(check, *drawn("tests.hosts_kills", __doc__))))
