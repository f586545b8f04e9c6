"""Arrays and text of the user's own: what is packed, and what is refused."""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
import sys
import tracemalloc
import warnings
import zipfile
from collections import Counter
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
from safetensors import numpy as safetensors

from pipeline.data import DataError, array_files, arrays, text
from pipeline.data.packing import prepare, statistics
from pipeline.data.prepared import LEFT_OUT, Dataset, read
from pipeline.data.sources import fetch
from pipeline.environment import imports, stages
from pipeline.params import parse
from pipeline.training.measured import dataset_of
from tests.factories import listed, parquet_of, parquet_table
from tests.pages import blocks

RANDOM = np.random.default_rng(0)
ROWS = RANDOM.normal(size=(9, 2))
TOKENS = np.arange(20).reshape(5, 4)


def packed(
    folder: Path, dataset: str, place: str = "", options: dict[str, Any] | None = None, **settings: Any
) -> Dataset:
    """Fetch, prepare and read a data set. ``place``: a file or folder in ``folder``, or a function."""
    asked = {"dataset": dataset, "arrays_options": options or {}}
    if place:
        asked[dataset] = place if ":" in place else str(folder / place)
    config = parse({"fetch": asked, "prepare": settings, "variants": {"baseline": {}}})
    fetch(config.fetch, folder / "raw")
    prepare(config, folder / "raw", folder / "prepared")
    return read(folder / "prepared")


def saved(folder: Path, kind: str, **values: npt.NDArray[Any]) -> str:
    """Write the arrays; return the name of the file or folder in ``folder``."""
    if kind == "npz":
        np.savez(folder / "own.npz", **values)  # type: ignore[arg-type]
        return "own.npz"
    if kind == "safetensors":
        content = {name: np.ascontiguousarray(array) for name, array in values.items()}
        (folder / "own.safetensors").write_bytes(safetensors.save(content, metadata={"format": "pt"}))
        return "own.safetensors"
    if kind == "parquet":
        (folder / "own.parquet").write_bytes(parquet_table(values))
        return "own.parquet"
    (folder / "own").mkdir()
    for name, array in values.items():
        np.save(folder / "own" / f"{name}.npy", array)
    return "own"


@pytest.mark.parametrize("kind", ["npz", "folder", "safetensors", "parquet"])
@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 20])
def test_a_table_is_packed_and_split_by_class(
    kind: str, chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_files, "CHUNK_BYTES", chunk_bytes)
    inputs, labels = RANDOM.normal(5, 2, (60, 4, 2)).astype(np.float32), np.arange(60) % 3
    dataset = packed(tmp_path, "arrays", saved(tmp_path, kind, inputs=inputs, targets=labels), test_fraction=0.25)
    assert (dataset.classes, dataset.vocabulary, dataset.shape) == (("0", "1", "2"), None, (4, 2))
    assert (len(dataset.train), len(dataset.test)) == (45, 15)
    assert dataset.test.targets.bincount().tolist() == [5, 5, 5]
    rows = {row.tobytes(): label for row, label in zip(inputs, labels, strict=True)}
    pairs = [pair for split in (dataset.train, dataset.test) for pair in zip(split.inputs, split.targets, strict=True)]
    assert {row.numpy().tobytes(): label.item() for row, label in pairs} == rows
    known, train = dataset.statistics["inputs"], dataset.train.inputs
    np.testing.assert_allclose(known.mean, train.mean((0, 2)), rtol=1e-6)
    np.testing.assert_allclose(known.std, train.std((0, 2), correction=0), rtol=1e-6)


