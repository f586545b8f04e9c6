"""Kill jobs on the digits at random instants, run them again, and count what held.

    python -m tests.chaos --minutes 60 --seed 1

A job is killed up to four times before it may end. After each kill nothing of it may run on for more than 20 seconds, a
job of which only a part was killed has to end within 60, and no file may stand half-written under its final name. In
the end its weights have to be those of the job that nobody killed, to the bit. The counts are added to
benchmarks/figures/chaos.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import chdir, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from pipeline import files, results
from pipeline.params import parse
from tests.commands import Command
from tests.workspaces import furnish

ROOT = Path(__file__).parent.parent
COUNTS = ROOT / "benchmarks" / "figures" / "chaos.json"
ORPHAN_SECONDS, HANG_SECONDS, JOB_SECONDS = 20.0, 60.0, 300.0

PARAMS: dict[str, Any] = {
    "fetch": {"dataset": "digits"},
    "train": {
        "device": "cpu",
        "seeds": [0],
        "epochs": 2,
        "batch_size": 32,
        "learning_rate": 0.05,
        "checkpoint_every_steps": 10,
        "history_every_steps": 10,
    },
    "bench": {"max_rounds": 1, "window_seconds": 0.05},
    "variants": {
        "baseline": {},
        "ddp": {"parallelism": "ddp"},
        "fsdp": {"parallelism": "fsdp"},
        "memory": {"channels_last": True, "activation_checkpointing": True, "gradient_accumulation": 4},
    },
}
JOBS = (*PARAMS["variants"], "bench")
RANKS = {"ddp": 2, "fsdp": 2}

VICTIMS = dict.fromkeys((*RANKS, "bench"), ("launcher", "rank", "all"))
"""Job -> which of its processes; of the others, which are one process, the launcher."""
MOMENTS = {
    "init_process_group": ("rendezvous", 1),
    "keep": ("a checkpoint's write", 9),
    "fsync": ("a file's way to the disk", 16),
    "replace": ("a rename", 16),
    "evaluate": ("evaluation", 2),
    "append_history": ("a row of history", 9),
    "write_text": ("a result", 2),
    "turn": ("a turn of the bench", 8),
}
"""Function -> what a process does in it, and how often, at least. Those of ``os`` among them."""

HOOK = """
import json, os, signal, sys, threading
KILL = json.loads(os.environ.get("KILL", "null"))

def strike():
    if KILL["victim"] == "rank":
        os.kill(os.getpid(), signal.SIGKILL)
    (os.kill if KILL["victim"] == "launcher" else os.killpg)(os.getsid(0), signal.SIGKILL)

def look(frame, event, argument):
    if event == "call":
        name = frame.f_code.co_name
    elif event == "c_call" and getattr(argument, "__module__", None) == "posix":
        name = argument.__name__
    else:
        return
    if name == KILL["function"] and os.environ.get("RANK", "0") == KILL["rank"]:
        KILL["nth"] -= 1
        if KILL["nth"] == 0:
            threading.Timer(KILL["delay_seconds"], strike).start() if KILL["delay_seconds"] else strike()

if KILL and KILL["function"] and "follow" not in sys.orig_argv:
    if __name__ == "sitecustomize" and any("forkserver" in each for each in sys.orig_argv):
        os.register_at_fork(after_in_child=lambda: sys.setprofile(look))  # its imports would take three times as long
    else:
        sys.setprofile(look)
"""
"""As sitecustomize.py: kills from within, at the n-th call of a function, or shortly after it began."""


@dataclass(frozen=True)
class Kill:
    victim: str
    function: str
    """The n-th call of it is the moment; empty: the clock says."""
    nth: int
    rank: str
    """The one that counts the calls, and the victim, if that is a rank."""
    delay_seconds: float
    """From the call, or from the start."""

    @property
    def moment(self) -> str:
        return MOMENTS[self.function][0] if self.function else "any instant"


class Broken(Exception):
    """What did not hold."""


def drawn(chance: random.Random, job: str, seconds: float) -> Kill:
    """A kill of a job that takes ``seconds``."""
    functions = ["turn"] if job == "bench" else [*MOMENTS][job not in RANKS : -1]
    function = chance.choice([*functions, "", ""])
    victims = VICTIMS.get(job, ("launcher",))
    return Kill(
        chance.choice(victims if function or job == "bench" else (*victims, "mirror")),
        function,
        nth=chance.randint(1, MOMENTS[function][1]) if function else 0,
        rank=str(chance.randrange(RANKS.get(job, 1))) if function in ("init_process_group", "evaluate") else "0",
        delay_seconds=chance.choice((0.0, chance.uniform(0, 0.02))) if function else chance.uniform(0, seconds),
    )


def started(job: str, kill: Kill | None) -> Command:
    params = PARAMS | {"publish": {"live": kill is not None and kill.victim == "mirror"}}
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    variables = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path.cwd()}"}
    if kill:
        variables["KILL"] = json.dumps(asdict(kill))
    return Command(*(["bench"] if job == "bench" else ["train", job]), variables=variables)


def session(leader: int) -> list[psutil.Process]:
    """The processes of the session that ``leader`` began, wherever they hang in the tree by now."""
    members = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if os.getsid(pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def struck(command: Command, kill: Kill) -> bool:
    """Kill from outside, at the instant that the clock says; False if the job ended before."""
    time.sleep(kill.delay_seconds)
    while command.poll() is None:
        found = list(_victims(command.pid, kill))
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if found:
            return True
        time.sleep(0.005)
    return False


def _victims(leader: int, kill: Kill) -> Iterator[psutil.Process]:
    if kill.victim == "launcher":
        yield psutil.Process(leader)
        return
    ranks = []
    for process in session(leader):
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if kill.victim == "all" or (kill.victim == "mirror" and "follow" in words):
                yield process
            elif any("forkserver" in word for word in words) and process.ppid() != leader:
                ranks.append(process)
    if kill.victim == "rank":
        yield from ranks[:1]


def endured(job: str, kill: Kill, seconds: float) -> bool:
    """Start the job, which takes ``seconds``, kill, and see how it ends; False if it did before. Raises Broken."""
    command = started(job, kill)
    hit = bool(kill.function) or struck(command, kill)
    limit = HANG_SECONDS + (4 * seconds if kill.function or kill.victim == "mirror" else 0)
    try:
        output = command.communicate(limit)
    except AssertionError:
        raise Broken(f"still at work {limit:.0f} s later") from None
    finally:
        left = ended(command.pid)
    if left:
        raise Broken(f"left behind: {left}")
    if kill.victim == "mirror" and command.returncode:
        raise Broken(f"ended with {command.returncode}: {output[-1000:]}")
    if command.returncode == 0:
        return hit and kill.victim == "mirror"
    if (code := command.returncode or 0) > 0 and (code != 2 or "error: " not in output or "Traceback" in output):
        raise Broken(f"ended with {code}: {output[-1000:]}")
    return True


def ended(leader: int) -> list[str]:
    """What of the session still ran when its time was over, and was killed then."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while (left := session(leader)) and time.monotonic() < deadline:
        time.sleep(0.02)
    told = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            told.append(" ".join(process.cmdline()))
            process.kill()
    return told


