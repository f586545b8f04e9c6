"""Steady-state speed and memory of all variants, side by side: fresh processes, interleaved rounds, an A/A arm.

There are three kinds of processes. This one sends requests; one server per checkout (``server``, ``arm.serve``) answers
them; the ranks of an arm, which the server forks (``arm._measure_in_turns``), train and measure.
"""

from __future__ import annotations

import math
import random
import re
import statistics
import sys
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
"""Most tries for the calibration sample, from which the number of steps follows; other load can spoil a try."""
FEWEST_STEPS = 5
TOLD_SECONDS = 30
"""Without a terminal, so often a line says how far the rounds are."""
OPENING_SECONDS = 1.7
"""Start-up time of the arms for which windows of 1.5 s were found to be the best (docs/measuring.md)."""
FEWEST_ROUNDS = 6
"""Equals ``stats.FEWEST_PAIRS``, which is not imported here: a change of the statistics must not repeat the bench."""
SETTLED_ROUNDS = 10
"""This many rounds in a row on one side of a margin settle a ratio. A ratio whose median lies on the margin is settled
by one look with a probability of 2 / 2^10, whatever the noise; ``benchmarks.simulations`` shows that of all looks."""
NEGLIGIBLE = 0.001
"""Equals ``stats.NEGLIGIBLE``, for the same reason: a bias up to this between equal arms' speeds disturbs nothing. The
peaks of equal arms may differ by the margin, because their heaps differ."""


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
    """The outcome of interleaved rounds."""

    arms: tuple[Arm, ...]
    steps: int
    """Steps of each sample."""
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
    """Measure rounds of all arms, each arm in a fresh process, for at most ``seconds``, but at least one round.

    Whatever ``seconds`` says, at least ``fewest`` rounds without a rejected sample are measured, or 2 * ``fewest``
    rounds in all; an arm whose samples were rejected in every round does not count. When the time is over,
    ``leaves_open`` is called once with the rounds: if it returns True, the time is doubled. The measurement ends after
    ``max_rounds``, or as soon as ``decided``, called after each round from ``FEWEST_ROUNDS`` on, returns True.

    ``margins``: the margin of each field of ``Window``. With margins, a variant whose ratios are all settled
    (``unsettled``) takes no part in later rounds, so it has samples of the first rounds only; when all variants are
    settled, the measurement ends. No variant is settled while the A/A control deviates, or its ratios spread wider than
    ``max_spread`` (``equal``).

    With one turn, the arms of a round run one after the other, each alone. With more turns, all arms are started, and
    each takes its ``steps`` in ``turns`` short turns while the others wait, so that a disturbance of some seconds hits
    all arms (for the order of the arms see ``order_of``). A KeyboardInterrupt keeps the complete rounds; if there are
    none, it is raised again.
    """
    turns = min(turns, steps)  # no turn without a step
    facts: dict[str, dict[str, Any]] = {}
    rounds: list[dict[str, Window]] = []
    started, longest, interrupted, limit, extended = time.monotonic(), 0.0, False, seconds, False
    running = list(arms)
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
                if rounds and not overdue and began - started > limit:
                    overdue = True
                    over = f"{limit / 60:g} minutes are over after {len(rounds)} round(s)"
                    least = f"{fewest} without a rejected sample are needed, and {2 * fewest} are the most"
                    bar.write(f"bench: {over}, and it goes on: {least} (bench.hard_limit)", sys.stdout)
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
                now = time.monotonic()
                if bar.disable and now - told >= TOLD_SECONDS:
                    told = now
                    print(f"bench: {len(rounds)} round(s) after {now - started:.0f} s", flush=True)
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
    """Return the order of the arms in round ``number``, counted from 0. Every other round draws a new order, so that no
    arm has a fixed place or fixed neighbours; the round after it reverses the order, so that drift hits all arms alike.
    """
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
    """Return those of ``arms`` that the next round must measure: the baseline, its control, and each variant (with the
    arms of its ablation) that has a ratio that is not ``settled``. All arms, unless baseline and control are ``equal``.

    An arm is compared with both the baseline and its control, so that a difference between equal arms settles nothing;
    an arm without one technique is compared with its variant. A rejected sample settles nothing. A figure that this
    machine cannot measure leaves nothing open.
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
    """True if the ratios of the last ``count`` rounds all lie above 1 + margin, all below 1 / (1 + margin), or all
    between the two. False with fewer rounds."""
    bound = 1 + margin
    sides = {(ratio > bound) - (ratio < 1 / bound) for each in rounds[-count:] for ratio in each}
    return len(rounds) >= count and len(sides) == 1


def equal(ratios: Sequence[float], tolerance: float, max_spread: float, count: int = SETTLED_ROUNDS) -> bool:
    """True if the last ``count`` ratios look like those of equal arms. The interval from the second smallest to the
    second largest (of ten ratios a 97.9% interval of the median) must hold a value within ``tolerance`` of 1, and be no
    wider than ``max_spread``, a relative width. False with fewer ratios.

    Source of the interval: the sign test; two binomial tails of at most one in ten, 1 - 2 * 11 / 2^10.
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


_BAR = "{desc}: {percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt} s{postfix}"


class Calibration(NamedTuple):
    """A short sample of an arm, taken before the rounds."""

    answer: dict[str, Any]
    """The answer of ``Server.close``."""
    opening_seconds: float
    """From the start of the arm's processes to the first measured step."""
    step_seconds: float

    def seconds(self, steps: int) -> float:
        """Return about how long the arm takes in a round of ``steps`` steps."""
        return self.opening_seconds + steps * self.step_seconds


