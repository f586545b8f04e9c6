from __future__ import annotations

import math
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tqdm import tqdm

from pipeline import environment, files, results
from pipeline.benchmark import stage
from pipeline.benchmark.arm import _allowed_wait
from pipeline.benchmark.rounds import (
    CALIBRATION_STEPS,
    FEWEST_STEPS,
    Calibration,
    Rounds,
    calibrate,
    fewest_rounds,
    measure,
    outlook,
    steps_of,
    turns_on,
)
from pipeline.benchmark.server import ArmSpec, BenchError, OutOfTime, Server
from pipeline.environment import stages
from pipeline.params import Bench, Variant, parse
from pipeline.plans import plans
from pipeline.results import Window, read_bench
from pipeline.results.bench_file import FEWEST_PAIRS
from pipeline.results.rejections import rejection
from tests.commands import executable
from tests.factories import (
    ENVIRONMENT,
    foreign_load,
    known,
    make_arm,
    make_bench,
    make_session,
    make_window,
    of_the_job,
    with_samples,
)
from tests.nets import make_plan
from tests.workspaces import CPU_ONLY


class FakeServer(Server):
    """A server that answers at once, records the order of the requests, and is interrupted at a given turn."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        super().__init__()
        self.asked: list[str] = []
        """The arm of each turn, in order."""
        self.opened: list[bool] = []
        """Whether each arm was to measure memory, in order."""
        self.taken: dict[str, list[int]] = {}
        """Open arm -> the steps of each of its turns."""
        self.step_p50_ms: list[float | None] = []
        """The median step times of the next samples, in order. Further samples have 1 ms."""
        self.interrupt_at = interrupt_at
        self.changes: Callable[[str], dict[str, Any]] = lambda _: {}
        """Function: arm -> other values for its answer, or for the window in the answer."""

    def plan(self, name: str, values: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return values

    def open(self, name: str, plan: dict[str, Any], steps: int, *, ledgers: bool = False, memory: bool = True) -> None:
        assert not ledgers
        self.opened.append(memory)
        assert plan == Variant().model_dump(mode="json")
        assert steps
        assert name not in self.taken
        self.taken[name] = []

    def turn(self, name: str, steps: int) -> None:
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        self.asked.append(name)
        self.taken[name].append(steps)

    def close(self, name: str) -> dict[str, Any]:
        changes = self.changes(name)
        window: dict[str, Any] = {
            "samples_per_second": 1000.0 + len(self.asked),
            "measured_steps": sum(self.taken.pop(name)),
            "step_p50_ms": self.step_p50_ms.pop(0) if self.step_p50_ms else 1.0,
        }
        made = make_window(**window | {key: value for key, value in changes.items() if key in Window.model_fields})
        return make_arm().model_dump() | changes | {"window": made.model_dump()}


def arms(server: Server, *names: str) -> list[ArmSpec]:
    values = Variant().model_dump(mode="json")
    return [ArmSpec.of_variant(name, server, server.plan(name, values)) for name in names]


def test_rounds_are_interleaved_in_drawn_and_reversed_orders() -> None:
    server = FakeServer()
    rounds = measure(arms(server, "a", "b", "c"), seconds=60, max_rounds=12, steps=7, turns=1)
    orders = ["".join(server.asked[first : first + 3]) for first in range(0, 36, 3)]
    assert {"".join(sorted(order)) for order in orders} == {"abc"}
    assert [order[::-1] for order in orders[::2]] == orders[1::2]
    assert {order[0] for order in orders} == set("abc")  # no arm has a fixed place
    for arm in rounds.arms:
        asked = [1000 + 3 * number + order.index(arm.name) + 1 for number, order in enumerate(orders)]
        assert [sample.samples_per_second for sample in arm.samples] == asked
    assert (rounds.steps, rounds.interrupted) == (7, False)
    assert {sample.measured_steps for arm in rounds.arms for sample in arm.samples} == {7}


def test_arms_take_turns_and_none_runs_twice() -> None:
    server = FakeServer()
    alive: list[dict[str, list[int]]] = []

    def noted(_: str) -> dict[str, Any]:
        alive.append({name: list(turns) for name, turns in server.taken.items()})
        return {}

    server.changes = noted
    rounds = measure(arms(server, "a", "b", "c"), seconds=60, max_rounds=2, steps=10, turns=3)
    a, b, c = server.asked[:3]
    assert server.asked == [*(a, b, c), *(b, c, a), *(c, a, b), *(c, b, a), *(b, a, c), *(a, c, b)]
    assert alive[0] == alive[3] == {"a": [3, 3, 4], "b": [3, 3, 4], "c": [3, 3, 4]}
    assert (rounds.turns, {sample.measured_steps for arm in rounds.arms for sample in arm.samples}) == (3, {10})
    few = measure(arms(server, "a"), seconds=60, max_rounds=1, steps=2, turns=3)  # a turn has at least one step
    assert (few.turns, few.arms[0].samples[0].measured_steps) == (2, 2)
    assert alive[-1] == {"a": [1, 1]}


def test_settings_give_turns_rounds_and_time() -> None:
    assert (turns_on("cpu", Bench(turns=7)), turns_on("cuda", Bench(turns=7))) == (7, 1)
    assert (fewest_rounds(Bench()), fewest_rounds(Bench(hard_limit=True))) == (FEWEST_PAIRS, 0)
    assert [stage._left(150.0, spent) for spent in (0.0, 40.0, 150.0, 400.0)] == [150.0, 110.0, 150.0, 150.0]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """A server that takes ten seconds to open an arm and one second for each turn, by a simulated clock."""
    now, server = [0.0], FakeServer()

    def takes(seconds: float, does: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*arguments: Any, **options: Any) -> Any:
            now[0] += seconds
            return does(*arguments, **options)

        return slowly

    monkeypatch.setattr(server, "open", takes(10, server.open))
    monkeypatch.setattr(server, "turn", takes(1, server.turn))
    monkeypatch.setattr("pipeline.benchmark.rounds.time.monotonic", lambda: now[0])
    return server


def test_the_budget_ends_the_rounds(slow: FakeServer) -> None:
    rounds = measure(arms(slow, "a", "b"), seconds=80.0, max_rounds=None, steps=1, turns=1)
    assert len(rounds.arms[0].samples) == 3  # a fourth round would end after 88 seconds
    assert rounds.seconds == 66
    assert len(measure(arms(slow, "a", "b"), seconds=1, max_rounds=None, steps=1, turns=1).arms[0].samples) == 1


@pytest.mark.parametrize(("open_after", "count"), [(0, 3), (3, 7), (99, 7)])
def test_the_time_is_doubled_once_if_something_is_open(slow: FakeServer, open_after: int, count: int) -> None:
    shown: list[int] = []

    def leaves_open(measured: Rounds) -> bool:
        shown.append(len(measured.arms[0].samples))
        return shown[-1] <= open_after

    measured = measure(arms(slow, "a", "b"), seconds=80.0, max_rounds=None, steps=1, turns=1, leaves_open=leaves_open)
    assert (len(measured.arms[0].samples), shown) == (count, [3])


def reject(server: FakeServer, refused: dict[str, Sequence[int]]) -> None:
    """Reject the samples of two arms in the rounds of ``refused``: arm -> rounds, counted from 0."""

    def spoiled(name: str) -> dict[str, Any]:
        number = (len(server.asked) - 1) // 2
        return {"rejections": ("another process took half of the CPU",) if number in refused.get(name, ()) else ()}

    server.changes = spoiled


@pytest.mark.parametrize(
    ("refused", "max_rounds", "rounds"),
    [
        ({}, None, 6),
        ({}, 4, 4),
        ({"a": [0, 2]}, None, 8),  # six of these rounds have no rejected sample
        ({"a": range(99)}, None, 6),  # further rounds would not help an arm that is always rejected
        ({"a": range(99), "b": [3]}, None, 7),
        ({"a": range(0, 99, 2), "b": range(1, 99, 2)}, None, 12),  # at most twice as many rounds
    ],
)
def test_six_rounds_are_measured_even_beyond_the_time(
    slow: FakeServer,
    capsys: pytest.CaptureFixture[str],
    refused: dict[str, Sequence[int]],
    max_rounds: int | None,
    rounds: int,
) -> None:
    reject(slow, refused)
    measured = measure(arms(slow, "a", "b"), seconds=1, max_rounds=max_rounds, steps=1, turns=1, fewest=6)
    assert len(measured.arms[0].samples) == rounds
    out = capsys.readouterr().out
    assert out.count("minutes are over after 1 round; the bench goes on until it has 6 rounds without a rejected") == 1
    assert "bench: 2 rounds after 44 s\nbench: 4 rounds after 88 s" in out  # printed because there is no terminal


def test_the_forecast_counts_rounds_to_be_repeated(slow: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    totals: dict[str, float | None] = {}
    monkeypatch.setattr(tqdm, "set_postfix_str", lambda bar, text: totals.update({text.split(",")[0]: bar.total}))
    reject(slow, {"a": [0, 2]})
    measure(arms(slow, "a", "b"), seconds=1, max_rounds=None, steps=1, turns=1, fewest=6)
    # A round takes 22 s. An arm that was rejected in all rounds so far does not count, so round 1 counts only later.
    assert [totals[f"round {number}"] for number in range(2, 9)] == [6 * 22, 7 * 22, *[8 * 22] * 5]


def with_control(server: Server, *names: str) -> list[ArmSpec]:
    baseline, *others = arms(server, *names)
    return [baseline, *others, replace(baseline, name="control", role="aa_control")]


def counts(measured: Rounds) -> dict[str, int]:
    return {arm.name: len(arm.samples) for arm in measured.arms}


def test_a_settled_variant_leaves_its_time_to_others(slow: FakeServer) -> None:
    limits: dict[str, Any] = {"seconds": 15 * 55.0, "max_rounds": None, "steps": 1, "turns": 1}
    names = ("baseline", "fast", "same", "open")
    assert set(counts(measure(with_control(slow, *names), **limits)).values()) == {15}
    looked: list[int] = []

    def settled(measured: Rounds) -> set[str]:
        looked.append(len(measured.arms[0].samples))
        return {"fast", "same"} if looked[-1] >= 10 else set()

    measured = measure(with_control(slow, *names), **limits, settled=settled)
    assert looked == [*range(6, 19)]
    # After ten rounds of five arms, the time of five further rounds suffices for eight rounds of three arms.
    assert counts(measured) == {"baseline": 18, "fast": 10, "same": 10, "open": 18, "control": 18}
    assert {arm.name for arm in measured.arms if arm.settled} == {"fast", "same"}


@pytest.mark.parametrize("can_leave_out", [True, False])
def test_memory_is_not_measured_once_it_is_known(can_leave_out: bool) -> None:
    server = FakeServer()
    server.requests = frozenset({"open", "open_for_speed"} if can_leave_out else {"open"})

    def known(measured: Rounds) -> bool:
        return len(measured.arms[0].samples) >= 4

    measure(arms(server, "a", "b"), seconds=60, max_rounds=6, steps=1, turns=1, memory_known=known)
    assert server.opened == [True] * 2 * 4 + [not can_leave_out] * 2 * 2
    looked: list[int] = []

    def never(measured: Rounds) -> bool:
        looked.append(len(measured.arms[0].samples))
        return False

    measure(arms(server, "a", "b"), seconds=60, max_rounds=6, steps=1, turns=1, memory_known=never)
    assert looked == [3, 4, 5]


def test_rounds_end_when_all_variants_are_settled() -> None:
    limits: dict[str, Any] = {"seconds": 60, "max_rounds": 30, "steps": 1, "turns": 1, "settled": lambda _: {"fast"}}
    measured = measure(with_control(FakeServer(), "baseline", "fast"), **limits)
    assert set(counts(measured).values()) == {6}
    assert [arm.settled for arm in measured.arms] == [False, True, False]
    alone = measure(with_control(FakeServer(), "baseline"), **limits | {"settled": lambda _: set()})
    assert counts(alone) == {"baseline": 30, "control": 30}


def job_of(bench: results.Bench, **changed: float) -> stage.Job:
    """Return the job of ``bench``, with other settings of the bench."""
    settings = bench.config["bench"] | changed
    facts = {"config": {"bench": settings}, "dataset": bench.dataset}

    def keys(**replaced: object) -> dict[str, str]:
        return dict.fromkeys(bench.keys, "k" if settings | replaced == bench.config["bench"] else "changed")

    return stage.Job(Server(), {}, (), "cpu", facts, keys)


def kept(day: int, hour: int = 12, **changes: Any) -> results.Bench:
    return make_bench(session=make_session(f"2026-11-{day:02}T{hour}:30"), **changes)


@pytest.mark.parametrize(
    ("earlier", "is_session"),
    [
        ({}, True),
        ({"interrupted": True, "rounds": 6}, True),
        ({"rounds": 5}, False),  # five rounds are too few for an interval
        ({"rounds": 5, "day": 2}, True),  # together with the new bench, which is of the same session, they suffice
        ({"keys": {"baseline": "k", "ddp": "before", "memory": "k"}}, True),
        ({"keys": {"baseline": "k", "ddp": "before", "memory": "before"}}, False),
        ({"keys": {"baseline": "before", "ddp": "k", "memory": "k"}}, False),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_further_session_makes_the_bench_a_session(earlier: dict[str, Any], is_session: bool) -> None:
    first, second = kept(**{"day": 1} | earlier), kept(2, hour=13)
    file = Path("sessions", f"{first.session.start_utc[:10].replace('-', '')}T123000.json")
    files.write_text(results.KEPT_BENCHES / file.name, first.to_json())
    other_data = kept(3, dataset=known(second.dataset).model_copy(update={"sha256": "0" * 64}))
    assert stage.recalled(other_data) == []
    assert stage.recalled(second) == ([file] if is_session else [])
    assert results.read_sessions() == ([first] if is_session else [])
    assert results.read_sessions(results.KEPT_BENCHES) == ([] if is_session else [first])


@pytest.mark.parametrize(
    ("changes", "start", "goes_on"),
    [
        ({}, "12:50", True),
        ({"interrupted": True, "rounds": 2}, "12:50", True),
        ({}, "13:40", False),  # more than an hour after the bench ended at 12:33
        ({"boot": {"boot_id": "another", "uptime_seconds": 60.0}}, "12:50", False),
        ({"boot": {"hosts": ("node-1", "node-2")}}, "12:50", False),
        ({"keys": {"baseline": "k", "ddp": "before", "memory": "k"}}, "12:50", False),
        ({"ablate": True}, "12:50", False),  # other arms
        ({"settled": True}, "12:50", False),  # nothing is open
    ],
)
@pytest.mark.usefixtures("here")
def test_a_bench_continues_its_session_s_unsettled_bench(
    changes: dict[str, Any],
    start: str,
    goes_on: bool,
) -> None:
    settled, boot = changes.pop("settled", False), changes.pop("boot", {})
    bench = kept(1, **changes)
    bench = bench.model_copy(update={"arms": tuple(arm.model_copy(update={"settled": settled}) for arm in bench.arms)})
    files.write_text(results.KEPT_BENCHES / "20261101T123000.json", bench.to_json())
    now = make_session(f"2026-11-01T{start}", **boot)
    names = [arm.name for arm in make_bench().arms]
    assert stage.unfinished("bench", now, job_of(make_bench()), names) == (bench if goes_on else None)


def test_a_key_can_be_that_of_another_setting() -> None:
    keys = []
    for limit in (0.1, 0.4):
        config = parse({"variants": PARAMS["variants"], "bench": {"max_foreign_load": limit}})
        content = ENVIRONMENT | stages.described(config, plans(config, CPU_ONLY), ["bench"])
        keys.append([stages.key(content, "bench", "ddp"), stages.key(content, "bench", "ddp", max_foreign_load=0.1)])
    assert keys[0] == [keys[0][0]] * 2
    assert keys[1][0] != keys[1][1] == keys[0][0]


@pytest.mark.parametrize(
    ("changed", "accepted"),
    [
        ({"max_foreign_load": 0.4}, [0, 1]),
        ({"max_foreign_load": 0.3}, [0]),
        ({"max_foreign_load": 0.05}, None),
        ({"window_seconds": 2.0}, None),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_larger_load_limit_judges_kept_rounds_again(
    changed: dict[str, float], accepted: list[int] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings belong to the key. Round 0 saw a load of 20%, round 1 of 31%; in round 2 the GPU throttled too."""
    reasons = [
        (foreign_load(0.2),),
        (foreign_load(),),
        (foreign_load(), rejection("gpu_shared", others=1, gpu="GPU 1")),
    ]
    disturbed = [make_window(rejections=why, disturbed_samples_per_second=7.0) for why in reasons]
    before = with_samples(kept(1, rounds=3), lambda arm: disturbed if arm.variant == "ddp" else arm.samples)
    files.write_text(results.KEPT_BENCHES / "20261101T123000.json", before.to_json())
    now, names = make_session("2026-11-01T12:50"), [arm.name for arm in before.arms]
    judged = stage.unfinished("bench", now, job_of(before, **changed), names)
    said = capsys.readouterr().out
    if accepted is None:
        assert (judged, said) == (None, "")
        return
    limit = f"judged again by bench.max_foreign_load: {changed['max_foreign_load']:g}"
    assert said == f"bench: adds to the 3 rounds of 2026-11-01T12:30:00+00:00, {limit}\n"
    samples = known(known(judged).arm("variant", "ddp")).samples
    assert [n for n, sample in enumerate(samples) if not sample.rejections] == accepted
    assert [sample.samples_per_second for sample in samples] == [7.0 if n in accepted else None for n in range(3)]


