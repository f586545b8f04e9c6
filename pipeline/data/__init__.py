"""From a data set's name to batches on the device.

``sources`` fetches and verifies raw files. ``datasets`` decodes them; ``arrays`` and ``text`` decode what is not an
image, and ``synthetic`` generates samples. ``packing`` writes the decoded arrays, and ``prepared`` reads them.
``batches`` shuffles, shards and augments them, and lets the task make batches; ``loader`` does the same with PyTorch's
DataLoader. Fetching, preparing and training share files, not code, so a change re-runs only the stages that it affects.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pipeline.errors import PipelineError

LISTING = "files.csv"
"""File that ``fetch`` writes for files that stay where they are: path, size_bytes and sha256 of each."""

SYNTHETIC_DESCRIPTION = "synthetic.json"
"""File that ``fetch`` writes for synthetic samples: the settings of ``fetch.synthetic``."""


LIMIT_BYTES = 1 << 28
"""Largest size of a raw file; in an image folder each file is one image."""


class DataError(PipelineError):
    """Data that cannot be fetched, decoded or trusted. The message says what is wrong, where, and what to do."""


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, in bounded memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
