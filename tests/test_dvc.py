"""dvc.yaml: its stages, that their deps are their imports, and how DVC reads it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from pipeline.config.loading import ASKED_BY_DVC
from tests.conftest import Clone
from tests.imports import PACKAGE, closure, imported, modules, tree

ROOT = PACKAGE.parent
PIPELINE = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
STAGES: dict[str, dict[str, Any]] = {name: stage.get("do", stage) for name, stage in PIPELINE["stages"].items()}
KEPT_IN_GIT = {"reports/accuracy.csv", "reports/loss.csv", "reports/ratios.csv", "reports/metrics"}
OF_A_VARIANT = {"train": "${key}", "profile": "${item}", "infer": "${item}"}
"""Stages with one for each variant, or for each in a list of variants, and how DVC calls the variant there."""
MAKES = {
    "environment": {"environment.json"},
    "fetch": {"data/raw"},
    "prepare": {"data/prepared"},
    "train": {"results/${key}.json", "results/${key}/history.csv", "results/${key}/system.csv", "models/${key}"},
    "bench": {"bench.json"},
    "profile": {"profiles/${item}"},
    "infer": {"inference/${item}.json", "inference/${item}.md"},
    "compare": {"reports/comparison.html", "reports/comparison.json", "reports/comparison.md", *KEPT_IN_GIT},
    "publish": set(),
}


def paths(entries: list[str | dict[str, Any]], cache: bool | None = None) -> Iterator[str]:
    """The paths of outs or plots; with ``cache``, those whose own ``cache`` is that."""
    for entry in entries:
        path, options = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
        if cache is None or options.get("cache") is cache:
            yield path


def of_params_yaml(stage: dict[str, Any]) -> list[str]:
    return [key for key in stage.get("params", []) if isinstance(key, str)]


def test_stages_run_the_command_of_their_name() -> None:
    assert {name: stage["cmd"] for name, stage in STAGES.items()} == {
        name: " ".join(["python -m pipeline", name, *([OF_A_VARIANT[name]] if name in OF_A_VARIANT else [])])
        for name in MAKES
    }


def test_stages_make_what_the_design_says() -> None:
    assert {name: set(paths(stage.get("outs", []))) for name, stage in STAGES.items()} == MAKES
    uncached = {path for stage in STAGES.values() for path in paths(stage.get("outs", []), cache=False)}
    assert uncached == KEPT_IN_GIT == {*PIPELINE["metrics"], *paths(PIPELINE["plots"])}


def test_what_notices_another_machine_and_what_mirrors_to_mlflow_always_run() -> None:
    assert {name for name, stage in STAGES.items() if stage.get("always_changed")} == {"environment", "publish"}


def test_what_is_measured_depends_on_the_environment_and_the_data() -> None:
    relied_on = {
        "train": "variants.${key}",
        "profile": "variants.${item}",
        "bench": "variants",
        "infer": "forms",
    }
    for stage, users in relied_on.items():
        assert "data/prepared" in STAGES[stage]["deps"]
        assert {"environment.json": ["hash", f"relied_on.{users}"]} in STAGES[stage]["params"]
    for stage in ("compare", "publish"):
        assert "environment.json" in STAGES[stage]["deps"]


@pytest.mark.parametrize("stage", STAGES)
def test_params_are_the_sections_of_params_yaml(stage: str) -> None:
    values = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    for dotted in of_params_yaml(STAGES[stage]):
        section = values
        for key in re.sub(r"\$\{\w+\}", "ddp", dotted).split("."):
            section = section[key]


def test_what_is_named_of_params_yaml_is_looked_for_before_any_work() -> None:
    named: dict[str, set[str]] = {stage: set() for stage in ASKED_BY_DVC}
    for name, stage in STAGES.items():
        named[name if name in named else ""] |= {key for key in of_params_yaml(stage) if "variants" not in key}
    assert {stage: set(keys) for stage, keys in ASKED_BY_DVC.items()} == {
        stage: keys - (named[""] if stage else set()) for stage, keys in named.items()
    }


def test_a_section_that_is_left_out_stops_repro_before_any_work(clone: Callable[..., Clone]) -> None:
    lacking = clone()
    params = lacking.path / "params.yaml"
    params.write_text(re.sub(r"(?ms)^bench:.*?(?=^\S)", "", params.read_text(encoding="utf-8")), encoding="utf-8")
    output = lacking.run("dvc", "repro", fails=True)
    assert "params.yaml: bench: missing; DVC asks for it and knows no defaults. Write bench: {}" in output
    assert "fetch" not in output


def routed(command: str) -> set[str]:
    """What cli.py imports to run ``command``: at its top, and in the command's function."""
    cli = tree("pipeline.cli")
    functions = {node.name: node for node in cli.body if isinstance(node, ast.FunctionDef)}
    top = ast.Module([node for node in cli.body if not isinstance(node, ast.FunctionDef)], type_ignores=[])
    return imported(top, "pipeline.cli") | imported(functions[f"_{command}"], "pipeline.cli")


