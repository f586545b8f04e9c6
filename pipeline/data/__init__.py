"""Turns a data set's name into arrays, and reads their rows.

``sources`` fetches and verifies raw files, and lists the user's own (``own_files``). ``datasets`` decodes the raw
files of images and generates synthetic samples; ``arrays`` and ``text`` decode other formats. ``packing`` writes the
decoded arrays, and ``prepared`` opens them. ``reader`` reads rows ahead of the steps. ``pipeline.tasks`` makes batches
from these rows, and augments images. The stages fetch, prepare and train exchange only files, so after a change only
the affected stages run again.
"""

from __future__ import annotations

from pipeline.errors import PipelineError

LISTING = "files.csv"
"""Name of the listing that ``fetch`` writes for files that it did not download. The columns are path, size_bytes and
sha256."""

SYNTHETIC_DESCRIPTION = "synthetic.json"
"""File with the settings ``fetch.synthetic``, so that DVC sees when ``prepare`` must generate other samples."""


LIMIT_BYTES = 1 << 28
"""Largest allowed size of a downloaded file, and of an image in an image folder."""


class DataError(PipelineError):
    """Data cannot be fetched, decoded or trusted. The message says what is wrong, where, and what to do."""