def test_earlier_rounds_and_settled_variants_count(slow: FakeServer) -> None:
    specs = with_control(slow, "baseline", "fast", "open")
    limits: dict[str, Any] = {"max_rounds": None, "steps": 1, "turns": 1}
    limits["settled"] = lambda measured: {"fast"} if len(measured.arms[0].samples) >= 10 else set()
    first = measure(specs, seconds=10 * 44.0, **limits)
    assert counts(first) == {"baseline": 10, "fast": 10, "open": 10, "control": 10}
    continued = measure(specs, seconds=4 * 33.0, **limits, earlier=first.arms)
    assert counts(continued) == {"baseline": 14, "fast": 10, "open": 14, "control": 14}
    assert [arm.samples[:10] for arm in continued.arms] == [arm.samples for arm in first.arms]
    assert continued.seconds == 4 * 33.0
    slow.interrupt_at = len(slow.asked) + 1
    limits |= {"earlier": continued.arms, "seconds": 99.0}
    stopped = measure(specs, **limits)
    assert (stopped.interrupted, counts(stopped)) == (True, counts(continued))


def test_a_short_sample_predicts_the_time_of_a_round(slow: FakeServer) -> None:
    sample = steps_of(arms(slow, "a")[0], 1.5)[1]
    assert (sample.opening_seconds, sample.step_seconds) == (10, 1 / (CALIBRATION_STEPS + 1))
    assert sample.seconds(220) == 10 + 220 / (CALIBRATION_STEPS + 1)
    second = calibrate(arms(slow, "b")[0])  # it gives no window its length, so fewer steps are enough
    assert (second.opening_seconds, second.step_seconds) == (10, 1 / (FEWEST_STEPS + 1))


