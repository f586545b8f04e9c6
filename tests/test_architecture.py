"""Who may import whom, and what the quick commands must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.imports import imported, modules, own, tree

LAYERS = (
    {"config", "interpreter", "stats"},
    {"results", "factories"},
    {"environment", "distributed", "heap", "measurement", "sampling", "checkpoints"},
    {"models", "data", "objectives", "optimizers", "verdicts"},
    {"ablation", "detectors", "losses", "techniques", "tracking"},
    {"evaluation"},
    {"training"},
    {"ledger", "flops"},
    {"assembly", "records"},
    {"arm", "job", "inference", "profiling", "verification"},
    {"benchmark", "comparison"},
    {"doctor", "gate", "listing", "report", "variant_sets"},
    {"cli"},
    {"__main__"},
)
"""Lowest first. A module imports only from lower layers; data, techniques and tracking are packages, free inside."""

ROOT = Path(__file__).parent.parent
MODULES = sorted(set(modules()) - {"pipeline"})


def unit(module: str) -> str:
    return module.split(".")[1]


def layer(module: str) -> int:
    return next(index for index, units in enumerate(LAYERS) if unit(module) in units)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    assert any(unit(module) in units for units in LAYERS), f"{module} has no layer yet: give it one above"
    wrong = {
        other
        for other in own(imported(tree(module), module))
        if unit(other) != unit(module) and layer(other) >= layer(module)
    }
    assert not wrong, f"{module} imports from its own or a higher layer: {sorted(wrong)}"


def test_the_package_itself_imports_nothing() -> None:
    assert imported(tree("pipeline"), "pipeline") == set()


@pytest.mark.parametrize(
    ("library", "only"), [("mlflow", {"tracking"}), ("torch.distributed", {"distributed", "techniques"})]
)
def test_one_place_knows(library: str, only: set[str]) -> None:
    knowing = {
        unit(module)
        for module in MODULES
        if any(name == library or name.startswith(f"{library}.") for name in imported(tree(module), module))
    }
    assert knowing <= only


def test_launcher_variables_are_known_in_one_place() -> None:
    variables = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    knowing = {
        unit(module)
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant) and node.value in variables
    }
    assert knowing == {"distributed"}


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], ["pydantic", "yaml", "numpy"]),
        (["train", "--help"], ["pydantic", "yaml", "numpy"]),
        (["schema", "--check"], ["numpy"]),
        (["environment"], ["numpy"]),
        (["train", "baseline"], ["numpy"]),  # with a mistake in params.yaml
        (["doctor"], ["numpy"]),  # it looks at torch and DVC in processes of their own
    ],
)
def test_a_quick_command_loads_nothing_heavy(arguments: list[str], heavy: list[str], tmp_path: Path) -> None:
    never = [*heavy, "torch", "torchvision", "mlflow", "matplotlib", "sklearn", "pandas", "requests"]
    params = "{}" if arguments[0] == "train" else (ROOT / "params.yaml").read_text(encoding="utf-8")
    (tmp_path / "params.yaml").write_text(params, encoding="utf-8")
    program = (
        "import sys\n"
        "from pipeline.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print(*(name for name in {never!r} if name in sys.modules), sep=', ')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == ""
