"""Measure arms side by side in rounds. In each round, all arms that are not yet settled run in fresh processes.

Three kinds of processes take part. The process of the bench, which runs this module, sends requests. One server per
checkout (``server.Server``, which runs ``arm.serve``) answers them. It lets a fork server
(``distributed.launching.forked``) fork the ranks of each arm. The ranks (``arm._rank_of_arm``) train and measure.

Before the rounds, short samples show how many steps fill a window, and how long a round takes (``steps_of``). Later
rounds leave out settled variants, so the others get more rounds (``comparison.looks.settled``). On a CPU, they also
leave out the steps that measure memory, once memory is known (``comparison.looks.memory_known``).
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tqdm import tqdm

from pipeline.benchmark.server import ArmSpec, BenchError
from pipeline.errors import count, say
from pipeline.params import Bench as BenchSettings
from pipeline.results import Arm, RunConditions, Window
from pipeline.results.bench_file import FEWEST_PAIRS
from pipeline.results.figures import MEMORY

TOLD_SECONDS = 30
"""Shortest time between progress lines, which replace the progress bar if the output is not a terminal."""
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


def raised(_: str, error: BenchError) -> None:
    raise error


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
    settled: Callable[[Rounds], Collection[str]] = lambda _: (),
    memory_known: Callable[[Rounds], bool] = lambda _: False,
    earlier: Sequence[Arm] = (),
    first_look: int = FEWEST_PAIRS,
    failed: Callable[[str, BenchError], object] = raised,
) -> Rounds:
    """Measure at least one round of all arms, and further rounds if they are expected to end within ``seconds``.

    Rounds go on beyond ``seconds`` until ``fewest`` rounds have no rejected sample, or there are 2 * ``fewest`` rounds
    in all. For this rule, an arm whose samples were rejected in every round does not count. When no further round fits
    into the time, ``leaves_open`` is called once with the rounds; if it returns True, the time is doubled. From round
    ``FEWEST_PAIRS`` on, ``decided`` is called after each round. The measurement ends when ``decided`` returns True, or
    after ``max_rounds`` rounds. ``keep`` is called after each round.

    ``settled``: returns the variants that are settled; it is called after each round from ``first_look`` on.
    Their arms take no part in later rounds, and the measurement ends when only the baseline is left.

    ``memory_known``: called after each round until it returns True; later rounds then measure no memory, if every
    server can leave it out.

    ``earlier``: the same arms with the samples of earlier rounds, which this measurement continues. Earlier rounds
    count for ``fewest`` and ``max_rounds``, and are returned too; ``seconds`` limits only the new rounds.

    ``failed``: called with the name of an arm that fails, and why. Unless it raises, as ``raised`` does, the arm takes
    no part from then on, and arms that were started with it are started again.

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
    reported, overdue = started, False
    measures_memory = True

    def so_far() -> Rounds:
        return Rounds(
            arms=tuple(
                spec.measured(
                    [complete[spec.name] for complete in rounds if spec.name in complete],
                    conditions[spec.name],
                    settled=spec not in running,
                )
                for spec in arms
                if spec.name in conditions  # it has measured something
            ),
            steps=steps,
            turns=turns,
            seconds=time.monotonic() - started,
            interrupted=interrupted,
        )

    def leave_out(error: BenchError) -> None:
        failed(error.arm or "", error)
        running[:] = [spec for spec in running if spec.name != error.arm]

    with tqdm(total=round(seconds), unit="s", desc="bench", disable=None, bar_format=_BAR) as bar:

        def show(doing: str) -> None:
            bar.total = round(max(limit, began - started + missing * longest))
            bar.n = min(bar.total, round(time.monotonic() - started))
            bar.set_postfix_str(f"round {len(rounds) + 1}, {doing}")

        try:
            while len(rounds) != max_rounds:
                began, missing = time.monotonic(), _missing(rounds, fewest)
                may_know_memory = measures_memory and len(rounds) >= MEMORY.fewest_pairs
                measures_memory &= not (may_know_memory and memory_known(so_far()) and _can_leave_out_memory(arms))
                if rounds and began - started + longest > limit and not missing:
                    if extended or not leaves_open(so_far()):
                        break
                    limit, extended = 2 * seconds, True
                if rounds and missing and not overdue and began - started > limit:
                    overdue = True
                    over = f"{limit / 60:g} minutes are over after {count(len(rounds), 'round')}"
                    least = f"{fewest} rounds without a rejected sample, or {2 * fewest} in all"
                    why = "bench.hard_limit: true would prevent this"
                    more = f"at least {missing * longest / 60:.1f} minutes more"
                    bar.write(f"bench: {over}; the bench goes on until it has {least}: {more}; {why}", sys.stdout)
                order = order_of(running, len(rounds))
                options = {} if measures_memory else {"memory": False}
                answers = _round(order, steps, turns, show, options, leave_out)
                rounds.append(_all_accepted(answers, steps, conditions, leave_out))
                keep(so_far())
                if len(rounds) == 1 and all(reasons := [window.rejections for window in rounds[0].values()]):
                    why = f"every sample of round 1 was rejected; the first reason: {reasons[0][0].text}"
                    bar.write(f"bench: {why}. If this continues, no ratio is trusted", sys.stdout)
                now = time.monotonic()
                if bar.disable and now - reported >= TOLD_SECONDS:
                    reported = now
                    say(f"bench: {count(len(rounds), 'round')} after {now - started:.0f} s")
                longest = max(longest, now - began)
                if len(rounds) >= FEWEST_PAIRS and decided(so_far()):
                    break
                if len(rounds) >= first_look and (closed := settled(so_far())):
                    still = [spec for spec in running if spec.variant not in closed]
                    longest *= len(still) / len(running)
                    running = still
                    if len({spec.variant for spec in running}) == 1:  # only the baseline's arms are left
                        break
        except KeyboardInterrupt:
            if not rounds:
                raise
            interrupted = True
    return so_far()


