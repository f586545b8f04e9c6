"""Record rounds of all that ``advise`` tries for a job, and replay its race on them, against a stopwatch.

    python -m benchmarks.races record NAME --minutes 60     in the directory of a job whose data are prepared
    python -m benchmarks.races replay

A recorded round has one window of each candidate, and of each combination of two that gain something in the first two
rounds; nothing drops out. ``record`` writes ``races-NAME-MACHINE.json``; ``replay`` writes ``races.json``. A replayed
race draws rounds from the recorded ones, with replacement. So what it may know of the machine is what the recording
saw, and the truth is the mean of all recorded rounds. A pool without combinations replays the race of the candidates
alone.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.processes import set_openmp_spins

set_openmp_spins(measures=True)  # as in `python -m pipeline`

import numpy as np

from benchmarks import machines
from pipeline import environment, files, params
from pipeline.comparison.racing import FEWEST_ROUNDS, Race, finalists, gaining, paired
from pipeline.comparison.stats import paired_ratio
from pipeline.errors import say
from pipeline.params import Margins
from pipeline.results import Arm, Bench
from pipeline.results.figures import MEMORY, THROUGHPUT
from pipeline.tools.advise import AT_ONCE, FINAL_ROUNDS, LONGEST, RACE_ROUNDS, RACED_UNTIL, SAMPLING, begun
from pipeline.tools.advised import COMBINED_UNTIL
from pipeline.tools.live_table import LiveTable

REPLAYED = machines.FIGURES / "races.json"
MARGIN = Margins().throughput
MOST_PAIRS, PAIRS_UNTIL = 20, 0.5
"""Most combinations that are recorded, and the share of the minutes after which no first sample of one begins."""
Logs = np.ndarray[Any, np.dtype[np.float64]]


def raced(draw: Callable[[], Logs], seconds: Logs, budget: float) -> tuple[list[int], Race, int]:
    """Race arms; return those that are not beaten, the race, and its rounds.

    ``draw``: returns the logarithms of the speeds and memories of a round, [2, arms]; the baseline is arm 0.
    ``seconds``: of each arm in a round. ``budget``: seconds for all.
    """
    size, running, rounds = len(seconds), [*range(len(seconds))], list[Logs]()
    race = Race([*map(str, running)], {}, {THROUGHPUT: MARGIN, MEMORY: MARGIN})
    while len(running) > 1:
        new = 1 if rounds else FEWEST_ROUNDS
        if (cost := new * float(seconds[running].sum())) > budget:
            break
        for _ in range(new):
            rounds.append(np.full((2, size), np.nan))
            rounds[-1][:, running] = draw()[:, running]
        budget -= cost
        logs = np.stack(rounds, axis=-1)
        race = Race(race.names, {THROUGHPUT: paired(logs[0]), MEMORY: paired(logs[1])}, race.margins)
        beaten = race.beaten([str(arm) for arm in running[1:]])
        running = [arm for arm in running if str(arm) not in beaten]
    return running, race, len(rounds)


def chosen(running: Sequence[int], race: Race) -> list[int]:
    """Return the baseline and the finalists among the ``running`` arms."""
    standing = {str(arm): race.ratios(str(arm), "0") for arm in running if arm}
    return [0, *map(int, finalists(standing))]


def wrongly_dropped(truth: Logs, running: Sequence[int], margin: float = MARGIN) -> list[int]:
    """Return which of the fastest and the leanest arm was dropped, although none truly beats it.

    ``truth``: logarithms of speeds and memories, [2, arms].
    """
    (speeds, memories), bound = truth, math.log1p(margin)
    wrong = []
    for best in {int(speeds.argmax()), int(memories.argmin())} - {0, *running}:
        faster, leaner = speeds[best] - speeds, memories - memories[best]
        gains_nothing = (faster <= bound) & (leaner <= bound)
        truly = gains_nothing & ((faster < -bound) | (leaner < -bound) | (np.arange(len(speeds)) == 0))
        if not truly.any():
            wrong.append(best)
    return wrong


def record(name: str, minutes: float) -> dict[str, Any]:
    """Measure rounds of all candidates of the job in the working directory for so many minutes; return the pool."""
    config, machine, table = params.load(), environment.machine(), LiveTable("races", minutes)
    with begun(config, machine, table) as adviser:
        adviser.job.server.limit = LONGEST * table.seconds
        adviser.sample([adviser.advice.baseline, *adviser.advice.candidates], table.left())
        alone = adviser.running(adviser.advice.candidates)
        adviser.rounds(alone, 0.0, FEWEST_ROUNDS, lambda _: (), turns=1)
        pairs = adviser.combine(gaining(adviser.advice.standing()), MOST_PAIRS)
        adviser.sample(pairs, table.left(PAIRS_UNTIL))
        running = adviser.running(adviser.advice.candidates)
        adviser.rounds(running, table.left(), FEWEST_ROUNDS, lambda _: (), turns=1)
    advice = adviser.advice
    return pool_of(name, advice.benches[-1]) | {
        "costs": {arm: [round(start, 3), round(step, 4)] for arm, (start, step) in advice.costs.items()},
        "made_of": {pair: advice.candidates[pair].made_of for pair in pairs},
        "apart": {candidate.name: candidate.apart for candidate in advice.candidates.values() if candidate.apart},
        "left_out": {**advice.untried, **{arm: left_out.why for arm, left_out in advice.out.items()}},
    }


def pool_of(name: str, bench: Bench) -> dict[str, Any]:
    """Return the figures of a bench's rounds that a race reads."""

    def values(arm: Arm) -> dict[str, Any]:
        speeds = [window.samples_per_second or window.disturbed_samples_per_second for window in arm.samples]
        return {
            "samples_per_second": [speed and round(speed, 2) for speed in speeds],
            "rejected": sum(window.samples_per_second is None for window in arm.samples),
            "peak_memory_bytes": [window.peak_memory_bytes for window in arm.samples],
        }

    return {
        "job": name,
        "baseline": bench.baseline,
        "rounds": bench.rounds,
        "steps": bench.steps,
        "seconds": round(bench.seconds),
        "arms": {arm.name: values(arm) for arm in bench.arms},
    }


