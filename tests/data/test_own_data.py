"""Arrays and text of the user's own: what is packed, and what is refused."""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
import re
import struct
import sys
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from pipeline.data import DataError, array_files, arrays, text
from pipeline.data.packing import prepare, statistics
from pipeline.data.prepared import Dataset, read
from pipeline.data.sources import fetch
from pipeline.environment import code as digests
from pipeline.environment import stages
from pipeline.errors import ConfigError
from pipeline.params import Config, parse
from tests.pages import blocks

RANDOM = np.random.default_rng(0)
ROWS = RANDOM.normal(size=(9, 2))


def packed(folder: Path, dataset: str, place: str | None = None, **settings: Any) -> Dataset:
    source = {} if place is None else {dataset: str(folder / place)}
    config = parse({"fetch": {"dataset": dataset} | source, "prepare": settings, "variants": {"baseline": {}}})
    fetch(config.fetch, folder / "raw")
    prepare(config, folder / "raw", folder / "prepared")
    return read(folder / "prepared")


def safetensors(values: dict[str, npt.NDArray[Any]]) -> bytes:
    """Return a .safetensors file with these arrays, written as the format's description says."""
    kinds = {"float64": "F64", "float32": "F32", "int64": "I64"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    content = b""
    for name, each in values.items():
        offsets = [len(content), len(content) + each.nbytes]
        header[name] = {"dtype": kinds[str(each.dtype)], "shape": each.shape, "data_offsets": offsets}
        content += each.tobytes()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def listed(values: npt.NDArray[Any]) -> pyarrow.Array:
    """A column of numbers, or of lists of one length, which may be nested."""
    column = pyarrow.array(values.ravel())
    for size in reversed(values.shape[1:]):
        column = pyarrow.FixedSizeListArray.from_arrays(column, size)
    return column


def table(values: dict[str, npt.NDArray[Any]]) -> bytes:
    out = BytesIO()
    parquet.write_table(pyarrow.table({name: listed(each) for name, each in values.items()}), out, row_group_size=17)
    return out.getvalue()


def saved(folder: Path, kind: str, **values: npt.NDArray[Any]) -> str:
    """Write the arrays; return the name of the file or folder in ``folder``."""
    if kind == "npz":
        np.savez(folder / "own.npz", **values)  # type: ignore[arg-type]
        return "own.npz"
    if kind == "safetensors":
        (folder / "own.safetensors").write_bytes(safetensors(values))
        return "own.safetensors"
    if kind == "parquet":
        (folder / "own.parquet").write_bytes(table(values))
        return "own.parquet"
    (folder / "own").mkdir()
    for name, each in values.items():
        np.save(folder / "own" / f"{name}.npy", each)
    return "own"


@pytest.mark.parametrize("kind", ["npz", "folder", "safetensors", "parquet"])
@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 20])
def test_a_table_is_packed_as_it_is_and_split_by_class(
    kind: str, chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_files, "CHUNK_BYTES", chunk_bytes)
    inputs, labels = RANDOM.normal(5, 2, (60, 4)), np.arange(60) % 3
    dataset = packed(tmp_path, "arrays", saved(tmp_path, kind, inputs=inputs, targets=labels), test_fraction=0.25)
    assert (dataset.classes, dataset.vocabulary, dataset.shape) == (("0", "1", "2"), None, (4,))
    assert (len(dataset.train), len(dataset.test)) == (45, 15)
    assert dataset.test.targets.bincount().tolist() == [5, 5, 5]
    rows = {tuple(row): label for row, label in zip(inputs.astype(np.float32).tolist(), labels, strict=True)}
    found = [*zip(dataset.train.inputs, dataset.train.targets, strict=True)]
    found += zip(dataset.test.inputs, dataset.test.targets, strict=True)
    assert {tuple(row.tolist()): label.item() for row, label in found} == rows
    np.testing.assert_allclose(dataset.statistics["inputs"].mean, dataset.train.inputs.mean(0), rtol=1e-6)
    np.testing.assert_allclose(dataset.statistics["inputs"].std, dataset.train.inputs.std(0, correction=0), rtol=1e-6)


