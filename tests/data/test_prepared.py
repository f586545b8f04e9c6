"""Packing and reading prepared data."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data import DataError, packing, prepared
from pipeline.data.datasets import decode
from pipeline.data.decoded import Decoded
from pipeline.data.packing import pixel_statistics, prepare
from pipeline.data.prepared import read
from pipeline.data.sources import fetch
from pipeline.files import file_sha256
from pipeline.params import Config, parse
from tests.commands import printed

NAMES = ["dataset.json", "test_inputs.npy", "test_targets.npy", "train_inputs.npy", "train_targets.npy"]


def config(**prepare: Any) -> Config:
    return parse({"fetch": {"dataset": "digits"}, "prepare": prepare, "variants": {"baseline": {}}})


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    fetch(config().fetch, folder)
    return folder


@pytest.fixture
def digits(raw: Path, tmp_path: Path) -> Path:
    prepare(config(), raw, tmp_path / "prepared")
    return tmp_path / "prepared"


def test_the_packed_arrays_are_the_decoded_ones(raw: Path, digits: Path) -> None:
    assert sorted(path.name for path in digits.iterdir()) == NAMES
    dataset, decoded = read(digits), decode(config(), raw)
    description = json.loads((digits / "dataset.json").read_text())
    assert (dataset.name, dataset.shape, dataset.classes) == ("digits", (1, 8, 8), tuple("0123456789"))
    assert description["arrays"]["inputs"] == "uint8 [1, 8, 8]"
    for name, split, chunks in (("train", dataset.train, decoded.train), ("test", dataset.test, decoded.test)):
        ((images, labels),) = chunks
        np.testing.assert_array_equal(split.inputs, images)
        np.testing.assert_array_equal(split.targets, labels)
        assert (split.inputs.dtype, split.targets.dtype) == (torch.uint8, torch.int64)
        assert split.inputs.is_contiguous()
        assert description[f"{name}_count"] == len(split) == len(images)
        assert description[f"{name}_class_counts"] == np.bincount(labels).tolist()
    images, known = np.load(digits / "train_inputs.npy") / 255, description["statistics"]["inputs"]
    np.testing.assert_allclose([known["mean"], known["std"]], [[images.mean()], [images.std()]], rtol=1e-12)


@given(
    shape=st.lists(st.integers(1, 4), max_size=4),
    dtype=st.sampled_from(
        [
            *(f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32)),
            "int64",
            "float16",
            "float32",
            "float64",
        ]
    ),
    counts=st.tuples(st.integers(2, 9), st.integers(1, 9)),
    chunk=st.integers(1, 9),
    seed=st.integers(0, 9),
)
def test_arrays_of_any_shape_and_type_are_packed(
    shape: list[int], dtype: str, counts: tuple[int, int], chunk: int, seed: int
) -> None:
    draw = np.random.default_rng(seed).integers
    named = [{"inputs": draw(0, 100, (n, *shape)).astype(dtype), "ages": draw(0, 9, n).astype(dtype)} for n in counts]
    named[0]["inputs"][:2] = np.array([1, 2], dtype).reshape(2, *[1] * len(shape))  # so that no channel is constant
    train, test = (
        [tuple(array[start : start + chunk] for array in split.values()) for start in range(0, n, chunk)]
        for split, n in zip(named, counts, strict=True)
    )
    with TemporaryDirectory() as folder, patch.object(packing, "decode") as decode:
        decode.return_value = Decoded(train, test, arrays=("inputs", "ages"))
        prepare(config(), Path(), Path(folder, "prepared"))
        dataset = read(Path(folder, "prepared"))
        for packed, expected in zip((dataset.train, dataset.test), named, strict=True):
            assert packed.arrays.keys() == expected.keys()
            for name, values in expected.items():
                assert packed.arrays[name].numpy().dtype == dtype
                np.testing.assert_array_equal(packed.arrays[name], values)
        changed = Path(folder, "prepared", "test_ages.npy")
        content = bytearray(changed.read_bytes())
        content[-1] ^= 1
        changed.write_bytes(content)
        with pytest.raises(DataError, match=r"test_ages\.npy: SHA-256 is "):
            read(Path(folder, "prepared"))


@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 20])
def test_statistics_are_per_channel_over_all_chunks(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "STATISTICS_CHUNK_BYTES", chunk_bytes)
    images = np.random.default_rng(0).integers(0, 256, (50, 3, 5, 7), dtype=np.uint8)
    images[:, 1] //= 2
    mean, std = pixel_statistics(images)
    np.testing.assert_allclose(mean, (images / 255).mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, (images / 255).std(axis=(0, 2, 3)), rtol=1e-12)


def test_statistics_are_exact() -> None:
    halves = np.array([0, 255], dtype=np.uint8).repeat(5_000).reshape(100, 1, 10, 10)
    assert pixel_statistics(halves) == ((0.5,), (0.5,))


def test_preparing_twice_gives_the_same_bytes(raw: Path, digits: Path, tmp_path: Path) -> None:
    prepare(config(), raw, tmp_path / "again")
    for name in NAMES:
        assert (tmp_path / "again" / name).read_bytes() == (digits / name).read_bytes()
    prepare(config(train_limit=100, test_limit=30), raw, tmp_path / "limited")
    limited = read(tmp_path / "limited")
    assert (len(limited.train), len(limited.test)) == (100, 30)
    assert limited.sha256 != read(digits).sha256
    assert set(limited.train.targets.bincount().tolist()) <= {9, 10, 11}


def test_test_inputs_that_were_seen_before_are_counted(tmp_path: Path) -> None:
    """Of seven test inputs, three are training inputs, and three repeat an earlier test input."""
    rows = np.random.default_rng(0).normal(size=(9, 6))
    np.savez(tmp_path / "own.npz", inputs=rows[[0, 1, 2, 2, 3]], test_inputs=rows[[0, 2, 2, 7, 7, 7, 8]])
    asked = {"dataset": "arrays", "arrays": str(tmp_path / "own.npz")}
    made = parse({"fetch": asked, "variants": {"baseline": {}}})
    fetch(made.fetch, tmp_path / "raw")
    prepare(made, tmp_path / "raw", tmp_path / "prepared")
    dataset = read(tmp_path / "prepared")
    assert (dataset.test_in_train_count, dataset.test_repeated_count, len(dataset.test)) == (3, 3, 7)


def test_a_failure_leaves_the_old_content_whole(
    raw: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in digits.iterdir()}
    monkeypatch.setattr(packing, "pixel_statistics", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(config(train_limit=50), raw, digits)
    assert {path.name: path.read_bytes() for path in digits.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["prepared"]


def test_arrays_are_mapped_and_never_written_back(digits: Path) -> None:
    before = (digits / "train_inputs.npy").read_bytes()
    dataset = read(digits)
    dataset.train.inputs.fill_(255)
    assert (digits / "train_inputs.npy").read_bytes() == before
    assert read(digits).train.inputs.float().mean() < 255


def test_files_that_disagree_with_the_description_are_refused(digits: Path) -> None:
    images = np.load(digits / "train_inputs.npy")
    for wrong in (images[:-1], images.astype(np.int16), images[:, :, :4], np.asfortranarray(images)):
        np.save(digits / "train_inputs.npy", wrong)
        os.utime(digits / "train_inputs.npy", (0, 0))  # older than the description, so that its SHA-256 is not checked
        with pytest.raises(DataError, match=r"inputs\.npy holds .* but dataset\.json says 1438 x uint8 \[1, 8, 8\]"):
            read(digits)
    (digits / "train_inputs.npy").write_bytes(b"junk")
    os.utime(digits / "train_inputs.npy", (0, 0))
    with pytest.raises(DataError, match=r"train_inputs\.npy cannot be read"):
        read(digits)
    (digits / "train_inputs.npy").unlink()
    with pytest.raises(DataError, match=r"train_inputs\.npy is missing; run `dvc repro --force prepare`"):
        read(digits)


def test_an_array_written_anew_is_read_whole_once(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summed = Mock(side_effect=file_sha256)
    monkeypatch.setattr(prepared, "file_sha256", summed)
    os.utime(digits / "dataset.json", (1, 1))
    os.utime(digits / "test_inputs.npy", (0, 0))
    read(digits)
    read(digits)
    assert sorted(call.args[0].name for call in summed.call_args_list) == NAMES[2:]


def test_a_description_that_is_missing_or_foreign_is_refused(digits: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere/dataset\.json is missing: run `dvc repro prepare` first"):
        read(tmp_path / "nowhere")
    values = json.loads((digits / "dataset.json").read_text())
    (digits / "dataset.json").write_text(json.dumps(values | {"schema_version": 1}))
    with pytest.raises(DataError, match=r"dataset\.json is not a description that this version can read"):
        read(digits)


@pytest.mark.parametrize("name", NAMES)
def test_reading_finds_a_single_byte_changed_after_preparing(name: str, digits: Path) -> None:
    read(digits)
    content = bytearray((digits / name).read_bytes())
    position = content.index(b'"mean": [\n        0.') + 24 if name == "dataset.json" else len(content) - 5
    content[position] ^= 1
    (digits / name).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(name)):
        read(digits)


def test_neither_fetching_nor_packing_waits_for_torch() -> None:
    """Importing torch costs more than these stages' own work."""
    code = (
        "import sys, pipeline.data.sources, pipeline.data.packing, pipeline.data.prepared;"
        "print(sorted({'torch', 'torchvision', 'sklearn', 'mlflow'} & set(sys.modules)))"
    )
    assert printed(code).strip() == "[]"