@pytest.mark.parametrize(
    ("seconds", "max_rounds", "fewest", "said"),
    [
        (150.0, None, 6, "6 rounds, until about 12:04 UTC; up to 12, until about 12:08 UTC, if samples are rejected"),
        (150.0, None, 0, "3 rounds (a decision would need at least 6), until about 12:02 UTC"),
        (600.0, None, 6, "15 rounds, until about 12:10 UTC"),
        (600.0, 7, 6, "7 rounds, until about 12:04 UTC"),
        (1.0, 2, 6, "2 rounds (a decision would need at least 6), until about 12:01 UTC"),
    ],
)
def test_the_outlook_names_the_rounds_and_the_end(
    seconds: float, max_rounds: int | None, fewest: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr("pipeline.benchmark.rounds.time.time", lambda: 12 * 3600.0)
    forecast = outlook(5, 23, 40.0, seconds=seconds, max_rounds=max_rounds, fewest=fewest)
    assert forecast == f"5 arms of 23 steps; a round takes about 40 s: the bench runs {said}"
    monkeypatch.undo()
    time.tzset()


def test_the_minutes_are_told_after_the_first_sample(slow: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    """An arm takes 10 s to start and 1/6 s a step, so windows have 22 steps, and a round of four arms takes 55 s."""
    slow.changes = lambda _: {"ledgers": None, "flops": None}
    control = replace(arms(slow, "a")[0], name="a, A/A control", role="aa_control")
    settings = Bench(window_seconds=1.5, max_minutes=2)
    stage.calibrated([*arms(slow, "a", "b", "c"), control], settings, ledgers=False)
    first, cost, *later = capsys.readouterr().out.splitlines()
    names = ("a, 1", "b, 2", "c, 3")
    assert [first, *later] == [f"bench: short first sample of {name} of 3" for name in names]
    expected = "expect 2.7 to 10.9 minutes of rounds, and 0.6 before, if all arms take as long as a"
    assert cost == f"bench: {expected}; compiling takes longer"
    stage.calibrated([*arms(slow, "a", "b"), control], settings, ledgers=False)
    assert "expect" not in capsys.readouterr().out  # the outlook follows soon


def test_a_decided_measurement_ends_early() -> None:
    asked: list[int] = []

    def decided(measured: Rounds) -> bool:
        asked.append(len(measured.arms[0].samples))
        return asked[-1] == 8

    measured = measure(arms(FakeServer(), "a"), seconds=60, max_rounds=20, steps=1, turns=1, decided=decided)
    assert (asked, len(measured.arms[0].samples)) == ([6, 7, 8], 8)


def test_an_interruption_keeps_the_complete_rounds() -> None:
    rounds = measure(arms(FakeServer(interrupt_at=5), "a", "b"), seconds=60, max_rounds=9, steps=1, turns=1)
    assert rounds.interrupted
    assert [len(arm.samples) for arm in rounds.arms] == [2, 2]
    with pytest.raises(KeyboardInterrupt):
        measure(arms(FakeServer(interrupt_at=1), "a", "b"), seconds=60, max_rounds=9, steps=1, turns=1)


@pytest.mark.parametrize(
    ("medians", "steps", "samples"),
    [([20.0], 75, 1), ([900.0], FEWEST_STEPS, 1), ([None, None, 30.0], 50, 3), ([None] * 5, CALIBRATION_STEPS, 5)],
)
def test_steps_fill_the_window(medians: list[float | None], steps: int, samples: int) -> None:
    server = FakeServer()
    server.step_p50_ms = medians
    assert steps_of(arms(server, "baseline")[0], 1.5)[0] == steps
    assert len(server.asked) == samples


@pytest.mark.parametrize(("opening", "steps"), [(1.7, 75), (6.8, 150), (0.1, 75)])
def test_slow_starts_grow_the_window(opening: float, steps: int) -> None:
    server = FakeServer()
    server.step_p50_ms = [20.0]
    arm = arms(server, "baseline")[0]
    slow = Calibration({}, 2 * opening, 1.0)  # the other arm opens at once, so the mean is ``opening``
    assert steps_of(arm, 1.5, [slow])[0] == pytest.approx(steps, abs=1)


def test_an_inconsistent_arm_is_an_error() -> None:
    server = FakeServer()
    server.changes = lambda _: {"placement": "resident" if len(server.asked) < 3 else "streamed"}
    with pytest.raises(BenchError, match=r"a ran differently from round to round: .*resident.*streamed"):
        measure(arms(server, "a"), seconds=60, max_rounds=4, steps=1, turns=1)
    server = FakeServer()
    server.changes = lambda _: {"measured_steps": 3}
    with pytest.raises(BenchError, match="a measured 3 of 4 steps"):
        measure(arms(server, "a"), seconds=60, max_rounds=1, steps=4, turns=1)


PARAMS: dict[str, Any] = {
    "fetch": {"dataset": "digits"},
    "train": {"device": "cpu", "seeds": [0], "batch_size": 128, "warmup_steps": 2},
    "bench": {
        "max_rounds": 2,
        "max_minutes": 5.0,
        "window_seconds": 0.05,
        "max_foreign_load": 1.0,
        "max_input_wait": 1.0,
        "ablate": ["stack"],
    },
    "variants": {
        "baseline": {},
        "ddp": {"parallelism": "ddp"},
        "stack": {"channels_last": True, "gradient_accumulation": 2, "precision": "bf16"},
    },
}


@pytest.mark.slow
@pytest.mark.usefixtures("workspace")
def test_a_bench_measures_every_arm_every_round(capsys: pytest.CaptureFixture[str]) -> None:
    environment.write(environment.fingerprint({"variants": {"stack": {"bitsandbytes"}}}))
    stage.run(parse(PARAMS), CPU_ONLY)
    bench = read_bench()
    line = rf"bench: 8 arms of {bench.steps} steps; a round takes about \d+ s: the bench runs 2 rounds .*, until about "
    names = ("baseline", "ddp", "stack")
    looks = [f"bench: short first sample of {name}, {number} of 3\n" for number, name in enumerate(names, 1)]
    looks[0] += r"(bench: expect .*\n)?"  # on a busy machine
    assert re.match("".join([*looks, line]), capsys.readouterr().out)
    techniques = ("channels_last", "gradient_accumulation=2")
    assert [(arm.role, arm.variant, arm.technique) for arm in bench.arms] == [
        *(("variant", name, None) for name in ("baseline", "ddp", "stack")),
        *((role, "stack", technique) for technique in techniques for role in ("with", "without")),
        ("aa_control", "baseline", None),
    ]
    assert "bf16" in bench.not_ablated["stack"]
    assert bench.window_fraction == pytest.approx(bench.windows_seconds / bench.seconds)
    for arm in bench.arms:
        assert len(arm.samples) == 2
        for sample in arm.samples:
            assert of_the_job(sample.rejections) == ()
            assert sample.measured_steps == bench.steps
            assert bool(sample.samples_per_second) is not bool(sample.rejections)
            assert sample.peak_memory_bytes
    ddp, reduced = known(bench.arm("variant", "ddp")), known(bench.arm("without", "stack", "channels_last"))
    assert (ddp.world_size, ddp.backend, len(ddp.samples[0].peak_memory_rank_bytes)) == (2, "gloo", 2)
    assert (reduced.applied["channels_last"], reduced.applied["gradient_accumulation"]) == (False, 2)
    fingerprint = environment.read()
    assert bench.environment == environment.hash_of(fingerprint, "variants", "stack") != fingerprint["hash"]
    assert set(bench.ledgers) == set(bench.flops) == {"baseline", "ddp", "stack"}


@pytest.mark.slow
@pytest.mark.usefixtures("workspace")
def test_the_terminal_says_once_why_an_arm_was_rejected(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: dict[str, Any] = {}

    def limited(*arguments: Any, **given: Any) -> Rounds:
        limits.update(given)
        return measure(*arguments, **given)

    monkeypatch.setattr(stage, "measure", limited)
    bench = PARAMS["bench"] | {"max_input_wait": 0.0, "ablate": []}
    params = PARAMS | {"bench": bench, "variants": {"baseline": {}}}
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    stage.run(parse(params), CPU_ONLY, settled=lambda _: {"given"})
    said = capsys.readouterr().out.splitlines()
    (warned,) = [line for line in said if line.startswith("bench: every sample of round 1 was rejected")]
    (written,) = [line for line in said if line.startswith("bench: 2 rounds in ")]
    assert said.index(warned) < said.index(written)
    reasons = said[said.index(written) + 1 :]  # a busy machine may give more reasons
    assert [line.partition(" the steps waited")[0] for line in reasons if "the steps waited" in line] == [
        f"bench: {name} rejected in 2 of 2 rounds: in round 1," for name in ("baseline", "baseline, A/A control")
    ]
    assert limits["settled"](None) == {"given"}
    stage.run(parse(params), CPU_ONLY, again=True)
    (added,), first = results.read_sessions(), read_bench()
    assert results.read_sessions(results.KEPT_BENCHES) == [first]
    assert f"written to sessions/{added.session.start_utc[:10].replace('-', '')}T" in capsys.readouterr().out
    assert (added.keys, added.session.boot_id) == (first.keys, first.session.boot_id)
    assert added.session.start_utc > first.session.start_utc
    assert (set(first.ledgers), added.ledgers) == ({"baseline"}, {})


def test_an_option_goes_with_its_parallelism() -> None:
    tuned = {"parallelism": "ddp", "bucket_mb": 5, "gradient_accumulation": 2}
    variants = {"baseline": {}, "tuned": tuned, "alone": {"channels_last": True}}
    config = parse({"bench": {"ablate": ["tuned", "alone"]}, "variants": variants})
    isolated, without = stage.isolating(config, plans(config, CPU_ONLY), FakeServer())
    assert [(arm.role, arm.technique) for arm in isolated] == [
        (role, technique) for technique in ("ddp", "gradient_accumulation=2") for role in ("with", "without")
    ]
    assert isolated[1].plan == Variant(gradient_accumulation=2).model_dump(mode="json")
    assert without == {
        "tuned": {"bucket_mb=5": "it works only with the variant's parallelism, which baseline lacks"},
        "alone": {"channels_last": "alone changes nothing else, so its own figures show the effect"},
    }


def test_a_server_s_output_is_printed_above_the_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = tmp_path / "python"
    executable(python, "#!/bin/sh\necho 'a warning of a library' >&2\nexit 3\n")
    bar = tqdm(total=2, desc="bench", file=sys.stderr)
    with bar, Server(tmp_path, python) as server, pytest.raises(BenchError, match=r"ended \(3\)"):
        server.describe()
    assert "a warning of a library\n" in re.split("[\r]", capsys.readouterr().err.replace("\n", "\n\r"))


@pytest.mark.slow
def test_each_sample_s_fresh_process_warms_up_before_its_window(workspace: Path) -> None:
    (workspace / "counted.py").write_text(
        "import os\n\nfrom torch import nn\n\n"
        "class Counted(nn.Flatten):\n"
        "    def forward(self, images):\n"
        "        with open('passes', 'a') as file:\n"
        "            print(os.getpid(), file=file)\n"
        "        return super().forward(images)\n\n"
        "def net(*, channels, height, width, classes):\n"
        "    return nn.Sequential(Counted(), nn.Linear(channels * height * width, classes))\n",
        encoding="utf-8",
    )
    # With 64 samples a step, no epoch ends within the arm. The evaluation at an epoch's end would add passes.
    params = PARAMS | {"train": PARAMS["train"] | {"model": "counted:net", "batch_size": 64}}
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    counts, peaks, processes = [], [], set[str]()

    def passes() -> list[str]:
        return Path("passes").read_text(encoding="utf-8").split() if Path("passes").exists() else []

    with Server() as server:
        plan = server.plan("baseline", Variant().model_dump(mode="json"))
        for steps, memory in ((2, True), (5, True), (6, True), (9, True), (2, False), (9, False)):
            plan["train"]["warmup_steps"] = steps
            before = len(passes())
            server.open("baseline", plan, 4, memory=memory)
            (process,) = set(passes()[before:])
            counts.append(len(passes()) - before)
            assert process not in processes
            processes.add(process)
            server.turn("baseline", 4)
            window = Window.model_validate(server.close("baseline")["window"])
            peaks.append((bool(window.peak_memory_bytes), len(window.peak_memory_rank_bytes)))
    assert [count - counts[0] for count in counts] == [0, 0, 1, 4, -3, 1]
    assert peaks == [(True, 1)] * 4 + [(False, 0)] * 2


@pytest.mark.parametrize(
    ("placement", "chosen", "replays", "limit"),
    [
        ("resident", None, False, 0.5),
        ("streamed", "streamed", False, None),
        ("resident", None, True, None),
        ("streamed", None, True, 0.5),
    ],
)
def test_a_compared_wait_for_input_is_not_limited(
    placement: str, chosen: str | None, replays: bool, limit: float | None
) -> None:
    """When a CUDA graph replays the step of a small model, reading the input can take most of the step's time."""
    plan = make_plan(data_loading=chosen or "auto")
    setup, batches = SimpleNamespace(replays=replays), SimpleNamespace(placement=placement)
    training: Any = SimpleNamespace(plan=plan, batches=batches, setup=setup)
    config = parse({"bench": {"max_input_wait": 0.5}, "variants": {"baseline": {}}})
    assert _allowed_wait(training, config) == limit


def test_a_server_measures_and_names_what_it_cannot(workspace: Path) -> None:
    (workspace / "broken.py").write_text("def net(**sizes):\n    raise RuntimeError('planted')\n", encoding="utf-8")
    bench = PARAMS["bench"] | {"max_input_wait": 0.0}
    Path("params.yaml").write_text(yaml.safe_dump(PARAMS | {"bench": bench}), encoding="utf-8")
    calm = Variant(gradient_accumulation=4, data_loading="streamed")  # the bench allows it to wait for its input
    with Server() as server:
        about = server.describe()
        sent = server.plan("calm", calm.model_dump(mode="json"))
        sent["train"]["learning_rate"] = 0.125  # an arm follows the plan that was sent
        plans = {"calm": sent, "waiting": server.plan("waiting", Variant().model_dump(mode="json"))}
        arms = [ArmSpec.of_variant(name, server, plan) for name, plan in plans.items()]
        answer, waiting = (calibrate(arm, 8).answer for arm in arms)
        server.open("calm", sent, 8, memory=False)
        server.turn("calm", 8)
        without_memory = Window.model_validate(server.close("calm")["window"])
        sent["train"]["model"] = "broken:net"
        with pytest.raises(BenchError, match=r"(?s)calm cannot be measured.*planted"):
            server.open("calm", sent, 8)
    assert (about["dataset"]["name"], answer["learning_rate"]) == ("digits", 0.125)
    assert about["variants"]["stack"]["gradient_accumulation"] == 2
    window = Window.model_validate(answer["window"])
    assert (window.measured_steps, of_the_job(window.rejections)) == (8, ())
    assert answer["applied"]["gradient_accumulation"] == 4
    assert bool(window.samples_per_second) is not bool(window.rejections)
    assert (without_memory.measured_steps, without_memory.peak_memory_bytes) == (8, None)
    window = Window.model_validate(waiting["window"])
    assert "input_wait" in [rejection.code for rejection in window.rejections]
    assert (window.samples_per_second, window.step_p50_ms, window.measured_steps) == (None, None, 8)
    assert window.peak_memory_bytes


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.usefixtures("workspace")
def test_an_interruption_or_a_kill_keeps_the_complete_rounds(sent: signal.Signals) -> None:
    """The signal goes to the bench, its server and the arms, as Ctrl-C in a terminal does."""
    two = {"baseline": {}, "same": {"set_to_none": False}}
    alone = {"variants": two, "bench": PARAMS["bench"] | {"max_rounds": None, "ablate": []}}
    Path("params.yaml").write_text(yaml.safe_dump(PARAMS | alone), encoding="utf-8")
    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 200))  # tqdm shows nothing on a terminal without a width
    command = [sys.executable, "-m", "pipeline", "bench"]
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    shown, asked = b"", False
    try:
        while part := os.read(screen, 4096):
            shown += part
            if not asked and b"round 3" in shown:
                os.killpg(process.pid, sent)
                asked = True
    except OSError:  # all processes that wrote to the terminal have ended
        pass
    os.close(screen)
    assert process.wait(timeout=60) == (130 if sent == signal.SIGINT else -sent), shown.decode()
    (file,) = results.KEPT_BENCHES.glob("*.json")
    bench = read_bench(file)
    assert bench.interrupted
    assert {len(arm.samples) for arm in bench.arms} <= {2, 3}
    assert len({len(arm.samples) for arm in bench.arms}) == 1
    if sent == signal.SIGINT:
        assert read_bench() == bench
        said = f"{bench.rounds} complete rounds kept in {file}; run the same command within an hour to add rounds"
        assert said in shown.decode()
        return
    limited = alone | {"bench": PARAMS["bench"] | {"max_rounds": 5, "ablate": []}}
    Path("params.yaml").write_text(yaml.safe_dump(PARAMS | limited), encoding="utf-8")
    stage.run(parse(PARAMS | limited), CPU_ONLY)
    further = read_bench()
    assert (further.rounds, further.interrupted, further.keys) == (5, False, bench.keys)
    assert [arm.samples[: bench.rounds] for arm in further.arms] == [arm.samples for arm in bench.arms]
    assert list(results.KEPT_BENCHES.glob("*.json")) == [file]
    assert known(further.session.end_utc) > known(bench.session.end_utc)


def test_a_late_server_is_cut_and_starts_again(tmp_path: Path) -> None:
    python = tmp_path / "python"
    executable(python, "#!/bin/sh\nif [ -e up ]; then read line; echo '{\"requests\": []}'; fi\nexec sleep 60\n")
    with Server(tmp_path, python) as server:
        server.deadline = time.monotonic() + 0.1
        with pytest.raises(OutOfTime, match="it took too long to describe"):
            server.describe()
        (tmp_path / "up").touch()
        server.deadline = math.inf
        server.restart()
        assert server.describe() == {"requests": []}
        server.limit = 0.1  # it answers once
        with pytest.raises(OutOfTime, match="it took too long to describe"):
            server.describe()


@pytest.mark.usefixtures("workspace")
def test_an_early_interruption_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "calibrate", stopped)
    with pytest.raises(KeyboardInterrupt, match="no round was complete, so nothing is kept"):
        stage.run(parse(PARAMS), CPU_ONLY)
    assert not Path("bench.json").exists()
