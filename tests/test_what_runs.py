"""After an edit, `dvc repro` reruns a stage if and only if the code or settings that the stage uses have changed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pipeline.environment import code, imports, stages
from pipeline.errors import ConfigError
from pipeline.params import parse
from pipeline.plans import plan, plans
from tests.conftest import SHORT, Clone, Once
from tests.pages import add_technique
from tests.parallel import CPU

NET = "from layers import net\n"
LAYERS = """\
from torch import nn


def net(channels, height, width, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, classes))
"""
PARAMS = SHORT | {
    "train.model": "net:net",
    "train.files": ["settings.json"],
    "variants.ddp": None,
    "variants.memory": None,
    "variants.format": {"channels_last": True},
    "variants.clipped": {"gradient_accumulation": 2},
}
TRAINED = {"train@baseline", "train@format", "train@clipped"}
MEASURED = {*TRAINED, "bench"}


def of_the_user_s(path: Path) -> Clone:
    """Clone the project into ``path``, with a model of the user's own."""
    path.mkdir(exist_ok=True)
    checkout = Clone(path, {})
    (path / "net.py").write_text(NET)
    (path / "layers.py").write_text(LAYERS)
    (path / "settings.json").write_text('{"width": 8}')
    checkout.edit(PARAMS)
    return checkout


