"""Decode each raw format into arrays with one row per sample, such as images [N, C, H, W] and labels [N].

Rows are yielded in chunks, so that a data set of any size is decoded in bounded memory.

Synthetic samples are textures with noise, or rising tokens; the same seed yields the same samples on every machine. A
model's score on them says nothing about other data. They serve to measure speed and memory for a given shape and number
of samples.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import pickle
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from pipeline import environment
from pipeline.data import LIMIT_BYTES, LISTING, DataError, arrays, text
from pipeline.data.decoded import AGAIN, SHA256, Chunk, Decoded, held_out, listed, progress, say
from pipeline.errors import first_line
from pipeline.files import open_regular, read_bytes
from pipeline.params import Config, Synthetic

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
        with open_regular(path) as file:
            content = file.read(LIMIT_BYTES)  # a swapped file may be of any size
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {AGAIN}") from None
    expected, actual = SHA256[path.parent.name][path.name], hashlib.sha256(content).hexdigest()
    if actual != expected:
        raise DataError(f"{path}: SHA-256 is {actual}, but {expected} was published: {AGAIN}")
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
        train=synthetic_chunks(requested, "train", min(requested.train, kept.train_limit or requested.train)),
        test=synthetic_chunks(requested, "test", min(requested.test, kept.test_limit or requested.test)),
    )


class _Image(NamedTuple):
    path: str
    """SPLIT/CLASS/..., relative to the image folder."""
    sha256: str
    label: int


def _decode_image_folder(config: Config, directory: Path) -> Decoded:
    classes, train, test = _read_listing(directory / LISTING, config.prepare.test_fraction)
    changes: Counter[str] = Counter()
    return Decoded(
        classes=classes,
        train=_decode_images("train", train[: config.prepare.train_limit], config, changes),
        test=_decode_images("test", test[: config.prepare.test_limit], config, changes),
        changes=changes,
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


def _decode_images(what: str, images: list[_Image], config: Config, changes: Counter[str]) -> Iterator[Chunk]:
    """Decode ``images`` in worker processes, and yield chunks in order. Memory holds only a few chunks per process.
    Count in ``changes`` what is left out or changed."""
    assert config.fetch.image_folder is not None  # params.parse requires both settings for image_folder
    assert config.prepare.image_size is not None
    root, (height, width) = Path(config.fetch.image_folder).expanduser(), config.prepare.image_size
    length = max(1, min(CHUNK_IMAGES, CHUNK_BYTES // (3 * height * width)))
    chunks = [images[start : start + length] for start in range(0, len(images), length)]
    workers = max(1, int(environment.cores())) if config.prepare.workers == "auto" else config.prepare.workers
    calls = ((root, chunk, (height, width), config.prepare.image_range) for chunk in chunks)
    with progress(f"decode {what}", len(images), " images") as bar:
        decoded = _decode_chunks(calls, min(workers, len(chunks)))
        for chunk, (pixels, broken, changed) in zip(chunks, decoded, strict=True):
            bar.update(len(chunk))
            changes.update({f"{what} images, {change}": times for change, times in changed.items()})
            for index, reason in broken.items():
                place = root / chunk[index].path
                if config.prepare.broken_images == "fail":
                    raise DataError(
                        f"{place}: broken image ({reason}). Repair or remove it and run "
                        "`dvc repro --force fetch`, or set prepare.broken_images: skip."
                    )
                say(f"skipped broken image {place}: {reason}")
                changes[f"{what} images, skipped because they are broken"] += 1
            labels = np.array([image.label for image in chunk], dtype=np.int64)
            yield np.delete(pixels, list(broken), axis=0), np.delete(labels, list(broken))


Call = tuple[Path, list[_Image], tuple[int, int], Sequence[float] | None]
Pixels = tuple[npt.NDArray[np.uint8], dict[int, str], Counter[str]]
"""A chunk's images; the index of each broken image -> the reason why it could not be decoded; a change -> the number of
images that it affects."""


def _decode_chunks(calls: Iterable[Call], workers: int) -> Iterator[Pixels]:
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


def _decode_chunk(root: Path, chunk: list[_Image], size: tuple[int, int], span: Sequence[float] | None) -> Pixels:
    """Decode images to RGB, and resize them to ``size`` (height, width) with Pillow's antialiased bilinear filter, as
    torchvision's Resize does. ``span``: ``prepare.image_range``."""
    height, width = size
    images = np.zeros((len(chunk), 3, height, width), dtype=np.uint8)
    broken, changed = {}, Counter[str]()
    for index, image in enumerate(chunk):
        try:
            content = read_bytes(root / image.path, LIMIT_BYTES)
        except OSError as error:
            raise DataError(f"{root / image.path} cannot be read ({error.strerror}): {_CHANGED}") from None
        if hashlib.sha256(content).hexdigest() != image.sha256:
            raise DataError(f"{root / image.path} is not the file that fetch listed: {_CHANGED}")
        try:
            with (
                warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning),
                Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as opened,
            ):
                picture, changes = _as_seen(opened, root / image.path, span)
                resized = picture.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
            images[index] = np.asarray(resized).transpose(2, 0, 1)
            changed.update(changes)
        except DataError:
            raise
        except UnidentifiedImageError:  # its message contains an object's address in memory
            broken[index] = "cannot identify image file"
        except Exception as error:  # Pillow's decoders raise exceptions of many types for damaged files
            broken[index] = first_line(error)
    return images, broken, changed