def test_numbers_to_predict_and_a_test_split_are_taken_as_given(tmp_path: Path) -> None:
    values = {name: RANDOM.normal(size=(n, 3, 2)) for name, n in (("inputs", 30), ("test_inputs", 7))}
    values |= {name: RANDOM.normal(100, 9, (n, 2)) for name, n in (("targets", 30), ("test_targets", 7))}
    dataset = packed(tmp_path, "arrays", saved(tmp_path, "npz", **values), train_limit=20)
    assert (dataset.classes, len(dataset.train), len(dataset.test)) == ((), 20, 7)
    np.testing.assert_array_equal(dataset.test.targets, values["test_targets"].astype(np.float32))
    assert len(dataset.statistics["targets"].mean) == 2
    assert len(dataset.statistics["inputs"].std) == 3


def test_statistics_of_floats_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RANDOM.normal(1000, 0.5, (50, 3, 4)).astype(np.float32)
    whole = statistics("inputs", rows)
    np.testing.assert_allclose(whole.std, rows.astype(np.float64).std((0, 2)), rtol=1e-6)
    monkeypatch.setattr("pipeline.data.packing.STATISTICS_CHUNK_BYTES", 100)
    assert statistics("inputs", rows) == whole


def test_tokens_take_the_smallest_type_that_holds_them(tmp_path: Path) -> None:
    for largest, dtype in ((65_535, "uint16"), (65_536, "int32")):
        folder = tmp_path / dtype
        folder.mkdir()
        windows = np.arange(40).reshape(8, 5)
        windows[0, 0] = largest
        tests = {"test_inputs": windows[:2]}
        dataset = packed(folder, "arrays", saved(folder, "npz", inputs=windows, **tests))
        assert dataset.vocabulary == largest + 1
        assert str(dataset.train.inputs.dtype) == f"torch.{dtype}"
        assert (dataset.statistics, list(dataset.train.arrays)) == ({}, ["inputs"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inputs": np.array([[1.0], [1.0, 2.0]], dtype=object)}, "Pad ragged rows, which numpy stores as objects"),
        ({"inputs": np.ones((4, 2)), "targets": np.arange(3)}, "different numbers of samples"),
        (
            {"inputs": np.array([[1.0, 2.0], [3.0, np.nan]] * 4)},
            r"row \d of the \w+ inputs has a NaN or infinite value",
        ),
        (
            {"inputs": RANDOM.normal(size=(9, 2)), "targets": np.arange(9) % 3 - 1},
            r"targets.npy int64 \[9\]: found values from -1 to 1, but there are 2 classes",
        ),
        (
            {"inputs": RANDOM.normal(size=(9, 2)), "targets": np.zeros(9, int)},
            "all training labels are 0; classification needs two classes",
        ),
        (
            {"inputs": RANDOM.normal(size=(9, 2)), "targets": np.zeros((9, 2), int)},
            "integer targets are labels; expected one",
        ),
        ({"inputs": np.arange(18).reshape(9, 2) + (1 << 24), "targets": np.ones(9)}, r"exactly only up to 2\^24"),
        (
            {"inputs": ROWS * 1e300},
            r"inputs.npy float64 .* do not fit float32, whose largest value is 3.4e\+38; scale them down",
        ),
        ({"inputs": np.ones((9, 2))}, "channel 0 of the training inputs is constant"),
        ({"inputs": np.zeros((0, 2))}, "the train split is empty"),
        ({"inputs": np.array(["a", "b"])}, "expected numbers in C order"),
        ({"targets": np.arange(3)}, "none of the arrays|has targets; expected inputs"),
        (
            {"inputs": np.arange(20).reshape(5, 4), "test_inputs": np.full((2, 4), 30)},
            r"test_inputs.npy int64 \[2, 4\]: found values from 30 to 30, but there are 20 tokens in the vocabulary",
        ),
        (
            {"inputs": np.arange(9)[:, None] + np.zeros(3, int), "test_inputs": np.full((2, 3), 65_540)},
            "found values from 65540 to 65540, but there are 9 tokens",
        ),
        (
            {"inputs": np.array([[0, 65_535]] * 4), "test_inputs": np.array([[-1, 5]])},
            r"test_inputs\.npy .*: found values from -1 to 5, but there are 65536 tokens",
        ),
        ({"inputs": np.array([[0, 2**40]] * 4)}, "from 0 to 1099511627776, but there are 2147483648 tokens"),
        ({"inputs": np.arange(9)[:, None]}, r"a row needs two tokens or more; expected windows \[N, length \+ 1\]"),
        (
            {"inputs": ROWS, "targets": np.array([0, 1, 2] * 2 + [0, 1, 1000])},
            r"labels go up to 1000, but 997 of the 1001 classes \(first: 3\) have no training sample",
        ),
        ({"inputs": ROWS, "targets": np.arange(9) + 2**40}, "but there are 65536 classes"),
        ({"inputs": ROWS, "targets": np.ones(9), "Ages": np.ones(9)}, "has an array 'Ages.*'; expected inputs"),
        ({"inputs": ROWS, "ages": np.full(9, 2**63, np.uint64)}, r"do not fit int64, whose largest value is 9.22e\+18"),
        ({"inputs": np.ones((4, 2)), "targets": np.ones(4), "test_inputs": np.ones((2, 2))}, "in a test split"),
    ],
)
def test_bad_arrays_are_refused_and_named(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        packed(tmp_path, "arrays", saved(tmp_path, "npz", **values))
    assert not (tmp_path / "prepared").exists()


@pytest.mark.parametrize("kind", ["folder", "safetensors"])
def test_a_name_that_no_array_can_have_is_refused_in_each_kind_of_file(kind: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has an array 'the ages.*'; expected inputs, targets, test_inputs"):
        packed(tmp_path, "arrays", saved(tmp_path, kind, inputs=ROWS, **{"the ages": np.ones(9)}))


@pytest.mark.parametrize("kind", ["npz", "folder", "safetensors", "parquet"])
def test_further_arrays_stay_with_their_samples(kind: str, tmp_path: Path) -> None:
    ages, numbers = RANDOM.normal(size=(30, 2)), np.arange(30) + (1 << 40)
    place = saved(tmp_path, kind, ages=ages, inputs=ages + 1, targets=ages[:, 0], numbers=numbers)
    dataset = packed(tmp_path, "arrays", place, test_fraction=0.2)
    for split, count in ((dataset.train, 24), (dataset.test, 6)):
        rows = split.arrays["numbers"] - (1 << 40)
        assert (len(rows), rows.dtype, split.arrays["ages"].dtype) == (count, torch.int64, torch.float32)
        np.testing.assert_array_equal(split.arrays["ages"], ages[rows].astype(np.float32))
        np.testing.assert_array_equal(split.inputs, (ages[rows] + 1).astype(np.float32))
    assert sorted(dataset.statistics) == ["inputs", "targets"]


def test_preparing_takes_few_bytes_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of digests took 100 bytes a row, and the choice of test samples as much again."""
    monkeypatch.setattr(array_files, "CHUNK_BYTES", 1 << 14)
    monkeypatch.setattr("pipeline.data.packing.STATISTICS_CHUNK_BYTES", 1 << 14)
    peaks = []
    for count in (40_000, 10_000):  # the first imports what both need
        folder = tmp_path / str(count)
        folder.mkdir()
        place = saved(folder, "folder", inputs=RANDOM.normal(size=(count, 3)), targets=np.arange(count) % 8)
        tracemalloc.start()
        try:
            assert len(packed(folder, "arrays", place).train) == 0.8 * count
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert (peaks[0] - peaks[1]) / 30_000 <= 32


def test_columns_of_a_table_are_the_features_of_its_rows(tmp_path: Path) -> None:
    table = pyarrow.table({"rooms": [1, 2, 3, 4], "targets": [0.5, 1.0, 1.5, 2.0], "area": [1.5, 2.5, 3.0, 4.0]})
    parquet.write_table(table, tmp_path / "own.parquet")
    dataset = packed(tmp_path, "arrays", "own.parquet", test_fraction=0.25)
    rows = torch.cat([dataset.train.inputs, dataset.test.inputs])
    targets = torch.cat([dataset.train.targets, dataset.test.targets])
    assert {(*row.tolist(), target.item()) for row, target in zip(rows, targets, strict=True)} == {
        (1.0, 1.5, 0.5), (2.0, 2.5, 1.0), (3.0, 3.0, 1.5), (4.0, 4.0, 2.0)
    }  # fmt: skip
    assert dataset.vocabulary is None


def test_pictures_as_nested_lists_keep_their_shape(tmp_path: Path) -> None:
    inputs = RANDOM.normal(size=(40, 2, 3, 5)).astype(np.float32)
    dataset = packed(tmp_path, "arrays", saved(tmp_path, "parquet", inputs=inputs, targets=np.arange(40) % 2))
    assert dataset.shape == (2, 3, 5)
    rows = {each.numpy().tobytes() for split in (dataset.train, dataset.test) for each in split.inputs}
    assert rows == {each.tobytes() for each in inputs}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"targets": [1, 2]}, "has targets; expected inputs"),
        ({"x": [1.0, None], "targets": [0, 1]}, r"inputs float64 \[2, 1\] has empty fields"),
        ({"inputs": [1.0, 2.0], "Ages": [1, 2]}, "has an array 'Ages'; expected inputs"),
        ({"inputs": [[1.0], [1.0, 2.0]]}, "own.parquet: the column 'inputs' holds list<.*: double>; expected numbers"),
        ({"x": ["a", "b"], "targets": [1, 2]}, "own.parquet: the column 'x' holds string; expected numbers"),
    ],
)
def test_a_bad_table_is_refused_and_named(columns: dict[str, list[Any]], message: str, tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table(columns), tmp_path / "own.parquet")
    with pytest.raises(DataError, match=message):
        packed(tmp_path, "arrays", "own.parquet")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff" * 16, "the header has 18,446,744,073,709,551,615 bytes"),
        (safetensors({"inputs": ROWS}).replace(b"[9, 2]", b"[9, 3]"), "inputs has 144 bytes"),
        (safetensors({"inputs": ROWS}).replace(b'"F64"', b'"F8_"'), "inputs object .*: expected numbers"),
        (safetensors({"inputs": ROWS})[:-1], "is cut short"),
        (safetensors({"inputs": ROWS}).replace(b"[0, 144]", b"[-9,135]"), "inputs starts 9 bytes before the values"),
        (struct.pack("<Q", 2 << 20) + b" " * (2 << 20), "the header has 2,097,152 bytes"),
    ],
)
def test_a_bad_safetensors_file_is_refused_and_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=message):
        packed(tmp_path, "arrays", "own.safetensors")


def test_a_table_of_fewer_rows_than_its_header_claims_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.parquet").write_bytes(table({"inputs": ROWS, "targets": np.arange(9) % 2}))
    array = next(array_files._in_table(tmp_path / "own.parquet"))
    assert sum(map(len, array.chunks(4))) == 9
    with pytest.raises(DataError, match=r"inputs float64 \[12, 2\]: the file has only 9 rows"):
        list(array._replace(shape=(12, 2)).chunks(4))


def _claiming(shape: tuple[int, ...]) -> bytes:
    """An .npz of few bytes, with a member whose header claims this shape."""
    header, packed = BytesIO(), BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("inputs.npy", header.getvalue() + bytes(1000))
    return packed.getvalue()


def _twice() -> bytes:
    """An .npz with two members of one name."""
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w") as opened, warnings.catch_warnings(action="ignore"):
        for value in (1, 2):
            member = BytesIO()
            np.save(member, np.full((9, 2), value))
            opened.writestr("inputs.npy", member.getvalue())
    return packed.getvalue()


def _wide() -> bytes:
    """A table of few bytes with one row, a list of 80 million numbers."""
    column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.nulls(80_000_000, pyarrow.int8()), 80_000_000)
    written = BytesIO()
    parquet.write_table(pyarrow.table({"inputs": column}), written, compression="zstd")
    return written.getvalue()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "own.npz",
            lambda: _claiming((4, 1 << 30)),
            r"a row \(a sample\) has 1,073,741,824 bytes; allowed: 67,108,864",
        ),
        ("own.npz", lambda: _claiming((10**12, 8)), r"inputs\.npy uint8 \[1000000000000, 8\] is cut short"),
        ("own.npz", _twice, "two arrays have the same name"),
        ("own.parquet", _wide, r"a row \(a sample\) has 80,000,000 bytes; allowed"),
    ],
)
def test_a_header_that_claims_any_size_takes_no_memory(
    file: str, content: Callable[[], bytes], message: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_bytes(content())
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message):
            packed(tmp_path, "arrays", file)
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()


SAMPLES = """
import numpy as np

def samples(split, count=6):
    for start in range(0, count if split == "train" else 3, 3):
        inputs = np.arange(start, start + 3.0)
        yield {"inputs": np.stack([inputs, inputs * inputs], 1), "targets": inputs.tolist()}
"""


@pytest.fixture
def own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(content: str) -> Path:
        monkeypatch.delitem(sys.modules, "own_data", raising=False)
        importlib.invalidate_caches()
        (tmp_path / "own_data.py").write_text(content, encoding="utf-8")
        return tmp_path

    return write


def function(**settings: Any) -> Config:
    asked = {"dataset": "arrays", "arrays": "own_data:samples"} | settings
    return parse({"fetch": asked, "variants": {"baseline": {}}})


def of_function(folder: Path, **settings: Any) -> Dataset:
    config = function(**settings)
    fetch(config.fetch, folder / "raw")
    prepare(config, folder / "raw", folder / "prepared")
    return read(folder / "prepared")


def test_a_function_of_one_s_own_yields_the_arrays(own_function: Callable[[str], Path]) -> None:
    folder = own_function(SAMPLES)
    dataset = of_function(folder, arrays_options={"count": 9})
    assert dataset.train.inputs.tolist() == [[each, each * each] for each in range(9)]
    assert dataset.test.targets.tolist() == [0, 1, 2]

    own_function(SAMPLES.replace("else 3, 3", "else 0, 3"))
    assert len(of_function(folder).test) == 1  # held out, as the test split of before is gone


def test_a_saved_data_set_of_the_library_datasets_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(arrays, "CHUNK_ROWS", 4)
    kinds = datasets.Features(inputs=datasets.Array3D((1, 2, 3), "uint8"), targets=datasets.Value("int32"))
    images = RANDOM.integers(0, 256, (10, 1, 2, 3), dtype=np.uint8)
    whole = datasets.Dataset.from_dict({"inputs": images, "targets": np.arange(10) % 2}, features=kinds)
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=whole, test=whole.select(range(3))).save_to_disk(tmp_path / "split")
    dataset = packed(tmp_path, "arrays", "split")
    np.testing.assert_array_equal(dataset.train.inputs, images)
    assert dataset.train.inputs.dtype == torch.uint8
    assert (dataset.test.targets.tolist(), dataset.shape, dataset.classes) == ([0, 1, 0], (1, 2, 3), ("0", "1"))
    assert len(packed(tmp_path, "arrays", "one").test) == 2, "held out"

    whole.rename_column("inputs", "image").save_to_disk(tmp_path / "other")
    with pytest.raises(DataError, match="yielded the keys image, targets; expected a dict of inputs"):
        packed(tmp_path, "arrays", "other")
    datasets.DatasetDict(train=whole, validation=whole).save_to_disk(tmp_path / "third")
    with pytest.raises(DataError, match="third has the split 'validation'; expected train and test"):
        packed(tmp_path, "arrays", "third")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="was saved by the library datasets, which is not installed"):
        packed(tmp_path, "arrays", "one")


def test_the_function_of_the_docs_yields_what_they_say(own_function: Callable[[str], Path]) -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "your-job.md"
    (shown,) = (block for block in blocks(page, "python") if "def samples" in block)
    dataset = of_function(own_function(shown), arrays="own_data:samples", arrays_options={"count": 500})
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (500, 200, ("0", "1"))


def test_an_edit_of_the_function_fetches_again(own_function: Callable[[str], Path]) -> None:
    def code() -> Any:
        return stages.described(function(), {}, only={"fetch"})["stages"]["fetch"]["code"]

    own_function(SAMPLES)
    before = code()
    assert "own_data.py" in before
    own_function(SAMPLES.replace("* inputs", "+ inputs"))
    digests._source.cache_clear()
    assert code() != before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("yield [1, 2]", r"own_data:samples yielded <class 'list'>; expected a dict of inputs"),
        ("yield {'input': [1]}", "yielded the keys input; expected a dict of inputs"),
        ("yield {'inputs': [[1], [1, 2]]}", "yielded inputs that cannot become an array"),
        ("yield {'inputs': ['a']}", "yielded inputs of <U1; expected numbers"),
        ("yield {'inputs': 1.0}", r"yielded inputs of float64; expected numbers \[n, ...\]"),
        (
            "yield {'inputs': [1.0]}; yield {'inputs': [[1.0]]}",
            r"in which rows of float64 \[1\] follow rows of float64 \[\]",
        ),
        ("yield {'inputs': [1.0, 2.0], 'targets': [1]}", "different numbers of samples"),
        ("return", r"fetch\.arrays: found 'own_data:samples'; expected"),
    ],
)
def test_what_a_function_must_not_yield_is_refused(
    line: str, message: str, own_function: Callable[[str], Path]
) -> None:
    folder = own_function(f"def samples(split):\n    {line}\n")
    with pytest.raises(DataError, match=message):
        of_function(folder)


def test_a_file_that_changes_or_is_cut_short_is_refused(tmp_path: Path) -> None:
    place = saved(tmp_path, "folder", inputs=RANDOM.normal(size=(9, 2)))
    packed(tmp_path, "arrays", place)
    config = parse({"fetch": {"dataset": "arrays", "arrays": str(tmp_path / place)}, "variants": {"baseline": {}}})
    content = (tmp_path / "own/inputs.npy").read_bytes()
    (tmp_path / "own/inputs.npy").write_bytes(content[:-3])
    with pytest.raises(DataError, match=r"inputs\.npy is not the file that fetch listed"):
        prepare(config, tmp_path / "raw", tmp_path / "prepared")
    fetch(config.fetch, tmp_path / "raw")
    with pytest.raises(DataError, match=r"inputs\.npy float64 \[9, 2\] is cut short"):
        prepare(config, tmp_path / "raw", tmp_path / "prepared")
    (tmp_path / "own/inputs.npy").write_bytes(b"junk")
    fetch(config.fetch, tmp_path / "raw")
    with pytest.raises(DataError, match=r"inputs\.npy cannot be read"):
        prepare(config, tmp_path / "raw", tmp_path / "prepared")
    missing = r"fetch\.arrays: found .*nowhere', which does not exist; expected a file of type \.npz, .*, a folder"
    with pytest.raises(DataError, match=missing):
        packed(tmp_path, "arrays", "nowhere")


def test_test_rows_of_another_shape_are_refused_with_both_shapes(tmp_path: Path) -> None:
    rows = {
        "inputs": np.zeros((9, 3)),
        "targets": np.zeros(9),
        "test_inputs": np.zeros((4, 2)),
        "test_targets": np.zeros(4),
    }
    place = saved(tmp_path, "folder", **rows)
    expected = (
        "the rows of the test split are inputs float32 [2], targets float32 [], but those of the train split are "
        "inputs float32 [3], targets float32 []; make them equal."
    )
    with pytest.raises(DataError, match=re.escape(expected)):
        packed(tmp_path, "arrays", place)


@given(
    blocks=st.lists(st.lists(st.integers(0, 256), max_size=20), max_size=8),
    length=st.integers(1, 9),
    limit=st.none() | st.integers(0, 4),
)
def test_windows_predict_every_token_once_in_order(blocks: list[list[int]], length: int, limit: int | None) -> None:
    tokens: Iterable[text.Tokens] = (np.array(block, np.uint16) for block in blocks)
    rows = [row.tolist() for (chunk,) in text.windows(tokens, length, limit) for row in chunk]
    whole = [token for block in blocks for token in block]
    count = max(0, (len(whole) - 1) // length)
    count = count if limit is None else min(count, limit)
    assert rows == [whole[index * length : (index + 1) * length + 1] for index in range(count)]


def write_texts(folder: Path, count: int = 10) -> None:
    (folder / "texts/inner").mkdir(parents=True)
    for index in range(count):
        (folder / f"texts/{'inner/' * (index % 2)}{index}.txt").write_text(f"Grüße {index}. " * 20, encoding="utf-8")


def test_text_is_its_bytes_and_whole_files_are_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", 7)  # which cuts characters in two
    write_texts(tmp_path)
    dataset = packed(tmp_path, "text_folder", "texts", window=8)
    assert (dataset.vocabulary, dataset.shape, dataset.classes) == (257, (9,), ())
    files = {path.read_bytes() for path in (tmp_path / "texts").rglob("*.txt")}

    def joined(windows: Any) -> list[int]:
        return [windows[0, 0].item(), *windows[:, 1:].flatten().tolist()]

    for split, expected in ((dataset.train, 8), (dataset.test, 2)):
        whole = bytes(token if token != text.END else 0 for token in joined(split.inputs.int()))
        pieces = whole.split(b"\0")
        assert len(pieces) in (expected, expected + 1)
        assert all(piece in files for piece in pieces[:-1])
        files -= set(pieces[:expected])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda texts: (texts / "empty.txt").write_bytes(b""), r"empty\.txt is empty; remove it"),
        (
            lambda texts: (texts / "latin.txt").write_bytes(b"gr\xfc\xdfe"),
            r"latin\.txt is not UTF-8 \(invalid start byte",
        ),
        (lambda texts: (texts / "cut.txt").write_bytes(b"gr\xc3"), r"cut\.txt is not UTF-8 \(unexpected end of data"),
        (lambda texts: [path.unlink() for path in texts.rglob("*.txt") if path.name != "0.txt"], "found 1 file in "),
    ],
)
def test_bad_text_is_refused_and_named(change: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    write_texts(tmp_path)
    change(tmp_path / "texts")
    with pytest.raises(DataError, match=message):
        packed(tmp_path, "text_folder", "texts", window=8)


def test_text_that_changed_is_refused_and_hidden_files_do_not_count(tmp_path: Path) -> None:
    write_texts(tmp_path)
    (tmp_path / "texts/.hidden").write_bytes(b"\xff")
    packed(tmp_path, "text_folder", "texts", window=8)
    config = parse(
        {"fetch": {"dataset": "text_folder", "text_folder": str(tmp_path / "texts")}, "variants": {"baseline": {}}}
    )
    (tmp_path / "texts/0.txt").write_text("other")
    with pytest.raises(DataError, match=r"0\.txt is not the file that fetch listed"):
        prepare(config, tmp_path / "raw", tmp_path / "prepared")


def test_a_tokenizer_s_file_makes_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tokenizers

    vocabulary = {"[UNK]": 0, "one": 1, "two": 2, "three": 7}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts").mkdir()
    for name in "abc":
        (tmp_path / f"texts/{name}.txt").write_text("one two\n two three\nother one\n" * 4, encoding="utf-8")
    monkeypatch.setattr(text, "BLOCK_BYTES", 11)
    dataset = packed(tmp_path, "text_folder", "texts", window=24, tokenizer=str(tmp_path / "tokenizer.json"))
    assert dataset.train.inputs.tolist()[0] == [1, 2, 2, 7, 0, 1] * 4 + [8]
    assert (dataset.vocabulary, dataset.train.inputs.dtype) == (9, torch.uint16)
    digest = hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    assert dataset.name == f"text_folder tokenizer {digest[:16]}"

    made.add_tokens([str(number) for number in range(1 << 16)])
    made.save(str(tmp_path / "tokenizer.json"))
    dataset = packed(tmp_path, "text_folder", "texts", window=24, tokenizer=str(tmp_path / "tokenizer.json"))
    assert dataset.train.inputs.dtype == torch.int32
    (tmp_path / "tokenizer.json").write_text("{}")
    for place in ("tokenizer.json", "nowhere.json"):
        with pytest.raises(DataError, match=rf"prepare\.tokenizer: .*{place} is not a tokenizer's file"):
            packed(tmp_path, "text_folder", "texts", tokenizer=str(tmp_path / place))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match="tokenizers is not installed"):
        packed(tmp_path, "text_folder", "texts", tokenizer="tokenizer.json")


def test_python_s_source_is_always_there_and_its_version_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "lib"
    for name in ("a.py", "b.py", "empty/__init__.py", "test/broken.py", "site-packages/other.py", "notes.txt"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(b"\xff" if "broken" in name else b"" if "empty" in name else name.encode() * 50)
    assert len(text.files(parse({"fetch": {"dataset": "python_source"}, "variants": {"baseline": {}}}).fetch)) > 100
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(library))
    dataset = packed(tmp_path, "python_source", window=8)
    assert dataset.name == f"python_source {platform.python_version()}"
    listed = (tmp_path / "raw/python_source/files.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in listed] == ["path", "a.py", "b.py"]
    assert json.loads((tmp_path / "prepared/dataset.json").read_text())["vocabulary"] == 257


@pytest.mark.parametrize("dataset", ["arrays", "text_folder", "image_folder"])
def test_data_of_one_s_own_needs_a_path(dataset: str) -> None:
    with pytest.raises(ConfigError, match=f"fetch.{dataset}: found null; dataset {dataset} needs the path of the data"):
        parse({"fetch": {"dataset": dataset}, "variants": {"baseline": {}}})
