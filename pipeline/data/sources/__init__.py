"""Stage ``fetch``: downloads or exports the raw files, or lists the user's own files.

A downloaded file gets its final name only after the SHA-256 of its uncompressed content was checked, so even an
untrusted source is safe.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.data import DataError, arrays, text
from pipeline.data.checksums import SHA256
from pipeline.data.sources.listings import ARCHIVES, SOURCES
from pipeline.data.sources.local import describe_synthetic, images_of, list_files
from pipeline.data.sources.places import mirror
from pipeline.data.sources.store import SourceError, Store, say
from pipeline.errors import count
from pipeline.files import whole_directory
from pipeline.params import Fetch


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