def files(module: str) -> Iterator[str]:
    """The module's file, and those beside it that share its stem: what it reads of its own, such as a template."""
    path = modules()[module]
    beside = [path] if path.name == "__init__.py" else path.parent.glob(f"{path.stem}.*")
    for file in beside:
        if file.is_file():
            yield file.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("stage", STAGES)
def test_deps_are_the_imports(stage: str) -> None:
    listed = {
        file.relative_to(ROOT).as_posix()
        for dep in STAGES[stage]["deps"]
        if dep.startswith("pipeline/")
        for file in (sorted((ROOT / dep).rglob("*.*")) if (ROOT / dep).is_dir() else [ROOT / dep])
        if "__pycache__" not in file.parts
    }
    imports = routed(stage) | (routed("arms") if stage == "bench" else set())  # which it starts as processes
    runs = {file for module in closure(imports) for file in files(module)}
    assert listed == runs, f"dvc.yaml lists too much: {sorted(listed - runs)}, and lacks: {sorted(runs - listed)}"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone that the tests only look at."""
    return Clone(tmp_path_factory.mktemp("fresh"), {})


def test_a_fresh_clone_is_planned_whole_and_the_environment_first(fresh: Clone) -> None:
    stages = ["environment", "fetch", "prepare", "train@baseline", "train@ddp", "train@memory"]
    stages += ["bench", "profile@baseline", "compare", "publish"]
    assert fresh.run("dvc", "stage", "list", "--name-only").split() == stages
    planned = fresh.run("dvc", "repro", "--dry", fails=True)  # at the first file that is not there yet
    assert planned.startswith("Running stage 'environment'")


def test_a_new_variant_is_a_stage(clone: Callable[..., Clone]) -> None:
    tried = clone({"variants.tried": {"channels_last": True}, "variants.memory": None})
    stages = tried.run("dvc", "stage", "list", "--name-only").split()
    assert [stage for stage in stages if stage.startswith("train@")] == ["train@baseline", "train@ddp", "train@tried"]


def test_a_mistake_in_params_yaml_stops_repro_before_any_work(clone: Callable[..., Clone]) -> None:
    wrong = clone({"variants.ddp.processes": 3})
    output = wrong.run("dvc", "repro", fails=True)
    assert "train.batch_size: found 256, which variants.ddp cannot divide into 3 process(es)" in output
    assert "fetch" not in output


def test_a_value_set_for_an_experiment_reaches_params_yaml_and_leaves_its_comments(clone: Callable[..., Clone]) -> None:
    tried = clone()
    before = (tried.path / "params.yaml").read_text(encoding="utf-8")
    tried.run("dvc", "exp", "run", "--set-param", "variants.ddp.processes=4", "environment")
    after = (tried.path / "params.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(after)["variants"]["ddp"]["processes"] == 4
    assert after.count("#") == before.count("#")


def test_dvc_sees_another_environment_and_only_that(clone: Callable[..., Clone]) -> None:
    again = clone()
    locks = []
    for threads in ("1", "1", "7"):
        again.run("dvc", "repro", "environment", OMP_NUM_THREADS=threads)
        locks.append((again.path / "dvc.lock").read_text(encoding="utf-8"))
    assert locks[0] == locks[1] != locks[2]


def test_the_script_for_a_gpu_runs_before_a_stage_what_it_depends_on() -> None:
    script = (ROOT / "benchmarks" / "on_gpu.sh").read_text(encoding="utf-8")
    done: set[str] = set()
    for command in re.findall(r"python -m pipeline (\w+)", script):
        for dep in STAGES.get(command, {}).get("deps", []):
            makers = {name for name, made in MAKES.items() if any(f"{out}/".startswith(f"{dep}/") for out in made)}
            assert makers <= done, f"{command} reads {dep}"
        done.add(command)
    assert "compare" in done


def test_git_ignores_what_is_made_and_keeps_the_lock(fresh: Clone) -> None:
    made = {re.sub(r"\$\{\w+\}", "ddp", path) for each in MAKES.values() for path in each} - KEPT_IN_GIT
    kept_here = {"checkpoints/x.pt", "mlflow.db", "mlartifacts/0/x", ".venv/x", ".dvc/cache/x", ".dvc/config.local"}
    committed = {dep for stage in STAGES.values() for dep in stage["deps"] if dep.startswith("pipeline/")}
    asked = {*made, *kept_here, *committed, *KEPT_IN_GIT, "dvc.lock", "params.schema.json", ".dvc/plots/variants.json"}
    asked |= {"profiles/README.md", "inference/README.md"}
    assert set(fresh.run("git", "check-ignore", *asked).split()) == made | kept_here


def test_dvc_ignores_what_running_leaves_behind(fresh: Clone) -> None:
    left = {"pipeline/techniques/__pycache__/base.cpython-312.pyc", "results/ddp.json.partial"}
    asked = {*left, "pipeline/techniques/base.py", "results/ddp.json"}
    assert set(fresh.run("dvc", "check-ignore", *asked).split()) == left


def test_dvc_reports_nothing_home_and_has_no_remote() -> None:
    text = (ROOT / ".dvc" / "config").read_text(encoding="utf-8")
    assert "analytics = false" in text
    assert "autostage = true" in text
    assert not [line for line in text.splitlines() if line.strip().startswith(("[remote", "['remote", "url"))]