@dataclass(frozen=True)
class Pool:
    """Recorded rounds of the candidates that leave the training as it is, complete ones only."""

    names: Sequence[str]
    """The baseline first."""
    logs: Logs
    """Logarithms of speeds and memories, [2, arms, rounds]."""
    unpaired: Logs
    """As ``logs``, with a single window of the baseline in place of the mean of it and its control."""
    seconds: Logs
    """Of each arm in a round; the control counts as the baseline."""
    first_seconds: Logs
    """Of each arm's first sample."""
    made_of: Mapping[int, Sequence[int]]
    """The number of each combination -> those of the candidates that it combines."""

    @classmethod
    def of(cls, recorded: dict[str, Any]) -> Pool:
        arms, rounds = recorded["arms"], recorded["rounds"]
        names = [name for name in recorded["costs"] if name in arms and name not in recorded["apart"]]
        control = next(name for name in arms if name not in recorded["costs"])

        def logs(name: str) -> Logs:
            rows = [arms[name]["samples_per_second"], arms[name]["peak_memory_bytes"]]
            return np.log(np.array([[value or np.nan for value in row] for row in rows], dtype=np.float64))

        names = [name for name in names if len(arms[name]["samples_per_second"]) == rounds]
        unpaired = np.stack([logs(name) for name in names], axis=1)
        every = unpaired.copy()
        every[:, 0] = (unpaired[:, 0] + logs(control)) / 2
        complete = ~np.isnan(every).any(axis=(0, 1))
        costs = np.array([recorded["costs"][name] for name in names])
        seconds = costs[:, 0] + recorded["steps"] * costs[:, 1]
        seconds[0] *= 2
        first = costs[:, 0] + 6 * costs[:, 1]
        pairs = {name: parts for name, parts in recorded.get("made_of", {}).items() if {name, *parts} <= {*names}}
        made_of = {names.index(name): [*map(names.index, parts)] for name, parts in pairs.items()}
        return cls(names, every[..., complete], unpaired[..., complete], seconds, first, made_of)

    def scattered(self, factor: float) -> Pool:
        """Return the pool with so many times the scatter about each arm's mean."""

        def more(logs: Logs) -> Logs:
            mean: Logs = logs.mean(axis=-1, keepdims=True)
            return factor * logs + (1 - factor) * mean

        return replace(self, logs=more(self.logs), unpaired=more(self.unpaired))


