"""Synthetic samples are the same on every machine and for any division into parts, and can be learned."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.data import SYNTHETIC_DESCRIPTION, DataError, datasets, prepared
from pipeline.data.datasets import decode
from pipeline.data.sources import fetch
from pipeline.errors import ConfigError
from pipeline.params import Config, parse
from tests.workspaces import PREPARED, RAW, furnish

SMALL = {"train": 20, "test": 6, "shape": [3, 9, 11], "classes": 4}


def config(made_up: dict[str, Any], **prepare: Any) -> Config:
    asked = {"dataset": "synthetic", "synthetic": made_up}
    return parse({"fetch": asked, "prepare": prepare, "variants": {"baseline": {}}})


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_samples_are_the_same_on_every_machine() -> None:
    furnish(config(SMALL))
    assert [path.name for path in RAW.rglob("*") if path.is_file()] == [SYNTHETIC_DESCRIPTION]
    dataset = prepared.read(PREPARED)
    assert dataset.sha256 == "eb963e034cb12752f1d6bf7e9d56ef60e42ed89c14a0b6bae7f85d8a6f1a4147"
    assert (dataset.shape, dataset.classes) == ((3, 9, 11), ("0", "1", "2", "3"))
    assert dataset.train.targets.bincount().tolist() == [5] * 4


def test_an_image_is_the_same_in_any_part() -> None:
    asked = config(SMALL).fetch.synthetic
    ((whole, _),) = datasets.synthetic_chunks(asked, "train", 20)
    ((tested, _),) = datasets.synthetic_chunks(asked, "test", 6)
    fetch(config(SMALL).fetch, RAW)
    kept = np.concatenate([images for images, _ in decode(config(SMALL, train_limit=7), RAW).train])
    assert np.array_equal(kept, whole[:7])
    assert not (tested == whole[:6]).all(axis=(1, 2, 3)).any(), "the test images differ from the training images"
    reseeded = config(SMALL | {"seed": 1}).fetch.synthetic
    assert not np.array_equal(next(datasets.synthetic_chunks(reseeded, "test", 6))[0], tested)


@pytest.mark.parametrize(
    ("asked", "forms"),
    [
        ({"shape": [12]}, {"inputs": "uint8 [12]", "targets": "int64 []"}),
        ({"shape": [2, 3, 9, 4], "dtype": "float32"}, {"inputs": "float32 [2, 3, 9, 4]", "targets": "int64 []"}),
        (
            {"shape": [20], "dtype": "float32", "targets": "floats", "classes": 3},
            {"inputs": "float32 [20]", "targets": "float32 [3]"},
        ),
        ({"shape": [17], "targets": "tokens", "classes": 50}, {"inputs": "uint16 [17]"}),
    ],
)
def test_any_shape_and_type_can_be_learned(
    asked: dict[str, Any], forms: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up = {"train": 400, "test": 100} | asked
    whole = list(datasets.synthetic_chunks(config(made_up).fetch.synthetic, "train", 60))
    monkeypatch.setattr(datasets, "CHUNK_BYTES", 500)
    parts = list(datasets.synthetic_chunks(config(made_up).fetch.synthetic, "train", 60))
    assert len(parts) > 1
    for array, several in zip(whole[0], zip(*parts, strict=True), strict=True):
        assert np.array_equal(array, np.concatenate(several))
    furnish(config(made_up))
    dataset = prepared.read(PREPARED)
    layout = {name: f"{rows.dtype} {list(rows.shape[1:])}" for name, rows in dataset.train.arrays.items()}
    assert {name: form.removeprefix("torch.") for name, form in layout.items()} == forms
    inputs = dataset.train.inputs.float().flatten(1).numpy()
    tests = dataset.test.inputs.float().flatten(1).numpy()
    if dataset.vocabulary:
        steps = (inputs[:, 1:] - inputs[:, :-1]) % 50
        assert set(steps.ravel().tolist()) == {1, 2}
        assert dataset.vocabulary == 50
        return
    targets, wanted = dataset.train.targets, dataset.test.targets
    if dataset.classes:
        targets, wanted = torch.eye(10)[targets], torch.eye(10)[wanted]
    answer, *_ = np.linalg.lstsq(np.c_[inputs, np.ones(400)], targets.numpy(), rcond=None)
    left = np.c_[tests, np.ones(100)] @ answer - wanted.numpy()
    assert left.var() < 0.95 * wanted.numpy().var()


def test_more_samples_than_fit_on_the_disk_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=26 * 3 * 9 * 11 - 1))
    with pytest.raises(DataError, match=r"fetch\.synthetic: found 26 samples of shape \[3, 9, 11\], .*; allowed"):
        fetch(config(SMALL).fetch, RAW)


@pytest.mark.parametrize(("key", "value"), [("classes", 1), ("shape", []), ("train", 0)])
def test_a_mistake_in_the_settings_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"fetch\.synthetic\.{key}: found "):
        config(SMALL | {key: value})
    with pytest.raises(ConfigError, match=r"fetch\.synthetic\.shape: found \[3, 9, 11\]; tokens need"):
        config(SMALL | {"targets": "tokens"})
