"""Decode each raw format, once, into uint8 images [N, C, H, W] and integer labels [N].

Everything is handed on in chunks, so that an image folder of any size is decoded in bounded memory.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import pickletools
import re
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap
from PIL import Image, UnidentifiedImageError
from pydantic import ValidationError
from tqdm import tqdm

from pipeline.data import IMAGE_LISTING, LIMIT_BYTES, SYNTHETIC_DESCRIPTION, DataError, synthetic
from pipeline.data.checksums import SHA256
from pipeline.errors import first_line, printable
from pipeline.params import Config, Synthetic

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Chunk = tuple[Images, Labels]

CHUNK_IMAGES = 64
CHUNK_BYTES = 16 << 20

IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow goes by the content, not by the name, and would start Ghostscript for one of its other formats."""
Image.MAX_IMAGE_PIXELS = LIMIT_BYTES // 4
"""A few kilobytes can say that they are more, of which each takes four bytes, and four again while it is converted."""

DIGIT_NAMES = tuple("0123456789")
FASHION_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_AGAIN = "run `dvc repro --force fetch`."
CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class Decoded:
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    """Channels, height, width."""
    train: Iterable[Chunk]
    """To be gone through once, before ``test``."""
    test: Iterable[Chunk]


def decode(config: Config, raw: Path) -> Decoded:
    """The data set that ``fetch.dataset`` names, from ``raw/<dataset>/``, as ``prepare`` asks for it.

    Raises DataError, naming the file, for one that is missing, malformed or not what ``fetch`` saw.
    """
    name = config.fetch.dataset
    directory = raw / name
    if not directory.is_dir():
        raise DataError(f"{directory} is missing: run `dvc repro fetch` first.")
    if name == "image_folder":
        return _decode_image_folder(config, directory)
    if name == "synthetic":
        return _decode_synthetic(config, directory / SYNTHETIC_DESCRIPTION)
    if name == "digits":
        classes, train, test = DIGIT_NAMES, *_decode_digits(directory, config.prepare.test_fraction)
    elif name == "cifar10":
        classes, train, test = CIFAR10_NAMES, *_decode_cifar10(directory)
    else:
        classes = FASHION_NAMES if name == "fashion_mnist" else DIGIT_NAMES
        train, test = _decode_idx(directory, "train"), _decode_idx(directory, "t10k")
    channels, height, width = train[0].shape[1:]
    return Decoded(
        classes=classes,
        shape=(channels, height, width),
        train=[_first(train, config.prepare.train_limit)],
        test=[_first(test, config.prepare.test_limit)],
    )


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """An IDX file of unsigned bytes, in its own shape. Raises DataError if it is anything else.

    Format: two zero bytes, the element type (8: unsigned byte), the number of dimensions, each dimension as a
    big-endian 32-bit integer, then the elements, last dimension fastest.
    """
    content = _read(path)
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError(f"{path}: not an IDX file of unsigned bytes (starts with {content[:4].hex(' ')}).")
    dimensions = content[3]
    offset = 4 + 4 * dimensions
    if dimensions == 0 or len(content) < offset:
        raise DataError(f"{path}: the IDX header is cut short ({len(content)} bytes for {dimensions} dimensions).")
    shape = [int(size) for size in np.frombuffer(content, dtype=">u4", count=dimensions, offset=4)]
    expected = offset + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise DataError(f"{path}: its IDX header promises {expected:,} bytes, it has {len(content):,}.")
    return np.frombuffer(content, dtype=np.uint8, offset=offset).reshape(shape)


def held_out(keys: Sequence[str], labels: Sequence[int], fraction: float) -> npt.NDArray[np.bool_]:
    """Which samples go into the test split, [N] bool: of each class ``fraction``, at least one, never all.

    Samples are drawn by the SHA-256 of their key: the same on every machine and in every version, unrelated to their
    order, and an added sample hardly changes the split. A class of one sample stays in training.
    """
    chosen = np.zeros(len(keys), dtype=np.bool_)
    order = sorted(range(len(keys)), key=lambda index: _hashed(keys[index]))
    members: dict[int, list[int]] = {}
    for index in order:
        members.setdefault(labels[index], []).append(index)
    for indices in members.values():
        if len(indices) > 1:
            count = min(max(round(fraction * len(indices)), 1), len(indices) - 1)
            chosen[indices[:count]] = True
    return chosen


def _first(arrays: Chunk, limit: int | None) -> Chunk:
    images, labels = arrays
    return images[:limit], labels[:limit]