def replayed(pool: Pool, minutes: float, *, trials: int = 1000) -> dict[str, Any]:
    """Replay races of so many minutes.

    Returns how often the fastest or the leanest arm was ``dropped`` although none truly beats it; how often, for each
    memory, an arm that was not dropped needs no more and is at most the margin slower than the fastest such arm
    (``front``); how often the finalists, combinations among them, hold the largest speed and the least memory, up to
    the margin (``ends``); how often the final interval of a finalist's speed holds the truth (``coverage``); and how
    often the ``stopwatch``, one window of each candidate from different rounds, names a fastest that is more than the
    margin slower than the true one.
    """
    random, bound = np.random.default_rng(0), math.log1p(MARGIN)
    truth, count = pool.logs.mean(axis=-1), pool.logs.shape[-1]
    total, size = 60 * minutes, len(pool.names)
    alone = [arm for arm in range(size) if arm not in pool.made_of]
    until = pool.first_seconds[alone].cumsum()
    sampled = [arm for arm, seconds in zip(alone, until, strict=True) if seconds <= SAMPLING * RACED_UNTIL * total]
    spent = float(pool.first_seconds[sampled].sum())
    allowed = (RACED_UNTIL * total - spent) / RACE_ROUNDS
    kept = sorted(sampled[1:], key=lambda arm: pool.seconds[arm])
    while len(kept) > 1 and pool.seconds[[0, *kept]].sum() > allowed:
        kept.pop()
    taking_part = [0, *sorted(kept)]
    true, seconds = truth[:, taking_part], pool.seconds[taking_part]
    counts = dict.fromkeys(("dropped", "front", "ends", "stopwatch"), 0)
    every = [*taking_part, *pool.made_of]
    whole = {arm: paired_ratio(*np.exp(pool.logs[0][[arm, 0]])) for arm in every}
    covered, finals, rounds_used = 0, 0, []

    def drawing(arms: Sequence[int]) -> Callable[[], Logs]:
        return lambda: pool.logs[:, arms, random.integers(count)]

    for _ in range(trials):
        running, race, rounds = raced(drawing(taking_part), seconds, RACED_UNTIL * total - spent)
        front = [taking_part[arm] for arm in chosen(running, race)]
        rounds_used.append(rounds)
        counts["dropped"] += bool(wrongly_dropped(true, running))
        counts["front"] += all(
            true[0, [arm for arm in running if true[1, arm] <= memory + bound]].max(initial=-np.inf)
            >= true[0, true[1] <= memory].max() - bound
            for memory in true[1]
        )
        leaders = [*dict.fromkeys((*front[1:2], *front[1:][-1:]))]
        pairs = [pair for pair, parts in pool.made_of.items() if {*leaders} & {*parts}][:AT_ONCE]
        arms, left = [0, *leaders, *pairs], (COMBINED_UNTIL - RACED_UNTIL) * total - pool.first_seconds[pairs].sum()
        if pairs and FEWEST_ROUNDS * pool.seconds[arms].sum() <= left:
            running, race, _ = raced(drawing(arms), pool.seconds[arms], left)
            front = [arms[arm] for arm in chosen(running, race)]
        (speeds, memories), (fast, lean) = truth[:, every], truth[:, front]
        counts["ends"] += bool(fast.max() >= speeds.max() - bound and lean.min() <= memories.min() + bound)
        drawn = pool.logs[0][:, random.integers(count, size=FINAL_ROUNDS)]
        for arm in front[1:]:
            finals += 1
            low, high = paired_ratio(np.exp(drawn[arm]), np.exp(drawn[0])).bounds
            covered += low <= (whole[arm].estimate or 0.0) <= high
        once = pool.unpaired[0][alone, random.integers(count, size=len(alone))]
        counts["stopwatch"] += bool(truth[0, alone][once.argmax()] < truth[0, alone].max() - bound)
    return {
        "minutes": minutes,
        "candidates": len(alone) - 1,
        "no_time_for": [pool.names[arm] for arm in alone if arm not in taking_part],
        "rounds": statistics.fmean(rounds_used),
        **{name: count / trials for name, count in counts.items()},
        "coverage": round(covered / finals, 3) if finals else None,
    }


def replay() -> dict[str, Any]:
    """Replay all recorded pools."""
    figures: dict[str, Any] = {"margin": MARGIN, "jobs": {}}
    for file in sorted(machines.FIGURES.glob("races-*.json")):
        recorded = json.loads(file.read_text(encoding="utf-8"))
        pool = Pool.of(recorded)
        deviation = (pool.logs[0] - pool.logs[0].mean(axis=0)).std(axis=-1, ddof=1)
        figures["jobs"][recorded["job"]] = {
            "pool": file.name,
            "rounds_recorded": pool.logs.shape[-1],
            "scatter": round(float(np.median(deviation)), 4),
            "as_recorded": replayed(pool, 20.0),
            "twice_the_scatter": replayed(pool.scattered(2.0), 20.0),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.races", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("name")
    recording.add_argument("--minutes", type=float, default=60.0)
    commands.add_parser("replay")
    arguments = parser.parse_args()
    if arguments.command == "replay":
        files.write_text(REPLAYED, json.dumps(replay(), indent=1) + "\n")
        return
    pool, fingerprint = record(arguments.name, arguments.minutes), environment.fingerprint()
    machine = machines.name_of(fingerprint)
    about = {"machine": machine, "environment": fingerprint["hash"], "measured_on": time.strftime("%Y-%m-%d")}
    file = machines.FIGURES / f"races-{arguments.name}-{machines.stem(machine)}.json"
    files.write_text(file, json.dumps(about | pool) + "\n")
    say(f"races: {file}")


if __name__ == "__main__":
    main()
