"""The listing of techniques: its Markdown page, its text, its JSON and its search."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pipeline.errors import ConfigError
from pipeline.params import CATALOGUE, Machine, exclusions
from pipeline.params.loading import read_yaml
from pipeline.tools import choices
from tests.conftest import ROOT

LAPTOP = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=False)
SERVER = Machine(gpus=8, gpu_native_bf16=True, cpu_native_bf16=True)


def described(capsys: pytest.CaptureFixture[str], machine: Machine, *words: str) -> dict[str, dict[str, Any]]:
    choices.show_techniques(machine, words, as_json=True)
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_docs_techniques_md_is_up_to_date() -> None:
    assert (ROOT / "docs/techniques.md").read_text(encoding="utf-8") == choices.markdown(), "run `make docs`"


def test_no_technique_and_no_field_is_declared_twice() -> None:
    """The quick loader of the catalogue would keep the last."""
    assert [*read_yaml(ROOT / "pipeline/params/catalogue.yaml")] == [*dict.fromkeys(entry.group for entry in CATALOGUE)]


def test_each_excluded_name_is_shown_beside_its_setting(capsys: pytest.CaptureFixture[str]) -> None:
    page = choices.markdown()
    choices.show_techniques(LAPTOP, [""], as_json=False)
    said = capsys.readouterr().out
    for name in {name for entry in CATALOGUE for name in exclusions(entry)}:
        assert re.search(rf"^\| `[^`]*{name}[^`]*`|^\| `[^`]*` \(`{name}`\)", page, re.MULTILINE), name
        assert re.search(rf"^  (?=\S).*\b{name}\b", said, re.MULTILINE), name


def test_without_a_word_each_technique_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    choices.show_techniques(LAPTOP, [], as_json=False)
    lines = capsys.readouterr().out.splitlines()
    for entry in CATALOGUE:
        (line,) = [line for line in lines if line.startswith(f"  {entry.name} ")]
        assert re.search(r"  (yes|no|slowly) +\S", line), line
    assert max(map(len, lines)) <= 100
    assert lines[-1].endswith("python -m pipeline techniques NAME (or a word such as AMP)")
    choices.show_techniques(LAPTOP, ["ddp"], as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("  ") and line[2] != " "] == ["  parallelism: ddp"]
    assert any(line.startswith("    with      processes: auto") for line in lines)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("AMP", {"bf16"}),
        ("torch.utils.checkpoint", {"activation_checkpointing"}),
        ("DataParallel", {"data_parallel", "ddp"}),
        ("bucket size", {"bucket_mb"}),
        ("post-local SGD", {"post_local_sgd"}),
        ("FSDP2", {"fsdp"}),
        ("mixed precision", {"parameter_precision", "bf16", "fp16"}),
        ("1F1B", {"pipeline"}),
        ("CUDA graphs", {"compile", "cuda_graph"}),
        ("num_workers", {"dataloader"}),
        ("chunked cross-entropy", {"chunked_loss"}),
        ("logits memory", {"chunked_loss"}),
        ("Liger Kernel", {"chunked_loss"}),
        ("FlashAttention", {"attention"}),
        ("memory-efficient attention", {"attention"}),
        ("cuDNN attention", {"attention"}),
    ],
)
def test_a_technique_is_found_by_its_usual_names(
    words: str, names: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    entries = described(capsys, LAPTOP, *words.split())
    assert names <= entries.keys() < {entry.name for entry in CATALOGUE}


def test_with_one_gpu_no_work_can_be_shared(capsys: pytest.CaptureFixture[str]) -> None:
    single, several = described(capsys, SERVER.model_copy(update={"gpus": 1})), described(capsys, SERVER)
    shared = {entry.name for entry in CATALOGUE if entry.key == "parallelism" or entry.needs}
    assert {name for name, row in single.items() if row["why_not_here"] and "one GPU" in row["why_not_here"]} == shared
    assert not any(several[name]["why_not_here"] for name in shared)


def test_values_that_this_machine_cannot_run_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    laptop, server = described(capsys, LAPTOP, "compile")["compile"], described(capsys, SERVER, "compile")["compile"]
    assert list(laptop["why_not_values_here"]) == ["reduce-overhead"]
    assert server["why_not_values_here"] == {}
    choices.show_techniques(LAPTOP, ["torch.compile"], as_json=False)
    assert "yes, but not reduce-overhead: it needs a GPU" in " ".join(capsys.readouterr().out.split())


def test_if_nothing_is_found_the_error_lists_all_techniques() -> None:
    with pytest.raises(ConfigError, match=r"found nothing about 'warp drive'; there are: .*channels_last"):
        choices.show_techniques(LAPTOP, ["warp", "drive"], as_json=False)


def test_techniques_that_this_machine_cannot_run_have_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    on_laptop, on_server = described(capsys, LAPTOP), described(capsys, SERVER)
    assert "needs a GPU" in on_laptop["fp16"]["why_not_here"]
    assert "several times slower" in on_laptop["bf16"]["emulated_here"]
    assert on_server["fp16"]["why_not_here"] is on_server["bf16"]["emulated_here"] is None
    choices.show_techniques(LAPTOP, ["fp16"], as_json=False)
    assert "here      no: it needs a GPU" in capsys.readouterr().out
