"""Execute docs/adding-a-technique.md: to add a technique, one writes a declaration and a class, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.params import CATALOGUE, Variant, requested
from pipeline.params.conditions import needs_gpu
from pipeline.techniques import _own
from tests.commands import printed
from tests.pages import ROOT, add_technique
from tests.rehearsal.jobs import LANGUAGE_MODEL, SETS

PARAMS: dict[str, Any] = {
    "fetch": {"dataset": "synthetic", "synthetic": {"train": 64, "test": 16, "shape": [1, 8, 8], "classes": 2}},
    "train": {"seeds": [0], "epochs": 1, "batch_size": 16, "device": "cpu", "warmup_steps": 1},
    "publish": {"live": False},
    "variants": {"baseline": {}, "tried": {"gradient_centralization": True, "channels_last": True}},
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "pipeline", path / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    (path / "docs").mkdir()
    (path / "params.yaml").write_text(yaml.safe_dump(PARAMS), encoding="utf-8")
    assert add_technique(path) in PARAMS["variants"]["tried"]
    return path


def run(checkout: Path, *commands: str) -> str:
    """Run the commands one after the other in one process; return their output."""
    program = "import sys\nfrom pipeline.cli import main\nassert not any(main(each.split()) for each in sys.argv[1:])"
    return printed(program, *commands, cwd=checkout, PYTHONPATH=str(checkout))


def test_the_added_technique_is_listed_everywhere(checkout: Path) -> None:
    said = run(checkout, "schema", "techniques --markdown", "environment")
    row = next(line for line in said.splitlines() if line.startswith("| `gradient_centralization: true` |"))
    assert row.endswith("| statistics | `optimizer_in_backward`, `tensor` |")
    schema = json.loads((checkout / "params.schema.json").read_text(encoding="utf-8"))
    assert schema["$defs"]["Variant"]["properties"]["gradient_centralization"]["type"] == "boolean"
    variants = json.loads((checkout / "environment.json").read_text(encoding="utf-8"))["variants"]
    watched = "pipeline/techniques/gradient_centralization.py"
    assert [watched in variants[name]["code"] for name in ("baseline", "tried")] == [False, True]


def test_the_added_technique_is_applied_in_training(checkout: Path) -> None:
    said = run(checkout, "environment", "fetch", "prepare", "plan tried", "train baseline", "train tried")
    assert re.findall(r"^  (\w+) +\[", said, re.MULTILINE) == ["channels_last", "gradient_centralization"]
    results = [json.loads((checkout / f"results/{name}.json").read_text()) for name in ("baseline", "tried")]
    assert results[0]["runs"][0]["train_loss"] != pytest.approx(results[1]["runs"][0]["train_loss"], rel=1e-3)


def test_the_rehearsal_trains_each_technique_that_needs_a_gpu() -> None:
    variants = [Variant(**values) for variants in [*SETS.values(), LANGUAGE_MODEL] for values in variants.values()]
    rehearsed = {technique.name for variant in variants for technique in requested(variant)}
    assert rehearsed >= {entry.name for entry in CATALOGUE if entry.why_not is needs_gpu}


@pytest.mark.parametrize("entry", [entry for entry in CATALOGUE if entry.implementation], ids=lambda entry: entry.name)
def test_an_entry_and_its_class_share_a_name(entry: Any) -> None:
    assert _own(entry.implementation).name == entry.name


def test_only_another_model_lacks_class_needs_and_placement() -> None:
    alone = {entry.name for entry in CATALOGUE if not (entry.implementation or entry.needs or entry.placement)}
    assert alone == {"another_model"}
