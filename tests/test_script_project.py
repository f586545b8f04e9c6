"""A script in a project: params.yaml, trainings to the end, the files on which they depend, the bench and the gate."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from pipeline import environment, results
from pipeline.cli import NEEDS_OUR_LOOP, main
from pipeline.environment import stages
from pipeline.environment.imports import Unfollowed
from pipeline.errors import ConfigError, PipelineError
from pipeline.params import Command, Config, Script, parse, schema
from pipeline.plans import plans
from pipeline.results import HistoryRow
from pipeline.script import hook, training
from pipeline.script.arms import Scripts
from pipeline.script.jobs import KEPT, Job
from pipeline.tools import doctor
from tests import commands
from tests.conftest import ROOT, Clone
from tests.workspaces import CPU_ONLY

SCRIPT = """
import argparse, json, time
from pathlib import Path
import torch
from parts import net

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--batch", type=int, default=64)
options = parser.parse_args()
settings = json.loads(Path("config.json").read_text())
torch.manual_seed(0)
centres = torch.randn(10, 64) / 2

def data(count):
    labels = torch.randint(10, (count,))
    return centres[labels] + torch.randn(count, 64), labels

(inputs, labels), (test_inputs, test_labels) = data(1600), data(500)
torch.manual_seed(options.seed)
model = net(32)
optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=0.9)
held = torch.ones(2**24)
for _ in range(settings["epochs"]):
    for rows in torch.randperm(1600).split(options.batch):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        time.sleep(options.sleep + settings["sleep"])
        optimizer.step()
with torch.no_grad():
    accuracy = (model(test_inputs).argmax(1) == test_labels).float().mean().item()
Path("out").mkdir(exist_ok=True)
Path("out/metrics.json").write_text(json.dumps({"eval": {"accuracy": accuracy}}))
Path("out/metrics.json").read_text()
if Path("labels.txt").exists():
    Path("labels.txt").read_text()
