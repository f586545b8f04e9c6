"""Measure arms side by side in rounds. In each round, all arms that are not yet settled run in fresh processes.

Three kinds of processes take part. The process of the bench, which runs this module, sends requests. One server per
checkout (``server.Server``, which runs ``arm.serve``) answers them. It lets a fork server
(``distributed.launching.forked``) fork the ranks of each arm. The ranks (``arm._rank_of_arm``) train and measure.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from pipeline.benchmark.server import ArmSpec, BenchError
from pipeline.benchmark.settling import unsettled
from pipeline.errors import count, say
from pipeline.params import Bench as BenchSettings
from pipeline.results import Arm, RunConditions, Window

TOLD_SECONDS = 30
"""Shortest time between progress lines, which replace the progress bar if the output is not a terminal."""
FEWEST_ROUNDS = 6
"""Fewest rounds that give a ratio an interval. Equal to ``stats.FEWEST_PAIRS``, but not imported: otherwise DVC would
repeat the bench when ``stats`` changes."""
_BAR = "{desc}: {percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt} s{postfix}"


@dataclass(frozen=True)
class Rounds:
    """The arms with their samples, and how the rounds were measured."""

    arms: tuple[Arm, ...]
    steps: int
    """Steps of each sample."""
    turns: int
    """Number of turns in which an arm takes the steps of a sample."""
    seconds: float
    interrupted: bool


def measure(
    arms: Sequence[ArmSpec],
    *,
    seconds: float,
    max_rounds: int | None,
    steps: int,
    turns: int,
    fewest: int = 0,
    leaves_open: Callable[[Rounds], bool] = lambda _: False,
    decided: Callable[[Rounds], bool] = lambda _: False,
    keep: Callable[[Rounds], object] = lambda _: None,
    margins: Mapping[str, float] | None = None,
    max_spread: float = math.inf,
    earlier: Sequence[Arm] = (),
) -> Rounds:
    """Measure at least one round of all arms, and further rounds if they are expected to end within ``seconds``.

    Rounds go on beyond ``seconds`` until ``fewest`` rounds have no rejected sample, or there are 2 * ``fewest`` rounds
    in all. For this rule, an arm whose samples were rejected in every round does not count. When no further round fits
    into the time, ``leaves_open`` is called once with the rounds; if it returns True, the time is doubled. From round
    ``FEWEST_ROUNDS`` on, ``decided`` is called after each round. The measurement ends when ``decided`` returns True, or
    after ``max_rounds`` rounds. ``keep`` is called after each round.

    ``margins``: field of ``Window`` -> margin. With margins, a variant whose ratios are all settled (``unsettled``)
    takes no part in later rounds, and the measurement ends when only the baseline is left. No variant is settled while
    the A/A control differs from the baseline, or their ratios spread by more than ``max_spread`` (``settling.equal``).

    ``earlier``: the same arms with the samples of earlier rounds, which this measurement continues. Earlier rounds
    count for ``fewest``, ``max_rounds`` and the margins, and are returned too; ``seconds`` limits only the new rounds.

    With one turn, the arms of a round run one after the other, each alone. With more turns, all arms are started first.
    Each arm then takes its ``steps`` in ``turns`` short turns while the other arms wait, so that a disturbance of some
    seconds hits all arms. ``order_of`` determines the order of the arms.

    A KeyboardInterrupt ends the measurement and keeps the complete rounds; without a complete round, it is raised
    again.
    """
    turns = min(turns, steps)  # every turn has at least one step
    conditions = {arm.name: arm.conditions for arm in earlier}
    rounds: list[dict[str, Window]] = [
        {arm.name: arm.samples[number] for arm in earlier if number < len(arm.samples)}
        for number in range(max((len(arm.samples) for arm in earlier), default=0))
    ]
    done = {arm.name for arm in earlier if arm.settled}
    started, longest, interrupted, limit, extended = time.monotonic(), 0.0, False, seconds, False
    running = [spec for spec in arms if spec.name not in done]
    told, overdue = started, False

    def so_far() -> Rounds:
        return Rounds(
            arms=tuple(
                Arm(
                    name=spec.name,
                    role=spec.role,
                    variant=spec.variant,
                    technique=spec.technique,
                    samples=tuple(complete[spec.name] for complete in rounds if spec.name in complete),
                    settled=spec not in running,
                    **dict(conditions[spec.name]),
                )
                for spec in arms
            ),
            steps=steps,
            turns=turns,
            seconds=time.monotonic() - started,
            interrupted=interrupted,
        )

    with tqdm(total=round(seconds), unit="s", desc="bench", disable=None, bar_format=_BAR) as bar:

        def show(doing: str) -> None:
            bar.total = round(max(limit, began - started + missing * longest))
            bar.n = min(bar.total, round(time.monotonic() - started))
            bar.set_postfix_str(f"round {len(rounds) + 1}, {doing}")

        try:
            while len(rounds) != max_rounds:
                began, missing = time.monotonic(), _missing(rounds, fewest)
                if rounds and began - started + longest > limit and not missing:
                    if extended or not leaves_open(so_far()):
                        break
                    limit, extended = 2 * seconds, True
                if rounds and missing and not overdue and began - started > limit:
                    overdue = True
                    over = f"{limit / 60:g} minutes are over after {count(len(rounds), 'round')}"
                    least = f"{fewest} rounds without a rejected sample, or {2 * fewest} in all"
                    why = "bench.hard_limit: true would prevent this"
                    bar.write(f"bench: {over}; the bench goes on until it has {least}; {why}", sys.stdout)
                order = order_of(running, len(rounds))
                answers: dict[str, dict[str, Any]] = {}
                for group in [order] if turns > 1 else [[spec] for spec in order]:
                    answers |= _in_turns(group, steps, turns, show)
                rounds.append({name: _accepted(name, each, steps, conditions) for name, each in answers.items()})
                keep(so_far())
                if len(rounds) == 1 and all(reasons := [window.rejections for window in rounds[0].values()]):
                    why = f"every sample of round 1 was rejected; the first reason: {reasons[0][0]}"
                    bar.write(f"bench: {why}. If this continues, no ratio is trusted", sys.stdout)
                now = time.monotonic()
                if bar.disable and now - told >= TOLD_SECONDS:
                    told = now
                    say(f"bench: {count(len(rounds), 'round')} after {now - started:.0f} s")
                longest = max(longest, now - began)
                if len(rounds) >= FEWEST_ROUNDS and decided(so_far()):
                    break
                if margins and len(still := unsettled(running, rounds, margins, max_spread)) < len(running):
                    longest *= len(still) / len(running)
                    running = still
                    if len({spec.variant for spec in running}) == 1:  # only the baseline's arms are left
                        break
        except KeyboardInterrupt:
            if not rounds:
                raise
            interrupted = True
    return so_far()


def order_of(arms: Sequence[ArmSpec], number: int) -> list[ArmSpec]:
    """Return the order of the arms in round ``number``, counted from 0.

    Even rounds draw a new order, so that no arm has a fixed place or fixed neighbours. Odd rounds reverse the order of
    the round before, so that drift affects all arms equally.
    """
    drawn = random.Random(number // 2).sample(arms, len(arms))
    return drawn[:: 1 if number % 2 == 0 else -1]


def _accepted(name: str, answer: Mapping[str, Any], steps: int, conditions: dict[str, RunConditions]) -> Window:
    """Return the window in an arm's answer. Raises BenchError if the arm's ``conditions`` differ from those of earlier
    rounds, or if the arm measured too few steps and reports no reason."""
    found = RunConditions(**{key: answer[key] for key in RunConditions.model_fields})
    if conditions.setdefault(name, found) != found:
        raise BenchError(
            f"{name} ran differently from round to round: {conditions[name]}, then {found}. "
            "If the placement differs, set train.placement; otherwise, do not edit the job's code during the bench."
        )
    window = Window.model_validate(answer["window"])
    if window.measured_steps < steps and not window.rejections:
        raise BenchError(f"{name} measured {window.measured_steps} of {steps} steps, but reports no reason.")
    return window


def _missing(rounds: Sequence[dict[str, Window]], fewest: int) -> int:
    """Return how many rounds must still be measured, assuming that no sample in these rounds will be rejected.

    ``fewest`` rounds without a rejected sample are needed, but no more than twice as many rounds in all. Arms that were
    rejected in every round do not count.
    """
    rejected = [{name for name, window in each.items() if window.rejections} for each in rounds]
    always = set.intersection(*rejected) if rejected else set()
    return max(0, min(fewest - sum(each <= always for each in rejected), 2 * fewest - len(rounds)))


def _in_turns(
    arms: Sequence[ArmSpec], steps: int, turns: int, show: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    for spec in arms:
        show(f"starting {spec.name}")
        spec.server.open(spec.name, spec.plan, steps)
    for turn in range(turns):
        show(f"turn {turn + 1} of {turns}")
        share = steps * (turn + 1) // turns - steps * turn // turns
        first = turn % len(arms)  # so that each arm is first about as often as it is last
        for spec in [*arms[first:], *arms[:first]]:
            spec.server.turn(spec.name, share)
    return {spec.name: spec.server.close(spec.name) for spec in arms}


def fewest_rounds(settings: BenchSettings) -> int:
    """Return the number of rounds that are measured even if they take longer than allowed."""
    return 0 if settings.hard_limit else FEWEST_ROUNDS


def turns_on(device: str, settings: BenchSettings) -> int:
    """Return the number of turns per sample. It is 1 on a GPU, because a waiting arm would occupy the GPU's memory."""
    return settings.turns if device == "cpu" else 1


def outlook(
    arms: int, steps: int, round_seconds: float, *, seconds: float, max_rounds: int | None, fewest: int, before: int = 0
) -> str:
    """Return a sentence on what ``measure`` will do, and when it will end.

    ``seconds``, ``max_rounds``, ``fewest``: as in ``measure``. ``round_seconds``: estimated time of a round.
    ``before``: the number of rounds that exist already.
    """
    rounds = max(1, int(seconds / round_seconds), fewest - before)
    if max_rounds is not None:
        rounds = min(rounds, max_rounds - before)
    ends = time.strftime("%H:%M %Z", time.localtime(time.time() + rounds * round_seconds))
    remark = f" (a decision would need at least {FEWEST_ROUNDS})" if before + rounds < FEWEST_ROUNDS else ""
    cost = f"{arms} arms of {steps} steps; a round takes about {round_seconds:.0f} s"
    return f"{cost}: the bench runs {count(rounds, 'round')}{remark}, until about {ends}"
