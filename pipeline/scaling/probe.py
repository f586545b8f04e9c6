"""How fast the links between the devices are: the times of collectives, beside what the hardware states."""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pynvml
import torch

from pipeline import hosts, pages, plans
from pipeline.distributed import forked, world
from pipeline.distributed.collectives import seconds_of
from pipeline.environment import cores, hardware
from pipeline.errors import ConfigError, count, say
from pipeline.measurement.windows import handle_of
from pipeline.params import Config, Machine, Variant
from pipeline.report import write_pages
from pipeline.report.pictures import Chart, loglog
from pipeline.results import REPORTS, Document, Record
from pipeline.results.records import Operation

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
SIZES = tuple(4**power << 10 for power in range(10))
"""1 KiB to 256 MiB, in bytes."""
REPETITIONS = 3
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

    def seconds(self, processes: int, size_bytes: float) -> float:
        """Return the time of an all-reduce: 2 (N - 1) steps of a ring, each with one of N parts of the tensor."""
        of_step = self.latency_seconds + size_bytes / processes / self.bytes_per_second
        return BASE_SECONDS + 2 * (processes - 1) * of_step


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
    """Of one call on the slowest process, a value for each repetition."""
    stated_bytes_per_second: float | None = None
    """The bus bandwidth that the hardware states; None if it is unknown."""

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    def speed(self, seconds: float) -> float:
        """Return the bus bandwidth of a call that takes so long: the bytes that each process must send at least, a
        second. It does not depend on the number of processes. Source: nccl-tests, doc/PERFORMANCE.md."""
        each_way = (self.processes - 1) / self.processes * self.size_bytes
        return (2 if self.operation == "all_reduce" else 1) * each_way / seconds

    @property
    def is_slow(self) -> bool:
        """True if even the fastest repetition gives less than ``SLOW`` of what the link states: other work on the
        machine only makes a link look slower."""
        stated = self.stated_bytes_per_second
        return stated is not None and self.speed(min(self.seconds)) < SLOW * stated


class Probe(Document):
    """``reports/probe.json``."""

    device: str
    """Name of the GPU or CPU."""
    backend: Literal["nccl", "gloo"]
    host_names: tuple[str, ...]
    timings: tuple[Timing, ...]
    """By the number of processes and the size."""

    @property
    def numbers(self) -> list[int]:
        """The numbers of processes."""
        return sorted({timing.processes for timing in self.timings})

    def of(self, processes: int, operation: Operation = "all_reduce") -> list[Timing]:
        """Return the timings of an operation among a number of processes, from the smallest to the largest size."""
        return [timing for timing in self.timings if (timing.processes, timing.operation) == (processes, operation)]

    def taken(self, link: str | None, operation: Operation, processes: int, hosts: int, size: float) -> float:
        """Return the seconds of an operation with ``size`` bytes, among processes on so many hosts.

        Further devices have links as those here or, between hosts, the assumed one (``link``): a host's devices then
        reduce or gather among themselves first. Between two sizes, it is interpolated. The time of the smallest size is
        the latency: with the number of processes, it grows with the messages that follow each other, the rest with the
        bytes that each process sends. The messages are those of a ring or, in an all-reduce with NCCL, of a tree, which
        it uses where latency counts (Jeaugey, "Massively scale your deep learning training with NCCL 2.4", NVIDIA
        2019).
        """
        numbers = [of for of in self.numbers if (self.of(of)[0].hosts > 1) == (hosts > 1)] or self.numbers
        if link and hosts > 1 and processes not in numbers:
            of_host = processes // hosts
            inner = self.taken(link, operation, of_host, 1, size) if of_host > 1 else 0.0
            half = 1.0 if operation == "all_reduce" else 0.5  # an all-reduce is a scatter and a gather
            return inner + half * LINKS[link].seconds(hosts, size)
        timed = max((of for of in numbers if of <= processes), default=numbers[0])
        timings = self.of(timed, operation)
        sizes, seconds = [timing.size_bytes for timing in timings], [timing.median_seconds for timing in timings]
        whole = max(1.0, size / sizes[-1]) * float(np.interp(size, sizes, seconds))
        latency = min(seconds[0], whole)
        more_messages = (processes - 1) / (timed - 1)
        if self.backend == "nccl" and operation == "all_reduce":
            more_messages = math.log2(processes) / math.log2(timed)
        more_bytes = (1 - 1 / processes) / (1 - 1 / timed)
        return more_messages * latency + more_bytes * (whole - latency)


def stated_by_gpus() -> float | None:
    """Return the bytes per second that each GPU that this process sees can send to another, in one direction: by NVLink
    if each pair has it, else by PCIe. None if NVML does not know it."""
    with suppress(pynvml.NVMLError):
        gpus = [handle_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
        kind = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        if all(pynvml.nvmlDeviceGetP2PStatus(*pair, kind) == 0 for pair in combinations(gpus, 2)):
            lanes = [(pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, lane) for lane in range(pynvml.NVML_NVLINK_MAX_LINKS)]
            answers = [pynvml.nvmlDeviceGetFieldValues(gpu, lanes) for gpu in gpus]  # in megabytes per second
            speeds = [1e6 * sum(lane.value.uiVal for lane in of_gpu if lane.nvmlReturn == 0) for of_gpu in answers]
        else:
            ends = [(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu), pynvml.nvmlDeviceGetMaxPcieLinkWidth(gpu))
                    for gpu in gpus]  # fmt: skip
            # Of 130 bits, 128 are data; generation 3 sends 8 Gbit/s a lane, and each further one twice as much.
            speeds = [1e9 / 8 * 2**generation * 128 / 130 * lanes for generation, lanes in ends]
        return min(speeds) or None
    return None