def test_numbers_to_predict_are_taken_as_given(tmp_path: Path) -> None:
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
    for largest, dtype in ((65_535, "uint16"), (65_536, "uint32")):
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
        (
            {"inputs": np.array([[1.0], [1.0, 2.0]], dtype=object)},
            "Python objects in dtype.*; expected numbers in rows",
        ),
        ({"inputs": ROWS, "targets": np.arange(3)}, "different numbers of samples"),
        ({"inputs": np.array([[1.0, 2.0], [3.0, np.nan]] * 4)}, r"row \d of the \w+ inputs has a NaN or infinite"),
        (
            {"inputs": ROWS, "targets": np.append(np.arange(8.0), np.nan)},
            r"of the \w+ targets has a NaN or infinite value",
        ),
        ({"inputs": ROWS, "ages": np.append(np.arange(8.0), np.nan)}, r"of the \w+ ages has a NaN or infinite value"),
        (
            {"inputs": ROWS, "targets": np.arange(9) % 3, "test_inputs": ROWS, "test_targets": np.arange(9)},
            "0 to 8 in the test targets, but",
        ),
        ({"inputs": ROWS, "targets": np.arange(9) % 3 - 1}, "from -1 to 1 in the train targets, but .* 2 classes"),
        ({"inputs": ROWS, "targets": np.zeros(9, int)}, "all training labels are 0; classification needs two classes"),
        ({"inputs": ROWS, "targets": np.zeros((9, 2), int)}, "all training labels are 0; classification needs two"),
        (
            {
                "inputs": ROWS,
                "targets": np.arange(9) % 3,
                "test_inputs": ROWS,
                "test_targets": np.full(9, LEFT_OUT),
            },
            r"all labels of the test split are left out \(-100\)",
        ),
        ({"inputs": TOKENS + (1 << 24), "targets": np.ones(5)}, r"channel 1 .*: float32 changes values by up to 1"),
        ({"inputs": ROWS * 1e300}, r"inputs has -?\d.*, which float32 cannot hold; scale"),
        ({"inputs": np.zeros((9, 3, 0))}, r"inputs: found float64 \[9, 3, 0\]\); expected numbers"),
        ({"inputs": np.ones((9, 2))}, r"channel 0 \(.*\) of the training inputs is constant; drop it"),
        ({"inputs": np.zeros((0, 2))}, "the train split is empty"),
        ({"inputs": np.array(["a", "b"])}, "found <U1 .*; expected numbers in rows of one shape"),
        ({"targets": np.arange(3)}, "has targets; expected inputs"),
        ({"inputs": TOKENS, "test_inputs": TOKENS + 65_536}, "from 65536 to 65555 in the test inputs, but"),
        ({"inputs": TOKENS + 65_516, "test_inputs": TOKENS - 1}, "found values from -1 to 18 in the test inputs"),
        ({"inputs": np.array([[0, 2**40]] * 4)}, "from 0 to 1099511627776 in .*, but there are 4294967296 tokens"),
        ({"inputs": np.arange(9)[:, None]}, r"inputs needs two tokens or more; expected windows \[N, length \+ 1\]"),
        ({"inputs": TOKENS, "targets": np.array([0, 1, 2, 0, 9])}, r"go up to 9, but 6 of the 10 classes \(first: 3\)"),
        ({"inputs": ROWS, "targets": np.arange(9) + 2**40}, "but there are 65536 classes"),
        ({"inputs": ROWS, "targets": np.ones(9), "Ages": np.ones(9)}, "has an array 'Ages.*'; expected inputs"),
        ({"inputs": ROWS, "ages": np.full(9, 2**63, np.uint64)}, "ages has 9,.*, which int64 cannot hold"),
        ({"inputs": ROWS, "targets": np.ones(9), "test_inputs": ROWS}, "in a test split"),
        ({"inputs": ROWS, "targets": ROWS, "test_inputs": ROWS[:, :1], "test_targets": ROWS}, r"but test rows are"),
    ],
)
def test_bad_arrays_are_refused_and_named(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        packed(tmp_path, "arrays", saved(tmp_path, "npz", **values))
    assert not (tmp_path / "prepared").exists()


@pytest.mark.parametrize("shape", [(60,), (60, 4)])
def test_labels_that_are_left_out_are_counted(shape: tuple[int, ...], tmp_path: Path) -> None:
    labels = np.resize([0, 1, LEFT_OUT, 2, 2], shape)
    dataset = packed(tmp_path, "arrays", saved(tmp_path, "npz", inputs=RANDOM.normal(size=(60, 2)), targets=labels))
    prepared = torch.cat([dataset.train.targets, dataset.test.targets]).numpy()
    assert sorted(prepared.ravel()) == sorted(labels.ravel())
    assert dataset.left_out_count == labels.size / 5
    known = dataset.train.targets[dataset.train.targets != LEFT_OUT]
    assert dataset.class_counts == tuple(known.bincount().tolist())
    tested = [label for label in dataset.test.targets.flatten().tolist() if label != LEFT_OUT]
    assert dataset_of(dataset).most_frequent_fraction == max(map(tested.count, range(3))) / len(tested)
    assert dataset.classes == ("0", "1", "2")


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
    """A list of digests would take 100 bytes a row, and a list for the choice of test samples as much again."""
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


@pytest.mark.parametrize("kind", ["folder", "npz", "safetensors", "parquet", "text", "datasets", "function"])
def test_a_set_takes_the_memory_of_few_chunks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_function: Callable[[str], Path]
) -> None:
    import datasets

    for name in ("array_files.CHUNK_BYTES", "packing.STATISTICS_CHUNK_BYTES", "text.BLOCK_BYTES"):
        monkeypatch.setattr(f"pipeline.data.{name}", 1 << 16)
    own_function(
        "def samples(split, rows):\n    yield from ({'inputs': rows[i : i + 8]} for i in range(0, len(rows), 8))"
    )
    peak = 0
    for count in (16, 2048):  # the first imports what both need
        folder, rows = tmp_path / str(count), RANDOM.normal(size=(count, 1024)).astype(np.float32)
        (folder / "texts").mkdir(parents=True)
        if kind == "text":
            for name in ("a", "b"):
                (folder / "texts" / name).write_text("A line that has thirty-two bytes\n" * 64 * count)
        elif kind == "datasets":
            datasets.Dataset.from_dict({"inputs": rows}).save_to_disk(folder / "own")
        elif kind != "function":
            saved(folder, kind, inputs=rows)
        place = {"folder": "own", "datasets": "own", "function": NAME, "text": "texts"}.get(kind, f"own.{kind}")
        options = {"rows": rows} if kind == "function" else {}
        tracemalloc.start()
        try:
            packed(folder, "text_folder" if kind == "text" else "arrays", place, options, window=1023)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 2 << 20, "of 8 MiB"