@pytest.fixture(scope="module")
def done(once: Once, tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone whose stages up to bench are up to date for DVC."""

    def make(path: Path) -> None:
        checkout = of_the_user_s(path)
        checkout.run("dvc", "repro", "environment")
        made = ["data/raw/a", "data/prepared/a", "bench.json"]
        for variant in ("baseline", "format", "clipped"):
            results = (f"results/{variant}{end}" for end in (".json", "/history.csv", "/system.csv"))
            made += [*results, f"models/{variant}/a"]
        for name in made:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(name)
        checkout.run("dvc", "commit", "--force", "fetch", "prepare", "bench", *sorted(TRAINED))
        checkout.commit()

    path = tmp_path_factory.mktemp("done") / "clone"
    shutil.copytree(once("what_runs", make), path, symlinks=True)
    return Clone.at(path)


@pytest.fixture
def checkout(done: Clone) -> Iterator[Clone]:
    yield done
    done.run("git", "reset", "--quiet", "--hard")  # also resets the index, because DVC stages the files that it writes
    done.run("git", "clean", "--quiet", "--force", "-d")


def edit(path: Path, pattern: str, replacement: str) -> None:
    text = path.read_text(encoding="utf-8")
    changed = re.sub(pattern, replacement, text, count=1)
    assert changed != text, f"{pattern} is not in {path}"
    path.write_text(changed, encoding="utf-8")


def due(checkout: Clone) -> set[str]:
    """Return the stages up to bench that DVC would run again."""
    checkout.run("dvc", "repro", "environment")
    status = json.loads(checkout.run("dvc", "status", "--json", "fetch", "prepare", "bench", *sorted(TRAINED)))
    return {
        stage
        for stage, changes in status.items()
        if any(isinstance(kind, dict) and set(kind) != {"changed outs"} for kind in changes) and stage != "environment"
    }


def test_what_no_number_depends_on_runs_nothing_again(checkout: Clone) -> None:
    for file, pattern, replacement in [
        ("pipeline/training/loop.py", r"\A", "# A remark.\n"),
        ("pipeline/training/loop.py", r'    """One seed', '    """Exactly one seed'),
        ("pipeline/training/loop.py", r"self\.steps \+= 1", "self.steps += (\n1\n)"),
        ("pipeline/techniques/channels_last.py", r"\A", '"""Another word."""\n'),
        ("pipeline/params/catalogue.yaml", r"(?m)^    does: Blocks", "    does: Some blocks"),
        ("pipeline/plans.py", r"(?m)^def plan\(", "_UNUSED = 1\n\n\ndef plan("),
        ("pipeline/results/figures.py", r'"Percentiles of', '"The percentiles of'),
        ("pipeline/tracking/contents.py", r"\Z", "\n_UNUSED = 1\n"),
        ("layers.py", r"\A", "# A remark.\n"),
        ("params.yaml", r"(?m)^train:\n", "train:\n  warmup_steps: 5\n"),  # 5 is the default
        ("params.yaml", r"(?m)^train:\n", "train:\n  checkpoint_every_steps: 7\n"),
    ]:
        edit(checkout.path / file, pattern, replacement)
    assert due(checkout) == set()


def test_each_stage_runs_again_for_its_code(checkout: Clone) -> None:
    for file in (
        "pipeline/data/sources.py",
        "pipeline/data/packing.py",
        "pipeline/techniques/channels_last.py",
        "pipeline/profiling/ledger.py",
    ):
        edit(checkout.path / file, r"\Z", "\n_UNUSED = 1\n")
    assert due(checkout) == {"fetch", "prepare", "train@format", "bench"}


@pytest.mark.parametrize("file", ["layers.py", "settings.json"])  # an imported module, and a file of train.files
def test_a_needed_file_runs_stages_again(checkout: Clone, file: str) -> None:
    edit(checkout.path / file, r"\Z", "\nUNUSED = 1\n")
    assert due(checkout) == MEASURED
    assert f"variants.format.code.{file}" in checkout.run("dvc", "params", "diff", "--targets", "environment.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "replacement", "expected"),
    [
        (r"window_seconds: 0\.05", "window_seconds: 0.025", {"bench"}),
        (r"(?m)^  seeds:\n", "  seeds:\n  - 1\n", TRAINED),
        ("channels_last: true", r"\g<0>\n    set_to_none: false", {"train@format", "bench"}),
    ],
)
def test_settings_run_again_what_reads_them(
    checkout: Clone, pattern: str, replacement: str, expected: set[str]
) -> None:
    edit(checkout.path / "params.yaml", pattern, replacement)
    assert due(checkout) == expected


@pytest.mark.slow
def test_a_new_technique_runs_nothing_again(checkout: Clone) -> None:
    name = add_technique(checkout.path)
    assert due(checkout) == set()
    values = yaml.safe_load((checkout.path / "params.yaml").read_text())
    values["variants"]["baseline"] = {name: True}
    (checkout.path / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    assert due(checkout) == {"train@baseline", "bench"}


def test_a_recorded_plan_has_only_used_settings() -> None:
    """A new setting must not change the plans of variants that do not use it."""
    variants = {"baseline": {}, "two": {"channels_last": True, "data_loading": "dataloader", "loader_workers": 0}}
    made = plans(parse({"variants": variants}), CPU)
    baseline, two = (stages.training(planned)["variant"]["plan"] for planned in made.values())
    assert baseline["applied"] == baseline["requested"] == {}
    assert two["applied"] == variants["two"]
    assert two["techniques"] == ["channels_last", "dataloader"], "not in the order in which they apply"


@pytest.mark.usefixtures("here")
def test_checkpoints_survive_what_runs_nothing_again() -> None:
    """A checkpoint's name depends on the code of the stage and of the variant, and on the settings of both."""
    Path("net.py").write_text("VALUE = 1\n")

    def depends_on(**train: object) -> object:
        imports.source_of.cache_clear()
        imports.located.cache_clear()
        config = parse({"train": {"model": "net:net", **train}, "variants": {"baseline": {}}})
        return stages.training(plan(config, "baseline", CPU))

    before = depends_on()
    Path("net.py").write_text("# A remark.\nVALUE = 1\n")
    assert depends_on(checkpoint_every_steps=5, warmup_steps=5) == before
    assert depends_on(warmup_steps=11) != before
    Path("net.py").write_text("VALUE = 2\n")
    assert depends_on() != before


@pytest.mark.usefixtures("here")
def test_files_beside_a_module_are_no_code() -> None:
    Path("net.py").write_text("import layers\n")
    Path("layers.py").write_text("VALUE = 1\n")
    Path("net.bak").mkdir()
    Path("net.log").write_text("a line")
    config = parse({"train": {"model": "net:net"}, "variants": {"baseline": {}}})
    assert set(code.of_variant(plan(config, "baseline", CPU))) == {"net.py", "layers.py"}
    pages = {
        name: {Path(file).name for file in code.of_stage(name) if "pages/" in file} for name in ("compare", "infer")
    }
    for of_script in (False, True):
        files = code.of_stage("bench", of_script=of_script)
        assert not [file for file in files if "/comparison/" in file], "statistics repeat no bench"
    assert pages["compare"] >= {"comparison.html", "comparison.md", "sentences.md"}
    assert pages["compare"].isdisjoint({"inference.md", "profile.md"})
    assert "inference.md" in pages["infer"]
    assert "comparison.md" not in pages["infer"]
    Path("layers.py").write_text("VALUE =\n")
    imports.source_of.cache_clear()
    imports.located.cache_clear()
    with pytest.raises(ConfigError, match=r"layers\.py, which a stage would run, is not valid Python: .*line 1"):
        code.of_variant(plan(config, "baseline", CPU))


@pytest.mark.slow
def test_the_digests_are_of_all_imports(tmp_path: Path) -> None:
    checkout = of_the_user_s(tmp_path / "clone")
    checkout.edit({"variants.clipped": None, "infer.forms": ["eager"], "infer.rounds": 1})
    checkout.run("python", "-m", "pipeline", "environment")
    content = json.loads((checkout.path / "environment.json").read_text())
    train = ("train baseline", "train format")
    for stage in ("fetch", "prepare", *train, "bench", "profile format", "infer format", "compare"):
        output = checkout.run("python", "-m", "pipeline", *stage.split(), PYTHONPROFILEIMPORTTIME="1")
        names = set(re.findall(r"\| +((?:pipeline|net|layers)\b[\w.]*)$", output, re.MULTILINE))
        as_values = tuple(f"{name}." for name in imports.FOUND_AS_VALUES)
        imported = {name for name in names if not f"{name}.".startswith(as_values)}
        digests = {**content["stages"][stage.split()[0]]["code"], **content["variants"]["format"]["code"]}
        if stage == "bench":
            digests |= {file: digest for user in content["variants"].values() for file, digest in user["code"].items()}
        known = {file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in digests}
        # These modules choose the command, and start and end processes. They change no output.
        unknown = imported - known - {"pipeline.cli", "pipeline.processes", "pipeline.processes.forkserver"}
        # The statistics only decide how many rounds the bench measures, and forecast the seeds that a training needs.
        statistics = "pipeline.comparison" if stage in ("bench", *train) else "-"
        assert not {name for name in unknown if not name.startswith(statistics)}, stage
        assert len(imported) > 3, stage
