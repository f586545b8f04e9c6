"""What the stages cost: against the textbook's loop, the barest loop, tracking switched off, and doing nothing."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.pairs import ROOT, Checkout, ratio
from pipeline import environment, results
from pipeline.config import Train, Variant, parse, plan
from pipeline.data import prepared, sources
from pipeline.data.batches import TrainBatches
from pipeline.distributed import World, keep_freed_memory
from pipeline.models import build
from pipeline.training import Training, make_optimizer

BASELINE: dict[str, Any] = {"baseline": {}}


def fashion_mnist(folder: Path) -> tuple[Path, Path]:
    """Fashion-MNIST's raw files and the prepared data set: the checkout's own if there, else fetched."""
    raw, packed = ROOT / "data" / "raw", ROOT / "data" / "prepared"
    config = parse({"variants": BASELINE})
    if not (raw / "fashion_mnist").is_dir():
        raw = folder / "raw"
        sources.fetch(config.fetch, raw)
    if not packed.is_dir() or prepared.read(packed).name != "fashion_mnist":
        packed = folder / "prepared"
        prepared.prepare(config, raw, packed)
    return raw / "fashion_mnist", packed


def textbook(pairs: int = 5, epochs: int = 2) -> dict[str, Any]:
    """The whole baseline stage against the whole textbook script: samples a second, process start to end.

    Same net, data, batch of 64, SGD with momentum at the same constant rate, and number of epochs; both evaluate
    after every epoch. Both accuracies are reported: the speed must not be bought with them.
    """
    train = {
        "batch_size": 64,
        "epochs": epochs,
        "seeds": [0],
        "learning_rate": 0.01,
        "schedule": "constant",
        "warmup_fraction": 0.0,
        "weight_decay": 0.0,
    }
    with tempfile.TemporaryDirectory() as folder:
        raw, packed = fashion_mnist(Path(folder))
        checkout = Checkout(Path(folder, "checkout"), train=train, variants=BASELINE)
        (checkout.path / "data").mkdir()
        (checkout.path / "data" / "prepared").symlink_to(packed)
        (checkout.path / "FashionMNIST").mkdir()
        (checkout.path / "FashionMNIST" / "raw").symlink_to(raw)
        checkout.stage("environment")
        accuracies: dict[str, list[float]] = {"textbook": [], "baseline": []}

        def of_textbook() -> float:
            started = time.perf_counter()
            command = [sys.executable, "-m", "benchmarks.textbook", str(checkout.path), str(epochs), "64", "0.01", "0"]
            done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
            accuracies["textbook"].append(json.loads(done.stdout)["test_accuracy"])
            return time.perf_counter() - started

        def of_baseline() -> float:
            seconds = checkout.stage("train", "baseline")
            accuracies["baseline"].append(checkout.result()["runs"][0]["test_accuracy"])
            return seconds

        measured = ratio(of_textbook, of_baseline, pairs)
    return {"target_ratio": 1.7, "epochs": epochs, "test_accuracies": accuracies, **measured}


def bare_loop(pairs: int = 44, batch_size: int = 64, steps: int = 20) -> dict[str, Any]:
    """The stage's steady throughput over that of the barest loop a person would write over the same tensors.

    Both train in one process, ``steps`` steps in turns: same net, optimizer and data. The stage's arm is
    ``Training.run`` with its history written to a file, as ``job`` runs it.
    """
    keep_freed_memory()  # as the stage does; here for both arms, so that only the loops differ
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    alone = World(rank=0, size=1, device=device, backend=None)
    with tempfile.TemporaryDirectory() as folder:
        dataset = prepared.read(fashion_mnist(Path(folder))[1])
        train = Train(batch_size=batch_size, seeds=[0], epochs=1)
        job = plan(parse({"train": train.model_dump(), "variants": BASELINE}), "baseline", environment.machine())
        history = Path(folder, "history.csv")

        def net() -> torch.nn.Module:
            torch.manual_seed(0)
            return build("small_cnn", {}, channels=1, height=28, width=28, classes=10).to(device)

        def stage() -> Iterator[None]:
            with TrainBatches(
                dataset,
                batch_size=batch_size,
                micro_batches=1,
                rank=0,
                world_size=1,
                seed=0,
                augment=train.augment,
                placement="resident",
                device=device,
            ) as batches:
                results.write_history([], history)
                for row in Training(job, train, net(), dataset, batches, alone, seed=0).run():
                    if row:
                        results.append_history(row, history)
                    yield

        def bare() -> Iterator[None]:
            all_images, all_labels = dataset.train.images.to(device), dataset.train.labels.to(device)
            mean, std = torch.tensor(dataset.mean, device=device), torch.tensor(dataset.std, device=device)
            model = net()
            optimizer = make_optimizer(train, model)
            order = torch.randperm(len(all_labels), device=device)
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                images = all_images[chosen].float().div_(255).sub_(mean).div_(std)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), all_labels[chosen])
                loss.backward()
                optimizer.step()
                yield

        def throughput(loop: Iterator[None]) -> float:
            alone.synchronise()
            started = time.perf_counter()
            for _ in range(steps):
                next(loop)
            alone.synchronise()
            return steps * batch_size / (time.perf_counter() - started)

        arms = stage(), bare()
        measured = ratio(lambda: throughput(arms[0]), lambda: throughput(arms[1]), pairs, warm_up=True)
    return {"target_ratio": 0.98, "batch_size": batch_size, "steps": steps, **measured}


def tracking(pairs: int = 6) -> dict[str, Any]:
    """Steady throughput of the baseline stage with live tracking over that without, in fresh processes.

    ``rows_lost`` counts the last run's history rows that are missing in the store after ``publish``: it must be 0.
    """
    train = {"batch_size": 64, "epochs": 1, "seeds": [0], "history_every_steps": 50}
    with tempfile.TemporaryDirectory() as folder:
        _, packed = fashion_mnist(Path(folder))
        arms = {}
        for live in (True, False):
            checkout = Checkout(
                Path(folder, str(live)), train=train, publish={"live": live, "models": False}, variants=BASELINE
            )
            (checkout.path / "data").mkdir()
            (checkout.path / "data" / "prepared").symlink_to(packed)
            checkout.stage("environment")
            arms[live] = checkout

        def throughput(live: bool) -> float:
            arms[live].stage("train", "baseline")
            return float(arms[live].result()["summary"]["samples_per_second"])

        throughput(True)  # creates the store, which later runs find
        measured = ratio(lambda: throughput(True), lambda: throughput(False), pairs)
        arms[True].stage("publish")
        rows = results.read_history(arms[True].path / "results" / "baseline" / "history.csv")
        with sqlite3.connect(arms[True].path / "mlflow.db") as store:
            ((logged,),) = store.execute(
                "SELECT COUNT(*) FROM metrics JOIN tags ON tags.run_uuid = metrics.run_uuid "
                "WHERE metrics.key = 'history/train_loss' AND tags.key = 'pipeline.run'"
            )
    return {"target_ratio": 0.99, "rows": len(rows), "rows_lost": len(rows) - logged, **measured}


def nothing_to_do(pairs: int = 7) -> dict[str, Any]:
    """A ``dvc repro`` with nothing to do, its always-run stages included, over a ``dvc status``. Lower is better."""
    train = {"batch_size": 64, "epochs": 1, "seeds": [0]}
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(
            Path(folder, "checkout"),
            fetch={"dataset": "digits"},
            prepare={},
            train=train,
            compare={},
            publish={"models": False},
            variants=BASELINE,
        )
        checkout.commit()
        checkout.run("dvc", "repro")
        measured = ratio(lambda: checkout.run("dvc", "repro"), lambda: checkout.run("dvc", "status"), pairs)
    return {"target_ratio": 3.0, "lower_is_better": True, **measured}


IMPORT_TORCH = "import torch"
WITH_OPTIMIZER = "import torch; torch.optim.SGD([torch.zeros(1)], lr=1.0)"
"""torch imports its compiler with the first optimizer, whoever makes it."""


def fixed_cost(reference: str, pairs: int = 9, variant: str = "baseline") -> dict[str, Any]:
    """A train stage's wall time without its training and evaluation, over a Python that runs ``reference``."""
    train = {"batch_size": 64, "epochs": 1, "seeds": [0]}
    variants = {"baseline": {}, "ddp": {"parallelism": "ddp"}}
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(
            Path(folder, "checkout"),
            fetch={"dataset": "digits"},
            train=train,
            publish={"live": False},
            variants=BASELINE | {variant: variants[variant]},
        )
        for stage in ("environment", "fetch", "prepare"):
            checkout.stage(stage)

        def of_stage() -> float:
            seconds = checkout.stage("train", variant)
            run = checkout.result(variant)["runs"][0]
            return float(seconds - run["train_seconds"] - run["evaluate_seconds"])

        measured = ratio(of_stage, lambda: checkout.run(sys.executable, "-c", reference), pairs, warm_up=True)
    return {"target_ratio": 1.5, "lower_is_better": True, "variant": variant, "reference": reference, **measured}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# A variant's default is what an empty entry means; keep the benchmark's baseline honest if that ever changes.
assert Variant() == Variant.model_validate(BASELINE["baseline"])
