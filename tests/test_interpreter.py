from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline import interpreter

ROOT = Path(__file__).parent.parent


def python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([sys.executable, "-c", code], text=True, cwd=ROOT, env=buffered, **options)


def test_a_process_knows_its_age_whatever_the_time_of_day() -> None:
    before = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", "from pipeline.interpreter import age_seconds; input(); print(age_seconds())"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    started = time.monotonic()
    time.sleep(1)
    asked = time.monotonic()
    age = float(process.communicate("\n")[0])
    assert asked - started - 0.02 <= age <= time.monotonic() - before + 0.02


def test_nobody_looks_for_garbage_during_imports_nor_at_what_they_brought() -> None:
    code = """
import gc
from pipeline.interpreter import importing
before = gc.get_threshold()
with importing():
    print(gc.get_threshold()[0])
    import wave
    brought = []
    brought.append(brought)
print(gc.get_threshold() == before, any(each is brought for each in gc.get_objects()))
"""
    assert python(code).stdout.split() == ["0", "True", "False"]


def test_garbage_of_earlier_work_is_still_found_where_nothing_new_was_imported() -> None:
    class Work:
        def __init__(self) -> None:
            self.own = self

    work = weakref.ref(Work())
    with interpreter.importing():
        import gc
    gc.collect()
    assert work() is None


def test_who_switched_the_collector_off_finds_it_off() -> None:
    code = """
import gc
from pipeline.interpreter import importing
with importing():
    gc.disable()  # as a user's module can
print(gc.isenabled())
"""
    assert python(code).stdout == "False\n"


def test_collecting_goes_on_after_an_import_that_failed() -> None:
    before = gc.get_threshold()
    with pytest.raises(ModuleNotFoundError), interpreter.importing():
        import nowhere_to_be_found  # type: ignore[import-not-found]  # noqa: F401
    assert gc.get_threshold() == before


ENDS = {
    "return 3": 3,
    "sys.exit()": 0,
    "sys.exit(143)": 143,
    "sys.exit('why')": 1,
    "raise ValueError('why')": 1,
    "raise KeyboardInterrupt('why')": 130,
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_with_its_code_and_words_and_what_it_promised_but_is_not_taken_apart(end: str) -> None:
    done = python(f"""
import atexit, sys, threading, time
from pipeline import interpreter

class Module:
    def __del__(self):
        print("taken apart", flush=True)

def thread():
    time.sleep(0.3)
    print("thread")

def main():
    global kept
    kept = Module()
    atexit.register(print, "promised")
    threading.Thread(target=thread).start()
    print("said")
    {end}

interpreter.run(main)
""")
    assert (done.returncode, done.stdout.split()) == (ENDS[end], ["said", "thread", "promised"])
    assert ("why" in done.stderr) == ("why" in end)


def test_what_compiled_code_has_printed_is_not_lost() -> None:
    code = "import ctypes; from pipeline import interpreter; interpreter.run(lambda: ctypes.CDLL(None).puts(b'C') * 0)"
    assert python(code).stdout == "C\n"


LEAVES_FILES_OPEN = """
from pipeline import interpreter

def main():
    global text, binary
    with interpreter.importing():
        import wave
        text, binary = open({0!r}, "w"), open({1!r}, "wb")
    text.write("text")
    binary.write(b"binary")
    return 0

interpreter.run(main)
"""


def test_files_that_somebody_left_open_are_written_to_their_ends(tmp_path: Path) -> None:
    files = tmp_path / "text", tmp_path / "binary"
    assert python(LEAVES_FILES_OPEN.format(*map(str, files))).returncode == 0
    assert [file.read_text() for file in files] == ["text", "binary"]


@pytest.mark.parametrize(("place", "code"), [("/dev/full", 120), (None, 3)])
def test_where_nothing_can_be_printed_python_says_so_as_ever(place: str | None, code: int) -> None:
    program = "from pipeline import interpreter; interpreter.run(lambda: print('said') or 3)"
    with open(place or os.devnull, "w") as out:  # noqa: PTH123
        closed = None if place else partial(os.close, 1)
        done = python(program, stdout=out, preexec_fn=closed)
    assert done.returncode == code
    assert "atexit" not in done.stderr
    assert ("No space left" in done.stderr) == (place is not None)


@pytest.mark.parametrize(
    ("said", "spin"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_spin_shortly_unless_the_user_says_what_they_do(
    said: dict[str, str], spin: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that whatever happens is undone
        monkeypatch.delenv(name)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    interpreter.let_threads_sleep()
    assert os.environ.get("GOMP_SPINCOUNT") == spin
