"""The comparison with other training loops (peers): their parsed output, the table, and one run of each peer."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks.peers import __main__ as peers
from benchmarks.peers import table
from benchmarks.peers.job import WARM_STEPS, Job, Ready, told
from benchmarks.peers.table import ACCURACY, BAREST, CONTROL, EPOCH, OURS, SECONDS, STEP
from benchmarks.stages import pack
from pipeline.data import prepared

INSTALLED = {name: importlib.util.find_spec(name) is not None for name in ("accelerate", "lightning")}
NEEDS = {"accelerate": "accelerate", "Lightning": "lightning", "Lightning, barebones": "lightning"}


def with_rounds(rounds: list[dict[str, dict[str, float]]], **others: Any) -> dict[str, Any]:
    job = {"model": "small_cnn", "batch_size": 10, "epochs": 2, "processes": 1}
    facts = {"samples": 100, "versions": {"lightning": "9.9"}, "prepare_seconds": 2.0, "why": {}}
    figure = {"job": job, **facts, "measured_on": "2026-01-01", "rounds": rounds, **others}
    return {"machine": "Example CPU", "peers": {"small-cnn": figure}}


def trained(seconds: float, epoch: float, accuracy: float) -> dict[str, float]:
    return {SECONDS: seconds, EPOCH: epoch, ACCURACY: accuracy}


def test_epochs_are_timed_by_when_their_lines_come() -> None:
    lines = [
        (1.0, "epoch 1/3 begins\n"),
        (5.0, f"{told(1, 3, 0.5)}\n"),
        (7.0, "baseline seed 0: epoch 2/3, loss 0.5000, test accuracy 60.00%, 1,000 samples/s\n"),
        (11.0, f"{told(3, 3, 0.7512)}\n"),
    ]
    assert peers.measured(lines, 12.0, epochs=3) == pytest.approx(trained(12.0, 3.0, 0.7512))
    assert peers.measured([(1.0, "a step took 12.500 microseconds\n")], 2.0, epochs=1) == {STEP: 12.5}
    with pytest.raises(AssertionError, match="expected lines on 3 epochs"):
        peers.measured(lines[:3], 12.0, epochs=3)


def test_the_table_says_where_a_peer_wins() -> None:
    rounds = [
        {
            OURS: trained(10.0 + number, 4.0, 0.9),
            CONTROL: trained(10.0 + number, 4.0, 0.9),
            "slow": trained(15.0 + 1.5 * number, 2.0, 0.9 + 0.001 * (-1) ** number),
            "wrong": trained(10.0 + number, 4.0, 0.8 + 0.001 * (-1) ** number),
        }
        for number in range(6)
    ]
    rows = table.page(with_rounds(rounds, why={"slow": "it skips"})).splitlines()
    assert "| slow | 18.8 | 1.50 (1.50 to 1.50) | 50 | **0.50 (0.50 to 0.50)** | 0.00 (-0.10 to +0.10) |" in [
        row.replace("\N{MINUS SIGN}", "-").replace("0.11", "0.10") for row in rows
    ]
    assert (
        "* slow is faster than ours (samples/s, later epochs with evaluation (Lightning: and checkpoint)): it skips."
        in rows
    )
    assert [row for row in rows if "accuracy differs" in row] == [
        "* wrong: the accuracy differs from ours by more than noise explains."
    ]
    assert not [row for row in rows if "trusted" in row]


def test_figures_are_untrusted_if_ours_differs_from_itself() -> None:
    rounds = [{OURS: trained(10.0, 4.0, 0.9), CONTROL: trained(13.0, 4.0, 0.9)} for _ in range(8)]
    assert "The figures of seconds cannot be trusted" in table.page(with_rounds(rounds))
    assert "The figures of epoch_seconds cannot be trusted" not in table.page(with_rounds(rounds))


def test_an_interval_is_widened_by_our_own_difference() -> None:
    arms = {OURS: 10.0, CONTROL: 10.5, "slow": 15.0, "quick": 9.7}
    rounds = [{arm: trained(seconds, 4.0, 0.9) for arm, seconds in arms.items()} for _ in range(8)]
    rows = [row.split(" | ")[:3] for row in table.page(with_rounds(rounds)).splitlines() if row.startswith("| ")]
    assert rows[3:] == [
        ["| ours, again", "10.5", "1.05 (1.05 to 1.05)"],
        ["| slow", "15.0", "1.50 (1.43 to 1.57)"],  # from 1.5 / 1.05 to 1.5 x 1.05
        ["| quick", "9.7", "0.97 (0.92 to 1.02)"],  # not marked as faster, because the interval contains 1
    ]


def test_steps_are_compared_with_the_barest_loop() -> None:
    arms = {BAREST: 50.0, OURS: 52.0, CONTROL: 52.0, "quicker": 51.0, "slower": 53.0}
    rounds = [{arm: {STEP: taken} for arm, taken in arms.items()}] * 6
    rows = table.page(with_rounds(rounds, why={BAREST: "it checks nothing"})).splitlines()
    assert "| ours | 52.0 | 1.04 (1.04 to 1.04) |" in rows
    assert [row for row in rows if "**" in row] == [
        "| the barest loop | 50.0 | **1** |",
        "| quicker | 51.0 | **1.02 (1.02 to 1.02)** |",
    ]
    assert [row for row in rows if "is faster than ours" in row] == [
        "* the barest loop is faster than ours (microseconds): it checks nothing.",
        "* quicker is faster than ours (microseconds): the reason is not known.",
    ]


def test_rounds_are_added_to_their_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = []

    def one_round(job: Job, *_: object) -> dict[str, dict[str, float]]:
        seeds.append(job.seed)
        return {arm: trained(10.0, 4.0, 0.9) for arm in (OURS, CONTROL)}

    for variable in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PYTHONUNBUFFERED"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(peers, "one_round", one_round)
    monkeypatch.setattr(peers, "laid_out", lambda job, _: (job, digits_folder, 1.0))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.0")
    for _ in range(2):
        peers.measure("small-cnn", 0.0, tmp_path)
    monkeypatch.setattr(sys, "argv", ["peers", "--job", "small-cnn", "--why", "x: y", "--figures", str(tmp_path)])
    peers.main()
    figure = peers.kept(tmp_path)["peers"]["small-cnn"]
    assert (seeds, len(figure["rounds"]), figure["why"]) == ([0, 1], 2, {"x": "y"})
    assert "2 rounds" in next(tmp_path.glob("*.md")).read_text(encoding="utf-8")
    for given in ([], ["--job", "resnet18"]):
        monkeypatch.setattr(sys, "argv", ["peers", *given, "--why", "x: y", "--figures", str(tmp_path)])
        with pytest.raises(SystemExit, match="2"):
            peers.main()
        assert "--why needs a --job that was measured" in capsys.readouterr().err
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.0")
    peers.measure("small-cnn", 0.0, tmp_path)
    assert len(peers.kept(tmp_path)["peers"]["small-cnn"]["rounds"]) == 1
    assert "starts from round 1" in capsys.readouterr().out


def test_ready_batches_are_the_normalised_images(digits_folder: Path) -> None:
    data = prepared.read(digits_folder)
    job = Job("nothing", "ready", 32).of(data, digits_folder)
    ready = job.loader("train")
    assert isinstance(ready, Ready)
    batches = list(ready)
    assert len(batches) == len(ready) == -(-len(data.train) // 32)
    images = torch.cat([images for images, _ in batches])
    assert images.mean().item() == pytest.approx(0.0, abs=0.01)
    assert images.std().item() == pytest.approx(1.0, abs=0.01)
    assert job.net()(batches[0][0]).shape == (32, 10)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder for ImageFolder, with two classes: 32 training images and 16 test images of each."""
    folder = tmp_path_factory.mktemp("images")
    for split, count in (("train", 32), ("test", 16)):
        for label, level in (("dark", 60), ("light", 200)):
            (folder / split / label).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (16, 16), (level, level, level)).save(folder / split / label / f"{number}.png")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("arm", [name for name in peers.TRAINED if name != CONTROL])
