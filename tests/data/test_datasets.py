"""Decoding real digits, and valid and invalid files of the other formats, which the tests write."""

from __future__ import annotations

import pickle
import re
import shutil
import struct
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import ExifTags, Image
from sklearn.datasets import load_digits
from torchvision.datasets import MNIST, ImageFolder
from torchvision.transforms import Compose, Resize

from pipeline.data import DataError, datasets
from pipeline.data.datasets import decode
from pipeline.data.decoded import Chunk, Decoded, drawn, held_out
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
    monkeypatch.setattr(datasets, "_published", Path.read_bytes)


def test_drawn_rows_are_of_every_class() -> None:
    assert drawn(5, 9).tolist() == [0, 1, 2, 3, 4]
    assert drawn(0, 3).tolist() == []
    rows = drawn(10**12, 1000)
    assert (rows // 10**9).tolist() == list(range(1000))
    assert drawn(1000, 5).tolist() == [71, 217, 424, 733, 971]  # the same on every machine
    labels = np.repeat([0, 1, 2, 3], [600, 395, 4, 1])
    for order in (np.arange(1000), RANDOM.permutation(1000)):
        for count in (2, 4, 20, 999, 1000):
            rows = drawn(1000, count, labels[order])
            assert len(np.unique(rows)) == len(rows) == count
            counts = np.bincount(labels[order][rows], minlength=4)
            assert np.count_nonzero(counts) == min(count, 4)
            assert abs(counts[0] - 0.6 * count) <= 2


def write_idx(folder: Path) -> None:
    folder.mkdir(parents=True)
    for split, count in (("train", 7), ("t10k", 3)):
        for kind, shape, classes in (("images-idx3", (count, 28, 28), 256), ("labels-idx1", (count,), 10)):
            header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
            content = RANDOM.integers(0, classes, shape, dtype=np.uint8).tobytes()
            (folder / f"{split}-{kind}-ubyte").write_bytes(header + content)


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
        assert (str(images.dtype), str(labels.dtype)) == ("uint8", "int64")
        limited = decode(config(name, train_limit=2, test_limit=2), tmp_path)
        np.testing.assert_array_equal(joined(limited.train if train else limited.test)[0], images[:2])


def test_missing_raw_files_say_which_stage_brings_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"mnist is missing: run `dvc repro fetch` first"):
        decode(config("mnist"), tmp_path)
    monkeypatch.undo()
    (tmp_path / "mnist").mkdir()
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte cannot be read .*: run `dvc repro --force fetch`"):
        decode(config("mnist"), tmp_path)


def test_digits_fill_a_byte_and_are_split_by_class(tmp_path: Path) -> None:
    fetch(config("digits").fetch, tmp_path)
    decoded = decode(config("digits", test_fraction=0.25), tmp_path)
    (train, _), (test, labels) = joined(decoded.train), joined(decoded.test)
    assert len(train) + len(test) == 1797
    assert set(np.unique(train)) == {round(sixteenth * 255 / 16) for sixteenth in range(17)}
    expected = {
        image.astype(np.uint8).tobytes(): label for image, label in zip(*load_digits(return_X_y=True), strict=True)
    }
    for image, label in zip(test, labels, strict=True):
        assert expected[np.rint(image / 255 * 16).astype(np.uint8).tobytes()] == label
    assert np.bincount(labels).tolist() == np.rint(np.bincount(load_digits().target) * 0.25).tolist()


def test_the_held_out_share_is_stable() -> None:
    labels = [0] * 100 + [1] * 2 + [2]
    keys = [f"image-{index}" for index in range(len(labels))]
    chosen = held_out(keys, labels, 0.2)
    assert [chosen[:100].sum(), chosen[100:102].sum(), chosen[102]] == [20, 1, 0]
    assert held_out(keys, labels, 0.9999)[:100].sum() == 99
    # The choice depends on the key, not on the position: a reversed or longer list draws (nearly) the same samples.
    np.testing.assert_array_equal(held_out(keys[::-1], labels[::-1], 0.2), chosen[::-1])
    longer = held_out(["new", *keys], [0, *labels], 0.2)[1:]
    assert np.sum(longer != chosen) <= 1
    assert np.flatnonzero(chosen)[:5].tolist() == [1, 5, 9, 12, 13]  # the same on every machine
    assert held_out([], [], 0.2).tolist() == []


def cifar10_batch(pixels: Any, labels: list[int]) -> bytes:
    """Return a batch as Python 2 pickled it: byte strings as keys, and numpy's old module name."""
    batch = pickle.dumps({"data": pixels, "labels": labels}, protocol=2).replace(b"numpy._core", b"numpy.core")
    for key in (b"data", b"labels"):
        batch = batch.replace(b"X" + struct.pack("<I", len(key)) + key, b"U" + bytes([len(key)]) + key)
    return batch


