"""Measure the gate's error rates: how often it raises a false alarm, and how often it finds a planted slowdown.

``pool`` records many real rounds of the default job, with all variants, on three sides: two equal checkouts, and one
whose training step takes 10% longer. In ``rates``, every block of consecutive rounds is a trial, so trials include the
machine's drift; the gate's own code decides each. It writes ``gate-rates-….json`` beside the pool. ``power`` does the
same for other slowdowns. ``simulate`` draws rounds from a distribution, so its trials are many and
independent. ``trial`` runs complete gates and adds them to a file. Only complete gates are both real and independent;
their number limits how precisely the error rates are known.

    python -m benchmarks.gate pool FILE --minutes 180
    python -m benchmarks.gate rates FILE
    python -m benchmarks.gate power FILE docs/gate-power.svg
    python -m benchmarks.gate simulate
    python -m benchmarks.gate trial --minutes 40
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pipeline.processes import set_openmp_spins
from pipeline.results.bench_file import FEWEST_PAIRS

set_openmp_spins(measures=True)  # as in `python -m pipeline`

import numpy as np
from matplotlib import pyplot
from scipy.special import betaincinv

from benchmarks import machines
from benchmarks.pairs import ROOT, Checkout
from benchmarks.simulations import AUTOCORRELATIONS, rounds_of
from benchmarks.simulations import FILE as SIMULATIONS_FILE
from benchmarks.stages import fashion_mnist
from pipeline import environment, files, params
from pipeline.benchmark import stage
from pipeline.benchmark.rounds import Rounds, measure, turns_on
from pipeline.benchmark.server import Server
from pipeline.comparison import stats
from pipeline.comparison.planning import RoundCost
from pipeline.gate.decision import Judged, judge, rounds_of_sides, settled
from pipeline.gate.side_by_side import arms_of, steps_of
from pipeline.params import Compare, Gate
from pipeline.results import Arm, Window
from pipeline.results.rejections import rejection

SLOWDOWN_FRACTION = 0.10
"""A step of the slower side takes longer by this fraction."""

PLANTED = f"""

def _slower(step):
    import time

    def stretched(self, micro_batches):
        started = time.perf_counter()
        step(self, micro_batches)
        ended = time.perf_counter()
        while time.perf_counter() < ended + {SLOWDOWN_FRACTION} * (ended - started):
            pass

    return stretched


TrainingStep.__call__ = _slower(TrainingStep.__call__)
"""
"""Code that is appended to ``TRAINING``. On a CPU, a step is complete when it returns, so its wall time grows by
``SLOWDOWN_FRACTION``."""

TRAINING = Path("pipeline", "training", "loop.py")
PART_MINUTES = 15.0

LOSSES = (0.03, 0.05, 0.10, 0.15)
"""Slowdowns that ``simulate`` tries, as fractions of the speed."""

QUANTITIES = ("samples_per_second", "peak_memory_bytes")
REFUSED = rejection("told", text="refused")
CONTROL = (", A/A control", " again")
"""Endings of the A/A control's name; the second occurs in the recorded pool."""


