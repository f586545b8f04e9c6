"""Decode each raw format, once, into uint8 images [N, C, H, W] and integer labels [N].

Everything is handed on in chunks, so that an image folder of any size is decoded in bounded memory.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import pickle
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError
from pydantic import ValidationError
from tqdm import tqdm

from pipeline.data import IMAGE_LISTING, SYNTHETIC_DESCRIPTION, DataError, synthetic
from pipeline.errors import first_line
from pipeline.params import Config, Synthetic

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Chunk = tuple[Images, Labels]

CHUNK_IMAGES = 64
CHUNK_BYTES = 16 << 20

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
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): run `dvc repro --force fetch`.") from None


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
    try:
        sixteenths: Images = np.load(directory / "images.npy")
        labels: Labels = np.load(directory / "labels.npy").astype(np.int64)
    except (OSError, ValueError) as error:
        raise DataError(f"{directory}: digits cannot be read ({error}): run `dvc repro --force fetch`.") from None
    images = np.rint(sixteenths.astype(np.float64) * (255 / 16)).astype(np.uint8)[:, None]
    test = held_out([str(index) for index in range(len(labels))], labels.tolist(), test_fraction)
    return (images[~test], labels[~test]), (images[test], labels[test])


# CIFAR-10


class _BatchUnpickler(pickle.Unpickler):
    """Reads what CIFAR-10's batches consist of (lists, bytes and numpy arrays) and can call nothing else."""

    _allowed: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-10 batch needs")
        return self._allowed[module, name]


def _decode_cifar10(directory: Path) -> tuple[Chunk, Chunk]:
    batches = [_read_cifar10_batch(directory / f"data_batch_{number}") for number in range(1, 6)]
    train = np.concatenate([images for images, _ in batches]), np.concatenate([labels for _, labels in batches])
    return train, _read_cifar10_batch(directory / "test_batch")


def _read_cifar10_batch(path: Path) -> Chunk:
    content = _read(path)
    try:
        # latin1 maps Python 2's byte strings, in which numpy kept the pixels, to text and back without loss.
        batch = _BatchUnpickler(io.BytesIO(content), encoding="latin1").load()
        pixels, labels = np.asarray(batch["data"]), np.array(batch["labels"], dtype=np.int64, ndmin=1)
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DataError(f"{path}: not a batch of CIFAR-10 ({error}): run `dvc repro --force fetch`.") from None
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3 * 32 * 32):
        raise DataError(
            f"{path}: not a batch of CIFAR-10 ({len(labels)} labels, {pixels.dtype} pixels {pixels.shape})."
        )
    return pixels.reshape(-1, 3, 32, 32), labels


# Made-up images


def _decode_synthetic(config: Config, path: Path) -> Decoded:
    try:
        asked = Synthetic.model_validate_json(_read(path))
    except ValidationError as error:
        raise DataError(
            f"{path} is not what fetch wrote ({first_line(error)}): run `dvc repro --force fetch`."
        ) from None
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
    except (OSError, KeyError) as error:
        raise DataError(f"{path} cannot be read ({error!r}): run `dvc repro --force fetch`.") from None
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
                    tqdm.write(f"skipped broken image {root / image.path}: {reason}", file=sys.stderr)
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
            content = (root / image.path).read_bytes()
        except OSError as error:
            raise DataError(f"{root / image.path} cannot be read ({error.strerror}): {_CHANGED}") from None
        if hashlib.sha256(content).hexdigest() != image.sha256:
            raise DataError(f"{root / image.path} is not the file that fetch listed: {_CHANGED}")
        try:
            with Image.open(io.BytesIO(content)) as opened:
                resized = opened.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
            images[index] = np.asarray(resized).transpose(2, 0, 1)
            broken.append("")
        except UnidentifiedImageError:  # whose words name an object in memory
            broken.append("cannot identify image file")
        except Exception as error:  # Pillow's decoders raise many kinds for damaged files; each is named
            broken.append(str(error) or type(error).__name__)
    return _DecodedChunk(images, broken)


_CHANGED = "the image folder has changed; run `dvc repro --force fetch`."