@pytest.mark.parametrize("group_rows", [16, 2048])
def test_a_table_takes_little_memory_of_pyarrow(
    group_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_files, "CHUNK_BYTES", 1 << 17)
    rows = RANDOM.normal(size=(2048, 1024)).astype(np.float32)
    parquet.write_table(
        pyarrow.table({"inputs": listed(rows)}), tmp_path / "own.parquet", row_group_size=group_rows,
        use_dictionary=False, data_page_size=1 << 16,
    )  # fmt: skip
    before = pyarrow.total_allocated_bytes()
    file, counter = tmp_path / "own.parquet", Counter[str]()
    held = [pyarrow.total_allocated_bytes() - before for _ in array_files._in_table(file, counter)]
    assert len(held) == 64
    assert max(held) < 2 << 20, "of 8 MiB"


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_times_of_which_float32_keeps_too_little_are_refused(dtype: Any, tmp_path: Path) -> None:
    """574 of the seconds since 1970: float32 would keep six of these numbers."""
    seconds = np.sort(RANDOM.choice(640, 574, replace=False))
    times = (1_700_000_000 + seconds).astype(dtype)[:, None]
    assert len(np.unique(times.astype(np.float32))) == 6
    place = saved(tmp_path, "npz", inputs=times, targets=seconds % 2)
    with pytest.raises(DataError, match=r"training inputs: float32 changes values by up to 64, and .* Subtract"):
        packed(tmp_path, "arrays", place)
    dataset = packed(tmp_path, "arrays", saved(tmp_path, "npz", inputs=times - times[0], targets=seconds % 2))
    assert len(np.unique(torch.cat((dataset.train.inputs, dataset.test.inputs)))) == 574
    years = (1.5e9 + RANDOM.integers(0, 10**8, (500, 1))).astype(dtype)
    assert len(packed(tmp_path, "arrays", saved(tmp_path, "npz", inputs=years, targets=seconds[:500] % 2)).train)


