"""A whole gate of a job with code of its own: what ran must count."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import SHORT, Clone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # takes a minute on an idle machine

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
PARAMS = SHORT | {
    "train.model": "net:net",
    "train.seeds": [0, 1, 2],
    "bench": {"max_rounds": 1, "window_seconds": 0.01, "hard_limit": True},
    "gate": {"max_minutes": 0.1},
    "variants": {"baseline": {}},
}


@pytest.fixture
def job(tmp_path: Path) -> Clone:
    """Return a repository with a job in ``performance``, which reads settings.json."""
    top = tmp_path / "repository"
    clone = Clone(top / "performance", PARAMS)
    shutil.rmtree(clone.path / ".git")
    for name, text in {"net.py": NET, "settings.json": '{"scale": 1.0}'}.items():
        (clone.path / name).write_text(text, encoding="utf-8")
    subprocess.run(("git", "init", "--quiet", str(top)), check=True)
    clone.commit()
    return clone


def gate(job: Clone) -> tuple[int, str]:
    """Run the gate against the last commit; return its exit code and its output."""
    return job.ended("python", "-m", "pipeline", "gate", "--against", "HEAD")


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
