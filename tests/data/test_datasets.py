"""Decoding: real digits, and files made here of each other format, right and wrong."""

from __future__ import annotations

import pickle
import re
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.datasets import MNIST, ImageFolder
from torchvision.transforms import Compose, Resize

from pipeline.data import DataError, datasets
from pipeline.data.datasets import decode, read_idx
from pipeline.data.decoded import Chunk, held_out
from pipeline.data.sources import fetch
from pipeline.params import Config, parse
from tests.conftest import Terminal

RANDOM = np.random.default_rng(0)


def config(dataset: str, *, image_folder: Path | None = None, **prepare: Any) -> Config:
    source = {"dataset": dataset, "image_folder": image_folder and str(image_folder)}
    return parse({"fetch": source, "prepare": prepare, "variants": {"baseline": {}}})


def joined(chunks: Any) -> Chunk:
    parts = list(chunks)
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


@pytest.fixture(autouse=True)
def _unpublished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files of a published data set have any content."""
    monkeypatch.setattr(datasets, "SHA256", {})


def idx(array: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, train: int = 7, test: int = 3) -> dict[str, np.ndarray[Any, np.dtype[np.uint8]]]:
    folder.mkdir(parents=True)
    arrays = {}
    for split, count in (("train", train), ("t10k", test)):
        arrays[f"{split}-images-idx3-ubyte"] = RANDOM.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{split}-labels-idx1-ubyte"] = RANDOM.integers(0, 10, count, dtype=np.uint8)
    for name, array in arrays.items():
        (folder / name).write_bytes(idx(array))
    return arrays


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_the_mnist_family_decodes_as_torchvision_reads_it(name: str, tmp_path: Path) -> None:
    write_idx(tmp_path / name)
    (tmp_path / "MNIST").mkdir()
    (tmp_path / "MNIST" / "raw").symlink_to(tmp_path / name)
    decoded = decode(config(name), tmp_path)
    assert len(decoded.classes) == 10
    for chunks, train in ((decoded.train, True), (decoded.test, False)):
        images, labels = joined(chunks)
        reference = MNIST(tmp_path, train=train)
        np.testing.assert_array_equal(images[:, 0], reference.data)
        np.testing.assert_array_equal(labels, reference.targets)
        assert images.dtype == np.uint8
        assert labels.dtype == np.int64


def test_limits_keep_the_first_samples(tmp_path: Path) -> None:
    arrays = write_idx(tmp_path / "mnist")
    decoded = decode(config("mnist", train_limit=4, test_limit=2), tmp_path)
    np.testing.assert_array_equal(joined(decoded.train)[0][:, 0], arrays["train-images-idx3-ubyte"][:4])
    np.testing.assert_array_equal(joined(decoded.test)[1], arrays["t10k-labels-idx1-ubyte"][:2])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0\x0d\x01" + bytes(8), "not an IDX file of unsigned bytes (starts with 00 00 0d 01)"),
        (b"<html>", "not an IDX file of unsigned bytes (starts with 3c 68 74 6d)"),
        (b"", "not an IDX file of unsigned bytes"),
        (b"\0\0\x08\x03\0\0\0\x01", "the IDX header is cut short (8 bytes for 3 dimensions)"),
        (idx(np.zeros((2, 3), np.uint8))[:-1], "declares 18 bytes, but the file has 17"),
        (idx(np.zeros((2, 3), np.uint8)) + b"!", "declares 18 bytes, but the file has 19"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "declares 79,228,162,458,924,105,385,300,197,391 bytes"),
    ],
)
def test_a_malformed_idx_file_is_named_with_what_is_wrong(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"^{re.escape(f'{path}: ')}.*{re.escape(message)}"):
        read_idx(path)


def test_images_and_labels_of_different_counts_are_refused(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist")
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(6, np.uint8)))
    with pytest.raises(DataError, match="do not belong together"):
        decode(config("mnist"), tmp_path)


def test_missing_raw_files_say_which_stage_brings_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mnist is missing: run `dvc repro fetch` first"):
        decode(config("mnist"), tmp_path)
    write_idx(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte cannot be read .*: run `dvc repro --force fetch`"):
        decode(config("mnist"), tmp_path)


def test_digits_fill_the_range_of_a_byte_and_are_split_by_class(tmp_path: Path) -> None:
    fetch(config("digits").fetch, tmp_path)
    decoded = decode(config("digits", test_fraction=0.25), tmp_path)
    (train, train_labels), (test, test_labels) = joined(decoded.train), joined(decoded.test)
    assert len(train) + len(test) == 1797
    assert set(np.unique(train)) == {round(sixteenth * 255 / 16) for sixteenth in range(17)}

    digits = load_digits()
    for number in range(10):
        assert np.sum(test_labels == number) == round(np.sum(digits.target == number) * 0.25)
    # Every sample is in one of the splits, with its own label.
    expected = sorted((image.tobytes(), label) for image, label in zip(digits.images, digits.target, strict=True))
    found = [
        (np.rint(image[0] / 255 * 16).tobytes(), label)
        for image, label in [*zip(train, train_labels, strict=True), *zip(test, test_labels, strict=True)]
    ]
    assert sorted(found) == expected


def test_the_held_out_share_is_stable_and_leaves_something_on_both_sides() -> None:
    labels = [0] * 100 + [1] * 2 + [2]
    keys = [f"image-{index}" for index in range(len(labels))]
    chosen = held_out(keys, labels, 0.2)
    assert [chosen[:100].sum(), chosen[100:102].sum(), chosen[102]] == [20, 1, 0]
    assert held_out(keys, labels, 0.9999)[:100].sum() == 99
    # The choice depends on the key, not on the position: a reversed or longer list draws (nearly) the same samples.
    np.testing.assert_array_equal(held_out(keys[::-1], labels[::-1], 0.2), chosen[::-1])
    longer = held_out(["new", *keys], [0, *labels], 0.2)[1:]
    assert np.sum(longer != chosen) <= 1
    assert np.flatnonzero(chosen)[:5].tolist() == [1, 5, 9, 12, 13]  # on every machine
    assert held_out([], [], 0.2).tolist() == []


def cifar10_batch(pixels: Any, labels: Any) -> bytes:
    """Return a batch as Python 2 pickled it: protocol 2, byte strings, numpy's old module names."""
    raw = pixels.tobytes()

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    return b"".join(
        [
            b"\x80\x02}(",
            text(b"data"),
            b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85",
            text(b"b"),
            b"tR(K\x01K" + bytes([pixels.shape[0]]) + b"M" + struct.pack("<H", pixels.shape[1]) + b"\x86",
            b"cnumpy\ndtype\n(",
            text(b"u1"),
            b"K\x00K\x01tR(K\x03",
            text(b"|"),
            b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
            b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tb",
            text(b"labels"),
            b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e",
            text(b"batch_label"),
            text(b"training batch 1 of 5"),
            b"u.",
        ]
    )


