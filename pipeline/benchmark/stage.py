"""The bench stage: measure all variants and a second arm of the baseline side by side, and store the bench.

``begin_session`` records the state of the machine, on which the bench's figures do not depend.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import psutil

from pipeline import environment, files, hosts, processes
from pipeline.benchmark.rounds import (
    Rounds,
    calibrate,
    check_samples,
    expected,
    fewest_rounds,
    measure,
    outlook,
    raised,
    steps_of,
    turns_on,
    window_steps,
)
from pipeline.benchmark.server import ArmSpec, BenchError, Server
from pipeline.environment import stages
from pipeline.errors import count, say
from pipeline.params import Bench as BenchSettings
from pipeline.params import Config, Machine, misplaced
from pipeline.params import techniques as techniques_of
from pipeline.plans import Plan, plans
from pipeline.results import (
    BENCH_FILE,
    KEPT_BENCHES,
    SESSIONS,
    Bench,
    DatasetFacts,
    Flops,
    Ledgers,
    Session,
    read_sessions,
    sessions_of,
)
from pipeline.results.bench_file import FEWEST_PAIRS
from pipeline.results.rejections import advised, lines

N = TypeVar("N", int, float)
LONG_MINUTES = 0.5
"""If all first samples together take longer, a first estimate is printed before they have ended. It is rough, because
the first sample includes what all processes share."""


Settled = Callable[[Rounds], Collection[str]]
"""Returns the variants that need no further rounds."""
MemoryKnown = Callable[[Rounds], bool]
"""Returns True if no variant needs further measurements of memory."""
Kept = Callable[[Bench], object]
"""Keeps the bench so far."""


def run(
    config: Config,
    machine: Machine,
    *,
    again: bool = False,
    settled: Settled = lambda _: (),
    memory_known: MemoryKnown = lambda _: False,
) -> None:
    """Measure all variants and write ``bench.json``; with ``again``, write another bench into its own file.

    The caller gives ``settled`` and ``memory_known``, because a change of these rules must not make DVC repeat the
    bench: like its minutes, they decide only how much is measured.

    Without ``again``, a bench of the same session is continued if it measured the same arms and left a variant
    unsettled. Each complete round is saved at once, so that a killed bench loses only its current round. Raises
    PipelineError. An interrupt raises KeyboardInterrupt, whose message says which rounds are kept.
    """
    session = begin_session()

    def keep(bench: Bench) -> None:
        files.write_text(KEPT_BENCHES / file_name(bench), bench.to_json())

    try:
        with served(config, machine, Server()) as job:
            bench = measured(config, job, session, keep, again=again, settled=settled, memory_known=memory_known)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "no round was complete, so nothing is kept; the same command starts from the beginning"
        ) from None
    file = (SESSIONS if again else KEPT_BENCHES) / file_name(bench)
    files.write_text(file, bench.to_json())
    if again:
        (KEPT_BENCHES / file_name(bench)).unlink(missing_ok=True)
        for earlier in recalled(bench):
            say(f"bench: an earlier bench of the same job counts too: {earlier}")
    else:  # earlier benches do not count, because two sessions can leave undecided what one session decides
        files.write_text(BENCH_FILE, bench.to_json())
    done = (
        f"{count(bench.rounds, 'round')} in {bench.seconds:.0f} s ({bench.window_fraction or 0:.0%} measured windows)"
    )
    say(f"bench: {done}, written to {file if again else BENCH_FILE}")
    samples = [sample for arm in bench.arms for sample in arm.samples]
    values = advised(rejection for sample in samples for rejection in sample.rejections)
    for arm in bench.arms:
        if arm.role == "variant" and arm.settled:
            say(f"bench: {arm.name} was settled after {len(arm.samples)} rounds")
        for line in lines([sample.rejections for sample in arm.samples], values):
            say(f"bench: {arm.name} {line}")
    if why := next((sample.why_no_energy for sample in samples if sample.why_no_energy), None):
        say(f"bench: energy is unknown in at least one round: {why.text}")
    if bench.interrupted:
        raise KeyboardInterrupt(
            f"{count(bench.rounds, 'complete round')} kept in {file}; run the same command within an hour to add rounds"
        )


def measured(
    config: Config, job: Job, session: Callable[[], Session], keep: Kept, *, again: bool, **rules: Any
) -> Bench:
    """Measure the job's arms and those that ``bench.ablate`` asks for. ``session``, ``keep``, ``rules``: as in
    ``side_by_side``. ``again``: as in ``run``."""
    ablated, not_ablated = isolating(config, job.plans, job.server)
    arms = [*job.arms[:-1], *ablated, job.arms[-1]]
    names = [arm.name for arm in arms]
    earlier = None if again else unfinished("bench", session(), job, names)
    about = job.facts | {"not_ablated": not_ablated}
    if earlier:
        about |= {"margins": earlier.margins or about["margins"], "same_job": earlier.same_job}
    if earlier and (earlier.flops or earlier.same_job):
        steps, round_seconds = earlier.steps, earlier.seconds / earlier.rounds
        ledgers, flops = earlier.ledgers, earlier.flops
    else:  # also after a first look, which takes no ledgers
        if earlier:
            _foretell(earlier.seconds / earlier.rounds, config.bench, "as long as those before")
        steps, round_seconds, ledgers, flops = calibrated(arms, config.bench, ledgers=not again)
        about |= {"same_job": job.server.same_jobs(config.compare.baseline, arms[-1].name)}
    return side_by_side(
        "bench",
        arms,
        config.bench,
        job.device,
        steps=earlier.steps if earlier else steps,
        round_seconds=round_seconds,
        session=session,
        keep=keep,
        earlier=earlier,
        **rules | about | {"ledgers": ledgers, "flops": flops},
    )


@dataclass(frozen=True)
class Job:
    """What is measured for params.yaml, while its server runs."""

    server: Server
    plans: Mapping[str, Plan]
    arms: tuple[ArmSpec, ...]
    """The arms of the variants, and the baseline's control last."""
    device: str
    facts: dict[str, Any]
    """Fields of ``Bench``."""
    keys: Callable[..., dict[str, str]]
    """Returns ``Bench.keys`` for settings of the bench that replace those of params.yaml."""