def _can_leave_out_memory(arms: Sequence[ArmSpec]) -> bool:
    return all("open_for_speed" in spec.server.requests for spec in arms)


def order_of(arms: Sequence[ArmSpec], number: int) -> list[ArmSpec]:
    """Return the order of the arms in round ``number``, counted from 0.

    Even rounds draw a new order, so that no arm has a fixed place or fixed neighbours. Odd rounds reverse the order of
    the round before, so that drift affects all arms equally.
    """
    drawn = random.Random(number // 2).sample(arms, len(arms))
    return drawn[:: 1 if number % 2 == 0 else -1]


def conditions_of(answer: Mapping[str, Any]) -> RunConditions:
    """Return the conditions in an arm's answer."""
    return RunConditions(**{key: answer[key] for key in RunConditions.model_fields if key in answer})


def _round(
    order: Sequence[ArmSpec],
    steps: int,
    turns: int,
    show: Callable[[str], None],
    options: Mapping[str, bool],
    leave_out: Callable[[BenchError], None],
) -> dict[str, dict[str, Any]]:
    """Return the answers of the arms that do not fail. ``leave_out`` gets the error of an arm that fails."""
    answers: dict[str, dict[str, Any]] = {}
    for group in [order] if turns > 1 else [[spec] for spec in order]:
        together = [*group]
        while together:
            try:
                answers |= _in_turns(together, steps, turns, show, options)
                break
            except BenchError as error:
                leave_out(error)
                together = [spec for spec in together if spec.name != error.arm]
    return answers


def _all_accepted(
    answers: Mapping[str, dict[str, Any]],
    steps: int,
    conditions: dict[str, RunConditions],
    leave_out: Callable[[BenchError], None],
) -> dict[str, Window]:
    windows = {}
    for name, answer in answers.items():
        try:
            windows[name] = _accepted(name, answer, steps, conditions)
        except BenchError as error:
            leave_out(error)
    return windows


def _accepted(name: str, answer: Mapping[str, Any], steps: int, conditions: dict[str, RunConditions]) -> Window:
    """Return the window in an arm's answer. Raises BenchError if the arm's ``conditions`` differ from those of earlier
    rounds, or if the arm measured too few steps and reports no reason."""
    now_run = conditions_of(answer)
    if conditions.setdefault(name, now_run) != now_run:
        raise BenchError(
            f"{name} ran differently from round to round: {conditions[name]}, then {now_run}. "
            "If the placement differs, set train.placement; otherwise, do not edit the job's code during the bench.",
            name,
        )
    window = Window.model_validate(answer["window"])
    if window.measured_steps < steps and not window.rejections:
        raise BenchError(f"{name} measured {window.measured_steps} of {steps} steps, but reports no reason.", name)
    return window


def _missing(rounds: Sequence[dict[str, Window]], fewest: int) -> int:
    """Return how many rounds must still be measured, assuming that no sample in these rounds will be rejected.

    ``fewest`` rounds without a rejected sample are needed, but no more than twice as many rounds in all. Arms that were
    rejected in every round do not count.
    """
    rejected = [{name for name, window in windows.items() if window.rejections} for windows in rounds]
    always = set.intersection(*rejected) if rejected else set()
    return max(0, min(fewest - sum(names <= always for names in rejected), 2 * fewest - len(rounds)))


def _in_turns(
    arms: Sequence[ArmSpec], steps: int, turns: int, show: Callable[[str], None], options: Mapping[str, bool]
) -> dict[str, dict[str, Any]]:
    for spec in arms:
        show(f"starting {spec.name}")
        spec.server.open(spec.name, spec.plan, steps, **options)
    for turn in range(turns):
        show(f"turn {turn + 1} of {turns}")
        share = steps * (turn + 1) // turns - steps * turn // turns
        first = turn % len(arms)  # so that each arm is first about as often as it is last
        for spec in [*arms[first:], *arms[:first]]:
            spec.server.turn(spec.name, share)
    return {spec.name: spec.server.close(spec.name) for spec in arms}


def fewest_rounds(settings: BenchSettings) -> int:
    """Return the number of rounds that are measured even if they take longer than allowed."""
    return 0 if settings.hard_limit else FEWEST_PAIRS


def turns_on(device: str, settings: BenchSettings) -> int:
    """Return the number of turns per sample. It is 1 on a GPU, because a waiting arm would occupy the GPU's memory."""
    return settings.turns if device == "cpu" else 1


def outlook(
    arms: int, steps: int, round_seconds: float, *, seconds: float, max_rounds: int | None, fewest: int, before: int = 0
) -> str:
    """Return a sentence on what ``measure`` will do, and when it will end: ``expected`` says for which arguments."""
    rounds, most = expected(round_seconds, seconds=seconds, max_rounds=max_rounds, fewest=fewest, before=before)
    ends, latest = (
        time.strftime("%H:%M %Z", time.localtime(time.time() + number * round_seconds)) for number in (rounds, most)
    )
    remark = f" (a decision would need at least {FEWEST_PAIRS})" if before + rounds < FEWEST_PAIRS else ""
    cost = f"{arms} arms of {steps} steps; a round takes about {round_seconds:.0f} s"
    more = f"; up to {most}, until about {latest}, if samples are rejected" if most > rounds else ""
    return f"{cost}: the bench runs {count(rounds, 'round')}{remark}, until about {ends}{more}"


def expected(
    round_seconds: float, *, seconds: float, max_rounds: int | None, fewest: int, before: int = 0
) -> tuple[int, int]:
    """Return how many rounds ``measure`` will run if no sample is rejected and nothing is settled, and at most.

    ``seconds``, ``max_rounds``, ``fewest``: as in ``measure``. ``round_seconds``: estimated time of a round.
    ``before``: the number of rounds that exist already.
    """
    rounds = max(1, int(seconds / round_seconds), fewest - before)
    left = rounds + 2 * fewest if max_rounds is None else max_rounds - before
    return min(rounds, left), min(max(rounds, 2 * fewest - before), left)


CALIBRATION_STEPS = 10
CALIBRATIONS = 5
"""Largest number of short samples that ``steps_of`` takes. Other load on the machine can spoil a sample."""
FEWEST_STEPS = 5
"""Fewest steps of a window. Also the steps of a short sample that does not decide a window's length."""
OPENING_SECONDS = 1.7
"""For arms with this start-up time, windows of 1.5 s turned out to be the best (docs/how-we-know/measuring.md)."""


class Calibration(NamedTuple):
    """A short sample of an arm, taken before the rounds."""

    answer: dict[str, Any]
    """The answer of ``Server.close``."""
    opening_seconds: float
    """Time from the start of the arm's processes to the first measured step."""
    step_seconds: float

    def seconds(self, steps: int) -> float:
        """Estimate how long the arm takes in a round of ``steps`` steps."""
        return self.opening_seconds + steps * self.step_seconds


def calibrate(arm: ArmSpec, steps: int = FEWEST_STEPS, *, ledgers: bool = False) -> Calibration:
    """Measure ``steps`` steps of ``arm``. The returned times do not include the time for ledgers."""
    began = time.monotonic()
    arm.server.open(arm.name, arm.plan, steps, ledgers=ledgers)
    opened = time.monotonic()
    arm.server.turn(arm.name, steps)
    ended = time.monotonic()
    # The turn includes an extra step that counts samples.
    return Calibration(arm.server.close(arm.name), opened - began, (ended - opened) / (steps + 1))


def steps_of(
    arm: ArmSpec, seconds: float, others: Sequence[Calibration] = (), *, ledgers: bool = False
) -> tuple[int, Calibration]:
    """Take short samples of ``arm`` until one is not rejected; return the steps of a window, and the last sample.

    A window takes about ``seconds``, but has at least ``FEWEST_STEPS``. If the mean start-up of ``arm`` and ``others``
    takes r times ``OPENING_SECONDS``, with r > 1, a window takes sqrt(r) times as long. This yields the most
    information per minute (Kalibera and Jones, ISMM 2013). If all ``CALIBRATIONS`` samples are rejected, a window has
    ``CALIBRATION_STEPS``.
    """
    for _ in range(CALIBRATIONS):
        sample = calibrate(arm, CALIBRATION_STEPS, ledgers=ledgers)
        window = Window.model_validate(sample.answer["window"])
        if window.step_p50_ms:
            openings = [calibration.opening_seconds for calibration in (sample, *others)]
            return window_steps(seconds, window.step_p50_ms / 1e3, openings), sample
    return CALIBRATION_STEPS, sample


def check_samples(what: str, answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise BenchError unless both sides credit a step of ``what`` with equally many samples, or with an unknown
    number, and saw no other numbers. If both say that batches differ on purpose, both numbers must be known instead.

    ``answers``: of ``Server.close``, by side. An arm whose batch is a setting of ``train`` reports no such number: the
    comparison of the settings names its change.
    """
    first, second = answers.values()
    if "samples_per_step" not in first.keys() | second.keys():
        return
    credited, seen = ((first[key], second[key]) for key in ("samples_per_step", "samples_seen"))
    differ = first["batch_differs"] and second["batch_differs"]
    equal = credited[0] == credited[1]
    if None not in credited if differ else equal and (None in seen or seen[0] == seen[1]):
        return
    counts = seen if equal and not differ else credited
    of_base, of_other = (
        f"a step of {side} has {'an unknown number of' if known is None else f'{known:,}'} samples"
        for side, known in zip(answers, counts, strict=True)
    )
    remedy = "set script.samples_per_step"
    if None not in counts:
        remedy = "give both the same batch. If they differ on purpose, both need script.batch_differs: true"
    elif differ:
        remedy = "with script.batch_differs: true, the samples of both must be seen; take it out"
    raise BenchError(
        f"{what}: {of_base}, and {of_other}, so their speeds cannot be compared: {remedy}, for the gate in a commit of "
        "its own, with which you compare."
    )


def window_steps(seconds: float, step_seconds: float, openings: Sequence[float]) -> int:
    """Return the steps of a window by the rule of ``steps_of``, if a step of the baseline takes ``step_seconds`` and
    the arms' starts take ``openings``, in seconds."""
    seconds *= max(1.0, math.sqrt(statistics.fmean(openings) / OPENING_SECONDS))
    return max(FEWEST_STEPS, round(seconds / step_seconds))
