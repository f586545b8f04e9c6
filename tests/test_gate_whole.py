"""Whole gates of a job with code of its own, in a repository that also has a folder of sources: what ran must count."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SHORT, Clone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # each takes 10 to 60 seconds on an idle machine

NET = """\
import json
from pathlib import Path

from torch import nn


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, images):
        return self.scale * images


def net(channels, height, width, classes):
    settings = json.loads((Path(__file__).parent / "settings.json").read_text())
    return nn.Sequential(nn.Flatten(), Scaled(settings["scale"]), nn.Linear(channels * height * width, classes))
"""
SCORES = """\
import torch


def in_top(outputs, targets):
    return (outputs.topk(1).indices == targets[:, None]).any(1)
"""
PARAMS = SHORT | {
    "train.model": "net:net",
    "train.metric": "scores:in_top",
    "train.seeds": [0, 1, 2],
    "bench": {"max_rounds": 1, "window_seconds": 0.01, "hard_limit": True},
    "gate": {"max_minutes": 0.1},
    "variants": {"baseline": {}},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """Make a repository with a job in ``performance``, which reads settings.json, and a module in ``sources``."""
    top = tmp_path_factory.mktemp("whole") / "repository"
    clone = Clone(top / "performance", PARAMS)
    shutil.rmtree(clone.path / ".git")
    (top / "sources").mkdir()
    (top / "sources" / "blocks.py").write_text("size = 8\n", encoding="utf-8")
    for name, text in {"net.py": NET, "scores.py": SCORES, "settings.json": '{"scale": 1.0}'}.items():
        (clone.path / name).write_text(text, encoding="utf-8")
    subprocess.run(("git", "init", "--quiet", str(top)), check=True)
    clone.commit()
    return clone


@pytest.fixture
def job(made: Clone) -> Iterator[Clone]:
    commit = made.run("git", "rev-parse", "HEAD").strip()
    yield made
    made.run("git", "reset", "--quiet", "--hard", commit)


def gate(job: Clone, **variables: str) -> tuple[int, str]:
    """Run the gate against the last commit; return its exit code and its output."""
    return job.ended("python", "-m", "pipeline", "gate", "--against", "HEAD", **variables)


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after), encoding="utf-8")


def test_a_file_that_the_model_reads_counts(job: Clone) -> None:
    edit(job.path / "settings.json", "1.0", "0.0")
    code, output = gate(job)
    assert (code, "settings.json was read by the job's own code" in output) == (2, True), output
    assert "as train.files: [settings.json]." in output
    edit(job.path / "settings.json", "0.0", "1.0")
    job.edit({"train.files": ["settings.json"]})
    dockerfile = job.path / "Dockerfile"
    dockerfile.write_text("FROM debian:12\n", encoding="utf-8")
    job.commit()
    edit(job.path / "settings.json", "1.0", "0.0")
    edit(dockerfile, "12", "13")
    code, output = gate(job)
    assert (code, "Worse than the base: accuracy (baseline)" in output) == (1, True), output
    assert "The Dockerfiles differ, but both sides ran on one system" in output


def test_a_module_that_both_sides_share_is_refused(job: Clone) -> None:
    """tests/test_followed.py has the other ways by which both sides could share a module."""
    sources = job.path.parent / "sources"
    (job.path / "net.py").write_text(f"import blocks\n{NET}", encoding="utf-8")
    job.commit()
    (sources / "blocks.py").write_text("size = 16\n", encoding="utf-8")
    code, output = gate(job, PYTHONPATH=str(sources))
    said = f"even in a copy of the project, blocks comes from the original work tree ({sources / 'blocks.py'})"
    assert (code, said in output) == (2, True), output


def test_a_changed_metric_is_no_gain(job: Clone) -> None:
    edit(job.path / "scores.py", "topk(1)", "topk(3)")
    code, output = gate(job)
    said = "error: train.metric: the code of scores:in_top differs: the two accuracies are different scores"
    assert (code, said in output) == (2, True), output
