"""Kill jobs on the digits at random instants, run them again, and count the kills and the failed checks.

    python -m tests.chaos --minutes 60 --seed 1

Two jobs run at a time. Each is killed up to eight times before it may end. The command of a killed job must not hang,
and no process of the job may still run 20 seconds after the command's end. No JSON file, array or checkpoint may be
half-written under its final name. The final weights of a training must equal, bit for bit, those of the same job
without a kill. The counts are added to benchmarks/figures/chaos.json.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import itertools
import json
import multiprocessing
import os
import pkgutil
import random
import signal
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from pipeline import environment, files, results
from pipeline.params import parse
from pipeline.processes import end_with_parent
from tests.commands import Command
from tests.workspaces import furnish

ROOT = Path(__file__).parent.parent
COUNTS = ROOT / "benchmarks" / "figures" / "chaos.json"
ORPHAN_SECONDS, HANG_SECONDS, JOB_SECONDS, SOON_SECONDS = 20.0, 60.0, 300.0, 0.02

PARAMS: dict[str, Any] = {
    "fetch": {"dataset": "digits"},
    "train": {
        "device": "cpu",
        "seeds": [0],
        "epochs": 2,
        "batch_size": 128,
        "learning_rate": 0.05,
        "warmup_steps": 2,
        "checkpoint_every_steps": 2,
        "history_every_steps": 2,
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
"""Job -> the victims of a kill; in a job that is not listed here, the launcher. A kill at any instant of a training can
also hit the process that sends figures to MLflow, the "mirror"."""
JOIN, TURN = "torch.distributed.init_process_group", "pipeline.benchmark.server.Server.turn"
MOMENTS = {
    JOIN: ("rendezvous", 1),
    "pipeline.training.checkpoints.keep": ("a checkpoint's write", 3),
    "os.fsync": ("a file's way to the disk", 6),
    "os.replace": ("a rename", 6),
    "pipeline.training.outcomes.evaluate": ("evaluation", 2),
    "pipeline.results.files.append_history": ("a row of history", 3),
    "pipeline.files.write_text": ("a result", 2),
    TURN: ("a turn of the bench", 8),
}
"""Function -> what a process does in it, and the number of the latest call at which a kill may come. The numbers are
small so that one job, which resumes after each kill, can be killed several times."""


@dataclass(frozen=True)
class Kill:
    victim: str
    function: str
    """The kill comes at its ``nth`` call. If empty, the kill comes at a time instead."""
    nth: int
    rank: str
    """The rank whose calls of ``function`` are counted; it is killed if ``victim`` is "rank"."""
    delay_seconds: float
    """The time from the call to the kill; without a function, from the start of the job."""

    @property
    def moment(self) -> str:
        return MOMENTS[self.function][0] if self.delay_seconds <= SOON_SECONDS and self.function else "any instant"


def drawn(chance: random.Random, job: str, seconds: float) -> Kill:
    """Draw a random kill for a job that takes ``seconds``."""
    functions = [TURN] if job == "bench" else [*MOMENTS][job not in RANKS : -1]
    function = chance.choice([*functions, "", ""])
    victims = ("launcher", "all") if function == TURN else VICTIMS.get(job, ("launcher",))
    victim = chance.choice(victims if function or job == "bench" else (*victims, "mirror"))
    soon, later = chance.choice((0.0, chance.uniform(0, SOON_SECONDS))), chance.uniform(0, seconds / 2)
    delay_seconds = soon if function else later
    nth = chance.randint(1, MOMENTS[function][1]) if function else 1
    if victim == "rank" and not function:
        function = JOIN  # the rank's own time begins here
    of_each_rank = function.endswith(("init_process_group", "evaluate"))
    return Kill(victim, function, nth, str(chance.randrange(RANKS.get(job, 1))) if of_each_rank else "0", delay_seconds)


def watch(kill: Kill) -> None:
    """Make the job kill its own processes at the ``nth`` call of the function, or ``delay_seconds`` after that call.

    The launcher calls this before it runs the command. Processes that are forked from it inherit the changed function.
    """
    calls = itertools.count(1)
    home, _, name = kill.function.rpartition(".")
    owner = pkgutil.resolve_name(home)
    wanted = getattr(owner, name)

    def strike() -> None:
        if kill.victim == "rank":
            os.kill(os.getpid(), signal.SIGKILL)
        (os.kill if kill.victim == "launcher" else os.killpg)(os.getsid(0), signal.SIGKILL)

    @functools.wraps(wanted)
    def counting(*arguments: Any, **named: Any) -> Any:
        counts = kill.victim != "rank" or os.getpid() != os.getsid(0)
        if counts and os.environ.get("RANK", "0") == kill.rank and next(calls) == kill.nth:
            timer = threading.Timer(kill.delay_seconds, strike)
            timer.daemon = True  # a job may end before the kill
            timer.start() if kill.delay_seconds else strike()
        return wanted(*arguments, **named)

    for place in (owner, *sys.modules.values()):
        if getattr(place, "__dict__", {}).get(name) is wanted:
            setattr(place, name, counting)


def started(job: str, kill: Kill | None) -> Command:
    params = PARAMS | {"publish": {"live": kill is not None and kill.victim == "mirror"}}
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    first = functools.partial(watch, kill) if kill and kill.function else None
    return Command(*(["bench"] if job == "bench" else ["train", job]), variables=dict(os.environ), first=first)


def session(leader: int) -> list[psutil.Process]:
    """Return the processes of the session that ``leader`` began, wherever they are in the process tree now."""
    members = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(pid) == leader and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def struck(command: Command, kill: Kill) -> bool:
    """Kill the victims from outside after ``delay_seconds``; return False if the job ended before the kill."""
    time.sleep(kill.delay_seconds)
    hit = False
    while command.poll() is None and not hit:
        for process in session(command.pid):
            with suppress(psutil.NoSuchProcess):
                mirror = kill.victim == "mirror" and "follow" in process.cmdline()
                if mirror or kill.victim == "all" or (kill.victim == "launcher" and process.pid == command.pid):
                    process.kill()
                    hit = True
        time.sleep(0.005)
    return hit


def endured(job: str, kill: Kill, seconds: float) -> bool:
    """Start the job, which takes ``seconds``, kill it, and check how it ends; return False if it ended before the
    kill."""
    command = started(job, kill)
    hit = bool(kill.function) or struck(command, kill)
    limit = HANG_SECONDS + (4 * seconds if kill.function or kill.victim == "mirror" else 0)
    try:
        output = command.communicate(limit)
    finally:
        left = ended(command.pid)
    assert not left, f"left behind: {left}"
    code = command.returncode or 0
    refused = code == 2 and "error: " in output and "Traceback" not in output
    assert code == 0 or (kill.victim != "mirror" and (code < 0 or refused)), f"ended with {code}: {output[-1000:]}"
    return code != 0 or (hit and kill.victim == "mirror")


def ended(leader: int) -> list[str]:
    """Wait until the session's processes end; return the command lines of those that run too long, and kill these."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while (left := session(leader)) and time.monotonic() < deadline:
        time.sleep(0.02)
    lines = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            lines.append(" ".join(process.cmdline()))
            process.kill()
    return lines


