"""The files that a job leaves, made in a second without training."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from pipeline import report, results
from pipeline.comparison import consistency
from pipeline.comparison.compare import compare
from pipeline.environment import code, hash_of, stages
from pipeline.files import file_sha256
from pipeline.params import parse
from pipeline.plans import plans
from pipeline.results import Bench
from tests.factories import (
    DESCRIBED,
    ENVIRONMENT,
    make_bench,
    make_history,
    make_params,
    make_result,
    make_results,
    make_run,
    make_session,
)
from tests.workspaces import CPU_ONLY

PARAMS: dict[str, Any] = {
    "train": {"device": "cpu"},
    "publish": {"models": False},
    "variants": {"baseline": {}, "ddp": {"parallelism": "ddp"}},
}
OF_STAGE = functools.cache(code.of_stage)  # the tests change files, but no code


def write_job(root: Path) -> None:
    """Write the files from which a job's comparison is made."""
    config = parse(PARAMS)
    fingerprint = ENVIRONMENT | stages.described(config, plans(config, CPU_ONLY))
    save(root / "environment.json", fingerprint)
    save(root / "data/prepared/dataset.json", DESCRIBED.model_dump())
    (root / "params.yaml").write_text(yaml.safe_dump(PARAMS), encoding="utf-8")
    measured = []
    for name, right in (("baseline", 9000), ("ddp", 9010)):
        runs = [make_run(seed, test_correct=right + seed) for seed in (0, 1, 2)]
        applied = config.variants[name].model_dump()
        parallel: dict[str, Any] = {"world_size": 2, "backend": "gloo"} if name == "ddp" else {}
        asked = {"train": config.train.model_dump(mode="json"), "variant": applied}
        history = results.history_file(name, root / "results")
        results.write_history(make_history(runs), history)
        measured.append(
            make_result(
                name, runs, applied=applied, config=asked, key=stages.key(fingerprint, "train", name),
                environment=hash_of(fingerprint, "variants", name), history_sha256=file_sha256(history), **parallel,
            )
        )  # fmt: skip
        results.write(measured[-1], results.result_file(name, root / "results"))
    keys = {result.variant: stages.key(fingerprint, "bench", result.variant) for result in measured}
    (root / "bench.json").write_text(make_bench(measured, keys=keys).to_json(), encoding="utf-8")


def save(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def record(root: Path) -> None:
    """Record the present files as the outputs of the stages, as DVC does."""
    outs = [[f"results/{name}.json", f"results/{name}/history.csv"] for name in PARAMS["variants"]]
    locked = {
        f"stage {number}": {
            "outs": [
                {"path": path, "hash": "md5", "md5": hashlib.md5((root / path).read_bytes()).hexdigest()}
                for path in paths
            ]
        }
        for number, paths in enumerate([*outs, ["bench.json"], ["reports/comparison.json", "reports/comparison.html"]])
    }
    (root / "dvc.lock").write_text(yaml.safe_dump({"stages": locked}), encoding="utf-8")


SIGNATURE = ("me:hunter2", "s1gned")
MIRROR = f"file://{SIGNATURE[0]}@mirror/raw?key={SIGNATURE[1]}"
OF_ANOTHER_PYTHON = {"pipeline/training/loop.py": "0" * 16}
"""Stands for digests of code by another version of Python. They differ, because each version of Python writes syntax
trees in its own way."""


def write_sessions(bench_of: Callable[..., Bench] = make_bench, **train: Any) -> None:
    """Write a job with two sessions of the bench into the current directory, as `dvc repro` leaves it."""
    Path("data/prepared").mkdir(parents=True)
    Path("data/prepared/dataset.json").write_text(DESCRIBED.model_dump_json(indent=2))
    measured = make_results()
    code_of = {"train": OF_ANOTHER_PYTHON, "bench": OF_ANOTHER_PYTHON, "compare": code.of_stage("compare")}
    fingerprint = ENVIRONMENT | {
        "stages": {name: {"code": code, "settings": {}} for name, code in code_of.items()}
        | {"fetch": {"settings": {"mirror": MIRROR}}},
        "variants": {result.variant: {} for result in measured},
    }
    histories = {result.variant: make_history(result.runs) for result in measured}
    for number, result in enumerate(measured):
        history = results.history_file(result.variant)
        results.write_history(histories[result.variant], history)
        asked = result.config | {"train": result.config["train"] | train}
        made_from = {"config": asked, "key": stages.key(fingerprint, "train", result.variant)}
        measured[number] = result.model_copy(update=made_from | {"history_sha256": file_sha256(history)})
        results.write(measured[number], results.result_file(result.variant))
    another = make_session("2026-11-21T08:00", boot_id="c")
    keys = {result.variant: stages.key(fingerprint, "bench", result.variant) for result in measured}
    sessions = [bench_of(measured, keys=keys), bench_of(measured, noise=0.02, keys=keys, session=another)]
    for bench, file in zip(sessions, ("bench.json", "sessions/20261121T080000.json"), strict=True):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text(bench.to_json())
    config = make_params(measured, fetch={"mirror": MIRROR})
    Path("params.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    Path("environment.json").write_text(json.dumps(fingerprint, indent=2) + "\n")
    Path("dvc.lock").write_text("schema: '2.0'\n")
    made_of = consistency.made_of(measured)
    report.write(compare(measured, histories, sessions, config.compare, fingerprint, made_of), histories)
