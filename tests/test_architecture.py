"""Which module may import which, and what quick commands must not import."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from pipeline import tasks
from tests.commands import printed
from tests.imports import imported, modules, own, tree

ROOT = Path(__file__).parent.parent
MODULES = sorted(set(modules()) - {"pipeline"})
ROOMS = re.findall(r"^\| (\d+) \| (`.*?`) \|", (ROOT / "docs" / "architecture.md").read_text("utf-8"), re.MULTILINE)
LAYERS = {name: int(number) for number, names in ROOMS for name in re.findall(r"`(\w+)", names)}
"""Module or package at the top of ``pipeline`` -> number of its room in docs/architecture.md.
Imports inside a room are free."""


def unit(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_lower_rooms(module: str) -> None:
    assert unit(module) in LAYERS, f"{module} has no room yet: give it one in docs/architecture.md"
    wrong = {
        imported_name
        for imported_name in own(imported(tree(module), module))
        if unit(imported_name) != unit(module) and LAYERS[unit(imported_name)] >= LAYERS[unit(module)]
    }
    assert not wrong, f"{module} imports from rooms whose numbers are not lower: {sorted(wrong)}"


def test_the_table_lists_every_room_in_order() -> None:
    numbers = [int(number) for number, _ in ROOMS]
    assert numbers == sorted(numbers)
    listed = re.findall(r"`(\w+)", " ".join(names for _, names in ROOMS))
    assert sorted(listed) == sorted({unit(module) for module in MODULES})


def test_the_wheel_contains_every_package() -> None:
    """It also contains ``pipeline.project``, which is the top directory of a checkout."""
    packages = {".".join(path.relative_to(ROOT).parent.parts) for path in ROOT.glob("pipeline/**/__init__.py")}
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert sorted({*packages, "pipeline.project"}) == listed


def test_a_private_name_means_one_thing_in_its_room() -> None:
    defined: dict[tuple[str, str], list[str]] = {}
    for module in MODULES:
        for node in tree(module).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.startswith("_"):
                defined.setdefault((unit(module), node.name), []).append(module)
    assert {name: modules for (_, name), modules in defined.items() if len(modules) > 1} == {}


def test_no_module_outside_the_tasks_names_a_task() -> None:
    names = {"classification", "language_model", "multi_label", "regression"}
    assert names == set(tasks._OWN)
    for module in MODULES:
        if unit(module) != "tasks":
            compared = [
                part
                for node in ast.walk(tree(module))
                if isinstance(node, ast.Compare | ast.MatchValue)
                for part in ast.walk(node)
            ]
            assert not names & {part.value for part in compared if isinstance(part, ast.Constant)}, module


def test_the_package_itself_imports_nothing() -> None:
    assert imported(tree("pipeline"), "pipeline") == set()


@pytest.mark.parametrize(
    ("library", "only"), [("mlflow", {"tracking"}), ("torch.distributed", {"distributed", "techniques"})]
)
def test_a_library_is_imported_only_where_it_is_allowed(library: str, only: set[str]) -> None:
    knowing = {
        unit(module)
        for module in MODULES
        if any(name == library or name.startswith(f"{library}.") for name in imported(tree(module), module))
    }
    assert knowing <= only


def test_launcher_variables_are_known_in_one_place() -> None:
    variables = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    knowing = {
        (unit(module), node.value if unit(module) == "processes" else "")
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant) and node.value in variables
    }
    assert knowing == {("distributed", ""), ("processes", "RANK"), ("processes", "WORLD_SIZE")}


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], ["pydantic", "yaml", "numpy"]),
        (["train", "--help"], ["pydantic", "yaml", "numpy"]),
        (["schema", "--check"], ["numpy"]),
        (["environment"], ["numpy"]),
        (["publish"], ["numpy", "scipy"]),  # with no results; with results that are published already, it is as quick
        (["train", "baseline"], ["numpy"]),  # with a mistake in params.yaml
        (["doctor"], ["numpy"]),  # which examines torch and DVC in child processes
    ],
)
def test_a_quick_command_loads_nothing_heavy(arguments: list[str], heavy: list[str], tmp_path: Path) -> None:
    never = [*heavy, "torch", "torchvision", "mlflow", "matplotlib", "sklearn", "pandas", "requests"]
    params = "{}" if arguments[0] == "train" else (ROOT / "params.yaml").read_text(encoding="utf-8")
    (tmp_path / "params.yaml").write_text(params, encoding="utf-8")
    program = (
        "import sys\n"
        "sys.executable = 'false'\n"  # so that the doctor's child processes, which take seconds, end at once
        "from pipeline.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print(*(name for name in {never!r} if name in sys.modules), sep=', ')\n"
    )
    assert printed(program, cwd=tmp_path, PYTHONPATH=str(ROOT)).splitlines()[-1] == ""
