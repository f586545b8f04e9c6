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
from pipeline.params import Config, Machine, parse
from tests.commands import Command
from tests.conftest import ROOT

RAW, PREPARED = Path("data/raw"), Path("data/prepared")
CPU_ONLY = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=False)
SERVER = Machine(
    gpus=4, gpu_native_bf16=True, cpu_native_bf16=True, gpu_tf32=True, installed=frozenset({"bitsandbytes"})
)
PARAMS: dict[str, Any] = {
    "fetch": {"dataset": "digits"},
    "train": {"device": "cpu", "seeds": [0, 1], "epochs": 2, "batch_size": 32, "learning_rate": 0.05},
    "variants": {
        "baseline": {},
        "ddp": {"parallelism": "ddp"},
        "pipeline": {"parallelism": "pipeline"},
        "fsdp": {"parallelism": "fsdp"},
        "tensor": {"parallelism": "tensor"},
        "memory": {
            "precision": "bf16",
            "channels_last": True,
            "activation_checkpointing": True,
            "gradient_accumulation": 4,
        },
    },
}
"""The settings of the fixture ``workspace``."""


def furnish(config: Config) -> None:
    """Write the environment's fingerprint and the data that ``config`` asks for into the current directory."""
    environment.write(environment.fingerprint())
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


def variables() -> dict[str, str]:
    """The environment of a command that finds modules in the current directory."""
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path.cwd()}"}


def command(variant: str) -> Command:
    return Command("train", variant, variables=variables())


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
