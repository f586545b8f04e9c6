"""How fast the links between the devices are: the times of collectives, beside what the hardware states."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
import pynvml
import torch

from pipeline import hosts, pages
from pipeline.distributed import forked, world
from pipeline.distributed.collectives import seconds_of
from pipeline.environment import cores, hardware
from pipeline.errors import ConfigError, PipelineError, count, say
from pipeline.measurement.windows import handle_of
from pipeline.params import Config, Machine, Variant
from pipeline.plans import Plan
from pipeline.plans import plan as plan_of
from pipeline.report import write_pages
from pipeline.report.pictures import Chart, loglog
from pipeline.results import REPORTS, Document, Record
from pipeline.results.records import Operation

OPERATIONS: tuple[Operation, ...] = ("all_reduce", "reduce_scatter", "all_gather")
SIZES = tuple(4**power << 10 for power in range(10))
"""1 KiB to 256 MiB, in bytes."""
WINDOW_SECONDS = 0.03
"""Shortest time of the calls of one operation and size."""
LONG_SECONDS = 0.15
"""If a call takes longer, larger sizes are left out."""
SLOW = 0.5
"""A link that gives less than this share of what it states is named."""
BASE_SECONDS = 6.6e-6
"""What an all-reduce takes beside the steps of its ring. Source: as for ``LINKS``."""


class Link(NamedTuple):
    """A kind of link, one direction of one device (NVLink, PCIe) or host."""

    latency_seconds: float
    """Of one step of a ring."""
    bytes_per_second: float

    def latency_of(self, processes: int) -> float:
        """Return the seconds of an all-reduce of almost nothing, which takes 2 (N - 1) steps of a ring."""
        return BASE_SECONDS + 2 * (processes - 1) * self.latency_seconds


# The latencies of the first three are those by which NCCL chooses its algorithm (NCCL, src/graph/tuning.cc,
# ``baseLat`` and ``hwLat`` of Ring with LL: 6.6 us, and 0.6, 1.0 and 2.7 us a step by NVLink, PCI and network).
LINKS: Mapping[str, Link] = {
    # 900 GB/s in both directions: NVIDIA, Hopper Architecture, nvidia.com/en-us/technologies/hopper-architecture
    "nvlink4": Link(0.6e-6, 450e9),
    # 16 lanes of 16 GT/s, of which 128 of 130 bits are data: PCI-SIG, PCI Express Base Specification 4.0
    "pcie4": Link(1.0e-6, 31.5e9),
    # NDR, 400 Gbit/s a port: NVIDIA, ConnectX-7 Adapter Cards User Manual, Introduction
    "ib400": Link(2.7e-6, 50e9),
    # 100 Gbit/s by name. The latency, through the kernel's TCP, has no source: it is our assumption.
    "eth100": Link(15e-6, 12.5e9),
}


class Timing(Record):
    """An operation among a number of processes, with one size."""

    operation: Operation
    processes: int
    hosts: int
    size_bytes: int
    """The tensor that is reduced, or that all processes hold in the end."""
    seconds: tuple[float, ...]
    """Of one call on the slowest process, one value a repetition in fresh processes."""

    @property
    def bus_bytes(self) -> float:
        """Bytes that each process must send at least. Divided by the time, they are the bus bandwidth, which does not
        depend on the number of processes. Source: nccl-tests, doc/PERFORMANCE.md."""
        return (2 if self.operation == "all_reduce" else 1) * (self.processes - 1) / self.processes * self.size_bytes

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def bus_bytes_per_second(self) -> float:
        """Of the median time."""
        return self.bus_bytes / self.median_seconds


class Fit(Record):
    """The time of an all-reduce as a straight line: latency + 2 (N - 1) / N * bytes / bandwidth."""

    processes: int
    latency_seconds: float
    bytes_per_second: float
    relative_error_fraction: float
    """Root mean square of the logarithms of the fitted times over the measured times."""

    def seconds(self, size_bytes: float) -> float:
        """Return the time of an all-reduce of ``size_bytes``."""
        return self.latency_seconds + 2 * (self.processes - 1) / self.processes * size_bytes / self.bytes_per_second


class Answer(Record):
    """What links a number of processes, in one row: the all-reduces of the largest and the smallest size."""

    large: Timing
    small: Timing
    stated_bytes_per_second: float | None
    """What the hardware should give; None if it is unknown."""
    is_slow: bool
    """Even in the fastest repetition, the link gives less than ``SLOW`` of what it states."""


class Probe(Document):
    """``reports/probe.json``."""

    device: str
    """Name of the GPU or CPU."""
    backend: Literal["nccl", "gloo"]
    host_names: tuple[str, ...]
    links: tuple[dict[str, str | int | None], ...]
    """Each host's link to the first host (``hosts.links``); empty with one host."""
    gpu_link: dict[str, str | int | None] | None
    """What joins the GPUs of a host, in the same form; None on CPUs."""
    repetitions: int
    timings: tuple[Timing, ...]
    answers: tuple[Answer, ...] = ()


