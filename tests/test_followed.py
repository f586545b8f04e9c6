"""Every loaded module of the user's own must have a code digest; otherwise, the pipeline ends with an error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from pipeline import cli
from pipeline.environment import code
from pipeline.params import outside, parse
from pipeline.plans import Plan, plan
from pipeline.training.assembly import assembled
from tests.outside import on_path, write_metadata
from tests.parallel import CPU
from tests.workspaces import furnish

NET = """
from importlib import import_module

import torch
from torch import nn


def inside(channels, height, width, classes):
    from own_layers import flat
    return flat(channels * height * width, classes)


def hidden(channels, height, width, classes):
    return import_module("own_layers_by_name").flat(channels * height * width, classes)


class Late(nn.Sequential):
    def forward(self, images):
        if torch.is_grad_enabled():  # true in a training step, but not in the check of the model's output
            import_module("own_layers_by_name")
        return super().forward(images)


def late(channels, height, width, classes):
    return Late(nn.Flatten(), nn.Linear(channels * height * width, classes))
"""
LAYERS = """
from torch import nn


def flat(inputs, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))
"""


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a checkout with modules of the user's own, which are not imported yet, and make it the current directory."""
    before, path = set(sys.modules), [*sys.path]
    here = tmp_path / "checkout"
    files = {
        "own_net": NET, "own_layers": LAYERS, "own_layers_by_name": LAYERS, "conftest_of_it": "", "own_space/part": "",
        "src/own_other/__init__": "", ".venv/lib/python3.12/site-packages/own_installed": "",
    }  # fmt: skip
    for name, text in files.items():
        (here / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (here / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(here)
    for folder in (".venv/lib/python3.12/site-packages", "src", "."):
        monkeypatch.syspath_prepend(here / folder)
    yield here
    for name in sys.modules.keys() - before:
        if name.startswith(("own_", "conftest_of_it")):
            del sys.modules[name]
    sys.path[:] = path
    for cached in (code._source, code._located):
        cached.cache_clear()


def planned(model: str = "own_net:inside", **variant: Any) -> Plan:
    config = parse({"train": {"model": model}, "variants": {"baseline": {}, "tried": variant}})
    return plan(config, "tried", CPU)


@pytest.mark.parametrize(
    ("statements", "brought", "refused"),
    [
        ("", ["own_net", "own_layers_by_name"], "own_layers_by_name"),
        ("", ["own_net", "own_space.part"], "own_space.part"),
        ("", ["own_net", "own_layers", "json.tool", "own_installed"], None),
        ("def late(): from own_space import part", ["own_net", "own_space.part"], None),
        ("import own_other", ["own_net", "own_other"], None),
    ],
)
def test_what_no_statement_imports_is_refused(
    statements: str, brought: list[str], refused: str | None, checkout: Path
) -> None:
    (checkout / "own_net.py").write_text(NET + statements, encoding="utf-8")
    import_module("conftest_of_it")
    check = code.unfollowed(planned())
    for name in brought:
        import_module(name)
    if refused is None:
        check()
        return
    with pytest.raises(code.Unfollowed) as caught:
        check()
    assert f"{refused} (" in str(caught.value)
    assert f"`import {refused}`" in str(caught.value)
    assert "PYTHONPATH" in str(caught.value)


def test_code_that_torch_generates_in_the_checkout_is_not_refused(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = code.unfollowed(planned())
    name = "torch._inductor.runtime.compile_tasks.c0de"
    generated = ModuleType(name)
    generated.__file__ = str(checkout / ".cache/inductor/0d/c0de.py")
    monkeypatch.setitem(sys.modules, name, generated)
    check()


def test_what_lies_elsewhere_on_the_path_of_the_checkout_is_digested(checkout: Path) -> None:
    (checkout / "own_net.py").write_text(NET + "import own_other, own_installed", encoding="utf-8")
    assert set(code.of_variant(planned())) == {"own_net.py", "own_layers.py", "own_other/__init__.py"}


TECHNIQUE = """
from pipeline.params import Entry
from pipeline.techniques import Technique

entry = Entry(name="own", setting="extra: {own: {}}", searched_for=(), does="", pays="", costs="", source="",
              changes="nothing", requested_if=lambda variant: "own" in variant.extra)


class Own(Technique):
    name = "own"
"""


def test_a_part_of_a_technique_s_package_is_refused_wherever_it_is(tmp_path: Path) -> None:
    for name, text in {"__init__": TECHNIQUE, "part": ""}.items():
        (tmp_path / "own_package").mkdir(exist_ok=True)
        (tmp_path / "own_package" / f"{name}.py").write_text(text, encoding="utf-8")
    (tmp_path / "own_beside.py").touch()
    points = {outside.CATALOGUE: {"own": "own_package:entry"}, outside.TECHNIQUES: {"own": "own_package:Own"}}
    write_metadata(tmp_path, "own-package", "1.0", points)
    with on_path(tmp_path):
        check = code.unfollowed(planned("small_cnn", extra={"own": {}}))
        import_module("own_beside")
        check()
        import_module("own_package.part")
        with pytest.raises(code.Unfollowed, match=r"own_package\.part .* leads to it from own_package\."):
            check()


@pytest.mark.parametrize(("factory", "code_"), [("inside", 0), ("hidden", 2), ("late", 2)])
def test_training_refuses_a_module_without_a_digest(
    factory: str, code_: int, capfd: pytest.CaptureFixture[str]
) -> None:
    train = {"device": "cpu", "seeds": [0], "epochs": 1, "batch_size": 128, "warmup_steps": 2}
    train |= {"model": f"own_net:{factory}", "deterministic": False}  # true would run a step on trial first
    params: dict[str, Any] = {"fetch": {"dataset": "digits"}, "train": train, "publish": {"live": False}}
    params["variants"] = {"baseline": {}}
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    furnish(parse(params))
    for _ in range(2):  # the refused training must leave no checkpoint, which a second one would accept
        sys.modules.pop("own_layers_by_name", None)
        assert cli.main(["train", "baseline"]) == code_
        assert ("error: own_layers_by_name (" in capfd.readouterr().err) is (code_ == 2)
        assert Path("results/baseline.json").exists() is (code_ == 0)


def test_a_measurement_refuses_a_module_without_a_digest(digits_folder: Path) -> None:
    train = {"device": "cpu", "seeds": [0], "batch_size": 128, "model": "own_net:late", "deterministic": False}
    made = plan(parse({"train": train, "variants": {"baseline": {}}}), "baseline", CPU)
    with assembled(made, digits_folder) as assembly, pytest.raises(code.Unfollowed), assembly.training(0) as training:
        training.advance(1)
