"""Measure latency and throughput of several forms on one device. The forms are warm and take turns. Each measured
time ends when the device has finished."""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from pipeline.comparison.stats import distrust, paired_ratio
from pipeline.errors import say
from pipeline.measurement.energy import Energy, per_sample
from pipeline.tools.inference.forms import Predict
from pipeline.tools.inference.inference_file import Latency, Noise, Throughput

FEWEST_FOR_P99 = 100
"""Fewest calls for a 99th percentile. With fewer calls, the percentile would depend on the two slowest calls alone."""
FEWEST_CALLS = 3
"""Fewest calls of a form, per round and batch size, however long a call takes."""
MOST_UNSEEN_BYTES = 1 << 28
"""Largest size, in bytes, of the batches that are made together before they are timed. A larger batch is made alone."""

Synchronise = Callable[[], None]


@dataclass
class Slices:
    """The measurements of one form in all rounds."""

    latencies: list[list[float]] = field(default_factory=list)
    """Seconds per call with one sample; one list per round."""
    rates: dict[int, list[float]] = field(default_factory=dict)
    """Batch size -> samples a second, one value per round."""
    energies: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    """Batch size -> results of ``per_sample``, one per round; empty if energy was not asked for."""

    def energy(self, size: int) -> dict[str, Any]:
        """Return the energy fields of ``Throughput`` for one batch size. If the energy of one round is unknown, the
        result is unknown."""
        told = self.energies[size]
        unknown = [each for each in told if "why_no_energy" in each]
        if unknown or not told:
            return unknown[0] if unknown else {}
        joules = [each["joules_per_sample"] for each in told]
        return {
            "joules_per_sample": statistics.median(joules),
            "low_joules_per_sample": min(joules),
            "high_joules_per_sample": max(joules),
        }


def in_rounds(
    forms: Mapping[str, Predict],
    inputs: torch.Tensor,
    batch_sizes: Sequence[int],
    *,
    rounds: int,
    seconds: float,
    synchronise: Synchronise,
    devices: Sequence[torch.device] = (),
    values: int = 256,
) -> dict[str, Slices]:
    """Measure every form in each round: about ``seconds`` with single samples, and as long with each batch size. Return
    the measurements by form.

    ``inputs`` [n, ...]: raw inputs with values from 0 to ``values`` - 1; n must be at least the largest batch size. The
    forms must be warm: each must have been called with every size. The forms take turns within a round, so that a
    disturbance of some seconds affects all forms. Their order is reversed in every other round. No sample is used
    twice. ``devices``: devices whose energy is measured.
    """
    unseen = Unseen(inputs, values)
    found = {name: Slices(rates={size: [] for size in batch_sizes}) for name in forms}
    started = time.perf_counter()
    for number in range(rounds):
        say(f"infer: round {number + 1} of {rounds}, {time.perf_counter() - started:.0f} s", file=sys.stderr)
        names = list(forms)[:: 1 if number % 2 == 0 else -1]
        for name in names:
            found[name].latencies.append(_calls(forms[name], unseen, seconds, synchronise))
        for size in batch_sizes:
            for name in names:
                energy = Energy(devices, "raise infer.window_seconds")
                samples, taken = _batches(forms[name], unseen, size, seconds, synchronise, energy)
                found[name].rates[size].append(samples / taken)
                if devices:
                    found[name].energies[size].append(per_sample([energy.read()], samples))
    return found


def latency_of(slices: Slices) -> Latency:
    """Return the latency over all rounds, with the spread of the rounds' medians."""
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
    """Return the throughput for each batch size, with the ratio to the plain form in the same rounds if ``noise``
    allows a ratio."""
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
                **slices.energy(size),
            )
        )
    return tuple(found)


def noise_of(again: Slices, plain: Slices, max_spread: float, device: Literal["cpu", "cuda"]) -> dict[int, Noise]:
    """Return the noise by batch size. The plain form is measured twice in each round: as ``again`` and as ``plain``.
    The noise is the ratio of the two and, if ratios are not trusted, the reason."""
    found = {}
    for size, rates in again.rates.items():
        narrow = paired_ratio(rates, plain.rates[size])
        wide = paired_ratio(rates, plain.rates[size], confidence=0.99)
        refused = distrust(narrow, wide, max_spread)
        found[size] = Noise(device_type=device, batch_size=size, ratio=narrow.estimate, refused=refused)
    return found


class Unseen:
    """Batches in which no sample occurs twice, so that a model cannot save time by returning cached outputs."""

    def __init__(self, inputs: torch.Tensor, values: int) -> None:
        self._inputs, self._made, self._values, self.sample_bytes = inputs, 0, values, inputs[0].nbytes

    def batches(self, size: int, count: int) -> list[torch.Tensor]:
        """Return ``count`` batches [size, ...] of the first samples. The digits of a new number replace the first four
        values of each sample, so that no two samples are equal."""
        found = []
        for _ in range(count):
            batch = self._inputs[:size].clone(memory_format=torch.contiguous_format)
            numbers = torch.arange(self._made, self._made + size, device=batch.device).unsqueeze(1)
            places = batch.view(size, -1)[:, :4]
            places.copy_(numbers // self._values ** torch.arange(places.shape[1], device=batch.device) % self._values)
            self._made += size
            found.append(batch)
        return found


def _calls(predict: Predict, unseen: Unseen, seconds: float, synchronise: Synchronise) -> list[float]:
    """Call ``predict`` with single samples for about ``seconds``. Return the seconds of each call, measured until the
    device has finished."""
    calls: list[float] = []
    end = time.perf_counter() + seconds
    while len(calls) < FEWEST_CALLS or time.perf_counter() < end:
        (sample,) = unseen.batches(1, 1)
        synchronise()
        start = time.perf_counter()
        predict(sample)
        synchronise()
        calls.append(time.perf_counter() - start)
    return calls


def _batches(
    predict: Predict, unseen: Unseen, size: int, seconds: float, synchronise: Synchronise, energy: Energy
) -> tuple[int, float]:
    """Call ``predict`` with batches of ``size`` samples for about ``seconds``. Return the number of samples, and the
    seconds that the calls took. The device is synchronised only after every ``MOST_UNSEEN_BYTES`` of batches and at the
    end.

    ``energy`` is measured in one window around all calls. So it includes the energy of making the batches, which takes
    one copy for each batch.
    """

    def timed(count: int) -> float:
        batches = unseen.batches(size, count)
        synchronise()
        start = time.perf_counter()
        for batch in batches:
            predict(batch)
        synchronise()
        return time.perf_counter() - start

    count = max(FEWEST_CALLS, round(seconds / timed(1)))
    at_once = max(1, MOST_UNSEEN_BYTES // (size * unseen.sample_bytes))
    energy.open()
    taken = sum(timed(min(at_once, count - done)) for done in range(0, count, at_once))
    energy.close(measured=True)
    return count * size, taken