def fitted(timings: Sequence[Timing], operation: Operation = "all_reduce") -> Fit:
    """Return the latency and the bandwidth of an operation among one number of processes.

    Relative errors count, because the times span five decades, and large ones count less, because one size may have
    been disturbed or sent by another protocol. The line's slope is that of an algorithm which sends as little as
    possible: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009. Raises
    PipelineError with fewer than two sizes.
    """
    from scipy.optimize import least_squares  # takes a while, and ranks do not need it

    reduces = [timing for timing in timings if timing.operation == operation]
    numbers = {(timing.processes, timing.hosts) for timing in reduces}
    if len(numbers) != 1 or len({timing.size_bytes for timing in reduces}) < 2:
        raise PipelineError(
            f"probe: found {count(len(reduces), 'all-reduce')} among {count(len(numbers), 'number')} of processes; a "
            "fit needs at least two sizes among one number of processes."
        )
    times = np.log([timing.median_seconds for timing in reduces])
    amounts = np.log([timing.bus_bytes for timing in reduces])

    def errors(line: Any) -> Any:
        return np.logaddexp(line[0], amounts + line[1]) - times

    line = least_squares(errors, (times.min(), (times - amounts).min()), loss="soft_l1", f_scale=0.1).x
    return Fit(
        processes=reduces[0].processes,
        latency_seconds=float(np.exp(line[0])),
        bytes_per_second=float(np.exp(-line[1])),
        relative_error_fraction=float(np.sqrt(np.mean(errors(line) ** 2))),
    )


def gpu_link() -> dict[str, str | int | None]:
    """Describe what joins the GPUs that this process sees, as ``hosts.link_to`` does: NVLink if each pair has it, else
    PCIe; the speed is that of one direction of a GPU, and None if NVML does not know it."""
    link: dict[str, str | int | None] = {"link": None, "megabit_per_second": None}
    with suppress(pynvml.NVMLError):
        gpus = [handle_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
        kind = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        if all(pynvml.nvmlDeviceGetP2PStatus(*pair, kind) == 0 for pair in combinations(gpus, 2)):
            link["link"] = "nvlink"
            lanes = [(pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, lane) for lane in range(pynvml.NVML_NVLINK_MAX_LINKS)]
            answers = [pynvml.nvmlDeviceGetFieldValues(gpu, lanes) for gpu in gpus]
            speeds = [sum(8 * lane.value.uiVal for lane in of_gpu if lane.nvmlReturn == 0) for of_gpu in answers]
        else:
            link["link"] = "pcie"
            ends = [(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu), pynvml.nvmlDeviceGetMaxPcieLinkWidth(gpu))
                    for gpu in gpus]  # fmt: skip
            # Of 130 bits, 128 are data; generation 3 sends 8 Gbit/s a lane, and each further one twice as much.
            speeds = [round(1000 * 2**generation * 128 / 130 * lanes) for generation, lanes in ends]
        link["megabit_per_second"] = min(speeds) or None
    return link


def expected(probe: Probe, on_hosts: int) -> float | None:
    """Return the bus bandwidth that the hardware states for processes on ``on_hosts`` hosts, in bytes per second: the
    slowest host's link or, on one host, the GPUs'. None if it is unknown."""
    links = probe.links if on_hosts > 1 else (probe.gpu_link or {},)
    speeds = [link.get("megabit_per_second") for link in links]
    return None if None in speeds else min(1e6 / 8 * float(speed or 0) for speed in speeds)


