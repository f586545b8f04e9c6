from __future__ import annotations

import gc
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import interpreter

ROOT = Path(__file__).parent.parent


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


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
with importing():
    collecting = gc.isenabled()
    brought = []
    brought.append(brought)
print(collecting, gc.isenabled(), any(each is brought for each in gc.get_objects()))
"""
    assert python(code).stdout.split() == ["False", "True", "False"]


def test_collecting_goes_on_after_an_import_that_failed() -> None:
    with pytest.raises(ModuleNotFoundError), interpreter.importing():
        import nowhere_to_be_found  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()


ENDS = {
    "return 3": 3,
    "sys.exit()": 0,
    "sys.exit(143)": 143,
    "sys.exit('why')": 1,
    "raise ValueError('why')": 1,
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