@pytest.mark.parametrize("classes", [[50] * 10, [470, 29, 1]])
def test_limits_keep_every_class_of_sorted_arrays(classes: list[int], tmp_path: Path) -> None:
    labels = np.repeat(np.arange(len(classes)), classes)
    values = {"inputs": RANDOM.normal(size=(500, 2)), "targets": labels}
    for tests in ({}, {f"test_{name}": rows for name, rows in values.items()}):
        place = saved(tmp_path, "npz", **values, **tests)
        dataset = packed(tmp_path, "arrays", place, train_limit=40, test_limit=20)
        for split, count in ((dataset.train, 40), (dataset.test, 20)):
            expected = [max(1, share * count / 500) for share in classes]
            present = 2 if not tests and classes[-1] == 1 and count == 20 else len(classes)  # one sample is not divided
            np.testing.assert_allclose(np.bincount(split.targets)[:present], expected[:present], atol=2)
            assert len(split) == count
            assert len(set(split.targets.tolist())) == present


def test_a_class_without_a_test_sample_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = {"test_inputs": ROWS, "test_targets": np.arange(9) % 2}
    packed(tmp_path, "arrays", saved(tmp_path, "npz", inputs=ROWS, targets=np.arange(9) % 4, **tests))
    assert "warning: 2 of 4 classes have no test sample; the first is '2'\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", [None, "patient"])
