"""Every loaded module of the user's own must have a code digest; otherwise, the pipeline ends with an error."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from pipeline import cli
from pipeline.environment import code, imports, stages
from pipeline.errors import ConfigError
from pipeline.params import outside, parse
from pipeline.plans import Plan, plan
from pipeline.training.assembly import assembled
from tests.outside import on_path, write_metadata
from tests.parallel import CPU
from tests.workspaces import furnish

code._note_opened.__cantrace__ = True  # type: ignore[attr-defined]  # else `make coverage` sees no audit hook

NET = """
from importlib import import_module

from pathlib import Path

import torch
from torch import nn

_OWN = Path(__file__).parent


def inside(channels, height, width, classes):
    from own_layers import flat
    return flat(channels * height * width, classes)


def hidden(channels, height, width, classes):
    return import_module("own_layers_by_name").flat(channels * height * width, classes)


def reading(channels, height, width, classes):
    (_OWN / "settings.json").read_text()
    (_OWN / "ours.txt").write_text("written and read by this process")
    (_OWN / "ours.txt").read_text()
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, classes))


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
    for cached in (imports.source_of, imports.located):
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
    with pytest.raises(imports.Unfollowed) as caught:
        check()
    assert f"{refused} (" in str(caught.value)
    assert f"`import {refused}`" in str(caught.value)
    assert "PYTHONPATH" in str(caught.value)


def test_a_check_without_own_code_changes_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    check = code.unfollowed_by(set(), parse({"variants": {"baseline": {}}}).train, ())
    monkeypatch.setattr(code, "Path", None)
    check()


def test_generated_code_is_not_refused(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = code.unfollowed(planned())
    name = "torch._inductor.runtime.compile_tasks.c0de"
    generated = ModuleType(name)
    generated.__file__ = str(checkout / ".cache/inductor/0d/c0de.py")
    monkeypatch.setitem(sys.modules, name, generated)
    check()


def test_code_elsewhere_on_the_path_is_digested(checkout: Path) -> None:
    (checkout / "own_net.py").write_text(NET + "import own_other, own_installed", encoding="utf-8")
    assert set(code.of_variant(planned())) == {"own_net.py", "own_layers.py", "own_other/__init__.py"}


TECHNIQUE = """
from pipeline.params import Entry
from pipeline.techniques import Technique

entry = Entry(name="own", does="", pays="", costs="", source="", changes="nothing")


class Own(Technique):
    name = "own"
"""


def test_a_part_of_a_package_is_refused(tmp_path: Path) -> None:
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
        with pytest.raises(imports.Unfollowed, match=r"own_package\.part .* leads to it from own_package\."):
            check()


SCORES = """
from own_layers import flat
from own_other import top

K = 1
WIDTH = 64


def mine(outputs, targets):
    return _hit(top(outputs, K), targets)


def _hit(found, targets):
    return (found == targets).any(1)


def net(classes):
    return flat(WIDTH, classes)
"""


@pytest.mark.parametrize(
    ("file", "before", "after", "changed"),
    [
        ("own_scores", "K = 1", "K = 3", True),
        ("own_scores", "any(1)", "all(1)", True),
        ("own_scores", "K = 1", "K = 1\nprint(K)", True),  # any statement may change what the metric uses
        ("own_other/__init__", "", "top = max", True),
        ("own_scores", "WIDTH = 64", "WIDTH = 32", False),
        ("own_scores", "net(classes):", 'net(classes):\n    """Another net."""', False),
        ("own_scores", "targets):\n    return _hit", 'targets):\n    """Score."""\n    return _hit', False),
        ("own_layers", "nn.Flatten(), ", "", False),
    ],
)
def test_a_metric_s_digest_covers_its_references(
    file: str, before: str, after: str, changed: bool, checkout: Path
) -> None:
    (checkout / "own_scores.py").write_text(SCORES, encoding="utf-8")
    found = code.of_function("own_scores:mine")
    path = checkout / ("src" if "other" in file else "") / f"{file}.py"
    path.write_text(path.read_text(encoding="utf-8").replace(before, after, 1), encoding="utf-8")
    imports.source_of.cache_clear()
    assert (code.of_function("own_scores:mine") != found) is changed


def test_a_metric_s_digest_covers_its_listed_files(checkout: Path) -> None:
    reads = "WEIGHTS = Path('tables/weights.json').read_text()\n"
    (checkout / "own_scores.py").write_text(f"{reads}{SCORES}".replace("return", "WEIGHTS\n    return", 1))
    files = [checkout / "tables" / name for name in ("weights.json", "settings.json")]
    files[0].parent.mkdir()
    digests = []
    for changed in (None, *files):
        for file in files:
            file.write_text("longer" if file == changed else "0", encoding="utf-8")
        digests.append(code.of_function("own_scores:mine", files))
    assert [digest == digests[0] for digest in digests] == [True, False, True]
    config = parse({"train": {"metric": "own_scores:mine", "files": ["tables"]}, "variants": {"baseline": {}}})
    assert stages.described(config, {})["rulers"] == {"metric": digests[-1]}, "the gate compares it"


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("settings.json", True),
        ("folder/.env", True),
        (".conf/settings.json", True),
        ("data/prepared/dataset.json", False),
        ("../beside/table.csv", True),
        (".cache/kernel.bin", False),
        ("src/own.egg-info/PKG-INFO", False),
        (".venv/lib/python3.12/site-packages/own_installed.py", False),
        ("../../elsewhere.txt", False),
    ],
)
def test_files_read_without_a_digest_are_refused(name: str, refused: bool, checkout: Path) -> None:
    (checkout.parent / "repository" / ".git").mkdir(parents=True)
    here = checkout.rename(checkout.parent / "repository" / "checkout")
    os.chdir(here)
    (here / name).parent.mkdir(parents=True, exist_ok=True)
    (here / name).write_text("1", encoding="utf-8")
    check = code.unfollowed(planned())
    Path(name).read_bytes()
    np.loadtxt(name, ndmin=1)
    with pytest.raises(imports.Unfollowed, match=f"{re.escape(name)} was read by") if refused else nullcontext():
        check()


