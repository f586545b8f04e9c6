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
    """Return the largest of ``relative_differences``; 0 without tensors."""
    return max(relative_differences(ours, expected).values(), default=0.0)


def relative_differences(ours: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor]) -> dict[Any, float]:
    """Compare the changes of each tensor, and return name -> relative difference; infinite if it is not finite, and for
    all tensors if their names or shapes differ.

    The norm of a difference is taken relative to the expected tensor's norm plus ``SMALL_TENSOR`` of the root mean
    square over all tensors.
    """
    if {name: value.shape for name, value in ours.items()} != {name: value.shape for name, value in expected.items()}:
        return dict.fromkeys([*ours, *expected], math.inf)
    total = math.sqrt(sum(float(value.square().sum()) for value in expected.values()))
    count = sum(value.numel() for value in expected.values())
    differences = {}
    for name, value in expected.items():
        usual = total * math.sqrt(value.numel() / count)
        size = float(value.norm()) + SMALL_TENSOR * usual
        difference = float((ours[name] - value).norm())
        relative = difference / size if size else 0.0
        differences[name] = relative if math.isfinite(difference) else math.inf
    return differences