def calibrate(arm: ArmSpec, *, ledgers: bool = False) -> Calibration:
    """Measure ``CALIBRATION_STEPS`` of ``arm``. Its times do not include the time that ``ledgers`` take."""
    began = time.monotonic()
    arm.server.open(arm.name, arm.values, CALIBRATION_STEPS, ledgers=ledgers)
    opened = time.monotonic()
    arm.server.turn(arm.name, CALIBRATION_STEPS)
    ended = time.monotonic()
    steps = CALIBRATION_STEPS + 1  # the only turn ends with the step whose samples are counted
    return Calibration(arm.server.close(arm.name), opened - began, (ended - opened) / steps)


def steps_of(arm: ArmSpec, seconds: float, others: Sequence[Calibration] = ()) -> tuple[int, Calibration]:
    """Return how many steps of ``arm`` fill a window, from short samples, and the last of these samples.

    A window takes ``seconds``. Where the arms take r times ``OPENING_SECONDS`` to start, r > 1, it takes sqrt(r) times
    as long, which yields the most information per minute (Kalibera and Jones, ISMM 2013).
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
    """Return how many rounds are measured even if that takes longer than allowed."""
    return 0 if settings.hard_limit else FEWEST_ROUNDS


def outlook(arms: int, steps: int, round_seconds: float, *, seconds: float, max_rounds: int | None, fewest: int) -> str:
    """Say in words what ``measure`` is about to do, and when it will end. ``round_seconds``: estimate for one round."""
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
    """Return the turns per sample. On a GPU there is one turn only: an arm that waits would hold the GPU's memory."""
    return settings.turns if device == "cpu" else 1


def run(config: Config, machine: Machine, *, again: bool = False) -> None:
    """Measure all variants and write ``bench.json``; with ``again``, write one more session into its own file.

    If interrupted, write the complete rounds and raise KeyboardInterrupt. Raises PipelineError.
    """
    settings, baseline = config.bench, config.compare.baseline
    seconds, max_rounds, fewest = 60 * settings.max_minutes, settings.max_rounds, fewest_rounds(settings)
    ended = sitting.begin()
    # Read before anything is measured: code that is edited during the bench was not measured.
    commit, content = environment.checked_out(), environment.read() | stages.described(config, plans(config, machine))
    with Server() as server:
        about = server.describe()
        variants = {name: variant.model_dump(mode="json") for name, variant in config.variants.items()}
        specs = [ArmSpec(name, "variant", name, None, server, values) for name, values in variants.items()]
        # This is also a warm-up: from here on the files are in the page cache.
        samples = {}
        for number, spec in enumerate(specs, 1):
            print(f"bench: a first look at {spec.name}, {number} of {len(specs)}", flush=True)
            samples[spec.name] = calibrate(spec, ledgers=not again)
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
            # Like max_minutes, the margins change how much is measured, not what. dvc.yaml does not name them, so a
            # changed margin is applied to the rounds that exist.
            margins={
                "samples_per_second": config.compare.margins.throughput,
                "peak_memory_bytes": config.compare.margins.memory,
                **({"joules_per_sample": margin} if (margin := config.compare.margins.energy) else {}),
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
    else:  # not a session unless asked for: an interval over two sessions can leave open what one session decides
        files.write_text(KEPT_BENCHES / _name(bench), bench.to_json())
    print(f"bench: {bench.rounds} rounds in {rounds.seconds:.0f} s, in {file}", flush=True)
    for arm in rounds.arms:
        if arm.role == "variant" and arm.settled:
            print(f"bench: {arm.name} was settled after {len(arm.samples)} rounds", flush=True)
        for line in rejections(arm):
            print(f"bench: {arm.name} {line}", flush=True)
    if why := next((each.why_no_energy for arm in rounds.arms for each in arm.samples if each.why_no_energy), None):
        print(f"bench: energy is unknown, at least in a round: {why}", flush=True)
    if rounds.interrupted:
        raise KeyboardInterrupt


def recalled(bench: Bench) -> list[Path]:
    """Move the kept benches that measured the baseline and a variant as ``bench`` did to the sessions; return their new
    files. A bench with too few rounds to bound a ratio stays where it is."""
    found = []
    for kept in read_sessions(KEPT_BENCHES):
        same = {name for name, key in bench.keys.items() if kept.keys.get(name) == key}
        if bench.baseline in same and len(same) > 1 and kept.dataset == bench.dataset and kept.rounds >= FEWEST_ROUNDS:
            found.append(SESSIONS / _name(kept))
            files.write_text(found[-1], kept.to_json())
            (KEPT_BENCHES / _name(kept)).unlink()
    return found


def _name(bench: Bench) -> str:
    """Return the name of the bench's file among other sessions: the time at which the bench started."""
    return f"{re.sub('[^0-9T]', '', bench.session.start_utc)[:15]}.json"


def _known(samples: Mapping[str, Calibration], key: str, record: type[R]) -> dict[str, R]:
    """Return the records under ``key`` by variant, without the variants that have none."""
    found = {name: sample.answer[key] for name, sample in samples.items()}
    return {name: record.model_validate(values) for name, values in found.items() if values is not None}


def _ablation(config: Config, machine: Machine, server: Server) -> tuple[list[ArmSpec], dict[str, dict[str, str]]]:
    """Return the arms that isolate each technique of the variants to ablate, and why some techniques have no arms."""
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
