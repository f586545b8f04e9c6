"""If the lock files differ, each side of the gate runs with its own packages."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pipeline.gate import copies
from pipeline.gate.decision import GateError
from tests.factories import write_wheel


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Make the folders of base and head, and a folder from which pip takes packages instead of from the network."""
    monkeypatch.chdir(tmp_path)
    for name in ("base", "head", "wheels"):
        Path(name).mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "base", tmp_path / "head"


def write_locks(sides: tuple[Path, Path], *texts: str | None) -> None:
    for root, text in zip(sides, texts, strict=True):
        if text is not None:
            (root / copies.LOCK).write_text(text, encoding="utf-8")


def numbers(version: str) -> str:
    """Write a wheel of the package ``numbers_of_a_test``; return a lock file that names it."""
    return write_wheel(Path("wheels"), "numbers_of_a_test", version, f"found = {version}\n")


INSTALLED = f"pytest=={pytest.__version__} \\\n    --hash=sha256:0\n    # via\n"


@pytest.mark.parametrize("locks", [("numbers==1.0\n", "numbers==1.0\n"), ("numbers==1.0\n", None), (None, None)])
def test_equal_lock_files_run_under_this_python(sides: tuple[Path, Path], locks: tuple[str | None, ...]) -> None:
    write_locks(sides, *locks)
    assert copies.pythons(*sides) == (Path(sys.executable),) * 2


def test_a_side_gets_a_python_with_its_packages(sides: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    write_locks(sides, numbers("1.5"), INSTALLED)
    python, this = copies.pythons(*sides)
    assert this == Path(sys.executable)
    told = subprocess.run(
        [python, "-c", "import numbers_of_a_test; print(numbers_of_a_test.found)"], capture_output=True, text=True
    )
    assert told.stdout == "1.5\n"
    monkeypatch.delenv("PIP_FIND_LINKS")  # from here on, pip can install nothing
    assert copies.pythons(*sides) == (python, this)
    (python.parents[1] / "installed").unlink()  # an interrupted installation has no such stamp
    with pytest.raises(GateError, match=r"base/requirements\.lock cannot be installed"):
        copies.pythons(*sides)


def test_packages_that_build_others_are_installed_first(sides: tuple[Path, Path]) -> None:
    builder = write_wheel(Path("wheels"), "builder_of_a_test", "1.0", "")
    (sides[0] / copies.BUILD_LOCK).write_text(builder, encoding="utf-8")
    write_locks(sides, numbers("1.5"), INSTALLED)
    python, _ = copies.pythons(*sides)
    assert subprocess.run([python, "-c", "import builder_of_a_test, numbers_of_a_test"]).returncode == 0


def test_another_version_than_the_installed_one_is_not_installed(sides: tuple[Path, Path]) -> None:
    write_locks(sides, "pytest==0.1\n", INSTALLED)
    with pytest.raises(GateError, match="cannot be installed"):
        copies.pythons(*sides)


def test_a_side_has_no_package_of_the_other(sides: tuple[Path, Path]) -> None:
    """Otherwise a head would pass although its lock file lacks a package that its code needs."""
    write_locks(sides, INSTALLED, numbers("1.0"))
    base, head = copies.pythons(*sides)
    assert (base, head != base) == (Path(sys.executable), True)
    import_pytest = subprocess.run([head, "-c", "import pytest"], capture_output=True)
    assert import_pytest.returncode == 1
    write_locks(
        sides, INSTALLED, f"pluggy=={metadata.version('pluggy')}\n"
    )  # this Python has it, but the base does not name it
    with pytest.raises(GateError, match=r"base/requirements\.lock cannot be installed"):
        copies.pythons(*sides)
    assert len(list(copies.CACHE.iterdir())) == 1, "the failed installation left files behind"


def test_those_used_last_are_kept(sides: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "KEPT", 1)
    found = []
    for version in ("1.0", "2.0"):
        write_locks(sides, numbers(version), INSTALLED)
        found.append(copies.pythons(*sides)[0])
    assert [python.exists() for python in found] == [False, True]


def test_a_lock_file_that_cannot_be_read_is_named(sides: tuple[Path, Path]) -> None:
    write_locks(sides, INSTALLED, "not a package\n")
    with pytest.raises(GateError, match=r"^.*head/requirements\.lock: "):
        copies.pythons(*sides)


def test_what_differs_is_named(sides: tuple[Path, Path]) -> None:
    write_locks(sides, "a==1\nb==1\nc==1 ; sys_platform == 'nowhere'\ntorch==1\n", "b==2\nd==1\ntorch==2\n")
    for root in sides:
        (root / "Dockerfile").write_text(f"FROM {root.name}", encoding="utf-8")
    (packages,), (system,) = copies.differing_packages(*sides), copies.differing_systems(*sides)
    assert packages.endswith(": torch ==1 -> ==2, a ==1 -> none, b ==1 -> ==2, d none -> ==1.")
    assert system.startswith("The Dockerfiles differ")
    assert copies.differing_packages(sides[0], sides[0]) == copies.differing_systems(sides[0], sides[0]) == []
