"""Augmentation of batches of images: an epoch's random draws, then crop, flip and cutout."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class Draws(NamedTuple):
    """The random draws of an epoch: tensors of the same shape. ``flipped`` is bool, and the other tensors are int64."""

    order: Tensor
    """Indices of the samples, in the epoch's order."""
    top: Tensor
    left: Tensor
    """``top`` and ``left`` are the crop's first row and column in the padded image, from 0 to twice the padding."""
    flipped: Tensor
    row: Tensor
    column: Tensor
    """``row`` and ``column`` are the position of the cutout's centre."""


def draw_epoch(seed: int, epoch: int, count: int, size: tuple[int, ...], padding: int) -> Draws:
    """Return all draws [count] for images of ``size`` (height, width). The draws depend only on the arguments.

    Augmentations that are switched off get draws too, so that switching one on or off does not change the other draws.
    """
    (mixed,) = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(mixed))

    def below(end: int) -> Tensor:
        return torch.randint(end, (count,), generator=generator)

    return Draws(
        order=torch.randperm(count, generator=generator),
        top=below(2 * padding + 1),
        left=below(2 * padding + 1),
        flipped=below(2).bool(),
        row=below(size[0]),
        column=below(size[1]),
    )


def crop(images: Tensor, top: Tensor, left: Tensor, padding: int, each: Tensor) -> Tensor:
    """Pad images [b, C, H, W] with ``padding`` zeros on each side, and return an H x W window of each padded image.

    The window of image i starts at (top[i], left[i]). ``each`` is arange(b). It indexes a strided view of all windows,
    so an index has one number per image, not one per pixel.
    """
    height, width = images.shape[2:]
    padded = F.pad(images, (padding, padding, padding, padding))
    return padded.unfold(2, height, 1).unfold(3, width, 1)[each, :, top, left]


def flip(images: Tensor, flipped: Tensor) -> Tensor:
    """Return images [b, C, H, W]. Image i is mirrored left to right if ``flipped[i]`` is true."""
    return torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)


def cutout_(images: Tensor, row: Tensor, column: Tensor, side: int) -> Tensor:
    """Set a square in each of the images [b, C, H, W] to zero, in place, and return the images.

    The square of image i is ``side`` pixels wide, has its centre at (row[i], column[i]), and is cut off at the image's
    edges. Zero is the mean of normalised images. Source: DeVries and Taylor (2017), arXiv:1708.04552.
    """
    height, width = images.shape[2:]
    rows = torch.arange(height, device=images.device) - (row.view(-1, 1) - side // 2)
    columns = torch.arange(width, device=images.device) - (column.view(-1, 1) - side // 2)
    inside = ((rows >= 0) & (rows < side)).unsqueeze(2) & ((columns >= 0) & (columns < side)).unsqueeze(1)
    return images.masked_fill_(inside.unsqueeze(1), 0.0)
