"""``python -m pipeline init``: in an empty repository, and in one that already has files."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from pipeline import cli, files
from pipeline.data.prepared import Dataset
from pipeline.data.prepared import read as read_dataset
from pipeline.errors import ConfigError, PipelineError
from pipeline.params import Machine, load, parse
from pipeline.tools import building, doctor, init
from pipeline.training.assembly import assembled, planned
from tests.conftest import ROOT, Terminal
from tests.factories import known
from tests.workspaces import CPU_ONLY, PREPARED, SERVER, furnish

NAMES = (*init.WHOLE, *init.AT_THE_TOP)
NET = """import math
from torch import nn

def net(*, classes=0, outputs=0, **form):
    sizes = form.get("shape") or form.values()
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(sizes), classes or outputs))
"""


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture(autouse=True)
def _own_modules_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``init`` imports the model that it builds."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("nets", "slow_nets"):
        sys.modules.pop(name, None)


@pytest.fixture
def upgraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let ``init`` take its files from a copy, which a test can change into a later version."""
    later = tmp_path / "later"
    for name in (*NAMES, *init.ONCE, *init.LINES, "params.yaml", "variants/speed.yaml"):
        (later / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, later / name)
    monkeypatch.setattr(init, "PROJECT", later)
    return later


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and ".git" not in path.relative_to(folder).parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def add(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_an_empty_repository_gets_what_a_clone_has(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init.run(CPU_ONLY)
    for name in (*NAMES, "params.yaml", "params.schema.json", ".dvc/config", ".dvc/.gitignore"):
        assert (repository / name).read_bytes() == (ROOT / name).read_bytes(), name
    assert {name for name in NAMES if os.access(repository / name, os.X_OK)} == {".ci/gpu", ".github/session"}
    made = {"data/raw/x", "results/ddp.json", "models/ddp/x", "bench.json", "profiles/ddp/x", "mlflow.db", ".cache/x"}
    kept = {"dvc.lock", "profiles/README.md", "reports/ratios.csv", "sessions/x.json", ".env"}
    assert set(git("check-ignore", *made).split()) == made
    assert subprocess.run(["git", "check-ignore", *kept], capture_output=True).stdout == b""
    before, said = contents(repository), capsys.readouterr().out
    assert said.startswith("init: wrote params.yaml, .dvc/config, ")
    assert "3 variants; the bench takes 2.5 minutes, or more if six rounds do." in said
    init.run(CPU_ONLY)
    assert contents(repository) == before
    assert capsys.readouterr().out == "init: wrote nothing: no file needs a change\n"


def test_what_stands_there_is_kept(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = {"Dockerfile": "FROM scratch\n", ".github/workflows/gpu.yml": "on: push\n", "nets.py": NET}
    for name, text in theirs.items():
        add(repository / name, text)
    add(repository / ".gitignore", "/mine\n/data")
    init.run(CPU_ONLY, model="nets:net")
    said = capsys.readouterr().out
    assert "+/results" in said
    assert {name: (repository / name).read_text(encoding="utf-8") for name in theirs} == theirs
    assert not (repository / ".dockerignore").exists(), "a .dockerignore would change what the user's Dockerfile copies"
    ignored = (repository / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert ignored[:2] == ["/mine", "/data"]
    assert ignored.count("/data") == 1
    assert "kept Dockerfile, .github/workflows/gpu.yml, because you changed" in said
    before = contents(repository)
    init.run(CPU_ONLY)
    assert contents(repository) == before
    assert "@@" not in capsys.readouterr().out, "the differences of their files were shown once already"


def test_an_upgrade_changes_what_nobody_else_did(
    repository: Path, upgraded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init.run(CPU_ONLY)
    add(repository / "Dockerfile", "RUN mine\n")
    add(repository / "params.yaml", "# mine\n")
    (repository / ".github/session").unlink()
    for name in ("dvc.yaml", "Dockerfile", ".github/session", "params.yaml"):
        add(upgraded / name, "# later\n")
    add(upgraded / ".gitignore", "/later\n")
    before, _ = contents(repository), capsys.readouterr()
    with pytest.raises(
        PipelineError, match=r"nothing was written, because nobody answered yes; .* run init with --yes"
    ):
        init.run(CPU_ONLY)
    assert contents(repository) == before
    shown = capsys.readouterr().out
    named = re.findall(r"^\+\+\+ (\S+), as init writes it$", shown, re.MULTILINE)
    assert named == [".gitignore", "dvc.yaml", "Dockerfile"]
    assert shown.count("+# later") == 2
    assert "-RUN mine" in shown
    init.run(CPU_ONLY, yes=True)
    changed = {name for name, content in contents(repository).items() if content != before.get(name)}
    assert changed == {"dvc.yaml", ".gitignore", ".dvc/init.json"}
    assert (repository / "dvc.yaml").read_text(encoding="utf-8").endswith("# later\n")
    capsys.readouterr()
    init.run(CPU_ONLY)
    assert capsys.readouterr().out == (
        "init: wrote nothing: no file needs a change\n"
        "init: kept Dockerfile, .github/session, because you changed, deleted or made these files\n"
    )


def test_ignored_data_is_in_the_way_too(repository: Path) -> None:
    add(repository / ".gitignore", "/data\n")
    add(repository / "data/raw/x", "theirs\n")
    before = contents(repository)
    with pytest.raises(ConfigError, match="found data, but the stages use these names"):
        init.run(CPU_ONLY, yes=True)
    assert contents(repository) == before
    shutil.rmtree(repository / "data")
    init.run(CPU_ONLY, yes=True)
    add(repository / "data/raw/x", "what fetch made\n")
    before = contents(repository)
    init.run(CPU_ONLY)
    (repository / ".dvc/init.json").unlink()
    init.run(CPU_ONLY)
    assert contents(repository) == before


def test_on_a_terminal_it_asks(repository: Path, upgraded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init.run(CPU_ONLY)
    add(upgraded / "dvc.yaml", "# later\n")
    monkeypatch.setattr("sys.stdin", Terminal("\ny\n"))
    monkeypatch.setattr("sys.stdout", Terminal())
    with pytest.raises(PipelineError):
        init.run(CPU_ONLY)
    assert "# later" not in (repository / "dvc.yaml").read_text(encoding="utf-8")
    init.run(CPU_ONLY)
    assert "# later" in (repository / "dvc.yaml").read_text(encoding="utf-8")


def test_beside_another_pipeline_it_asks_for_a_folder(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("params.yaml", "dvc.yaml", "models/__init__.py", "own_nets/__init__.py"):
        add(repository / name, "train: {lr: 0.1}\n" if name.endswith("yaml") else NET)
    before = contents(repository)
    with pytest.raises(ConfigError, match=r"found dvc\.yaml, models, params\.yaml, but .*: ln -s \.\./PACKAGE \."):
        init.run(CPU_ONLY)
    assert contents(repository) == before
    (repository / "performance").mkdir()
    monkeypatch.chdir(repository / "performance")
    with pytest.raises(ConfigError, match=r"no module 'own_nets'"):
        init.run(CPU_ONLY, model="own_nets:net")
    assert contents(repository) == before
    (repository / "performance/own_nets").symlink_to("../own_nets")
    init.run(CPU_ONLY, model="own_nets:net")
    after = contents(repository)
    assert {name: after[name] for name in before} == before
    others = {name for name in after.keys() - before.keys() if not name.startswith("performance/")}
    assert others == set(init.AT_THE_TOP)
    workflow = (repository / ".github/workflows/gpu.yml").read_text(encoding="utf-8")
    assert yaml.safe_load(workflow)["jobs"]
    for words, times in {
        'REVISION="$GITHUB_SHA" performance\n': 1,
        '"$CONTAINER" performance/.ci/gpu ': 1,
        'cd performance && "$GITHUB_WORKSPACE/.github/session" "$RUNNER_TEMP/gpu/sessions"': 1,
        "runner.temp }}/copy/performance/": 7,
        "runner.temp }}/copy/": 7,
    }.items():
        assert workflow.count(words) == times, words


def images(folder: Path, sides: list[int]) -> None:
    for number, side in enumerate(sides):
        path = folder / "train" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.linear_gradient("L").resize((side + 9, side)).save(path)


@pytest.mark.parametrize(
    ("machine", "variants", "minutes"),
    [
        (CPU_ONLY, ["baseline", "memory", "channels-last"], 2.5),
        (SERVER, ["baseline", "ddp", "memory", "channels-last", "bf16", "tf32", "compiled"], 5.0),
    ],
    ids=["laptop", "server"],
)
def test_images_get_what_this_machine_can_run(
    machine: Machine, variants: list[str], minutes: float, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images(repository / "shots", [60, 70, 70, 400] * 40)
    (repository / "shots/train/0/broken.png").write_bytes(b"no image")
    init.run(machine, images="shots")
    config = load()
    assert list(config.variants) == variants
    assert config.bench.max_minutes == minutes
    assert (config.fetch.dataset, config.fetch.image_folder) == ("image_folder", "shots")
    assert config.train.model == "resnet18"
    assert (config.prepare.image_size, config.train.batch_size) == ([64, 64], 8)
    assert config.variants["memory"].activation_checkpointing is True
    text = (repository / "params.yaml").read_text(encoding="utf-8")
    assert text.count("#") > 40, "the comments of params.yaml stay"
    said = capsys.readouterr().out
    assert f"{len(variants)} variants; the bench takes {minutes:g} minutes, or" in said
    assert "commit these files, but not shots: " in said
    assert ("#   ddp: with fewer than 2 GPUs" in text) is (machine is CPU_ONLY)
    assert text.count("variants:\n") == 1
    assert "  image_size: [64, 64]        # for image_folder: [height, width]\n" in text


@pytest.mark.parametrize(
    ("arrays", "task", "model"),
    [
        ({"inputs": np.zeros((640, 5), np.float32), "targets": np.zeros((640, 2), np.float32)}, "regression", "mlp"),
        ({"inputs": np.zeros((640, 5)), "targets": np.arange(640) % 3}, "classification", "mlp"),
        ({"inputs": np.zeros((640, 5)), "targets": np.arange(1920).reshape(640, 3) % 2}, "multi_label", "mlp"),
        ({"inputs": np.zeros((640, 3, 8, 8), np.uint8), "targets": np.arange(640) % 3}, "classification", "resnet18"),
        ({"inputs": np.zeros((640, 9), np.int64)}, "language_model", "gpt"),
    ],
)
def test_arrays_get_the_task_of_their_types(
    arrays: dict[str, Any], task: str, model: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(repository / "mine.npz", **arrays)
    add(repository / ".gitignore", "*.npz\n")
    assert cli.main(["init", "--arrays", "mine.npz"]) == 0
    assert "commit these files. Then" in capsys.readouterr().out
    config = load()
    assert (config.fetch.dataset, config.fetch.arrays) == ("arrays", "mine.npz")
    assert (config.train.task, config.train.model, config.train.batch_size) == (task, model, 32)
    rates = {"regression": ("sgd", 0.01), "language_model": ("adamw", 0.001)}
    assert (config.train.optimizer, config.train.learning_rate) == rates.get(task, ("sgd", 0.1))
    assert config.variants["memory"].activation_checkpointing
    assert ("channels-last" in config.variants) is config.variants["memory"].channels_last is (model == "resnet18")


def sequences(targets: Any) -> dict[str, Any]:
    """Return 640 sequences of tokens, of 3 to 12 of 24, with a mask."""
    mask = np.arange(12) < 3 + np.arange(640)[:, None] % 10
    return {"input_ids": np.arange(640 * 12).reshape(640, 12) % 24 * mask, "attention_mask": mask * 1, **targets}


def test_a_pretrained_classifier_of_sequences_is_ready_to_train(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    about = transformers.BertConfig(**sizes, vocab_size=30, max_position_embeddings=12)
    transformers.AutoModelForSequenceClassification.from_config(about).save_pretrained("bert")
    np.savez(repository / "reviews.npz", **sequences({"targets": np.arange(640) % 2}))
    arguments = ["init", "--arrays", "reviews.npz", "--minimal"]
    assert cli.main(arguments) == 2
    assert "for tokens, --config config.json of a model of transformers" in capsys.readouterr().err
    assert cli.main([*arguments, "--config", "bert/config.json"]) == 0
    assert "init: transformers has blocks to checkpoint and attention; about " in capsys.readouterr().out
    train = load().train
    assert not load().variants["memory"].channels_last
    assert (train.task, train.model, train.model_options) == (
        "classification", "transformers", {"config": "bert/config.json"}
    )  # fmt: skip
    assert (train.optimizer, train.learning_rate, train.batch_size, train.weights) == ("adamw", 0.0005, 32, None)
    text = (repository / "params.yaml").read_text(encoding="utf-8")
    tuned = re.sub(r"(?m)^  # (?=(weights|allow_new|frozen): )", "  ", text)
    (repository / "params.yaml").write_text(tuned, encoding="utf-8")
    train = load().train
    assert (train.weights, train.allow_new, train.frozen) == ("bert", ["net.classifier.*"], ["net.bert.*"])
    for data in ("samples like those of arrays, which are not prepared", "arrays"):
        fits, *_, refused = doctor.parts()
        assert fits.fact.endswith(f"of which 34 train, on {data}")
        assert "variants.memory.activation_checkpointing: found true, but no block" in refused.fact, "all are frozen"
        furnish(config := load())
    plan = planned(config, "baseline", CPU_ONLY, PREPARED)
    with assembled(plan, PREPARED) as assembly, assembly.training(0) as training:
        pretrained = {name: values.clone() for name, values in training.model.state_dict().items()}
        training.advance(1)
        changed = [name for name, values in training.model.state_dict().items() if (values != pretrained[name]).any()]
    assert changed == ["net.classifier.weight", "net.classifier.bias"]


TAGGER = """
from torch import nn

class tagger(nn.Module):
    def __init__(self, *, length, vocabulary, labels, classes):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(vocabulary, 8), nn.Linear(8, classes))

    def forward(self, input_ids, attention_mask):
        return self.net(input_ids) * attention_mask[..., None]
"""


def test_labels_of_each_token_are_classes(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(repository / "nets.py", TAGGER)
    np.savez(repository / "mine.npz", **sequences({"targets": np.arange(640 * 12).reshape(640, 12) % 2}))
    init.run(CPU_ONLY, model="nets:tagger", arrays="mine.npz")
    assert "init: nets:tagger has blocks to checkpoint; about" in capsys.readouterr().out
    assert (load().train.task, load().train.optimizer) == ("classification", "sgd")
    assert set(load().variants) == {"baseline", "memory"}


def form(dataset: Dataset) -> Any:
    arrays = {name: (rows.dtype, rows.shape[1:]) for name, rows in dataset.train.arrays.items()}
    channels = {name: len(known.mean) for name, known in dataset.statistics.items()}
    return arrays, channels, len(dataset.classes), dataset.vocabulary


@pytest.mark.parametrize(
    "fetch",
    [
        {"dataset": "digits"},
        {"dataset": "arrays", "arrays": "mine.npz"},
        {"dataset": "arrays", "arrays": "numbers.npz"},
        {"dataset": "image_folder", "image_folder": "shots"},
        {"dataset": "text_folder", "text_folder": "letters"},
        {"dataset": "synthetic", "synthetic": {"targets": "floats", "shape": [3, 4], "classes": 2}},
        {"dataset": "synthetic", "synthetic": {"targets": "tokens", "shape": [9]}},
    ],
    ids=["digits", "named", "numbers", "images", "text", "floats", "tokens"],
)
def test_an_imitation_has_the_form_of_the_prepared_data(fetch: dict[str, Any], repository: Path) -> None:
    images(repository / "shots", [9, 10, 11, 12])
    for name in ("one", "two"):
        add(repository / f"letters/{name}", "x" * 128)
    np.savez(repository / "mine.npz", **sequences({"targets": np.arange(640) % 3}))
    random = np.random.default_rng(0)
    np.savez(repository / "numbers.npz", inputs=random.normal(size=(40, 3)), targets=random.normal(size=(40, 2)))
    made_up = fetch.get("synthetic", {}) | {"train": 40, "test": 8}
    sections = {"fetch": fetch | {"synthetic": made_up}, "prepare": {"image_size": [8, 8], "window": 16}}
    furnish(config := parse({**sections, "variants": {"baseline": {}}}))
    assert form(known(building.imitation(config))) == form(read_dataset(PREPARED))


def test_a_job_on_text_is_a_language_model(repository: Path) -> None:
    for name in ("one", "two"):
        add(repository / f"letters/{name}", "x" * 128 * 320)
    assert cli.main(["init", "--text", "letters"]) == 0
    assert (load().fetch.text_folder, load().train.task, load().train.model) == ("letters", "language_model", "gpt")
    assert load().train.batch_size == 32


def test_a_setting_is_written_into_its_own_section(repository: Path, upgraded: Path) -> None:
    """The shipped sections bench and gate both have max_minutes."""
    assert repository == Path.cwd()
    text = (upgraded / "params.yaml").read_text(encoding="utf-8")
    start, end = text.index("gate:"), text.index("publish:")
    (upgraded / "params.yaml").write_text(text[start:end] + text[:start] + text[end:], encoding="utf-8")
    init.run(SERVER, model="resnet18")
    assert (load().bench.max_minutes, load().gate.max_minutes) == (5.0, 10.0)


NETS = """
import time
from torch import nn

class Slow(nn.Module):
    def forward(self, images):
        time.sleep(0.02 * len(images))
        return images.flatten(1)

def plain(*, channels, height, width, classes):
    return nn.Sequential(Slow(), nn.Linear(channels * height * width, classes))

class Attending(nn.Module):
    def __init__(self, *, channels, height, width, classes):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(width, 1, 8, batch_first=True) for _ in range(2)))
        self.head = nn.Linear(channels * height * width, classes)

    def forward(self, images):
        return self.head(self.blocks(images.flatten(1, 2)).flatten(1))
"""


@pytest.mark.parametrize(
    ("model", "blocks", "optimizer"),
    [("slow_nets:plain", False, "sgd"), ("slow_nets:Attending", True, "adamw")],
)
def test_settings_follow_from_the_built_model(
    model: str, blocks: bool, optimizer: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(repository / "slow_nets.py", NETS)
    init.run(CPU_ONLY, model=model)
    config, said = load(), capsys.readouterr().out
    assert (config.train.model, config.train.optimizer) == (model, optimizer)
    assert config.train.learning_rate == (0.0005 if optimizer == "adamw" else 0.1)
    assert config.variants["memory"].activation_checkpointing is blocks
    assert config.fetch.dataset == "fashion_mnist"
    if model == "slow_nets:plain":  # of 256 samples, a step takes more than five seconds
        assert "has no blocks to checkpoint; about 5" in said


def test_a_model_that_cannot_be_built_writes_nothing(repository: Path) -> None:
    add(repository / "nets.py", NET.replace("**form", "channels"))
    np.savez(repository / "mine.npz", inputs=np.ones((40, 6, 16), np.float32), targets=np.arange(40) % 2)
    before = contents(repository)
    with pytest.raises(ConfigError, match=r"init: nothing was written: .*nets:net is called with shape, classes and"):
        init.run(CPU_ONLY, model="nets:net", arrays="mine.npz")
    assert contents(repository) == before
    (repository / "nets.py").write_text(NET, encoding="utf-8")
    sys.modules.pop("nets")
    init.run(CPU_ONLY, model="nets:net", arrays="mine.npz")
    assert load().train.model == "nets:net"


def test_chosen_variants_take_the_place_of_the_others(repository: Path) -> None:
    assert repository == Path.cwd()
    with pytest.raises(ConfigError, match=r"--variants: found 'memry', which is no variant\. Did you mean memory"):
        init.run(CPU_ONLY, variants=["memry"])
    assert not Path("params.yaml").exists()
    assert cli.main(["init", "--variants", "bf16,memory"]) == 0
    assert list(load().variants) == ["baseline", "bf16", "memory"]
    assert (load().train.model, load().fetch.dataset) == ("small_cnn", "fashion_mnist")


def test_the_minimal_files_run_the_stages(repository: Path) -> None:
    """Lines are added to .gitignore without asking."""
    add(repository / ".gitignore", "/mine")
    assert cli.main(["init", "--minimal"]) == 0
    written = {".dvc/config", ".dvc/.gitignore", ".dvc/init.json", ".gitignore", "dvc.yaml", "params.yaml"}
    assert contents(repository).keys() == written
    text = (repository / ".gitignore").read_text(encoding="utf-8")
    assert text.startswith("/mine\n# What `dvc repro` makes")
    assert cli.main(["environment"]) == 0
    assert {path.name for path in repository.iterdir() if path.is_dir()} >= {"sessions", "inference", "profiles"}
    init.run(CPU_ONLY)
    assert contents(repository).keys() >= set(init.WHOLE)


def test_an_own_model_of_tables_gets_no_channels_last(repository: Path) -> None:
    add(repository / "nets.py", NET)
    np.savez(repository / "mine.npz", inputs=np.ones((40, 3)), targets=np.ones(40))
    init.run(SERVER, model="nets:net", arrays="mine.npz")
    assert "channels-last" not in load().variants


@pytest.mark.parametrize(
    ("inputs", "targets", "task"),
    [
        (np.ones((40, 3, 8, 8), np.float32), np.ones(40, np.float32), "regression"),
        (np.ones((40, 9, 3), np.float32), np.arange(40) % 2, "classification"),
    ],
)
def test_arrays_of_any_shape_need_an_own_model(
    inputs: Any, targets: Any, task: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(repository / "nets.py", NET)
    np.savez(repository / "mine.npz", inputs=inputs, targets=targets)
    assert cli.main(["init", "--arrays", "mine.npz"]) == 2
    assert "init knows no model for the shapes in mine.npz; name your own, such as --model" in capsys.readouterr().err
    init.run(CPU_ONLY, model="nets:net", arrays="mine.npz")
    assert (load().train.task, load().train.model) == (task, "nets:net")
    assert ("channels-last" in load().variants) is (inputs.ndim == 4)


def test_arrays_without_targets_or_tokens_have_no_task(repository: Path) -> None:
    add(repository / "nets.py", NET)
    np.savez(repository / "mine.npz", inputs=np.ones((40, 3)))
    with pytest.raises(ConfigError, match=r"found inputs.*, for which init knows no task; add the array targets"):
        init.run(CPU_ONLY, model="nets:net", arrays="mine.npz")
    np.savez(repository / "mine.npz", inputs=np.ones((40, 3), int), y=np.ones(40, int))  # not tokens
    with pytest.raises(ConfigError, match="knows no task; add the array targets, or rename y, or write"):
        init.run(CPU_ONLY, model="nets:net", arrays="mine.npz")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--images", "nowhere"], "fetch.image_folder: found 'nowhere', which has no directory 'train'"),
        (["--arrays", "nowhere.npz"], "fetch.arrays: found 'nowhere.npz', which does not exist"),
        (["--arrays", "mine:samples"], "--arrays: found mine:samples, but init reads only files"),
        (["--text", "nowhere"], "fetch.text_folder: nowhere: No such file or directory; expected a folder"),
        (["--model", "nets:net"], "train.model: found 'nets:net', but there is no module 'nets'"),
        (["--model", "resnet81"], "train.model: found 'resnet81'. Did you mean"),
        (["--model", "transformers"], "--model: found 'transformers'; add --config FILE"),
    ],
)
def test_a_job_that_cannot_be_writes_nothing(
    arguments: list[str], message: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert contents(repository) == {}


def test_what_is_in_the_way_is_named(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> str:
        assert cli.main(["init"]) == 2
        return capsys.readouterr().err

    (repository / ".ci").touch()
    assert "Not a directory" in refused()
    (repository / ".ci").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_text", _read_only)
        assert "params.yaml: Read-only file system; let this user read and write there" in refused()
    assert contents(repository) == {}
    init.run(CPU_ONLY)
    (repository / ".dvc/init.json").write_text("<<<<<<< HEAD\n", encoding="utf-8")
    assert ".dvc/init.json is damaged; delete it" in refused()
    (repository / ".dvc/init.json").unlink()
    assert cli.main(["init", "--model", "resnet18"]) == 2
    assert (
        "params.yaml exists, and init does not change it; set fetch, train and variants there"
        in capsys.readouterr().err
    )
    (repository / ".gitignore").write_bytes(b"\xe9")
    assert ".gitignore is not UTF-8 text" in refused()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(repository))
        assert "git is not installed" in refused()
    (repository / "two words").mkdir()
    monkeypatch.chdir("two words")
    assert "found the folder 'two words'" in refused()


def _read_only(path: Path, _: str) -> None:
    raise OSError(errno.EROFS, "Read-only file system", path.name)


def test_outside_of_a_repository_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ConfigError, match="DVC and the gate need one; run `git init` first"):
        init.run(CPU_ONLY)
    assert contents(tmp_path) == {}
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match="this is the pipeline's own checkout"):
        init.run(CPU_ONLY)
