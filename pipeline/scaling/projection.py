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
from dataclasses import dataclass

import numpy as np

from pipeline.results import Arithmetic, Exchange, Record
from pipeline.results.records import Amount, Count, Positive
from pipeline.scaling.probe import Timing

MOST_BESIDE = 4.0
"""The largest factor by which communication is assumed to take longer beside arithmetic."""
LEAST_SHARE = 0.1
"""If less of a step is communication that nothing hides, the step does not tell this factor: noise would decide it."""


@dataclass(frozen=True)
class Parts:
    """The parts of a step, in seconds."""

    arithmetic: float
    """Of the mean process, without its wait for input."""
    input: float
    waiting: float = 0.0
    """How much longer the slowest process of each step takes than the mean process."""
    exposed: float = 0.0
    """Communication during which no arithmetic runs."""
    hidden: float = 0.0
    """Communication beside arithmetic, which takes no time of its own: no part of ``step``."""

    @property
    def step(self) -> float:
        return self.arithmetic + self.input + self.waiting + self.exposed

    def within(self, step_seconds: float) -> Parts:
        """Return the parts of a step that was measured as a whole: what the others do not explain is exposed."""
        arithmetic = min(self.arithmetic, step_seconds - self.input)
        waiting = min(self.waiting, step_seconds - self.input - arithmetic)
        exposed = step_seconds - self.input - arithmetic - waiting
        return Parts(arithmetic, self.input, waiting, exposed, max(0.0, self.hidden + self.exposed - exposed))


class Alone(Record):
    """The steps of all processes of an arm that exchange nothing; medians over its rounds."""

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
    """As in ``Arithmetic``."""

    def waiting(self, processes: int) -> float:
        """Return how many seconds longer than the mean the slowest of so many processes takes in each step.

        A slow device stays as slow. The jitter grows like the largest of N normal values.
        """
        grown = _largest_normal(processes) / _largest_normal(self.processes)
        return self.slowest_seconds - self.mean_seconds + self.jitter_seconds * grown


def alone_of(rounds: Sequence[Sequence[Arithmetic]]) -> Alone:
    """Join the steps of all ranks in all rounds of an arm. Those of a round with the same index ran side by side."""
    steps = [np.array([rank.step_seconds for rank in ranks]) for ranks in rounds]
    of_ranks = np.median([of_round.mean(axis=1) for of_round in steps], axis=0)
    of_latest = float(np.median([of_round.max(axis=0).mean() for of_round in steps]))
    slowest, last = int(of_ranks.argmax()), rounds[-1][0]
    later = float(of_ranks.mean()) / statistics.fmean(last.step_seconds)  # a bucket is ready at a share of the step
    return Alone(
        mean_seconds=float(of_ranks.mean()),
        slowest_seconds=float(of_ranks[slowest]),
        slowest_rank=slowest,
        slowest_host=rounds[0][slowest].host,
        jitter_seconds=max(0.0, of_latest - float(of_ranks[slowest])),
        processes=len(of_ranks),
        buckets=tuple(bucket._replace(ready_seconds=later * bucket.ready_seconds) for bucket in last.buckets),
    )


def _largest_normal(number: int) -> float:
    """Return about the expected largest of ``number`` standard normal values. Source: Blom, "Statistical estimates and
    transformed beta-variables", 1958."""
    return statistics.NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


def parts(
    alone: Alone, waits: float, processes: int, taken: Sequence[float], beside: float = 1.0, *, blocking: bool = False
) -> Parts:
    """Return the parts of a step of ``processes`` processes.

    ``alone``: their steps without the exchange, or those of fewer processes, with the same share of the batch each.
    ``waits``: the share of these steps that waits for input. ``taken``: the seconds of each exchange alone.
    ``blocking``: gathers and scatters return when they are over, as gloo's do. Else a gather is needed when what
    follows it is ready, because a block's run begins the next gather; all else, when the backward pass ends.
    """
    waiting = alone.waiting(processes)
    late = 1 + waiting / alone.mean_seconds  # the slowest process is late with all of its buckets
    ready = [late * bucket.ready_seconds for bucket in alone.buckets]
    exposed = ended = communicating = 0.0
    for exchange, alone_seconds, begins, following in zip(
        alone.buckets, taken, ready, [*ready[1:], *ready[-1:]], strict=True
    ):
        needed = following if exchange.operation == "all_gather" else ready[-1]
        seconds = beside * alone_seconds
        ended, communicating = max(begins + exposed, ended) + seconds, communicating + seconds
        exposed = max(exposed, ended - (begins if blocking and exchange.operation != "all_reduce" else needed))
    waited = waits * alone.mean_seconds
    return Parts(alone.mean_seconds - waited, waited, waiting, exposed, max(0.0, communicating - exposed))


def beside(step_seconds: float, parts_with: Callable[[float], Parts]) -> float:
    """Return the factor of communication beside arithmetic with which ``parts_with`` gives ``step_seconds``, between 0
    and ``MOST_BESIDE``; 1 if too little of the step is exposed communication (``LEAST_SHARE``)."""
    if parts_with(1.0).exposed < LEAST_SHARE * step_seconds:
        return 1.0
    tried = np.linspace(0.0, MOST_BESIDE, 401)
    return float(np.interp(step_seconds, [parts_with(factor).step for factor in tried], tried))


def seconds_among(processes: int, size: float, timings: Sequence[Timing], backend: str) -> float:
    """Return the seconds of an operation with ``size`` bytes, from its timings among as many processes, or others.

    Between two sizes, it is interpolated. The time of the smallest size is the latency: with the number of processes,
    it grows with the messages that follow each other, the rest with the bytes that each process sends.
    """
    sizes, seconds = [timing.size_bytes for timing in timings], [timing.median_seconds for timing in timings]
    timed, algorithm = timings[0].processes, backend if timings[0].operation == "all_reduce" else "ring"
    whole = max(1.0, size / sizes[-1]) * float(np.interp(size, sizes, seconds))
    latency = min(seconds[0], whole)
    more_messages = messages(processes, algorithm) / messages(timed, algorithm)
    more_bytes = (1 - 1 / processes) / (1 - 1 / timed)
    return more_messages * latency + more_bytes * (whole - latency)


def messages(processes: int, algorithm: str) -> float:
    """Return the messages that follow each other in an all-reduce, by which its latency grows: those of a ring or, with
    NCCL, of a tree, which it uses where latency counts (Jeaugey, "Massively scale your deep learning training with NCCL
    2.4", NVIDIA 2019)."""
    return 2 * math.log2(processes) if algorithm == "nccl" else 2.0 * (processes - 1)
