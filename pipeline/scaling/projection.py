"""What a step of DDP or FSDP takes with any number of processes, from its arithmetic and the times of collectives.

A step takes its arithmetic, as measured at the process's share of the batch without any exchange; the wait for the
slowest process; and the part of the exchange that no arithmetic hides. DDP reduces buckets of gradients one after the
other, in the order of the backward pass (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020, section 3.2). FSDP gathers a block's parameters before it runs, and scatters its gradients after
it (Zhao et al., "PyTorch FSDP", VLDB 2023, section 3). So exchange i ends at

    end_i = max(ready_i + delay, end_(i-1)) + beside * allreduce(N, bytes_i)
    allreduce(N, bytes) = latency(N) + 2 (N - 1) / N * bytes / bandwidth

and the step goes on with a delay of max(delay, end_i - needed_i). The second formula is that of a ring (Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of Parallel and Distributed
Computing 69, 2009); a gather or a scatter is half of it. ``beside``: how much longer communication takes beside
arithmetic, which it slows down in turn. It is found where a step was measured as a whole.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pipeline.results import Arithmetic, Exchange, Record
from pipeline.results.records import Amount, Count, Positive
from pipeline.scaling.probe import Timing, fitted

MOST_BESIDE = 4.0
"""The largest factor by which communication is assumed to take longer beside arithmetic."""
LEAST_SHARE = 0.1
"""If less of a step is communication that nothing hides, the step does not tell this factor: noise would decide it."""

Collective = Callable[[float], float]
"""Bytes -> the seconds of a collective that runs alone."""
Taken = Callable[[Exchange], float]
"""Exchange -> the seconds that it takes alone."""


class Parts(NamedTuple):
    """The parts of a step, in seconds."""

    arithmetic: float
    """Of the mean process, without its wait for input."""
    input: float
    waiting: float
    """How much longer the slowest process of each step takes than the mean process."""
    exposed: float
    """Communication during which no arithmetic runs."""
    hidden: float
    """Communication beside arithmetic, which takes no time of its own: no part of ``step``."""

    @property
    def step(self) -> float:
        return self.arithmetic + self.input + self.waiting + self.exposed


class Alone(Record):
    """The steps of all processes of an arm that exchange nothing, in one round."""

    mean_seconds: Positive
    """Of all processes' steps, the wait for input included."""
    slowest_seconds: Positive
    """The mean of the process that is slowest on average."""
    slowest_rank: Count
    slowest_host: str
    jitter_seconds: Amount
    """How much longer the slowest process of a single step takes than the slowest on average."""
    processes: Count
    buckets: tuple[Exchange, ...]
    """As in ``Arithmetic``; the means of the processes."""

    def waiting(self, processes: int) -> float:
        """Return how many seconds longer than the mean the slowest of so many processes takes in each step.

        A slow device stays as slow. The jitter grows like the largest of N normal values.
        """
        if processes == 1:
            return 0.0
        grown = _largest_normal(processes) / _largest_normal(self.processes) if self.processes > 1 else 1.0
        return self.slowest_seconds - self.mean_seconds + self.jitter_seconds * grown


def alone_of(ranks: Sequence[Arithmetic]) -> Alone:
    """Join the ranks' steps, of which those with the same index ran side by side."""
    means = [statistics.fmean(rank.step_seconds) for rank in ranks]
    in_step = [max(steps) for steps in zip(*(rank.step_seconds for rank in ranks), strict=False)]
    slowest = means.index(max(means))
    return Alone(
        mean_seconds=statistics.fmean(means),
        slowest_seconds=means[slowest],
        slowest_rank=slowest,
        slowest_host=ranks[slowest].host,
        jitter_seconds=max(0.0, statistics.fmean(in_step) - means[slowest]),
        processes=len(ranks),
        buckets=tuple(
            bucket[0]._replace(ready_seconds=statistics.fmean(of_rank.ready_seconds for of_rank in bucket))
            for bucket in zip(*(rank.buckets for rank in ranks), strict=True)
        ),
    )


