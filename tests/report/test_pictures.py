from __future__ import annotations

import pytest

from pipeline.report import pictures
from pipeline.report.facts import LEDGER_PARTS
from pipeline.report.pictures import Scale
from pipeline.results import HistoryRow
from tests.factories import known, make_bench, make_comparison, make_history, make_results
from tests.report.conftest import REASON, Made, made, without_memory


def digits(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}"


@pytest.mark.parametrize(
    ("scale", "value", "at"),
    [(Scale(0, 10), 2.5, 25), (Scale(-1, 1), 0, 50), (Scale(0.5, 2, True), 1, 50), (Scale(0.25, 4, True), 2, 75)],
)
def test_a_scale_places_values(scale: Scale, value: float, at: float) -> None:
    assert scale.at(value) == at


@pytest.mark.parametrize(
    ("scale", "labels"),
    [
        (Scale(0, 10), ["0", "2", "4", "6", "8", "10"]),
        (Scale(0, 203), ["0", "50", "100", "150", "200"]),
        (Scale(-1.2, 2.2), ["-1", "0", "1", "2"]),
        (Scale(0.93, 1.08, True), ["0.95", "1.00", "1.05"]),
        (Scale(0.4, 1.3, True), ["0.4", "0.6", "0.8", "1.0", "1.2"]),
        (Scale(0.2, 5, True), ["0.25", "0.5", "1", "2", "4"]),
        (Scale(0.01, 120, True), ["0.015625", "0.125", "1", "8", "64"]),
    ],
)
def test_ticks_are_few_round_values_in_their_places(scale: Scale, labels: list[str]) -> None:
    ticks = scale.ticks(digits)
    assert [tick.label for tick in ticks] == labels
    assert [tick.at for tick in ticks] == [scale.at(float(label)) for label in labels]


def test_every_arm_has_a_whisker_beside_the_margin(
    mixed: Made,
) -> None:
    throughput, memory, accuracy = pictures.forests(mixed.comparison)
    names = [variant.variant for variant in mixed.comparison.variants[1:]]
    for forest in (throughput, memory):
        assert [row.label for row in forest.rows] == [*names, "baseline, A/A control"]
    assert [row.label for row in accuracy.rows] == names
    looks = {row.label: row.marks[0].look for row in throughput.rows}
    assert looks == {
        "pays": "better", "costs": "worse", "neutral": "same", "undecided": "undecided", "untrusted": "untrusted",
        "trades": "better", "baseline, A/A control": "noise",
    }  # fmt: skip
    left, right = throughput.band[0], sum(throughput.band)
    assert left < throughput.none < right
    assert right - throughput.none == pytest.approx(throughput.none - left, abs=0.02)  # the scale is logarithmic
    for row in throughput.rows:
        (mark,) = row.marks
        if mark.low is not None and mark.high is not None:
            assert 0 <= mark.low <= known(mark.at) <= mark.high <= 100
            inside = left <= mark.low and mark.high <= right
            outside = mark.high < left or mark.low > right
            assert (inside, outside) == (mark.look in ("same", "noise"), mark.look in ("better", "worse"))


def test_an_unreported_figure_has_no_whisker(silent: Made) -> None:
    throughput, memory, _ = pictures.forests(silent.comparison)
    assert all(mark.at for row in throughput.rows for mark in row.marks)
    assert [(row.marks[0].value, row.marks[0].at) for row in memory.rows] == [("untrusted", None)] * 3


def test_stacked_bars_add_up_to_the_peak(usual: Made) -> None:
    drawn = known(pictures.bars(usual.comparison))
    assert [variant for variant, _ in drawn.rows] == ["baseline", "ddp", "memory"]
    ledgers = usual.comparison.bench.ledgers
    largest = max(ledger.measured.peak_bytes for ledger in ledgers.values())
    for ledger_of, (_, bars) in zip(ledgers.values(), drawn.rows, strict=True):
        for bar, ledger in zip(bars, (ledger_of.measured, known(ledger_of.predicted)), strict=True):
            ends = [round(segment.left + segment.width, 2) for segment in bar.segments]
            assert [segment.left for segment in bar.segments] == [0, *ends[:-1]]  # no gap, no overlap
            assert ends[-1] == pytest.approx(100 * ledger.peak_bytes / (1.02 * largest), abs=0.01)
            whole = [part for part in LEDGER_PARTS if getattr(ledger, f"{part}_bytes")]
            assert [segment.part for segment in bar.segments] == whole
        measured, predicted = bars
        assert measured.tensors == pytest.approx(100 * ledger_of.measured.tensors_bytes / (1.02 * largest), abs=0.01)
        assert predicted.tensors is None
    assert "communication" not in drawn.parts  # no ledger has bytes for communication


def test_unknown_memory_is_not_drawn() -> None:
    measured = make_results()
    assert pictures.front(make_comparison(measured, without_memory(make_bench(measured)))) is None


def test_the_front_goes_through_undominated_variants(usual: Made) -> None:
    front = known(pictures.front(usual.comparison))
    baseline, ddp, memory = front.points
    assert (baseline.x, baseline.y) == front.baseline
    assert (baseline.across, baseline.along) == (None, None)
    assert ddp.x > baseline.x > memory.x
    assert memory.y > baseline.y > ddp.y  # y grows downwards, so less memory is lower
    for point in (ddp, memory):
        (left, right), (bottom, top) = known(point.across), known(point.along)
        assert left < point.x < right
        assert bottom > point.y > top
    assert [point.on_front for point in front.points] == [variant.on_front for variant in usual.comparison.variants]
    assert front.steps == (  # from the left edge through memory, baseline and ddp to the top
        (0, memory.y, memory.x, memory.y), (memory.x, memory.y, memory.x, baseline.y),
        (memory.x, baseline.y, baseline.x, baseline.y), (baseline.x, baseline.y, baseline.x, ddp.y),
        (baseline.x, ddp.y, ddp.x, ddp.y), (ddp.x, ddp.y, ddp.x, 0),
    )  # fmt: skip