@contextmanager
def served(config: Config, machine: Machine, server: Server, content: Mapping[str, Any] | None = None) -> Iterator[Job]:
    """Start ``server`` and let it plan the variants of ``config``. ``content``: that of environment.json with the
    present code; None: it is read. Raises PipelineError."""
    baseline, by_variant = config.compare.baseline, plans(config, machine)
    # The code is read before the bench measures it, so that later edits are not recorded as the measured code.
    commit, content = environment.checked_out(), content or environment.read() | stages.described(config, by_variant)

    def keys(**replaced: object) -> dict[str, str]:
        return {name: stages.key(content, "bench", name, **replaced) for name in config.variants}

    with server:
        about = server.describe()
        sent = {name: server.plan(name, variant.model_dump(mode="json")) for name, variant in config.variants.items()}
        specs = {name: ArmSpec.of_variant(name, server, plan) for name, plan in sent.items()}
        facts = {
            "environment": about["environment"],
            "commit": commit,
            "config": {section: about[section] for section in ("train", "bench", "variants")},
            "dataset": about["dataset"] and DatasetFacts.model_validate(about["dataset"]),
            "baseline": baseline,
            "keys": keys(),
            "margins": config.compare.margins,
        }
        yield Job(server, by_variant, (*specs.values(), specs[baseline].control()), about["device"], facts, keys)


def side_by_side(
    command: str,
    arms: Sequence[ArmSpec],
    settings: BenchSettings,
    device: str,
    *,
    steps: int,
    round_seconds: float,
    session: Callable[[], Session],
    keep: Kept = lambda _: None,
    earlier: Bench | None = None,
    settled: Settled = lambda _: (),
    memory_known: MemoryKnown = lambda _: False,
    fewest: int | None = None,
    failed: Callable[[str, BenchError], object] = raised,
    **about: Any,
) -> Bench:
    """Measure ``arms`` in rounds, as long as ``settings`` say; return the bench.

    ``command``: what the printed outlook begins with. ``device``: "cpu" or "cuda". ``steps``, ``round_seconds``: those
    of ``calibrated``. ``session``: what ``begin_session`` returns. ``keep``: gets the bench so far after each round, so
    that a command that is killed loses only its current round. ``earlier``: a bench of the same arms, which is
    continued. ``settled``, ``memory_known``, ``failed``: as in ``rounds.measure``. ``fewest``: too, and the first
    look comes after as many rounds; None: what ``settings`` say. ``about``: further fields of ``Bench``.
    """
    before, spent = (earlier.rounds, earlier.seconds) if earlier else (0, 0.0)
    limits: dict[str, Any] = {
        "seconds": _left(60 * settings.max_minutes, spent),
        "max_rounds": None if settings.max_rounds is None else before + _left(settings.max_rounds, before),
        "fewest": fewest_rounds(settings) if fewest is None else fewest,
    }

    def bench_of(rounds: Rounds) -> Bench:
        now = session()
        bench = Bench(
            **{"ledgers": {}, "flops": {}, "not_ablated": {}} | about | vars(rounds),
            session=earlier.session.model_copy(update={"end_utc": now.end_utc}) if earlier else now,
        )
        seconds = spent + rounds.seconds
        return bench.model_copy(update={"seconds": seconds, "window_fraction": bench.windows_seconds / seconds})

    say(f"{command}: {outlook(len(arms), steps, round_seconds, before=before, **limits)}")
    rounds = measure(
        arms,
        **limits,
        steps=steps,
        turns=turns_on(device, settings),
        settled=settled,
        memory_known=memory_known,
        first_look=fewest or FEWEST_PAIRS,
        failed=failed,
        earlier=earlier.arms if earlier else (),
        keep=lambda rounds: keep(bench_of(replace(rounds, interrupted=True))),
    )
    return bench_of(rounds)


