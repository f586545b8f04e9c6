"""Decode each raw format into arrays with one row per sample, such as images [N, C, H, W] and labels [N].

Rows are yielded in chunks, so that a data set of any size is decoded in bounded memory.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import pickle
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError
from tqdm import tqdm

from pipeline import environment
from pipeline.data import LIMIT_BYTES, LISTING, DataError, arrays, synthetic, text
from pipeline.data.checksums import SHA256
from pipeline.data.decoded import AGAIN, Chunk, Decoded, held_out, listed
from pipeline.errors import first_line, printable
from pipeline.params import Config

CHUNK_IMAGES = 64
CHUNK_BYTES = 16 << 20

IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Image formats that are decoded. Pillow recognises a format by the file's content, not by its name. Without this
list, Pillow would start Ghostscript for an EPS file."""
Image.MAX_IMAGE_PIXELS = LIMIT_BYTES // 4
"""Largest number of pixels of an image. A limit is needed because a file of a few kilobytes can declare any number of
pixels. A pixel takes four bytes of memory, and four more bytes during the conversion to RGB."""

CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion_mnist": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}
"""Data set -> the names of its classes, in the order of the labels."""


def decode(config: Config, raw: Path, work: Path | None = None) -> Decoded:
    """Decode the data set ``fetch.dataset`` from ``raw/<dataset>/``, with the settings of ``prepare``. Large temporary
    files are written to the folder ``work`` (None: the system's folder for temporary files).

    Raises DataError, naming the file, if a file is missing, malformed or changed since ``fetch``.
    """
    name = config.fetch.dataset
    directory = raw / name
    if not directory.is_dir():
        raise DataError(f"{directory} is missing: run `dvc repro fetch` first.")
    if name == "image_folder":
        return _decode_image_folder(config, directory)
    if name == "synthetic":
        return _decode_synthetic(config)
    if name in ("arrays", "digits"):
        return arrays.decode(config, directory, work)
    if name in text.FOLDERS:
        return text.decode(config, directory)
    read = _cifar10 if name == "cifar10" else _mnist
    return Decoded(
        classes=CLASSES[name],
        train=[tuple(rows[: config.prepare.train_limit] for rows in read(directory, "train"))],
        test=[tuple(rows[: config.prepare.test_limit] for rows in read(directory, "test"))],
    )


def _published(path: Path) -> bytes:
    """Return the content of the raw file ``<dataset>/NAME``. Raises DataError if its SHA-256 is not as published."""
    try:
        with path.open("rb") as file:
            content = file.read(LIMIT_BYTES)  # a swapped file may be of any size
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {AGAIN}") from None
    expected, found = SHA256[path.parent.name][path.name], hashlib.sha256(content).hexdigest()
    if found != expected:
        raise DataError(f"{path}: SHA-256 is {found}, but {expected} was published: {AGAIN}")
    return content


def _mnist(directory: Path, split: str) -> Chunk:
    """Return images and labels of a split of MNIST or Fashion-MNIST."""
    prefix = "train" if split == "train" else "t10k"
    images = _read_idx(directory / f"{prefix}-images-idx3-ubyte")
    return images[:, None], _read_idx(directory / f"{prefix}-labels-idx1-ubyte").astype(np.int64)


def _read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Return the array of a published IDX file of unsigned bytes.

    Format: two zero bytes, the element type (8: unsigned byte), the number of dimensions, each dimension as a
    big-endian 32-bit integer, then the elements, last dimension fastest.
    """
    content = _published(path)
    shape = np.frombuffer(content, ">u4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + shape.nbytes).reshape(shape)


def _cifar10(directory: Path, split: str) -> Chunk:
    """Return images and labels of a split. Its files are dictionaries that Python 2 pickled.

    A pickle can run any code. These pickles do not, because they have the published SHA-256.
    """
    names = [f"data_batch_{number}" for number in range(1, 6)] if split == "train" else ["test_batch"]
    batches = [pickle.loads(_published(directory / name), encoding="latin-1") for name in names]
    images = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
    return images, np.concatenate([batch["labels"] for batch in batches]).astype(np.int64)


def _decode_synthetic(config: Config) -> Decoded:
    requested, kept = config.fetch.synthetic, config.prepare
    return Decoded(
        classes=tuple(map(str, range(requested.classes))) if requested.targets == "labels" else (),
        vocabulary=requested.classes if requested.targets == "tokens" else None,
        train=synthetic.chunks(requested, "train", min(requested.train, kept.train_limit or requested.train)),
        test=synthetic.chunks(requested, "test", min(requested.test, kept.test_limit or requested.test)),
    )


class _Image(NamedTuple):
    path: str
    """SPLIT/CLASS/..., relative to the image folder."""
    sha256: str
    label: int


def _decode_image_folder(config: Config, directory: Path) -> Decoded:
    classes, train, test = _read_listing(directory / LISTING, config.prepare.test_fraction)
    return Decoded(
        classes=classes,
        train=_decode_images("train", train[: config.prepare.train_limit], config),
        test=_decode_images("test", test[: config.prepare.test_limit], config),
    )


def _read_listing(path: Path, test_fraction: float) -> tuple[tuple[str, ...], list[_Image], list[_Image]]:
    """Return classes, training images and test images. Each split is sorted by the paths' hashes to mix the classes."""
    rows = listed(path, r"(train|test)/[^/]+/.+")
    classes = tuple(sorted({path.split("/")[1] for path, _ in rows if path.startswith("train/")}))
    number = {name: index for index, name in enumerate(classes)}
    unknown = sorted({path.split("/")[1] for path, _ in rows} - set(classes))
    if unknown:
        raise DataError(
            f"fetch.image_folder: found classes under test/ but not under train/: {', '.join(unknown)}. Add training "
            "images of these classes, or remove the classes."
        )
    images = [_Image(path, digest, number[path.split("/")[1]]) for path, digest in rows]
    tested = np.array([image.path.startswith("test/") for image in images])
    if not tested.any():
        tested = held_out([image.path for image in images], [image.label for image in images], test_fraction)
    train, test = ([image for image, out in zip(images, tested, strict=True) if out == is_test] for is_test in (0, 1))
    return classes, train, test


