"""Measure how fast the stages are. Most of these benchmarks compare a stage with a simpler reference.

The references are a textbook script, a minimal loop, a training without tracking, a process that only imports torch,
and `dvc status`. The default job's time is divided by ten minutes.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from benchmarks.pairs import ROOT, Checkout, ratio
from benchmarks.peers.job import Job
from pipeline import environment, params, results, tasks
from pipeline.data import packing, prepared, sources
from pipeline.distributed import World
from pipeline.measurement.sampling import SystemSampler
from pipeline.models import optimizers
from pipeline.params import Train, parse
from pipeline.plans import plan
from pipeline.processes.malloc import keep_freed_memory
from pipeline.tasks.batches import TrainBatches
from pipeline.training.assembly import compose

BASELINE: dict[str, Any] = {"baseline": {}}
DIGITS: dict[str, Any] = {
    "fetch": {"dataset": "digits"},
    "train": {"batch_size": 64, "epochs": 1, "seeds": [0]},
    "variants": BASELINE,
}
"""Sections of params.yaml for a job of about a second."""


def fashion_mnist(folder: Path) -> tuple[Path, Path]:
    """Return the directories of Fashion-MNIST's raw files and of the prepared data set.

    They are this checkout's own directories, or are made in ``folder``.
    """
    raw, packed = ROOT / "data" / "raw", ROOT / "data" / "prepared"
    config = parse({"variants": BASELINE})
    if not (raw / "fashion_mnist").is_dir():
        raw = folder / "raw"
        sources.fetch(config.fetch, raw)
    if not packed.is_dir() or prepared.read(packed).name != "fashion_mnist":
        packed = folder / "prepared"
        packing.prepare(config, raw, packed)
    return raw / "fashion_mnist", packed


def pack(sections: dict[str, Any], raw: Path, packed: Path) -> float:
    """Prepare the data that params.yaml's ``sections`` describe; return the seconds. If ``raw`` is missing, fetch the
    data first."""
    config = parse({**sections, "variants": BASELINE})
    started = time.perf_counter()
    if not raw.exists():
        sources.fetch(config.fetch, raw)
    packing.prepare(config, raw, packed)
    return time.perf_counter() - started


def write_images(data: prepared.Dataset, folder: Path, counts: Mapping[str, int]) -> None:
    """Write the first images of each split, with a border of 2 pixels, as RGB to SPLIT/CLASS/INDEX.png.

    ``counts``: split -> number of images.
    """
    for split, count in counts.items():
        part: prepared.Split = getattr(data, split)
        for index in range(count):
            path = folder / split / str(int(part.targets[index])) / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.pad(part.inputs[index, 0].numpy(), 2)).convert("RGB").save(path)


class Textbook:
    """The textbook script and the baseline's stage, as whole processes. Both use the same model, data, batch size (64)
    and number of epochs, and SGD with momentum at the same constant learning rate. Both evaluate after every epoch."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self.job = Job("small_cnn", "fashion_mnist", 64, epochs, learning_rate=0.01, folder=str(folder / "checkout"))
        raw, packed = fashion_mnist(folder)
        self.checkout = Checkout(folder / "checkout", train=self.job.train_section(), variants=BASELINE)
        self.checkout.use(packed)
        (self.checkout.path / "FashionMNIST").mkdir()
        (self.checkout.path / "FashionMNIST" / "raw").symlink_to(raw)
        self.accuracies: dict[str, list[float]] = {}
        """Test accuracies of all runs, which show whether the higher speed costs accuracy."""

    def script(self, data: str = "fashion_mnist") -> float:
        """Run the textbook script with ``Job.data`` set to ``data``; return its wall seconds."""
        started = time.perf_counter()
        command = replace(self.job, data=data).command("textbook")
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        accuracy = float(done.stdout.rpartition("test accuracy ")[2].strip("%\n")) / 100
        self.accuracies.setdefault(f"script, data {data}", []).append(accuracy)
        return time.perf_counter() - started

    def stage(self) -> float:
        """Run the baseline's stage; return its wall seconds."""
        seconds = self.checkout.stage("train", "baseline")
        self.accuracies.setdefault("stage", []).append(self.checkout.result()["runs"][0]["test_accuracy"])
        return seconds


