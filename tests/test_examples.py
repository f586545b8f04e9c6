"""The examples: the commands of their READMEs run on small jobs, and their params.yaml files are valid."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from pipeline.cli import main
from pipeline.data.text import END
from pipeline.errors import ConfigError
from pipeline.models import mlp
from pipeline.models.gpt import GPT
from pipeline.params import Machine, load, requested
from pipeline.plans import plans
from pipeline.techniques.activation_checkpointing import blocks as repeated
from tests.conftest import ROOT, SHORT, Clone
from tests.outside import write_example_metadata
from tests.pages import blocks, commands
from tests.trainings import OWN


@pytest.mark.weekly
@pytest.mark.timeout(1800)
def test_the_vision_transformer_example_runs(clone: Callable[..., Clone]) -> None:
    checkout = clone()
    asked = commands(ROOT / "examples" / "vit" / "README.md")
    assert [command[0] for command in asked] == ["cp", "python", "dvc", "python", "dvc"]
    output = ""
    for command in asked:
        output = checkout.run(*command)
        if command[0] == "cp":
            short = {key: value for key, value in SHORT.items() if key != "fetch.dataset"}
            checkout.edit(short | {"train.model_options.depth": 1, "variants.accumulated": None})
        if "verify" in command:
            assert "The model draws random numbers." in output
            assert "with dropout off" in output
    variants = ["baseline", "ddp", "checkpointed"]
    results = {name: json.loads((checkout.path / "results" / f"{name}.json").read_text()) for name in variants}
    for result in results.values():
        (run,) = result["runs"]
        assert run["test_accuracy"] == run["test_correct"] / run["test_count"]
        assert isinstance(run["test_correct"], int), "top two: right or wrong"
    hashes = {name: result["runs"][0]["model_sha256"] for name, result in results.items()}
    assert hashes["checkpointed"] == hashes["baseline"]
    assert results["baseline"]["runs"][0]["test_accuracy"] > 0.3, "of two guesses, chance gets 0.2"
    for report in ("comparison.md", "comparison.html"):
        text = (checkout.path / "reports" / report).read_text(encoding="utf-8").replace("\\_", "_")
        assert "accuracy is the mean of examples.vit.nets:top_two" in text
    predicted = f"{loaded('ddp')}print(list(model.predict(np.zeros((3, 3, 8, 8), dtype=np.uint8)).shape))"
    assert checkout.run("python", "-c", predicted).splitlines()[-1] == "[3, 10]"


def loaded(variant: str) -> str:
    """Return a program that loads the variant's model from MLflow's store as ``model``."""
    return f"""
import mlflow, numpy as np
mlflow.set_tracking_uri("sqlite:///mlflow.db")
[logged, *_] = mlflow.search_logged_models(["1"], output_format="list", filter_string="tags.variant = '{variant}'")
model = mlflow.pyfunc.load_model(f"models:/{{logged.model_id}}")
"""


JOBS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "text": (
        {
            "fetch": {"dataset": "text_folder", "text_folder": "texts"},
            "prepare": {"window": 16},
            "train.task": "language_model",
            "train.model": "gpt",
            "train.model_options": {"width": 16, "depth": 1, "heads": 2},
            "students": {"taught": {
                "model": "gpt", "model_options": {"width": 8, "depth": 1, "heads": 2},
                "distillation": {"teacher": "baseline"},
            }},
        },
        r"token accuracy .* tokens/s, perplexity \d(?s:.*)batch of 16 samples of 16 tokens:",
        ["mean of token accuracy", "Tokens (16 a sample) of the global batch", "Perplexity"],
    ),
    "table": (
        {"fetch": {"dataset": "arrays", "arrays": "houses.npz"}, "train.task": "regression", "train.model": "mlp"},
        r"test score within tolerance .* samples/s, explained variance fraction",
        ["mean of within tolerance", "Samples of the global batch", "Explained variance"],
    ),
    "own": (
        {
            "fetch": {"dataset": "digits"},
            "prepare": {"train_limit": 400, "test_limit": 100},
            "train.task": "my_tasks:Autoencoding",
            "train.model": "my_tasks:net",
        },
        r"test score .* samples/s\n",
        ["mean of score", "Samples of the global batch"],
    ),
}  # fmt: skip
"""Settings of a job, a pattern of what is printed of its training and its memory, and words of its report."""


def by_hand(name: str, variant: str, checkout: Path) -> tuple[Any, Any]:
    """Return three raw inputs, and what the variant's model makes of them. No task computes it."""

    def packed(array: str) -> Any:
        return np.load(checkout / "data" / "prepared" / f"{array}.npy")

    raw, scale = packed("test_inputs")[:3], 255 if name == "own" else 1
    if name == "text":
        raw = raw[:, :-1]
        inputs = torch.from_numpy(raw).long()
        model: Any = GPT(vocabulary=END + 1, length=16, width=16, depth=1, heads=2)
    else:
        train = packed("train_inputs") / scale
        axes = (0, *range(2, train.ndim))
        mean, std = train.mean(axes, keepdims=True), train.std(axes, keepdims=True)
        inputs = torch.from_numpy((raw / scale - mean) / std).float()
        made: dict[str, Any] = {}
        exec(OWN, made)
        model = made["net"](channels=1, height=8, width=8) if name == "own" else mlp(features=5, outputs=1)
    model.load_state_dict(torch.load(checkout / "models" / variant / "seed-0.pt", weights_only=True))
    with torch.no_grad():
        outputs = model(inputs).numpy()
    targets = packed("train_targets") if name == "table" else None
    return raw, outputs if targets is None else outputs * targets.std() + targets.mean()


