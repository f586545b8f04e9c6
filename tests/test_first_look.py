"""The command ``try``, on arms of known times and figures, with a simulated clock."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import cli, processes, results
from pipeline.benchmark import stage
from pipeline.benchmark.server import ArmSpec, BenchError
from pipeline.benchmark.stage import Job
from pipeline.errors import ConfigError
from pipeline.params import parse
from pipeline.plans import plans
from pipeline.results.bench_file import FEWEST_PAIRS
from pipeline.tools import first_look
from tests.factories import known, make_bench, make_session
from tests.timed import Known, Timed, play
from tests.workspaces import CPU_ONLY


class Try:
    """A run of ``try`` with these arms, of which the first is the baseline."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **arms: Known) -> None:
        self.server = server = Timed(arms)
        self.config = parse({"variants": {name: {} for name in arms}, "compare": {"baseline": next(iter(arms))}})
        specs = [ArmSpec.of_variant(name, server, {}) for name in arms]
        control = specs[0].control()
        bench = make_bench()
        kept = ("environment", "commit", "config", "dataset", "margins")
        facts = {name: getattr(bench, name) for name in kept}
        facts |= {"baseline": specs[0].name, "keys": self.keys()}
        self.job = Job(server, plans(self.config, CPU_ONLY), (*specs, control), "cpu", facts, self.keys)
        play(monkeypatch, first_look, self.job)

    def keys(self, **replaced: object) -> dict[str, str]:
        return dict.fromkeys(self.server.arms, str(self.settings | replaced))

    @property
    def settings(self) -> dict[str, Any]:
        bench = self.config.bench
        return {"max_foreign_load": bench.max_foreign_load, "window_seconds": bench.window_seconds}

    def run(self, *names: str, minutes: float = 5.0) -> float:
        """Return the share of the minutes that was taken."""
        began = self.server.now
        first_look.run(self.config, CPU_ONLY, names, minutes=minutes)
        return (self.server.now - began + processes.age_seconds()) / (60 * minutes)


LESS_MEMORY = re.compile(r"clearly less\s+memory:\s+0\.(30|29)")  # a narrow interval has a third digit


@pytest.fixture
def trying(monkeypatch: pytest.MonkeyPatch, here: object) -> Callable[..., Try]:  # noqa: ARG001
    return lambda **arms: Try(monkeypatch, **arms)


def test_a_ranking_stands_after_the_minutes(trying: Callable[..., Try], capsys: pytest.CaptureFixture[str]) -> None:
    """The rounds are kept under the conditions of the bench, which goes on from them."""
    look = trying(base=Known(), slow=Known(step=0.1, memory=0.3), open=Known(scatter=0.1), broken=Known(fails=True))
    assert 0.9 < look.run() <= 1.05
    said = capsys.readouterr().out
    assert "try: first sample of slow, 2 s to start\n" in said
    assert "try: round 2; no ratios until A/A shows how much this machine scatters\n" in said
    assert "try: round 3; slow speed 0.5" in said
    ranked = said[said.index("Provisional, not a verdict (one look at ") :]
    assert "  slow    clearly slower: 0.5" in ranked
    assert LESS_MEMORY.search(ranked)
    assert "  open    throughput cannot be told in 5 minutes: 0.9" in ranked
    assert "  broken  cannot be measured: it has no such layer" in ranked
    assert ranked.index("  open ") < ranked.index("  slow ")  # the fastest first
    (bench,) = results.read_sessions(results.KEPT_BENCHES)
    assert [arm.name for arm in bench.arms] == ["base", "slow", "open", "base, A/A control"]
    assert (
        stage.unfinished("bench", make_session("2026-11-20T08:30"), look.job, [arm.name for arm in bench.arms]) == bench
    )
    assert not results.BENCH_FILE.exists()


@pytest.mark.parametrize(
    ("arms", "minutes", "says"),
    [
        ({"slow": Known(opening=500.0)}, 5.0, "slow: cut, because its start and 5 steps take more than "),
        ({"slow": Known(step=90.0)}, 5.0, "slow: cut, because its start and 5 steps take more than "),
        (
            {"slow": Known(), "a": Known(opening=25.0), "b": Known(opening=45.0)},
            5.0,
            "b: dropped: it costs 45 s a round\n",
        ),
        ({str(number): Known(opening=9.0) for number in range(30)}, 5.0, ": dropped: it costs about 8 s a round"),
        ({"slow": Known(opening=20.0)}, 0.5, "  slow  cut, because"),
        ({"base": Known(opening=400.0), "slow": Known()}, 5.0, "base cannot be measured: it took too long to open"),
        ({"base": Known(opening=70.0), "slow": Known(opening=70.0)}, 5.0, "slow  cannot be told in 5 minutes"),
    ],
)
def test_it_ends_on_time_whatever_the_arms_take(
    trying: Callable[..., Try],
    capsys: pytest.CaptureFixture[str],
    arms: dict[str, Known],
    minutes: float,
    says: str,
) -> None:
    assert trying(**{"base": Known()} | arms).run(minutes=minutes) <= 1.05
    assert says in capsys.readouterr().out