def test_cifar10_decodes_from_its_python_2_pickles(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    batches = {}
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        batches[name] = RANDOM.integers(0, 256, (4, 3072), dtype=np.uint8), RANDOM.integers(0, 10, 4).tolist()
        (tmp_path / "cifar10" / name).write_bytes(cifar10_batch(*batches[name]))
    decoded = decode(config("cifar10"), tmp_path)
    images, labels = joined(decoded.train)
    assert decoded.classes[3] == "cat"
    assert images.shape == (20, 3, 32, 32)
    np.testing.assert_array_equal(images[7], batches["data_batch_2"][0][3].reshape(3, 32, 32))
    np.testing.assert_array_equal(labels[4:8], batches["data_batch_2"][1])
    np.testing.assert_array_equal(joined(decoded.test)[1], batches["test_batch"][1])


def make_folder(tmp_path: Path, per_class: int = 10, splits: tuple[str, ...] = ("train",)) -> Path:
    """Write real digits as pictures of several sizes, formats and colour modes."""
    digits = load_digits()
    for split in splits:
        for number in range(3):
            place = tmp_path / "pictures" / split / f"digit-{number}"
            place.mkdir(parents=True)
            for index, image in enumerate(digits.images[digits.target == number][:per_class]):
                picture = Image.fromarray((image * 15.9).astype(np.uint8)).resize((40 + index, 30))
                mode, suffix = (("L", "png"), ("RGB", "jpg"), ("RGBA", "png"))[index % 3]
                picture.convert(mode).save(place / f"{index}.{suffix}")
    return tmp_path / "pictures"


def fetched(folder: Path, **prepare: Any) -> Callable[[], Decoded]:
    """Fetch the folder of images, and return a function that decodes it."""
    made = config("image_folder", image_folder=folder, image_size=[12, 16], **{"workers": 1} | prepare)
    fetch(made.fetch, folder.parent / "raw")
    return lambda: decode(made, folder.parent / "raw")


@pytest.mark.parametrize("workers", [1, 2])
def test_an_image_folder_decodes_as_torchvision_would(workers: int, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, per_class=44, splits=("train", "test"))  # several chunks, so both processes work
    decoded = fetched(folder, workers=workers)()
    assert decoded.classes == ("digit-0", "digit-1", "digit-2")
    for chunks, split in ((decoded.train, "train"), (decoded.test, "test")):
        images, labels = joined(chunks)
        reference = ImageFolder(folder / split, transform=Compose([Resize((12, 16)), np.asarray]))
        expected = {(image.transpose(2, 0, 1).tobytes(), label) for image, label in reference}
        assert {(image.tobytes(), label) for image, label in zip(images, labels.tolist(), strict=True)} == expected
        assert len(images) == len(reference)
        assert len(set(labels[:20].tolist())) == 3  # mixed, so that a limit keeps all classes


def test_images_are_decoded_side_by_side_and_few_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads replace the processes, whose calls the test could not count."""
    threads, together, decode_chunk = ThreadPoolExecutor(2), threading.Barrier(2), datasets._decode_chunk
    submit = Mock(side_effect=threads.submit)
    monkeypatch.setattr(threads, "submit", submit)

    def decode_with_another(*arguments: Any) -> Any:
        together.wait(timeout=60)
        return decode_chunk(*arguments)

    monkeypatch.setattr(datasets, "CHUNK_IMAGES", 1)
    monkeypatch.setattr(datasets, "ProcessPoolExecutor", lambda *_, **__: threads)
    monkeypatch.setattr(datasets, "_decode_chunk", decode_with_another)
    for written, _ in enumerate(fetched(make_folder(tmp_path, splits=("train", "test")), workers=2)().train, 1):
        assert submit.call_count - written <= 2 * 2
    assert submit.call_count == 30


def test_decoding_shows_its_progress_on_a_terminal(tmp_path: Path, open_terminal: Callable[[], Terminal]) -> None:
    folder, terminal = make_folder(tmp_path, per_class=5, splits=("train", "test")), open_terminal()
    joined(fetched(folder)().train)
    assert "checksums: 100%" in terminal.getvalue()
    assert "decode train: 100%" in terminal.getvalue()


def test_an_image_folder_is_split_by_class_within_limits(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    decoded = fetched(folder, test_fraction=0.3)()
    assert np.bincount(joined(decoded.train)[1]).tolist() == [7, 7, 7]
    assert np.bincount(joined(decoded.test)[1]).tolist() == [3, 3, 3]
    decoded = fetched(folder, train_limit=5, test_limit=2)()
    assert (len(joined(decoded.train)[0]), len(joined(decoded.test)[0])) == (5, 2)


def write_deep(place: Path, name: str, values: Any) -> None:
    place.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.broadcast_to(values, (12, 16))).save(place / name)


@pytest.mark.parametrize(
    ("name", "dtype", "span", "expected"),
    [
        ("a.png", np.uint16, [0, 65535], {0: 0, 257: 1, 4095: 16, 65535: 255}),
        ("a.png", np.uint16, [0, 4095], {0: 0, 257: 16, 4095: 255}),
        ("a.tif", np.int32, [-1000, 100_000], {-1000: 0, 49_500: 128, 100_000: 255}),
        ("a.tiff", np.float32, [-1, 1], {-1.0: 0, 0.5: 191, 1.0: 255}),
    ],
)
def test_images_of_16_bits_are_scaled_by_their_range(
    name: str, dtype: Any, span: list[float], expected: dict[float, int], tmp_path: Path
) -> None:
    for number, value in enumerate(expected):
        write_deep(tmp_path / f"pictures/train/{number}", name, dtype(value))
        write_deep(tmp_path / f"pictures/test/{number}", name, dtype(value))
    decoded = fetched(tmp_path / "pictures", image_range=span)()
    images, labels = joined(decoded.train)
    assert {list(expected)[label]: set(image.flat) for image, label in zip(images, labels, strict=True)} == {
        value: {byte} for value, byte in expected.items()
    }
    assert decoded.changes == {"train images, scaled to 8 bits by prepare.image_range": len(expected)}
    for changes, allowed in (({"image_range": [1, 2]}, "1 to 2"), ({"broken_images": "skip"}, "8 bits")):
        with pytest.raises(DataError, match=rf"found values from .*; allowed: {allowed}\. Set prepare\.image_range"):
            joined(fetched(tmp_path / "pictures", **changes)().train)


def colours_of_16_bits(pixels: int) -> bytes:
    """Return a square PNG, which Pillow can read, but not write."""
    row = b"\0" + RANDOM.bytes(6 * pixels)
    header = struct.pack(">IIBBBBB", pixels, pixels, 16, 2, 0, 0, 0)
    parts = {b"IHDR": header, b"IDAT": zlib.compress(row * pixels), b"IEND": b""}
    chunks = (
        struct.pack(">I", len(c)) + name + c + struct.pack(">I", zlib.crc32(name + c)) for name, c in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_what_the_conversion_of_an_image_changes_is_counted(tmp_path: Path) -> None:
    place = tmp_path / "pictures/train/cat"
    shutil.copytree(make_folder(tmp_path, splits=("train",)) / "train/digit-1", place)
    picture = Image.fromarray(RANDOM.integers(0, 256, (16, 12, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    picture.save(place / "turned.png", exif=exif)
    picture.save(place / "moving.gif", save_all=True, append_images=[picture.rotate(90)])
    picture.convert("RGBA").resize((16, 12)).rotate(45).save(place / "clear.png")
    (place / "deep.png").write_bytes(colours_of_16_bits(16))
    shutil.copytree(tmp_path / "pictures/train", tmp_path / "pictures/test")
    decoded = fetched(tmp_path / "pictures")()
    images, _ = joined(decoded.train)
    upright = np.asarray(picture.transpose(Image.Transpose.ROTATE_270)).transpose(2, 0, 1)
    assert any(np.array_equal(image, upright) for image in images)
    assert decoded.changes == {
        "train images, turned upright, as their EXIF data say": 1,
        "train images, of which only the first frame is kept": 1,
        "train images, whose transparency is dropped": 1,
        "train images, of whose 16 bits per colour the upper 8 are kept": 1,
    }


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_broken_image_is_named_and_fatal(workers: int, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, per_class=60)
    broken = folder / "train" / "digit-1" / "4.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    decoded = fetched(folder, workers=workers)()
    with pytest.raises(DataError, match=rf"^{re.escape(str(broken))}: broken image \(.+\).*broken_images: skip"):
        joined([*decoded.train, *decoded.test])


def test_broken_images_are_named_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path, per_class=5, splits=("train", "test"))
    for name, content in {"0.png": b"", "1.jpg": b"<html>", "2.png": b"\x89PNG\r\n\x1a\n" + bytes(40)}.items():
        (folder / "train" / "digit-2" / name).write_bytes(content)
    decoded = fetched(folder, broken_images="skip")()
    images, labels = joined(decoded.train)
    assert len(images) == 12
    assert np.bincount(labels).tolist() == [5, 5, 2]
    warning = capsys.readouterr().err
    assert warning.count("skipped broken image") == 3
    assert f"{folder}/train/digit-2/1.jpg: cannot identify image file\n" in warning
    assert decoded.changes == {"train images, skipped because they are broken": 3}


def test_an_image_that_changed_after_fetch_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    decoding, image = fetched(folder, broken_images="skip"), folder / "train" / "digit-0" / "0.png"
    image.write_bytes((folder / "train" / "digit-0" / "3.png").read_bytes())
    with pytest.raises(DataError, match=r"0\.png is not the file that fetch listed: .*run `dvc repro --force fetch`"):
        joined([*decoding().train, *decoding().test])
    image.unlink()
    with pytest.raises(DataError, match=r"0\.png cannot be read .*run `dvc repro --force fetch`"):
        joined([*decoding().train, *decoding().test])


def test_a_class_of_the_test_split_alone_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, per_class=2, splits=("train", "test"))
    (folder / "test" / "digit-2").rename(folder / "test" / "digit-9")
    with pytest.raises(DataError, match="found classes under test/ but not under train/: digit-9"):
        fetched(folder)()