def _decode_images(what: str, images: list[_Image], config: Config) -> Iterator[Chunk]:
    """Decode ``images`` in worker processes, and yield chunks in order. Memory holds only a few chunks per process."""
    assert config.fetch.image_folder is not None  # params.parse requires both settings for image_folder
    assert config.prepare.image_size is not None
    root, (height, width) = Path(config.fetch.image_folder).expanduser(), config.prepare.image_size
    length = max(1, min(CHUNK_IMAGES, CHUNK_BYTES // (3 * height * width)))
    chunks = [images[start : start + length] for start in range(0, len(images), length)]
    workers = max(1, int(environment.cores())) if config.prepare.workers == "auto" else config.prepare.workers
    calls = ((root, chunk, (height, width)) for chunk in chunks)
    skipped = 0
    with tqdm(total=len(images), desc=f"decode {what}", unit=" images", leave=False, disable=None) as bar:
        for chunk, (pixels, broken) in zip(chunks, _decode_chunks(calls, min(workers, len(chunks))), strict=True):
            bar.update(len(chunk))
            for index, reason in broken.items():
                place = root / chunk[index].path
                if config.prepare.broken_images == "fail":
                    raise DataError(
                        f"{place}: broken image ({reason}). Repair or remove it and run "
                        "`dvc repro --force fetch`, or set prepare.broken_images: skip."
                    )
                tqdm.write(printable(f"skipped broken image {place}: {reason}"), file=sys.stderr)
            skipped += len(broken)
            labels = np.array([image.label for image in chunk], dtype=np.int64)
            yield np.delete(pixels, list(broken), axis=0), np.delete(labels, list(broken))
    if skipped:
        tqdm.write(f"{what}: skipped {skipped} of {len(images)} images", file=sys.stderr)


Pixels = tuple[npt.NDArray[np.uint8], dict[int, str]]
"""A chunk's images, and a dictionary: index of a broken image -> the reason why it could not be decoded."""


def _decode_chunks(calls: Iterable[tuple[Path, list[_Image], tuple[int, int]]], workers: int) -> Iterator[Pixels]:
    if workers <= 1:
        yield from itertools.starmap(_decode_chunk, calls)
        return
    # spawn: a forked child would inherit the locks of this process's threads
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        pending: deque[Future[Pixels]] = deque()
        for call in calls:
            pending.append(pool.submit(_decode_chunk, *call))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _decode_chunk(root: Path, chunk: list[_Image], size: tuple[int, int]) -> Pixels:
    """Decode images to RGB, and resize them to [height, width] with Pillow's antialiased bilinear filter, as
    torchvision's Resize does."""
    height, width = size
    images = np.zeros((len(chunk), 3, height, width), dtype=np.uint8)
    broken = {}
    for index, image in enumerate(chunk):
        try:
            content = (root / image.path).read_bytes()
        except OSError as error:
            raise DataError(f"{root / image.path} cannot be read ({error.strerror}): {_CHANGED}") from None
        if hashlib.sha256(content).hexdigest() != image.sha256:
            raise DataError(f"{root / image.path} is not the file that fetch listed: {_CHANGED}")
        try:
            with (
                warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning),
                Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as opened,
            ):
                resized = opened.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
            images[index] = np.asarray(resized).transpose(2, 0, 1)
        except UnidentifiedImageError:  # its message contains an object's address in memory
            broken[index] = "cannot identify image file"
        except Exception as error:  # Pillow's decoders raise exceptions of many types for damaged files
            broken[index] = first_line(error)
    return images, broken


_CHANGED = f"the image folder has changed; {AGAIN}"
