"""Steady-state speed and memory of all variants, side by side: fresh processes, interleaved rounds, an A/A arm.

Three kinds of processes: this one asks; a server for each checkout (``server``, ``arm.serve``) answers; the ranks of an
arm, which the server forks (``arm._measure_in_turns``), train and measure.
"""

from __future__ import annotations

import math
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tqdm import tqdm

from pipeline import environment, files
from pipeline.benchmark import sitting
from pipeline.benchmark.server import BenchError, Server
from pipeline.environment import stages
from pipeline.params import Bench as BenchSettings
from pipeline.params import Config, Machine, misplaced
from pipeline.params import techniques as techniques_of
from pipeline.plans import plan, plans
from pipeline.results import (
    BENCH_FILE,
    KEPT_BENCHES,
    SESSIONS,
    Arm,
    Bench,
    Dataset,
    Flops,
    Ledgers,
    R,
    Setup,
    Window,
    read_sessions,
    rejections,
)

CALIBRATION_STEPS = 10
CALIBRATIONS = 5
"""As often is the short sample taken that says how many steps to measure, while other load spoils it."""
FEWEST_STEPS = 5
OPENING_SECONDS = 1.7
"""So long took those arms to start of which windows of 1.5 s were found to be the best (docs/measuring.md)."""
FEWEST_ROUNDS = 6
"""``stats.FEWEST_PAIRS``, which the bench does not import: it need not be measured anew when statistics change."""
SETTLED_ROUNDS = 10
"""So many rounds in a row on one side of a margin settle a ratio. With its median on the margin that has a chance of
2 in 2^10 a look, however rounds scatter; ``benchmarks.simulations`` shows what all looks together cost."""
NEGLIGIBLE = 0.001
"""``stats.NEGLIGIBLE``, likewise: up to here a bias of equal arms' speeds disturbs nothing. Their peaks may differ by
the margin, for heaps do."""


@dataclass(frozen=True)
class ArmSpec:
    """One arm to measure: a variant's values, on the server that measures them."""

    name: str
    role: Literal["variant", "aa_control", "with", "without"]
    variant: str
    technique: str | None
    server: Server
    values: dict[str, Any]


@dataclass(frozen=True)
class Rounds:
    """What interleaved rounds gave."""

    arms: tuple[Arm, ...]
    steps: int
    """Of each sample."""
    turns: int
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
    margins: Mapping[str, float] | None = None,
    max_spread: float = math.inf,
) -> Rounds:
    """Rounds of all arms, each arm in a fresh process, for at most ``seconds``, but at least one.

    And at least ``fewest`` in which no sample was rejected, whatever ``seconds`` says; an arm whose samples always are
    does not count, and twice as many rounds are enough. Once, when the time is over, the rounds are shown to
    ``leaves_open``: if they do, it goes on for as long again. After ``max_rounds`` all ends, and sooner where
    ``decided``, which is asked after each round from ``FEWEST_ROUNDS`` on, says so.

    ``margins``: of fields of ``Window``. With them a variant whose ratios are all settled (``unsettled``) takes no part
    in later rounds, so that its samples are of the first ones alone, and all ends with the last variant. None is where
    the control itself strays, or its ratios lie further apart than ``max_spread`` (``equal``).

    With one turn, the arms of a round run one after the other, each alone. With more, all are started, and then take
    their ``steps`` in ``turns`` short turns while the others wait, so that what the machine does for some seconds hits
    all of them (in which order: ``order_of``). An interruption (KeyboardInterrupt) keeps the rounds that are complete;
    it is raised again if there is none.
    """
    turns = min(turns, steps)  # no turn without a step
    facts: dict[str, dict[str, Any]] = {}
    rounds: list[dict[str, Window]] = []
    started, longest, interrupted, limit, extended = time.monotonic(), 0.0, False, seconds, False
    running = list(arms)

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
                    **facts[spec.name],
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
            bar.total = round(max(limit, fewest * longest))
            bar.n = min(bar.total, round(time.monotonic() - started))
            bar.set_postfix_str(f"round {len(rounds) + 1}, {doing}")

        try:
            while len(rounds) != max_rounds:
                began = time.monotonic()
                if rounds and began - started + longest > limit and _enough(rounds, fewest):
                    if extended or not leaves_open(so_far()):
                        break
                    limit, extended = 2 * seconds, True
                order = order_of(running, len(rounds))
                answers = _one_by_one(order, steps, show) if turns == 1 else _in_turns(order, steps, turns, show)
                for name, answer in answers.items():
                    found = {key: answer[key] for key in Setup.model_fields}
                    if facts.setdefault(name, found) != found:
                        raise BenchError(
                            f"{name} ran differently from round to round: {facts[name]}, then {found}. "
                            "If the placement differs, set train.placement; else leave its code as it is."
                        )
                windows = {name: Window.model_validate(answer["window"]) for name, answer in answers.items()}
                for name, window in windows.items():
                    if window.measured_steps < steps and not window.refusals:
                        raise BenchError(f"{name} measured {window.measured_steps} of {steps} steps and says not why.")
                rounds.append(windows)
                longest = max(longest, time.monotonic() - began)
                if len(rounds) >= FEWEST_ROUNDS and decided(so_far()):
                    break
                if margins and len(still := unsettled(running, rounds, margins, max_spread)) < len(running):
                    longest *= len(still) / len(running)
                    running = still
                    if len({spec.variant for spec in running}) == 1:  # the baseline's
                        break
        except KeyboardInterrupt:
            if not rounds:
                raise
            interrupted = True
    return so_far()


