"""Any file, damaged or not, is read or named in an error, with limited time and memory and without a traceback."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import numpy as safetensors

from pipeline import environment, params, results
from pipeline.comparison import consistency
from pipeline.data import LISTING as LISTING_FILE
from pipeline.data import datasets, prepared, sources
from pipeline.errors import PipelineError
from pipeline.tools import evidence
from pipeline.tracking import comparisons, promoting
from pipeline.training import checkpoints
from tests.commands import bounded
from tests.factories import (
    DESCRIBED,
    ENVIRONMENT,
    SHIPPED,
    make_bench,
    make_comparison,
    make_history,
    make_params,
    make_result,
    parquet_table,
    picture,
    places,
    saved,
)
from tests.jobs import write_sessions

Read = Callable[[Path], object]


class Parser(NamedTuple):
    file: str
    """The path of the file that the parser reads, relative to a directory of its own."""
    valid: bytes | Callable[[], bytes]
    read: Read
    """The function that reads the file; its argument is the directory."""


def of_file(name: str, valid: bytes | Callable[[], bytes], read: Read) -> Parser:
    return Parser(name, valid, lambda folder: read(folder / name))


def content(parser: Parser) -> bytes:
    return parser.valid if isinstance(parser.valid, bytes) else parser.valid()


def decode(folder: Path) -> None:
    content = (folder / "picture").read_bytes()
    image = datasets._Image("picture", hashlib.sha256(content).hexdigest(), 0)
    datasets._decode_chunk(folder, [image], (8, 8), None)


def of_arrays(kind: str, valid: bytes) -> Parser:
    """Return a parser that fetches the user's arrays in one file and decodes all of them."""

    def decode_all(folder: Path) -> None:
        fetch = {"dataset": "arrays", "arrays": str(folder / f"own{kind}")}
        config = params.parse({"fetch": fetch, "variants": {"baseline": {}}})
        sources.fetch(config.fetch, folder)
        decoded = datasets.decode(config, folder)
        for _ in (*decoded.train, *decoded.test):
            pass

    return Parser(f"own{kind}", valid, decode_all)


def of(values: Any) -> bytes:
    return json.dumps(values).encode()


RESULT = make_result("baseline")
PARAMS = make_params([RESULT])
WEIGHTS = saved(lambda out: torch.save({"identity": "job", "weights": torch.arange(9.0)}, out))
GATE = {
    "outcome": "passed",
    "against": "main",
    "head": {"commit": "c"},
    "base": {"commit": None},
    "dataset": {"sha256": "d"},
    "variants": [{"variant": "baseline"}],
}


def history(folder: Path) -> None:
    (folder / "baseline.json").write_bytes(RESULT.to_json().encode())
    consistency.read_all(PARAMS, folder)


def written_history() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        results.write_history(make_history(), Path(folder, "history.csv"))
        return Path(folder, "history.csv").read_bytes()


@functools.cache
def written_evidence() -> bytes:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(None):
        write_sessions()
        evidence.write()
        return evidence.FILE.read_bytes()


ARRAYS = {"inputs": np.arange(60.0).reshape(20, 3), "targets": np.arange(20) % 3}
LISTING = b"path,size_bytes,sha256\ntrain/a/1.png,3,00\ntest/a/1.png,3,11\n"
COMPARISON = make_comparison(bench=make_bench(rounds=6)).to_json().encode()