def _read(path: Path) -> bytes:
    """A raw file, ``<dataset>/NAME``. Raises DataError for one that is not as it was published."""
    try:
        content = _start(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {_AGAIN}") from None
    expected = SHA256.get(path.parent.name, {}).get(path.name)
    if expected not in (None, found := hashlib.sha256(content).hexdigest()):
        raise DataError(f"{path}: SHA-256 is {found}, but {expected} was published: {_AGAIN}")
    return content


def _start(path: Path) -> bytes:
    """The whole file, unless it is larger than any may be."""
    with path.open("rb") as file:
        return file.read(LIMIT_BYTES + 1)


def _hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


# The MNIST family


def _decode_idx(directory: Path, split: str) -> Chunk:
    images = read_idx(directory / f"{split}-images-idx3-ubyte")
    labels = read_idx(directory / f"{split}-labels-idx1-ubyte")
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(f"{directory}: {split} images {images.shape} and labels {labels.shape} do not belong together.")
    return images[:, None], labels.astype(np.int64)


# scikit-learn's digits


def _decode_digits(directory: Path, test_fraction: float) -> tuple[Chunk, Chunk]:
    try:  # mapped, so that nobody allocates what a header only says
        sixteenths, numbers = (open_memmap(directory / f"{name}.npy", mode="r") for name in ("images", "labels"))
        if numbers.ndim != 1 or sixteenths.shape != (len(numbers), 8, 8) or sixteenths.dtype != np.uint8:
            raise ValueError(f"images {sixteenths.dtype} {sixteenths.shape}, labels {numbers.shape}")
        labels = numbers.astype(np.int64, casting="safe")
    except Exception as error:  # a damaged header can raise nearly anything
        raise DataError(f"{directory}: digits cannot be read ({first_line(error)}): {_AGAIN}") from None
    images = np.rint(sixteenths.astype(np.float64) * (255 / 16)).astype(np.uint8)[:, None]
    test = held_out([str(index) for index in range(len(labels))], labels.tolist(), test_fraction)
    return (images[~test], labels[~test]), (images[test], labels[test])


# CIFAR-10


def _decode_cifar10(directory: Path) -> tuple[Chunk, Chunk]:
    batches = [_read_cifar10_batch(directory / f"data_batch_{number}") for number in range(1, 6)]
    train = np.concatenate([images for images, _ in batches]), np.concatenate([labels for _, labels in batches])
    return train, _read_cifar10_batch(directory / "test_batch")


def _read_cifar10_batch(path: Path) -> Chunk:
    """Read off the opcodes of the pickle, of which none is carried out: what a pickle does, its writer decides.

    Python 2 wrote a dictionary whose keys are short strings. Its only long string is the pixels, its only small
    integers after the key "labels" and before the next string are the labels.
    """
    labels: list[Any] = []
    pixels, last = b"", ""
    try:
        for opcode, argument, _ in pickletools.genops(_read(path)):
            if opcode.name == "SHORT_BINSTRING":
                last = str(argument)
            elif opcode.name == "BINSTRING":
                pixels = str(argument).encode("latin-1")
            elif opcode.name == "BININT1" and last == "labels":
                labels.append(argument)
    except ValueError as error:
        raise DataError(f"{path}: not a batch of CIFAR-10 ({first_line(error)}): {_AGAIN}") from None
    if not labels or len(pixels) != len(labels) * 3 * 32 * 32:
        raise DataError(f"{path}: not a batch of CIFAR-10 ({len(labels)} labels, {len(pixels):,} bytes): {_AGAIN}")
    return np.frombuffer(pixels, np.uint8).reshape(-1, 3, 32, 32), np.array(labels, np.int64)


# Made-up images


def _decode_synthetic(config: Config, path: Path) -> Decoded:
    try:
        asked = Synthetic.model_validate_json(_read(path))
    except ValidationError as error:
        raise DataError(f"{path} is not what fetch wrote ({first_line(error)}): {_AGAIN}") from None
    channels, height, width = asked.shape
    kept = config.prepare
    return Decoded(
        classes=tuple(map(str, range(asked.classes))),
        shape=(channels, height, width),
        train=synthetic.chunks(asked, "train", min(asked.train, kept.train_limit or asked.train)),
        test=synthetic.chunks(asked, "test", min(asked.test, kept.test_limit or asked.test)),
    )


# Image folders


class _Image(NamedTuple):
    path: str
    """SPLIT/CLASS/..., relative to the image folder."""
    sha256: str
    label: int


def _decode_image_folder(config: Config, directory: Path) -> Decoded:
    assert config.fetch.image_folder is not None  # config.parse refuses image_folder without these two
    assert config.prepare.image_size is not None
    classes, train, test = _read_listing(directory / IMAGE_LISTING, config.prepare.test_fraction)
    root = Path(config.fetch.image_folder).expanduser()
    height, width = config.prepare.image_size

    def chunks(what: str, images: list[_Image], limit: int | None) -> Iterator[Chunk]:
        return _decode_images(what, root, images[:limit], (height, width), config)

    return Decoded(
        classes=classes,
        shape=(3, height, width),
        train=chunks("train", train, config.prepare.train_limit),
        test=chunks("test", test, config.prepare.test_limit),
    )


def _read_listing(path: Path, test_fraction: float) -> tuple[tuple[str, ...], list[_Image], list[_Image]]:
    """Classes, training images, test images; each split in the order of its paths' hashes, so classes are mixed."""
    try:
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
            rows = [(row["path"], row["sha256"]) for row in csv.DictReader(file)]
        if not all(re.fullmatch("(train|test)/[^/]+/.+", path or "", re.DOTALL) for path, _ in rows):
            raise ValueError("a path is not SPLIT/CLASS/NAME")
    except (OSError, KeyError, ValueError, csv.Error) as error:
        raise DataError(f"{path} cannot be read ({error!r}): {_AGAIN}") from None
    rows.sort(key=lambda row: _hashed(row[0]))
    classes = tuple(sorted({path.split("/")[1] for path, _ in rows if path.startswith("train/")}))
    number = {name: index for index, name in enumerate(classes)}
    unknown = sorted({path.split("/")[1] for path, _ in rows} - set(classes))
    if unknown:
        raise DataError(f"image_folder: class {', '.join(unknown)} stands under test/ but not under train/.")
    images = [_Image(path, digest, number[path.split("/")[1]]) for path, digest in rows]
    train = [image for image in images if image.path.startswith("train/")]
    test = [image for image in images if image.path.startswith("test/")]
    if not test:
        chosen = held_out([image.path for image in train], [image.label for image in train], test_fraction)
        test = [image for image, out in zip(train, chosen, strict=True) if out]
        train = [image for image, out in zip(train, chosen, strict=True) if not out]
    return classes, train, test


def _decode_images(
    what: str, root: Path, images: list[_Image], size: tuple[int, int], config: Config
) -> Iterator[Chunk]:
    """Decode in processes, hand on in order; only a few chunks a process are in memory at any time."""
    length = max(1, min(CHUNK_IMAGES, CHUNK_BYTES // (3 * size[0] * size[1])))
    chunks = [images[start : start + length] for start in range(0, len(images), length)]
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if config.prepare.workers != "auto":
        workers = config.prepare.workers
    workers = min(workers, len(chunks))
    skip = config.prepare.broken_images == "skip"
    skipped = 0
    with tqdm(total=len(images), desc=f"decode {what}", unit=" images", leave=False, disable=None) as bar:
        for chunk, decoded in zip(chunks, _decode_chunks(root, chunks, size, workers), strict=True):
            bar.update(len(chunk))
            for image, reason in zip(chunk, decoded.broken, strict=True):
                if reason and not skip:
                    raise DataError(
                        f"{root / image.path}: broken image ({reason}). Repair or remove it and run "
                        "`dvc repro --force fetch`, or set prepare.broken_images: skip."
                    )
                if reason:
                    skipped += 1
                    tqdm.write(printable(f"skipped broken image {root / image.path}: {reason}"), file=sys.stderr)
            keep = [not reason for reason in decoded.broken]
            yield decoded.images[keep], np.array([image.label for image in chunk], dtype=np.int64)[keep]
    if skipped:
        tqdm.write(f"{what}: skipped {skipped} of {len(images)} images", file=sys.stderr)


class _DecodedChunk(NamedTuple):
    images: Images
    broken: list[str]
    """For each image why it cannot be decoded; empty if it can."""


def _decode_chunks(
    root: Path, chunks: list[list[_Image]], size: tuple[int, int], workers: int
) -> Iterator[_DecodedChunk]:
    if workers <= 1:
        for chunk in chunks:
            yield _decode_chunk(root, chunk, size)
        return
    # spawn: a forked child would inherit the locks of this process's threads
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        pending: deque[Future[_DecodedChunk]] = deque()
        for chunk in chunks:
            pending.append(pool.submit(_decode_chunk, root, chunk, size))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _decode_chunk(root: Path, chunk: list[_Image], size: tuple[int, int]) -> _DecodedChunk:
    """RGB, resized to [height, width] with Pillow's antialiased bilinear filter, as torchvision's Resize does."""
    height, width = size
    images = np.zeros((len(chunk), 3, height, width), dtype=np.uint8)
    broken = []
    for index, image in enumerate(chunk):
        try:
            content = _start(root / image.path)
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
            broken.append("")
        except UnidentifiedImageError:  # whose words name an object in memory
            broken.append("cannot identify image file")
        except Exception as error:  # Pillow's decoders raise many kinds for damaged files; each is named
            broken.append(str(error) or type(error).__name__)
    return _DecodedChunk(images, broken)


_CHANGED = f"the image folder has changed; {_AGAIN}"