print(f"accuracy={100 * accuracy:.2f}")
"""
FILES = {
    "train.py": SCRIPT,
    "parts.py": "from torch import nn\n\n\ndef net(width):\n"
    "    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))\n",
    "config.json": '{"lr": 0.05, "epochs": 2, "sleep": 0.0}',
    "README.md": "A script.\n",
}
OWN: dict[str, Any] = {
    "command": f"{sys.executable} train.py --seed {{seed}}",
    "metric": {"file": "out/metrics.json", "key": "eval.accuracy"},
    "outputs": ["out"],
}
PARAMS: dict[str, Any] = {
    "script": OWN,
    "train": {"seeds": [0, 1]},
    "variants": {"baseline": {}, "slower": {"arguments": "--sleep 0.001"}},
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with a script and its params.yaml."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in (FILES | {"params.yaml": yaml.safe_dump(PARAMS)}).items():
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return folder


# params.yaml


def test_a_variant_is_arguments_variables_or_another_command() -> None:
    variants = {
        "baseline": {},
        "tf32": {"arguments": "NVIDIA_TF32_OVERRIDE=1 --fast"},
        "two": {"command": "torchrun train.py --seed {seed}", "arguments": "--ddp"},
    }
    config = parse(PARAMS | {"variants": variants, "script": OWN | {"command": "A=1 python train.py --seed {seed}"}})
    base = ("python", "train.py", "--seed", "{seed}")
    changed = "A=1 python train.py --seed {seed}"
    assert config.command_of("baseline") == (base, {"A": "1"}, changed, ("out",))
    assert config.command_of("tf32")[:2] == ((*base, "--fast"), {"A": "1", "NVIDIA_TF32_OVERRIDE": "1"})
    assert config.command_of("two")[:2] == (("torchrun", "train.py", "--seed", "{seed}", "--ddp"), {"A": "1"})
    assert config.command_of("two").changed == "torchrun train.py --seed {seed} --ddp"
    assert config.command_of("tf32").seeded(7).words == ("python", "train.py", "--seed", "7", "--fast")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"variants": {"baseline": {"precision": "bf16"}}}, "variants.baseline.precision: found with a script"),
        ({"variants": {"baseline": {"arguments": "'"}}}, "variants.baseline.arguments: found"),
        ({"variants": {"baseline": {"command": "python a.py"}}}, "variants.baseline: its command has no {seed}"),
        ({"train": {"epochs": 5}}, "train.epochs: found 5, which a script does not read"),
        ({"profile": {"variants": ["baseline"]}}, "profile.variants: found ['baseline'], but a script"),
        ({"script": OWN | {"metric": {"file": "a.json"}}}, "script.metric: expected file and key, or pattern"),
        ({"script": OWN | {"metric": {"pattern": "acc"}}}, "script.metric.pattern: found 'acc'; expected"),
        ({"script": OWN | {"metric": {"pattern": "("}}}, "script.metric.pattern: found '('; expected"),
        ({"script": OWN | {"outputs": ["/tmp"]}}, "script.outputs: found '/tmp'; expected a path inside"),
        ({"script": OWN | {"outputs": ["."]}}, "script.outputs: found '.'; allowed: paths of which none contains"),
        ({"script": OWN | {"outputs": ["out/last.pt", "out"]}}, "script.outputs: found 'out/last.pt'; allowed"),
        ({"script": OWN | {"outputs": ["output.txt"]}}, "script.outputs: found 'output.txt'; allowed"),
        ({"script": OWN | {"batch_differs": True, "samples_per_step": 8}}, "script.samples_per_step: found with"),
        ({"script": OWN | {"comand": "x"}}, "script.comand: unknown key. Did you mean command?"),
        ({"script": None, "variants": {"baseline": {"arguments": "--x"}}}, "variants.baseline.arguments: found '--x'"),
    ],
)
def test_what_a_script_lacks_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        parse(PARAMS | changes)


def test_one_seed_needs_no_place_for_it() -> None:
    assert parse(PARAMS | {"train": {"seeds": [3]}, "script": OWN | {"command": "python train.py"}}).script


def test_the_job_says_what_is_set_about_steps() -> None:
    assert parse(PARAMS).job.keys() == {"command", "metric", "score", "seeds"}, "as in older results"
    set_ = {"samples_per_step": 128, "optimizer": 1}
    assert parse(PARAMS | {"script": OWN | set_}).job == parse(PARAMS).job | set_
    assert parse(PARAMS | {"script": OWN | {"batch_differs": True}}).job == parse(PARAMS).job | {"batch_differs": True}


def test_the_schema_describes_a_script() -> None:
    assert "Files and folders that the script writes" in schema()


# The score


def value_of(metric: dict[str, Any], folder: Path, output: str = "") -> float:
    job = SimpleNamespace(name="baseline seed 1", work=folder, output=lambda: output, said=lambda: "\n  | last words")
    made = Script.model_validate(OWN | {"metric": metric})
    return training._score(made, 1, cast(Job, job), 0.0)[0]


def test_the_score_is_in_a_file_or_the_output(tmp_path: Path) -> None:
    (tmp_path / "metrics-1.json").write_text('{"eval": {"accuracy": 0.5}, "text": "0.25"}', encoding="utf-8")
    assert value_of({"file": "metrics-{seed}.json", "key": "eval.accuracy"}, tmp_path) == 0.5
    assert value_of({"file": "metrics-{seed}.json", "key": "text"}, tmp_path) == 0.25
    assert value_of({"pattern": r"acc=(\S+)"}, tmp_path, "acc=0.1\nacc=0.75\n") == 0.75


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        ({"file": "none.json", "key": "a"}, "a in none.json: [Errno 2] No such file or directory"),
        ({"file": "metrics.json", "key": "a.b"}, "a.b in metrics.json: could not convert string to float: 'nothing'"),
        ({"file": "metrics.json", "key": "nan"}, "found nan as its accuracy"),
        ({"file": "metrics.json", "key": "a"}, "must be a string or a real number, not 'list'"),
        ({"pattern": "loss=(.*)"}, "'loss=(.*)': could not convert string to float: 'nothing'"),
    ],
)
def test_a_missing_score_shows_the_last_lines(metric: dict[str, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text('{"a": [1], "nan": NaN}', encoding="utf-8")
    with pytest.raises(PipelineError, match=r"^baseline seed 1: script\.metric") as raised:
        value_of(metric, tmp_path, "acc=1")
    assert told in str(raised.value)
    assert "  | last words" in str(raised.value)


@pytest.mark.parametrize(
    ("metric", "value", "score"),
    [({}, 0.9, 0.9), ({"scale": 100.0}, 90.0, 0.9), ({"scale": 10.0, "higher_is_better": False}, 2.0, 0.8)],
)
def test_a_score_becomes_a_share_to_be_raised(metric: dict[str, Any], value: float, score: float) -> None:
    assert Script.model_validate(OWN | {"metric": {"pattern": "(.)"} | metric}).metric.score(value) == score


# What a training depends on


@pytest.mark.usefixtures("project")
def test_the_hook_notes_each_opened_file_once(tmp_path: Path) -> None:
    Path("main.py").write_text(
        "import os\nopen('config.json').read(); open('config.json').read(); open('made', 'w')\n"
        "if not os.fork():\n    open('parts.py').read()\n    os._exit(0)\nos.wait()\n",
        encoding="utf-8",
    )
    ours = tmp_path / "ours"
    ours.mkdir()
    shutil.copy(hook.__file__, ours / "sitecustomize.py")
    (ours / hook.OPENED).touch()
    variables = {"PYTHONPATH": str(ours), hook.FOLDER: str(ours)}
    subprocess.run([sys.executable, "main.py"], env=os.environ | variables, check=True)
    noted = [json.loads(line) for line in (ours / hook.OPENED).read_text("utf-8").splitlines()]
    in_project = [(writes, Path(name).name) for writes, name in noted if Path(name).parent == Path.cwd()]
    assert sorted(in_project) == [*((False, name) for name in ("config.json", "main.py", "parts.py")), (True, "made")]


def test_reading_and_writing_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Callable[[str, tuple[Any, ...]], None]] = []
    monkeypatch.setattr(sys, "addaudithook", hooks.append)
    (log := tmp_path / "log").touch()
    hook.watch(log)
    read, both, no_file = ("/a", "r", os.O_RDONLY), (b"/b", "r+", os.O_RDWR), (5, "r", os.O_RDONLY)
    written, by_python = ("/c", "w", os.O_WRONLY | os.O_TRUNC), (Path("/d"), "r", None)
    for event, opened in [("open", of) for of in (read, read, both, no_file, written, by_python)] + [("exec", read)]:
        hooks[0](event, opened)
    noted = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert noted == [[False, "/a"], [False, "/b"], [True, "/c"], [False, "/d"]]


def test_files_that_are_read_are_inputs(project: Path) -> None:
    (project / ".cache").mkdir()
    for name in ("out.json", "both.json", ".cache/x", "run.sh", "big.json"):
        (project / name).write_text("", encoding="utf-8")
    events = [
        (False, "config.json"),
        (True, "out.json"),
        (False, "out.json"),
        (False, "both.json"),
        (True, "both.json"),
    ]
    events += [(False, name) for name in ("gone.json", ".cache/x", "../outside.json", "out/a")]
    events += [(False, importlib.util.cache_from_source("parts.py"))]
    command = Command(
        ("bash", "run.sh", "--settings=./big.json", "--to", "out.json", "--from", "none.json", "x" * 300),
        outputs=("out",),
    )
    (project.parent / hook.OPENED).write_text("\n".join(map(json.dumps, events)), encoding="utf-8")
    job = SimpleNamespace(folder=project.parent, work=project, command=command)
    (project.parent / "outside.json").touch()
    (project / "out").mkdir()
    (project / "out/a").touch()
    read = {"config.json", "both.json", "run.sh", "big.json", "parts.py"}
    assert Job.files_read(cast(Job, job)) == read


def known(config: Config, *names: str) -> dict[str, Any]:
    """environment.json after the script was seen to read these files."""
    from pipeline.environment import code

    assert config.script
    files = code.of_opened([Path(name) for name in names])
    seen = {"commands": [*stages.commands_of(config).values()], "files": files, "alone": False}
    return stages.described(config, plans(config, CPU_ONLY), script=seen) | {"script": seen}


def edited(name: str, text: str) -> None:
    """Write the file anew; digests are cached by path in a process, so forget them."""
    from pipeline.environment import code, imports

    Path(name).write_text(text, encoding="utf-8")
    for cached in (imports.source_of, code._content):
        cached.cache_clear()


@pytest.mark.usefixtures("project")
def test_an_edited_config_changes_variants_a_comment_none() -> None:
    config = parse(PARAMS)
    names = ("config.json", "parts.py", "train.py")
    before = known(config, *names)
    edited("README.md", "another")
    edited("parts.py", f"# A comment.\n{FILES['parts.py']}")
    assert known(config, *names)["digests"] == before["digests"]
    assert stages.script_seen(config, before) == before["script"]
    edited("parts.py", f'"""Usage: train.py [--wide]"""\n{FILES["parts.py"]}')
    assert stages.script_seen(config, before) is None, "docopt reads it"
    edited("parts.py", FILES["parts.py"])
    edited("config.json", "{}")
    after = known(config, *names)["digests"]
    assert all(after["variants"][name] != digest for name, digest in before["digests"]["variants"].items())
    assert after["stages"] == before["digests"]["stages"]
    assert stages.script_seen(config, before) is None


def test_first_steps_say_which_files_are_inputs(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "big.json").write_text(FILES["config.json"], encoding="utf-8")
    option = "parser.add_argument('--config', default='config.json')\noptions ="
    text = SCRIPT.replace('"config.json"', "options.config").replace("options =", option, 1)
    (project / "train.py").write_text(text, encoding="utf-8")
    variants: dict[str, Any] = {"baseline": {}, "same": {}, "big": {"arguments": "--config big.json"}}
    params = PARAMS | {"variants": variants}
    (project / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    config = parse(params)
    assert main(["environment"]) == 0
    seen = environment.read()["script"]
    assert [*seen["files"]] == ["big.json", "config.json", "parts.py", "train.py"]
    assert capsys.readouterr().out.count("up to its first step") == 2, "equal commands once"
    assert stages.script_seen(config, {"script": seen}) == seen
    further = {"variants": variants | {"new": {"arguments": "--batch 32"}}}
    assert stages.script_seen(parse(PARAMS | further), {"script": seen}) is None


def test_a_training_without_a_digest_ends_at_once(
    trained: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    edited("train.py", SCRIPT.replace("import argparse", "open('README.md').read()\nimport argparse"))
    monkeypatch.setattr(Job, "train", lambda _: pytest.fail("it was trained"))
    with pytest.raises(
        Unfollowed,
        match=re.escape("README.md was read by the job's own code, but has no digest."),
    ):
        trained({})


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("changes", "moved"),
    [
        ({"script": OWN | {"timeout_seconds": 5.0}}, set()),
        ({"script": OWN | {"metric": {"pattern": "a(.)"}}}, {"baseline", "slower"}),
        ({"variants": {"baseline": {}, "slower": {"arguments": "--sleep 1"}}}, {"slower"}),
        ({"train": {"seeds": [0, 1], "files": ["README.md"]}}, {"baseline", "slower"}),
    ],
)
def test_a_variant_depends_on_its_command_and_score(changes: dict[str, Any], moved: set[str]) -> None:
    before = known(parse(PARAMS), "train.py")["digests"]["variants"]
    after = known(parse(PARAMS | changes), "train.py")["digests"]["variants"]
    assert {name for name in before if before[name] != after[name]} == moved


@pytest.mark.usefixtures("project")
def test_a_file_that_is_read_late_is_refused() -> None:
    config, content = parse(PARAMS), {"script": {"files": {"train.py": ""}}}
    training.check_known(["train.py"], content, config)
    with pytest.raises(Unfollowed, match=re.escape("train.files: [config.json].")):
        training.check_known(["train.py", "config.json"], content, config)
    listed = parse(PARAMS | {"train": {"seeds": [0], "files": ["config.json"]}, "script": OWN})
    training.check_known(["train.py", "config.json"], content, listed)


# Stages and commands


@pytest.mark.usefixtures("project")
def test_fetch_and_prepare_have_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for stage, output in ("fetch", "data/raw"), ("prepare", "data/prepared"):
        assert main([stage]) == 0
        assert [*Path(output).iterdir()] == []
        assert f"{stage}: nothing to do" in capsys.readouterr().out


@pytest.mark.usefixtures("project")
def test_data_where_dvc_would_delete_them_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("data/raw", "data/prepared"):
        Path(folder, "mine").mkdir(parents=True)
        (mine := Path(folder, "mine", "data.bin")).touch()
        assert main(["environment"]) == 2
        assert f"{mine}: found in {folder}, which belongs to DVC" in capsys.readouterr().err
        mine.unlink()


@pytest.mark.usefixtures("project")
def test_commands_that_need_our_loop_say_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    of_variant = [[name, "baseline"] for name in ("profile", "infer", "plan")]
    for words in (*of_variant, ["predict-memory"], ["verify"], ["scale"], ["advise"], ["promote"]):
        assert main(words) == 2
        said.append(capsys.readouterr().err)
    assert all("does not know what a script trains" in text for text in said)
    assert len(set(said)) == len(NEEDS_OUR_LOOP)


@pytest.mark.parametrize(("command", "status"), [(OWN["command"], "ok"), ("pyhton train.py --seed {seed}", "PROBLEM")])
def test_the_doctor_looks_for_the_command(command: str, status: str, project: Path) -> None:
    params = PARAMS | {"script": OWN | {"command": command}}
    (project / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    [finding] = doctor.parts()
    assert (finding.status, f"script.command: {command.split()[0]}" in finding.fact) == (status, True)


# Trainings


@pytest.fixture
def trained(project: Path) -> Callable[..., Config]:
    """``trained(changes, name)`` trains a variant with these changes of params.yaml, as the stages do."""

    def train(changes: dict[str, Any], name: str = "baseline") -> Config:
        params = PARAMS | changes
        (project / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
        config = parse(params)
        content = environment.fingerprint({"variants": {variant: frozenset() for variant in config.variants}})
        recorded = content | known(config, "train.py", "parts.py", "config.json")
        Path("environment.json").write_text(json.dumps(recorded), encoding="utf-8")
        training.run(config, name, CPU_ONLY)
        return config

    return train


def test_each_seed_trains_and_finished_seeds_stay(
    project: Path, trained: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    percent = OWN | {"metric": {"pattern": "accuracy=(.*)", "scale": 100.0}}
    params: dict[str, Any] = {"script": percent, "variants": {"baseline": {}, "baseline-seed-x": {}}}
    trained(params | {"train": {"seeds": [0]}}, "baseline-seed-x")
    capsys.readouterr()
    config = trained(params | {"train": {"seeds": [0]}})
    said = capsys.readouterr().out
    assert re.search(r"accuracy=\d\d\.\d\d\nbaseline seed 0: accuracy \d", said), "the output is shown"
    result = results.read(results.result_file("baseline"), config)
    (run,) = result.runs
    assert (run.steps, result.batch_size, result.unit.name, result.dataset) == (50, 64, "samples", None)
    assert run.test_accuracy == pytest.approx(run.findings["accuracy"] / 100)
    assert run.test_accuracy > 0.3, "a guess has 0.1"
    assert (run.train_loss, result.changed, result.parameter_count) == (None, percent["command"], 2410)
    rows = results.read_history(results.history_file("baseline"))
    assert [(row.seed, row.step, row.test_accuracy) for row in rows] == [(0, 50, run.test_accuracy)]
    assert isinstance(rows[0], HistoryRow)
    assert json.loads((project / "models/baseline/seed-0/out/metrics.json").read_text("utf-8"))
    assert "accuracy=" in (project / "models/baseline/seed-0/output.txt").read_text("utf-8")
    assert not (project / "out").exists(), "the script ran in a copy"
    assert (project / "results/baseline/system.csv").exists()
    config = trained(params | {"train": {"seeds": [0, 1]}})
    assert "baseline seed 0: complete in" in capsys.readouterr().out
    trained(params | {"train": {"seeds": [0]}}, "baseline-seed-x")
    assert [path.name for path in (KEPT / "baseline-seed-x").iterdir()] == ["seed-0"]
    again = results.read(results.result_file("baseline"), config)
    assert again.runs[0] == run
    assert again.runs[1].model_sha256 != run.model_sha256


def test_a_training_may_run_in_a_fork_and_leave_broken_links(project: Path, trained: Callable[..., Config]) -> None:
    (project / "main.py").write_text(f"{SCRIPT}\nPath('out/latest').symlink_to('gone')\n", encoding="utf-8")
    fork = "import multiprocessing, runpy\nfork = multiprocessing.get_context('fork').Process("
    fork += "target=runpy.run_path, args=['main.py'])\nfork.start()\nfork.join()\nraise SystemExit(fork.exitcode)\n"
    (project / "train.py").write_text(fork, encoding="utf-8")
    config = trained({"train": {"seeds": [0], "files": ["main.py"]}})
    assert results.read(results.result_file("baseline"), config).runs[0].steps == 50
    assert [path.name for path in (project / "models/baseline/seed-0/out").iterdir()] == ["metrics.json"]


def test_an_evaluation_is_no_time_of_training(project: Path, trained: Callable[..., Config]) -> None:
    """Long first steps are: only what comes later shows how long a step takes."""
    waits = "time.sleep({2: 0.3, 3: 0.3, 7: 0.5}.get(options.sleep, 0.01)); options.sleep += 1"
    (project / "train.py").write_text(SCRIPT.replace('time.sleep(options.sleep + settings["sleep"])', waits), "utf-8")
    config = trained({"train": {"seeds": [0]}})
    (run,) = results.read(results.result_file("baseline"), config).runs
    assert run.evaluate_seconds == pytest.approx(0.5, abs=0.05)
    assert run.train_seconds > 0.6


def _asking() -> None:
    sys.stdin = io.StringIO('{"do": "describe"}\n')


def described() -> dict[str, Any]:
    """Return what a server of arms says of the project."""
    said = commands.Command("arms", variables=dict(os.environ), first=_asking).communicate(100)
    answer: dict[str, Any] = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    return answer


def test_what_runs_the_script_needs_the_present_files_in_environment_json(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    content = environment.fingerprint() | known(parse(PARAMS), "config.json")
    (project / "environment.json").write_text(json.dumps(content), encoding="utf-8")
    assert described()["requests"] == [*Scripts.requests]
    edited("config.json", "{}")
    assert "does not describe the present script" in described()["error"]
    assert main(["train", "baseline"]) == 2
    assert "does not describe the present script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"command": f"{sys.executable} train.py --seed {{seed}} --batch x"}, "invalid int value: 'x'"),
        (
            {"command": f"{sys.executable} late.py --seed {{seed}}"},
            "after 50 steps, the command ended with exit code 3",
        ),
        ({"metric": {"file": "out/none.json", "key": "a"}}, "a in out/none.json: [Errno 2] No such file"),
        ({"metric": {"pattern": "accuracy=(.*)"}}, "set script.metric.scale to the value that counts as 100%"),
        ({"outputs": ["best"]}, "script.outputs: found 'best', which the script did not write"),
        ({"metric": {"file": "old.json", "key": "a"}}, "a in old.json: the file is older than the run"),
    ],
)
def test_a_training_that_fails_is_named(
    project: Path, trained: Callable[..., Config], changes: dict[str, Any], told: str
) -> None:
    for name in ("old.json", "best"):  # of an earlier run
        (project / name).write_text('{"a": 0.5}', encoding="utf-8")
        os.utime(project / name, (0, 0))
    (project / "late.py").write_text(f"{SCRIPT}\nraise SystemExit(3)\n", encoding="utf-8")
    with pytest.raises(PipelineError, match=r"^baseline seed 3") as raised:
        trained({"script": OWN | changes, "train": {"seeds": [3], "files": ["late.py"]}})
    assert told in str(raised.value)
    assert not (project / "results/baseline.json").exists()


def test_seeds_that_make_no_difference_are_refused_and_kept(trained: Callable[..., Config]) -> None:
    ignoring = OWN | {"command": f"SEED={{seed}} {sys.executable} train.py"}
    with pytest.raises(
        PipelineError, match=r"results/baseline.json holds impossible values: seeds 0, 1 ended in the same"
    ):
        trained({"script": ignoring})
    assert len([*KEPT.rglob("metrics.json")]) == 2
    trained({"script": ignoring, "train": {"seeds": [0]}})


@pytest.mark.parametrize("in_place", [True, False])
def test_a_run_without_a_copy_leaves_no_outputs(
    project: Path, trained: Callable[..., Config], *, in_place: bool
) -> None:
    (project.parent / "disk").mkdir()
    (project / "big").symlink_to(project.parent / "disk")
    place = "out" if in_place else "big/out"
    edited("train.py", SCRIPT.replace('"out', f'"{place}'))
    own = OWN | {
        "in_place": in_place,
        "outputs": [place],
        "metric": {"file": f"{place}/metrics.json", "key": "eval.accuracy"},
    }
    training.examined(trained({"script": own}))
    for seed in (0, 1):
        assert (KEPT / f"baseline/seed-{seed}/outputs" / place / "metrics.json").is_file()
    assert not (project / place / "metrics.json").exists(), "the next run could resume from it"
    (project / place).mkdir(exist_ok=True)
    (project / place / "last.pt").touch()
    with pytest.raises(
        PipelineError, match=rf"script.outputs: .*/{place}/last.pt is there, from which it could resume: move"
    ):
        trained({"script": own, "train": {"seeds": [2]}})
    assert (project / place / "last.pt").exists(), "it is not ours"


def test_all_seeds_train_the_code_of_the_start(project: Path, trained: Callable[..., Config]) -> None:
    edit = f"\nPath({str(project / 'parts.py')!r}).write_text('raise SystemExit(5)')\n"
    (project / "train.py").write_text(SCRIPT + edit, encoding="utf-8")
    trained({})
    assert len([*KEPT.rglob("metrics.json")]) == 2


def test_a_second_training_of_the_same_command_is_refused(project: Path, trained: Callable[..., Config]) -> None:
    (project / "run.sh").write_text(f"{sys.executable} train.py && {sys.executable} train.py", encoding="utf-8")
    with pytest.raises(
        PipelineError, match=r"(?s)after 50 steps, the command ended .*  \| a second process takes optimizer steps, or"
    ):
        trained({"script": OWN | {"command": "bash run.sh"}, "train": {"seeds": [0], "files": ["run.sh"]}})


# Whole pipelines

BENCH = {"max_rounds": 6, "window_seconds": 0.2, "max_foreign_load": 1.0, "turns": 4}
SLEEPS = FILES["config.json"].replace('"sleep": 0.0', '"sleep": 0.005').replace('"epochs": 2', '"epochs": 8')
"""Settings of a training that is longer than what a round of the bench looks at."""


@pytest.fixture(scope="module")
def script_clone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Clone]:
    """``script_clone(params)`` returns a repository with the script and the files that `init` would write."""

    def make(params: dict[str, Any]) -> Clone:
        path = tmp_path_factory.mktemp("script") / "repository"
        path.mkdir()
        for name in ("dvc.yaml", ".gitignore", ".dvc/config", ".dvc/plots"):
            (path / name).parent.mkdir(exist_ok=True)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, path / name)
        for name, text in (FILES | {"config.json": SLEEPS}).items():
            (path / name).write_text(text, encoding="utf-8")
        for name in ("inference", "profiles", "sessions"):
            (path / name).mkdir()
            (path / name / ".gitkeep").touch()
        empty = {"profile": {"variants": []}, "infer": {"variants": []}, "publish": {"live": False}}
        (path / "params.yaml").write_text(yaml.safe_dump(PARAMS | empty | params), encoding="utf-8")
        clone = Clone.at(path)
        clone.run("git", "init", "--quiet")
        clone.commit()
        return clone

    return make


VARIABLES: Any = {"PYTHONPATH": str(ROOT)}


def dvc(clone: Clone, *words: str) -> str:
    return clone.run("dvc", *words, **VARIABLES)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_script_is_trained_benched_compared_and_published(
    script_clone: Callable[[dict[str, Any]], Clone],
) -> None:
    clone = script_clone({"bench": BENCH})
    said = dvc(clone, "repro")
    assert "starts the command of slower up to its first step" in said
    comparison = json.loads((clone.path / "reports/comparison.json").read_text("utf-8"))
    base, slower = comparison["variants"]
    assert slower["accuracy"]["decision"] == "same", "equal weights"
    assert [run["seed"] for run in base["runs"]] == [0, 1]
    assert comparison["bench"]["same_job"]["slower"]["equal_bits"] is True
    assert base["conditions"]["batch_size"] == 64
    page = (clone.path / "reports/comparison.html").read_text("utf-8")
    assert "train.py" in page
    assert "<figcaption>Training loss" not in page, "it is unknown"
    assert json.loads((clone.path / "models/slower/seed-1/out/metrics.json").read_text("utf-8"))
    published = clone.run(
        "python", "-c",
        "import mlflow\n"
        "for run in mlflow.search_runs(search_all_experiments=True, output_format='list'):\n"
        "    print(run.info.run_name, run.data.metrics.get('test_accuracy'), run.data.params.get('changed'))\n",
        MLFLOW_TRACKING_URI=f"sqlite:///{clone.path}/mlflow.db",
    )  # fmt: skip
    for name, changed in ("baseline", OWN["command"]), ("slower", "--sleep 0.001"):
        for seed in (0, 1):
            assert re.search(rf"{name}.*{seed} 0\.\d+ {re.escape(changed)}", published), published
    for words in (["evidence"], ["evidence", "check"]):
        checked = clone.run("python", "-m", "pipeline", *words, **VARIABLES)
    assert "follow from the rounds of 1 session" in checked
    (clone.path / "README.md").write_text("Another text.\n", encoding="utf-8")
    said = dvc(clone, "repro")
    assert "Running stage 'train@baseline'" not in said
    assert "starts the command" not in said
    (clone.path / "config.json").write_text(SLEEPS.replace("0.05", "0.04"), encoding="utf-8")
    said = dvc(clone, "repro", "train@baseline")
    assert "changed since the last time: variants.baseline.opened.config.json" in said
    assert "Running stage 'train@baseline'" in said
    (clone.path / "labels.txt").write_text("a", encoding="utf-8")
    clone.edit({"train.seeds": [0, 1, 2]})
    said = clone.run("dvc", "repro", "train@baseline", fails=True, **VARIABLES)
    assert "baseline seed 0: complete in" in said
    assert "train.files: [labels.txt]" in said


@pytest.fixture(scope="module")
def gated(script_clone: Callable[[dict[str, Any]], Clone]) -> Clone:
    steps = SLEEPS.replace('"sleep": 0.005', '"sleep": 0.05').replace('"epochs": 8', '"epochs": 60')
    clone = script_clone({
        "bench": BENCH | {"window_seconds": 0.5, "max_rounds": 12},
        "gate": {"max_minutes": 10.0, "accuracy": False},
        "train": {"seeds": [0]},
        "variants": {"baseline": {}},
    })  # fmt: skip
    (clone.path / "config.json").write_text(steps, encoding="utf-8")
    clone.commit()
    return clone


@pytest.fixture
def commit(gated: Clone) -> Iterator[Clone]:
    head = gated.run("git", "rev-parse", "HEAD").strip()
    yield gated
    gated.run("git", "reset", "--quiet", "--hard", head)


def gate(clone: Clone) -> tuple[int, str]:
    return clone.ended("python", "-m", "pipeline", "gate", "--against", "HEAD", **VARIABLES)


@pytest.mark.weekly
@pytest.mark.timeout(900)
def test_the_gate_passes_an_equal_script(commit: Clone) -> None:
    train = commit.path / "train.py"
    train.write_text(f"# Another comment.\n{train.read_text('utf-8')}", encoding="utf-8")
    code, output = gate(commit)
    assert code == 0, output
    assert json.loads((commit.path / "reports/gate.json").read_text("utf-8"))["sides_are_equal"] is True


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_gate_stops_a_slower_script(commit: Clone) -> None:
    train = commit.path / "train.py"
    text = train.read_text("utf-8").replace("time.sleep(", "time.sleep(0.0055 + ")
    train.write_text(text, encoding="utf-8")
    code, output = gate(commit)
    assert (code, "Worse than the base: throughput (baseline)" in output) == (1, True), output
    row = json.loads((commit.path / "reports/gate.json").read_text("utf-8"))["variants"][0]["throughput"]
    assert row["estimate"] == pytest.approx(50 / 55.5, rel=0.03)


@pytest.mark.weekly
@pytest.mark.timeout(900)
def test_the_gate_trains_again_with_an_edited_config_file(commit: Clone) -> None:
    (commit.path / "config.json").write_text(SLEEPS, encoding="utf-8")
    few = {"max_rounds": 1, "window_seconds": 0.05, "hard_limit": True}
    commit.edit({"gate.accuracy": True, "train.seeds": [0, 1, 2], "bench": few})
    commit.commit()
    (commit.path / "config.json").write_text(SLEEPS.replace("0.05", "0.0"), encoding="utf-8")
    code, output = gate(commit)
    assert (code, "accuracy (baseline)" in output) == (1, True), output
