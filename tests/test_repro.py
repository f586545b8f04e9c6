"""The whole pipeline, as a user runs it: `dvc repro` in a clone, on scikit-learn's digits."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.conftest import SHORT, Clone

PARAMS = SHORT | {
    "train.seeds": [0, 1],
    "train.batch_size": 32,
    "train.learning_rate": 0.05,
    "profile.variants": ["baseline"],
    "publish.live": True,
    "variants.memory.gradient_accumulation": 2,
}
RUNS = ["baseline-seed0", "baseline-seed1", "ddp-seed0", "ddp-seed1", "memory-seed0", "memory-seed1"]


def children(checkout: Clone) -> dict[str, list[str]]:
    """Return comparison's name -> names of its runs, for everything in MLflow's store that is not deleted."""
    with closing(sqlite3.connect(checkout.path / "mlflow.db")) as store:
        rows = store.execute(
            "SELECT parents.name, runs.name FROM runs JOIN tags ON tags.run_uuid = runs.run_uuid "
            "AND tags.key = 'mlflow.parentRunId' JOIN runs parents ON parents.run_uuid = tags.value "
            "WHERE runs.lifecycle_stage = 'active' AND parents.lifecycle_stage = 'active'"
        ).fetchall()
        (count,) = store.execute("SELECT COUNT(*) FROM runs WHERE lifecycle_stage = 'active'").fetchone()
    runs_of: dict[str, list[str]] = {}
    for parent, child in rows:
        runs_of.setdefault(parent, []).append(child)
    assert count == len(rows) + len(runs_of), "there are runs beside the comparisons"
    return {parent: sorted(names) for parent, names in runs_of.items()}


def trained(output: str) -> list[str]:
    """Return the variants that `dvc repro` really trained, from its output."""
    return [line.split("@")[1].rstrip("':") for line in output.splitlines() if line.startswith("Running stage 'train@")]


def models(checkout: Clone) -> dict[str, list[str]]:
    results = sorted((checkout.path / "results").glob("*.json"))
    return {path.stem: [run["model_sha256"] for run in json.loads(path.read_text())["runs"]] for path in results}


def later(bench: dict[str, Any]) -> None:
    """Move a bench to the next day and another boot, and change its speeds by a thousandth."""
    session = bench["session"]
    for key in ("start_utc", "end_utc"):
        session[key] = (datetime.fromisoformat(session[key]) + timedelta(days=1)).isoformat()
    session["boot_id"] = "another"
    for arm in bench["arms"]:
        for sample in arm["samples"]:
            if sample["samples_per_second"]:  # None on a busy machine
                sample["samples_per_second"] *= 1.001


def renamed(bench: dict[str, Any]) -> None:
    """Give a bench arms that no other bench has."""
    for arm in bench["arms"]:
        arm["name"] = f"other {arm['name']}"


def ended(bench: dict[str, Any]) -> None:
    """Let a bench end before it starts."""
    bench["session"]["end_utc"] = "2020-01-01T00:00:00+00:00"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_repro_again_after_changes_and_without_store(clone: Callable[..., Clone]) -> None:
    checkout = clone(PARAMS)

    first = checkout.run("dvc", "repro")
    assert trained(first) == ["baseline", "ddp", "memory"]
    [(comparison, names)] = children(checkout).items()
    assert names == RUNS
    report = json.loads((checkout.path / "reports" / "comparison.json").read_text())
    assert report["schema"] == 2
    assert 'class="whisker"' in (checkout.path / "reports" / "comparison.html").read_text()
    assert "memory" in (checkout.path / "reports" / "comparison.md").read_text()
    weights = models(checkout)
    metrics = checkout.run("dvc", "metrics", "show")
    assert "verdict" in metrics
    assert "ddp" in metrics
    checkout.run("dvc", "plots", "show")
    plots = (checkout.path / "dvc_plots" / "index.html").read_text()
    for expected in ('"test_accuracy"', '"train_loss"', '"memory"'):
        assert expected in plots
    checkout.commit()
    assert checkout.run("git", "status", "--porcelain") == ""

    # The evidence can be written and verified.
    checkout.run("python", "-m", "pipeline", "evidence")
    assert "Verified" in checkout.run("python", "-m", "pipeline", "evidence", "check")

    # The second time, nothing is trained, and no run is stored twice.
    again = checkout.run("dvc", "repro")
    assert trained(again) == []
    assert children(checkout) == {comparison: RUNS}

    # After one more session of the bench, the comparison includes it, and nothing is trained or measured again.
    checkout.run("python", "-m", "pipeline", "bench", "--again")
    [session] = (checkout.path / "sessions").glob("*.json")
    would_run = re.findall(r"^Running stage '(\S+)'", checkout.run("dvc", "repro", "--dry"), re.MULTILINE)
    assert would_run == ["environment", "compare", "publish"]

    # A copy from another day and boot, with other speeds, is no further bench, and a foreign bench removes none.
    for change in (later, renamed, ended):
        bench = json.loads(session.read_text())
        change(bench)
        session.with_name(f"{change.__name__}.json").write_text(json.dumps(bench))
    compared = checkout.run("python", "-m", "pipeline", "compare")
    assert "session not used: sessions/ended.json" in compared
    report = json.loads((checkout.path / "reports" / "comparison.json").read_text())
    assert [session_["benches"] for session_ in report["sessions"]] == [2]
    for file in session.parent.glob("*.json"):
        file.unlink()

    # If the version of a tool changes, only the variant that relies on this tool would be trained again.
    fingerprint = checkout.path / "environment.json"
    recorded = json.loads(fingerprint.read_text())
    recorded["relied_on"]["variants"]["memory"]["compiler"] = "g++ 14.1.0"
    fingerprint.write_text(json.dumps(recorded))
    assert trained(checkout.run("dvc", "repro", "--dry")) == ["memory"]

    # If results and store are deleted, DVC restores the results from its cache, and the store is filled again.
    (checkout.path / "mlflow.db").unlink()
    shutil.rmtree(checkout.path / "mlartifacts")
    shutil.rmtree(checkout.path / "results")
    restored = checkout.run("dvc", "repro")
    assert trained(restored) == []
    assert models(checkout) == weights
    assert children(checkout) == {comparison: RUNS}

    # If one variant changes, only this variant is trained, and the store has both the old and a new comparison.
    changed = checkout.run("dvc", "exp", "run", "-S", "variants.memory.activation_checkpointing=false")
    assert trained(changed) == ["memory"]
    stored = children(checkout)
    assert stored.pop(comparison) == RUNS
    assert list(stored.values()) == [RUNS]
    assert models(checkout)["ddp"] == weights["ddp"]
    assert re.search(r"reports/verdicts\.json +1_verdict\.memory ", checkout.run("dvc", "metrics", "diff", "--all"))

    # A margin that is changed after the measurement decides anew from the same bench, and the report says so.
    assert trained(changed := checkout.run("dvc", "exp", "run", "-S", "compare.margins.throughput=0.07")) == []
    assert "'bench'" not in "".join(re.findall(r"^Running stage .+$", changed, re.MULTILINE))
    remark = r"margins were changed after the measurement: compare\.margins\.throughput from 0\.\d+ to 0\.07"
    assert re.search(remark, (checkout.path / "reports" / "comparison.md").read_text())
