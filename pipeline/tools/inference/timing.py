"""Measure latency and throughput of several forms on one device. The forms are warm and take turns. Each measured
time ends when the device has finished."""

from __future__ import annotations

import operator
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.comparison.stats import Difference, decide, distrust
from pipeline.comparison.verdicts import of_rounds
from pipeline.errors import say
from pipeline.measurement.energy import Energy, per_sample
from pipeline.results import Record
from pipeline.step import Inputs
from pipeline.tools.inference.forms import Predict

FEWEST_FOR_P99 = 100
"""Fewest calls for a 99th percentile. With fewer calls, the percentile would depend on the two slowest calls alone."""
FEWEST_CALLS = 3
"""Fewest calls of a form, per round and batch size, however long a call takes."""
MOST_UNSEEN_BYTES = 1 << 28
"""Largest size, in bytes, of the batches that are made together before they are timed. A larger batch is made alone."""


class Latency(Record):
    """Latency of calls with one sample, from the call until the outputs are computed."""

    p50_ms: float
    p50_low_ms: float
    """``p50_low_ms`` and ``p50_high_ms``: the smallest and the largest of the rounds' medians."""
    p50_high_ms: float
    p99_ms: float | None
    """None if there were fewer than ``FEWEST_FOR_P99`` calls, because one hundredth of them is less than one call."""
    calls: int


class Throughput(Record):
    """Throughput of successive calls with batches of one size."""

    batch_size: int
    samples_per_second: float
    """The median over rounds."""
    low_samples_per_second: float
    """``low_...`` and ``high_...``: the slowest and the fastest round."""
    high_samples_per_second: float
    ratio: Difference
    """Ratio to the plain form in the same rounds; no numbers if it is not trusted. For the plain form itself: the ratio
    to its second measurement, which shows the noise."""
    joules_per_sample: float | None = Field(None, exclude_if=operator.not_)
    """Energy of the device per sample (``measurement.energy``): the median over rounds. ``low_...`` and ``high_...``:
    the smallest and the largest value of a round."""
    low_joules_per_sample: float | None = Field(None, exclude_if=operator.not_)
    high_joules_per_sample: float | None = Field(None, exclude_if=operator.not_)
    why_no_energy: str | None = Field(None, exclude_if=operator.not_)
    """Why the energy is unknown. None if the energy is known, or was not asked for."""


@dataclass
class Slices:
    """The measurements of one form in all rounds."""

    latencies: list[list[float]] = field(default_factory=list)
    """Seconds per call with one sample; one list per round."""
    rates: dict[int, list[float]] = field(default_factory=dict)
    """Batch size -> samples a second, one value per round."""
    energies: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """Batch size -> results of ``per_sample``, one per round; empty if energy was not asked for."""