def assert_whole(folder: Path) -> None:
    """Fail if a JSON file, an array or a checkpoint in the folder is half-written."""
    for file in folder.rglob("*"):
        try:
            if file.suffix == ".json":
                json.loads(file.read_bytes())
            elif file.suffix == ".npy":
                np.load(file, mmap_mode="r")
            elif file.suffix in (".pt", ".before"):
                with zipfile.ZipFile(file) as written:
                    assert written.testzip() is None
        except (ValueError, AssertionError, zipfile.BadZipFile) as error:
            raise AssertionError(f"{file.relative_to(folder)} is half-written: {error!r}") from None


def complete(job: str) -> str:
    """Run the job to its end; return its output."""
    command = started(job, None)
    output = command.communicate(JOB_SECONDS)
    assert not command.returncode, f"ended with {command.returncode}: {output[-2000:]}"
    return output


def outcome(job: str) -> Any:
    """Return those results of the job that no kill may change. Fail if the job left checkpoints behind."""
    if job == "bench":
        return sorted(arm.name for arm in results.read_bench().arms)
    kept = [file for file in Path("checkpoints", job).iterdir() if file.suffix not in (".partial", ".finished")]
    assert not kept, f"checkpoints of a job that is done: {kept}"
    runs = results.read(results.result_file(job), parse(PARAMS)).runs
    rows = results.read_history(results.history_file(job))
    return [(run.model_sha256, run.test_loss, run.train_loss) for run in runs], [(row.seed, row.step) for row in rows]


def forget(job: str) -> None:
    """Delete the job's files, so that it starts from the beginning."""
    for file in (results.BENCH_FILE, results.result_file(job), results.history_file(job)):
        file.unlink(missing_ok=True)
    for file in (*results.MODELS.rglob("*.pt"), *Path("checkpoints").rglob("seed-*")):
        file.unlink()


def trials(seed: int, jobs: Sequence[str], minutes: float, rounds: int | None = None) -> Iterator[dict[str, Any]]:
    """Kill ``jobs`` in turn until ``minutes`` or ``rounds`` are over; yield for each job what was tried and
    which checks failed. Call it in an empty directory, which it furnishes."""
    over, chance = time.monotonic() + 60 * minutes, random.Random(seed)
    furnish(parse(PARAMS))
    environment.ENVIRONMENT_FILE.unlink()  # the first job writes it anew, with the code that it read
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
            for _ in range(chance.randint(1, 8)):
                suffered.append(drawn(chance, job, seconds[job]))
                if not endured(job, suffered[-1], seconds[job]):
                    suffered.pop()
                    break
                assert_whole(Path.cwd())
            else:
                complete(job)
            result = outcome(job)
            assert result == expected[job], f"expected {expected[job]}, found {result}"
        except AssertionError as error:
            broken.append(f"seed {seed}, {job}, {suffered}: {error}")
        tried = Counter({"jobs": 1, "kills": len(suffered)})
        for kill in suffered:
            tried.update((f"job: {job}", f"victim: {kill.victim}", f"moment: {kill.moment}"))
        yield {"tried": tried, "broken": broken}


def side(seed: int, jobs: Sequence[str], minutes: float) -> None:
    """Run ``trials`` in a temporary directory and add the results to the counts. Exits with 1 if a check failed."""
    end_with_parent()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.forked"])
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    broken = 0
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for trial in trials(seed, jobs, minutes):
            with Path(__file__).open() as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                known = json.loads(COUNTS.read_text(encoding="utf-8"))
                tried = dict(sorted((Counter(known["tried"]) + trial["tried"]).items()))
                content = {"tried": tried, "broken": known["broken"] + trial["broken"]}
                files.write_text(COUNTS, json.dumps(content, indent=1) + "\n")
            print(dict(trial["tried"]), *trial["broken"], flush=True)
            broken += len(trial["broken"])
    sys.exit(bool(broken))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the random kills; default: the time")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    sides = [
        multiprocessing.get_context("spawn").Process(
            target=side, args=(arguments.seed + turn, JOBS[turn:] + JOBS[:turn], arguments.minutes)
        )
        for turn in range(2)
    ]
    for worker in sides:
        worker.start()
    for worker in sides:
        worker.join()
    return int(any(side.exitcode for side in sides))


if __name__ == "__main__":
    sys.exit(main())
