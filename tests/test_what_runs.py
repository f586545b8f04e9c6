"""After an edit, `dvc repro` reruns a stage if and only if the code or settings that the stage uses have changed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pipeline.environment import code, stages
from pipeline.errors import ConfigError
from pipeline.params import parse
from pipeline.plans import plan, plans
from tests.conftest import Clone
from tests.parallel import CPU
from tests.test_adding_a_technique import add_technique

NET = "from layers import net\n"
LAYERS = """\
from torch import nn


def net(channels, height, width, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, classes))
"""
PARAMS = {
    "fetch.dataset": "digits",
    "train.model": "net:net",
    "train.files": ["settings.json"],
    "train.device": "cpu",
    "train.seeds": [0],
    "train.epochs": 1,
    "train.batch_size": 64,
    "bench.max_rounds": 1,
    "bench.window_seconds": 0.01,
    "publish.live": False,
    "profile.variants": [],
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
def done(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """Make a clone whose stages up to bench are up to date for DVC."""
    checkout = of_the_user_s(path := tmp_path_factory.mktemp("done"))
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
    return checkout


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
        if any(isinstance(each, dict) and set(each) != {"changed outs"} for each in changes) and stage != "environment"
    }


def test_what_no_number_depends_on_runs_nothing_again(checkout: Clone) -> None:
    for file, pattern, replacement in [
        ("pipeline/training/loop.py", r"\A", "# A remark.\n"),
        ("pipeline/training/loop.py", r'    """One seed', '    """Exactly one seed'),
        ("pipeline/training/loop.py", r"self\.steps \+= 1", "self.steps += (\n1\n)"),
        ("pipeline/techniques/channels_last.py", r"\A", '"""Another word."""\n'),
        ("pipeline/params/catalogue/memory.py", r'does="', 'does="In short: '),
        ("pipeline/plans.py", r"(?m)^def plan\(", "_UNUSED = 1\n\n\ndef plan("),
        ("pipeline/tracking/labels.py", r"\Z", "\n_UNUSED = 1\n"),
        ("layers.py", r"\A", "# A remark.\n"),
        ("params.yaml", r"(?m)^train:\n", "train:\n  warmup_steps: 5\n"),  # 5 is the default
        ("params.yaml", r"(?m)^train:\n", "train:\n  checkpoint_every_steps: 7\n"),
    ]:
        edit(checkout.path / file, pattern, replacement)
    assert due(checkout) == set()


def test_each_stage_runs_again_for_its_own_code_and_no_other(checkout: Clone) -> None:
    for file in (
        "pipeline/data/sources/places.py",
        "pipeline/data/packing.py",
        "pipeline/techniques/channels_last.py",
        "pipeline/profiling/ledger/allocation_trace.py",
    ):
        edit(checkout.path / file, r"\Z", "\n_UNUSED = 1\n")
    assert due(checkout) == {"fetch", "prepare", "train@format", "bench"}


@pytest.mark.parametrize("file", ["layers.py", "settings.json"])  # an imported module, and a file of train.files
def test_a_file_that_the_user_s_own_module_needs_runs_them_again_and_is_named(checkout: Clone, file: str) -> None:
    edit(checkout.path / file, r"\Z", "\nUNUSED = 1\n")
    assert due(checkout) == MEASURED
    assert f"variants.format.code.{file}" in checkout.run("dvc", "params", "diff", "--targets", "environment.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "replacement", "expected"),
    [
        (r"window_seconds: 0\.01", "window_seconds: 0.025", {"bench"}),
        (r"(?m)^  seeds:\n", "  seeds:\n  - 1\n", TRAINED),
        ("channels_last: true", r"\g<0>\n    set_to_none: false", {"train@format", "bench"}),
    ],
)
def test_settings_on_which_numbers_depend_run_again_what_reads_them(
    checkout: Clone, pattern: str, replacement: str, expected: set[str]
) -> None:
    edit(checkout.path / "params.yaml", pattern, replacement)
    assert due(checkout) == expected


@pytest.mark.slow
def test_a_new_technique_runs_nothing_again_until_a_variant_asks_for_it(checkout: Clone) -> None:
    name = add_technique(checkout.path)
    assert due(checkout) == set()
    values = yaml.safe_load((checkout.path / "params.yaml").read_text())
    values["variants"]["baseline"] = {name: True}
    (checkout.path / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    assert due(checkout) == {"train@baseline", "bench"}


def test_a_recorded_plan_has_only_the_settings_that_it_uses() -> None:
    """A new setting must not change the plans of variants that do not use it."""
    variants = {"baseline": {}, "two": {"channels_last": True, "data_loading": "dataloader", "loader_workers": 0}}
    made = plans(parse({"variants": variants}), CPU)
    baseline, two = (stages.training(each)["variant"]["plan"] for each in made.values())
    assert baseline["applied"] == baseline["requested"] == {}
    assert two["applied"] == variants["two"]
    assert two["techniques"] == ["channels_last", "dataloader"], "not in the order in which they apply"


def test_checkpoints_survive_what_runs_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's name depends on the code of the stage and of the variant, and on the settings of both."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("VALUE = 1\n")

    def depends_on(**train: object) -> object:
        code._source.cache_clear()
        code._located.cache_clear()
        config = parse({"train": {"model": "net:net", **train}, "variants": {"baseline": {}}})
        return stages.training(plan(config, "baseline", CPU))

    before = depends_on()
    Path("net.py").write_text("# A remark.\nVALUE = 1\n")
    assert depends_on(checkpoint_every_steps=5, warmup_steps=5) == before
    assert depends_on(warmup_steps=11) != before
    Path("net.py").write_text("VALUE = 2\n")
    assert depends_on() != before


def test_files_beside_a_module_are_no_code_and_invalid_python_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("import layers\n")
    Path("layers.py").write_text("VALUE = 1\n")
    Path("net.bak").mkdir()
    Path("net.log").write_text("a line")
    config = parse({"train": {"model": "net:net"}, "variants": {"baseline": {}}})
    assert set(code.of_variant(plan(config, "baseline", CPU))) == {"net.py", "layers.py"}
    assert "pipeline/report/page.html" in code.of_stage("compare")
    Path("layers.py").write_text("VALUE =\n")
    code._source.cache_clear()
    code._located.cache_clear()
    with pytest.raises(ConfigError, match=r"layers\.py, which a stage would run, is not valid Python: .*line 1"):
        code.of_variant(plan(config, "baseline", CPU))


@pytest.mark.slow
def test_the_digests_are_of_all_that_a_stage_and_its_processes_import(tmp_path: Path) -> None:
    checkout = of_the_user_s(tmp_path / "clone")
    checkout.edit({"variants.clipped": None, "infer.forms": ["eager"], "infer.rounds": 1})
    checkout.run("python", "-m", "pipeline", "environment")
    content = json.loads((checkout.path / "environment.json").read_text())
    train = ("train baseline", "train format")
    for stage in ("fetch", "prepare", *train, "bench", "profile format", "infer format", "compare"):
        output = checkout.run("python", "-m", "pipeline", *stage.split(), PYTHONPROFILEIMPORTTIME="1")
        names = set(re.findall(r"\| +((?:pipeline|net|layers)\b[\w.]*)$", output, re.MULTILINE))
        as_values = tuple(f"{each}." for each in code.FOUND_AS_VALUES)
        imported = {name for name in names if not f"{name}.".startswith(as_values)}
        digests = {**content["stages"][stage.split()[0]]["code"], **content["variants"]["format"]["code"]}
        if stage == "bench":
            digests |= {file: digest for each in content["variants"].values() for file, digest in each["code"].items()}
        known = {file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in digests}
        # These modules choose the command, and start and end processes. They change no output.
        assert imported - known <= {"pipeline.cli", "pipeline.processes", "pipeline.processes.forkserver"}, stage
        assert len(imported) > 3, stage