def in_rounds(
    forms: Mapping[str, Predict],
    inputs: Inputs,
    batch_sizes: Sequence[int],
    *,
    rounds: int,
    seconds: float,
    synchronise: Callable[[], None],
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
    unseen = Unseen(inputs, values, synchronise)
    slices = {name: Slices() for name in forms}
    started = time.perf_counter()
    for number in range(rounds):
        say(f"infer: round {number + 1} of {rounds}, {time.perf_counter() - started:.0f} s", file=sys.stderr)
        names = list(forms)[:: 1 if number % 2 == 0 else -1]
        for name in names:
            slices[name].latencies.append(_calls(forms[name], unseen, seconds))
        for size in batch_sizes:
            for name in names:
                energy = Energy(devices, "raise infer.window_seconds")
                samples, spent = _batches(forms[name], unseen, size, seconds, energy)
                slices[name].rates.setdefault(size, []).append(samples / spent)
                if devices:
                    slices[name].energies.setdefault(size, []).append(per_sample([energy.read()], samples))
    return slices


def latency_of(slices: Slices) -> Latency:
    """Return the latency over all rounds, with the spread of the rounds' medians."""
    calls = [1e3 * call for of_round in slices.latencies for call in of_round]
    medians = [1e3 * statistics.median(of_round) for of_round in slices.latencies]
    p99 = float(np.percentile(calls, 99)) if len(calls) >= FEWEST_FOR_P99 else None
    spread = {"p50_low_ms": min(medians), "p50_high_ms": max(medians)}
    return Latency(p50_ms=statistics.median(calls), **spread, p99_ms=p99, calls=len(calls))


def throughput_of(slices: Slices, plain: Slices, noise: Mapping[int, Difference]) -> tuple[Throughput, ...]:
    """Return the throughput for each batch size, with the ratio to the plain form in the same rounds if ``noise`` is
    trusted; for the plain form, with ``noise`` itself. If the energy of one round is unknown, the energy is unknown."""
    throughputs = []
    for size, rates in slices.rates.items():
        figures: dict[str, Any] = _over_rounds("samples_per_second", rates)
        ratio = noise[size]
        if slices is not plain and ratio.why_untrusted:
            ratio = Difference(decision="untrusted", why_untrusted=ratio.why_untrusted)
        elif slices is not plain:
            ratio = of_rounds(list(zip(rates, plain.rates[size], strict=True)), ratio)
            ratio = ratio.model_copy(update={"decision": decide(ratio, 0.0)})
        energies = slices.energies.get(size, [])
        if unknown := next(filter(None, (energy.get("why_no_energy") for energy in energies)), None):
            figures["why_no_energy"] = unknown.text
        elif energies:
            figures |= _over_rounds("joules_per_sample", [energy["joules_per_sample"] for energy in energies])
        throughputs.append(Throughput(batch_size=size, ratio=ratio, **figures))
    return tuple(throughputs)


def _over_rounds(figure: str, values: Sequence[float]) -> dict[str, float]:
    return {figure: statistics.median(values), f"low_{figure}": min(values), f"high_{figure}": max(values)}


def noise_of(again: Slices, plain: Slices, max_spread: float) -> dict[int, Difference]:
    """Return the noise by batch size. The plain form is measured twice in each round: as ``again`` and as ``plain``.
    The noise is the ratio of the two and, if ratios are not trusted, the reason."""
    noise = {}
    for size, rates in again.rates.items():
        pairs = list(zip(rates, plain.rates[size], strict=True))
        narrow, wide = (of_rounds(pairs, confidence=level) for level in (0.95, 0.99))
        why = distrust(narrow, wide, max_spread)
        decision = "untrusted" if why else "same"
        noise[size] = narrow.model_copy(update={"margin": max_spread, "decision": decision, "why_untrusted": why})
    return noise


class Unseen:
    """Batches in which no sample occurs twice, so that a model cannot save time by returning cached outputs."""

    def __init__(self, inputs: Inputs, values: int, synchronise: Callable[[], None]) -> None:
        self._inputs, self._values, self._synchronise, self._made = inputs, values, synchronise, 0
        self.sample_bytes = sum(leaf[0].nbytes for leaf in tree_leaves(inputs))

    def seconds(self, predict: Predict, size: int, count: int = 1) -> float:
        """Call ``predict`` with ``count`` new batches of ``size`` samples. Return the seconds until the device has
        finished all calls."""
        batches = [self._batch(size) for _ in range(count)]
        self._synchronise()
        start = time.perf_counter()
        for batch in batches:
            predict(batch)
        self._synchronise()
        return time.perf_counter() - start

    def _batch(self, size: int) -> Inputs:
        """Return the first samples as a batch [size, ...]. The digits of a new number replace the first four values of
        each sample's first input, so that no two samples are equal."""
        batch = tree_map(lambda leaf: leaf[:size].clone(memory_format=torch.contiguous_format), self._inputs)
        first = tree_leaves(batch)[0]
        numbers = torch.arange(self._made, self._made + size, device=first.device).unsqueeze(1)
        places = first.view(size, -1)[:, :4]
        places.copy_(numbers // self._values ** torch.arange(places.shape[1], device=first.device) % self._values)
        self._made += size
        return batch


def _calls(predict: Predict, unseen: Unseen, seconds: float) -> list[float]:
    """Call ``predict`` with single samples for about ``seconds``. Return the seconds of each call, measured until the
    device has finished."""
    calls: list[float] = []
    end = time.perf_counter() + seconds
    while len(calls) < FEWEST_CALLS or time.perf_counter() < end:
        calls.append(unseen.seconds(predict, 1))
    return calls


def _batches(predict: Predict, unseen: Unseen, size: int, seconds: float, energy: Energy) -> tuple[int, float]:
    """Call ``predict`` with batches of ``size`` samples for about ``seconds``. Return the number of samples, and the
    seconds that the calls took. The device is synchronised only after every ``MOST_UNSEEN_BYTES`` of batches and at the
    end.

    ``energy`` is measured in one window around all calls. So it includes the energy of making the batches, which takes
    one copy for each batch.
    """
    count = max(FEWEST_CALLS, round(seconds / unseen.seconds(predict, size)))
    at_once = max(1, MOST_UNSEEN_BYTES // (size * unseen.sample_bytes))
    energy.open()
    spent = sum(unseen.seconds(predict, size, min(at_once, count - done)) for done in range(0, count, at_once))
    energy.close(measured=True)
    return count * size, spent
