"""How far two trainings differ in what they changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

SMALL_TENSOR = 0.1
"""A gradient whose terms nearly cancel consists of rounding errors only. So a difference is divided by a norm to which
this share of the root mean square over all tensors is added."""

NOISE = 2.0**-13
"""A gradient up to this share of the root mean square over all parameters consists of rounding errors. A bias before
BatchNorm has such a gradient, about 1e-6 of the others' in float32: its true gradient is zero. Adam makes whole steps
of it, which say nothing about the method."""


def rounding_errors(gradients: Mapping[Any, tuple[float | None, int]]) -> set[Any]:
    """Return the parameters whose gradients consist of rounding errors; a gradient of exactly zero does not.

    ``gradients``: parameter -> root mean square, None without a gradient, and number of values.
    """
    known = {key: (mean, count) for key, (mean, count) in gradients.items() if mean and math.isfinite(mean)}
    total = sum(mean**2 * count for mean, count in known.values())
    usual = math.sqrt(total / max(1, sum(count for _, count in known.values())))
    return {key for key, (mean, _) in known.items() if mean <= NOISE * usual}


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
