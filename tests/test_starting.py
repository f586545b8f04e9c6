from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from pipeline import processes

ROOT = Path(__file__).parent.parent


def test_a_process_knows_its_age_whatever_the_time_of_day() -> None:
    before = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", "from pipeline.processes import age_seconds; input(); print(age_seconds())"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    started = time.monotonic()
    time.sleep(0.2)
    asked = time.monotonic()
    age = float(process.communicate("\n")[0])
    assert asked - started - 0.02 <= age <= time.monotonic() - before + 0.02


def test_nobody_looks_for_garbage_during_imports_nor_at_what_they_brought() -> None:
    code = """
import gc
from pipeline.processes import importing
before = gc.get_threshold()
with importing():
    print(gc.get_threshold()[0])
    import wave
    brought = []
    brought.append(brought)
    gc.disable()  # as a user's module can
print(gc.get_threshold() == before, gc.isenabled(), any(each is brought for each in gc.get_objects()))
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).split() == [
        "0",
        "True",
        "False",
        "False",
    ]


def test_garbage_of_earlier_work_is_still_found_where_nothing_new_was_imported() -> None:
    class Work:
        def __init__(self) -> None:
            self.own = self

    work = weakref.ref(Work())
    with processes.importing():
        import gc
    gc.collect()
    assert work() is None


def test_collecting_goes_on_after_an_import_that_failed() -> None:
    before = gc.get_threshold()
    with pytest.raises(ModuleNotFoundError), processes.importing():
        import nowhere_to_be_found  # type: ignore[import-not-found]  # noqa: F401
    assert gc.get_threshold() == before


@pytest.mark.parametrize(
    ("said", "spin"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_spin_shortly_unless_the_user_says_what_they_do(
    said: dict[str, str], spin: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores the variable after the test
        monkeypatch.delenv(name)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    processes.let_threads_sleep()
    assert os.environ.get("GOMP_SPINCOUNT") == spin