def assert_whole(folder: Path) -> None:
    """That each file there is none, or whole; but for a row of history that is being added, which its job rewrites."""
    for file in folder.rglob("*"):
        try:
            if file.suffix == ".json":
                json.loads(file.read_bytes())
            elif file.suffix in (".pt", ".before"):
                with zipfile.ZipFile(file) as written:
                    assert written.testzip() is None
        except (ValueError, AssertionError, zipfile.BadZipFile) as error:
            raise Broken(f"{file.relative_to(folder)} is half-written: {error!r}") from None


def complete(job: str) -> None:
    """Run the job to its end. Raises Broken."""
    command = started(job, None)
    output = command.communicate(JOB_SECONDS)
    if command.returncode:
        raise Broken(f"ended with {command.returncode}: {output[-2000:]}")


def outcome(job: str) -> Any:
    """What the job has to leave, whatever happened to it. Raises Broken."""
    if job == "bench":
        return sorted(arm.name for arm in results.read_bench().arms)
    if kept := [file for file in Path("checkpoints", job).iterdir() if file.suffix != ".partial"]:
        raise Broken(f"checkpoints of a job that is done: {kept}")
    runs = results.read(results.result_file(job), parse(PARAMS)).runs
    rows = results.read_history(results.history_file(job))
    return [(run.model_sha256, run.test_loss, run.train_loss) for run in runs], [(row.seed, row.step) for row in rows]


def forget(job: str) -> None:
    """Let the job begin anew."""
    for file in (results.BENCH_FILE, results.result_file(job), results.history_file(job)):
        file.unlink(missing_ok=True)
    for file in (*results.MODELS.rglob("*.pt"), *Path("checkpoints").rglob("seed-*")):
        file.unlink()


def trials(seed: int, jobs: Sequence[str], minutes: float, rounds: int | None = None) -> Iterator[dict[str, Any]]:
    """Kill ``jobs`` in turn until the time is over, or so many rounds are; of each what was tried and what broke. To be
    called in an empty directory, which it furnishes."""
    over, chance = time.monotonic() + 60 * minutes, random.Random(seed)
    Path("sitecustomize.py").write_text(HOOK, encoding="utf-8")
    furnish(parse(PARAMS))
    expected, seconds = {}, {}
    for job in itertools.chain.from_iterable(itertools.repeat(jobs) if rounds is None else [jobs] * rounds):
        if time.monotonic() > over:
            break
        if job not in expected:
            began = time.monotonic()
            complete(job)
            expected[job], seconds[job] = outcome(job), time.monotonic() - began
        forget(job)
        suffered: list[Kill] = []
        broken = []
        try:
            for _ in range(chance.randint(1, 4)):
                suffered.append(drawn(chance, job, seconds[job]))
                if not endured(job, suffered[-1], seconds[job]):
                    suffered.pop()
                    break
                assert_whole(Path.cwd())
            else:
                complete(job)
            if (found := outcome(job)) != expected[job]:
                raise Broken(f"expected {expected[job]}, found {found}")
        except Broken as error:
            broken.append(f"seed {seed}, {job}, {suffered}: {error}")
        tried = Counter({"jobs": 1, "kills": len(suffered)})
        for kill in suffered:
            tried.update((f"job: {job}", f"victim: {kill.victim}", f"moment: {kill.moment}"))
        yield {"tried": tried, "broken": broken}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="what is killed when; none: another each time"
    )
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.forked"])
    os.environ["PYTHONPATH"] = str(ROOT)
    broken = 0
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for found in trials(arguments.seed, JOBS, arguments.minutes):
            known = json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {"tried": {}, "broken": []}
            tried = dict(sorted((Counter(known["tried"]) + found["tried"]).items()))
            content = {"tried": tried, "broken": known["broken"] + found["broken"]}
            files.write_text(COUNTS, json.dumps(content, indent=1) + "\n")
            print(dict(found["tried"]), *found["broken"], flush=True)
            broken += len(found["broken"])
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
