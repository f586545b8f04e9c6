"""Prepare a directory in which the training and measuring stages can run, and small disks that can be full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import environment
from pipeline.data import packing, sources
from pipeline.params import Config, parse
from tests.conftest import ROOT

RAW, PREPARED = Path("data/raw"), Path("data/prepared")


def furnish(config: Config) -> None:
    """Write the environment's fingerprint and the data that ``config`` asks for into the current directory."""
    environment.write()
    sources.fetch(config.fetch, RAW)
    packing.prepare(config, RAW, PREPARED)


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]) -> Config:
    """Make ``folder`` the current directory, write ``params`` to its params.yaml and furnish it; return the settings.

    PYTHONPATH is set, so that child processes find the project's modules.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    furnish(config := parse(params))
    return config


@contextmanager
def disk(place: Path) -> Iterator[Path]:
    """Mount a disk of 32 MiB at ``place`` while the block runs; skip the test if the user may not mount disks."""
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(place)]
    if subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("root alone may mount a disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def remount(place: Path, how: str) -> None:
    """Make the disk at ``place`` read-only ("ro") or writable ("rw")."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(place)], check=True)


def fill(place: Path, free_bytes: int) -> None:
    """Fill the disk at ``place`` until ``free_bytes`` are left."""
    filler = place / "filler"
    filler.unlink(missing_ok=True)
    filler.write_bytes(bytes(max(0, os.statvfs(place).f_bavail * os.statvfs(place).f_frsize - free_bytes)))
