"""A directory as a checkout is when the stages that train or measure are due."""

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
    """Make ``folder`` such a directory with this params.yaml, and the current one; what it starts finds our modules."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    furnish(config := parse(params))
    return config
