"""A whole job in a repository of its own, which `init` furnished: what its commands say, and what its report claims."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT, SHORT, Clone

pytestmark = [pytest.mark.weekly, pytest.mark.timeout(900)]

NETS = """\
import torch
from torch import nn


def net(*, shape, classes):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1], classes))


def twin(**sizes):
    model = net(**sizes)
    model[1].bias.data.add_(0.01)
    return model
"""
PARAMS = SHORT | {
    "train.augment": {},
    "bench": {"max_rounds": 1, "window_seconds": 0.01, "max_foreign_load": 1.0, "max_input_wait": 1.0},
    "infer.variants": [],
    "compare.target_accuracy": 0.1,
    "variants": {"baseline": {}, "twin": {"model": "nets:twin"}},
}


def measured_again(file: Path, ratios: list[float]) -> None:
    """Give the bench as many rounds as there are ``ratios``, of the twin's speed to the baseline's."""
    bench = json.loads(file.read_text(encoding="utf-8"))
    bench["seconds"] *= len(ratios)
    start = datetime.fromisoformat(bench["session"]["end_utc"]) - timedelta(seconds=bench["seconds"])
    bench["session"]["start_utc"] = start.isoformat()
    for number, arm in enumerate(bench["arms"]):
        first: dict[str, Any] = arm["samples"][0] | {"rejections": [], "measured_steps": bench["steps"]}
        speeds = [1_000_000 * (1 + (number + 2) * place % 11 / 2000) for place in range(len(ratios))]
        if arm["variant"] == "twin":
            speeds = [1_000_000 * ratio for ratio in ratios]
        steps = [1000 * arm["batch_size"] / speed for speed in speeds]
        arm["samples"] = [
            first | {"samples_per_second": speed} | dict.fromkeys(("step_p50_ms", "step_p90_ms", "step_p99_ms"), step)
            for speed, step in zip(speeds, steps, strict=True)
        ]
    file.write_text(json.dumps(bench), encoding="utf-8")


def compared(own: Clone) -> tuple[dict[str, Any], str]:
    """Compare; return what reports/comparison.json says of the twin, and reports/comparison.md."""
    own.run("dvc", "commit", "--force", "bench")
    own.run("python", "-m", "pipeline", "compare")
    texts = [(own.path / "reports" / f"comparison.{kind}").read_text(encoding="utf-8") for kind in ("json", "md")]
    return json.loads(texts[0])["variants"][1], texts[1]


def test_what_a_person_reads_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    own = Clone.at(tmp_path / "own")
    own.path.mkdir()
    own.run("git", "init", "--quiet")
    said = own.run("python", "-m", "pipeline", "doctor", fails=True)
    assert "in a repository of your own, python -m pipeline init writes params.yaml" in " ".join(said.split())

    # `init` takes arrays of any shape, if a model of one's own fits them.
    draw = np.random.default_rng(0)
    targets = np.arange(600) % 2
    inputs = draw.normal(size=(600, 4, 8)).astype(np.float32) + targets[:, None, None]
    np.savez(own.path / "signals.npz", inputs=inputs, targets=targets)
    (own.path / "nets.py").write_text(NETS, encoding="utf-8")
    asked = ("python", "-m", "pipeline", "init", "--arrays", "signals.npz")
    assert own.ended(*asked)[0] == 2
    own.run(*asked, "--model", "nets:net")
    own.commit({key: value for key, value in PARAMS.items() if key != "fetch.dataset"})

    output = own.run("dvc", "repro")
    assert "(after `mlflow ui --backend-store-uri" in output
    assert "make ui" not in output

    # A technique that has nothing to change was not applied.
    own.edit({"variants.rearranged": {"channels_last": True}})
    code, output = own.ended("python", "-m", "pipeline", "train", "rearranged")
    assert (code, "takes inputs of 3 dimensions and has no parameter of 4 or 5" in output) == (2, True), output
    own.edit({"variants.rearranged": None})

    # With speeds that are the same, both have come equally far in equal time. Nobody knows when the target was reached.
    bench = own.path / "bench.json"
    measured_again(bench, [0.999, 1.002, 0.998, 1.001, 0.997, 1.0, 1.003, 0.9985])
    twin, text = compared(own)
    assert (twin["throughput"]["decision"], twin["accuracy"]["estimate"]) == ("same", 0.0)
    assert twin["equal_time"]["accuracy_fraction"] == twin["equal_time"]["baseline_accuracy_fraction"]
    assert (twin["time_to_target"]["train_seconds"], twin["time_to_target_ratio"]) == (None, None)
    assert "before the first evaluation" in text

    # All advice counts the rounds in one way.
    measured_again(bench, [0.999, 1.002, 0.998])
    assert set(re.findall(r"(?:max\\_rounds: |but at least )(\d+)", compared(own)[1])) == {"6"}

    # A decided gain is in the first sentence, although the accuracy of one seed has no interval.
    measured_again(bench, [1.22, 1.15, 1.31, 1.2, 1.25, 1.18, 1.27, 1.21])
    twin, text = compared(own)
    assert (twin["verdict"], twin["throughput"]["decision"], twin["accuracy"]["low"]) == ("undecided", "better", None)
    headline = next(line for line in text.splitlines() if line.startswith("**"))
    assert re.match(r"\*\*Take `twin` if speed counts most: 1\d.*% faster, but .*an unknown accuracy", headline)

    # A job whose seeds all give the same weights may ignore its seed; then training again is no remedy.
    own.edit({"train.seeds": [0, 1], "train.learning_rate": 1.0e-30, "variants": {"baseline": {}}})
    own.run("dvc", "repro", "train@baseline")
    code, output = own.ended("python", "-m", "pipeline", "compare")
    remedy = "(then training again changes nothing: draw its random numbers from torch's generators, or set train.seeds"
    assert (code, "seeds 0, 1 ended in the same weights" in output, remedy in output) == (2, True, True), output