def test_an_interrupt_keeps_what_is_known(trying: Callable[..., Try], capsys: pytest.CaptureFixture[str]) -> None:
    look = trying(base=Known(), slow=Known(step=0.1, memory=0.3))
    look.server.interrupt_at = look.server.now + 60
    with pytest.raises(KeyboardInterrupt, match="4 complete rounds kept"):
        look.run()
    assert "  slow  clearly slower: 0.5" in (said := capsys.readouterr().out)
    assert LESS_MEMORY.search(said)
    assert results.read_sessions(results.KEPT_BENCHES)[0].interrupted


def test_a_bench_goes_on_from_looks_and_interrupts_until_it_is_settled(
    trying: Callable[..., Try], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look = trying(base=Known(), slow=Known(step=0.1, memory=0.3), open=Known(scatter=0.1))
    play(monkeypatch, stage, look.job, "2026-11-20T08:30")
    Path("params.yaml").write_text(
        yaml.safe_dump({"variants": {name: {} for name in look.server.arms}, "compare": {"baseline": "base"}})
    )
    look.run(minutes=2)
    (looked,) = results.read_sessions(results.KEPT_BENCHES)
    capsys.readouterr()
    look.server.interrupt_at = look.server.now + 40
    with pytest.raises(KeyboardInterrupt, match=r"complete rounds kept in .*; run the same command within an hour"):
        stage.run(look.config, CPU_ONLY)
    interrupted = results.read_bench()
    assert interrupted.interrupted
    assert f"bench: adds to the {looked.rounds} rounds of " in (said := capsys.readouterr().out)
    assert " minutes of rounds, as long as those before\n" in said
    look.server.interrupt_at = math.inf
    assert cli.main(["bench"]) == 0
    bench = results.read_bench()
    assert (bench.interrupted, bench.flops) == (False, interrupted.flops)
    assert bench.rounds > interrupted.rounds > looked.rounds
    said = capsys.readouterr().out
    assert "first sample" not in said, "the steps of a window and the FLOPs are known"
    assert f"bench: slow was settled after {looked.rounds} rounds\n" in said
    play(monkeypatch, stage, look.job, "2026-11-21T08:00")
    assert cli.main(["bench", "--again"]) == 0
    assert "an earlier bench of the same job counts too: sessions/20261120T080000.json\n" in capsys.readouterr().out


LOADS = 0.22, 0.17, 0.47, 0.18, 0.31


def test_on_a_busy_machine_only_sides_are_known(trying: Callable[..., Try], capsys: pytest.CaptureFixture[str]) -> None:
    """All samples are rejected. No size is told, and what is kept for the bench stays rejected."""
    look = trying(
        base=Known(loads=LOADS),
        slow=Known(step=0.1, loads=LOADS),
        open=Known(step=0.051, scatter=0.012, loads=LOADS),
    )
    look.run(minutes=2)
    said = capsys.readouterr().out
    ranked = said[said.index("Provisional") :]
    unwrapped = " ".join(ranked.split())
    assert re.search(r" slow clearly slower beside this load: 0\.50. \(0\.4[^)]*\), size uncertain;", unwrapped)
    undecided = r" open throughput cannot be told in 2 minutes beside this load: 0\.9.. \([^)]*\), and a bench rejects"
    assert re.search(undecided, unwrapped)
    assert "rounds had to be rejected, most often because other processes took" in unwrapped
    assert unwrapped.count("bench.max_foreign_load") == unwrapped.count("bench.max_foreign_load: 0.8") == 1
    (bench,) = results.read_sessions(results.KEPT_BENCHES)
    assert {sample.samples_per_second for arm in bench.arms for sample in arm.samples} == {None}
    look.config = parse(look.config.model_dump() | {"bench": {"max_foreign_load": 0.8}})
    look.job.facts["config"] = {"bench": look.settings}
    names = [arm.name for arm in bench.arms]
    judged = stage.unfinished("bench", bench.session, look.job, names)
    assert "judged again by bench.max_foreign_load: 0.8\n" in capsys.readouterr().out
    assert all(
        sample.samples_per_second and not sample.rejections for arm in known(judged).arms for sample in arm.samples
    )


def test_short_windows_answer_in_time_and_go_on(trying: Callable[..., Try], capsys: pytest.CaptureFixture[str]) -> None:
    """A second look goes on from their rounds, but no bench, which would measure all of its rounds in short windows."""
    look = trying(base=Known(opening=4.0), slow=Known(opening=4.0, step=0.1), open=Known(opening=4.0, scatter=0.1))
    look.run(minutes=2.5)
    said = capsys.readouterr().out
    assert "  slow  clearly slower: 0.5" in said
    # 360,000 samples at 2,560 a second take 2.3 minutes, but a first sample has a step more than this server takes.
    assert "try: minutes to train 3 seeds x 2 epochs, about: base 1.0, slow 2.0, open 1.0\n" in said
    (first,) = results.read_sessions(first_look.SHORT)
    short = f"windows of {first.steps} steps, not 46, so that more rounds fit; no bench goes on from these"
    assert f"try: {short}\n" in said
    assert first.rounds >= FEWEST_PAIRS
    assert stage.unfinished("bench", first.session, look.job, [arm.name for arm in first.arms]) is None
    look.run(minutes=1)
    said = capsys.readouterr().out
    assert f"try: adds to the {first.rounds} rounds of 2026-11-20T08:00:00+00:00\n" in said
    assert "first sample" not in said
    (second,) = results.read_sessions(first_look.SHORT)
    assert second.rounds > first.rounds
    assert [arm.samples[: first.rounds] for arm in second.arms] == [arm.samples for arm in first.arms]


def test_windows_shorten_if_the_first_round_is_slow(trying: Callable[..., Try]) -> None:
    """After the first samples, other work makes all take twice as long: a second round like the first and a third would
    be the last."""
    look = trying(base=Known(opening=5, step=0.04), memory=Known(opening=5, step=0.2), bf16=Known(opening=5, step=0.1))
    look.server.slows_at, look.server.slower = look.server.now + 17, 2.0
    assert look.run() > 0.9
    (bench,) = results.read_sessions(first_look.SHORT)
    assert (bench.rounds, bench.steps) == (4, 5)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "drops"), [("n\n", False), ("\n", True), ("", True)])