def write_cifar10(folder: Path) -> dict[str, tuple[Any, Any]]:
    folder.mkdir(parents=True)
    batches = {}
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        batches[name] = RANDOM.integers(0, 256, (4, 3072), dtype=np.uint8), RANDOM.integers(0, 10, 4)
        (folder / name).write_bytes(cifar10_batch(*batches[name]))
    return batches


def test_cifar10_decodes_from_its_python_2_pickles(tmp_path: Path) -> None:
    batches = write_cifar10(tmp_path / "cifar10")
    with (tmp_path / "cifar10" / "data_batch_1").open("rb") as file:  # the hand-made pickle is a pickle
        reference = pickle.load(file, encoding="latin1")
    np.testing.assert_array_equal(reference["data"], batches["data_batch_1"][0])

    decoded = decode(config("cifar10"), tmp_path)
    images, labels = joined(decoded.train)
    assert decoded.classes[3] == "cat"
    assert images.shape == (20, 3, 32, 32)
    np.testing.assert_array_equal(images[7], batches["data_batch_2"][0][3].reshape(3, 32, 32))
    np.testing.assert_array_equal(labels[4:8], batches["data_batch_2"][1])
    np.testing.assert_array_equal(joined(decoded.test)[1], batches["test_batch"][1])


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar10")
    mark = tmp_path / "executed"
    attack = b"cos\nsystem\n(X" + struct.pack("<I", len(f"touch {mark}")) + f"touch {mark}".encode() + b"tR."
    (tmp_path / "cifar10" / "data_batch_3").write_bytes(attack)
    with pytest.raises(DataError, match=r"data_batch_3: not a batch of CIFAR-10 \(0 labels, 0 bytes\)"):
        decode(config("cifar10"), tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"junk",
        pickle.dumps({"data": [1, 2]}),
        pickle.dumps({"data": [[1, 2]], "labels": [1]}),
        cifar10_batch(np.zeros((2, 3072), np.uint8), [1]),
        cifar10_batch(np.zeros((1, 3000), np.uint8), [1]),
    ],
    ids=["empty", "junk", "no labels", "no array", "counts", "size"],
)
def test_a_damaged_batch_is_named(content: bytes, tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar10")
    (tmp_path / "cifar10" / "test_batch").write_bytes(content)
    with pytest.raises(DataError, match="test_batch: not a batch of CIFAR-10"):
        decode(config("cifar10"), tmp_path)


MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """``make_folder(per_class, splits)``: real digits as pictures of several sizes, formats and colour modes."""
    digits = load_digits()

    def make(per_class: int = 10, splits: tuple[str, ...] = ("train",)) -> Path:
        folder = tmp_path / "pictures"
        for split in splits:
            for number in range(3):
                place = folder / split / f"digit-{number}"
                place.mkdir(parents=True)
                for index, image in enumerate(digits.images[digits.target == number][:per_class]):
                    picture = Image.fromarray((image * 15.9).astype(np.uint8)).resize((40 + index, 30))
                    kind = ("L", "png") if index % 3 == 0 else ("RGB", "jpg") if index % 3 == 1 else ("RGBA", "png")
                    picture.convert(kind[0]).save(place / f"{index}.{kind[1]}")
        return folder

    return make


def listed(folder: Path, raw: Path, **prepare: Any) -> Config:
    made = config("image_folder", image_folder=folder, image_size=[12, 16], **prepare)
    fetch(made.fetch, raw)
    return made


@pytest.mark.parametrize("workers", [1, 2])
def test_an_image_folder_decodes_as_torchvision_would(workers: int, make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder(per_class=44, splits=("train", "test"))  # more than one chunk, so both processes work
    made = listed(folder, tmp_path / "raw", workers=workers)
    decoded = decode(made, tmp_path / "raw")
    assert decoded.classes == ("digit-0", "digit-1", "digit-2")
    for chunks, split in ((decoded.train, "train"), (decoded.test, "test")):
        images, labels = joined(chunks)
        reference = ImageFolder(folder / split, transform=Compose([Resize((12, 16)), np.asarray]))
        expected = {(image.transpose(2, 0, 1).tobytes(), label) for image, label in reference}
        assert {(image.tobytes(), label) for image, label in zip(images, labels.tolist(), strict=True)} == expected
        assert len(images) == len(reference)
        assert len(set(labels[:20].tolist())) == 3  # mixed, so that a limit keeps all classes


def test_images_are_decoded_side_by_side_and_few_wait_to_be_written(
    make_folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = listed(make_folder(splits=("train", "test")), tmp_path / "raw", workers=2)
    submitted = 0
    together = threading.Barrier(2)
    decode_chunk = datasets._decode_chunk

    class Threads(ThreadPoolExecutor):
        """Threads in place of processes, whose calls the test could not count."""

        def __init__(self, workers: int, mp_context: Any) -> None:  # noqa: ARG002
            super().__init__(workers)

        def submit(self, *call: Any) -> Any:  # type: ignore[override]
            nonlocal submitted
            submitted += 1
            return super().submit(*call)

    def decode_with_another(*arguments: Any) -> Any:
        together.wait(timeout=60)
        return decode_chunk(*arguments)

    monkeypatch.setattr(datasets, "CHUNK_IMAGES", 1)
    monkeypatch.setattr(datasets, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(datasets, "_decode_chunk", decode_with_another)
    for written, _ in enumerate(decode(made, tmp_path / "raw").train, 1):
        assert submitted - written <= 2 * 2
    assert submitted == 30


def test_decoding_shows_its_progress_on_a_terminal(
    make_folder: MakeFolder, tmp_path: Path, open_terminal: Callable[[], Terminal]
) -> None:
    folder, terminal = make_folder(per_class=5, splits=("train", "test")), open_terminal()
    made = listed(folder, tmp_path / "raw", workers=1)
    joined(decode(made, tmp_path / "raw").train)
    assert "checksums: 100%" in terminal.getvalue()
    assert "decode train: 100%" in terminal.getvalue()


def test_an_image_folder_without_a_test_split_is_split_by_class(make_folder: MakeFolder, tmp_path: Path) -> None:
    made = listed(make_folder(), tmp_path / "raw", test_fraction=0.3, workers=1)
    decoded = decode(made, tmp_path / "raw")
    train, test = joined(decoded.train)[1], joined(decoded.test)[1]
    assert np.bincount(train).tolist() == [7, 7, 7]
    assert np.bincount(test).tolist() == [3, 3, 3]


def test_limits_of_an_image_folder_spare_the_decoding(make_folder: MakeFolder, tmp_path: Path) -> None:
    made = listed(make_folder(), tmp_path / "raw", train_limit=5, test_limit=2, workers=1)
    decoded = decode(made, tmp_path / "raw")
    assert len(joined(decoded.train)[0]) == 5
    assert len(joined(decoded.test)[0]) == 2


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_broken_image_is_named_and_fatal(workers: int, make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder(per_class=60)
    broken = folder / "train" / "digit-1" / "4.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    made = listed(folder, tmp_path / "raw", workers=workers)
    decoded = decode(made, tmp_path / "raw")
    with pytest.raises(
        DataError, match=rf"^{re.escape(str(broken))}: broken image \(.+\).*prepare\.broken_images: skip"
    ):
        joined([*decoded.train, *decoded.test])


def test_broken_images_are_named_and_skipped(
    make_folder: MakeFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(per_class=5, splits=("train", "test"))
    for name, content in {"0.png": b"", "1.jpg": b"<html>", "2.png": b"\x89PNG\r\n\x1a\n" + bytes(40)}.items():
        (folder / "train" / "digit-2" / name).write_bytes(content)
    made = listed(folder, tmp_path / "raw", broken_images="skip", workers=1)
    images, labels = joined(decode(made, tmp_path / "raw").train)
    assert len(images) == 12
    assert np.bincount(labels).tolist() == [5, 5, 2]
    told = capsys.readouterr().err
    assert told.count("skipped broken image") == 3
    assert f"{folder}/train/digit-2/1.jpg: cannot identify image file\n" in told
    assert "train: skipped 3 of 15 images" in told


def test_an_image_that_changed_after_fetch_is_refused(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder()
    made = listed(folder, tmp_path / "raw", broken_images="skip", workers=1)
    (folder / "train" / "digit-0" / "0.png").write_bytes((folder / "train" / "digit-0" / "3.png").read_bytes())
    decoded = decode(made, tmp_path / "raw")
    with pytest.raises(DataError, match=r"0\.png is not the file that fetch listed: .*run `dvc repro --force fetch`"):
        joined([*decoded.train, *decoded.test])
    (folder / "train" / "digit-0" / "0.png").unlink()
    decoded = decode(made, tmp_path / "raw")
    with pytest.raises(DataError, match=r"0\.png cannot be read .*run `dvc repro --force fetch`"):
        joined([*decoded.train, *decoded.test])


def test_a_class_that_only_the_test_split_has_is_refused(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder(per_class=2, splits=("train", "test"))
    (folder / "test" / "digit-2").rename(folder / "test" / "digit-9")
    made = listed(folder, tmp_path / "raw")
    with pytest.raises(DataError, match="found classes under test/ but not under train/: digit-9"):
        decode(made, tmp_path / "raw")