@pytest.mark.parametrize(("reader", "refused"), [("pipeline", False), ("own_net", True)])
def test_the_reader_counts_beside_installed_packages(
    reader: str, refused: bool, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline may be installed beside its libraries, and a plan may name an installed package."""
    installed = checkout.parent / "site-packages"
    monkeypatch.setattr(code, "PACKAGE", installed / "pipeline")
    (checkout / "settings.json").touch()
    monkeypatch.setattr(code, "modules_of_the_user", lambda _: {"own_net"})
    check = code.unfollowed(planned())
    text = "open('settings.json').close()"
    exec(compile(text, str(installed / reader / "module.py"), "exec"), {"__name__": f"{reader}.module"})
    with pytest.raises(imports.Unfollowed, match=r"settings\.json was read by") if refused else nullcontext():
        check()


def test_a_listed_file_is_part_of_the_code(checkout: Path) -> None:
    (checkout / "own_tables").mkdir()
    (checkout / "own_tables" / "one.csv").write_text("1", encoding="utf-8")
    (checkout / "settings.json").write_text("{}", encoding="utf-8")
    train = {"model": "own_net:inside", "files": ["own_tables", "settings.json"]}
    listed = plan(parse({"train": train, "variants": {"baseline": {}}}), "baseline", CPU)
    before = code.of_variant(listed)
    assert {"own_tables/one.csv", "settings.json"} <= set(before)
    (checkout / "own_tables" / "__pycache__").mkdir()
    (checkout / "own_tables" / "__pycache__" / "net.pyc").touch()
    assert code.of_variant(listed) == before
    check = code.unfollowed(listed)
    (checkout / "own_tables" / "one.csv").read_bytes()
    check()
    (checkout / "own_tables" / "one.csv").write_text("2", encoding="utf-8")
    assert {file for file, _ in before.items() ^ code.of_variant(listed).items()} == {"own_tables/one.csv"}
    (checkout / "settings.json").unlink()
    with pytest.raises(ConfigError, match=r"train\.files: found 'settings\.json', which is no file and no folder"):
        code.of_variant(listed)


def test_an_unlisted_extension_module_is_refused(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = code.unfollowed(planned())
    (checkout / "own_kernels.so").touch()
    extension = ModuleType("own_kernels")
    extension.__file__ = str(checkout / "own_kernels.so")
    monkeypatch.setitem(sys.modules, "own_kernels", extension)
    with pytest.raises(imports.Unfollowed, match=r"own_kernels\.so was read by the job's own code"):
        check()


@pytest.mark.parametrize("shared", ["a module", "a link to a module", "a file", "nothing"])
def test_code_shared_by_base_and_head_is_refused(shared: str, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, copy = checkout.parent, checkout
    (copy / ".dvc").mkdir()
    (copy / imports.GATE_COPY).write_text(f"{copy}\n{original}\n", encoding="utf-8")
    (original / "own_beside.py").touch()
    check = code.unfollowed(planned())
    if shared == "a file":
        (original / "own_beside.py").read_text(encoding="utf-8")
    elif shared != "nothing":
        folder = original
        if shared == "a link to a module":
            folder = copy / "links"
            folder.mkdir()
            (folder / "own_beside.py").symlink_to(original / "own_beside.py")
        monkeypatch.syspath_prepend(folder)
        import_module("own_beside")
    refusal = pytest.raises(imports.Unfollowed, match=r"own_beside\S* comes from the original work tree \(.*own_")
    with refusal if shared != "nothing" else nullcontext():
        check()


@pytest.mark.parametrize(
    ("factory", "files", "refused"),
    [
        ("inside", [], None),
        ("hidden", [], "own_layers_by_name ("),
        ("late", [], "own_layers_by_name ("),
        ("reading", [], "settings.json was read"),
        ("reading", ["settings.json"], None),
    ],
)
def test_training_refuses_code_without_a_digest(
    factory: str, files: list[str], refused: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    code_ = 2 if refused else 0
    Path("settings.json").write_text("{}", encoding="utf-8")
    train = {"device": "cpu", "seeds": [0], "epochs": 1, "batch_size": 128, "warmup_steps": 2}
    train |= {"files": files, "model": f"own_net:{factory}"}
    train |= {"deterministic": False}  # true would run a step on trial first
    params: dict[str, Any] = {"fetch": {"dataset": "digits"}, "train": train, "publish": {"live": False}}
    params["variants"] = {"baseline": {}}
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    furnish(parse(params))
    for _ in range(2):  # the refused training must leave no checkpoint, which a second one would accept
        sys.modules.pop("own_layers_by_name", None)
        assert cli.main(["train", "baseline"]) == code_
        assert (f"error: {refused}" in capfd.readouterr().err) is (code_ == 2)
        assert Path("results/baseline.json").exists() is (code_ == 0)


SAMPLES = """
import numpy as np


def samples(split):
    inputs = np.loadtxt("table.csv", ndmin=2) if split == "train" else np.zeros((0, 2))
    yield {"inputs": inputs, "targets": np.arange(len(inputs)) % 2}
"""


def test_fetch_refuses_unlisted_files_of_a_function(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (checkout / "own_samples.py").write_text(SAMPLES, encoding="utf-8")
    np.savetxt(checkout / "table.csv", np.eye(20)[:, :2])
    fetch: dict[str, Any] = {"dataset": "arrays", "arrays": "own_samples:samples"}
    params = {"fetch": fetch, "variants": {"baseline": {}}}
    for listed, status in (([], 2), (["table.csv"], 0)):
        fetch["files"] = listed
        Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
        assert cli.main(["fetch"]) == status
        refused = "table.csv was read by the job's own code" in capfd.readouterr().err
        assert refused is (status == 2)
    described = stages.described(parse(params), {}, ["fetch"])["stages"]["fetch"]["code"]
    assert {"table.csv", "own_samples.py"} <= set(described)


def test_a_measurement_refuses_a_module_without_a_digest(digits_folder: Path) -> None:
    train = {"device": "cpu", "seeds": [0], "batch_size": 128, "model": "own_net:late", "deterministic": False}
    made = plan(parse({"train": train, "variants": {"baseline": {}}}), "baseline", CPU)
    with (
        assembled(made, digits_folder) as assembly,
        pytest.raises(imports.Unfollowed),
        assembly.training(0) as training,
    ):
        training.advance(1)
