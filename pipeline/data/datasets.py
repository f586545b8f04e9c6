"""Decode each raw format into arrays with one row per sample, such as images [N, C, H, W] and labels [N].

Rows are yielded in chunks, so that a data set of any size is decoded in bounded memory.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickletools
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap
from PIL import Image, UnidentifiedImageError
from pydantic import ValidationError
from tqdm import tqdm

from pipeline.data import LIMIT_BYTES, LISTING, SYNTHETIC_DESCRIPTION, DataError, arrays, synthetic, text
from pipeline.data.checksums import SHA256
from pipeline.data.decoded import AGAIN, Chunk, Decoded, held_out, listed
from pipeline.errors import first_line, printable
from pipeline.params import Config, Synthetic

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Labelled = tuple[Images, Labels]

CHUNK_IMAGES = 64
CHUNK_BYTES = 16 << 20

IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Image formats that are decoded. Pillow recognises a format by the file's content, not by its name. Without this
list, Pillow would start Ghostscript for an EPS file."""
Image.MAX_IMAGE_PIXELS = LIMIT_BYTES // 4
"""Largest number of pixels of an image. A limit is needed because a file of a few kilobytes can declare any number of
pixels. A pixel takes four bytes of memory, and four more bytes during the conversion to RGB."""

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


def decode(config: Config, raw: Path) -> Decoded:
    """Decode the data set ``fetch.dataset`` from ``raw/<dataset>/``, with the settings of ``prepare``.

    Raises DataError, naming the file, if a file is missing, malformed or changed since ``fetch``.
    """
    name = config.fetch.dataset
    directory = raw / name
    if not directory.is_dir():
        raise DataError(f"{directory} is missing: run `dvc repro fetch` first.")
    if name == "image_folder":
        return _decode_image_folder(config, directory)
    if name == "synthetic":
        return _decode_synthetic(config, directory / SYNTHETIC_DESCRIPTION)
    if name == "arrays":
        return arrays.decode(config, directory)
    if name in text.FOLDERS:
        return text.decode(config, directory)
    if name == "digits":
        classes, train, test = DIGIT_NAMES, *_decode_digits(directory, config.prepare.test_fraction)
    elif name == "cifar10":
        classes, train, test = CIFAR10_NAMES, *_decode_cifar10(directory)
    else:
        classes = FASHION_NAMES if name == "fashion_mnist" else DIGIT_NAMES
        train, test = _decode_idx(directory, "train"), _decode_idx(directory, "t10k")
    return Decoded(
        classes=classes,
        train=[_first(train, config.prepare.train_limit)],
        test=[_first(test, config.prepare.test_limit)],
    )


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Return the array of an IDX file of unsigned bytes. Raises DataError for any other content.

    Format: two zero bytes, the element type (8: unsigned byte), the number of dimensions, each dimension as a
    big-endian 32-bit integer, then the elements, last dimension fastest.
    """
    content = _read(path)
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError(f"{path}: not an IDX file of unsigned bytes (starts with {content[:4].hex(' ')}): {AGAIN}")
    dimensions = content[3]
    offset = 4 + 4 * dimensions
    if dimensions == 0 or len(content) < offset:
        raise DataError(
            f"{path}: the IDX header is cut short ({len(content)} bytes for {dimensions} dimensions): {AGAIN}"
        )
    shape = [int(size) for size in np.frombuffer(content, dtype=">u4", count=dimensions, offset=4)]
    expected = offset + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise DataError(
            f"{path}: the IDX header declares {expected:,} bytes, but the file has {len(content):,}: {AGAIN}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=offset).reshape(shape)


def _first(split: Labelled, limit: int | None) -> Labelled:
    images, labels = split
    return images[:limit], labels[:limit]


def _read(path: Path) -> bytes:
    """Return the content of the raw file ``<dataset>/NAME``. Raises DataError if its SHA-256 is not as published."""
    try:
        content = _start(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {AGAIN}") from None
    expected = SHA256.get(path.parent.name, {}).get(path.name)
    if expected not in (None, found := hashlib.sha256(content).hexdigest()):
        raise DataError(f"{path}: SHA-256 is {found}, but {expected} was published: {AGAIN}")
    return content


def _start(path: Path) -> bytes:
    """Return the file's content, at most ``LIMIT_BYTES`` + 1 bytes. The SHA-256 of a larger file is then wrong."""
    with path.open("rb") as file:
        return file.read(LIMIT_BYTES + 1)


# The MNIST family


def _decode_idx(directory: Path, split: str) -> Labelled:
    images = read_idx(directory / f"{split}-images-idx3-ubyte")
    labels = read_idx(directory / f"{split}-labels-idx1-ubyte")
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(
            f"{directory}: {split} images {images.shape} and labels {labels.shape} do not belong together: {AGAIN}"
        )
    return images[:, None], labels.astype(np.int64)


# scikit-learn's digits