def measured(
    config: Config,
    machine: Machine,
    counts: Sequence[int],
    operations: Sequence[Operation] = OPERATIONS,
    sizes: Sequence[int] = SIZES,
    repetitions: int = 3,
) -> Probe:
    """Time ``operations`` with ``sizes`` (bytes, rounded up to 4 for each process) among each of ``counts`` processes.

    Each repetition is in fresh processes, on the hosts that a plan with as many processes uses. All operations take
    turns within a repetition, and every other repetition goes from the largest size to the smallest. Raises ConfigError
    if the machine does not have as many devices, and WorkerError if a process fails.
    """
    if min(counts, default=0) < 2 or min(sizes, default=0) < 1:
        raise PipelineError(
            f"probe: found counts {[*counts]} and sizes {[*sizes]}; expected two processes or more, and a byte or more."
        )
    plans = [_plan(config, machine, processes) for processes in dict.fromkeys(counts)]
    seconds: dict[tuple[int, Operation, int], list[float]] = defaultdict(list)
    about: dict[str, Any] = {}
    for repetition in range(repetitions):
        say(f"probe: repetition {repetition + 1} of {repetitions}", file=sys.stderr)
        for plan in plans:
            done = [key[1:] for key in seconds if key[0] == plan.processes]
            with forked(_rank, (plan.device, cores()), plan.processes, preload=[__name__], on_hosts=plan.hosts) as ask:
                about = ask(None)[0]
                for operation, size in done[:: (-1) ** repetition] or _fitting(operations, sizes, plan, seconds):
                    seconds[plan.processes, operation, size] += ask((operation, size))[:1]
    on_hosts = {plan.processes: plan.hosts for plan in plans}
    timings = tuple(
        Timing(operation=operation, processes=number, hosts=on_hosts[number], size_bytes=size, seconds=tuple(of_size))
        for (number, operation, size), of_size in seconds.items()
    )
    names, links = (hosts.names(), hosts.links()) if machine.hosts > 1 else ((), ())
    probe = Probe(**about, host_names=tuple(names), links=tuple(links), repetitions=repetitions, timings=timings)
    return probe.model_copy(update={"answers": tuple(_answers(probe))})


def _plan(config: Config, machine: Machine, processes: int | Literal["auto"]) -> Plan:
    """Return the plan of a variant with as many processes, whose batch can be divided among any number of them."""
    variant = Variant(parallelism="ddp", processes=processes, scaling="weak")
    return plan_of(config.model_copy(update={"variants": {"probe": variant}}), "probe", machine)


def _fitting(
    operations: Sequence[Operation], sizes: Sequence[int], plan: Plan, seconds: Mapping[Any, Sequence[float]]
) -> Iterator[tuple[Operation, int]]:
    """Yield each operation with each size, ascending, until its calls take long. ``seconds`` holds the times of what
    was yielded before."""
    step = 4 * plan.processes
    going_on = list(operations)
    for size in sorted({-(-size // step) * step for size in sizes}):
        for operation in going_on:
            yield operation, size
        going_on = [operation for operation in going_on if seconds[plan.processes, operation, size][0] < LONG_SECONDS]


def _rank(device: Literal["cpu", "cuda"], cores: float) -> Generator[Any, tuple[Operation, int] | None, None]:
    with world(device, cores) as joined:
        on_gpu = device == "cuda"
        name = torch.cuda.get_device_name() if on_gpu else hardware.cpu_model(hardware.cpu_facts())
        asked = yield {"device": name, "backend": joined.backend, "gpu_link": gpu_link() if on_gpu else None}
        while asked:
            asked = yield seconds_of(joined, *asked, WINDOW_SECONDS)


def _answers(probe: Probe) -> Iterator[Answer]:
    reduces = [timing for timing in probe.timings if timing.operation == "all_reduce"]
    for number in dict.fromkeys(timing.processes for timing in reduces):
        of_number = [timing for timing in reduces if timing.processes == number]
        small, large = of_number[0], of_number[-1]
        stated = expected(probe, large.hosts)
        fastest = large.bus_bytes / min(large.seconds)  # other work on the machine only makes a link look slower
        slow = stated is not None and fastest < SLOW * stated
        yield Answer(large=large, small=small, stated_bytes_per_second=stated, is_slow=slow)


def _chart(probe: Probe, answer: Answer) -> Chart:
    """Draw the bus bandwidths (GB/s) of all operations among one number of processes over their size (bytes)."""
    curves = {
        operation.replace("_", "-"): [
            (float(timing.size_bytes), timing.bus_bytes_per_second / 1e9)
            for timing in probe.timings
            if (timing.operation, timing.processes) == (operation, answer.large.processes)
        ]
        for operation in OPERATIONS
    }
    stated = answer.stated_bytes_per_second
    level = (stated / 1e9, f"stated: {pages.scaled(stated, 'B/s')}") if stated else None
    return loglog(curves, lambda size, _: pages.size(size), lambda speed, _: f"{speed:.3g}", level)


def run(config: Config, machine: Machine, *, as_json: bool) -> None:
    """Probe the links between 2, 4, ... up to all devices; print the report, and write it to ``reports/probe.*``.

    Without GPUs, the processes are as many as with ``processes: auto``. Raises PipelineError.
    """
    most = _plan(config, machine, "auto").processes
    if most < 2:
        raise ConfigError(
            "probe: found one GPU on one host, which has no link to another; to probe the CPU's processes, set "
            "train.device to 'cpu'."
        )
    counts = [2**power for power in range(1, most.bit_length()) if 2**power < most]
    probe = measured(config, machine, [*counts, most])
    charts = [_chart(probe, answer) for answer in probe.answers]
    markdown = write_pages("probe", REPORTS, probe.to_json(), probe=probe, charts=charts)
    say(probe.to_json() if as_json else markdown, end="")
