"""The evidence file of a comparison: made, checked, forged, and malicious."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import cli
from pipeline.tools import evidence
from tests.conftest import ROOT
from tests.factories import DESCRIBED, ENVIRONMENT
from tests.jobs import MIRROR, SIGNATURE, write_sessions

Members = dict[str, bytes]
Checked = Callable[[bytes], tuple[int, str]]
Edit = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with contextlib.chdir(tmp_path_factory.mktemp("job")):
        write_sessions()
        return Path.cwd()


@pytest.fixture(scope="module")
def made(job: Path) -> bytes:
    with contextlib.chdir(job):
        evidence.write()
        return (job / "evidence.zip").read_bytes()


@pytest.fixture
def members(made: bytes, tmp_path: Path) -> Members:
    (tmp_path / "made.zip").write_bytes(made)
    with zipfile.ZipFile(tmp_path / "made.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Checked:
    """Return a function that writes its argument to a file, runs the command ``evidence check`` on the file, and
    returns the exit code and the output."""

    def run(content: bytes) -> tuple[int, str]:
        file = tmp_path / "evidence.zip"
        file.write_bytes(content)
        capsys.readouterr()
        code = cli.main(["evidence", "check", str(file)])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def zipped_anew(members: Members) -> bytes:
    """Zip the members with a matching manifest, as a forger would."""
    rest = {name: content for name, content in members.items() if name != "manifest.json"}
    return evidence._zipped(rest | {"manifest.json": evidence._manifest(rest)})


def test_what_is_made_holds(made: bytes, members: Members, checked: Checked) -> None:
    code, said = checked(made)
    assert code == 0
    assert f"commit {'c' * 40}, environment {ENVIRONMENT['hash'][:12]}, data set fashion_mnist" in said
    assert DESCRIBED.digest()[:12] in said
    assert f"Verified: the SHA-256 of {len(members) - 1} files" in said
    assert "2 sessions of the bench and the runs of 3 seeds of each of 3 variants" in said
    assert "Not verified" in said
    files = {"manifest.json", "params.yaml", "environment.json", "dvc.lock", "bench.json"}
    assert {name.partition("/")[0] for name in members} == files | {"data", "sessions", "results", "reports"}


def test_the_same_files_make_the_same_bytes(
    job: Path, made: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job)
    for file in job.rglob("*.json"):
        file.touch()
    assert cli.main(["evidence", str(tmp_path / "again.zip")]) == 0
    assert (tmp_path / "again.zip").read_bytes() == made


def test_checking_needs_neither_torch_nor_data(made: bytes, tmp_path: Path) -> None:
    (tmp_path / "some.zip").write_bytes(made)
    never = ["torch", "torchvision", "mlflow", "sklearn", "dvc", "PIL", "matplotlib", "pandas", "requests"]
    program = (
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nsys.modules.update(dict.fromkeys({never!r}))\n"
        "from pipeline.cli import main\nsys.exit(main(['evidence', 'check', 'some.zip']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_holds_no_secret(members: Members) -> None:
    assert b"mirror/raw" in members["params.yaml"]
    assert b"mirror/raw" in members["environment.json"]
    assert not [secret for secret in SIGNATURE for member in members.values() if secret.encode() in member]


# Writing the evidence.


def test_a_report_of_other_files_is_no_evidence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sessions()
    params = Path("params.yaml").read_text()
    Path("params.yaml").write_text(params.replace("throughput: 0.03", "throughput: 0.7"))
    assert cli.main(["evidence"]) == 2
    assert 'reports/metrics/ddp.json: verdict is "pays"; recomputed from its sources' in capsys.readouterr().err
    Path("params.yaml").write_text(params)
    Path("reports/comparison.md").unlink()
    assert cli.main(["evidence"]) == 2
    assert "reports/comparison.md cannot be read" in capsys.readouterr().err
    assert not list(here.glob("evidence.zip*"))


@pytest.mark.usefixtures("here")
def test_a_secret_that_sums_rest_on_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    write_sessions(model_options={"weights": MIRROR})
    assert cli.main(["evidence"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: bench.json holds an address with a user name, password or query")
    assert not [secret for secret in SIGNATURE if secret in said]


@pytest.mark.parametrize(
    "arguments",
    ["a.zip b.zip", "params.yaml/a.zip", "params.yaml/b/a.zip", ".", "results", "check no.zip", "check ."],
)
def test_what_cannot_be_is_named(
    arguments: str, job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(job)
    assert cli.main(["evidence", *arguments.split()]) == 2
    assert arguments.removeprefix("check ").removesuffix(" b.zip") in capsys.readouterr().err


def test_a_full_disk_is_no_difference(made: bytes, checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    assert checked(made)[0] == 2


# Changes to the evidence.


def test_a_changed_byte_is_found_and_named(members: Members, checked: Checked) -> None:
    """It is found even if the zip's own checksum was recomputed."""
    for name, content in members.items():
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        code, said = checked(evidence._zipped(members | {name: bytes(flipped)}))
        assert (code, name in said) == (1, True), said


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_changed_byte_anywhere_passes(data: st.DataObject, made: bytes, tmp_path: Path) -> None:
    place = data.draw(st.integers(0, len(made) - 1) | st.integers(len(made) - 4000, len(made) - 1))
    changed = data.draw(
        st.sampled_from([made[:place], made[:place] + made[place + 1 :], made[place:], made + made[place:]])
        | st.integers(1, 255).map(lambda bits: made[:place] + bytes([made[place] ^ bits]) + made[place + 1 :])
    )
    file = tmp_path / "changed.zip"
    file.write_bytes(changed)
    if changed == made:  # the whole file was drawn
        return
    with contextlib.suppress(evidence.EvidenceError):
        assert evidence.check(file) == 1