def order_of(arms: Sequence[ArmSpec], number: int) -> list[ArmSpec]:
    """Of round ``number``, from 0: drawn anew every other round, so that no arm has a place or neighbours of its own;
    reversed in the round after, so that a drift hits all arms alike."""
    drawn = random.Random(number // 2).sample(arms, len(arms))
    return drawn[:: 1 if number % 2 == 0 else -1]


def _enough(rounds: Sequence[dict[str, Window]], fewest: int) -> bool:
    spoiled = [{name for name, window in each.items() if window.refusals} for each in rounds]
    helpless = set.intersection(*spoiled)
    standing = sum(each <= helpless for each in spoiled)
    return standing >= fewest or len(rounds) >= 2 * fewest


def unsettled(
    arms: Sequence[ArmSpec],
    rounds: Sequence[Mapping[str, Window]],
    margins: Mapping[str, float],
    max_spread: float = math.inf,
) -> list[ArmSpec]:
    """Those of ``arms`` that another round is to measure: the baseline and its control, and each variant, with the arms
    of its ablation, of which a ratio is not ``settled``; all, unless baseline and control are ``equal``.

    An arm is held against the baseline and its control alike, so that what equal arms differ by settles nothing; one
    without a technique, against its variant. A rejected sample settles nothing, a figure that this machine does not
    tell leaves nothing open.
    """
    baseline, control = next((arm.variant, arm.name) for arm in arms if arm.role == "aa_control")
    equals = [arm.name for arm in arms if arm.variant == baseline]
    whole = {arm.variant: arm.name for arm in arms if arm.role == "variant"}
    recent = rounds[-SETTLED_ROUNDS:]
    for field, margin in margins.items():
        pairs = [(getattr(each[control], field), getattr(each[whole[baseline]], field)) for each in recent]
        found = [one / other for one, other in pairs if one and other]
        if found and not equal(found, margin if field == "peak_memory_bytes" else NEGLIGIBLE, max_spread):
            return list(arms)

    def is_settled(arm: ArmSpec) -> bool:
        references = [whole[arm.variant]] if arm.role == "without" else equals
        if any(each[name].refusals for each in recent for name in (arm.name, *references)):
            return False
        for field, margin in margins.items():
            told = [
                [above / below for name in references
                 if (above := getattr(each[arm.name], field)) and (below := getattr(each[name], field))]
                for each in recent
            ]  # fmt: skip
            if any(told) and not (all(len(each) == len(references) for each in told) and settled(told, margin)):
                return False
        return len(recent) == SETTLED_ROUNDS

    open_ = {arm.variant for arm in arms if arm.variant == baseline or not is_settled(arm)}
    return [arm for arm in arms if arm.variant in open_]


def settled(rounds: Sequence[Sequence[float]], margin: float, count: int = SETTLED_ROUNDS) -> bool:
    """Whether all ratios of the last ``count`` rounds lie above 1 + margin, or below its reciprocal, or between."""
    bound = 1 + margin
    sides = {(ratio > bound) - (ratio < 1 / bound) for each in rounds[-count:] for ratio in each}
    return len(rounds) >= count and len(sides) == 1


def equal(ratios: Sequence[float], tolerance: float, max_spread: float, count: int = SETTLED_ROUNDS) -> bool:
    """Whether the last ``count`` ratios look like those of equal arms: the second and the last but one by size, of ten
    an interval of the median with 97.9%, hold 1 or a value within ``tolerance`` of it, and lie no further apart than
    ``max_spread``, a relative width.

    Source of the interval: two binomial tails of at most one in ten, 1 - 2 * 11 / 2^10 (the sign test's).
    """
    if len(ratios) < count:
        return False
    _, low, *_, high, _ = sorted(ratios[-count:])
    return low <= 1 + tolerance and high >= 1 / (1 + tolerance) and high / low - 1 <= max_spread


def _one_by_one(arms: Sequence[ArmSpec], steps: int, show: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    answers = {}
    for spec in arms:
        show(spec.name)
        answers[spec.name] = spec.server.measure(spec.name, spec.values, steps)
    return answers


def _in_turns(
    arms: Sequence[ArmSpec], steps: int, turns: int, show: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    for spec in arms:
        show(f"starting {spec.name}")
        spec.server.open(spec.name, spec.values, steps)
    for turn in range(turns):
        show(f"turn {turn + 1} of {turns}")
        share = steps * (turn + 1) // turns - steps * turn // turns
        first = turn % len(arms)  # each arm is first about as often as last
        for spec in [*arms[first:], *arms[:first]]:
            spec.server.turn(spec.name, share)
    return {spec.name: spec.server.close(spec.name) for spec in arms}


_BAR = "{desc}: {percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt} s, {postfix}"


class Calibration(NamedTuple):
    """A short sample of an arm, taken before the rounds."""

    answer: dict[str, Any]
    """As of ``Server.close``."""
    opening_seconds: float
    """Of its processes, from their start to the first measured step."""
    step_seconds: float

    def seconds(self, steps: int) -> float:
        """About what it takes in a round."""
        return self.opening_seconds + steps * self.step_seconds


def calibrate(arm: ArmSpec, *, ledgers: bool = False) -> Calibration:
    """``CALIBRATION_STEPS`` of ``arm``; what ``ledgers`` take is in none of its times."""
    began = time.monotonic()
    arm.server.open(arm.name, arm.values, CALIBRATION_STEPS, ledgers=ledgers)
    opened = time.monotonic()
    arm.server.turn(arm.name, CALIBRATION_STEPS)
    ended = time.monotonic()
    return Calibration(arm.server.close(arm.name), opened - began, (ended - opened) / CALIBRATION_STEPS)


def steps_of(arm: ArmSpec, seconds: float, others: Sequence[Calibration] = ()) -> tuple[int, Calibration]:
    """As many steps as ``arm`` takes for a window, by short samples of it; and the last of these.

    A window takes ``seconds``, and more where the arms take long to start: by the square root of how much longer that
    is than ``OPENING_SECONDS``. It is the window that knows most for its minutes (Kalibera and Jones, ISMM 2013).
    """
    for _ in range(CALIBRATIONS):
        sample = calibrate(arm)
        window = Window.model_validate(sample.answer["window"])
        if window.step_p50_ms:
            opening = statistics.fmean(each.opening_seconds for each in (sample, *others))
            seconds *= max(1.0, math.sqrt(opening / OPENING_SECONDS))
            return max(FEWEST_STEPS, round(seconds / (window.step_p50_ms / 1e3))), sample
    return CALIBRATION_STEPS, sample


def fewest_rounds(settings: BenchSettings) -> int:
    """Those that are measured whatever the time is."""
    return 0 if settings.hard_limit else FEWEST_ROUNDS


def outlook(arms: int, steps: int, round_seconds: float, *, seconds: float, max_rounds: int | None, fewest: int) -> str:
    """What ``measure`` is about to do, and until when, in words. ``round_seconds``: about what a round takes."""
    fitting = max(1, int(seconds / round_seconds))
    rounds = max(fitting, fewest) if max_rounds is None else min(max(fitting, fewest), max_rounds)
    ends = time.strftime("%H:%M %Z", time.localtime(time.time() + rounds * round_seconds))
    remark = ""
    if rounds < FEWEST_ROUNDS:
        remark = f" (at least {FEWEST_ROUNDS} would be needed to decide anything)"
    elif rounds > fitting:
        remark = f" (the fewest that can decide anything; {seconds / 60:g} minutes give {fitting})"
    counted = f"{arms} arms of {steps} steps, a round takes about {round_seconds:.0f} s: {rounds} round(s){remark}"
    return f"{counted}, until about {ends}"


def turns_on(device: str, settings: BenchSettings) -> int:
    """In how many turns a sample is measured. On a GPU in one: an arm that waits would hold the GPU's memory."""
    return settings.turns if device == "cpu" else 1


def run(config: Config, machine: Machine, *, again: bool = False) -> None:
    """Measure all variants and write ``bench.json``; ``again``: one more session, into a file of its own.

    Interrupted, it writes the rounds that are complete and raises KeyboardInterrupt. Raises PipelineError.
    """
    settings, baseline = config.bench, config.compare.baseline
    seconds, max_rounds, fewest = 60 * settings.max_minutes, settings.max_rounds, fewest_rounds(settings)
    ended = sitting.begin()
    # Before anything is measured: what is edited meanwhile was not.
    commit, content = environment.checked_out(), environment.read() | stages.described(config, plans(config, machine))
    with Server() as server:
        about = server.describe()
        variants = {name: variant.model_dump(mode="json") for name, variant in config.variants.items()}
        specs = [ArmSpec(name, "variant", name, None, server, values) for name, values in variants.items()]
        # Also the warm-up: from here on the files are in memory.
        samples = {arm.name: calibrate(arm, ledgers=not again) for arm in specs}
        ledgers = _known(samples, "ledgers", Ledgers)
        flops = _known(samples, "flops", Flops)
        ablated, not_ablated = _ablation(config, machine, server)
        control = ArmSpec(f"{baseline}, A/A control", "aa_control", baseline, None, server, variants[baseline])
        arms = [*specs, *ablated, control]
        others = [samples[arm.variant] for arm in arms if arm.variant != baseline]  # the first also started the server
        steps, samples[baseline] = steps_of(control, settings.window_seconds, others)
        round_seconds = sum(samples[arm.variant].seconds(steps) for arm in arms)
        said = outlook(len(arms), steps, round_seconds, seconds=seconds, max_rounds=max_rounds, fewest=fewest)
        print(f"bench: {said}", flush=True)
        turns = turns_on(about["device"], settings)
        rounds = measure(
            arms,
            seconds=seconds,
            max_rounds=max_rounds,
            steps=steps,
            turns=turns,
            fewest=fewest,
            # As max_minutes they change how much is measured, not what; dvc.yaml does not name them, so that a changed
            # margin is judged on the rounds there are.
            margins={
                "samples_per_second": config.compare.margins.throughput,
                "peak_memory_bytes": config.compare.margins.memory,
            },
            max_spread=config.compare.max_spread,
        )
    session = ended()
    bench = Bench(
        environment=about["environment"],
        commit=commit,
        config={"train": about["train"], "bench": about["bench"], "variants": about["variants"]},
        dataset=Dataset.model_validate(about["dataset"]),
        baseline=baseline,
        steps=rounds.steps,
        turns=rounds.turns,
        seconds=rounds.seconds,
        interrupted=rounds.interrupted,
        arms=rounds.arms,
        ledgers=ledgers,
        flops=flops,
        not_ablated=not_ablated,
        session=session,
        keys={name: stages.key(content, "bench", name) for name in config.variants},
    )
    file = SESSIONS / _name(bench) if again else BENCH_FILE
    files.write_text(file, bench.to_json())
    if again:
        for earlier in recalled(bench):
            print(f"bench: an earlier bench of the same counts as a session too: {earlier}", flush=True)
    else:  # unasked it makes no session: two of them, with an interval over both, can leave open what one decides
        files.write_text(KEPT_BENCHES / _name(bench), bench.to_json())
    print(f"bench: {bench.rounds} rounds in {rounds.seconds:.0f} s, in {file}", flush=True)
    for arm in rounds.arms:
        if arm.role == "variant" and arm.settled:
            print(f"bench: {arm.name} was settled after {len(arm.samples)} rounds", flush=True)
        for line in rejections(arm):
            print(f"bench: {arm.name} {line}", flush=True)
    if rounds.interrupted:
        raise KeyboardInterrupt


def recalled(bench: Bench) -> list[Path]:
    """Make sessions of the kept benches that measured the baseline and a variant as ``bench`` did; their files. What
    has too few rounds to bound a ratio is left where it is."""
    found = []
    for kept in read_sessions(KEPT_BENCHES):
        same = {name for name, key in bench.keys.items() if kept.keys.get(name) == key}
        if bench.baseline in same and len(same) > 1 and kept.dataset == bench.dataset and kept.rounds >= FEWEST_ROUNDS:
            found.append(SESSIONS / _name(kept))
            files.write_text(found[-1], kept.to_json())
            (KEPT_BENCHES / _name(kept)).unlink()
    return found


def _name(bench: Bench) -> str:
    """Of its file among others: when it started."""
    return f"{re.sub('[^0-9T]', '', bench.session.start_utc)[:15]}.json"


def _known(samples: Mapping[str, Calibration], key: str, record: type[R]) -> dict[str, R]:
    """By variant."""
    found = {name: sample.answer[key] for name, sample in samples.items()}
    return {name: record.model_validate(values) for name, values in found.items() if values is not None}


def _ablation(config: Config, machine: Machine, server: Server) -> tuple[list[ArmSpec], dict[str, dict[str, str]]]:
    """The arms that show each technique's own share in the variants to ablate, and why some have none."""
    arms: list[ArmSpec] = []
    without: dict[str, dict[str, str]] = {}
    base = plan(config, config.compare.baseline, machine).applied
    for name in config.bench.ablate:
        ours = plan(config, name, machine)
        requested, applied = techniques_of(ours.requested), techniques_of(ours.applied)
        without[name] = {key: reason for key, reason in ours.skipped.items() if key in requested}
        techniques = {
            technique: keys
            for technique, keys in applied.items()
            if any(getattr(ours.applied, key) != getattr(base, key) for key in keys)
        }
        shared = applied.keys() - techniques.keys()
        without[name] |= dict.fromkeys(sorted(shared), f"{config.compare.baseline} applies it too")
        if len(techniques) < 2:
            without[name] |= dict.fromkeys(techniques, f"it is all that {name} changes: the variant itself shows it")
            continue
        for technique, keys in techniques.items():
            added = base.model_copy(update={key: getattr(ours.applied, key) for key in keys})
            if misplaced(added):
                without[name][technique] = (
                    f"it goes with the variant's parallelism, which {config.compare.baseline} lacks"
                )
                continue
            reduced = ours.applied.model_copy(update={key: getattr(base, key) for key in keys})
            alone, rest = f"{config.compare.baseline} with {technique} of {name}", f"{name} without {technique}"
            arms += [
                ArmSpec(alone, "with", name, technique, server, added.model_dump(mode="json")),
                ArmSpec(rest, "without", name, technique, server, reduced.model_dump(mode="json")),
            ]
    return arms, without
