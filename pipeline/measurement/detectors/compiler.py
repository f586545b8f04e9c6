"""Detect compilation by torch.compile during measured windows."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from pipeline.measurement.detectors.base import Detector, Rejection


class Recompilation(Detector):
    """Detects that torch.compile compiles after the warm-up."""

    def __init__(self) -> None:
        self._before = 0.0
        self.seconds = 0.0
        """Compile time in the measured windows."""

    def open(self) -> None:
        self._before = _compile_seconds()

    def close(self, *, measured: bool) -> None:
        if measured:
            now = _compile_seconds()
            self.seconds += now if now < self._before else now - self._before  # torch._dynamo.reset() resets the total

    def rejections(self) -> Iterator[Rejection]:
        if self.seconds:
            yield Rejection(
                f"torch.compile compiled for {self.seconds:.2f} s after the warm-up; raise train.warmup_steps, or set "
                "TORCH_LOGS=recompiles to find what changes from step to step"
            )


def _compile_seconds() -> float:
    """Return the seconds that this process has spent compiling forward and backward passes.

    The compiler is not imported here. If nothing else has imported it, the time is 0.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return float(dynamo.calculate_time_spent()["total_wall_time"]) if dynamo else 0.0
