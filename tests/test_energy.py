"""Energy per sample, from counters with known values to the verdict."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch

from pipeline import cli, environment, results
from pipeline.benchmark import arm
from pipeline.comparison.comparison_file import Comparison
from pipeline.distributed import forked
from pipeline.environment import stages
from pipeline.measurement import energy
from pipeline.measurement.energy import Energy, per_sample
from pipeline.params import Bench as BenchSettings
from pipeline.params import Compare, Margins, parse
from pipeline.plans import plan
from pipeline.report import html, markdown, metrics, ratios_csv, tables
from pipeline.results import Bench, Window
from pipeline.results.figures import ENERGY
from pipeline.results.rejections import Rejection, rejection
from pipeline.tools import evidence, inference
from pipeline.tools.inference import timing
from pipeline.tracking.contents import _figures_of, compared_points
from pipeline.training import job
from tests.drivers import plug
from tests.factories import (
    known,
    make_bench,
    make_comparison,
    make_histories,
    make_result,
    make_results,
    make_run,
    make_window,
)
from tests.jobs import write_sessions
from tests.report.conftest import plain
from tests.workspaces import CPU_ONLY, PREPARED, enter

CPU, GPUS = torch.device("cpu"), [torch.device("cuda", index) for index in range(2)]


class Clockwork:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    clock = Clockwork()
    monkeypatch.setattr(energy, "time", clock)
    return clock


@pytest.fixture
def zones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``zones(name=microjoules)`` writes RAPL's files as Linux shows them, one zone per name."""

    def show(**counts: int) -> None:
        for zone, count in counts.items():
            folder = tmp_path / zone.replace("_", ":").replace("rapl", "intel-rapl")
            folder.mkdir(exist_ok=True)
            of = {"rapl_2": "psys", "rapl_0_0": "core", "rapl_1_0": "dram"}.get(zone, f"package-{zone[-1]}")
            for name, value in (("name", of), ("energy_uj", count), ("max_energy_range_uj", 999_999)):
                (folder / name).write_text(f"{value}\n")

    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    return show


def window(
    counters: Energy, clock: Clockwork, during: Callable[[], None], seconds: float = 1.0, *, measured: bool = True
) -> None:
    counters.open()
    clock.now += seconds
    during()
    counters.close(measured=measured)


def test_packages_add_up_and_counters_wrap(zones: Callable[..., None], clock: Clockwork) -> None:
    zones(rapl_0=900_000, rapl_0_0=0, rapl_1=100_000, rapl_1_0=0, rapl_2=0)
    counters = Energy([CPU])
    window(counters, clock, lambda: zones(rapl_0=100_000, rapl_0_0=50_000, rapl_1=350_000, rapl_1_0=9, rapl_2=700_000))
    zones(rapl_0=200_000)  # energy between windows does not count, nor does that of an unmeasured window
    window(counters, clock, lambda: zones(rapl_0=600_000), measured=False)
    window(counters, clock, lambda: zones(rapl_0=700_000, rapl_1=400_000))
    joules = 0.2 + 0.25 + 0.1 + 0.05
    assert per_sample([counters.read()], 8) == {"joules_per_sample": pytest.approx(joules / 8)}
    readings = [counters.read()] * 2  # two processes that share a CPU
    assert per_sample(readings, 8) == {"joules_per_sample": pytest.approx(joules / 8)}


def test_a_shared_gpu_counts_once(clock: Clockwork, monkeypatch: pytest.MonkeyPatch) -> None:
    power = {"GPU-a": 100, "GPU-b": 250}  # watts
    plug(monkeypatch, nvmlDeviceGetTotalEnergyConsumption=lambda gpu: 7_000 + round(1e3 * power[gpu] * clock.now))
    ranks = [Energy([gpu]) for gpu in GPUS]
    for rank in ranks:
        window(rank, clock, lambda: None, seconds=2.0)
    first, second = (rank.read() for rank in ranks)
    assert per_sample([first, second], 1000) == {"joules_per_sample": pytest.approx(0.7)}
    assert per_sample([first, first], 1000) == {"joules_per_sample": pytest.approx(0.2)}
    whole = Energy(GPUS)  # one process with two GPUs
    window(whole, clock, lambda: None, seconds=2.0)
    assert per_sample([whole.read()], 1000) == {"joules_per_sample": pytest.approx(0.7)}


