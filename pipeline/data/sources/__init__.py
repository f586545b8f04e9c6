"""Stage ``fetch``: downloads or exports the raw files, or lists the user's own files.

A downloaded file gets its final name only after the SHA-256 of its uncompressed content was checked, so even an
untrusted source is safe.
"""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.data import DataError, arrays, text
from pipeline.data.sources.listings import LISTINGS, Listing
from pipeline.data.sources.local import describe_synthetic, export_digits, images_of, list_files
from pipeline.data.sources.places import Mirror
from pipeline.data.sources.store import SourceError, Store, say
from pipeline.errors import count
from pipeline.files import whole_directory
from pipeline.params import Fetch


def fetch(config: Fetch, directory: Path) -> None:
    """Fill ``directory/<dataset>/`` with verified raw files.

    Parts of interrupted transfers stay in ``<directory>.partial``. The next run continues these transfers, and deletes
    ``<directory>.partial`` once all files are complete. The user's own files (``image_folder``, ``text_folder``,
    ``arrays``) are not copied: ``fetch`` writes a listing of paths, sizes and SHA-256, and ``prepare`` refuses files
    that differ from the listing. DVC does not track the user's directory, so run ``dvc repro --force fetch`` after
    you change the files.

    Raises DataError if a file cannot be fetched from any source. The message names every source and the reason why it
    failed.
    """
    target = directory / config.dataset
    target.mkdir(parents=True, exist_ok=True)
    if config.dataset == "digits":
        export_digits(target)
    elif config.dataset == "image_folder":
        list_files("fetch.image_folder", *images_of(config), target)
    elif config.dataset == "arrays":
        exported = arrays.is_exported(config)
        with whole_directory(target) if exported else nullcontext(target) as place:
            if exported:
                arrays.export(config, place)
            list_files(arrays.KEY, arrays.root(config, place), arrays.files(config, place), place)
    elif config.dataset in text.FOLDERS:
        list_files("fetch.text_folder", text.root(config), text.files(config), target)
    elif config.dataset == "synthetic":
        describe_synthetic(config.synthetic, target)
    else:
        _collect(config, LISTINGS[config.dataset], target, directory.with_name(f"{directory.name}.partial"))


def _collect(config: Fetch, listing: Listing, target: Path, partials: Path) -> None:
    store = Store(target, partials, config.timeout_seconds, config.attempts)
    sources = listing.sources
    if config.mirror is not None:
        sources = (Mirror(_mirror_path(config.mirror), listing.archive), *sources)
    missing = store.missing(listing.files)
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
            f"{config.dataset}: {', '.join(file.name for file in missing)} could not be fetched. Tried in this order:\n"
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
