"""Execute docs/adding-a-technique.md: to add a technique, one writes a declaration and a class, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.params import CATALOGUE, Variant, requested
from pipeline.params.catalogue.base import needs_gpu
from pipeline.techniques import _own
from tests.pages import ROOT, blocks
from tests.rehearsal.jobs import SETS

PARAMS: dict[str, Any] = {
    "fetch": {"dataset": "synthetic", "synthetic": {"train": 64, "test": 16, "shape": [1, 8, 8], "classes": 2}},
    "train": {"seeds": [0], "epochs": 1, "batch_size": 16, "device": "cpu", "warmup_steps": 1},
    "publish": {"live": False},
    "variants": {"baseline": {}, "tried": {"gradient_centralization": True, "channels_last": True}},
}


def add_technique(root: Path) -> str:
    """Add the technique of the page to the checkout ``root``, and nothing else; return the technique's name."""
    setting, entry, hooks = blocks(ROOT / "docs/adding-a-technique.md", "python")
    setting, entry = setting.partition("...\n")[2], entry.partition("...,\n")[2]
    catalogue = root / "pipeline/params/catalogue/speed.py"
    before, between, after = catalogue.read_text(encoding="utf-8").partition("\n\nSPEED: ")
    assert after.endswith("\n)\n")
    catalogue.write_text(before + setting + between + after.removesuffix(")\n") + entry, encoding="utf-8")
    name, module = re.findall(r'name="(\w+)".*implementation="(\w+)\.', entry, re.DOTALL)[0]
    (root / f"pipeline/techniques/{module}.py").write_text(hooks, encoding="utf-8")
    return str(name)


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
    done = subprocess.run(
        [sys.executable, "-c", program, *commands],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_added_technique_is_in_the_listing_the_schema_and_the_fingerprint(checkout: Path) -> None:
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
    variants = [Variant(**values) for each in SETS.values() for values in each.values()]
    rehearsed = {each.name for variant in variants for each in requested(variant)}
    assert rehearsed >= {each.name for each in CATALOGUE if each.why_not is needs_gpu}


@pytest.mark.parametrize("entry", [each for each in CATALOGUE if each.implementation], ids=lambda each: each.name)
def test_the_class_that_an_entry_names_has_the_name_of_the_entry(entry: Any) -> None:
    assert _own(entry.implementation).name == entry.name


def test_an_entry_without_a_class_has_needs_or_a_placement_except_another_model() -> None:
    alone = {each.name for each in CATALOGUE if not (each.implementation or each.needs or each.placement)}
    assert alone == {"another_model"}