def why_not(*ranks: Energy) -> Rejection:
    [(name, why)] = per_sample([rank.read() for rank in ranks], 8).items()
    assert name == "why_no_energy"
    assert isinstance(why, Rejection)
    return why


def test_without_a_counter_the_energy_is_unknown(
    zones: Callable[..., None], clock: Clockwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = Energy([CPU])
    window(counters, clock, lambda: None)
    assert why_not(counters).code == "no_energy_counter"
    zones(rapl_2=0, rapl_0_0=0)
    assert why_not(Energy([CPU])).code == "no_energy_counter"
    zones(rapl_0=77, rapl_1=0)
    counters = Energy([CPU])
    window(counters, clock, lambda: zones(rapl_0=99))
    assert why_not(counters).code == "energy_stands"

    def fails(_: str) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    plug(monkeypatch, nvmlDeviceGetTotalEnergyConsumption=fails)
    counters = Energy(GPUS[:1])
    window(counters, clock, lambda: None)
    assert why_not(counters) == rejection("energy_unreadable", error="Not Supported")


@pytest.mark.parametrize("reads", [0, 1, 2])
def test_without_permission_the_energy_is_unknown(
    reads: int, zones: Callable[..., None], clock: Clockwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permission is missing from the first, second or third read on. If one rank's energy is unknown, the energy of all
    ranks together is unknown."""
    zones(rapl_0=0)
    of_cpu = Energy([CPU])
    window(of_cpu, clock, lambda: zones(rapl_0=5))
    number, left = energy._number, itertools.count(reads, -1)

    def refused(path: Path) -> int:
        if path.name == "energy_uj" and next(left) <= 0:
            raise PermissionError(13, "Permission denied", str(path))
        return number(path)

    monkeypatch.setattr(energy, "_number", refused)
    counters = Energy([CPU])
    for count in (10, 20):
        window(counters, clock, lambda count=count: zones(rapl_0=count))  # type: ignore[misc]
    assert why_not(of_cpu, counters) == why_not(counters)
    assert "Permission denied" in str(why_not(counters).facts["error"])


def test_too_short_windows_name_the_setting(
    zones: Callable[..., None], clock: Clockwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug(monkeypatch, nvmlDeviceGetTotalEnergyConsumption=lambda _: round(1e5 * clock.now))
    counters = Energy(GPUS[:1], "raise bench.window_seconds")
    for seconds in (0.5, 1.5, 0.4):
        window(counters, clock, lambda: None, seconds)
    times = {"shortest_seconds": 1.0, "mean_seconds": pytest.approx(0.8)}
    assert why_not(counters).facts == times | {"remedy": "raise bench.window_seconds"}
    zones(rapl_0=0)  # RAPL's counter is updated more often, so shorter windows suffice
    counters = Energy([CPU])
    window(counters, clock, lambda: zones(rapl_0=9), seconds=0.4)
    assert per_sample([counters.read()], 9) == {"joules_per_sample": pytest.approx(1e-6)}


# In the bench.


PARAMS: dict[str, Any] = {
    "fetch": {"dataset": "digits"},
    "train": {"device": "cpu", "seeds": [3], "batch_size": 64, "warmup_steps": 1},
    "bench": {"energy": True, "max_input_wait": 1.0},
    "variants": {"baseline": {}, "ddp": {"parallelism": "ddp"}},
}


def _with_a_joule_a_window(refused: list[Rejection], *arguments: Any) -> Generator[Any, Any, None]:
    """Run an arm's process with an energy counter that grows by a joule with each read."""
    reads = itertools.count()
    energy._of_packages = lambda: {"package-0": energy._Counter(lambda: next(reads), 1.0, 2**64)}
    energy.SHORTEST_SECONDS["cpu"] = 0.0
    for name, refusals in (("detectors", []), ("of_turns", refused)):  # so that other load cannot fail the test
        setattr(arm, name, lambda *_, kept=refusals, **__: kept)
    yield from arm._rank_of_arm(*arguments)


@pytest.mark.parametrize("refused", [False, True])
def test_two_ranks_count_their_cpu_once(refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = enter(tmp_path, monkeypatch, PARAMS)
    rejections = [rejection("told", text="others were at work")] if refused else []
    arguments = (rejections, config, plan(config, "ddp", CPU_ONLY), PREPARED, environment.read(), 6, False)
    with forked(_with_a_joule_a_window, arguments, 2, preload=[arm.__name__]) as ask:
        for request in (None, 2, 2, 2):
            ask(request)
        measured, _ = ask(None)
    assert bool(measured.window.rejections) is refused
    known = None if refused else 3 / (6 * 64)  # each of the three turns is one window, because no epoch ends in them
    assert (measured.window.joules_per_sample, measured.window.why_no_energy) == (known, None)


# From the samples to the verdict.


def with_energy(bench: Bench, joules: Mapping[str, float], why_not: str | None = None) -> Bench:
    """Return ``bench`` with energies. ``joules``: variant -> energy per sample, as a multiple of the baseline's 5 mJ.
    ``why_not``: why all energies are unknown; None if they are known."""

    def sample(window: Window, draw: random.Random, factor: float) -> Window:
        known = {"joules_per_sample": 0.005 * factor * math.exp(draw.gauss(0, 0.01))}
        return window.model_copy(update={"why_no_energy": rejection("told", text=why_not)} if why_not else known)

    arms = []
    for arm_ in bench.arms:
        draw = random.Random(arm_.name)
        samples = tuple(sample(window, draw, joules.get(arm_.variant, 1.0)) for window in arm_.samples)
        arms.append(arm_.model_copy(update={"samples": samples}))
    return bench.model_copy(update={"arms": tuple(arms)})


def comparison(margin: float | None, why_not: str | None = None, **changes: Any) -> Comparison:
    bench = with_energy(make_bench(**changes), {"ddp": 2.0, "memory": 0.5}, why_not)
    return make_comparison(bench=bench, margins=Margins(energy=margin))


def test_energy_counts_in_verdicts_if_it_has_a_margin() -> None:
    usual, shown, judged = make_comparison(), comparison(None), comparison(0.05)
    verdicts = [[variant.verdict for variant in comparison.variants] for comparison in (usual, shown, judged)]
    assert verdicts == [[None, "pays", "trades"], [None, "pays", "trades"], [None, "trades", "trades"]]
    for compared in (shown, judged):
        baseline, ddp, memory = compared.variants
        assert baseline.of(ENERGY) == pytest.approx(0.005, rel=0.02)
        assert baseline.ratios == {}
        of_ddp, of_memory = ddp.ratios[ENERGY], memory.ratios[ENERGY]
        assert of_ddp.estimate == pytest.approx(2.0, rel=0.02)
        assert of_memory.estimate == pytest.approx(0.5, rel=0.02)
        assert (of_ddp.decision, of_memory.decision) == ("worse", "better")
        assert (of_ddp.pairs, of_ddp.rejected) == (12, 0)
    assert judged.champion is None
    assert shown.champion == usual.champion


@pytest.mark.parametrize(("margin", "decision"), [(None, ""), (0.05, "better")])
def test_energy_is_decided_only_with_a_margin(margin: float | None, decision: str) -> None:
    the_comparison = tables.tables(comparison(margin))[0]
    place = [heading for heading, _ in the_comparison.columns].index("Energy a sample")
    cell = next(row.cells[place] for row in the_comparison.rows if row.name == "memory")
    assert (cell.decision, "undecided" in " ".join(cell.beside)) == (decision, False)


def test_the_champion_may_save_most_energy() -> None:
    bench = with_energy(make_bench(throughput={}, memory={}, rejected={}), {"ddp": 0.8, "memory": 0.5})
    chosen = known(make_comparison(bench=bench, margins=Margins(energy=0.05)).champion)
    assert (chosen.variant, chosen.quantity, chosen.runner_up) == ("memory", "energy a sample", "ddp")
    assert make_comparison(bench=bench).champion is None
    better = make_result("right", [make_run(seed, test_correct=9500 + 5 * seed) for seed in range(3)])
    measured = [make_result(), better]
    saving = with_energy(make_bench(measured), {"right": 0.5})
    for margin, quantity in ((None, None), (0.05, "energy a sample")):
        champion = make_comparison(measured, saving, margins=Margins(energy=margin)).champion
        assert known(champion).quantity == quantity


def test_energy_is_untrusted_if_baselines_differ() -> None:
    bench = with_energy(make_bench(), {})
    base = bench.arms[0].samples
    wild = tuple(sample.model_copy(update={"joules_per_sample": 0.005 * (1 + n)}) for n, sample in enumerate(base))
    arms = (bench.arms[0].model_copy(update={"samples": wild}), *bench.arms[1:])
    comparison = make_comparison(bench=bench.model_copy(update={"arms": arms}), margins=Margins(energy=0.05))
    ddp = comparison.variants[1]
    assert (ddp.verdict, ddp.of(ENERGY)) == ("untrusted", None)
    assert "energy a sample: the baseline measured against itself" in " ".join(ddp.shared_reasons)


def test_energy_is_shown_only_if_measured() -> None:
    usual, shown, judged, unknown = (
        make_comparison(), comparison(None), comparison(0.05), comparison(0.05, "its counter stood still"),
    )  # fmt: skip
    histories = make_histories(make_results())
    for compared in (shown, judged, unknown):
        assert "Energy a sample" in markdown(compared)
        assert "Energy a sample" in html(compared, histories)
    pages = markdown(usual), html(usual, histories), usual.to_json(), ratios_csv(usual), str(metrics(usual.variants[1]))
    assert not [word for word in ("nergy", "joules") for text in pages if word in text]
    said = plain(markdown(judged))
    assert re.search(r"\b(1\.9|2\.0)\d*x the energy a sample", said)
    assert "5% of energy a sample" in said
    assert "the energy a sample (" not in plain(markdown(shown)).split("A/A")[0]
    assert "its counter stood still" in markdown(unknown)
    assert unknown.variants[1].verdict == "pays"  # an unknown energy does not count in the verdict
    assert metrics(judged.variants[1])["energy_ratio"] == pytest.approx(2.0, rel=0.02)
    assert ratios_csv(judged).count("energy a sample") == 3  # two variants and the A/A control


def test_the_store_and_the_evidence_contain_the_energy(tmp_path: Path) -> None:
    points = compared_points(comparison(None).variants[1], {})
    (point,) = (point for point in points if "joules" in point.key)
    assert point.key == "bench/joules_per_sample"
    assert point.value == pytest.approx(0.01, rel=0.02)
    points = compared_points(make_comparison().variants[1], {})
    assert not [point for point in points if "joules" in point.key]
    made = iter((2.0, 2.1))
    with contextlib.chdir(tmp_path):
        write_sessions(lambda *given, **more: with_energy(make_bench(*given, **more), {"ddp": next(made)}))
        evidence.write()
        assert cli.main(["evidence", "check", "evidence.zip"]) == 0
        file = tmp_path / "bench.json"
        file.write_text(file.read_text().replace('"joules_per_sample": 0.00', '"joules_per_sample": 0.01', 1))
        with pytest.raises(evidence.EvidenceError, match=r"energy|joules"):
            evidence.write()


def test_files_without_energy_do_not_mention_it() -> None:
    assert "energy" not in BenchSettings().model_dump() | Margins().model_dump()
    assert not {"joules_per_sample", "why_no_energy"} & make_window().model_dump().keys()
    on = parse({"variants": {"baseline": {}}, "bench": {"energy": True}, "infer": {"energy": True}})
    off = parse({"variants": {"baseline": {}}})
    said = [stages.described(config, {}, ["bench", "infer", "compare"])["stages"] for config in (on, off)]
    for stage in ("bench", "infer"):
        assert said[0][stage]["settings"] == said[1][stage]["settings"] | {"energy": True}
    assert not [stage for stage in said[1].values() if "energy" in stage["settings"]]
    assert said[0]["compare"] == said[1]["compare"]
    assert Compare(margins=Margins(energy=0.1)).model_dump()["margins"]["energy"] == 0.1


# In inference.


def test_inference_reports_joules_per_sample_or_why_not(
    zones: Callable[..., None], clock: Clockwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device draws ten watts. The two forms take 1/64 s and 1/128 s for an image."""
    monkeypatch.setattr(timing, "time", clock)
    zones(rapl_0=0)
    count = energy._number
    monkeypatch.setattr(
        energy, "_number", lambda path: round(1e7 * clock.now) % 1_000_000 if path.name == "energy_uj" else count(path)
    )

    def form(seconds: float) -> Any:
        def predict(images: torch.Tensor) -> torch.Tensor:
            clock.now += seconds * len(images)
            return images

        return predict

    forms, images = {"slow": form(1 / 64), "fast": form(1 / 128)}, torch.zeros(8, 1, 2, 2, dtype=torch.uint8)
    for seconds, lasts in ((0.0625, True), (0.01, False)):
        times = timing.in_rounds(forms, images, [1], rounds=6, seconds=seconds, synchronise=lambda: None, devices=[CPU])
        noise = timing.noise_of(times["slow"], times["slow"], 0.15)
        (slow,), (fast,) = (timing.throughput_of(times[name], times["slow"], noise) for name in forms)
        if lasts:
            assert (slow.joules_per_sample, fast.joules_per_sample) == pytest.approx((10 / 64, 10 / 128), rel=1e-5)
            assert slow.low_joules_per_sample == pytest.approx(slow.high_joules_per_sample, rel=1e-5)
            assert slow.why_no_energy is None
        else:
            assert (fast.joules_per_sample, fast.low_joules_per_sample) == (None, None)
            assert "raise infer.window_seconds" in str(fast.why_no_energy)
    plain_forms = timing.in_rounds(forms, images, [1], rounds=6, seconds=0.1, synchronise=lambda: None)
    (off,) = timing.throughput_of(plain_forms["fast"], plain_forms["slow"], noise)
    assert not [name for name in off.model_dump() if "joules" in name or "energy" in name]


@pytest.mark.parametrize("has_counters", [True, False])
def test_the_infer_stage_writes_requested_energy(
    has_counters: bool, zones: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    infer = {"energy": True, "forms": ["eager"], "batch_sizes": [8], "rounds": 2, "window_seconds": 0.001}
    config = enter(tmp_path, monkeypatch, PARAMS | {"infer": infer, "publish": {"live": False}})
    job.run(config, "baseline", CPU_ONLY, PREPARED)
    if has_counters:
        zones(rapl_0=0)
        reads = itertools.count()
        monkeypatch.setattr(energy, "_number", lambda path: 999_999 if "max" in path.name else next(reads))
        monkeypatch.setitem(energy.SHORTEST_SECONDS, "cpu", 0.0)
    inference.run(config, "baseline", CPU_ONLY, PREPARED)
    record = json.loads(results.inference_file("baseline", "json").read_text())
    page = results.inference_file("baseline", "md").read_text()
    single, batch = record["forms"][0]["measured"]["throughput"]
    published = {name.rpartition("/")[2] for name, _ in _figures_of("baseline", record)}
    assert "| joules a sample, of the device alone | batch 1 | batch 8 |" in page
    if has_counters:
        assert min(size["joules_per_sample"] for size in (single, batch)) > 0
        assert {"batch_1_joules_per_sample", "batch_8_joules_per_sample"} <= published
        assert "No energy" not in page
    else:
        assert "lists no CPU package" in single["why_no_energy"]
        assert "- With batch 8, the energy of at least one form is unknown: " in page
        assert not [name for name in published if "joules" in name]