def textbook(pairs: int = 8, epochs: int = 2, *, in_memory: bool = False) -> dict[str, Any]:
    """Return the textbook script's wall time divided by that of the baseline's stage, from process start to end.

    ``in_memory``: divide by the time of the script with its data in memory instead. A data path can gain no more than
    this.
    """
    with tempfile.TemporaryDirectory() as folder:
        jobs = Textbook(Path(folder), epochs)
        faster = (lambda: jobs.script("in_memory")) if in_memory else jobs.stage
        measured = ratio(jobs.script, faster, pairs)
    target = 1.0 if in_memory else 1.7
    return {"target_ratio": target, "epochs": epochs, "test_accuracies": jobs.accuracies, **measured}


def bare_loop(pairs: int = 176, batch_size: int = 64, steps: int = 20) -> dict[str, Any]:
    """Return the stage's steady throughput divided by that of a minimal hand-written loop over the same tensors.

    Both loops run in one process, in turns of ``steps`` steps, with the same model, optimizer and data. The stage's
    loop is ``Training.run`` with its history written to a file, as in ``training.job``.
    """
    with tempfile.TemporaryDirectory() as folder:
        epochs = -(-(pairs + 1) * steps // (60_000 // batch_size))
        training = Steady(fashion_mnist(Path(folder))[1], Path(folder, "history.csv"), batch_size, epochs=epochs)
        dataset, device = training.task.dataset, training.world.device

        def bare() -> Iterator[None]:
            all_images, all_labels = dataset.train.inputs.to(device), dataset.train.targets.to(device)
            known = dataset.statistics["inputs"]
            mean, std = torch.tensor(known.mean, device=device), torch.tensor(known.std, device=device)
            model = training.net()
            optimizer = optimizers.optimizer_of(training.train, model)
            while True:
                order = torch.randperm(len(all_labels), device=device)
                for start in range(0, len(order) - batch_size + 1, batch_size):
                    chosen = order[start : start + batch_size]
                    images = all_images[chosen].float().div_(255).sub_(mean).div_(std)
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(images), all_labels[chosen])
                    loss.backward()
                    optimizer.step()
                    yield

        arms = training.steps(), bare()
        measured = ratio(
            lambda: training.throughput(arms[0], steps),
            lambda: training.throughput(arms[1], steps),
            pairs,
            warm_up=True,
        )
    return {"target_ratio": 0.98, "batch_size": batch_size, "steps": steps, **measured}


