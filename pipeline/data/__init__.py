"""From a data set's name to batches on the device.

``sources`` fetches and verifies raw files, ``datasets`` decodes them (or ``synthetic`` makes images up), ``packing``
makes arrays of what it decodes, ``prepared`` reads these, ``batches`` shuffles, shards, augments and normalises, and so
does ``loader`` in PyTorch's own way. What fetches, what prepares and what trains know each other's files alone, so that
a change of one re-runs no stage that does not need it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pipeline.errors import PipelineError

IMAGE_LISTING = "files.csv"
"""What ``fetch`` writes for an image folder: path, size_bytes and sha256 of every image."""

SYNTHETIC_DESCRIPTION = "synthetic.json"
"""What it writes for images that are made up: the settings of ``fetch.synthetic``."""


LIMIT_BYTES = 1 << 28
"""No raw file is larger: that of an image folder holds one picture."""


class DataError(PipelineError):
    """Data that cannot be had, decoded or trusted. The message says what, where, and what to do."""


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, in bounded memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