def test_the_index_of_a_data_frame_is_no_feature(
    name: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = (
        importlib.import_module("pandas")
        .DataFrame(RANDOM.normal(size=(40, 3)), columns=["a", "b", "c"])
        .assign(targets=np.arange(40) // 20)
    )
    frame.sample(frac=1, random_state=0).rename_axis(name).to_parquet(tmp_path / "own.parquet")
    column = name or "__index_level_0__"
    assert column in parquet.read_schema(tmp_path / "own.parquet").names
    assert packed(tmp_path, "arrays", "own.parquet").shape == (3,)
    change = f"left out: {column!r}, the data frame's index"
    assert f"{change}: 1\n" in capsys.readouterr().err
    assert json.loads((tmp_path / "prepared/dataset.json").read_text())["changes"] == {change: 1}


def test_columns_of_a_table_are_features(tmp_path: Path) -> None:
    columns = parquet_of(rooms=[1, 2, 3, 4], targets=[0.5, 1.0, 1.5, 2.0], area=[1.5, 2.5, 3.0, 4.0])
    (tmp_path / "own.parquet").write_bytes(columns)
    dataset = packed(tmp_path, "arrays", "own.parquet", test_fraction=0.25)
    rows = [[*split.inputs.T, split.targets] for split in (dataset.train, dataset.test)]
    expected = [[1.0, 1.5, 0.5], [2.0, 2.5, 1.0], [3.0, 3.0, 1.5], [4.0, 4.0, 2.0]]
    assert sorted(torch.cat([torch.stack(row, 1) for row in rows]).tolist()) == expected
    assert dataset.vocabulary is None


def test_a_table_whose_header_lies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.parquet").write_bytes(parquet_table({"inputs": ROWS, "targets": np.arange(9) % 2}))
    batches = parquet.ParquetFile.iter_batches
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", lambda self, _, **named: [*batches(self, 4, **named)][:-1])
    with pytest.raises(DataError, match="found 8 rows, but the header claims 9"):
        packed(tmp_path, "arrays", "own.parquet")


def test_what_a_killed_prepare_has_unpacked_is_removed(tmp_path: Path) -> None:
    (tmp_path / "prepared.partial/unpacked").mkdir(parents=True)
    (tmp_path / "prepared.partial/unpacked/targets.npy").write_bytes(b"left behind")
    packed(tmp_path, "arrays", saved(tmp_path, "npz", inputs=TOKENS))
    assert {path.name for path in tmp_path.iterdir()} == {"own.npz", "raw", "prepared"}
    assert {path.name for path in (tmp_path / "prepared").iterdir()} == {
        "train_inputs.npy", "test_inputs.npy", "dataset.json",
    }  # fmt: skip


def _claiming(shape: tuple[int, ...], name: str = "inputs.npy") -> bytes:
    """An .npz of few bytes, with a member whose header claims this shape."""
    header, packed = BytesIO(), BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr(name, header.getvalue() + bytes(1000))
    return packed.getvalue()


def _twice() -> bytes:
    """An .npz with two members of one name."""
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w") as opened, warnings.catch_warnings(action="ignore"):
        opened.writestr("inputs.npy", b"")
        opened.writestr("inputs.npy", b"")
    return packed.getvalue()


def _wide() -> bytes:
    """A table of few bytes. Its only row is a list of 80 million nulls."""
    return parquet_of(
        inputs=pyarrow.FixedSizeListArray.from_arrays(pyarrow.nulls(80_000_000, pyarrow.int8()), 80_000_000)
    )


GOOD = safetensors.save({"inputs": ROWS})


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("parquet", parquet_of(targets=[1, 2]), "has targets; expected inputs"),
        ("parquet", parquet_of(x=[1.0, None], targets=[0, 1]), "'x' holds double, 1 empty field; expected"),
        ("parquet", parquet_of(inputs=[1.0, 2.0], Ages=[1, 2]), "has an array 'Ages'; expected inputs"),
        ("parquet", parquet_of(inputs=[[1.0], [1.0, 2.0]]), "'inputs' holds list<.*: double>, 0 empty"),
        ("parquet", parquet_of(x=["a", "b"], targets=[1, 2]), "own.parquet: the column 'x' holds string"),
        ("parquet", _wide, r"a row \(a sample\) has 80,000,000 bytes; allowed"),
        ("safetensors", b"\xff" * 16, "own.safetensors cannot be read .*header too large"),
        ("safetensors", GOOD.replace(b"[9,2]", b"[9,3]"), "own.safetensors cannot be read .*invalid shape"),
        ("safetensors", GOOD.replace(b'"F64"', b'"F8_"'), "own.safetensors cannot be read .*unknown variant"),
        ("safetensors", safetensors.save({"inputs": ROWS, "test_inputs": ROWS[:0]}), "the test split is empty"),
        ("safetensors", GOOD[:-1], "own.safetensors cannot be read .*not fully covered"),
        ("safetensors", GOOD.replace(b"[0,144]", b"[-9,35]"), "own.safetensors cannot be read .*invalid value"),
        *((kind, b"", rf"own\.{kind} cannot be read") for kind in ("parquet", "safetensors", "npz")),
        ("npz", _claiming((4, 1 << 30)), "own.npz cannot be read .*length is greater than file size"),
        ("npz", _claiming((10**12, 8)), "own.npz cannot be read .*length is greater than file size"),
        ("npz", _claiming((1000,), "../inputs.npy"), r"own.npz has an array '\.\./inputs'; expected inputs"),
        ("npz", _twice(), "two arrays have the same name"),
    ],
)
def test_a_bad_file_is_named(kind: str, content: bytes | Callable[[], bytes], message: str, tmp_path: Path) -> None:
    (tmp_path / f"own.{kind}").write_bytes(content if isinstance(content, bytes) else content())
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message):
            packed(tmp_path, "arrays", f"own.{kind}")
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()


NAME = "own_data:samples"
PAGE = Path(__file__).parent.parent.parent / "docs" / "your-job.md"
SAMPLES = next(block for block in blocks(PAGE, "python") if "def samples" in block)


