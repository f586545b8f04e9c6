"""Ratios over sessions and commits: a change is found where it is, and noise shows none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import cli
from pipeline.comparison.sessions import table_of
from pipeline.comparison.stats import Difference
from pipeline.comparison.trends import changed, trends
from pipeline.params import Compare
from pipeline.results import BENCH_FILE, KEPT_BENCHES, Bench
from tests.factories import make_bench, make_results, make_session


def ratio_of(log: float) -> Difference:
    low, high = math.exp(log - 0.01), math.exp(log + 0.01)
    return Difference(estimate=math.exp(log), low=low, high=high, pairs=12, decision="worse")


def session(day: int, ddp: float, **changes: Any) -> Bench:
    start = make_session(f"2026-11-{day:02}T08:00", boot_id=f"boot-{day}")
    return make_bench(make_results(), throughput={"ddp": ddp}, rejected={}, session=start, **changes)


BEFORE_AND_AFTER = [
    *(session(day, 1.5 + day / 1000, commit="a" * 40) for day in range(1, 5)),
    *(session(day, 1.2 + day / 1000, commit="b" * 40, keys=dict.fromkeys(("baseline", "ddp", "memory"), "changed"))
      for day in range(5, 8)),
]  # fmt: skip


def test_noise_alone_seldom_shows_a_change() -> None:
    """The error is 5%; with 1,000 series, more than 70 false changes would be a chance of 1 in 200."""
    draws = np.random.default_rng(0).normal(0, 0.02, (1000, 8))
    alarms = sum(changed([*map(ratio_of, series)], 0.03) is not None for series in draws)
    assert 10 <= alarms <= 70


def test_a_change_is_found_at_its_place_with_its_size() -> None:
    draws = np.random.default_rng(1).normal(0, 0.01, (200, 10))
    draws[:, 6:] += math.log(0.9)
    changes = [changed([*map(ratio_of, series)], 0.03) for series in draws]
    known = [change for change in changes if change]
    assert len(known) >= 198
    assert sum(change.sessions_before == 6 for change in known) >= 190
    held = sum((change.ratio.low or 0) <= 0.9 <= (change.ratio.high or 0) for change in known)
    assert held >= 0.95 * len(known)
    assert sum(change.ratio.decision == "worse" for change in known) >= 190


def test_untrusted_sessions_are_shown_and_not_counted() -> None:
    ratios = [ratio_of(0.4), ratio_of(0.41), ratio_of(9.0).model_copy(update={"decision": "untrusted"})]
    ratios += [ratio_of(0.2), ratio_of(0.21)]
    change = changed(ratios, 0.03)
    assert change
    assert change.sessions_before == 3
    assert change.ratio.pairs == 4
    assert changed(ratios[:4], 0.03) is None  # no second session confirms it


def test_sessions_with_other_code_count_and_those_of_other_jobs_do_not() -> None:
    other = BEFORE_AND_AFTER[0]
    other_job = other.model_copy(update={"config": other.config | {"train": {"epochs": 9}}})
    benches = [*reversed(BEFORE_AND_AFTER[1:]), other_job]
    of_ddp = trends(table_of(benches, 0.15, {}), benches, Compare())[0]
    assert (of_ddp.variant, of_ddp.noun, len(of_ddp.past)) == ("ddp", "throughput", 6)
    assert of_ddp.until
    assert of_ddp.since
    assert [one.commit for one in (of_ddp.until, of_ddp.since)] == ["a" * 40, "b" * 40]


@pytest.mark.parametrize("changed", ["memory", "ddp"])
def test_a_session_counts_once_for_each_code(changed: str) -> None:
    """Benches of one session: the first and the last have the same code; the one between is of other code, or ``ddp``
    is the same in all three."""
    keys = dict.fromkeys(("baseline", "ddp", "memory"), "before")
    between = keys | {changed: "other"}
    times = zip(("08:00", "08:20", "08:40"), (keys, between, keys), strict=True)
    earlier = [
        session(1, 1.5 + number / 100, keys=of).model_copy(
            update={"session": make_session(f"2026-11-01T{at}", boot_id="boot-1", uptime_seconds=number)}
        )
        for number, (at, of) in enumerate(times, 1)
    ]
    benches = [session(2, 1.5), *earlier]
    past = trends(table_of(benches, 0.15, {}), benches, Compare())[0].past
    assert len(past) == (2 if changed == "memory" else 3)


def test_history_names_the_change_and_its_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("variants: {baseline: {}, ddp: {parallelism: ddp}}\n", encoding="utf-8")
    assert cli.main(["history"]) == 2
    assert "found no bench in" in capsys.readouterr().err
    KEPT_BENCHES.mkdir(parents=True)
    *earlier, present = BEFORE_AND_AFTER
    files = [KEPT_BENCHES / f"{number}.json" for number in range(len(earlier))]
    for file, bench in zip([*files, BENCH_FILE], [*earlier, present], strict=True):  # as in a clone
        file.write_text(bench.to_json(), encoding="utf-8")
    assert cli.main(["history"]) in (0, None)
    printed = capsys.readouterr().out
    assert "(aaaaaaaaaaaa) and 2026-11-05 08:00 (bbbbbbbbbbbb): 19." in printed
    assert "% slower since then" in printed
    assert "| 2026-11-07 08:00 | bbbbbbbbbbbb |" in printed
    assert "2026-11-05 08:00, bbbbbbbbbbbb" in (tmp_path / "reports" / "history.html").read_text(encoding="utf-8")
