"""Scaling curves: the parts of a step, projections with known answers, what pays, and the command on a small job."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.errors import ConfigError
from pipeline.params import catalogue, parse
from pipeline.profiling.arithmetic import Unreduced
from pipeline.results import Arithmetic, Exchange, Window
from pipeline.results.figures import THROUGHPUT
from pipeline.scaling import command, projection
from pipeline.scaling.command import Options
from pipeline.scaling.curves import Analysis, Curve, Measured, Report
from pipeline.scaling.projection import beside, joined, parts
from pipeline.techniques import of_plan
from pipeline.training.assembly import compose
from tests.commands import Command
from tests.curves import BATCH, MEGABYTE, MILLISECOND, make_alone, make_measured, make_probe, samples
from tests.factories import known, make_comparison, make_window
from tests.nets import ALONE, batches_of, conv_net, make_plan, task_of
from tests.ranks import run_ranks
from tests.workspaces import CPU_ONLY, SERVER, enter, variables


def reduced(alone: Arithmetic, latency_ms: float, per_megabyte_ms: float) -> list[float]:
    sizes = [exchange.size_bytes / MEGABYTE for exchange in alone.buckets]
    return [MILLISECOND * (latency_ms + per_megabyte_ms * size) for size in sizes]


# The parts of a step.


def test_ranks_steps_are_joined_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    unreduced = Unreduced(make_plan(processes=2, parallelism="ddp"), ALONE)
    monkeypatch.setattr(World, "gather", lambda _, own: [own, ("b", [10.0, 14.0, 12.0])])
    monkeypatch.setattr(unreduced._clock, "between", lambda start, end: end - start)
    unreduced._steps.extend(
        (start, [(start + ready, 8, "all_reduce")]) for start, ready in ((0, 6.0), (1, 4.0), (2, 9.0))
    )
    read = unreduced.read(SimpleNamespace(step_seconds=[12.0, 8.0, 10.0]))  # type: ignore[arg-type]
    assert (read.hosts, read.rank_seconds) == ((ALONE.host, "b"), (10.0, 12.0))
    assert read.latest_seconds == pytest.approx((12 + 14 + 12) / 3)
    assert read.buckets == ((6.0, 8, "all_reduce"),)


def test_rounds_of_an_arm_are_joined() -> None:
    def round_of(*ranks: float, latest: float, buckets: Sequence[float]) -> Window:
        exchanges = tuple(Exchange(ready, size) for ready, size in zip(buckets, (4, 8), strict=True))
        steps = Arithmetic(hosts=("a", "b"), rank_seconds=ranks, latest_seconds=latest, buckets=exchanges)
        return make_window(arithmetic=steps)

    usual = round_of(10e-3, 12e-3, latest=38e-3 / 3, buckets=(4e-3, 7e-3))
    disturbed = round_of(90e-3, 80e-3, latest=90e-3, buckets=(36e-3, 63e-3))
    alone = joined([usual, usual, disturbed])
    assert alone.mean_seconds == pytest.approx(11e-3)
    assert alone.rank_seconds == pytest.approx((10e-3, 12e-3))
    assert alone.latest_seconds == pytest.approx(38e-3 / 3)
    assert [bucket.size_bytes for bucket in alone.buckets] == [4, 8]
    assert [bucket.ready_seconds for bucket in alone.buckets] == pytest.approx([4.4e-3, 7.7e-3])


def test_buckets_are_reduced_one_after_the_other() -> None:
    # The first ends at 5 + 4 = 9, so the second begins at 9 instead of 8 and ends at 13, 5 after it was ready.
    alone = make_alone(10, buckets=((5e-3, MEGABYTE), (8e-3, MEGABYTE)))
    made = parts(alone, 0.2, 2, reduced(alone, 1, 3), blocking=False)
    assert made.exposed == pytest.approx(5e-3)
    assert made.hidden == pytest.approx(3e-3)
    assert [made.arithmetic, made.input, made.waiting] == pytest.approx([8e-3, 2e-3, 0.0])
    assert made.step == pytest.approx(15e-3)


def test_round_off_is_no_communication() -> None:
    made = projection.Parts(0.1, 0.2, 0.3, hidden=0.1)
    assert made.within(made.step) == made


def test_jitter_grows_with_the_processes() -> None:
    alone = make_alone(10, late_ms=1, jitter_ms=1)
    two, four = (parts(alone, 0.0, number, reduced(alone, 0, 0), blocking=False).waiting for number in (2, 4))
    assert two == pytest.approx(2e-3)
    assert four - 1e-3 == pytest.approx(1.029e-3 / 0.564, rel=0.03)  # the expected largest of 4 and of 2


def test_gathers_delay_what_needs_them() -> None:
    gathers = [Exchange(0.0, MEGABYTE, "all_gather"), Exchange(2e-3, MEGABYTE, "all_gather")]
    alone = make_alone(30, buckets=(*gathers, Exchange(30e-3, MEGABYTE, "reduce_scatter")))
    made = parts(alone, 0.0, 2, reduced(alone, 0, 6), blocking=False)
    # The first delays the step by 4, the second ends at 12, before what follows it, and nothing hides the last.
    assert [made.exposed, made.hidden] == pytest.approx([10e-3, 8e-3])
    assert parts(alone, 0.0, 2, reduced(alone, 0, 6), blocking=True).exposed == pytest.approx(18e-3)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.5])
def test_beside_is_found_from_a_whole_step(factor: float) -> None:
    def parts_with(tried: float) -> projection.Parts:
        alone = make_alone(50)
        return parts(alone, 0.0, 2, reduced(alone, 1, 1), tried, blocking=False)

    assert beside(parts_with(factor).step, parts_with) == pytest.approx(factor, rel=1e-6)


def test_hidden_communication_says_nothing_of_beside() -> None:
    alone = make_alone(50, buckets=((10e-3, MEGABYTE), (49e-3, 0)))
    assert beside(50e-3, lambda tried: parts(alone, 0.0, 2, reduced(alone, 0, 1e-3), tried, blocking=False)) == 1.0


# Curves from samples with known answers.


def analysis_of(measured: Measured, worth: float = 0.1, **options: Any) -> Analysis:
    values = {"price": None, "link": None, "epochs": 10.0, "to_target": False} | options
    return Analysis(Report(measured=measured, worth=worth, **values), 0.15)


def curve_of(measured: Measured, worth: float = 0.1, **options: Any) -> Curve:
    (curve,) = analysis_of(measured, worth, **options).curves()
    return curve


def test_projections_follow_the_formula() -> None:
    single, two, four = curve_of(make_measured()).points
    assert single.speedup.estimate == pytest.approx(1.0, rel=1e-3)
    assert two.speedup.estimate == pytest.approx(100 / 61, rel=1e-3)
    assert two.left_out is not None
    assert two.left_out.estimate == pytest.approx(100 / 61, rel=1e-3)
    # Among 4: three times the latency of a ring's messages, and 1.5 instead of 1 ms a megabyte.
    assert four.speedup.estimate == pytest.approx(100 / (25 + 3 + 15), rel=5e-3)  # varying rounds
    assert (four.speedup.low or 0) < 100 / 43 / math.exp(0.09)
    assert asdict(known(four.parts)) == pytest.approx(
        {"arithmetic": 25e-3, "input": 0.0, "waiting": 0.0, "exposed": 18e-3, "hidden": 0.0}, rel=0.02, abs=1e-4
    )


SHARDS = [
    Exchange(0.0, 10 * MEGABYTE, "all_gather"),
    Exchange(15e-3, 10 * MEGABYTE, "all_gather"),
    Exchange(25e-3, 10 * MEGABYTE, "reduce_scatter"),
]


def test_shards_are_projected_too() -> None:
    # Each takes half of an all-reduce, and nothing hides it: among 2, three times 5.5 ms; among 4, three times 9 ms.
    _, two, four = curve_of(make_measured(50 + 3 * 5.5, buckets=SHARDS)).points
    assert two.left_out is not None
    assert two.left_out.estimate == pytest.approx(100 / 66.5, rel=1e-3)
    assert four.speedup.estimate == pytest.approx(100 / (25 + 27), rel=1e-2)
    assert (four.speedup.low or 0) < 100 / 52 / math.exp(0.24)
    assert known(four.parts).hidden == pytest.approx(0.0, abs=1e-4)


def test_replicas_average_what_was_scattered() -> None:
    # Two models on two processes each: 5.5 ms to scatter, then an all-reduce of half among two, of 1 + 5 ms. On two
    # hosts, each host's link carries both halves.
    here = make_measured().places[1].model_copy(update={"processes": 4, "replicas": 2, "measured": True})
    for hosts, seconds in (1, 5.5 + 6), (2, 5.5 + 11):
        place = here.model_copy(update={"hosts": hosts})
        measured = make_measured().model_copy(update={"places": (place,)})
        made = analysis_of(measured)._seconds(place, SHARDS[-1])
        assert made == pytest.approx(MILLISECOND * seconds, rel=1e-2)


def test_a_group_over_hosts_is_no_larger_than_itself() -> None:
    # Two models on two hosts each, where four processes were probed: a scatter among two sends 2/3 of the bytes of one
    # among four, with a third of the messages; the probe of two was within a host.
    across = tuple(timing.model_copy(update={"hosts": 4}) for timing in make_probe(4, 3.0).timings)
    probe = make_probe(2, 1e-3, 1e-3)
    probe = probe.model_copy(update={"timings": probe.timings + across})
    place = make_measured().places[1].model_copy(update={"processes": 4, "hosts": 4, "replicas": 2})
    made = analysis_of(make_measured().model_copy(update={"places": (place,), "probe": probe}))
    assert made._seconds(place, SHARDS[0]) == pytest.approx(5.5e-3, rel=1e-2)


def test_a_hook_of_16_bits_sends_half() -> None:
    plan = make_plan(processes=2, parallelism="ddp", communication_hook="bf16")
    unreduced = Unreduced(plan, ALONE)
    unreduced._steps.append((0.0, []))
    unreduced._ready(SimpleNamespace(buffer=lambda: torch.zeros(100)))
    assert unreduced._steps[0][1][0][1:] == (200, "all_reduce")


def _alone_in_replicas(joined: World, dataset: Dataset) -> Arithmetic:
    plan = make_plan(processes=4, parallelism="fsdp", replicas=2).model_copy(update={"reduces": False})
    task, batches = task_of(dataset), batches_of(dataset, plan, joined)
    training = compose(plan, conv_net(), task, batches, joined, [*of_plan(plan), Unreduced], 0)
    for _ in range(3 + joined.rank):
        training.step(batches.epoch(0))
    (unreduced,) = (technique for technique in training.techniques if isinstance(technique, Unreduced))
    return unreduced.read(SimpleNamespace(step_seconds=[1.0]))  # type: ignore[arg-type]


@pytest.mark.slow
def test_ranks_of_replicas_step_without_each_other(digits: Dataset) -> None:
    for rank in run_ranks(_alone_in_replicas, digits, size=4):
        scattered = [bucket.size_bytes for bucket in rank.buckets if bucket.operation == "reduce_scatter"]
        assert sum(scattered) == 4 * sum(parameter.numel() for parameter in conv_net().parameters())
        assert len(scattered) < len(rank.buckets)


def test_an_assumed_link_joins_hosts_of_any_number_of_devices() -> None:
    # Three devices were not probed, but two: a ring of three has twice the messages, and sends 4/3 of the bytes.
    probe = make_probe(2)
    three, six = (probe.taken("eth100", "all_reduce", 3 * hosts, hosts, MEGABYTE) for hosts in (1, 2))
    assert three == pytest.approx(2e-3 + 4 / 3 * 1e-3, rel=1e-2)
    assert six == pytest.approx(three + 6.6e-6 + 2 * 15e-6 + MEGABYTE / 12.5e9, rel=1e-2)
    halves = [probe.taken("eth100", operation, 6, 2, MEGABYTE) for operation in ("reduce_scatter", "all_gather")]
    assert halves == pytest.approx([six / 2, six / 2], rel=1e-2)


def test_a_step_is_taken_apart() -> None:
    *_, two, _ = curve_of(make_measured(late_ms=3)).points
    assert {part: round(1e3 * seconds) for part, seconds in asdict(known(two.parts)).items()} == {
        "arithmetic": 50, "input": 0, "waiting": 3, "exposed": 8, "hidden": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("late_ms", "named"), [(10, True), (3, False)])
def test_a_slow_process_is_named(late_ms: int, named: bool, tmp_path: Path) -> None:
    measured = make_measured(late_ms=late_ms)
    command.write(command.reported(parse({"variants": VARIANTS}), measured, [], Options()), tmp_path)
    said = "ddp, 2: rank 1 on b takes 1.20 times the mean process's step, so the others wait for it."
    assert (said in (tmp_path / "scaling.md").read_text()) is named


def test_a_poor_projection_widens_the_further_ones() -> None:
    # Communication took 3.6 times as long as alone, so what leaves this out is 48% too fast.
    good, poor = (curve_of(make_measured(step)).points for step in (61.0, 90.0))
    assert poor[2].speedup.estimate == pytest.approx(100 / (25 + 40 / 11 * 18), rel=1e-2)
    widths = [points[2].speedup.widths[1] for points in (good, poor)]
    assert widths[1] / widths[0] > 1.5


def test_a_host_tells_nothing_of_links_between_hosts() -> None:
    # Two processes of a host take twice the time beside arithmetic; four on two hosts are projected without this.
    measured, timings = make_measured(72.0), make_probe(4).timings
    places = *measured.places[:2], measured.places[2].model_copy(update={"measured": True})
    four = measured.bench.arms[1].model_copy(update={"name": "ddp-4", "variant": "ddp-4"})
    bench = {"arms": (*measured.bench.arms, four), "keys": measured.bench.keys | {"ddp-4": "key"}}
    for hosts, factor in (1, 2), (2, 1):
        timed = tuple(timing.model_copy(update={"hosts": hosts}) for timing in timings)
        probe = measured.probe.model_copy(update={"timings": measured.probe.timings + timed})
        on_hosts = (*places[:2], places[2].model_copy(update={"hosts": hosts}))
        changes = {"bench": measured.bench.model_copy(update=bench), "probe": probe, "places": on_hosts}
        *_, point = curve_of(measured.model_copy(update=changes)).points
        assert point.left_out
        assert point.left_out.estimate == pytest.approx(100 / (25 + factor * 16), rel=1e-2)


@pytest.mark.parametrize(("worth", "best"), [(0.1, 1), (0.7, 0)])
def test_devices_pay_by_what_they_are_worth(worth: float, best: int) -> None:
    curve = curve_of(make_measured(), worth)
    assert curve.best == best


def test_money_counts_devices() -> None:
    curve = curve_of(make_measured(), price=3.0)
    single, two, _ = curve.points
    assert single.price == pytest.approx(3.0 * 10 * 2560 / BATCH * 0.1 / 3600, rel=1e-2)
    assert two.efficiency.estimate == pytest.approx(0.5 / 0.61, rel=1e-2)
    assert two.money == pytest.approx(2 * 0.61, rel=1e-2)
    assert curve.ranked["cheapest"] == single
    assert curve.ranked["fastest"] == two


def test_with_weak_scaling_the_fastest_has_the_shortest_epoch() -> None:
    measured = make_measured()
    places = [place.model_copy(update={"batch_size": BATCH * place.processes}) for place in measured.places]
    curve = curve_of(measured.model_copy(update={"places": tuple(places)}))
    assert curve.ranked["fastest"].place.processes == 2  # although its step, of twice the samples, takes longer


def test_a_curve_of_one_device_has_no_picture(tmp_path: Path) -> None:
    measured = make_measured()
    single = measured.model_copy(update={"places": measured.places[:1]})  # such as that of two replicas on two devices
    command.write(command.reported(parse({"variants": VARIANTS}), single, [], Options()), tmp_path)
    assert "<polyline" not in (tmp_path / "scaling.html").read_text()


@pytest.mark.parametrize("price", [3.6, {"no such device": 1.0, "": 3.6}], ids=["a price", "a price for each kind"])
def test_the_comparison_has_the_price_of_an_epoch(price: Any) -> None:
    base = make_comparison(price_per_device_hour=price).variants[0]
    assert base.figures["epoch_price"] == pytest.approx(1e-3 * 60_000 / known(base.of(THROUGHPUT)))
    for unpriced in (None, {"no such device": 3.6}):
        assert "epoch_price" not in make_comparison(price_per_device_hour=unpriced).variants[0].figures


def test_an_earlier_projection_stands_beside_the_measurement() -> None:
    def report_of(measured: Measured, earlier: Sequence[Report] = ()) -> Report:
        return command.reported(parse({"variants": VARIANTS}), measured, earlier, Options())

    measured = make_measured()
    places = tuple(place.model_copy(update={"measured": place.processes == 1}) for place in measured.places)
    before = report_of(measured.model_copy(update={"places": places}))
    other = report_of(measured.model_copy(update={"places": places, "jobs": {"ddp": "other"}}))
    _, two, four = report_of(measured, [before, other, report_of(measured)]).curves[0].points
    assert two.earlier == (before.curves[0].points[1].speedup,)
    assert four.earlier == ()


# The arms.


def test_numbers_double_up_to_all_devices() -> None:
    assert command.numbers_of([2, 4, 6], None) == [1, 2, 4, 6, 12, 24]
    assert command.numbers_of([2], 2) == [1, 2]
    assert command.numbers_of([2, 4, 8], 64) == [1, 2, 4, 8, 16, 32, 64]


VARIANTS = {
    "baseline": {},
    "ddp": {"parallelism": "ddp"},
    "fsdp": {"parallelism": "fsdp"},
    "hybrid": {"parallelism": "fsdp", "replicas": 2},
    "fp16": {"parallelism": "ddp", "communication_hook": "fp16"},
    "zero1": {"parallelism": "zero1"},
    "powersgd": {"parallelism": "ddp", "communication_hook": "powersgd"},
}


def test_arms_of_all_kinds() -> None:
    config = parse({"train": {"batch_size": 64}, "variants": VARIANTS})
    chosen = command.variants_of(config, [])
    assert {*chosen} == {f"{name}{weak}" for name in VARIANTS for weak in ("", "-weak") if name != "baseline"}
    places, plans = command.arms_of(config, SERVER, chosen, (1, 2, 4, 8), 4)
    names = {place.name: place for place in places}
    assert {"ddp-1", "ddp-8", "ddp-weak-8", "fsdp-8", "hybrid-8", "fp16-weak-2", "zero1-4"} <= names.keys()
    assert not {"hybrid-2", "zero1-8", "powersgd-8"} & names.keys()  # two replicas need four; not all is modelled
    assert not {"zero1-4-alone", "powersgd-4-alone"} & plans.keys()
    assert [names[name].replicas for name in ("hybrid-8", "fsdp-8")] == [2, 1]
    unknown = {place.variant for place in places if place.processes > 1 and not place.alone}
    assert unknown == {"zero1", "powersgd", "zero1-weak", "powersgd-weak"}
    assert plans["fp16-4-alone"].applied.communication_hook == "none"
    sizes = {name: (plan.processes, plan.train.batch_size, plan.micro_batch_size) for name, plan in plans.items()}
    assert sizes["ddp-4"] == (4, 64, 16)
    assert sizes["ddp-8-alone"] == (4, 32, 8)
    assert sizes["ddp-weak-4-alone"] == (4, 256, 64)
    assert {name for name, plan in plans.items() if not plan.reduces} == {name for name in plans if "alone" in name}
    weak = next(place for place in places if place.name == "ddp-weak-8")
    assert (weak.batch_size, weak.alone, weak.measured) == (512, "ddp-weak-4-alone", False)


def test_what_exchanges_something_is_modelled_or_not_by_name() -> None:
    exchanging = {entry.name for entry in catalogue.CATALOGUE if {*entry.needs, entry.name} & {*command.SHARED}}
    assert exchanging - command.NOT_MODELLED == {
        "ddp", "weak_scaling", "bucket_mb", "gradients_beside_buckets", "static_graph", "fp16_compression",
        "bf16_compression", "fsdp", "keep_gathered", "parameter_precision", "cpu_offload",
    }  # fmt: skip
    assert exchanging > command.NOT_MODELLED


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"price": 0.0}, "--price: found 0; expected a number above 0"),
        ({"minutes": float("nan")}, "--minutes: found nan"),
        ({"minutes": 2e6}, "--minutes: found 2e+06; expected a number above 0, at most 1,000,000."),
        ({"up_to": 1}, "--up-to: found 1; expected a multiple of the 2 here"),
        ({"up_to": 2**31, "names": ["ddp-weak"]}, "expected a multiple of the 2 here, at most 65,536."),
        ({"link": "string"}, "--link: found 'string'; expected one of nvlink4"),
        ({"names": ["baseline"]}, "scale: found baseline; expected some of "),
        ({"up_to": 48}, "found 64, which variants.ddp-48 cannot divide into 48 processes"),
        ({"up_to": 256}, "found 64, which variants.ddp-128 cannot divide into 128 processes"),
    ],
    ids=["price", "minutes", "too_many_minutes", "up_to", "far", "link", "variant", "batch", "large"],
)
def test_wrong_options_are_named_before_anything_runs(
    options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse({"train": {"batch_size": 64, "device": "cpu"}, "variants": VARIANTS})
    known = Options(**{name: value for name, value in options.items() if name != "names"})
    with pytest.raises(ConfigError, match=re.escape(said)):
        command.run(config, CPU_ONLY, options.get("names", ["ddp"]), known)


def test_answers_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = make_measured()
    config = parse({"scale": {"worth": 0.1}, "variants": VARIANTS})
    earlier = command.reported(config, measured, [], Options())
    command.write(command.reported(config, measured, [earlier], Options(price=3.0)), tmp_path)
    text = capsys.readouterr().out
    assert "**ddp: use 2, 1.64 (1.64 to 1.64) times as fast as 1 for 1.22 times the money; 4 would be 2.3" in text
    assert "projected**" in text or "projected." in text
    for ending in ("json", "md", "html"):
        assert (tmp_path / f"scaling.{ending}").stat().st_size > 1000


def test_a_parallelism_is_the_baseline_with_it() -> None:
    config = parse({"variants": {"baseline": {"precision": "bf16"}}})
    (found,) = command.variants_of(config, ["fsdp-weak"]).values()
    assert (found.precision, found.parallelism, found.scaling) == ("bf16", "fsdp", "weak")
    assert len(command.variants_of(config, [])) == 6


def test_a_point_whose_rounds_were_rejected_is_unknown(tmp_path: Path) -> None:
    measured = make_measured()
    unknown = {"samples_per_second": None, "peak_memory_bytes": None}
    rejected = tuple(window.model_copy(update=unknown) for window in samples(61))
    arms = (arm.model_copy(update={"samples": rejected}) if arm.name == "ddp-2" else arm for arm in measured.bench.arms)
    measured = measured.model_copy(update={"bench": measured.bench.model_copy(update={"arms": tuple(arms)})})
    command.write(command.reported(parse({"variants": VARIANTS}), measured, [], Options()), tmp_path)
    assert "| 2 | 256 | unknown | unknown, untrusted | unknown | unknown |" in (tmp_path / "scaling.md").read_text()


def test_a_size_that_is_not_trusted_is_marked(tmp_path: Path) -> None:
    measured = make_measured()
    control = measured.bench.arms[-1]
    scattered = (
        window.model_copy(update={"samples_per_second": window.samples_per_second * (1 + 0.12 * (-1) ** number)})
        for number, window in enumerate(control.samples)
        if window.samples_per_second
    )
    arms = (*measured.bench.arms[:-1], control.model_copy(update={"samples": tuple(scattered)}))
    changed = measured.bench.model_copy(update={"arms": arms, "budget": "--minutes"})
    measured = measured.model_copy(update={"bench": changed})
    report = command.reported(parse({"variants": VARIANTS}), measured, [], Options())
    command.write(report, tmp_path)
    assert "set --minutes: " in (report.curves[0].points[1].speedup.why_untrusted or "")
    text = (tmp_path / "scaling.md").read_text()
    assert "**ddp: use 2, 1.65 (1.55 to 1.75; size uncertain) times as fast as 1 for" in text
    assert "would be projected to" not in text


def test_one_gpu_gives_no_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = SERVER.model_copy(update={"gpus": 1})
    with pytest.raises(ConfigError, match="found one GPU"):
        command._measured(parse({"variants": VARIANTS}), one, [], Options())


@pytest.mark.slow
def test_a_curve_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The curves of a small job whose second process sleeps in each step."""
    (tmp_path / "late.py").write_text(
        "import os, time\nfrom torch import nn\n"
        "class Late(nn.Module):\n"
        "    def forward(self, inputs):\n"
        "        time.sleep(0.03 if os.environ.get('RANK') == '1' else 0.01)\n"
        "        return inputs\n"
        "def make(classes, **_):\n"
        "    return nn.Sequential(nn.Flatten(), Late(), nn.Linear(64, classes))\n"
    )
    params = {
        "fetch": {"dataset": "digits"},
        "train": {"device": "cpu", "batch_size": 32, "model": "late:make", "clip_norm": 1.0},
        "bench": {"max_foreign_load": 1.0, "window_seconds": 0.3, "max_rounds": 6},
        "variants": {"baseline": {}},
    }
    enter(tmp_path, monkeypatch, params)
    options = ("--minutes", "0.05", "--up-to", "4")
    running = Command("scale", "fsdp", "zero1", *options, variables=variables())
    output = running.communicate(600)
    assert running.returncode == 0, output
    report = json.loads((tmp_path / "reports/scaling.json").read_text())
    (_, two, four), (_, without_model) = (curve["points"] for curve in report["curves"])
    assert two["parts"]["waiting"] > 0.005
    assert two["parts"]["exposed"] >= 0
    assert without_model["parts"] is None
    buckets = four["alone"]["buckets"]
    assert [bucket[1:3] for bucket in buckets] == [[2600, "all_gather"], [2600, "reduce_scatter"]]
    assert two["place"]["measured"]
    assert not four["place"]["measured"]
    assert two["speedup"]["estimate"] < 0.6
    assert "fsdp, 2: rank 1 on " in output
    assert two["left_out"]["estimate"] == pytest.approx(two["speedup"]["estimate"], rel=0.5)
    decided = two["more"]["decision"] in ("same", "worse")  # under load, few rounds may decide nothing
    assert ("fsdp: use 1; 2 are" in output) is decided
    assert report["measured"]["bench"]["budget"] == "--minutes"
    (kept,) = (tmp_path / "scaling").glob("*.json")
    assert json.loads(kept.read_text()) == report