def stated_by_hosts() -> float | None:
    """Return the bytes per second of the slowest host's link by its system; None if one is unknown."""
    speeds = [link["megabit_per_second"] for link in hosts.links()]
    return None if None in speeds else min(1e6 / 8 * float(speed or 0) for speed in speeds)


def numbers_here(config: Config, machine: Machine) -> list[int]:
    """Return the numbers of processes between which there are links: 2, 4, ... up to all devices. Without GPUs, these
    are as many as with ``processes: auto``. Raises ConfigError if there are none."""
    most = _plan(config, machine, "auto").processes
    if most < 2:
        raise ConfigError(
            "found one GPU on one host, which has no link to another; to measure the CPU's processes, set train.device "
            "to 'cpu'."
        )
    return doubled(2, most)


def doubled(first: int, last: int) -> list[int]:
    """Return ``first``, doubled as long as it is below ``last``, and ``last``."""
    return [first, *doubled(min(2 * first, last), last)] if first < last else [last]


def _plan(config: Config, machine: Machine, processes: int | Literal["auto"]) -> plans.Plan:
    """Return the plan of a variant with as many processes, whose batch can be divided among any number of them."""
    variant = Variant(parallelism="ddp", processes=processes, scaling="weak")
    return plans.plan(config.model_copy(update={"variants": {"probe": variant}}), "probe", machine)


def measured(config: Config, machine: Machine, numbers: Sequence[int], sizes: Sequence[int] = SIZES) -> Probe:
    """Time all operations with ``sizes`` (bytes, ascending; rounded up to 4 for each process) among each of ``numbers``
    processes, on the hosts that a plan with as many processes uses.

    Raises ConfigError if the machine does not have as many devices, and WorkerError if a process fails.
    """
    planned, timings, about = [_plan(config, machine, processes) for processes in numbers], list[Timing](), {}
    for plan in planned:
        say(f"probe: {count(plan.processes, 'process')}", file=sys.stderr)
        arguments = (plan.device, cores(), sizes)
        with forked(_rank, arguments, plan.processes, preload=[__name__], on_hosts=plan.hosts) as ask:
            about, stated, seconds = ask(None)[0]
        stated = stated_by_hosts() if plan.hosts > 1 else stated
        where: dict[str, Any] = {"processes": plan.processes, "hosts": plan.hosts, "stated_bytes_per_second": stated}
        for (operation, size), values in seconds.items():
            timings.append(Timing(operation=operation, size_bytes=size, seconds=values, **where))
    return Probe(**about, host_names=tuple(hosts.names()), timings=tuple(timings))


def _rank(device: Literal["cpu", "cuda"], cores: float, sizes: Sequence[int]) -> Generator[tuple[Any, ...]]:
    """Yield the device and the backend, what its links state, and operation and size -> seconds. An operation takes no
    larger sizes once its calls take long, which all ranks see alike."""
    seconds: dict[tuple[Operation, int], list[float]] = defaultdict(list)
    with world(device, cores) as joined:
        step, on_gpu = 4 * joined.size, device == "cuda"
        for _ in range(REPETITIONS):
            going_on = [*OPERATIONS]
            for size in (-(-size // step) * step for size in sizes):
                for operation in going_on:
                    seconds[operation, size].append(seconds_of(joined, operation, size, WINDOW_SECONDS))
                going_on = [operation for operation in going_on if seconds[operation, size][-1] < LONG_SECONDS]
        name = torch.cuda.get_device_name() if on_gpu else hardware.cpu_model(hardware.cpu_facts())
        yield {"device": name, "backend": joined.backend or ""}, stated_by_gpus() if on_gpu else None, dict(seconds)


def run(config: Config, machine: Machine, *, as_json: bool) -> None:
    """Probe the links between the devices; print the report, and write it to ``reports/probe.*``. Raises
    PipelineError."""
    probe = measured(config, machine, numbers_here(config, machine))
    markdown = write_pages("probe", REPORTS, probe.to_json(), probe=probe, chart_of=_chart)
    say(probe.to_json() if as_json else markdown, end="")


def _chart(probe: Probe, processes: int) -> Chart:
    """Draw the bus bandwidths (GB/s) of all operations among a number of processes over their size (bytes)."""
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for timing in probe.timings:
        if timing.processes == processes:
            speed = timing.speed(timing.median_seconds)
            curves[timing.operation.replace("_", "-")].append((float(timing.size_bytes), speed / 1e9))
    stated = probe.of(processes)[0].stated_bytes_per_second
    level = (stated / 1e9, f"stated: {pages.scaled(stated, 'B/s')}") if stated else None
    return loglog(curves, lambda size, _: pages.size(size), lambda speed, _: f"{speed:.3g}", level)