def _as_seen(opened: Image.Image, path: Path, span: Sequence[float] | None) -> tuple[Image.Image, list[str]]:
    """Return the picture upright and with 8 bits per value, and what its conversion to RGB changes.

    Values of more than 8 bits are scaled so that ``span`` becomes 0..255. Raises DataError if they are not in the span.
    Of colours with 16 bits, Pillow keeps the upper 8.
    """
    is_deep = ";16" in str(getattr(opened, "tile", ""))  # Pillow forgets the file's form when it loads the values
    opened.load()
    picture, turned = opened, 1
    with suppress(Exception):  # damaged metadata do not spoil a picture
        turned = opened.getexif().get(ExifTags.Base.Orientation, 1)
        ImageOps.exif_transpose(opened, in_place=True)
    if opened.mode[0] in "IF":
        values, (low, high) = np.asarray(opened, np.float32), span or (0, 0)
        if not low <= values.min() <= values.max() <= high > low:
            raise DataError(
                f"{path}: found values from {values.min():g} to {values.max():g}, of more than 8 bits; allowed: "
                f"{f'{low:g} to {high:g}' if span else '8 bits'}. Set prepare.image_range to the range that becomes 0 "
                "to 255, such as [0, 65535], or convert the images."
            )
        picture = Image.fromarray(np.rint((values - low) * (255 / (high - low))).astype(np.uint8))
    changes = {
        "scaled to 8 bits by prepare.image_range": picture is not opened,
        "of whose 16 bits per colour the upper 8 are kept": is_deep and picture is opened,
        "whose transparency is dropped": picture.has_transparency_data
        and any(picture.convert("RGBA").getchannel("A").histogram()[:255]),
        "of which only the first frame is kept": getattr(opened, "is_animated", False),
        "turned upright, as their EXIF data say": turned in range(2, 9),
    }
    return picture, [change for change, applies in changes.items() if applies]


_CHANGED = f"the image folder has changed; {AGAIN}"


TILE = 8
"""Side in pixels of the tile that a texture repeats."""
STREAMS = ("textures", "train", "test", "train targets", "test targets")
Split = Literal["train", "test"]
_WORK_BYTES = {"labels": 1, "floats": 8, "tokens": 8}
"""Bytes of memory per input value while the value is generated."""


def synthetic_chunks(requested: Synthetic, split: Split, count: int) -> Iterator[Chunk]:
    """Yield the first ``count`` samples of a split in chunks of n samples: inputs [n, *shape] and, unless they are
    tokens, targets.

    Targets are either labels [n], which run through all classes again and again, or floats [n, classes] from 0 to 1.
    Each token is one or two more than the token before, modulo ``classes``. A sample depends on ``requested``,
    ``split`` and its index, not on ``count``.
    """
    tile = (requested.shape[0], *(min(TILE, size) for size in requested.shape[1:]))
    tiles = _bytes(requested.seed, "textures", 0, requested.classes, tile)
    length = max(1, CHUNK_BYTES // (math.prod(requested.shape) * _WORK_BYTES[requested.targets]))
    for start in range(0, count, length):
        indices = np.arange(start, min(start + length, count))
        noise = _bytes(requested.seed, split, start, len(indices), tuple(requested.shape))
        if requested.targets == "tokens":
            rises = np.cumsum((noise & 1) + 1, 1, dtype=np.int64)
            yield (((noise[:, :1] + rises) % requested.classes).astype(np.uint16),)
            continue
        targets: npt.NDArray[Any] = indices % requested.classes
        if requested.targets == "labels":
            textures = tiles[targets]
        else:
            levels = _bytes(requested.seed, f"{split} targets", start, len(indices), (requested.classes,))
            mixed = np.tensordot(levels.astype(np.int64), tiles.astype(np.int64), 1)
            textures, targets = (mixed // (255 * requested.classes)).astype(np.uint8), levels / np.float32(255)
        for axis, size in enumerate(requested.shape[1:], start=2):
            textures = textures.take(np.arange(size) % TILE, axis)
        inputs = (textures >> 1) + (noise >> 1)
        yield inputs / np.float32(255) if requested.dtype == "float32" else inputs, targets


def _bytes(seed: int, stream: str, start: int, count: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Return random bytes [count, *shape], starting at item ``start`` of one of ``STREAMS``.

    The bytes come from a bit generator, for which numpy guarantees the same output in every version. numpy gives no
    such guarantee for the methods of a Generator.
    """
    size = math.prod(shape)
    words = -(-size // 8)
    generator = np.random.PCG64(np.random.SeedSequence((seed, STREAMS.index(stream))))
    generator.advance(start * words)
    drawn = generator.random_raw(count * words).astype("<u8", copy=False).view(np.uint8)
    return drawn.reshape(count, 8 * words)[:, :size].reshape(count, *shape)
