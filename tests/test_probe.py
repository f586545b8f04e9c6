"""``python -m pipeline probe``: the times of collectives, what is fitted to them, and what the links state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch.distributed as dist

from pipeline import environment, hosts
from pipeline.distributed import WorkerError, World
from pipeline.distributed.collectives import seconds_of
from pipeline.errors import ConfigError
from pipeline.pages import render
from pipeline.params import Config, parse
from pipeline.scaling import probe
from pipeline.scaling.probe import OPERATIONS, Probe, Timing, measured
from tests.as_if_cuda import as_if_cuda
from tests.factories import known
from tests.ranks import run_ranks
from tests.workspaces import CPU_ONLY

FOUR_GPUS = CPU_ONLY.model_copy(update={"gpus": 4})


def config_on(device: str) -> Config:
    return parse({"train": {"device": device}, "variants": {"baseline": {}}})


def reduce(size: int, *seconds: float, processes: int = 4, hosts: int = 1) -> Timing:
    return Timing(operation="all_reduce", processes=processes, hosts=hosts, size_bytes=size, seconds=seconds)


def test_two_ranks_time_every_operation() -> None:
    found = measured(config_on("cpu"), environment.machine(), [2], sizes=(1001, 65_536))
    assert (found.backend, found.numbers) == ("gloo", [2])
    keys = [(timing.operation, timing.size_bytes) for timing in found.timings]
    assert keys == [(operation, size) for size in (1008, 65_536) for operation in OPERATIONS]
    for timing in found.timings:
        assert (timing.processes, timing.hosts, len(timing.seconds)) == (2, 1, 3)
        assert min(timing.seconds) > 0
        assert not timing.is_slow
    assert Probe.model_validate_json(found.to_json()) == found


def test_a_size_that_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = {"all_reduce": 0.2, "reduce_scatter": 0.1, "all_gather": 0.1}
    monkeypatch.setattr(probe, "seconds_of", lambda _, operation, *__: timed[operation])
    ((_, _, times),) = probe._rank("cpu", 1.0, (1024, 4096))
    assert [size for operation, size in times if operation == "all_reduce"] == [1024]
    assert [size for operation, size in times if operation == "all_gather"] == [1024, 4096]


def _broken(joined: World, operation: str) -> float:
    for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"):
        setattr(dist, name, lambda *_: None)
    return seconds_of(joined, operation, 1024, 0.001)  # type: ignore[arg-type]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_wrong_data_are_refused(operation: str) -> None:
    with pytest.raises(WorkerError, match=rf"{operation} of 1024 bytes: rank \d received wrong data"):
        run_ranks(_broken, operation)


def test_more_processes_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"processes: found 8, but this machine has 4 GPUs"):
        measured(config_on("cuda"), FOUR_GPUS, [2, 8])
    with pytest.raises(ConfigError, match="no GPU can be used here"):
        measured(config_on("cuda"), CPU_ONLY, [2])


def test_one_gpu_has_no_link() -> None:
    with pytest.raises(ConfigError, match="found one GPU on one host, which has no link to another"):
        probe.run(config_on("cuda"), FOUR_GPUS.model_copy(update={"gpus": 1}), as_json=True)


@pytest.mark.parametrize(
    ("machine", "device", "counts"),
    [
        (CPU_ONLY, "cpu", [2]),
        (CPU_ONLY.model_copy(update={"hosts": 3}), "cpu", [2, 3]),
        (FOUR_GPUS.model_copy(update={"gpus": 6}), "cuda", [2, 4, 6]),
        (FOUR_GPUS.model_copy(update={"hosts": 2}), "auto", [2, 4, 8]),
    ],
    ids=["cpu", "three hosts", "six gpus", "two hosts of four"],
)
def test_all_devices_are_probed(machine: Any, device: str, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    def stop(_: Any, __: Any, asked: list[int]) -> None:
        assert asked == counts
        raise Stop

    monkeypatch.setattr(probe, "measured", stop)
    with pytest.raises(Stop):
        probe.run(config_on(device), machine, as_json=True)


def made(link: int | None, *large: float) -> Probe:
    """Return a probe of two hosts whose link states ``link`` Mbit/s. ``large``: the seconds for a MiB."""
    reduces = [reduce(1024, 45e-6, processes=2, hosts=2), reduce(2**20, *large, processes=2, hosts=2)]
    stated = {"stated_bytes_per_second": link and link * 1e6 / 8}
    timings = [of.model_copy(update=stated | {"operation": operation}) for operation in OPERATIONS for of in reduces]
    return Probe(device="a CPU", backend="gloo", host_names=("one", "two"), timings=tuple(timings))


@pytest.mark.parametrize(("speeds", "stated"), [((25_000, 10_000), 1.25e9), ((25_000, None), None)])
def test_the_slowest_host_states_the_speed(
    speeds: tuple[int | None, ...], stated: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = [{"link": "ethernet", "megabit_per_second": speed} for speed in speeds]
    monkeypatch.setattr(hosts, "links", lambda: links)
    assert probe.stated_by_hosts() == stated


def test_a_slow_link_is_named() -> None:
    first, *rest = render("probe.md", probe=made(10_000, 0.5, 0.4, 0.6)).replace("\N{NO-BREAK SPACE}", " ").splitlines()
    assert first == (
        "2 processes on 2 hosts: 2.10 MB/s (1.75 MB/s to 2.62 MB/s) with an all-reduce of 1.00 MiB, 45.0 µs with 1.00 "
        "KiB; the link states 10.0 Gbit/s: 0.17% of it."
    )
    slow = "The link between one and two is slower than it should be"
    assert rest[1] == f"**{slow}: it gives 0.17% of the 10.0 Gbit/s that it states.**"


@pytest.mark.parametrize(
    ("link", "large", "words"),
    [
        (10_000, (1e-3, 1e-3), "the link states 10.0 Gbit/s: 84% of it."),
        (10_000, (9e-3, 1e-3), "the link states 10.0 Gbit/s: 17% of it."),  # something else took part of the time
        (None, (9.0,), "what the link should give is unknown."),
    ],
)
def test_a_link_is_not_blamed_without_proof(link: int | None, large: tuple[float, ...], words: str) -> None:
    page = render("probe.md", probe=made(link, *large)).replace("\N{NO-BREAK SPACE}", " ")
    assert words in page.splitlines()[0]
    assert "slower than it should" not in page


def test_the_command_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    found = made(10_000, 0.5)
    monkeypatch.setattr(probe, "measured", lambda *_: found)
    for as_json in (False, True):
        probe.run(config_on("cpu"), CPU_ONLY, as_json=as_json)
        said = capsys.readouterr().out
        assert said == (tmp_path / "reports" / f"probe.{'json' if as_json else 'md'}").read_text(encoding="utf-8")
    assert Probe.model_validate_json((tmp_path / "reports" / "probe.json").read_text(encoding="utf-8")) == found
    page = (tmp_path / "reports" / "probe.html").read_text(encoding="utf-8")
    assert "The link between one and two is slower" in page
    assert page.count("<polyline") == 3
    assert "stated: 1.25\N{NO-BREAK SPACE}GB/s" in page


def test_faster_links_are_assumed_to_be_faster() -> None:
    speeds = [link.bytes_per_second for link in probe.LINKS.values()]
    assert sorted(speeds) == [probe.LINKS[name].bytes_per_second for name in ("eth100", "pcie4", "ib400", "nvlink4")]
    assert probe.LINKS["nvlink4"].seconds(8, 0) == pytest.approx(15e-6)
    assert probe.LINKS["ib400"].seconds(4, 1e6) == pytest.approx(6.6e-6 + 6 * 2.7e-6 + 1.5 * 1e6 / 50e9)


def test_nvlink_and_pcie_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_if_cuda(2):
        assert probe.stated_by_gpus() == 1e6 * 18 * 26_562
        monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", lambda *_: 1)
        assert probe.stated_by_gpus() == pytest.approx(16 * 2e9 * 128 / 130)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxPcieLinkWidth", missing)
        assert probe.stated_by_gpus() is None


def missing(_: Any) -> None:
    raise pynvml.NVMLError_NotSupported


@pytest.mark.gpu
def test_gpus_are_probed() -> None:
    machine = environment.machine()
    if machine.gpus < 2:
        pytest.skip("one GPU has no link to another")
    found = measured(config_on("cuda"), machine, [2], sizes=(1024, 2**20))
    assert found.backend == "nccl"
    assert len(found.timings) == 6
    assert known(found.timings[0].stated_bytes_per_second) > 1e9