def row(seed: int, step: int, seconds: float, accuracy: float | None) -> HistoryRow:
    return HistoryRow(
        seed=seed, epoch=step / 100, step=step, train_seconds=seconds, learning_rate=0.1, train_loss=1.0,
        samples_per_second=None, test_accuracy=accuracy,
    )  # fmt: skip


def test_a_chart_has_a_line_per_seed_and_median(usual: Made) -> None:
    histories = {variant.variant: make_history() for variant in usual.comparison.variants}
    histories["ddp"] = [
        row(0, 100, 2.0, 0.5), row(0, 200, 4.0, 0.7), row(1, 100, 4.0, 0.6), row(1, 150, 5.0, None),
        row(1, 200, 8.0, 0.9), row(2, 100, 3.5, 0.4), row(2, 200, 7.5, 0.8), row(7, 100, 9.0, 0.1),
    ]  # fmt: skip
    accuracy, loss = pictures.charts(usual.comparison, histories)
    for chart in (accuracy, loss):
        assert [(line.variant, line.thick) for line in chart.lines] == [
            (name, thick) for name in ("baseline", "ddp", "memory") for thick in (False, False, False, True)
        ]
    *seeds, together = [
        [tuple(map(float, pair.split(","))) for pair in line.points.split()]
        for line in accuracy.lines
        if line.variant == "ddp"
    ]
    assert len(seeds) == 3  # the run of seed 7 is not part of the result
    for index in (0, 1):
        assert together[index][0] == sorted(seed[index][0] for seed in seeds)[1], "the time is the seeds' median"
        assert together[index][1] == pytest.approx(sum(seed[index][1] for seed in seeds) / 3, abs=0.01)
    assert known(accuracy.target).label == "target 85%"
    assert loss.target is None


@pytest.mark.parametrize(("losses", "ends"), [((-1.0, -4.0), "-4 0"), ((2.0, -4.0), "-4 2"), ((2.0, 1.0), "0.0 2.0")])
def test_a_loss_may_be_negative(usual: Made, losses: tuple[float, float], ends: str) -> None:
    rows = [row(0, step, step, 0.5).model_copy(update={"train_loss": loss}) for step, loss in enumerate(losses, 1)]
    _, chart = pictures.charts(usual.comparison, dict.fromkeys(usual.histories, rows))
    labels = [tick.label.replace("\N{MINUS SIGN}", "-") for tick in chart.y_ticks]
    assert " ".join([labels[0], labels[-1]]) == ends
    heights = [float(pair.split(",")[1]) for line in chart.lines for pair in line.points.split()]
    assert heights
    assert all(0 <= height <= 100 for height in heights)


def test_every_sample_is_a_dot_or_a_cross(usual: Made) -> None:
    throughput, memory = pictures.strips(usual.comparison)
    assert all(0 < dot.x < 100 and 0 <= dot.y <= 100 for strip in throughput.strips for dot in strip.dots)
    crosses = {(s.label, n): dot.title for s in throughput.strips for n, dot in enumerate(s.dots) if dot.rejected}
    assert crosses == {("ddp", 4): f"round 5: rejected, {REASON.text}"}
    assert not any(dot.rejected for strip in memory.strips for dot in strip.dots)


def test_a_round_without_measured_memory_has_no_dot(usual: Made) -> None:
    left_out = {"peak_memory_bytes": None, "peak_memory_rank_bytes": ()}
    arms = tuple(
        arm.model_copy(
            update={"samples": (*arm.samples[:3], *(sample.model_copy(update=left_out) for sample in arm.samples[3:]))}
        )
        for arm in usual.comparison.bench.arms
    )
    throughput, memory = pictures.strips(made(make_results(), arms=arms).comparison)
    assert {len(strip.dots) for strip in memory.strips} == {3}
    assert not any(dot.rejected for strip in memory.strips for dot in strip.dots)
    assert {len(strip.dots) for strip in throughput.strips} == {12}


def test_one_outlier_flattens_no_other_sample() -> None:
    bench = made(make_results()).comparison.bench
    first, second, *others = bench.arms
    slow = first.samples[3].model_copy(update={"samples_per_second": 900.0})
    arms = (
        first.model_copy(update={"samples": (*first.samples[:3], slow, *first.samples[4:])}),
        second.model_copy(update={"samples": second.samples[:6]}),
        *others,
    )
    baseline, early = pictures.strips(made(make_results(), arms=arms).comparison)[0].strips[:2]
    assert baseline.dots[3].y == 90
    usual = [dot.y for index, dot in enumerate(baseline.dots) if index != 3]
    assert max(usual) - min(usual) > 10
    assert [dot.x for dot in early.dots] == [dot.x for dot in baseline.dots][:6]


def test_a_job_of_one_epoch_shows_its_points(usual: Made) -> None:
    short = {variant: [row for row in rows if row.epoch == 1] for variant, rows in usual.histories.items()}
    for chart in pictures.charts(usual.comparison, short):
        assert [len(line.points.split()) for line in chart.lines if line.thick] == [2] * 3
