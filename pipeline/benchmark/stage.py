"""The bench stage: measure all variants and a second arm of the baseline side by side, and store the bench."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pipeline import environment, files
from pipeline.benchmark import ablation_arms, machine_state
from pipeline.benchmark.calibration import calibrate, steps_of
from pipeline.benchmark.rounds import FEWEST_ROUNDS, Rounds, fewest_rounds, measure, outlook, turns_on
from pipeline.benchmark.server import ArmSpec, Server
from pipeline.environment import stages
from pipeline.errors import count, say
from pipeline.params import Config, Machine, Margins
from pipeline.plans import plans
from pipeline.results import (
    BENCH_FILE,
    KEPT_BENCHES,
    SESSIONS,
    Bench,
    Dataset,
    Flops,
    Ledgers,
    Session,
    read_sessions,
    rejections,
    sessions_of,
)

N = TypeVar("N", int, float)


def run(config: Config, machine: Machine, *, again: bool = False) -> None:
    """Measure all variants and write ``bench.json``; with ``again``, write another bench into its own file.

    Without ``again``, a bench of the same session is continued if it measured the same arms and left a variant
    unsettled. Each complete round is saved at once, so that a killed bench loses only its current round. Raises
    PipelineError. An interrupt raises KeyboardInterrupt, whose message says which rounds are kept.
    """
    try:
        bench = _measured(config, machine, again=again)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "no round was complete, so nothing is kept; the same command starts from the beginning"
        ) from None
    kept = (SESSIONS if again else KEPT_BENCHES) / _name(bench)
    files.write_text(kept, bench.to_json())
    if again:
        (KEPT_BENCHES / _name(bench)).unlink(missing_ok=True)
        for earlier in recalled(bench):
            say(f"bench: an earlier bench of the same job counts too: {earlier}")
    else:  # earlier benches do not count, because two sessions can leave undecided what one session decides
        files.write_text(BENCH_FILE, bench.to_json())
    say(
        f"bench: {count(bench.rounds, 'round')} in {bench.seconds:.0f} s, written to {kept if again else BENCH_FILE}",
    )
    for arm in bench.arms:
        if arm.role == "variant" and arm.settled:
            say(f"bench: {arm.name} was settled after {len(arm.samples)} rounds")
        for line in rejections(arm):
            say(f"bench: {arm.name} {line}")
    if why := next((each.why_no_energy for arm in bench.arms for each in arm.samples if each.why_no_energy), None):
        say(f"bench: energy is unknown in at least one round: {why}")
    if bench.interrupted:
        raise KeyboardInterrupt(
            f"{count(bench.rounds, 'complete round')} kept in {kept}; run the same command within an hour to add rounds"
        )


def _measured(config: Config, machine: Machine, *, again: bool) -> Bench:
    settings, baseline = config.bench, config.compare.baseline
    session_so_far = machine_state.begin()
    # The code is read before the bench measures it, so that later edits are not recorded as the measured code.
    made = plans(config, machine)
    commit, content = environment.checked_out(), environment.read() | stages.described(config, made)
    keys = {name: stages.key(content, "bench", name) for name in config.variants}
    with Server() as server:
        about = server.describe()
        sent = {name: server.plan(name, each.model_dump(mode="json")) for name, each in config.variants.items()}
        specs = [ArmSpec(name, "variant", name, None, server, plan) for name, plan in sent.items()]
        ablated, not_ablated = ablation_arms.isolating(config, made, server)
        control = ArmSpec(f"{baseline}, A/A control", "aa_control", baseline, None, server, sent[baseline])
        arms = [*specs, *ablated, control]
        dataset = Dataset.model_validate(about["dataset"])
        earlier = None if again else unfinished(session_so_far(), keys, dataset, [arm.name for arm in arms])
        if earlier:
            say(f"bench: adds to the {count(earlier.rounds, 'round')} of {earlier.session.start_utc}")
            steps, round_seconds = earlier.steps, earlier.seconds / earlier.rounds
            ledgers, flops = earlier.ledgers, earlier.flops
        else:
            steps, round_seconds, ledgers, flops = _calibrated(arms, settings.window_seconds, ledgers=not again)
        before, spent = (earlier.rounds, earlier.seconds) if earlier else (0, 0.0)
        limits: dict[str, Any] = {
            "seconds": _left(60 * settings.max_minutes, spent),
            "max_rounds": None if settings.max_rounds is None else before + _left(settings.max_rounds, before),
            "fewest": fewest_rounds(settings),
        }

        def bench_of(rounds: Rounds) -> Bench:
            session = session_so_far()
            return Bench(
                environment=about["environment"],
                commit=commit,
                config={"train": about["train"], "bench": about["bench"], "variants": about["variants"]},
                dataset=dataset,
                baseline=baseline,
                steps=rounds.steps,
                turns=rounds.turns,
                seconds=spent + rounds.seconds,
                interrupted=rounds.interrupted,
                arms=rounds.arms,
                ledgers=ledgers,
                flops=flops,
                not_ablated=not_ablated,
                session=earlier.session.model_copy(update={"end_utc": session.end_utc}) if earlier else session,
                keys=keys,
                margins=(earlier and earlier.margins) or config.compare.margins,
            )

        def keep(rounds: Rounds) -> None:  # a killed bench loses its current round only
            bench = bench_of(replace(rounds, interrupted=True))
            files.write_text(KEPT_BENCHES / _name(bench), bench.to_json())

        said = outlook(len(arms), steps, round_seconds, before=before, **limits)
        say(f"bench: {said}")
        rounds = measure(
            arms,
            **limits,
            steps=steps,
            turns=turns_on(about["device"], settings),
            margins=_margins(config.compare.margins),
            max_spread=config.compare.max_spread,
            earlier=earlier.arms if earlier else (),
            keep=keep,
        )
    return bench_of(rounds)


def _calibrated(
    arms: Sequence[ArmSpec], window_seconds: float, *, ledgers: bool
) -> tuple[int, float, dict[str, Ledgers], dict[str, Flops]]:
    """Take a short sample of each variant; return the steps of a window, the expected time of a round of all arms, and
    the variants' ledgers and FLOPs. The samples also load all files into the page cache.

    ``arms``: the arms of the variants, then the arms of the ablation, and the baseline's control last.
    """
    specs, samples = [arm for arm in arms if arm.role == "variant"], {}
    for number, spec in enumerate(specs, 1):
        say(f"bench: short first sample of {spec.name}, {number} of {len(specs)}")
        samples[spec.name] = calibrate(spec, ledgers=ledgers)
    known = {key: {name: each.answer[key] for name, each in samples.items()} for key in ("ledgers", "flops")}
    found = {name: Ledgers.model_validate(each) for name, each in known["ledgers"].items() if each}
    counted = {name: Flops.model_validate(each) for name, each in known["flops"].items() if each}
    baseline = arms[-1].variant
    others = [samples[arm.variant] for arm in arms if arm.variant != baseline]
    # The baseline is measured again, because its first sample may include the start of the fork server.
    steps, samples[baseline] = steps_of(arms[-1], window_seconds, others)
    return steps, sum(samples[arm.variant].seconds(steps) for arm in arms), found, counted


def _margins(margins: Margins) -> dict[str, float]:
    """Return field of ``Window`` -> margin, for the quantities whose ratios must be settled.

    Margins change only the number of rounds. So DVC does not repeat the bench after a change of a margin. ``compare``
    applies the new margin to the existing rounds.
    """
    of_energy = {"joules_per_sample": margins.energy} if margins.energy else {}
    return {"samples_per_second": margins.throughput, "peak_memory_bytes": margins.memory, **of_energy}


def _left(limit: N, used: N) -> N:
    """Return the unused part of ``limit``. If nothing is left, return the whole ``limit`` again."""
    return limit - used if used < limit else limit


def unfinished(now: Session, keys: Mapping[str, str], dataset: Dataset, names: Sequence[str]) -> Bench | None:
    """Return the latest kept bench of this session that can be continued; None if there is none.

    Such a bench has measured the same arms in the same way, and has left at least one variant unsettled. ``now``: a
    session that begins now. ``names``: all arms' names.
    """
    for kept in reversed(read_sessions(KEPT_BENCHES)):
        same = kept.keys == keys and kept.dataset == dataset and [arm.name for arm in kept.arms] == list(names)
        is_open = not all(arm.settled for arm in kept.arms if arm.role == "variant" and arm.variant != kept.baseline)
        if same and is_open and kept.goes_on_in(now):
            return kept
    return None


def recalled(bench: Bench) -> list[Path]:
    """Move kept benches to ``SESSIONS`` if they measured the baseline and another variant as ``bench`` did.

    Return the new files. If a session has too few rounds for the interval of a ratio, its benches are not moved.
    """

    def same(kept: Bench) -> bool:
        names = {name for name, key in bench.keys.items() if kept.keys.get(name) == key}
        return bench.baseline in names and len(names) > 1 and kept.dataset == bench.dataset

    found = []
    for session in sessions_of([bench, *filter(same, read_sessions(KEPT_BENCHES))]):
        if sum(each.rounds for each in session) >= FEWEST_ROUNDS:
            found += [each for each in session if each is not bench]
    for kept in found:
        files.write_text(SESSIONS / _name(kept), kept.to_json())
        (KEPT_BENCHES / _name(kept)).unlink()
    return [SESSIONS / _name(kept) for kept in found]


def _name(bench: Bench) -> str:
    """Return the name of the bench's file: the time at which the bench started."""
    return f"{re.sub('[^0-9T]', '', bench.session.start_utc)[:15]}.json"