def pool(minutes: float) -> dict[str, Any]:
    """Record rounds of all variants on three sides: a base, an equal head and a slower head.

    On the base side, the baseline is measured twice (A/A control). The rounds are recorded in parts of
    ``PART_MINUTES``. Each part starts new servers, as a real gate does. Returns each arm's speeds and memory peaks, one
    per round; a rejected figure is None. After an interruption, the complete rounds are kept.
    """
    config = params.load(ROOT / params.PARAMS_FILE)
    ended = time.monotonic() + 60 * minutes
    parts: list[Rounds] = []
    with tempfile.TemporaryDirectory() as folder:
        _, packed = fashion_mnist(Path(folder))
        values = config.model_dump(mode="json")
        checkouts = {side: Checkout(Path(folder, side), **values) for side in ("base", "head", "slow")}
        with (checkouts["slow"].path / TRAINING).open("a", encoding="utf-8") as file:
            file.write(PLANTED)
        for checkout in checkouts.values():
            checkout.use(packed)
        while time.monotonic() < ended and not (parts and parts[-1].interrupted):
            seconds = min(60 * PART_MINUTES, ended - time.monotonic())
            with ExitStack() as stack:
                servers = {side: stack.enter_context(Server(copy.path)) for side, copy in checkouts.items()}
                sides = {side: (server, server.describe()) for side, server in servers.items()}
                names = sorted(config.variants, key=lambda name: name != config.compare.baseline)
                arms = arms_of(names, sides)
                steps, _ = steps_of(arms, config.bench.window_seconds)
                turns = turns_on(sides["base"][1]["device"], config.bench)
                parts.append(measure(arms, seconds=seconds, max_rounds=None, steps=steps, turns=turns))
    counts = [len(part.arms[0].samples) for part in parts]
    samples = {arm.name: [sample for part in parts for sample in _of(part, arm.name)] for arm in parts[0].arms}
    refused = sum(bool(sample.rejections) for windows in samples.values() for sample in windows)
    gates_share = 1 - len(config.variants) / len(samples)  # a gate has no third side
    return {
        "environment": environment.fingerprint(),
        "measured_on": time.strftime("%Y-%m-%d"),
        "slowdown_fraction": SLOWDOWN_FRACTION,
        "rounds": counts,
        "steps": [part.steps for part in parts],
        "seconds_per_gate_round": round(sum(part.seconds for part in parts) / sum(counts) * gates_share, 2),
        "refused_fraction": round(refused / (len(samples) * sum(counts)), 4),
        "arms": {
            name: {key: [_rounded(getattr(sample, key)) for sample in windows] for key in QUANTITIES}
            for name, windows in samples.items()
        },
    }


