"""Measure the energy of a run's own devices with their counters: NVML for a GPU, RAPL for a CPU's packages.

The figure is the energy of the devices, not of the whole machine: fans, power supplies and, with a GPU, the host are
not included. Idle power is included, and so is the energy of any other work on the devices during the windows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pynvml
import torch

from pipeline.measurement.windows import handle_of
from pipeline.results.rejections import Rejection, rejection

POWERCAP = Path("/sys/class/powercap")
SHORTEST_SECONDS = {"cuda": 1.0, "cpu": 0.05}
"""Smallest accepted mean length of a measured window. NVML updates its counter every 20 to 100 ms, RAPL every ms."""

Read = tuple[dict[str, float], Rejection | None]
"""Joules by counter name, and the reason if the joules are unknown. All processes of a host use the same names."""


class _Counter(NamedTuple):
    read: Callable[[], int]
    """Returns the counts so far."""
    joules: float
    """Joules per count."""
    range: int
    """The counter wraps to 0 after this many counts."""


class Energy:
    """Reads the energy counters of a process's own ``devices`` at the start and end of each window.

    Without devices, no counter is read. ``remedy``: advice on how to make windows longer, for the message about windows
    that are too short.
    """

    def __init__(self, devices: Sequence[torch.device] = (), remedy: str = "") -> None:
        self._kind, self._remedy = devices[0].type if devices else "cpu", remedy
        self._counters: dict[str, _Counter] = {}
        self._why_not: Rejection | None = None
        self._before: dict[str, int] = {}
        self._opened = self._seconds = 0.0
        self._windows = 0
        with self._asking():
            if devices:
                self._counters = dict(map(_counter_of_gpu, devices)) if self._kind == "cuda" else _of_packages()
        self._joules = dict.fromkeys(self._counters, 0.0)

    def open(self) -> None:
        """Start a window."""
        with self._asking():
            self._before = {name: counter.read() for name, counter in self._counters.items()}
        self._opened = time.monotonic()

    def close(self, *, measured: bool) -> None:
        """End the window. The joules of measured windows add up; other windows are ignored."""
        seconds = time.monotonic() - self._opened
        if not measured or self._why_not:
            return
        self._windows, self._seconds = self._windows + 1, self._seconds + seconds
        with self._asking():
            for name, counter in self._counters.items():
                counts = (counter.read() - self._before[name]) % counter.range
                self._joules[name] += counts * counter.joules

    def read(self) -> Read:
        """Return the joules of the measured windows so far, and the reason if they are unknown."""
        return self._joules, self._why_not or self._doubt()

    def _doubt(self) -> Rejection | None:
        mean, shortest = self._seconds / max(1, self._windows), SHORTEST_SECONDS[self._kind]
        if not self._counters:
            return rejection("no_energy_counter", place=str(POWERCAP))
        if mean < shortest:
            times = {"shortest_seconds": shortest, "mean_seconds": mean}
            return rejection("energy_windows_short", **times, remedy=self._remedy)
        return None if all(self._joules.values()) else rejection("energy_stands")

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pynvml.NVMLError) as error:
            self._why_not = rejection("energy_unreadable", error=str(error)[:1000])


def per_sample(ranks: Sequence[Read], samples: int) -> dict[str, Any]:
    """Return ``joules_per_sample`` (all ranks' joules divided by all their ``samples``) or ``why_no_energy``.

    A counter that several ranks read, because they share a CPU or GPU, counts once.
    """
    if why_not := next((why_not for _, why_not in ranks if why_not), None):
        return {"why_no_energy": why_not}
    joules: dict[str, float] = {}
    for name, read in (item for counters, _ in ranks for item in counters.items()):
        joules[name] = max(read, joules.get(name, 0.0))
    return {"joules_per_sample": sum(joules.values()) / samples}


def _counter_of_gpu(device: torch.device) -> tuple[str, _Counter]:
    """Return a GPU's UUID and its counter of millijoules since the driver was loaded.

    Raises NVMLError, for example on GPUs older than Volta.
    """
    counter = _Counter(partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle_of(device)), 1e-3, 2**64)
    return str(torch.cuda.get_device_properties(device).uuid), counter


def _of_packages() -> dict[str, _Counter]:
    """Return the counters of whole packages, in microjoules. A package's counter includes its subzones, such as cores.

    Raises OSError. Source: Linux, Documentation/power/powercap/powercap.rst; AMD's packages have the same names.
    """
    zones = sorted(POWERCAP.glob("intel-rapl:*"))
    packages = (zone for zone in zones if (zone / "name").read_text(encoding="ascii").startswith("package"))
    return {
        zone.name: _Counter(partial(_number, zone / "energy_uj"), 1e-6, _number(zone / "max_energy_range_uj") + 1)
        for zone in packages
    }


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))
