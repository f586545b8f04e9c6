"""Starts the process that measures a checkout's variants, and sends it requests. ``arm.serve`` runs in that process."""

from __future__ import annotations

import json
import math
import select
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, Self

from tqdm import tqdm

from pipeline.errors import PipelineError, first_line, printable
from pipeline.results import Arm, RunConditions, SameJob, Window

LAST_WORDS_SECONDS = 2.0
"""Longest wait for an ended server's last output. The wait is limited, because the server's arms may keep the pipe
open."""


class BenchError(PipelineError):
    """A checkout or a variant could not be measured. The message says why."""

    def __init__(self, message: str, arm: str | None = None) -> None:
        super().__init__(message)
        self.arm = arm
        """The arm that could not be measured; None if it is none in particular."""

    @property
    def reason(self) -> str:
        """The first line of the message, without the arm's name."""
        return first_line(self).removeprefix(f"{self.arm} ").rstrip(".:")


class ServerLost(BenchError):
    """A server has ended, and must be started again before it can answer anything."""


class OutOfTime(ServerLost):
    """A server did not answer before its ``deadline``, or within its ``limit``."""


class Server(AbstractContextManager["Server"]):
    """A ``python`` process that measures the variants of the checkout ``root`` with that checkout's own code."""

    def __init__(self, root: Path = Path(), python: Path = Path(sys.executable)) -> None:
        self.root, self._python = root, python
        self.deadline = math.inf
        """By ``time.monotonic``: an answer that comes later raises OutOfTime."""
        self.limit = math.inf
        """The seconds that an answer may take before it raises OutOfTime."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [self._python, "-m", "pipeline", "arms"],
            cwd=self.root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._listener = threading.Thread(target=_passed_on, args=(self._process.stderr,), daemon=True)
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()
        self._listener.join(LAST_WORDS_SECONDS)

    def restart(self) -> None:
        """End the process and whatever it measures, and start another one."""
        self.__exit__()
        self.__enter__()

    def describe(self) -> dict[str, Any]:
        """Return sections of the checkout's params.yaml, the environment's hash, the data set, the baseline's device,
        and the requests that the checkout's code answers."""
        return self._ask("describe")

    def plan(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        """Return the plan that the checkout's code makes for the variant ``name`` with the settings ``values``."""
        return self._ask("plan", name=name, values=values)

    def open(self, name: str, plan: dict[str, Any], steps: int, *, ledgers: bool = False, memory: bool = True) -> None:
        """Start an arm from its plan in fresh processes and warm it up. Its turns will have ``steps`` steps in all.

        Without ``memory``, the arm need not measure its memory, if that takes steps of its own. Only a server with the
        request "open_for_speed" can leave this out."""
        self._ask("open" if memory else "open_for_speed", name=name, plan=plan, steps=steps, ledgers=ledgers)

    @cached_property
    def requests(self) -> Collection[str]:
        """The requests that the checkout's code answers."""
        return frozenset(self.describe()["requests"])

    def turn(self, name: str, steps: int) -> None:
        """Let an open arm take ``steps`` steps."""
        self._ask("turn", name=name, steps=steps)

    def close(self, name: str) -> dict[str, Any]:
        """End an open arm and return its ``arm.Measured`` as plain values."""
        return self._ask("close", name=name)

    def same_jobs(self, base: str, control: str) -> dict[str, SameJob]:
        """Return whether the arms that were measured so far compute what ``base`` computes: arm -> its job beside the
        base's; nothing if the checkout's code cannot tell. It prints what a person must know of them."""
        if "same_jobs" not in self.requests:
            return {}
        answer = self._ask("same_jobs", base=base, control=control)
        return {name: SameJob.model_validate(values) for name, values in answer.items()}

    def _ask(self, do: str, **request: Any) -> dict[str, Any]:
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        name: str | None = request.get("name")
        about = f"{name} cannot be measured: " if name else ""
        try:
            questions.write(json.dumps({"do": do, **request}) + "\n")
            questions.flush()
            left = max(0.0, min(self.deadline - time.monotonic(), self.limit))
            if not select.select([answers], [], [], None if left == math.inf else left)[0]:
                raise OutOfTime(f"{about}it took too long to {do}", name)
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            self._listener.join(LAST_WORDS_SECONDS)
            where = self.root.resolve()
            raise ServerLost(f"{about}the process that measures {where} ended ({status}); its output is above.", name)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{about}{answer['error'].removeprefix(about)}", name)
        return answer


def _passed_on(words: IO[str]) -> None:
    """Print the output of a server and its arms, such as a library's warnings, above the progress bar."""
    with words:
        for line in words:
            tqdm.write(printable(line.rstrip("\n")), file=sys.stderr)


@dataclass(frozen=True)
class ArmSpec:
    """One arm to measure: a variant's plan, and the server that made the plan and measures the arm."""

    name: str
    role: Literal["variant", "aa_control", "with", "without"]
    variant: str
    technique: str | None
    server: Server
    plan: dict[str, Any]

    @classmethod
    def of_variant(cls, name: str, server: Server, plan: dict[str, Any], label: str = "") -> ArmSpec:
        """Return the arm of the variant ``name``, with this name or another ``label``."""
        return cls(label or name, "variant", name, None, server, plan)

    def control(self) -> ArmSpec:
        """Return the second arm of the same variant, the A/A control."""
        return replace(self, name=f"{self.name}, A/A control", role="aa_control")

    def measured(self, samples: Sequence[Window], conditions: RunConditions, *, settled: bool = False) -> Arm:
        """Return the arm with these samples."""
        return Arm(
            name=self.name,
            role=self.role,
            variant=self.variant,
            technique=self.technique,
            samples=tuple(samples),
            settled=settled,
            **dict(conditions),
        )