def _decode_digits(directory: Path, test_fraction: float) -> tuple[Labelled, Labelled]:
    try:  # memory-mapped, so that a false header allocates no memory
        sixteenths, numbers = (open_memmap(directory / f"{name}.npy", mode="r") for name in ("images", "labels"))
        if numbers.ndim != 1 or sixteenths.shape != (len(numbers), 8, 8) or sixteenths.dtype != np.uint8:
            raise ValueError(f"images {sixteenths.dtype} {sixteenths.shape}, labels {numbers.shape}")
        labels = numbers.astype(np.int64, casting="safe")
    except Exception as error:  # a damaged header can raise exceptions of many types
        raise DataError(f"{directory}: digits cannot be read ({first_line(error)}): {AGAIN}") from None
    images = np.rint(sixteenths.astype(np.float64) * (255 / 16)).astype(np.uint8)[:, None]
    test = held_out(map(str, range(len(labels))), labels, test_fraction)
    return (images[~test], labels[~test]), (images[test], labels[test])


# CIFAR-10


def _decode_cifar10(directory: Path) -> tuple[Labelled, Labelled]:
    batches = [_read_cifar10_batch(directory / f"data_batch_{number}") for number in range(1, 6)]
    train = np.concatenate([images for images, _ in batches]), np.concatenate([labels for _, labels in batches])
    return train, _read_cifar10_batch(directory / "test_batch")


def _read_cifar10_batch(path: Path) -> Labelled:
    """Read images and labels from the pickle's opcodes without executing them, because a pickle can run any code.

    The pickle is a dictionary that Python 2 wrote. Its keys are short strings, and its only long string holds the
    pixels. The small integers between the key "labels" and the next string are the labels.
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
        raise DataError(f"{path}: not a batch of CIFAR-10 ({first_line(error)}): {AGAIN}") from None
    if not labels or len(pixels) != len(labels) * 3 * 32 * 32:
        raise DataError(f"{path}: not a batch of CIFAR-10 ({len(labels)} labels, {len(pixels):,} bytes): {AGAIN}")
    return np.frombuffer(pixels, np.uint8).reshape(-1, 3, 32, 32), np.array(labels, np.int64)


# Synthetic samples


def _decode_synthetic(config: Config, path: Path) -> Decoded:
    try:
        requested = Synthetic.model_validate_json(_read(path))
    except ValidationError as error:
        raise DataError(f"{path} is not what fetch wrote ({first_line(error)}): {AGAIN}") from None
    kept = config.prepare
    return Decoded(
        classes=tuple(map(str, range(requested.classes))) if requested.targets == "labels" else (),
        vocabulary=requested.classes if requested.targets == "tokens" else None,
        train=synthetic.chunks(requested, "train", min(requested.train, kept.train_limit or requested.train)),
        test=synthetic.chunks(requested, "test", min(requested.test, kept.test_limit or requested.test)),
    )


# Image folders


class _Image(NamedTuple):
    path: str
    """SPLIT/CLASS/..., relative to the image folder."""
    sha256: str
    label: int


def _decode_image_folder(config: Config, directory: Path) -> Decoded:
    assert config.fetch.image_folder is not None  # params.parse requires both settings for image_folder
    assert config.prepare.image_size is not None
    classes, train, test = _read_listing(directory / LISTING, config.prepare.test_fraction)
    root = Path(config.fetch.image_folder).expanduser()
    height, width = config.prepare.image_size

    def chunks(what: str, images: list[_Image], limit: int | None) -> Iterator[Chunk]:
        return _decode_images(what, root, images[:limit], (height, width), config)

    return Decoded(
        classes=classes,
        train=chunks("train", train, config.prepare.train_limit),
        test=chunks("test", test, config.prepare.test_limit),
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
    train = [image for image in images if image.path.startswith("train/")]
    test = [image for image in images if image.path.startswith("test/")]
    if not test:
        chosen = held_out([image.path for image in train], [image.label for image in train], test_fraction)
        test = [image for image, out in zip(train, chosen, strict=True) if out]
        train = [image for image, out in zip(train, chosen, strict=True) if not out]
    return classes, train, test


def _decode_images(
    what: str, root: Path, images: list[_Image], size: tuple[int, int], config: Config
) -> Iterator[Labelled]:
    """Decode ``images`` in worker processes, and yield chunks in order. Memory holds only a few chunks per process."""
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
    """For each image, the reason why decoding failed, or an empty string."""


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
    """Decode images to RGB, and resize them to [height, width] with Pillow's antialiased bilinear filter, as
    torchvision's Resize does."""
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
        except UnidentifiedImageError:  # its message contains an object's address in memory
            broken.append("cannot identify image file")
        except Exception as error:  # Pillow's decoders raise exceptions of many types for damaged files
            broken.append(str(error) or type(error).__name__)
    return _DecodedChunk(images, broken)


_CHANGED = f"the image folder has changed; {AGAIN}"
