"""Several sessions of the bench: their combined result, and which of them count."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pipeline.comparison import verdicts
from pipeline.comparison.compare import compare
from pipeline.comparison.comparison_file import Compared, Comparison
from pipeline.comparison.planning import sessions_needed
from pipeline.comparison.sessions import combined, distinct
from pipeline.comparison.stats import Difference, over_sessions
from pipeline.params import Compare
from pipeline.report import metrics
from pipeline.report.facts import banner
from pipeline.results import Arm, Bench, Result, sessions_of
from pipeline.results.figures import FOREIGN_LOAD, THROUGHPUT, Figure
from pipeline.tracking import promoting
from tests.factories import (
    ENVIRONMENT,
    known,
    make_bench,
    make_histories,
    make_log_ratio,
    make_results,
    make_session,
    with_samples,
    with_speeds,
)


def test_each_session_counts_the_same_in_the_mean() -> None:
    pooled = over_sessions([make_log_ratio(0.0, pairs=6), make_log_ratio(0.1, pairs=20), make_log_ratio(0.2)])
    half = 4.302653 * 0.1 / math.sqrt(3)  # quantile of t with two degrees of freedom, from a table
    assert pooled.logs == pytest.approx((0.1, 0.1 - half, 0.1 + half), rel=1e-6)
    assert pooled.pairs == 34


def test_sessions_that_agree_are_no_surer_than_one() -> None:
    pooled = over_sessions([make_log_ratio(0.1, 0.02), make_log_ratio(0.1, 0.03), make_log_ratio(0.1, 0.05)])
    assert pooled.logs == pytest.approx((0.1, 0.07, 0.13))
    assert over_sessions([make_log_ratio(0.3)]) == make_log_ratio(0.3)


def test_how_many_more_would_decide() -> None:
    # With n sessions, the half-width is t_n-1 * 0.1 / sqrt(n): 0.0925 for 7 and 0.0836 for 8 sessions. A decision needs
    # less than the mean's distance from the margin, which is 0.09.
    margin = math.expm1(0.01)
    assert sessions_needed([make_log_ratio(log) for log in (0.0, 0.1, 0.2)], margin) == 5
    assert sessions_needed([make_log_ratio(0.1)], margin) is None
    assert sessions_needed([make_log_ratio(0.0), make_log_ratio(0.02)], margin) is None  # the mean lies on the margin


def test_what_each_session_leaves_open_stays_undecided() -> None:
    alike = [make_log_ratio(0.04, 0.03), make_log_ratio(0.041, 0.03)]
    low, high = over_sessions(alike).bounds
    assert low < 1.03 < high
    assert sessions_needed(alike, 0.03) is None


def ratio(log: float, decision: Any = "better", refused: int = 0) -> Difference:
    why = "noise" if decision == "untrusted" else None
    return make_log_ratio(log, rejected=refused, margin=0.03, decision=decision, why_untrusted=why)


def at(time: str, day: int = 20) -> str:
    return f"2026-11-{day}T{time}:00+00:00"


def test_an_untrusted_session_is_listed_and_not_counted() -> None:
    by_start = {
        at("08:00"): ratio(3.0, "untrusted"),
        at("10:00"): ratio(0.5),
        at("12:00"): ratio(0.51),
        at("14:00"): ratio(0.52),
    }
    pooled = combined(by_start, ratio(9.0), THROUGHPUT)
    assert pooled.estimate == pytest.approx(math.exp(0.51))
    assert (pooled.decision, pooled.pairs) == ("better", 24)
    assert {start: part.counts for start, part in pooled.parts.items()} == {
        time: time != at("08:00") for time in by_start
    }


@pytest.mark.parametrize("others", [{}, {at("10:00"): ratio(0.5, "untrusted")}])
def test_where_one_is_trusted_it_is_that_one(others: dict[str, Difference]) -> None:
    for by_start in ({at("08:00"): ratio(0.2), **others}, {**others, at("08:00"): ratio(0.2)}):
        pooled = combined(by_start, ratio(9.0, "untrusted"), THROUGHPUT)
        assert pooled.model_copy(update={"parts": {}}) == ratio(0.2)


def test_sessions_that_disagree_say_how_many_are_needed() -> None:
    by_start = {at("08:00"): ratio(0.1), at("10:00"): ratio(0.0, "same"), at("12:00"): ratio(0.2)}
    pooled = combined(by_start, ratio(0.1), THROUGHPUT)
    assert (pooled.decision, pooled.more_pairs) == ("undecided", None)
    assert pooled.more_sessions == sessions_needed([make_log_ratio(log) for log in (0.1, 0.0, 0.2)], 0.03)


KEYS = {"baseline": "k", "ddp": "k", "memory": "k"}
OTHER_DATA = known(make_results()[0].dataset).model_copy(update={"sha256": "0" * 64})


def session(day: int, faster: float, keys: dict[str, str] = KEYS, **changes: Any) -> Bench:
    start = {"session": make_session(f"2026-11-{day:02}T12:00")}
    return make_bench(throughput={"ddp": faster, "memory": 0.8}, keys=keys, **start | changes)


def over_all(*sessions: Bench) -> Comparison:
    measured: list[Result] = make_results()
    return compare(measured, make_histories(measured), sessions, Compare(), ENVIRONMENT)


def over(*sessions: Bench) -> dict[str, Compared]:
    return {variant.variant: variant for variant in over_all(*sessions).variants}


def throughput(compared: Compared) -> Difference:
    return known(compared.throughput)


def test_a_comparison_is_over_the_pair_s_sessions() -> None:
    ratio_of_all = throughput(over(session(1, 1.5), session(2, 1.6), session(3, 1.7))["ddp"])
    assert ratio_of_all.estimate == pytest.approx((1.5 * 1.6 * 1.7) ** (1 / 3), rel=0.01)
    assert ratio_of_all.session_count == len(ratio_of_all.parts) == 3
    assert known(ratio_of_all.high) > 1.8


def test_the_banner_speaks_if_no_session_is_trusted() -> None:
    first, second = session(1, 1.5, noise=0.5), session(2, 1.5, noise=0.3)
    for noisy in ((first,), (first, second)):
        (said,) = banner(over_all(*noisy))
        assert said.startswith("Untrusted throughput: the baseline measured against itself")
    assert banner(over_all(first, session(2, 1.5))) == []  # the second session is trusted


@pytest.mark.parametrize(
    ("load", "says"), [(0.28, ["Other processes took 28% of the CPU time"]), (0.05, []), (None, [])]
)
def test_speeds_beside_other_work_are_said_to_be_so(load: float | None, says: list[str]) -> None:
    loaded = with_samples(
        session(1, 1.5),
        lambda arm: [sample.model_copy(update={FOREIGN_LOAD.field: load}) for sample in arm.samples],
    )
    assert [sentence.partition(" during")[0] for sentence in banner(over_all(loaded))] == says


def test_a_large_effect_has_a_side_on_a_noisy_machine() -> None:
    noisy = over_all(session(1, 6.0, noise=0.2))
    ddp = noisy.variants[1]
    assert (throughput(ddp).decision, throughput(ddp).counts, ddp.verdict) == ("better", False, "pays")
    assert " ".join(ddp.shared_reasons).startswith("throughput: the baseline measured against itself")
    assert noisy.variants[2].verdict == "untrusted"
    assert known(noisy.champion).ratio is None
    assert ddp.of(THROUGHPUT) is None
    assert banner(noisy)
    assert metrics(ddp)["throughput_ratio"] is None


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"keys": KEYS | {"ddp": "before"}}, [1, 2]),
        ({"keys": KEYS | {"baseline": "before"}}, [1, 1]),
        ({"dataset": OTHER_DATA}, [1, 1]),
    ],
    ids=["one technique", "baseline", "data"],
)
def test_a_change_sets_aside_the_sessions_that_it_concerns(changes: dict[str, Any], counts: list[int]) -> None:
    compared = over(session(1, 1.5), session(2, 1.6, **changes))
    assert [len(throughput(compared[name]).parts) for name in ("ddp", "memory")] == counts


def test_the_baseline_s_rounds_tell_which_session_it_is() -> None:
    first = session(1, 1.5)
    copy = first.model_copy(
        update={
            "session": session(2, 1.5).session,
            "arms": tuple(arm for arm in first.arms if arm.variant != "memory"),
        }
    )
    assert [bench.session.start_utc[8:10] for bench in distinct([first, copy])] == ["01"]


def test_a_bench_without_a_common_arm_removes_no_session() -> None:
    first, second = session(1, 1.5), session(2, 1.5)
    others = tuple(arm.model_copy(update={"name": f"other {arm.name}"}) for arm in first.arms)
    for foreign in (first.model_copy(update={"arms": others}), with_samples(first, lambda _: ())):
        assert distinct([second, foreign]) == [foreign, second]


def jittered(bench: Bench, **changes: Any) -> Bench:
    """Return a copy of the bench whose speeds differ by a thousandth."""
    copy = with_speeds(bench, lambda arm, index: 1 + 0.001 * math.sin(index + len(arm.name)))
    return copy.model_copy(update={"session": copy.session.model_copy(update=changes)})


@pytest.mark.parametrize(
    "changes",
    [
        [{"start_utc": at(time, day=day), "boot_id": f"boot {day}"} for time, day in (("08:00", 21), ("09:00", 22))],
        [{"start_utc": at("08:00", day=day), "uptime_seconds": 4000.0 + day} for day in (21, 22)],
        [{"start_utc": at(f"08:{20 * n}"), "uptime_seconds": 3600.0 + 1200 * n, "boot_id": str(n)} for n in (1, 2)],
        [{"start_utc": at(f"08:{20 * n}"), "uptime_seconds": 3600.0 + 1e5 * n} for n in (1, 2)],
    ],
    ids=["the same uptime", "days by the wall clock alone", "an uptime that goes on", "days by the uptime alone"],
)
def test_copies_of_a_session_are_one_session(changes: list[dict[str, Any]]) -> None:
    first = session(20, 1.5, session=make_session(uptime_seconds=3600.0))
    compared = over_all(first, *(jittered(first, **change) for change in changes))
    assert len(compared.sessions) == 1
    assert promoting.sessions_of(compared, "ddp") == 1 < promoting.FEWEST_SESSIONS


def test_without_boot_ids_each_day_is_a_session() -> None:
    """A new container or virtual machine for each bench has been up for seconds."""
    first, second = (make_session(f"2026-11-{day}T08:00", boot_id=None, uptime_seconds=5.0 + day) for day in (20, 21))
    assert not session(1, 1.5, session=first).goes_on_in(second)


def bench_at(time: str, faster: float = 1.5, boot: str = "b", **changes: Any) -> Bench:
    """Return a bench of the boot "b", or of another boot, which began at 08:19."""
    boot_of = {} if boot == "b" else {"boot_id": boot, "uptime_seconds": 60.0 * (int(time[3:]) - 19)}
    began = make_session(f"2026-11-20T{time}", **boot_of)
    return session(1, faster, session=began, **changes).model_copy(update={"seconds": 600.0})


@pytest.mark.parametrize(
    ("starts", "sizes"),
    [
        ([("08:59", "b"), ("09:00", "b")], [2]),
        ([("08:00", "b"), ("09:09", "b"), ("10:18", "b")], [3]),  # 59 minutes after the end of the previous bench
        ([("08:00", "b"), ("09:10", "b")], [1, 1]),
        ([("08:00", "b"), ("08:20", "c"), ("08:40", "c")], [1, 2]),
    ],
)
def test_a_session_ends_after_an_hour_or_boot(starts: list[tuple[str, str]], sizes: list[int]) -> None:
    benches = [bench_at(time, boot=boot) for time, boot in reversed(starts)]
    assert [len(benches_of_session) for benches_of_session in sessions_of(benches)] == sizes


def test_rounds_of_a_session_are_pooled_first() -> None:
    """Benches that are too short for a ratio of their own are pooled, too. For each variant, only the benches that
    measured its present form count."""
    short, shorter = bench_at("08:00", 1.5, rounds=5, rejected={}), bench_at("08:30", 1.6, rounds=4, rejected={})
    shorter = shorter.model_copy(update={"keys": KEYS | {"memory": "before"}})
    alone, pooled = over(short), over_all(short, shorter)
    assert throughput(alone["ddp"]).decision == "untrusted"
    by_variant = {variant.variant: variant for variant in pooled.variants}
    assert (throughput(by_variant["ddp"]).pairs, throughput(by_variant["memory"]).pairs) == (9, 5)
    assert throughput(by_variant["ddp"]).estimate == pytest.approx(math.sqrt(1.5 * 1.6), rel=0.02)
    assert throughput(by_variant["ddp"]).decision == "better"
    assert throughput(by_variant["ddp"]).session_count == 1
    assert [(summary.benches, summary.rounds, summary.variants) for summary in pooled.sessions] == [
        (2, 9, ("baseline", "ddp", "memory"))
    ]
    assert pooled.noise_throughput.pairs == 9


def test_a_continued_bench_is_counted_once() -> None:
    whole = session(1, 1.5)
    assert distinct([whole, with_samples(whole, lambda arm: arm.samples[:7])]) == [whole]


def test_a_session_computes_the_noise_of_its_rounds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, noise_between = [], verdicts.noise_between

    def counting(baseline: Arm, control: Arm, quantity: Figure, *settings: Any) -> Difference:
        asked.append((len(baseline.samples), quantity.noun))
        return noise_between(baseline, control, quantity, *settings)

    monkeypatch.setattr(verdicts, "noise_between", counting)
    over(session(1, 1.5), session(2, 1.6, rounds=10))
    once = [(rounds, noun) for rounds in (10, 12) for noun in ("peak memory", "throughput")]
    assert sorted(asked) == once
    asked.clear()
    early = with_samples(session(1, 1.5), lambda arm: arm.samples[:8] if arm.variant == "ddp" else arm.samples)
    over(early)
    assert sorted(asked) == [(rounds, noun) for rounds in (8, 12) for noun in ("peak memory", "throughput")]
