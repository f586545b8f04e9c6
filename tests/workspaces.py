"""A directory as a checkout is when the stages that train or measure are due."""

from __future__ import annotations

from pathlib import Path

from pipeline import environment
from pipeline.data import packing, sources
from pipeline.params import Config

RAW, PREPARED = Path("data/raw"), Path("data/prepared")


def furnish(config: Config) -> None:
    """Give the current directory the environment's fingerprint and the data that ``config`` asks for."""
    environment.write()
    sources.fetch(config.fetch, RAW)
    packing.prepare(config, RAW, PREPARED)