def _largest_normal(number: int) -> float:
    """Return about the expected largest of ``number`` standard normal values. Source: Blom, "Statistical estimates and
    transformed beta-variables", 1958."""
    return statistics.NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


def parts(
    alone: Alone, input_fraction: float, processes: int, taken: Taken, beside: float = 1.0, *, blocking: bool = False
) -> Parts:
    """Return the parts of a step of ``processes`` processes.

    ``alone``: their steps without the exchange, or those of fewer processes, with the same share of the batch each.
    ``input_fraction``: the share of these steps that waits for input. ``taken``: by an exchange that runs alone.
    ``blocking``: gathers and scatters return when they are over, as gloo's do. Else a gather is needed when what
    follows it is ready, because a block's run begins the next gather; all else, when the backward pass ends.
    """
    waiting = alone.waiting(processes)
    late = 1 + waiting / alone.mean_seconds  # the slowest process is late with all of its buckets
    ready = [late * bucket.ready_seconds for bucket in alone.buckets]
    exposed = ended = communicating = 0.0
    exchanges = alone.buckets if processes > 1 else ()
    for exchange, begins, following in zip(exchanges, ready, [*ready[1:], *ready[-1:]], strict=False):
        needed = following if exchange.operation == "all_gather" else ready[-1]
        seconds = beside * taken(exchange)
        ended, communicating = max(begins + exposed, ended) + seconds, communicating + seconds
        exposed = max(exposed, ended - (begins if blocking and exchange.operation != "all_reduce" else needed))
    waited = input_fraction * alone.mean_seconds
    return Parts(alone.mean_seconds - waited, waited, waiting, exposed, max(0.0, communicating - exposed))


def beside(step_seconds: float, parts_with: Callable[[float], Parts]) -> float:
    """Return the factor of communication beside arithmetic with which ``parts_with`` gives ``step_seconds``, between 0
    and ``MOST_BESIDE``; 1 if too little of the step is exposed communication (``LEAST_SHARE``)."""
    low, high = 0.0, MOST_BESIDE
    if parts_with(1.0).exposed < LEAST_SHARE * step_seconds:
        return 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if parts_with(middle).step < step_seconds else (low, middle)
    return (low + high) / 2


def collective(timings: Sequence[Timing], processes: int, backend: str) -> Collective:
    """Return the seconds of an operation among ``processes``, from its timings among as many, or among fewer.

    Between two sizes, it is interpolated. For more processes, the part of the latency
    (``probe.fitted``) grows with the messages that follow each other, the rest with the bytes that each process sends.
    """
    operation = timings[0].operation
    by_size, fit = sorted(timings, key=lambda timing: timing.size_bytes), fitted(timings, operation)
    sizes, seconds = ([getattr(timing, of) for timing in by_size] for of in ("size_bytes", "median_seconds"))
    algorithm = backend if operation == "all_reduce" else "ring"
    ratios = [of(processes, algorithm) / of(fit.processes, algorithm) for of in (messages, _sent)]

    def taken(size: float) -> float:
        beyond = max(1.0, size / by_size[-1].size_bytes)
        whole = beyond * float(np.interp(size, sizes, seconds))
        latency = min(fit.latency_seconds, whole)
        return ratios[0] * latency + ratios[1] * (whole - latency)

    return taken


def _sent(processes: int, _: str) -> float:
    return (processes - 1) / processes


def messages(processes: int, algorithm: str) -> float:
    """Return the messages that follow each other in an all-reduce, by which its latency grows: those of a ring or, with
    NCCL, of a tree, which it uses where latency counts (Jeaugey, "Massively scale your deep learning training with NCCL
    2.4", NVIDIA 2019)."""
    return 2 * math.log2(processes) if algorithm == "nccl" else 2.0 * (processes - 1)