@pytest.fixture
def own_function(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.syspath_prepend(here)

    def write(content: str) -> Path:
        monkeypatch.delitem(sys.modules, "own_data", raising=False)
        importlib.invalidate_caches()
        (here / "own_data.py").write_text(content, encoding="utf-8")
        return here

    return write


def test_the_function_of_the_docs_yields_what_they_say(own_function: Callable[[str], Path]) -> None:
    folder = own_function(SAMPLES)
    dataset = packed(folder, "arrays", NAME, {"count": 500})
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (500, 200, ("0", "1"))
    first = np.random.default_rng(0).normal(size=(100, 8))
    np.testing.assert_array_equal(dataset.train.inputs[:100], first.astype(np.float32))
    own_function(SAMPLES.replace("else 200", "else 0"))
    held_out = packed(folder, "arrays", NAME).test
    assert len(held_out) == 200, "a fifth of 1000 samples, because the earlier test split is gone"


def test_a_saved_set_of_datasets_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    whole.remove_columns("inputs").save_to_disk(tmp_path / "other")
    with pytest.raises(DataError, match="other has targets; expected inputs"):
        packed(tmp_path, "arrays", "other")
    datasets.DatasetDict(train=whole, validation=whole).save_to_disk(tmp_path / "third")
    with pytest.raises(DataError, match="third has the split 'validation'; expected train and test"):
        packed(tmp_path, "arrays", "third")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"the library datasets saved .*one, but datasets cannot be imported"):
        packed(tmp_path, "arrays", "one")


def test_a_function_shows_its_progress_on_a_terminal(
    own_function: Callable[[str], Path], open_terminal: Callable[[], Any]
) -> None:
    folder, terminal = own_function(SAMPLES), open_terminal()
    packed(folder, "arrays", NAME)
    assert "own_data:samples train: 10 chunks" in terminal.getvalue()
    assert "own_data:samples test: 2 chunks" in terminal.getvalue()


def test_an_edit_of_the_function_fetches_again(own_function: Callable[[str], Path]) -> None:
    config, keys = parse({"fetch": {"dataset": "arrays", "arrays": NAME}, "variants": {"baseline": {}}}), []
    for content in (SAMPLES, SAMPLES.replace("prod(1)", "sum(1)")):
        own_function(content)
        imports.source_of.cache_clear()
        keys.append(stages.described(config, {}, only={"fetch"})["stages"]["fetch"]["code"]["own_data.py"])
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("yield [1, 2]", r"own_data:samples yielded <class 'list'>; expected a dict of inputs"),
        ("yield {'input': [1]}", "own_data:samples has input, test_input; expected inputs"),
        ("yield {'inputs': [[1], [1, 2]]}", "yielded inputs that cannot be used .*inhomogeneous"),
        ("yield {'inputs': ['a']}", r"yielded inputs that cannot be used \(found <U1 \[1\]\); expected numbers"),
        ("yield {'inputs': 1.0}", r"\(found float64 \[\]\); expected numbers \[n, ...\]"),
        ("yield {'inputs': [1.0]}; yield {'inputs': [[1.0]]}", r"rows of float64 \[1\] follow rows of float64 \[\]"),
        ("yield {'inputs': [1.0, 2.0], 'targets': [1]}", "different numbers of samples"),
        ("yield {'test_inputs': [1.0]}", r"yielded test_\* for the split train; yield"),
        ("return", "own_data:samples has none of the arrays; expected inputs"),
    ],
)
def test_what_a_function_must_not_yield_is_refused(
    line: str, message: str, own_function: Callable[[str], Path]
) -> None:
    folder = own_function(f"def samples(split):\n    {line}\n")
    with pytest.raises(DataError, match=message):
        packed(folder, "arrays", NAME)


def test_a_file_that_changes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / saved(tmp_path, "folder", inputs=RANDOM.normal(size=(9, 2))) / "inputs.npy"
    for content, message in (
        (file.read_bytes()[:-3], "cannot be read .*length is greater"),
        *((content, "cannot be read") for content in (b"junk", b"")),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=rf"inputs\.npy {message}"):
            packed(tmp_path, "arrays", "own")
    file.write_bytes(b"other")
    monkeypatch.setattr(f"{__name__}.fetch", lambda *_: None)
    with pytest.raises(DataError, match=r"inputs\.npy is not the file that fetch listed"):
        packed(tmp_path, "arrays", "own")
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"found .*nowhere', which does not exist; expected a file of type \.npz"):
        packed(tmp_path, "arrays", "nowhere")


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


