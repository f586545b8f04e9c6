"""Latency and throughput of several forms on one device: interleaved, synchronised, warm."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from pipeline.comparison.stats import distrust, paired_ratio
from pipeline.tools.inference.forms import Predict
from pipeline.tools.inference.inference_file import Latency, Noise, Throughput

FEWEST_FOR_P99 = 100
"""Calls without which a 99th percentile would be no more than the slowest one."""
FEWEST_CALLS = 3
"""In a slice, however long one takes."""
MOST_UNSEEN_BYTES = 1 << 28
"""Of batches made before they are timed."""

Synchronise = Callable[[], None]


@dataclass
class Slices:
    """What the rounds gave of one form."""

    latencies: list[list[float]] = field(default_factory=list)
    """Seconds a call of one image; a list a round."""
    rates: dict[int, list[float]] = field(default_factory=dict)
    """Batch size -> samples a second, one a round."""


def in_rounds(
    forms: Mapping[str, Predict],
    images: torch.Tensor,
    batch_sizes: Sequence[int],
    *,
    rounds: int,
    seconds: float,
    synchronise: Synchronise,
) -> dict[str, Slices]:
    """In each round every form, for about ``seconds`` with single images and with each batch size.

    ``images`` uint8 [n, C, H, W], n at least the largest batch. The forms are warm: each has been called with every
    size. They take turns within a round, whose order is reversed every other round, so that what the machine does for
    some seconds hits all of them. No call gets an image twice.
    """
    unseen = Unseen(images)
    found = {name: Slices(rates={size: [] for size in batch_sizes}) for name in forms}
    for number in range(rounds):
        names = list(forms)[:: 1 if number % 2 == 0 else -1]
        for name in names:
            found[name].latencies.append(_calls(forms[name], unseen, seconds, synchronise))
        for size in batch_sizes:
            for name in names:
                found[name].rates[size].append(_rate(forms[name], unseen, size, seconds, synchronise))
    return found


def latency_of(slices: Slices) -> Latency:
    """Over all rounds, with the spread of the rounds' medians."""
    calls = [call for each in slices.latencies for call in each]
    medians = [statistics.median(each) for each in slices.latencies]
    return Latency(
        p50_ms=statistics.median(calls) * 1e3,
        p50_low_ms=min(medians) * 1e3,
        p50_high_ms=max(medians) * 1e3,
        p99_ms=float(np.percentile(calls, 99)) * 1e3 if len(calls) >= FEWEST_FOR_P99 else None,
        calls=len(calls),
    )


def throughput_of(slices: Slices, plain: Slices, noise: Mapping[int, Noise]) -> tuple[Throughput, ...]:
    """By batch size, with the ratio to the plain form's of the same round where ``noise`` allows one."""
    found = []
    for size, rates in slices.rates.items():
        ratio = paired_ratio(rates, plain.rates[size]) if noise[size].refused is None else None
        found.append(
            Throughput(
                batch_size=size,
                samples_per_second=statistics.median(rates),
                low_samples_per_second=min(rates),
                high_samples_per_second=max(rates),
                ratio=ratio.estimate if ratio else None,
                ratio_low=ratio.low if ratio else None,
                ratio_high=ratio.high if ratio else None,
            )
        )
    return tuple(found)


def noise_of(again: Slices, plain: Slices, max_spread: float, device: Literal["cpu", "cuda"]) -> dict[int, Noise]:
    """By batch size: the plain form, measured twice a round, against itself, and whether ratios are believed then."""
    found = {}
    for size, rates in again.rates.items():
        narrow = paired_ratio(rates, plain.rates[size])
        wide = paired_ratio(rates, plain.rates[size], confidence=0.99)
        refused = distrust(narrow, wide, max_spread)
        found[size] = Noise(device_type=device, batch_size=size, ratio=narrow.estimate, refused=refused)
    return found


class Unseen:
    """Batches of which no two hold the same image: an answer that a model remembers from before serves it nothing."""

    def __init__(self, images: torch.Tensor) -> None:
        self._images, self._made, self.image_bytes = images, 0, images[0].nbytes

    def batches(self, size: int, count: int) -> list[torch.Tensor]:
        """uint8 [size, C, H, W] each: the first images with a number, other every time, in their first four bytes."""
        found = []
        for _ in range(count):
            batch = self._images[:size].clone(memory_format=torch.contiguous_format)
            numbers = torch.arange(self._made, self._made + size, dtype=torch.int32, device=batch.device)
            bytes_ = batch.view(size, -1)[:, :4]
            bytes_.copy_(numbers.view(torch.uint8).view(size, 4)[:, : bytes_.shape[1]])
            self._made += size
            found.append(batch)
        return found


def _calls(predict: Predict, unseen: Unseen, seconds: float, synchronise: Synchronise) -> list[float]:
    """Seconds of each call, from the call to the answer."""
    calls: list[float] = []
    end = time.perf_counter() + seconds
    while len(calls) < FEWEST_CALLS or time.perf_counter() < end:
        (image,) = unseen.batches(1, 1)
        synchronise()
        start = time.perf_counter()
        predict(image)
        synchronise()
        calls.append(time.perf_counter() - start)
    return calls


def _rate(predict: Predict, unseen: Unseen, size: int, seconds: float, synchronise: Synchronise) -> float:
    """Samples a second of calls one after the other; the device is waited for after ``MOST_UNSEEN_BYTES`` and at the
    end alone."""

    def timed(count: int) -> float:
        batches = unseen.batches(size, count)
        synchronise()
        start = time.perf_counter()
        for batch in batches:
            predict(batch)
        synchronise()
        return time.perf_counter() - start

    count = max(FEWEST_CALLS, round(seconds / timed(1)))
    at_once = max(1, MOST_UNSEEN_BYTES // (size * unseen.image_bytes))
    taken = sum(timed(min(at_once, count - done)) for done in range(0, count, at_once))
    return count * size / taken
