"""dvc.yaml: its stages, their dependencies and outputs, and how DVC reads the file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT, Clone

PIPELINE = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
STAGES: dict[str, dict[str, Any]] = {name: stage.get("do", stage) for name, stage in PIPELINE["stages"].items()}
SHOWN = {"reports/accuracy.csv", "reports/loss.csv", "reports/ratios.csv", "reports/verdicts.json"}
KEPT_IN_GIT = SHOWN | {"reports/metrics"}
OF_A_VARIANT = {"train": "${key}", "distil": "${key}", "profile": "${item}", "infer": "${item}"}
"""Stage that DVC repeats for each variant, or for each variant in a list -> the variable with the variant's name."""
COMMANDS = {"distil": "train"}
MAKES = {
    "environment": {"environment.json"},
    "fetch": {"data/raw"},
    "prepare": {"data/prepared"},
    "train": {"results/${key}.json", "results/${key}/history.csv", "results/${key}/system.csv", "models/${key}"},
    "distil": {"results/${key}.json", "results/${key}/history.csv", "results/${key}/system.csv", "models/${key}"},
    "bench": {"bench.json"},
    "profile": {"profiles/${item}"},
    "infer": {"inference/${item}.json", "inference/${item}.md"},
    "compare": {"reports/comparison.html", "reports/comparison.json", "reports/comparison.md", *KEPT_IN_GIT},
    "publish": set(),
}


def paths(entries: list[str | dict[str, Any]], cache: bool | None = None) -> Iterator[str]:
    """Yield the paths of outs or plots; if ``cache`` is given, only those with this value of ``cache``."""
    for entry in entries:
        path, options = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
        if cache is None or options.get("cache") is cache:
            yield path


def test_stages_run_the_command_of_their_name() -> None:
    assert {name: stage["cmd"] for name, stage in STAGES.items()} == {
        name: " ".join(
            ["python -m pipeline", COMMANDS.get(name, name), *([OF_A_VARIANT[name]] if name in OF_A_VARIANT else [])]
        )
        for name in MAKES
    }


def test_stages_have_the_expected_outputs_and_plots() -> None:
    assert {name: set(paths(stage.get("outs", []))) for name, stage in STAGES.items()} == MAKES
    uncached = {path for stage in STAGES.values() for path in paths(stage.get("outs", []), cache=False)}
    assert uncached == KEPT_IN_GIT
    assert {*PIPELINE["metrics"], *paths(PIPELINE["plots"])} == SHOWN


def test_only_the_stages_environment_and_publish_always_run() -> None:
    assert {name for name, stage in STAGES.items() if stage.get("always_changed")} == {"environment", "publish"}


def test_measuring_stages_depend_on_environment_data_and_code() -> None:
    for stage in ("train", "distil", "profile", "bench", "infer"):
        assert "data/prepared" in STAGES[stage]["deps"]
        who = f".{OF_A_VARIANT[stage]}" if stage in OF_A_VARIANT else ""
        relied_on = "relied_on.forms" if stage == "infer" else f"relied_on.variants{who}"
        read = ["hash", relied_on, f"digests.stages.{COMMANDS.get(stage, stage)}", f"digests.variants{who}"]
        read += ["teachers.${key}"] if stage == "train" else []
        assert STAGES[stage]["params"] == [{"environment.json": read}]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone that no test changes."""
    return Clone(tmp_path_factory.mktemp("fresh"), {})


def test_a_fresh_clone_has_all_stages(fresh: Clone) -> None:
    stages = ["environment", "fetch", "prepare", "train@baseline", "train@ddp", "train@memory"]
    stages += ["bench", "profile@baseline", "compare", "publish"]
    assert fresh.run("dvc", "stage", "list", "--name-only").split() == stages
    planned = fresh.run("dvc", "repro", "--dry", fails=True)  # it fails at the first file that does not exist yet
    assert planned.startswith("Running stage 'environment'")


def test_a_student_depends_only_on_its_teacher(clone: Callable[..., Clone]) -> None:
    student = {"model": "small_cnn", "distillation": {"teacher": "ddp"}}
    tried = clone({"students": {"taught": student}, "variants.tried": {"channels_last": True}, "variants.memory": None})
    stages = tried.run("dvc", "stage", "list", "--name-only").split()
    assert [stage for stage in stages if "@" in stage and "profile" not in stage] == [
        "train@baseline", "train@ddp", "train@tried", "distil@taught",
    ]  # fmt: skip
    graph = tried.run("dvc", "dag", "--dot", "distil@taught")
    assert {name for name in ("baseline", "ddp", "tried") if f"train@{name}" in graph} == {"ddp"}


@pytest.mark.slow
def test_a_command_in_a_variants_name_is_not_run(clone: Callable[..., Clone]) -> None:
    """If the stage that refuses the name is skipped, DVC finds no plan of that name."""
    tried, name = clone({"fetch.dataset": "digits"}), "x; touch owned; true"
    tried.run("dvc", "repro", "prepare")
    tried.edit({f"variants.{name}": {}})
    for stages in ([], ["--single-item", f"train@{name}"], ["--single-item", "bench"]):
        output = tried.run("dvc", "repro", *stages, fails=True)
        assert name in output or "variants" in output
    assert not (tried.path / "owned").exists()


def test_git_ignores_generated_files(fresh: Clone) -> None:
    made = {re.sub(r"\$\{\w+\}", "ddp", path) for outputs in MAKES.values() for path in outputs} - KEPT_IN_GIT
    made |= {"checkpoints/x.pt", "mlflow.db", "mlartifacts/0/x", ".venv/x", ".dvc/cache/x", ".dvc/config.local"}
    tracked = {*KEPT_IN_GIT, "dvc.lock", "params.schema.json", ".dvc/plots/variants.json"}
    tracked |= {"profiles/README.md", "inference/README.md", "sessions/20261123T040000.json"}
    assert set(fresh.run("git", "check-ignore", *made, *tracked).split()) == made


def test_dvc_ignores_bytecode_and_partial_files(fresh: Clone) -> None:
    left = {"pipeline/techniques/__pycache__/base.cpython-312.pyc", "results/ddp.json.partial"}
    asked = {*left, "pipeline/techniques/base.py", "results/ddp.json"}
    assert set(fresh.run("dvc", "check-ignore", *asked).split()) == left


def test_dvc_sends_no_analytics_and_has_no_remote() -> None:
    text = (ROOT / ".dvc" / "config").read_text(encoding="utf-8")
    assert "analytics = false" in text
    assert "autostage = true" in text
    assert not [line for line in text.splitlines() if line.strip().startswith(("[remote", "['remote", "url"))]
