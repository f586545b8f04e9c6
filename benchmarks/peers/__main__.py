"""Compare this pipeline with PyTorch Lightning, accelerate, torchvision's reference loop and a textbook loop.

    make peers
    make peers ARGS="--job small-cnn --minutes 15"

A round runs every arm once, each as a whole process. Each round has its own seed, and its own order of the arms. Our
pipeline runs twice, as its own control. New rounds are added to the rounds in ``peers-<machine>.json`` if all were
measured in the same way. The ``.md`` file next to it has a table of all rounds. If a peer is faster,
``--job NAME --why "PEER: reason"`` records the reason and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pipeline.processes import set_openmp_spins

set_openmp_spins(measures=True)  # as in `python -m pipeline`; all arms inherit this

from benchmarks import machines
from benchmarks.pairs import ROOT, Checkout
from benchmarks.peers import table
from benchmarks.peers.job import Job
from benchmarks.peers.table import ACCURACY, BAREST, CONTROL, EPOCH, OURS, SECONDS, STEP
from benchmarks.stages import fashion_mnist, pack, write_images
from pipeline import environment, files
from pipeline.data import prepared

JOBS = {
    "small-cnn": Job("small_cnn", "fashion_mnist", 256),
    "small-cnn-ddp": Job("small_cnn", "fashion_mnist", 256, processes=2),
    "resnet18": Job("resnet18", "image_folder", 64, learning_rate=0.01),
    "resnet18-ddp": Job("resnet18", "image_folder", 64, learning_rate=0.01, processes=2),
    "step": Job("nothing", "ready", 32, epochs=1),
}
AGREEMENT = "agreement"
IMAGES = {"train": 512, "test": 256}
"""Number of images of each split in the ResNet's folder (``write_images``)."""
SYNTHETIC = {"train": 160_000, "test": 320, "shape": [1, 8, 8]}
"""Data of the job "step": so many samples that every step has a new batch."""
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("", {}),
    CONTROL: ("", {}),
    "textbook": ("textbook", {}),
    "textbook, 2 workers": ("textbook", {"workers": 2}),
    "torchvision's reference": ("torchvision_reference", {}),
    "accelerate": ("accelerate_loop", {}),
    "Lightning": ("lightning_trainer", {}),
}
"""Arm -> its module in this package ("": the arm is the pipeline's command), and its changes to the job."""
STEPPED = {
    BAREST: ("step", {"variation": "barest"}),
    OURS: ("step", {"variation": "ours"}),
    CONTROL: ("step", {"variation": "ours"}),
    **{name: TRAINED[name] for name in ("torchvision's reference", "accelerate", "Lightning")},
    "Lightning, barebones": ("lightning_trainer", {"variation": "barebones"}),
}
EPOCH_TOLD = re.compile(r"epoch (\d+)/\d+\b.*test accuracy ([\d.]+)%")
STEP_TOLD = re.compile(r"a step took ([\d.]+) microseconds")


def laid_out(job: Job, folder: Path) -> tuple[Job, Path, float]:
    """Write the job's data; return the job with its data in ``folder``, the prepared data's directory, and the seconds
    that the preparation took."""
    raw, theirs, packed = folder / "listing", folder / "theirs", folder / "packed"
    sections: dict[str, Any] = {}
    if job.data == "ready":
        sections, theirs = {"fetch": {"dataset": "synthetic", "synthetic": SYNTHETIC}}, packed
    elif job.data == "image_folder":
        write_images(prepared.read(fashion_mnist(folder)[1]), theirs, IMAGES)
        sections = {
            "fetch": {"dataset": "image_folder", "image_folder": str(theirs)},
            "prepare": {"image_size": [32, 32]},
        }
    else:
        idx, _ = fashion_mnist(folder)
        raw = idx.parent
        (theirs / "FashionMNIST").mkdir(parents=True)
        (theirs / "FashionMNIST" / "raw").symlink_to(idx)
    seconds = pack(sections, raw, packed)
    return job.of(prepared.read(packed), theirs), packed, seconds


def one_round(job: Job, packed: Path, folder: Path, names: Iterable[str] = ()) -> dict[str, dict[str, float]]:
    """Run all arms, or those in ``names``, once each, in an order drawn from the seed. Return arm -> figures."""
    arms, home = TRAINED, folder / f"checkout-{job.seed}"
    if job.data == "ready":
        arms = STEPPED
    else:
        variants = {"baseline": {}, "ddp": {"parallelism": "ddp", "processes": job.processes}}
        Checkout(home, train=job.train_section(), variants=variants).use(packed)
    ours = [sys.executable, "-m", "pipeline", "train", "ddp" if job.processes > 1 else "baseline"]
    order = list(names or arms)
    random.Random(job.seed).shuffle(order)
    speeds = {}
    for name in order:
        module, changes = arms[name]
        command = replace(job, **changes).command(module) if module else ours
        speeds[name] = timed(command, ROOT if module else home, job.epochs)
        print(f"  {name}: {', '.join(f'{key} {value:.5g}' for key, value in speeds[name].items())}", flush=True)
    return {name: speeds[name] for name in arms if name in speeds}