def put(path: str, value: Any) -> Edit:
    """Return an edit that puts ``value`` into a JSON file. If ``value`` is a function, it is called with the old value.
    ``path``: the keys, with spaces between them."""

    def edit(content: bytes) -> bytes:
        values = inside = json.loads(content)
        *outer, last = (int(key) if key.isdigit() else key for key in path.split())
        for key in outer:
            inside = inside[key]
        inside[last] = value(inside[last]) if callable(value) else value
        return (json.dumps(values, indent=content.index(b'"') - 2) + "\n").encode()  # indented as before

    return edit


def slower(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [sample | {"samples_per_second": (sample["samples_per_second"] or 0.0) / 2 or None} for sample in samples]


def faster(speed: float) -> float:
    return 1.001 * speed


def replaced(old: str, new: str) -> Edit:
    def edit(content: bytes) -> bytes:
        assert old.encode() in content
        return content.replace(old.encode(), new.encode(), 1)

    return edit


SPEED = "arms 1 samples 0 samples_per_second"  # of ddp
BENCH, SESSION, METRICS = "bench.json", "sessions/20261121T080000.json", "reports/metrics/ddp.json"
COMPARISON = "reports/comparison.json"
TWICE = replaced('"verdict": "trades",', '"verdict": "pays", "verdict": "trades",')
FORGED: dict[str, tuple[dict[str, Edit], str]] = {
    "a round": (
        {BENCH: put(SPEED, faster), COMPARISON: put(f"bench {SPEED}", faster)},
        r"reports/comparison\.json: variants\[1\]\.throughput\.parts\.2026\S+\.low is 1\.\d+; recomputed .* is 1\.",
    ),
    "rounds of all sessions": (
        {BENCH: put("arms 1 samples", slower), SESSION: put("arms 1 samples", slower)},
        r'reports/metrics/ddp\.json: verdict is "pays"; .* it is "costs"\.',
    ),
    "rounds of another session": ({SESSION: put("arms 1 samples", slower)}, r"reports/metrics/ddp\.json: "),
    "copied rounds": ({BENCH: put("arms 0 samples", lambda speed: 200 * speed)}, "rounds 1 and 13 are equal in every"),
    "a verdict": ({COMPARISON: put("variants 2 verdict", "pays")}, r'\[2\]\.verdict is "pays"; .* it is "trades"'),
    "an interval": ({COMPARISON: put("variants 1 throughput low", 1.5)}, r"\[1\]\.throughput\.low is 1\.5;"),
    "a figure": ({COMPARISON: put("noise_memory high", lambda high: 1.000001 * high)}, r"noise_memory\.high is"),
    "a key that stands twice": ({COMPARISON: TWICE}, "is not in the form that `compare` writes"),
    "a key more": ({COMPARISON: put("note", None)}, r"note is null; .* it is missing"),
    "a type": ({COMPARISON: put("parameter_count", 21840.0)}, r"parameter_count is 21840\.0; .* it is 21840\."),
    "a sentence": ({"reports/comparison.md": replaced("**trades**", "**pays**")}, r"comparison\.md: line \d+"),
    "a row": ({"reports/ratios.csv": replaced("ddp,throughput,1.", "ddp,throughput,2.")}, r"ratios\.csv: line 2\[2\]"),
    "a metric": ({METRICS: put("verdict", "costs")}, r"reports/metrics/ddp\.json: verdict"),
    "an evaluation": (
        {"results/ddp/history.csv": lambda content: re.sub(rb"0\.8\r\n", b"0.89\r\n", content)},
        r"results/ddp/history\.csv is not the history that was written together with results/ddp\.json",
    ),
    "a margin": ({"params.yaml": replaced("throughput: 0.03", "throughput: 0.02")}, r"json: margins\.throughput"),
    "a file that cannot be read": ({METRICS: lambda _: b"\xff{"}, r"reports/metrics/ddp\.json cannot be read"),
    "a lock too large": ({"dvc.lock": lambda _: b"#" * 2**21}, r"dvc\.lock cannot be read.*allowed: 1,048,576"),
    "a file without end": ({"results/ddp.json": lambda _: b"[" * 10**6}, r"results/ddp\.json"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forgery_with_fitting_sums_is_found(what: str, members: Members, checked: Checked) -> None:
    edits, named = FORGED[what]
    forged = members | {name: edit(members[name]) for name, edit in edits.items()}
    assert all(forged[name] != members[name] for name in edits)
    code, said = checked(zipped_anew(forged))
    assert code == 1
    assert re.search(named, said), said


@pytest.mark.parametrize("name", ["results/memory.json", "reports/loss.csv", "results/other.json", "reports/other.csv"])
def test_a_file_less_or_more_is_named(name: str, members: Members, checked: Checked) -> None:
    if members.pop(name, None) is None:
        members[name] = b"{}"
    code, said = checked(zipped_anew(members))
    assert (code, name in said) == (1, True), said


def test_what_another_processor_rounds_differently_is_no_difference(members: Members, checked: Checked) -> None:
    content = put("noise_memory high", lambda high: (1 + 1e-14) * high)(members["reports/comparison.json"])
    assert content != members["reports/comparison.json"]
    assert checked(zipped_anew(members | {"reports/comparison.json": content}))[0] == 0


def test_where_other_code_compares_it_says_so(members: Members, checked: Checked) -> None:
    older = put("stages compare code pipeline/results/__init__.py", "0" * 16)
    changed = {"environment.json": older(members["environment.json"]), "reports/comparison.md": b""}
    code, said = checked(zipped_anew(members | changed))
    assert (code, "check it with the commit" in said) == (1, True)
    assert "the commit" not in checked(zipped_anew(members | {"reports/comparison.md": b""}))[1]


# Archives that would do harm.


def test_nothing_in_it_speaks_to_the_terminal(members: Members, checked: Checked) -> None:
    inputs = {name: content for name, content in members.items() if not re.match("reports/|manifest", name)}
    inputs["bench.json"] = put("commit", "\x1b]0;mine\x07")(inputs["bench.json"])
    code, said = checked(zipped_anew(inputs | evidence._compared(inputs)))  # as somebody who has all files could
    assert (code, r"commit \x1b]0;mine\x07," in said) == (0, True)


def entry(name: str = "bench.json", kind: int = 0, **fields: Any) -> zipfile.ZipInfo:
    made = zipfile.ZipInfo(name)
    made.external_attr = (kind | 0o600) << 16
    for field, value in fields.items():
        setattr(made, field, value)
    return made


HARMFUL = {
    "an absolute path": [entry("/tmp/bench.json")],
    "a path that leads out": [entry("../bench.json")],
    "one that leads out further on": [entry("results/../../history.csv")],
    "code": [entry("numpy.py")],
    "words for the terminal": [entry("results/\x1b]0;x\x07.json")],
    "two of one name": [entry(), entry()],
    "a link": [entry(kind=stat.S_IFLNK)],
    "a folder": [entry("results/")],
    "something compressed": [entry(compress_type=zipfile.ZIP_DEFLATED)],
}


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make an empty directory the current one; assert that the test leaves nothing in it."""
    (tmp_path / "here" / "temporary").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "here" / "temporary"))
    yield
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["evidence.zip", "here", "temporary"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("what", HARMFUL)
@pytest.mark.usefixtures("nowhere")
def test_what_would_do_harm_is_refused_by_name(what: str, tmp_path: Path, checked: Checked) -> None:
    with zipfile.ZipFile(tmp_path / "evidence.zip", "w") as archive:
        for planted in HARMFUL[what]:
            archive.writestr(planted, b"{}")
    code, said = checked((tmp_path / "evidence.zip").read_bytes())
    assert (code, ascii(HARMFUL[what][0].filename) in said) == (2, True), said


@pytest.mark.usefixtures("nowhere")
def test_a_file_that_lies_about_itself_is_found(
    made: bytes, tmp_path: Path, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evidence.zip").write_bytes(made)
    central = made.index(b"PK\1\2")
    encrypted = made[: central + 8] + b"\1" + made[central + 9 :]
    code, said = checked(encrypted)
    assert (code, "is encrypted" in said) == (2, True)
    larger = made[: central + 20] + 2 * (2**30).to_bytes(4, "little") + made[central + 28 :]
    assert "would unpack to more" in checked(larger)[1]
    for broken in (b"", b"PK\5\6", made[:-1], made[central:]):
        assert checked(broken)[0] == 2
    assert "2000 files" in checked(b"PK\1\2" * 3_000)[1]
    monkeypatch.setattr(evidence, "LARGEST", 2**20)
    assert "1 MiB" in checked(made + bytes(2**20))[1]
