from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from pipeline.errors import ConfigError
from pipeline.params import load, parse
from pipeline.plans import plans
from pipeline.tools import choices
from tests.conftest import ROOT
from tests.workspaces import CPU_ONLY, SERVER

SETS = sorted((ROOT / "variants").glob("*.yaml"))


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a directory with params.yaml and a set of three variants, one of which needs a GPU, the current one."""
    (tmp_path / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    (tmp_path / "variants").mkdir()
    (tmp_path / "variants/tried.yaml").write_text(
        "# What a try shows.\n"
        "nhwc: {channels_last: true}\n"
        "half: {precision: fp16}\n"
        "both: {channels_last: true, gradient_accumulation: 2}\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_each_set_s_server_applies_all_of_it(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    train = {"optimizer": "adamw"} if path.stem in ("memory", "speed") else {}
    config = parse({"train": train, "compare": {"baseline": next(iter(values))}, "variants": values})
    assert not any(made.skipped for made in plans(config, SERVER).values())


def test_what_can_run_here_is_taken_in(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (checkout / "params.yaml").read_text(encoding="utf-8")
    choices.show_variants(CPU_ONLY, "tried", add=True)
    after = (checkout / "params.yaml").read_text(encoding="utf-8")
    assert after.startswith(before.rstrip())
    assert list(load().variants)[-2:] == ["nhwc", "both"]
    assert load().variants["both"].gradient_accumulation == 2
    said = capsys.readouterr().out
    assert "variants.half.precision: found 'fp16', but it needs a GPU" in said
    assert "added nhwc, both" in said
    choices.show_variants(CPU_ONLY, "tried", add=True)
    assert "added nothing" in capsys.readouterr().out
    assert (checkout / "params.yaml").read_text(encoding="utf-8") == after


@pytest.mark.parametrize(("name", "count"), [("pipeline", 5), ("sharded", 9)])
def test_one_gpu_is_told_which_variants_need_more(
    name: str, count: int, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / f"variants/{name}.yaml").write_bytes((ROOT / f"variants/{name}.yaml").read_bytes())
    choices.show_variants(CPU_ONLY.model_copy(update={"gpus": 1, "gpu_native_bf16": True}), name, add=True)
    *said, added = capsys.readouterr().out.splitlines()
    assert len(said) == count
    assert all("replicas: found 2" in line for line in said if " variants." in line)
    assert "replica" not in added


def test_what_would_be_left_out_is_not_taken(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "variants/tried.yaml").write_text(
        "# x\nhalf: {precision: bf16}\nboth: {precision: bf16, channels_last: true}\n", encoding="utf-8"
    )
    choices.show_variants(CPU_ONLY, "tried", add=True)
    half, whole, added = capsys.readouterr().out.splitlines()
    assert re.match(r"half +bf16 is skipped: this CPU has no native bf16", half), "``half`` would be the baseline again"
    assert re.match(r"both +can run here, but bf16 is skipped: ", whole)
    assert added == "params.yaml: added both"


def test_without_add_nothing_is_written(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "# What a try shows" + " and shows" * 20 + ".\na: {}\n"
    (checkout / "variants/tried.yaml").write_text(text, encoding="utf-8")
    choices.show_variants(CPU_ONLY, None, add=False)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("tried          What a try shows and")
    assert all(len(line) <= 120 and line.startswith(" " * 15) for line in others)
    assert others[-1].strip() == "a"
    choices.show_variants(CPU_ONLY, "tried", add=False)
    assert "can run here" in capsys.readouterr().out
    assert (checkout / "params.yaml").read_bytes() == (ROOT / "params.yaml").read_bytes()


@pytest.mark.parametrize("name", ["gradient_accumulation", "gradient_accumulation=4"])
def test_a_technique_alone_is_taken_in(name: str, checkout: Path) -> None:
    assert checkout == Path.cwd()
    choices.show_variants(CPU_ONLY, name, add=True)
    assert load().variants["gradient_accumulation"].gradient_accumulation == 4


def test_the_same_variant_in_other_words_is_there_already(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "variants/tried.yaml").write_text("# x\nddp: {parallelism: ddp}\n", encoding="utf-8")
    assert "processes: auto" in (checkout / "params.yaml").read_text(encoding="utf-8")
    choices.show_variants(CPU_ONLY, "tried", add=True)
    assert "added nothing" in capsys.readouterr().out


def test_a_link_to_params_yaml_stays_one(checkout: Path) -> None:
    (checkout / "params.yaml").rename(checkout / "mine.yaml")
    (checkout / "params.yaml").symlink_to("mine.yaml")
    choices.show_variants(CPU_ONLY, "tried", add=True)
    assert (checkout / "params.yaml").is_symlink()
    assert list(load(checkout / "mine.yaml").variants)[-2:] == ["nhwc", "both"]


def test_what_must_not_be_written_is_not(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"params\.yaml cannot be written; make it writable"):
        choices.show_variants(CPU_ONLY, "tried", add=True)
    assert (checkout / "params.yaml").read_bytes() == (ROOT / "params.yaml").read_bytes()


def test_outside_of_a_checkout_the_sets_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    choices.show_variants(CPU_ONLY, None, add=False)
    listed = re.findall(r"^(\S+) ", capsys.readouterr().out, re.MULTILINE)
    assert listed == [path.stem for path in SETS]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("# x\nmemory: {channels_last: true}\n", "tried", r"variants\.memory: params\.yaml has .* rename your variant"),
        ("# x\none: {}\n", "tired", r"found 'tired'; expected the name of a set: tried; or of a technique"),
        ("# Nothing yet.\n", "tried", r"variants/tried\.yaml: found None; expected variants, each under its name"),
        ("- a\n", "tried", r"found \['a'\]; expected variants"),
        ("one: {\n", "tried", r"variants/tried\.yaml is not YAML"),
        ("one: {}\none: {channels_last: true}\n", "tried", "the key 'one' occurs twice"),
    ],
)
def test_a_set_that_cannot_be_added_changes_nothing(checkout: Path, text: str, name: str, message: str) -> None:
    (checkout / "variants/tried.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        choices.show_variants(CPU_ONLY, name, add=True)
    assert (checkout / "params.yaml").read_bytes() == (ROOT / "params.yaml").read_bytes()