PARSERS = {
    "params": of_file("params.yaml", yaml.safe_dump(SHIPPED).encode(), params.load),
    "environment": of_file("environment.json", of(ENVIRONMENT), environment.read),
    "npy": of_file(
        "images.npy",
        saved(lambda out: np.save(out, np.zeros((3, 1, 2, 2), np.uint8))),
        lambda path: prepared._open(path, "uint8 [1, 2, 2]", 3),
    ),
    "dataset.json": Parser("dataset.json", DESCRIBED.model_dump_json().encode(), prepared.described),
    "listing": of_file("files.csv", LISTING, lambda path: datasets._read_listing(path, 0.2)),
    "npz": of_arrays(".npz", saved(lambda out: np.savez_compressed(out, **ARRAYS))),  # type: ignore[arg-type]
    "safetensors": of_arrays(".safetensors", safetensors.save(ARRAYS)),
    "parquet": of_arrays(".parquet", parquet_table(ARRAYS)),
    **{kind: Parser("picture", picture(kind), decode) for kind in datasets.IMAGE_FORMATS},
    "result": of_file("baseline.json", RESULT.to_json().encode(), lambda path: results.read(path, PARAMS)),
    "history": Parser("baseline/history.csv", written_history(), history),
    "bench": of_file("bench.json", make_bench(rounds=2).to_json().encode(), results.read_bench),
    "comparison": Parser("reports/comparison.json", COMPARISON, comparisons.read_comparison),
    "checkpoint": of_file("seed-0.pt", WEIGHTS, lambda path: checkpoints.load(path, "job")),
    "evidence": of_file("evidence.zip", written_evidence, evidence.check),
    "gate": Parser("reports/gate.json", of(GATE), lambda folder: promoting._passed(folder, "c")),
}

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**20, 10**40) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """Draw random bytes, or ``valid`` cut short, with bytes changed, or with another value in its JSON. In a ZIP
    archive, one of the files may be damaged in one of these ways, with a manifest whose checksums fit."""
    how = draw(st.sampled_from(["junk", "cut", "bytes", "bytes", "value", "value"]))
    if how == "junk":
        return draw(st.binary() | st.text().map(str.encode))
    if how == "cut":
        return valid[: draw(st.integers(0, len(valid)))]
    if how == "value" and valid.startswith(b"{"):
        values = {"root": json.loads(valid)}
        *path, last = draw(st.sampled_from(places(values)[1:]))
        inside: Any = values
        for part in path:
            inside = inside[part]
        inside[last] = draw(VALUES)
        return json.dumps(values["root"]).encode()
    if how == "value" and valid.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(valid)) as opened:
            members = {name: opened.read(name) for name in opened.namelist()}
        name = draw(st.sampled_from(sorted(members)))
        members[name] = draw(damaged(members[name]))
        if members.pop(evidence.MANIFEST, None) and name != evidence.MANIFEST:
            members[evidence.MANIFEST] = evidence._manifest(members)
        return evidence._zipped(members)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(valid)))
        put = draw(st.binary(max_size=8) | st.sampled_from([b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"9" * 20]))
        valid = valid[:start] + put + valid[start + draw(st.sampled_from([len(put), 0, 1])) :]
    return valid


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Pillow, numpy and torch warn of damaged files
@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=max(300, settings().max_examples), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_file_is_read_or_named(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    parser, folder = PARSERS[name], tmp_path_factory.getbasetemp() / name
    path = folder / parser.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.draw(damaged(content(parser))))
    before = {path for path in folder.rglob("*") if path.is_file()}
    with bounded(), contextlib.suppress(PipelineError):
        parser.read(folder)
    left = {folder / "raw", folder / "baseline.json", folder / "arrays" / LISTING_FILE}
    assert {path for path in folder.rglob("*") if path.is_file()} - before <= left


def test_the_docs_state_the_number_of_kinds_of_file() -> None:
    page = (Path(__file__).parent.parent / "docs" / "how-we-know" / "security.md").read_text(encoding="utf-8")
    assert f"{len(PARSERS)} kinds of file are tried" in " ".join(page.split())


@pytest.mark.parametrize("name", PARSERS)
def test_an_undamaged_file_is_read(name: str, tmp_path: Path) -> None:
    parser = PARSERS[name]
    (tmp_path / parser.file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / parser.file).write_bytes(content(parser))
    parser.read(tmp_path)
