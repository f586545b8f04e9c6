from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pipeline import listing
from pipeline.config import CATALOGUE, ConfigError, Machine, exclusions
from tests.conftest import ROOT

LAPTOP = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=False)
SERVER = Machine(gpus=8, gpu_native_bf16=True, cpu_native_bf16=True)


def described(capsys: pytest.CaptureFixture[str], machine: Machine, *words: str) -> dict[str, dict[str, Any]]:
    listing.show(machine, words, as_json=True)
    return {each["name"]: each for each in json.loads(capsys.readouterr().out)}


def test_the_page_of_the_documentation_is_in_step() -> None:
    assert (ROOT / "docs/techniques.md").read_text(encoding="utf-8") == listing.markdown(), "run `make docs`"


def test_each_excluded_name_stands_beside_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    page = listing.markdown()
    listing.show(LAPTOP, [], as_json=False)
    said = capsys.readouterr().out
    for name in {name for entry in CATALOGUE for name in exclusions(entry)}:
        assert re.search(rf"^\| `[^`]*{name}[^`]*`|^\| `[^`]*` \(`{name}`\)", page, re.MULTILINE), name
        assert re.search(rf"^  (?=\S).*\b{name}\b", said, re.MULTILINE), name


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(described(capsys, LAPTOP)) == [entry.name for entry in CATALOGUE]


@pytest.mark.parametrize(
    ("words", "name"),
    [("AMP", "bf16"), ("torch.utils.checkpoint", "activation_checkpointing"), ("nhwc", "channels_last")],
)
def test_they_are_found_by_the_names_that_people_search_for(
    words: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert name in described(capsys, LAPTOP, words)
    assert len(described(capsys, LAPTOP, words)) < len(CATALOGUE)


def test_nothing_found_names_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"found nothing about 'warp drive'; there are: .*channels_last"):
        listing.show(LAPTOP, ["warp", "drive"], as_json=False)


def test_it_says_what_this_machine_cannot_run_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    here, there = described(capsys, LAPTOP), described(capsys, SERVER)
    assert "needs a GPU" in here["fp16"]["why_not_here"]
    assert "several times slower" in here["bf16"]["emulated_here"]
    assert there["fp16"]["why_not_here"] is there["bf16"]["emulated_here"] is None
    listing.show(LAPTOP, ["fp16"], as_json=False)
    assert "here      no: it needs a GPU" in capsys.readouterr().out
