"""Make a directory look like a checkout in which the training and measuring stages can run."""

from __future__ import annotations

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
    """Give the current directory the environment's fingerprint and the data that ``config`` asks for."""
    environment.write()
    sources.fetch(config.fetch, RAW)
    packing.prepare(config, RAW, PREPARED)


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]) -> Config:
    """Furnish ``folder`` with this params.yaml and make it the current directory. Child processes find our modules."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    furnish(config := parse(params))
    return config