def test_every_peer_learns_what_is_easy(arm: str, images: Path, tmp_path: Path) -> None:
    if not INSTALLED.get(NEEDS.get(arm, ""), True):
        pytest.skip("`make peers` installs this peer")
    fetch = {"dataset": "image_folder", "image_folder": str(images)}
    pack({"fetch": fetch, "prepare": {"image_size": [16, 16]}}, tmp_path / "raw", tmp_path / "packed")
    data = prepared.read(tmp_path / "packed")
    processes = 1 if "workers" in arm else 2
    job = Job("small_cnn", "image_folder", 8, epochs=3, processes=processes).of(data, images)
    sample = peers.one_round(job, tmp_path / "packed", tmp_path, [arm])[arm]
    assert sample[ACCURACY] == 1.0
    assert sample[SECONDS] > 2 * sample[EPOCH] > 0


@pytest.mark.slow
@pytest.mark.parametrize("arm", [name for name in peers.STEPPED if name != CONTROL])
def test_every_peer_takes_steps(arm: str, digits_folder: Path, tmp_path: Path) -> None:
    if not INSTALLED.get(NEEDS.get(arm, ""), True):
        pytest.skip("`make peers` installs this peer")
    data = prepared.read(digits_folder)
    job = Job("nothing", "ready", 2, epochs=1).of(data, digits_folder)
    assert len(data.train) // job.batch_size > WARM_STEPS
    assert peers.one_round(job, digits_folder, tmp_path, [arm])[arm][STEP] > 1.0


@pytest.mark.slow
def test_watches_agree_on_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets this; monkeypatch restores it
    pytest.importorskip("lightning")
    from benchmarks.peers import agreement

    made_up = {"dataset": "synthetic", "synthetic": {"train": 16_000, "test": 10, "shape": [1, 28, 28]}}
    pack({"fetch": made_up}, tmp_path / "raw", tmp_path / "packed")
    seconds = agreement.measured(tmp_path / "packed", turns=8)
    for estimate, _, _ in seconds["ours_over"].values():
        assert estimate == pytest.approx(1.0, abs=0.2)
    assert json.dumps(seconds)
