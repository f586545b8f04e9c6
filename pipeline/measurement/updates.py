"""How far two trainings differ in what they changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

SMALL_TENSOR = 0.1
"""A gradient whose terms nearly cancel consists of rounding errors only. So a difference is divided by a norm to which
this share of the root mean square over all tensors is added."""


def relative_difference(ours: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor]) -> float:
    """Compare the changes of each tensor, and return the largest relative difference; infinite if the tensors' names or
    shapes differ or a difference is not finite.

    The norm of a difference is taken relative to the expected tensor's norm plus ``SMALL_TENSOR`` of the root mean
    square over all tensors.
    """
    if {name: value.shape for name, value in ours.items()} != {name: value.shape for name, value in expected.items()}:
        return math.inf
    total = math.sqrt(sum(float(value.square().sum()) for value in expected.values()))
    count = sum(value.numel() for value in expected.values())
    largest = 0.0
    for name, value in expected.items():
        usual = total * math.sqrt(value.numel() / count)
        size = float(value.norm()) + SMALL_TENSOR * usual
        difference = float((ours[name] - value).norm())
        if not math.isfinite(difference):
            return math.inf
        largest = max(largest, difference / size if size else 0.0)
    return largest