def error_rates(recorded: Mapping[str, Any], rounds: int, losses: Sequence[float] = ()) -> dict[str, Any]:
    """Decide a gate of equal sides, and one with the slower head, on every block of ``rounds`` consecutive rounds.

    A block begins anywhere in a part of the pool and ends in the same part. Blocks overlap, so all trials together have
    no more information than ``independent_blocks`` blocks. ``losses``: for each of these fractions, a further gate of
    every block has an equal head whose speeds are lowered by this fraction.
    """
    arms = {name: _arm(name, values) for name, values in recorded["arms"].items()}
    ends = list(accumulate(recorded["rounds"], initial=0))
    possible = [start for first, end in pairwise(ends) for start in range(first, end - rounds + 1)]
    if not possible:
        raise SystemExit(f"no part of the pool has {rounds} rounds; give fewer --rounds")
    heads = [("equal", "head", 0.0), ("slower", "slow", 0.0), *((f"{loss:.0%}", "head", loss) for loss in losses)]
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind, *_ in heads}
    used: dict[str, list[int]] = {kind: [] for kind in outcomes}
    for start in possible:
        block = {name: _cut(arm, start, start + rounds) for name, arm in arms.items()}
        for kind, side, loss in heads:
            judged, looked = _gated(block, side, loss)
            outcomes[kind][_in_words(judged)] += 1
            used[kind].append(looked)
    return {
        "trials": len(possible),
        "rounds_per_trial": rounds,
        "independent_blocks": sum(count // rounds for count in recorded["rounds"]),
        "slowdown_fraction": recorded["slowdown_fraction"],
        "outcomes": {kind: dict(counted.most_common()) for kind, counted in outcomes.items()},
        "mean_rounds": {kind: round(statistics.fmean(counts), 1) for kind, counts in used.items()},
    }


def gate_of_drawn_rounds(
    within: float, autocorrelation: float, *, rounds: int = 21, trials: int = 1000, losses: Sequence[float] = ()
) -> dict[str, Any]:
    """Return the ``error_rates`` of independent gates of one variant, whose rounds are drawn instead of recorded.

    ``within``: the standard deviation of the logarithm of a round's ratio; each arm contributes half of the variance.
    ``autocorrelation``: the correlation of an arm's round with its next round (AR(1)). The random numbers are seeded.
    """
    random_numbers, arms = np.random.default_rng(0), ("base baseline, A/A control", "base baseline", "head baseline")
    logs = [rounds_of(random_numbers, within / math.sqrt(2), autocorrelation, len(arms), rounds) for _ in range(trials)]
    recorded: dict[str, Any] = {
        "rounds": [rounds] * trials,
        "slowdown_fraction": SLOWDOWN_FRACTION,
        "arms": {
            name: {"samples_per_second": np.exp(drawn).ravel().tolist(), "peak_memory_bytes": [2**26] * drawn.size}
            for name, drawn in zip(arms, np.stack(logs, axis=1), strict=True)
        },
    }
    slower = np.divide(recorded["arms"]["head baseline"]["samples_per_second"], 1 + SLOWDOWN_FRACTION)
    recorded["arms"]["slow baseline"] = {**recorded["arms"]["head baseline"], "samples_per_second": slower.tolist()}
    return error_rates(recorded, rounds, losses)


def rates(pool: Path, numbers: Sequence[int]) -> dict[str, Any]:
    """Return the ``error_rates`` of gates with these numbers of rounds on the recorded ``pool``; for the smallest
    number also without the rule that correlated rounds count for fewer."""
    recorded = json.loads(pool.read_text(encoding="utf-8"))
    with patch.object(stats, "independent", lambda rounds, _: rounds):
        uncorrelated = error_rates(recorded, min(numbers), (0.05,))
    return {
        "pool": pool.name,
        **{key: recorded[key] for key in ("environment", "measured_on")},
        "rates": [error_rates(recorded, rounds, (0.05,)) for rounds in numbers],
        "without_correlation": uncorrelated,
    }


def power(recorded: Mapping[str, Any], rounds: int, picture: Path) -> dict[str, Any]:
    """Return the ``error_rates`` for slowdowns of 3 to 12%, and draw the decisions into the SVG file ``picture``."""
    losses = [percent / 100 for percent in range(3, 13)]
    rates = error_rates(recorded, rounds, losses)
    figure, axes = pyplot.subplots(figsize=(6.4, 3.4), layout="constrained")
    for words, label, color in (
        ("worse", "worse (1)", "#b3261e"),
        ("undecided", "not decided (3)", "#8a8a8a"),
        ("passed", "passed (0)", "#1b7f4b"),
    ):
        shares = [
            sum(count for outcome, count in rates["outcomes"][f"{loss:.0%}"].items() if outcome.startswith(words))
            for loss in losses
        ]
        percents, parts = [100 * loss for loss in losses], [share / rates["trials"] for share in shares]
        axes.plot(percents, parts, marker="o", color=color, label=label)
    axes.set(xlabel="the head is slower by, %", ylabel="share of gates", ylim=(-0.02, 1.02), xticks=range(3, 13))
    axes.legend(frameon=False)
    figure.savefig(picture, metadata={"Date": None})
    return rates


def trial(file: Path, minutes: float) -> None:
    """Run complete gates one after the other until ``minutes`` are over, and add each to ``file`` when it ends.

    The head differs from its base by a comment, or by a slower training step. The next gate uses the kind of head that
    has fewer trials in ``file``. Every gate measures everything anew, so gates at different times and on different
    machines are independent.
    """
    ended, config = time.monotonic() + 60 * minutes, params.load(ROOT / params.PARAMS_FILE)
    with tempfile.TemporaryDirectory() as folder:
        raw, _ = fashion_mnist(Path(folder))
        values = config.model_dump(mode="json")
        values |= {"fetch": {"dataset": "fashion_mnist", "mirror": str(raw)}, "gate": {"accuracy": False}}
        checkout = Checkout(Path(folder, "checkout"), **values)
        checkout.commit()
        training = checkout.path / TRAINING
        plain = training.read_text(encoding="utf-8")
        while time.monotonic() < ended:
            known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
            counts = Counter(trial["head"] for trial in known)
            kind = min(("equal", "slower"), key=lambda kind_of_head: counts[kind_of_head])
            training.write_text(plain + {"equal": "\n# A comment.\n", "slower": PLANTED}[kind], encoding="utf-8")
            session_of = stage.begin_session()
            record = {"head": kind, **_gate(checkout)}
            about = {
                "machine": machines.name_of(environment.fingerprint()),
                "commit": environment.checked_out(),
                **session_of().model_dump(mode="json"),
            }
            files.write_text(file, json.dumps([*known, record | about], indent=1) + "\n")
            print(*bounds([*known, record]), sep="\n", flush=True)


def bounds(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences on the errors in complete gates, with one-sided 95% bounds on the rate (Clopper and Pearson)."""

    def line(kind: str, error: str, wrong: Callable[[str], bool]) -> str:
        outcomes = [trial["outcome"] for trial in trials if trial["head"] == kind]
        errors, count = sum(map(wrong, outcomes)), len(outcomes)
        most = float(betaincinv(errors + 1, count - errors, 0.95)) if errors < count else 1.0
        return f"{kind}: {error} in {errors} of {count} gates; with 95% confidence, the rate is at most {most:.0%}"

    return [
        line("equal", "called worse", lambda outcome: outcome.startswith("worse")),
        line("slower", "passed", lambda outcome: outcome.startswith("passed")),
    ]


def _gate(checkout: Checkout) -> dict[str, Any]:
    """Run one complete gate; return the outcome, the rounds, the seconds, and the throughput of every row in the gate's
    file."""
    command = [sys.executable, "-m", "pipeline", "gate", "--against", "HEAD"]
    done = subprocess.run(command, cwd=checkout.path, capture_output=True, text=True)
    if done.returncode not in (0, 1, 3):
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        done.check_returncode()
    values = json.loads((checkout.path / "reports" / "gate.json").read_text(encoding="utf-8"))
    rows = [*values["variants"], *([values["together"]] if values["together"] else [])]
    return {
        "outcome": _in_words(Judged.model_validate({key: values[key] for key in Judged.model_fields})),
        "rounds": len(values["head"]["arms"][0]["samples"]),
        "seconds": round(values["seconds"]),
        "throughput": {
            row["variant"]: [_rounded(row["throughput"][key]) for key in ("estimate", "low", "high")] for row in rows
        },
    }


def _gated(block: Mapping[str, Arm], side: str, loss: float) -> tuple[Judged, int]:
    """Return a gate's decision on ``side``, whose speeds are lowered by the fraction ``loss``, and the number of
    rounds after which it decided."""
    slowed = {name: _slowed(arm, loss) if name.startswith(f"{side} ") else arm for name, arm in block.items()}
    rounds = len(next(iter(slowed.values())).samples)
    for looked in range(FEWEST_PAIRS, rounds):
        seen = {name: _cut(arm, 0, looked) for name, arm in slowed.items()}
        if settled(_judge(seen, side, look=True)):
            return _judge(seen, side), looked
    return _judge(slowed, side), rounds


def _slowed(arm: Arm, loss: float) -> Arm:
    speeds = [sample.samples_per_second for sample in arm.samples]
    samples = [
        sample.model_copy(update={"samples_per_second": speed and speed * (1 - loss)})
        for sample, speed in zip(arm.samples, speeds, strict=True)
    ]
    return arm.model_copy(update={"samples": tuple(samples)})


def _judge(block: Mapping[str, Arm], side: str, *, look: bool = False) -> Judged:
    """Return the gate's decision on ``side`` against the base."""
    control = next(arm for arm in block.values() if arm.role == "aa_control")
    of_base, of_head = (
        [arm for name, arm in block.items() if name.startswith(f"{side_name} ")] for side_name in ("base", side)
    )
    settings, cost = Compare(baseline=control.variant), RoundCost("gate.max_minutes", len(control.samples), 1.0)
    return judge(rounds_of_sides(of_base, of_head, settings, cost), {}, settings, Gate().must_see, look=look)


def _in_words(judged: Judged) -> str:
    """Return the outcome in words, with the quantities that are worse, or a note if a pass leaves a ratio undecided
    or untrusted."""
    rows = [*judged.variants, *([judged.together] if judged.together else [])]
    ratios = [(name, difference.decision) for row in rows for name, difference in row.known.items()]
    if judged.outcome == "worse":
        return f"worse: {', '.join(dict.fromkeys(name for name, decision in ratios if decision == 'worse'))}"
    left_open = any(decision in ("undecided", "untrusted") for _, decision in ratios)
    return "passed, in part undecided" if judged.outcome == "passed" and left_open else judged.outcome


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _arm(name: str, values: Mapping[str, Sequence[float | None]]) -> Arm:
    """Return an arm of the pool as an ``Arm`` that has only the fields that the gate's decision reads."""
    samples = []
    for speed, peak in zip(*(values[key] for key in QUANTITIES), strict=True):
        figures: dict[str, Any] = {"samples_per_second": speed, "peak_memory_bytes": peak, "peak_reserved_bytes": None}
        figures["peak_memory_rank_bytes"] = (peak,)
        samples.append(Window.model_construct(**figures, rejections=(REFUSED,) if speed is None else ()))
    known: dict[str, Any] = {"name": name, "variant": name.split()[1].rstrip(","), "technique": None, "world_size": 1}
    known["role"] = "aa_control" if name.endswith(CONTROL) else "variant"
    return Arm.model_construct(**known, samples=tuple(samples))


def _of(part: Rounds, name: str) -> tuple[Window, ...]:
    return next(arm.samples for arm in part.arms if arm.name == name)


def _cut(arm: Arm, start: int, end: int) -> Arm:
    return arm.model_copy(update={"samples": arm.samples[start:end]})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("pool", help="record rounds into FILE")
    recording.add_argument("file", type=Path)
    recording.add_argument("--minutes", type=float, default=180.0)
    rating = commands.add_parser("rates", help="write the error rates of trials from the pool in FILE beside it")
    rating.add_argument("file", type=Path)
    rating.add_argument("--rounds", type=int, nargs="+", default=[21, 19, 17, 13], help="numbers of rounds of a gate")
    drawing = commands.add_parser("power", help="draw decisions on slowdowns of 3 to 12%%, from the pool in FILE")
    drawing.add_argument("file", type=Path)
    drawing.add_argument("picture", type=Path)
    drawing.add_argument("--rounds", type=int, default=21, help="the number of rounds of a gate")
    simulating = commands.add_parser("simulate", help="write error rates for drawn rounds into simulations.json")
    simulating.add_argument("--trials", type=int, default=200)
    whole = commands.add_parser("trial", help="run complete gates until --minutes are over, at least one gate")
    whole.add_argument("--file", type=Path, default=machines.FIGURES / "gate-trials.json")
    whole.add_argument("--minutes", type=float, default=40.0, help="start no gate after this time")
    arguments = parser.parse_args()
    if arguments.command == "pool":
        files.write_text(arguments.file, json.dumps(pool(arguments.minutes)).replace('], "', '],\n"') + "\n")
        return
    if arguments.command == "trial":
        trial(arguments.file, arguments.minutes)
        return
    if arguments.command == "simulate":
        content = {
            f"noise {within:g}, autocorrelation {autocorrelation}": gate_of_drawn_rounds(
                within, autocorrelation, trials=arguments.trials, losses=LOSSES
            )
            for within in (0.02, 0.04, 0.08)
            for autocorrelation in AUTOCORRELATIONS
        }
        figures = json.loads(SIMULATIONS_FILE.read_text(encoding="utf-8"))
        files.write_text(SIMULATIONS_FILE, json.dumps({**figures, "gate": content}, indent=1) + "\n")
    elif arguments.command == "rates":
        content = rates(arguments.file, arguments.rounds)
        name = arguments.file.name.replace("gate-pool", "gate-rates")
        files.write_text(arguments.file.with_name(name), json.dumps(content, indent=1) + "\n")
    else:
        recorded = json.loads(arguments.file.read_text(encoding="utf-8"))
        content = power(recorded, arguments.rounds, arguments.picture)
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
