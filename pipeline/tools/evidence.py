"""Evidence: one archive of a comparison and the files that it was made from. Others can check the archive without the
data, torch or the machine that measured.

The archive is an uncompressed zip file. So the same files make the same bytes with every version of zlib, and no file
unpacks to more bytes than the archive has.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import re
import stat
import struct
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import environment, params, report, results
from pipeline.comparison.compare import compare
from pipeline.comparison.consistency import DATASET, LOCK, made_of, read_all
from pipeline.environment import code
from pipeline.errors import PipelineError, count, redacted, say
from pipeline.files import open_regular, read_bytes, read_text, whole
from pipeline.params import Config

FILE = Path("evidence.zip")
MANIFEST = "manifest.json"
NAME = re.compile(
    r"(manifest|environment|bench|data/prepared/dataset|(sessions|results|reports/metrics)/[\w-]+)\.json"
    r"|params\.yaml|dvc\.lock|results/[\w-]+/history\.csv|reports/(comparison\.(json|md|html)|verdicts\.json|\w+\.csv)",
    re.ASCII,
)
"""Matches the names that files in the archive may have."""
LARGEST = 2**27
"""Maximum size of the archive, in bytes."""
MOST = 2_000
"""Maximum number of files in the archive, and of rounds in one session of the bench."""
NOT_VERIFIED = """\
Not verified, because no file can prove it: that these figures were measured on that machine, with that code and data;
and that all sessions are included. If you suspect a forgery, measure again. If the file has an attestation, it says who
made the file."""


class EvidenceError(PipelineError):
    """Evidence cannot be written, or the file to check is not evidence. The message names the file."""


class Contradiction(Exception):
    """Two parts of the evidence contradict each other. The message names the file and, if it is known, the key."""


def write(file: Path = FILE) -> None:
    """Write ``file``, the archive of the comparison and of the files that it was made from. An error leaves no partial
    archive.

    User names, passwords and queries are removed from addresses. Raises EvidenceError if the report does not follow
    from the files, or if a file cannot be read or written. Also raises EvidenceError if an address with a user name,
    password or query is in a file that must not change, because another file holds its checksum.
    """
    inputs = {name: _read(name) for name in _inputs(params.load())}
    unsummed = {str(path) for path in (params.PARAMS_FILE, environment.ENVIRONMENT_FILE, LOCK)}
    for name in sorted(inputs.keys() - unsummed):
        if read_bytes(Path(name)) != inputs[name]:
            raise EvidenceError(
                f"{name} holds an address with a user name, password or query. Evidence must not show these parts, but "
                "without them the file would not match its checksum. Remove the address from `train` or `variants` in "
                f"params.yaml and run `dvc repro`. If {name} is in {results.SESSIONS}/, delete this file and run "
                "`python -m pipeline bench --again`."
            )
    try:
        made = _compared(inputs)
        reports = {name: _read(name) for name in made}
        _hold(reports, made)
    except Contradiction as error:
        raise EvidenceError(f"{error} Run `dvc repro`, which corrects the file.") from None
    members = inputs | reports
    content = _zipped(members | {MANIFEST: _manifest(members)})
    _opened(file, content)
    try:
        with whole(file) as written:
            written.write(content)
    except (FileExistsError, IsADirectoryError, NotADirectoryError, ValueError):
        raise EvidenceError(f"{file} is not a file, or its parent is not a directory; choose another path.") from None
    say(f"evidence: {len(members)} files are in {file}; to check them, run: python -m pipeline evidence check {file}")


def check(file: Path = FILE) -> int:
    """Recompute the report from the rounds and runs in ``file``. Print the first difference and return 1; if there is
    none, print what is verified and what no file can prove, and return 0.

    Raises EvidenceError, before anything is unpacked, if ``file`` cannot be evidence.
    """
    try:
        with open_regular(file) as opened:
            content = opened.read(LARGEST + 1)
    except OSError as error:
        raise EvidenceError(f"{file} cannot be read: {error.strerror}. Name a file that `evidence` wrote.") from None
    archive, members = _opened(file, content), dict[str, bytes]()
    try:
        for entry in archive.infolist():
            members[entry.filename] = archive.read(entry)
        if _zipped(members) != content:
            raise Contradiction("the zip archive differs from what `evidence` writes for the same files.")
        sums = {name: members.pop(name) for name in (MANIFEST,) if name in members}
        _hold(sums, {MANIFEST: _manifest(members)})
        reports = {name: members[name] for name in members if name.startswith(f"{results.REPORTS}/")}
        made = _compared({name: members[name] for name in members.keys() - reports.keys()})
        _hold(reports, made)
    except (MemoryError, OSError):  # a fault of this machine, not of the evidence
        raise
    except Exception as error:  # any other error means that this report does not follow from these files
        named = isinstance(error, Contradiction | PipelineError | zipfile.BadZipFile)
        say(f"{file}: {error if named else repr(error)}{_by_other_code(members)}")
        return 1
    comparison = json.loads(made[f"{results.REPORTS}/comparison.json"])
    commit, environment_hash = comparison["bench"]["commit"], comparison["environment"]["hash"]
    dataset, sessions = comparison["dataset"], count(len(comparison["sessions"]), "session")
    runs = f"the runs of {count(len(comparison['seeds']), 'seed')} of each of {len(comparison['variants'])} variants"
    data = f"data set {dataset['name']} (SHA-256 {dataset['sha256'][:12]})" if dataset else "unknown data of a script"
    verified = (
        f"{file}: commit {commit}, environment {environment_hash[:12]}, {data}.\n"
        f"Verified: the SHA-256 of {len(members)} files; and that every ratio, interval and verdict, and the whole "
        f"report, follow from the rounds of {sessions} of the bench and {runs}.\n{NOT_VERIFIED}"
    )
    say(verified)
    return 0


def _inputs(config: Config) -> list[str]:
    """Return the names of the files from which the comparison is made, and of the files that record their origin.
    Optional files that do not exist are left out."""
    paths = [params.PARAMS_FILE, environment.ENVIRONMENT_FILE, results.BENCH_FILE, *results.session_files()]
    paths += [path for path in (LOCK, DATASET) if path.is_file()]
    paths += [of(variant) for variant in config.variants for of in (results.result_file, results.history_file)]
    return [path.as_posix() for path in paths]


def _read(name: str) -> bytes:
    try:
        return redacted(read_text(Path(name))).encode()
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{name} cannot be read: run `dvc repro`, which makes it. ({error})") from None


def _compared(inputs: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the report that follows from ``inputs``: file name -> content. It is made in a temporary folder. Raises an
    error if no report follows."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, content in inputs.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(content)
        config = params.load()
        _equal("the archive", dict.fromkeys(inputs, "a file"), dict.fromkeys(_inputs(config), "a file"))
        measured, histories = read_all(config)
        sessions = [results.read_bench(), *results.read_sessions()]
        _equal("bench.json, sessions", [bench.rounds for bench in sessions if bench.rounds > MOST], [], "rounds")
        compared = compare(measured, histories, sessions, config.compare, environment.read(), made_of(measured))
        report.write(compared, histories)
        return {path.as_posix(): _read(str(path)) for path in sorted(results.REPORTS.rglob("*")) if path.is_file()}


def _opened(file: Path, content: bytes) -> zipfile.ZipFile:
    """Return the ``content`` of ``file`` as an archive. Raises EvidenceError if it is not a zip file, or if unpacking
    it could do harm."""
    if len(content) > LARGEST or content.count(b"PK\1\2") > MOST:
        raise EvidenceError(f"{file} is not evidence: it has more than {LARGEST >> 20} MiB or {MOST} files.")
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, struct.error) as error:
        raise EvidenceError(f"{file} is not evidence: it is not a zip ({error}).") from None
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    size = sum(entry.file_size for entry in entries)
    for entry in entries:
        wrong = {
            "is not a name that a file of evidence can have": not NAME.fullmatch(entry.filename),
            "occurs twice": names.count(entry.filename) > 1,
            "is encrypted, or has another flag": entry.flag_bits,
            "is not a regular file": stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG),
            "is compressed": entry.compress_type != zipfile.ZIP_STORED,
            "would unpack to more bytes than the archive has": size > len(content),
        }
        if why := next((why for why, is_so in wrong.items() if is_so), None):
            raise EvidenceError(f"{file} is not evidence: {entry.filename!a} {why}.")
    return archive


def _zipped(members: Mapping[str, bytes]) -> bytes:
    """Return a zip archive of ``members``, sorted by name and with a fixed date, so that the same members always make
    the same bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in sorted(members.items()):
            archive.writestr(zipfile.ZipInfo(name), content)  # the defaults of ZipInfo: the year 1980, no compression
    return made.getvalue()


