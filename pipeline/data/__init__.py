"""From a data set's name to batches on the device.

``sources`` fetches and verifies raw files, ``datasets`` decodes them, ``prepared`` packs and reads arrays,
``batches`` shuffles, shards, augments and normalises. The first three do not know each other's code, only each
other's files (``prepare`` alone calls ``decode``), so that a change of one re-runs no stage that does not need it.
"""

from __future__ import annotations

from pipeline.config import PipelineError

IMAGE_LISTING = "files.csv"
"""What ``fetch`` writes for an image folder: path, size_bytes and sha256 of every image."""


class DataError(PipelineError):
    """Data that cannot be had, decoded or trusted. The message says what, where, and what to do."""
