"""The user's own files: which of a folder's files are data, images by class, and the listing that ``fetch`` writes."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from pipeline.data import LIMIT_BYTES, LISTING, DataError
from pipeline.data.decoded import progress, say
from pipeline.errors import printable, said
from pipeline.files import file_sha256, whole
from pipeline.params import Fetch

GENERATED = ("__MACOSX", "__pycache__", "@eaDir", "lost+found")
"""Names of folders that programs make beside the user's files. Other such folders are hidden."""
IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


def is_data(name: str) -> bool:
    """Whether a file or folder of this name is neither hidden nor generated."""
    return not name.startswith(".") and name not in GENERATED


def files_under(top: Path, key: str, why_not: Callable[[Path], str], unread: Container[str] = ()) -> list[str]:
    """Return the paths of the files under ``top``, relative to it and sorted. Links are followed, except to a folder
    that contains them.

    What is left out is printed with its count and ``key``, the folder's setting; nothing is printed if ``key`` is
    empty. ``why_not`` returns why a file, named by its path below ``top``, is left out; empty if it is not. ``unread``:
    further folders to leave out: a name, of folders at any place, or the path ./PATH of one folder. Raises DataError if
    a folder cannot be read.
    """

    def refuse(error: OSError) -> NoReturn:
        raise DataError(f"{key}: {error.filename}: {error.strerror}; expected a folder that can be read.")

    files: list[Path] = []
    left_out: Counter[str] = Counter()
    for place, folders, names in os.walk(top, onerror=refuse, followlinks=True):
        folder = Path(place)
        for name in [*folders]:
            circular = any(above.samefile(folder / name) for above in (folder, *folder.absolute().parents))
            elsewhere = name in unread or f"./{(folder / name).relative_to(top)}" in unread
            if circular or elsewhere or not is_data(name):
                left_out["link to a folder that contains it" if circular else f"folder {name}"] += 1
                folders.remove(name)
        for path in map(folder.joinpath, names):
            why = why_not(path.relative_to(top)) if path.is_file() else "dangling link or special file"
            if why := why if is_data(path.name) else "hidden file":
                left_out[why] += 1
            else:
                files.append(path.relative_to(top))
    for what, times in sorted(left_out.items()) if key else ():
        say(f"{key}: left out {times:,} x {what}")
    return [path.as_posix() for path in sorted(files)]


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