def test_text_is_its_bytes_and_files_are_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", 7)
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
        (lambda texts: (texts / "latin.txt").write_bytes(b"gr\xfc"), r"latin\.txt is not UTF-8 \(invalid start byte"),
        (lambda texts: (texts / "cut.txt").write_bytes(b"gr\xc3"), r"cut\.txt is not UTF-8 \(unexpected end of data"),
        (lambda texts: [path.unlink() for path in texts.rglob("*.txt") if path.name != "0.txt"], "found 1 file in "),
    ],
)
def test_bad_text_is_refused_and_named(change: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    write_texts(tmp_path)
    change(tmp_path / "texts")
    with pytest.raises(DataError, match=message):
        packed(tmp_path, "text_folder", "texts", window=8)


def test_changed_text_is_refused_and_hidden_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path)
    (tmp_path / "texts/.hidden").write_bytes(b"\xff")
    packed(tmp_path, "text_folder", "texts", window=8)
    (tmp_path / "texts/0.txt").write_text("other")
    monkeypatch.setattr(f"{__name__}.fetch", lambda *_: None)
    with pytest.raises(DataError, match=r"0\.txt is not the file that fetch listed"):
        packed(tmp_path, "text_folder", "texts", window=8)


def test_linked_text_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_texts(tmp_path)
    (tmp_path / "texts/.git").mkdir()
    for link, target in {
        "more": "texts/inner",
        "texts/more": "more",
        "texts/a": "gone",
        "texts/inner/b": "texts",
    }.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    fetch = parse({"fetch": {"text_folder": str(tmp_path / "texts")}, "variants": {"baseline": {}}}).fetch
    names = text.files(fetch.model_copy(update={"dataset": "text_folder"}))
    assert [name for name in names if name.startswith("more/")] == [f"more/{number}.txt" for number in (1, 3, 5, 7, 9)]
    assert len(names) == 15
    assert capsys.readouterr().err.splitlines() == [
        "fetch.text_folder: left out 1 x dangling link or special file",
        "fetch.text_folder: left out 1 x folder .git",
        "fetch.text_folder: left out 2 x link to a folder that contains it",
    ]


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
    assert dataset.train.inputs.dtype == torch.uint32
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"prepare\.tokenizer: .*tokenizer.json is not a tokenizer's file"):
        packed(tmp_path, "text_folder", "texts", tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"prepare\.tokenizer: .*none.json cannot be read: No such file"):
        packed(tmp_path, "text_folder", "texts", tokenizer=str(tmp_path / "none.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match="tokenizers cannot be imported"):
        packed(tmp_path, "text_folder", "texts", tokenizer="tokenizer.json")


def test_python_s_source_is_there_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib"
    for name in ("a.py", "b.py", "empty/__init__.py", "test/broken.py", "site-packages/other.py", "notes.txt"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(b"\xff" if "broken" in name else b"" if "empty" in name else name.encode() * 50)
    asked = parse({"fetch": {"dataset": "python_source"}, "variants": {"baseline": {}}}).fetch
    sources = [(text.root(asked) / name).read_bytes().decode() for name in text.files(asked)]
    assert sum(map(len, sources)) > 5_000_000, "all of it is UTF-8"
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(library))
    dataset = packed(tmp_path, "python_source", window=8)
    assert dataset.name == f"python_source {platform.python_version()}"
    listed = (tmp_path / "raw/python_source/files.csv").read_text().splitlines()
    digests = [hashlib.sha256(name * 50).hexdigest() for name in (b"a.py", b"b.py")]
    assert listed == ["path,size_bytes,sha256", f"a.py,200,{digests[0]}", f"b.py,200,{digests[1]}"]
    assert json.loads((tmp_path / "prepared/dataset.json").read_text())["vocabulary"] == 257
