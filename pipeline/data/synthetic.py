"""Synthetic images: each class has a texture, under noise. A seed gives the same images on every machine.

A model's score on them says nothing about other data: their purpose is the load that their size and number cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeline.params import Synthetic

TILE = 8
"""Side in pixels of the tile that a texture repeats."""
CHUNK_BYTES = 16 << 20


def chunks(
    asked: Synthetic, split: Literal["train", "test"], count: int
) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    """The first ``count`` images, uint8 [n, *shape], and labels [n] of a split, in chunks. Classes take turns.

    An image and its label depend on ``asked.seed``, shape, classes, split and index, not on ``count``.
    """
    channels, height, width = asked.shape
    tiles = _bytes(asked.seed, "textures", 0, asked.classes, (channels, TILE, TILE))
    length = max(1, CHUNK_BYTES // math.prod(asked.shape))
    for start in range(0, count, length):
        labels = np.arange(start, min(start + length, count)) % asked.classes
        textures = tiles[labels][:, :, np.arange(height) % TILE][:, :, :, np.arange(width) % TILE]
        noise = _bytes(asked.seed, split, start, len(labels), (channels, height, width))
        yield (textures >> 1) + (noise >> 1), labels


def _bytes(
    seed: int, stream: Literal["textures", "train", "test"], start: int, count: int, shape: tuple[int, ...]
) -> npt.NDArray[np.uint8]:
    """Return random bytes [count, *shape], starting at item ``start`` of a stream.

    numpy promises that a bit generator gives the same output in every version, but not that a Generator's methods do.
    """
    size = math.prod(shape)
    words = -(-size // 8)
    generator = np.random.PCG64(np.random.SeedSequence((seed, ("textures", "train", "test").index(stream))))
    generator.advance(start * words)
    drawn = generator.random_raw(count * words).astype("<u8", copy=False).view(np.uint8)
    return drawn.reshape(count, 8 * words)[:, :size].reshape(count, *shape)