def _manifest(members: Mapping[str, bytes]) -> bytes:
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(members.items())}
    return (json.dumps({"schema": 1, "sha256": sums}, indent=2) + "\n").encode()


def _hold(said: Mapping[str, bytes], made: Mapping[str, bytes]) -> None:
    """Raise Contradiction at the first file and key in which ``said`` differs from ``made``."""
    _equal("the archive", dict.fromkeys(said, "a file"), dict.fromkeys(made, "a file"))
    order = ("reports/metrics/", "reports/comparison.json", "")  # first the files that name the variant and the key
    for name in sorted(made, key=lambda name: next(n for n, start in enumerate(order) if name.startswith(start))):
        if said[name] != made[name]:  # on a CPU whose logarithms round differently, the last digits may differ
            try:
                said_values, made_values = (_values(name, files[name].decode()) for files in (said, made))
            except (RecursionError, ValueError) as error:
                raise Contradiction(f"{name} cannot be read: {error}.") from None
            _equal(name, said_values, made_values)


def _values(name: str, text: str) -> Any:
    if name.endswith(".json"):
        values = json.loads(text)
        if json.dumps(values, indent=2) + "\n" != text:
            raise Contradiction(f"{name} is not in the form that `compare` writes: a key occurs twice, for example.")
        return values
    cells = "," if name.endswith(".csv") else "\n"
    return {f"line {number}": line.split(cells) for number, line in enumerate(text.split("\n"), 1)}