def test_a_terminal_asks_before_it_drops_and_redraws(
    trying: Callable[..., Try], monkeypatch: pytest.MonkeyPatch, answer: str, drops: bool
) -> None:
    look, screen = trying(base=Known(), slow=Known(), slower=Known(opening=20.0)), Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    monkeypatch.setattr("select.select", lambda *_: [[answer], [], []] if answer else [[], [], []])
    look.run("slow", "slower", minutes=2)
    said = screen.getvalue()
    assert "try: 2 minutes do not suffice for all; drop slower (20 s a round)? [Y/n] " in said
    assert ("slower: dropped: it costs 20 s a round" in said) is drops
    assert "\x1b[2F\x1b[Jtry: round 2; no ratios until A/A shows" in said
    assert ("\x1b[4F\x1b[Jtry: round 4; " in said) is drops  # the others are too few


@pytest.mark.parametrize(
    ("names", "minutes", "says"),
    [
        (["slwo"], 5.0, r"try: found 'slwo', .* Did you mean slow\?"),
        ([], 0.0, "--minutes: found 0; expected a number"),
        ([], 2e6, r"--minutes: found 2e\+06; expected a number above 0, at most 1,000,000."),
        ([], float("inf"), "--minutes: found inf; expected a number"),
    ],
)
def test_a_wrong_argument_is_refused(trying: Callable[..., Try], names: list[str], minutes: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trying(base=Known(), slow=Known()).run(*names, minutes=minutes)


@pytest.mark.usefixtures("here")
def test_without_a_baseline_there_is_no_ranking(trying: Callable[..., Try]) -> None:
    with pytest.raises(BenchError, match="base cannot be measured: it has no such layer"):
        trying(base=Known(fails=True), slow=Known()).run()


PARAMS: dict[str, Any] = {
    "fetch": {"dataset": "digits"},
    "train": {"device": "cpu", "seeds": [0], "batch_size": 128, "warmup_steps": 2},
    "bench": {"max_rounds": 2, "max_minutes": 5.0, "window_seconds": 0.05, "max_foreign_load": 1.0},
    "variants": {"baseline": {}, "same": {"set_to_none": False}},
}


@pytest.mark.slow
@pytest.mark.usefixtures("workspace")
def test_a_bench_goes_on_from_real_rounds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.processes.age_seconds", lambda: 0.0)
    config = parse(PARAMS)
    first_look.run(config, CPU_ONLY, [], minutes=1.0)
    (kept,) = results.read_sessions(results.KEPT_BENCHES)
    assert kept.rounds > 2
    assert (kept.ledgers, kept.flops) == ({}, {})
    stage.run(config, CPU_ONLY)
    bench = results.read_bench()
    assert " minutes of rounds, as long as those before\n" in capsys.readouterr().out
    assert bench.rounds == kept.rounds + 2
    assert [arm.samples[: kept.rounds] for arm in bench.arms] == [arm.samples for arm in kept.arms]
    assert (bench.steps, bench.session.start_utc) == (kept.steps, kept.session.start_utc)
    assert set(bench.ledgers) == set(bench.flops) == {"baseline", "same"}