def calibrated(
    arms: Sequence[ArmSpec], settings: BenchSettings, *, ledgers: bool
) -> tuple[int, float, dict[str, Ledgers], dict[str, Flops]]:
    """Take a short sample of each variant; return the steps of a window, the expected time of a round of all arms, and
    the variants' ledgers and FLOPs. The samples also load all files into the page cache.

    ``arms``: the arms of the variants, then the arms of the ablation, and the baseline's control last.
    """
    specs, samples, began = [arm for arm in arms if arm.role == "variant"], {}, time.monotonic()
    for number, spec in enumerate(specs, 1):
        say(f"bench: short first sample of {spec.name}, {number} of {len(specs)}")
        samples[spec.name] = sample = calibrate(spec, ledgers=ledgers)
        rest = len(specs) * (time.monotonic() - began) / 60
        if number == 1 and rest > LONG_MINUTES:
            steps = window_steps(settings.window_seconds, sample.step_seconds, [sample.opening_seconds])
            basis = f"and {rest:.1f} before, if all arms take as long as {spec.name}; compiling takes longer"
            _foretell(len(arms) * sample.seconds(steps), settings, basis)
    known = {key: {name: sample.answer[key] for name, sample in samples.items()} for key in ("ledgers", "flops")}
    by_variant = {name: Ledgers.model_validate(values) for name, values in known["ledgers"].items() if values}
    counted = {name: Flops.model_validate(values) for name, values in known["flops"].items() if values}
    baseline = arms[-1].variant
    others = [samples[arm.variant] for arm in arms if arm.variant != baseline]
    # The baseline is measured again, because its first sample may include the start of the fork server.
    steps, samples[baseline] = steps_of(arms[-1], settings.window_seconds, others)
    for name, sample in samples.items():
        check_samples(name, {"the baseline": samples[baseline].answer, "this variant": sample.answer})
    return steps, sum(samples[arm.variant].seconds(steps) for arm in arms), by_variant, counted


def _foretell(round_seconds: float, settings: BenchSettings, basis: str) -> None:
    """Print how many minutes the rounds will take: from the case that all is soon settled, in rounds of half the time
    because a first sample includes what happens once, to that of many rejections. ``basis``: of the estimate."""
    seconds, fewest = 60 * settings.max_minutes, fewest_rounds(settings)
    rounds, most = expected(round_seconds, seconds=seconds, max_rounds=settings.max_rounds, fewest=fewest)
    least, longest = (number * round_seconds / 60 for number in (min(rounds, FEWEST_PAIRS), most))
    say(f"bench: expect {least / 2:.1f} to {longest:.1f} minutes of rounds, {basis}")


def _left(limit: N, used: N) -> N:
    """Return the unused part of ``limit``. If nothing is left, return the whole ``limit`` again."""
    return limit - used if used < limit else limit


def unfinished(
    command: str, now: Session, job: Job, names: Collection[str], folder: Path = KEPT_BENCHES
) -> Bench | None:
    """Return the latest bench of this session in ``folder`` that ``command`` can continue, if any, and say so.

    It has measured the same arms in the same way, and has left at least one variant unsettled. If it allowed less
    foreign load than ``job``, its rejected samples are judged again; a lower limit is another job, because the load of
    accepted samples is unknown. ``now``: a session that begins now. ``names``: all arms' names.
    """
    limit = job.facts["config"]["bench"]["max_foreign_load"]
    for kept in reversed(read_sessions(folder)):
        old_limit = kept.config["bench"].get("max_foreign_load")
        keys = {name: key for name, key in job.keys(max_foreign_load=old_limit).items() if name in names}
        is_same_job = kept.keys == keys and kept.dataset == job.facts["dataset"] and old_limit <= limit
        is_open = not all(arm.settled for arm in kept.arms if arm.role == "variant" and arm.variant != kept.baseline)
        if is_same_job and is_open and [arm.name for arm in kept.arms] == [*names] and kept.goes_on_in(now):
            judged = f", judged again by bench.max_foreign_load: {limit:g}" if old_limit < limit else ""
            say(f"{command}: adds to the {count(kept.rounds, 'round')} of {kept.session.start_utc}{judged}")
            return kept.model_copy(update={"arms": tuple(arm.undisturbed(limit) for arm in kept.arms)})
    return None