def timed(command: Sequence[str], where: Path, epochs: int) -> dict[str, float]:
    """Run ``command``; return its figures. If the command fails, print its output and raise CalledProcessError."""
    started = time.perf_counter()
    with subprocess.Popen(command, cwd=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = [(time.perf_counter() - started, line) for line in process.stdout]
    seconds = time.perf_counter() - started
    if process.returncode:
        print(*(line for _, line in lines), sep="", file=sys.stderr)
        raise subprocess.CalledProcessError(process.returncode, command)
    return measured(lines, seconds, epochs)


def measured(lines: Iterable[tuple[float, str]], seconds: float, epochs: int) -> dict[str, float]:
    """Return the figures of a process that took ``seconds``.

    ``lines``: for each line of its output, the seconds from the process's start to the line, and the line.
    """
    ends: dict[int, tuple[float, float]] = {}
    for at, line in lines:
        if match := STEP_TOLD.search(line):
            return {STEP: float(match[1])}
        if match := EPOCH_TOLD.search(line):
            ends[int(match[1])] = at, float(match[2]) / 100
    assert set(ends) == set(range(1, epochs + 1)), f"expected lines on {epochs} epochs, found epochs {sorted(ends)}"
    later = (ends[epochs][0] - ends[1][0]) / (epochs - 1)
    return {SECONDS: seconds, EPOCH: later, ACCURACY: ends[epochs][1]}


def measure(name: str, minutes: float, figures: Path) -> None:
    """Measure as many rounds as fit into ``minutes``, at least one. Each round is written as soon as it ends."""
    started, longest = time.monotonic(), 0.0
    # A step over ready batches has so little work that several threads would mostly wait for each other.
    threads = 1 if JOBS[name].data == "ready" else max(1, int(environment.cores() / JOBS[name].processes))
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ |= {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": loopback, "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as folder:
        job, packed, prepare_seconds = laid_out(JOBS[name], Path(folder))
        samples = len(prepared.read(packed).train) // job.batch_size * job.batch_size
        versions = {
            package: importlib.metadata.version(package) for package in ("torchvision", "accelerate", "lightning")
        }
        facts = {"job": asdict(JOBS[name]), "samples": samples, "versions": versions}
        facts = json.loads(json.dumps(facts | {"environment": environment.fingerprint()["hash"]}))
        old = kept(figures)["peers"].get(name, {})
        if any(old.get(key) != value for key, value in facts.items()):
            print(f"{name}: {'was measured with other settings or software, and ' if old else ''}starts from round 1")
            old = {"rounds": [], "why": {}, "commits": []}
        rounds, commits = old["rounds"], list(dict.fromkeys([*old["commits"], environment.checked_out()]))
        while not longest or time.monotonic() - started + longest < 60 * minutes:
            began = time.monotonic()
            print(f"{name}: round {len(rounds) + 1}", flush=True)
            rounds.append(one_round(replace(job, seed=len(rounds)), packed, Path(folder)))
            others = {"prepare_seconds": prepare_seconds, "commits": commits, "why": old["why"], "rounds": rounds}
            machines.keep(figures, "peers-", "peers", name, facts | others)
            longest = max(longest, time.monotonic() - began)


def file_of(figures: Path) -> Path:
    """Return the path of this machine's file."""
    return figures / f"peers-{machines.stem(machines.name_of(environment.fingerprint()))}.json"


def kept(figures: Path) -> dict[str, Any]:
    """Return the content of this machine's file; if there is no file, ``{"peers": {}}``."""
    path = file_of(figures)
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8") if path.exists() else '{"peers": {}}')
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", choices=[*JOBS, AGREEMENT], help="measure only this job; default: all jobs")
    parser.add_argument("--minutes", type=float, default=30.0, help="time for each job (default: 30)")
    parser.add_argument("--why", metavar="PEER: REASON", help="record why a peer is faster in this --job")
    parser.add_argument(
        "--figures", type=Path, default=machines.FIGURES, metavar="DIRECTORY", help="write figures to this directory"
    )
    arguments = parser.parse_args()
    if arguments.why:
        content = kept(arguments.figures)
        if "why" not in content["peers"].get(arguments.job, {}):
            parser.error(
                f"--why needs a --job that was measured here, not {arguments.job}; "
                f"{file_of(arguments.figures)} lists the measured jobs."
            )
        peer, _, reason = arguments.why.partition(": ")
        content["peers"][arguments.job]["why"][peer] = reason
        files.write_text(file_of(arguments.figures), json.dumps(content, indent=1) + "\n")
    else:
        try:
            from benchmarks.peers import agreement
        except ModuleNotFoundError as error:
            parser.error(
                f"{error.name} is not installed here; run `make peers`, which installs all packages and then runs this "
                "command."
            )
        for name in [arguments.job] if arguments.job else [*JOBS, AGREEMENT]:
            if name == AGREEMENT:
                machines.keep(arguments.figures, "peers-", "peers", name, agreement.measured())
            else:
                measure(name, arguments.minutes, arguments.figures)
    page = table.page(kept(arguments.figures))
    files.write_text(file_of(arguments.figures).with_suffix(".md"), page)
    print(page)


if __name__ == "__main__":
    main()
