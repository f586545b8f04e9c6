"""What a step of DDP or FSDP takes with any number of processes, from its arithmetic and the times of collectives.

A step takes its arithmetic, as measured at the process's share of the batch without any exchange; the wait for the
slowest process; and the part of the exchange that no arithmetic hides. DDP reduces buckets of gradients one after the
other, in the order of the backward pass (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020, section 3.2). FSDP gathers a block's parameters before it runs, and scatters its gradients after
it (Zhao et al., "PyTorch FSDP", VLDB 2023, section 3). So exchange i ends at

    end_i = max(ready_i + delay, end_(i-1)) + beside * allreduce(N, bytes_i)
    allreduce(N, bytes) = latency(N) + 2 (N - 1) / N * bytes / bandwidth

and the step goes on with a delay of max(delay, end_i - needed_i). The second formula (``Probe.taken``) is that of a
ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of Parallel
and Distributed Computing 69, 2009); a gather or a scatter is half of it. ``beside``: how much longer communication
takes beside arithmetic, which it slows down in turn. It is found where a step was measured as a whole.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.results import Arithmetic, Window

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
        # What is less than a picosecond is round-off.
        exposed = max(0.0, round(step_seconds - self.input - arithmetic - waiting, 12))
        hidden = max(0.0, round(self.hidden + self.exposed - exposed, 12))
        return Parts(arithmetic, self.input, waiting, exposed, hidden)


def joined(samples: Sequence[Window]) -> Arithmetic:
    """Return the medians over the rounds of an arm. A bucket is ready at a share of the step."""
    rounds = [sample.arithmetic for sample in samples if sample.arithmetic]
    last, of_ranks = rounds[-1], np.median([of_round.rank_seconds for of_round in rounds], axis=0)
    latest = statistics.median(of_round.latest_seconds for of_round in rounds)
    later = float(of_ranks.mean()) / last.rank_seconds[0]
    buckets = tuple(bucket._replace(ready_seconds=later * bucket.ready_seconds) for bucket in last.buckets)
    return Arithmetic(hosts=last.hosts, rank_seconds=tuple(of_ranks.tolist()), latest_seconds=latest, buckets=buckets)


def _largest_normal(number: int) -> float:
    """Return about the expected largest of ``number`` standard normal values. Source: Blom, "Statistical estimates and
    transformed beta-variables", 1958."""
    return statistics.NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


def parts(
    alone: Arithmetic, waits: float, processes: int, taken: Sequence[float], beside: float = 1.0, *, blocking: bool
) -> Parts:
    """Return the parts of a step of ``processes`` processes.

    ``alone``: their steps without the exchange, or those of fewer processes, with the same share of the batch each.
    ``waits``: the share of these steps that waits for input. ``taken``: the seconds of each exchange alone.
    ``blocking``: gathers and scatters return when they are over, as gloo's do. Else a gather is needed when what
    follows it is ready, because a block's run begins the next gather; all else, when the backward pass ends.

    A slow device stays as slow. The jitter, by which the slowest of a single step exceeds it, grows like the largest of
    N normal values.
    """
    mean, slowest = alone.mean_seconds, max(alone.rank_seconds)
    grown = _largest_normal(processes) / _largest_normal(len(alone.rank_seconds))
    waiting = slowest - mean + max(0.0, alone.latest_seconds - slowest) * grown
    late = 1 + waiting / mean  # the slowest process is late with all of its buckets
    ready = [late * bucket.ready_seconds for bucket in alone.buckets]
    exposed = ended = communicating = 0.0
    following = [*ready[1:], *ready[-1:]]
    for exchange, alone_seconds, begins, next_ready in zip(alone.buckets, taken, ready, following, strict=True):
        needed = next_ready if exchange.operation == "all_gather" else ready[-1]
        seconds = beside * alone_seconds
        ended, communicating = max(begins + exposed, ended) + seconds, communicating + seconds
        exposed = max(exposed, ended - (begins if blocking and exchange.operation != "all_reduce" else needed))
    waited = waits * mean
    return Parts(mean - waited, waited, waiting, exposed, max(0.0, communicating - exposed))


def beside(step_seconds: float, parts_with: Callable[[float], Parts]) -> float:
    """Return the factor of communication beside arithmetic with which ``parts_with`` gives ``step_seconds``, between 0
    and ``MOST_BESIDE``; 1 if too little of the step is exposed communication (``LEAST_SHARE``)."""
    if parts_with(1.0).exposed < LEAST_SHARE * step_seconds:
        return 1.0
    tried = np.linspace(0.0, MOST_BESIDE, 401)
    return float(np.interp(step_seconds, [parts_with(factor).step for factor in tried], tried))