def recalled(bench: Bench) -> list[Path]:
    """Move kept benches to ``SESSIONS`` if they measured the baseline and another variant as ``bench`` did.

    Return the new files. If a session has too few rounds for the interval of a ratio, its benches are not moved.
    """

    def same(kept: Bench) -> bool:
        names = {name for name, key in bench.keys.items() if kept.keys.get(name) == key}
        return bench.baseline in names and len(names) > 1 and kept.dataset == bench.dataset

    earlier = []
    for session in sessions_of([bench, *filter(same, read_sessions(KEPT_BENCHES))]):
        if sum(bench_file.rounds for bench_file in session) >= FEWEST_PAIRS:
            earlier += [kept for kept in session if kept is not bench]
    for kept in earlier:
        files.write_text(SESSIONS / file_name(kept), kept.to_json())
        (KEPT_BENCHES / file_name(kept)).unlink()
    return [SESSIONS / file_name(kept) for kept in earlier]


def file_name(bench: Bench) -> str:
    """Return the name of the bench's file: the time at which the bench started."""
    return f"{re.sub('[^0-9T]', '', bench.session.start_utc)[:15]}.json"


def begin_session() -> Callable[[], Session]:
    """Start a session. Return a function that describes the session from its start to the call of the function."""
    start, load, times = datetime.now(UTC), os.getloadavg()[0], psutil.cpu_times()
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else None

    def session_so_far() -> Session:
        spent = {name: now - getattr(times, name) for name, now in psutil.cpu_times()._asdict().items()}
        # The user times already include the times of guests.
        total = sum(seconds for name, seconds in spent.items() if not name.startswith("guest"))
        return Session(
            start_utc=start.isoformat(timespec="seconds"),
            hosts=tuple(names) if len(names := hosts.names()) > 1 else (),
            boot_id=processes.boot_id(),
            uptime_seconds=uptime,
            load_average=load,
            steal_fraction=spent["steal"] / total if "steal" in spent and total > 0 else None,
            end_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            spins=int(spins) if (spins := os.environ.get("GOMP_SPINCOUNT", "")).isdecimal() else None,
        )

    return session_so_far


def isolating(
    config: Config, plans: Mapping[str, Plan], server: Server
) -> tuple[list[ArmSpec], dict[str, dict[str, str]]]:
    """Return the arms that isolate techniques of the variants in ``bench.ablate``.

    Also return why other techniques of these variants get no arms: variant -> technique -> reason.
    ``plans``: variant -> plan.
    """
    arms: list[ArmSpec] = []
    without: dict[str, dict[str, str]] = {}
    base = plans[config.compare.baseline].applied
    for name in config.bench.ablate:
        ours = plans[name]
        requested, applied = techniques_of(ours.requested), techniques_of(ours.applied)
        without[name] = {key: reason for key, reason in ours.skipped.items() if key in requested}
        techniques = {
            technique: keys
            for technique, keys in applied.items()
            if any(getattr(ours.applied, key) != getattr(base, key) for key in keys)
        }
        shared = applied.keys() - techniques.keys()
        without[name] |= dict.fromkeys(sorted(shared), f"{config.compare.baseline} applies this technique too")
        if len(techniques) < 2:
            alone = f"{name} changes nothing else, so its own figures show the effect"
            without[name] |= dict.fromkeys(techniques, alone)
            continue
        for technique, keys in techniques.items():
            added = base.model_copy(update={key: getattr(ours.applied, key) for key in keys})
            if misplaced(added):
                without[name][technique] = (
                    f"it works only with the variant's parallelism, which {config.compare.baseline} lacks"
                )
                continue
            reduced = ours.applied.model_copy(update={key: getattr(base, key) for key in keys})
            alone, rest = f"{config.compare.baseline} with {technique} of {name}", f"{name} without {technique}"
            made = [server.plan(arm, given.model_dump(mode="json")) for arm, given in ((alone, added), (rest, reduced))]
            arms += [
                ArmSpec(alone, "with", name, technique, server, made[0]),
                ArmSpec(rest, "without", name, technique, server, made[1]),
            ]
    return arms, without
