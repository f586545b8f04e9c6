"""Record the state of the machine while a bench runs. The bench's figures do not depend on this record."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import psutil

from pipeline.results import Session

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def begin() -> Callable[[], Session]:
    """Start a session. Return a function that describes the session from its start to the call of the function."""
    start, load, times = datetime.now(UTC), os.getloadavg()[0], psutil.cpu_times()
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else None

    def session_so_far() -> Session:
        spent = {name: now - getattr(times, name) for name, now in psutil.cpu_times()._asdict().items()}
        # The user times already include the times of guests.
        total = sum(seconds for name, seconds in spent.items() if not name.startswith("guest"))
        return Session(
            start_utc=start.isoformat(timespec="seconds"),
            boot_id=BOOT_ID.read_text(encoding="ascii").strip() if BOOT_ID.exists() else None,
            uptime_seconds=uptime,
            load_average=load,
            steal_fraction=spent["steal"] / total if "steal" in spent and total > 0 else None,
            end_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    return session_so_far