@pytest.mark.weekly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.filterwarnings("ignore")  # warnings of MLflow
def test_a_job_of_another_task_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    params, printed, said = JOBS[name]
    variant = "ddp" if name == "text" else "baseline"  # test_tasks trains each task with ddp
    variants: dict[str, Any] = {"baseline": {}} | ({"ddp": {"parallelism": "ddp"}} if name == "text" else {})
    infer = {"variants": ["baseline"], "forms": ["eager", "bf16", "exported"], "rounds": 1, "batch_sizes": [1, 4]}
    others = {"train.batch_size": 16, "variants": variants, "infer": infer}
    others |= {"profile.variants": ["baseline"], "train.without_native": "run"}
    checkout = Clone(tmp_path / "checkout", SHORT | others | params, only="params.yaml")
    (checkout.path / "texts").mkdir()
    for index in range(8):
        (checkout.path / "texts" / f"{index}.txt").write_text("".join(f"{n} hills " for n in range(60 + index)))
    rows = np.random.default_rng(0).normal(size=(200, 5)).astype(np.float32)
    np.savez(checkout.path / "houses.npz", inputs=rows, targets=100 + 3 * rows.sum(1))
    (checkout.path / "my_tasks.py").write_text(OWN)
    # The commands of `dvc repro` in this process, which need not import anything again
    monkeypatch.chdir(checkout.path)
    monkeypatch.syspath_prepend(checkout.path)
    monkeypatch.delitem(sys.modules, "my_tasks", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(checkout.path))))
    trained = (f"train {name_}" for name_ in (*variants, *params.get("students", {})))
    measured = ("predict-memory baseline", "bench", "profile baseline", "infer baseline", "compare")
    for command in ("environment", "fetch", "prepare", *trained, *measured):
        assert main(command.split()) == 0, command
    assert re.search(printed, capfd.readouterr().out)
    checkout.run("python", "-m", "pipeline", "publish")
    reports = [checkout.path / "reports" / f"comparison.{kind}" for kind in ("md", "html")]
    texts = [report.read_text(encoding="utf-8").replace("\\", "").replace("_", " ") for report in reports]
    assert [words for words in said if words not in texts[1]] == []
    for text in texts:
        assert said[0] in text
        for words in ("trains another model than the baseline: gpt", "has a teacher"):
            assert (words in text) is ("students" in params)
    inference = json.loads((checkout.path / "inference" / "baseline.json").read_text(encoding="utf-8"))
    assert [(form["name"], form["why_not"]) for form in inference["forms"]] == [
        ("eager", None), ("bf16", None), ("exported", None),
    ]  # fmt: skip
    pages = [checkout.path / "inference" / "baseline.md", checkout.path / "profiles" / "baseline" / "profile.md"]
    assert not any("image" in page.read_text(encoding="utf-8") for page in pages)
    raw, expected = by_hand(name, variant, checkout.path)
    np.save(checkout.path / "raw.npy", raw)
    checkout.run("python", "-c", f"{loaded(variant)}np.save('predicted.npy', model.predict(np.load('raw.npy')))")
    np.testing.assert_allclose(np.load(checkout.path / "predicted.npy"), expected, rtol=1e-3, atol=1e-4)


def test_the_vision_transformers_params_are_valid() -> None:
    config = load(ROOT / "examples" / "vit" / "params.yaml")
    nets = (ROOT / "examples" / "vit" / "nets.py").read_text(encoding="utf-8")
    for name in (config.train.model, config.train.loss, config.train.metric):
        assert f"def {name.removeprefix('examples.vit.nets:')}(" in nets


