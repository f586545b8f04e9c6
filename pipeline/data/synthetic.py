"""Synthetic samples: textures with noise, or rising tokens. The same seed yields the same samples on every machine.

A model's score on synthetic samples says nothing about other data. Synthetic samples serve to measure speed and memory
for a given shape and number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.data.decoded import Chunk
from pipeline.params import Synthetic

TILE = 8
"""Side in pixels of the tile that a texture repeats."""
CHUNK_BYTES = 16 << 20
STREAMS = ("textures", "train", "test", "train targets", "test targets")
Split = Literal["train", "test"]
_WORK_BYTES = {"labels": 1, "floats": 8, "tokens": 8}
"""Bytes of memory per input value while the value is generated."""


def chunks(requested: Synthetic, split: Split, count: int) -> Iterator[Chunk]:
    """Yield the first ``count`` samples of a split in chunks of n samples: inputs [n, *shape] and, unless they are
    tokens, targets.

    Targets are either labels [n], which run through all classes again and again, or floats [n, classes] from 0 to 1.
    Each token is one or two more than the token before, modulo ``classes``. A sample depends on ``requested``,
    ``split`` and its index, not on ``count``.
    """
    tile = (requested.shape[0], *(min(TILE, size) for size in requested.shape[1:]))
    tiles = _bytes(requested.seed, "textures", 0, requested.classes, tile)
    length = max(1, CHUNK_BYTES // (math.prod(requested.shape) * _WORK_BYTES[requested.targets]))
    for start in range(0, count, length):
        indices = np.arange(start, min(start + length, count))
        noise = _bytes(requested.seed, split, start, len(indices), tuple(requested.shape))
        if requested.targets == "tokens":
            rises = np.cumsum((noise & 1) + 1, 1, dtype=np.int64)
            yield (((noise[:, :1] + rises) % requested.classes).astype(np.uint16),)
            continue
        targets: npt.NDArray[Any] = indices % requested.classes
        if requested.targets == "labels":
            textures = tiles[targets]
        else:
            levels = _bytes(requested.seed, f"{split} targets", start, len(indices), (requested.classes,))
            mixed = np.tensordot(levels.astype(np.int64), tiles.astype(np.int64), 1)
            textures, targets = (mixed // (255 * requested.classes)).astype(np.uint8), levels / np.float32(255)
        for axis, size in enumerate(requested.shape[1:], start=2):
            textures = textures.take(np.arange(size) % TILE, axis)
        inputs = (textures >> 1) + (noise >> 1)
        yield inputs / np.float32(255) if requested.dtype == "float32" else inputs, targets


def _bytes(seed: int, stream: str, start: int, count: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Return random bytes [count, *shape], starting at item ``start`` of one of ``STREAMS``.

    The bytes come from a bit generator, for which numpy guarantees the same output in every version. numpy gives no
    such guarantee for the methods of a Generator.
    """
    size = math.prod(shape)
    words = -(-size // 8)
    generator = np.random.PCG64(np.random.SeedSequence((seed, STREAMS.index(stream))))
    generator.advance(start * words)
    drawn = generator.random_raw(count * words).astype("<u8", copy=False).view(np.uint8)
    return drawn.reshape(count, 8 * words)[:, :size].reshape(count, *shape)