def _equal(name: str, said: Any, made: Any, key: str = "") -> None:
    """Raise Contradiction, naming the key, unless ``said`` equals ``made`` up to the rounding of figures."""
    if type(said) is type(made) and isinstance(said, dict | list):
        said_items, made_items = (
            values if isinstance(values, dict) else dict(enumerate(values)) for values in (said, made)
        )
        for inner in dict.fromkeys([*made_items, *said_items]):
            path = f"{key}[{inner}]" if isinstance(said, list) else f"{key}.{inner}".lstrip(".")
            _equal(name, said_items.get(inner, ...), made_items.get(inner, ...), path)
    elif said != made or type(said) is not type(made):
        with contextlib.suppress(ValueError):
            figures = type(said) is type(made) and (isinstance(made, float) or name.endswith(".csv"))
            if figures and math.isclose(float(said), float(made), rel_tol=1e-9, abs_tol=1e-12):
                return
        shown = ["missing" if value is ... else json.dumps(value)[:80] for value in (said, made)]
        raise Contradiction(f"{name}: {key} is {shown[0]}; recomputed from its sources, it is {shown[1]}.")


def _by_other_code(members: Mapping[str, bytes]) -> str:
    """Return a remark if the code here differs from the code that made the evidence; else an empty string."""
    with contextlib.suppress(Exception):
        if json.loads(members["environment.json"])["stages"]["compare"]["code"] != code.of_stage("compare"):
            return " (Other code or another Python made the evidence: check it with the commit in its bench.json.)"
    return ""