def test_resnet_50_is_planned_as_requested() -> None:
    copied = ["cp", "examples/resnet50/params.yaml", "params.yaml"]
    assert commands(ROOT / "examples" / "resnet50" / "README.md") == [copied, ["dvc", "repro"]]
    config = load(ROOT / copied[1])
    assert (config.train.model, config.fetch.synthetic.shape) == ("resnet50", [3, 224, 224])
    for count in (1, 2, 3, 8):
        made = plans(config, Machine(gpus=count, gpu_native_bf16=True, cpu_native_bf16=False, gpu_tf32=True))
        changed = [name for name, planned in made.items() if planned.requested != planned.applied]
        assert changed == (["ddp"] if count == 1 else [])
    techniques = {entry.name for variant in config.variants.values() for entry in requested(variant)}
    assert techniques == {"tf32", "bf16", "channels_last", "compile", "ddp"}


@pytest.mark.weekly
@pytest.mark.timeout(1800)
def test_the_commands_of_own_technique_run(clone: Callable[..., Clone]) -> None:
    (shown,) = blocks(ROOT / "examples" / "own_technique" / "README.md", "yaml")
    variants = yaml.safe_load(shown)["variants"]
    assert list(variants) == ["baseline", "clipped"]
    checkout = clone(SHORT | {"variants": variants, "train.epochs": 2, "train.batch_size": 32})
    example = checkout.path / "examples" / "own_technique"
    write_example_metadata(checkout.path / "site")  # instead of pip, which would need the network or change this Python
    path = os.pathsep.join(map(str, (checkout.path / "site", example)))
    install, *rest = commands(example / "README.md")
    assert install == ["pip", "install", "--no-deps", "--no-build-isolation", "examples/own_technique"]
    checkout.run("dvc", "repro", "environment", "prepare", PYTHONPATH=path)
    for command in rest:
        output = checkout.run(*command, PYTHONPATH=path)
        if "verify" in command:
            assert ", 0 false" in output
    result = json.loads((checkout.path / "results" / "clipped.json").read_text())
    assert result["applied"]["extra"] == {"gradient_clipping": {"max_norm": 1.0}}
    compared = json.loads((checkout.path / "reports" / "comparison.json").read_text())
    assert [variant["techniques"] for variant in compared["variants"]] == [[], ["gradient_clipping"]]
    relied_on = {"baseline": {}, "clipped": {"gradient-clipping": "0.1.0"}}
    assert compared["environment"]["relied_on"]["variants"] == relied_on
    output = checkout.run("dvc", "repro", fails=True)  # the package is gone
    assert "variants.clipped.extra.gradient_clipping: no technique 'gradient_clipping' is installed" in output


def test_the_docs_model_has_a_block_to_checkpoint() -> None:
    shown, *_ = blocks(ROOT / "docs" / "your-job.md", "python")
    made: dict[str, Any] = {}
    exec(shown, made)
    model = made["mlp"](channels=1, height=8, width=8, classes=10, hidden=64)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert len(list(repeated(model))) == 1


def test_a_readme_names_the_extras_needed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert sum(_extras_of(params, extras) != set() for params in (ROOT / "examples").glob("*/params.yaml")) == 1
    for params in (ROOT / "examples").glob("*/params.yaml"):
        said = params.with_name("README.md").read_text(encoding="utf-8")
        assert {extra for extra in extras if f"'.[{extra}]'" in said} == _extras_of(params, extras), params


def _extras_of(params: Path, extras: dict[str, list[str]]) -> set[str]:
    """Return the extras named in the error that refuses the job on a machine with none of their packages."""
    nothing = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=True)
    try:
        plans(load(params), nothing)
    except ConfigError as error:
        return {extra for extra in extras if f"'.[{extra}]'" in str(error)}
    return set()


def test_each_language_model_variant_adds_one_technique() -> None:
    config = load(ROOT / "examples" / "gpt" / "params.yaml")
    able = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=True, installed=frozenset({"bitsandbytes"}))
    made = plans(config, able)
    assert all(planned.requested == planned.applied for planned in made.values())
    names_of = {name: [entry.name for entry in requested(variant)] for name, variant in config.variants.items()}
    assert names_of.pop("baseline") == []
    assert [len(techniques) for techniques in names_of.values()] == [1] * 10
    train = config.train
    model = GPT(vocabulary=END + 1, length=config.prepare.window, **train.model_options)
    assert sum(parameter.numel() for parameter in model.parameters()) == 10_746_240
    assert config.prepare.train_limit is not None
    assert config.prepare.train_limit // train.batch_size * train.epochs > train.warmup_steps + 1