def tracking(pairs: int = 60, batch_size: int = 64, steps: int = 100) -> dict[str, Any]:
    """Return the stage's steady throughput with its follower, divided by its throughput without the follower.

    The follower is the process that mirrors a training to MLflow. One training runs in turns of ``steps`` steps, and
    the follower is stopped in one turn of each pair. All work of the follower, including its start, falls into the
    turns in which the follower runs.

    ``rows_lost`` counts the history's rows that are missing from MLflow's store at the end; it must be 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        _, packed = fashion_mnist(Path(folder))
        checkout = Checkout(Path(folder, "checkout"), publish={"models": False}, variants=BASELINE)
        checkout.stage("environment")
        history, system = (checkout.path / "results" / "baseline" / f"{name}.csv" for name in ("history", "system"))
        training = Steady(packed, history, batch_size, epochs=-(-(2 * pairs + 2) * steps // (60_000 // batch_size)))
        loop = training.steps()
        with SystemSampler(system, [training.world.device]):
            command = [sys.executable, "-m", "pipeline", "follow", "baseline"]
            follower = subprocess.Popen(command, cwd=checkout.path, stdin=subprocess.PIPE)

            def throughput(order: signal.Signals) -> float:
                follower.send_signal(order)
                return training.throughput(loop, steps)

            try:
                training.throughput(loop, steps)
                measured = ratio(lambda: throughput(signal.SIGCONT), lambda: throughput(signal.SIGSTOP), pairs)
            finally:
                follower.send_signal(signal.SIGCONT)
                follower.communicate(b"finished\n")
        rows = len(results.read_history(history))
        with closing(sqlite3.connect(checkout.path / "mlflow.db")) as store:
            ((logged,),) = store.execute("SELECT COUNT(*) FROM metrics WHERE key = 'history/train_loss'")
    return {"target_ratio": 0.99, "rows": rows, "rows_lost": rows - logged, "steps": steps, **measured}


class Steady:
    """A baseline training in this process, as in ``training.job``, that a caller advances step by step."""

    def __init__(self, packed: Path, history: Path, batch_size: int, epochs: int = 1) -> None:
        keep_freed_memory()  # as in the stage; here it applies to both arms of a pair
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.world = World(rank=0, size=1, device=device, backend=None)
        dataset = prepared.read(packed)
        self.train = Train(batch_size=batch_size, seeds=[0], epochs=epochs)
        dataset = replace(dataset, test=dataset.test[:1])  # so that evaluation takes almost no time
        self.task, self.history = tasks.of_job(self.train, dataset, device), history

    def net(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return self.task.model().to(self.world.device)

    def steps(self) -> Iterator[None]:
        """Take one optimizer step per item, and write the history to its file."""
        job = plan(parse({"train": self.train.model_dump(), "variants": BASELINE}), "baseline", environment.machine())
        with TrainBatches(
            self.task,
            batch_size=self.train.batch_size,
            micro_batches=1,
            rank=0,
            world_size=1,
            seed=0,
            augment=self.train.augment,
            placement="resident",
        ) as batches:
            results.write_history([], self.history)
            training = compose(job, self.net(), self.task, batches, self.world, (), seed=0)
            with results.adding_to_history(self.history) as add_to_history:
                for row in training.run():
                    if row:
                        add_to_history(row)
                    yield

    def throughput(self, loop: Iterator[None], steps: int) -> float:
        """Return the samples per second over ``steps`` steps of a loop."""
        self.world.synchronise()
        started = time.perf_counter()
        for _ in range(steps):
            next(loop)
        self.world.synchronise()
        return steps * self.train.batch_size / (time.perf_counter() - started)


def nothing_to_do(pairs: int = 7) -> dict[str, Any]:
    """Return the time of a ``dvc repro`` with nothing to do, divided by the time of a ``dvc status``.

    The ``dvc repro`` includes the stages that always run. Lower is better.
    """
    bench = {"max_rounds": 1, "window_seconds": 0.05}
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(Path(folder, "checkout"), **DIGITS, bench=bench, publish={"models": False})
        checkout.commit()
        checkout.run("dvc", "repro")
        measured = ratio(lambda: checkout.run("dvc", "repro"), lambda: checkout.run("dvc", "status"), pairs)
    return {"target_ratio": 3.0, "lower_is_better": True, **measured}


def default_job() -> dict[str, Any]:
    """Return the time of the default job's ``dvc repro``, measured once, divided by ten minutes. Lower is better."""
    return _whole_job(ROOT / params.PARAMS_FILE, 600)


def gpt_example() -> dict[str, Any]:
    """Return the time of the ``dvc repro`` of examples/gpt, measured once, divided by 15 minutes. Lower is better."""
    return _whole_job(ROOT / "examples/gpt/params.yaml", 900)


def _whole_job(file: Path, allowed_seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = params.load(file).model_dump(mode="json")
        if config["fetch"]["dataset"] == "fashion_mnist":
            raw, _ = fashion_mnist(Path(folder))
            config["fetch"]["mirror"] = str(raw)  # so that the network's speed does not count
        checkout = Checkout(Path(folder, "checkout"), **config)
        checkout.commit()
        seconds = checkout.run("dvc", "repro")
        compared = json.loads((checkout.path / "reports/verdicts.json").read_text(encoding="utf-8"))
    measured = {"median_ratio": seconds / allowed_seconds, "seconds": seconds, "verdicts": compared}
    return {"target_ratio": 1.0, "lower_is_better": True, **measured}


def fixed_cost(pairs: int = 9) -> dict[str, Any]:
    """Return a train stage's wall time without training and evaluation, divided by the wall time of a Python process
    that imports torch."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(Path(folder, "checkout"), **DIGITS, publish={"live": False})
        for stage in ("environment", "fetch", "prepare"):
            checkout.stage(stage)

        def of_stage() -> float:
            seconds = checkout.stage("train", "baseline")
            run = checkout.result()["runs"][0]
            return float(seconds - run["train_seconds"] - run["evaluate_seconds"])

        measured = ratio(of_stage, lambda: checkout.run(sys.executable, "-c", "import torch"), pairs, warm_up=True)
    return {"lower_is_better": True, **measured}
