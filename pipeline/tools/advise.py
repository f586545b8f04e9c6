"""The command ``advise``: which of all techniques pay for this job, on this machine, found by measuring them.

It is the bench with a list of candidates (``candidates``) and a rule that leaves arms out (``comparison.racing``). All
candidates race in short rounds; what gains something is combined; the best are measured again, in rounds that did not
choose them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline import files
from pipeline.benchmark.rounds import Calibration, Rounds, calibrate, window_steps
from pipeline.benchmark.server import ArmSpec, BenchError, OutOfTime, Server, ServerLost
from pipeline.benchmark.stage import BOOT_ID, Job, begin_session, served, side_by_side
from pipeline.comparison.racing import FEWEST_ROUNDS, RACED, Race, finalists
from pipeline.errors import ConfigError, first_line, say
from pipeline.files import PREPARED
from pipeline.pages import percent, size
from pipeline.params import COMPILER, PARAMS_FILE, Config, Machine, entry
from pipeline.plans import Plan
from pipeline.report import facts
from pipeline.results import Bench, ResultError, Session, Window, profile_directory, read_document
from pipeline.results.bench_file import ONE_SESSION
from pipeline.results.figures import EXCHANGE, INPUT_WAIT, MEMORY, THROUGHPUT
from pipeline.tools import candidates, choices
from pipeline.tools.advised import FILE, Advice, Left, said, spoke_for, write
from pipeline.tools.beforehand import parse_bytes
from pipeline.tools.candidates import Candidate, Untried
from pipeline.tools.table import LiveTable

SAMPLED, RACED_UNTIL, COMBINED_UNTIL = 0.3, 0.55, 0.7
"""The shares of the minutes after which first samples, the race and the combinations end. The finalists have the rest,
and more if they need it."""
LONGEST = 1 / 8
"""The share of the minutes that an arm may take in a round."""
SLOWER = 3
"""However few the minutes are, an arm may take so many times as long as the baseline."""
RACE_ROUNDS, FINAL_ROUNDS = 4, 8
"""So many rounds of all candidates must fit into the race, and so many of the finalists are measured."""
AT_ONCE = 5
"""Most combinations that are tried at once."""
NOTABLE = 0.1
"""The smallest share of a step that is said to bind it, without a profile."""
BOUNDS = {
    "waits_for_input": "input", "waits_for_others": "communication", "is_uneven": "communication", "idles": "launches",
    "updates": "traffic", "computes": "arithmetic",
}  # fmt: skip
"""Rule of a profile's finding -> what binds the step (``catalogue.Bound``)."""


class Patient(Server):
    """A server that gives each arm ``limit`` seconds, from its start to its answer."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def open(self, name: str, plan: dict[str, Any], steps: int, **options: Any) -> None:
        self.deadline = time.monotonic() + self.limit
        super().open(name, plan, steps, **options)

    def plan(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        self.deadline = time.monotonic() + self.limit
        return super().plan(name, values)


def run(
    config: Config,
    machine: Machine,
    *,
    minutes: float,
    memory: str | None,
    add: bool,
    only: Sequence[str],
    age_seconds: float,
) -> None:
    """Measure what pays until about ``minutes`` after the process's start; write ``reports/advice.*``.

    ``memory``: what a step may need, such as 16GiB. ``add``: add the advice to params.yaml. ``only``: groups of
    techniques. ``age_seconds``: how long ago the process started. Raises ConfigError for a wrong argument, BenchError
    if the baseline cannot be measured, and KeyboardInterrupt after an interrupt, when all is written.
    """
    if not minutes > 0:
        raise ConfigError(f"--minutes: found {minutes:g}; expected a number above 0.")
    memory_bytes, started = memory and parse_bytes(memory), time.monotonic() - age_seconds
    baseline, session = config.compare.baseline, begin_session()
    with served(
        config.model_copy(update={"variants": {baseline: config.variants[baseline]}}),
        machine,
        server := Patient(60 * minutes),
    ) as job:
        base = job.plans[baseline]
        found, untried = candidates.alone(config, machine, base, only, PREPARED)
        if memory_bytes:
            found, large = _fitting(config, machine, found, memory_bytes)
            untried += large
        about = [job.facts["keys"], job.facts["environment"], config.compare.model_dump(mode="json")]
        about += [str(job.facts["dataset"]), [candidate.model_dump(mode="json") for candidate in found]]
        boot = BOOT_ID.read_text(encoding="ascii").strip() if BOOT_ID.exists() else ""
        fresh = Advice(
            key=files.json_sha256(about), boot_id=boot, baseline=baseline, compare=config.compare,
            candidates=tuple(found), untried=tuple(untried), costs={}, out={},
        )  # fmt: skip
        adviser = Adviser(config, machine, job, server, session, _earlier(fresh) or fresh, started, 60 * minutes)
        interrupted = False
        try:
            adviser.measure()
        except KeyboardInterrupt:
            interrupted = True
    if memory_bytes and not interrupted:
        plans = {
            name: candidates.planned(config, machine, name, adviser.advice.called(name).settings)
            for name in adviser.advice.finalists
        }
        known = {baseline: base} | {name: plan for name, plan in plans.items() if isinstance(plan, Plan)}
        adviser.advice = adviser.advice.model_copy(
            update={"memory": memory, "batches": candidates.largest_batches(config, known, memory_bytes, PREPARED)}
        )
    write(adviser.advice)
    if add and not interrupted:
        _add(config, adviser.advice)
    if interrupted:
        raise KeyboardInterrupt(f"{FILE} keeps what is known; the same command within an hour goes on from it")


def _fitting(
    config: Config, machine: Machine, found: Sequence[Candidate], memory_bytes: int
) -> tuple[list[Candidate], list[Untried]]:
    made = {one.name: candidates.planned(config, machine, one.name, one.settings) for one in found}
    plans = {name: plan for name, plan in made.items() if isinstance(plan, Plan)}
    peaks = candidates.too_large(config, plans, memory_bytes, PREPARED)
    large = [
        Untried(
            technique=one.techniques[0], setting=one.name, why=f"a step would need {size(peaks[one.name])}", apart=False
        )
        for one in found
        if one.name in peaks
    ]
    return [one for one in found if one.name not in peaks], large


def _earlier(fresh: Advice) -> Advice | None:
    """Return what an interrupted run of the same job left in this boot, within the hour."""
    with suppress(ResultError, OSError):
        known = read_document(FILE, Advice, "it is left out")
        recent = time.time() - FILE.stat().st_mtime < ONE_SESSION
        if (known.key, known.boot_id) == (fresh.key, fresh.boot_id) and recent and not known.finished:
            say(f"advise: goes on from {FILE}")
            return known
    return None


def _add(config: Config, advice: Advice) -> None:
    judged = advice.judged()
    day = advice.final.session.start_utc[:10] if advice.final else ""
    settings = {name: advice.called(name).settings for name in advice.best()}
    comments = {name: f"advise, {day}: {said(judged[name])}" for name in settings}
    added = choices.add_to(config, settings, comments)
    say(f"{PARAMS_FILE}: added {', '.join(added) or 'nothing'}")


@dataclass
class Adviser:
    """A run of ``advise``."""

    config: Config
    machine: Machine
    job: Job
    server: Patient
    session: Callable[[], Session]
    advice: Advice
    started: float
    """By ``time.monotonic``."""
    seconds: float
    """The time for all of it."""
    table: LiveTable = field(default_factory=lambda: LiveTable("advise"))
    _specs: dict[str, ArmSpec] = field(default_factory=dict)

    def measure(self) -> None:
        """Go through all parts that are not complete yet."""
        self._sample([self.advice.baseline], 1.0)
        self.server.limit = max(LONGEST * self.seconds, SLOWER * self._seconds(self.advice.baseline))
        if not self.advice.steps:
            first = spoke_for(self.advice)
            slow = {
                one.name
                for one in self.advice.candidates
                if any(COMPILER in entry(name).relies_on for name in one.techniques)
            }
            self._sample(sorted(self._names(), key=lambda name: (name not in first, name in slow)), SAMPLED)
            self._budget()
        if not self.advice.complete and (running := self._running()):
            self._race(running, RACED_UNTIL)
        while not self.advice.finalists and (names := self._combinations()):
            self._race(names, COMBINED_UNTIL)
        if not self.advice.finalists:
            self._update(finalists=tuple(self._front(self._estimates())))
        if self.advice.finalists:
            self._measure_again()
        self._update(finished=True)

    def left(self, until: float = 1.0) -> float:
        """Return the seconds that are left until this share of the time is over."""
        return self.started + until * self.seconds - time.monotonic()

    def _names(self) -> list[str]:
        return [candidate.name for candidate in self.advice.candidates]

    def _running(self) -> list[str]:
        return [name for name in self._names() if name in self.advice.costs and name not in self.advice.out]

    def _update(self, **changes: Any) -> None:
        self.advice = self.advice.model_copy(update=changes)
        files.write_text(FILE, self.advice.to_json())

    def _leave_out(self, name: str, kind: Literal["beaten", "failed", "time"], why: str) -> None:
        self._update(out=self.advice.out | {name: Left(kind=kind, why=why)})
        self.table.stay()
        say(f"advise: {name}: {why}")

    def _failed(self, name: str, error: BenchError) -> None:
        """Leave out an arm that failed, unless it is the baseline's."""
        if name not in self._names():
            raise error
        self._leave_out(
            name,
            "time" if isinstance(error, OutOfTime) else "failed",
            first_line(error).removeprefix(f"{name} ").rstrip(".:"),
        )
        if isinstance(error, ServerLost) or name in self.advice.costs:  # in a round, other arms may be open
            self.server.restart()

    def _spec(self, name: str) -> ArmSpec:
        """Return the candidate's arm. Raises BenchError if it cannot be planned."""
        if name == self.advice.baseline:
            return self.job.arms[0]
        if name not in self._specs:
            asked = candidates.planned(self.config, self.machine, name, self.advice.called(name).settings)
            if isinstance(asked, str):
                raise BenchError(asked, name)
            plan = self.job.server.plan(name, asked.requested.model_dump(mode="json"))
            self._specs[name] = ArmSpec(name, "variant", name, None, self.job.server, plan)
        return self._specs[name]

    def _sample(self, names: Sequence[str], until: float) -> None:
        """Take a first sample of each, and see that its steps take the samples with which they are credited."""
        for name in names:
            if name in self.advice.costs or name in self.advice.out:
                continue
            if self.left(until) <= 0:
                self._leave_out(name, "time", "the time was over before its first sample (--minutes, --only)")
                continue
            try:
                sample = calibrate(self._spec(name))
            except BenchError as error:
                self._failed(name, error)
                continue
            window = Window.model_validate(sample.answer["window"])
            if wrong := [why.text for why in window.rejections if why.code.startswith("samples_")]:
                self._failed(name, BenchError(wrong[0], name))
                continue
            self._update(costs=self.advice.costs | {name: (sample.opening_seconds, sample.step_seconds)})
            if name == self.advice.baseline:
                self._update(**self._bound(window))
                placement = sample.answer["placement"]
                for one in self.advice.candidates:
                    if placement and {entry(technique).placement for technique in one.techniques} == {placement}:
                        self._leave_out(one.name, "beaten", f"the baseline's data are {placement} already")
            self._show(f"first sample of {name}, {sample.opening_seconds:.0f} s to start")

    def _bound(self, window: Window) -> dict[str, str]:
        """Return what binds the baseline's step, by its profile if there is one, or else by its first sample."""
        file = profile_directory(self.advice.baseline) / "profile.json"
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError):  # without a profile of this job
            profile = files.read_json(file)
            if profile["config"]["train"] == self.config.train.model_dump(mode="json"):
                finding = profile["findings"][0]
                return {"bound": BOUNDS[finding["rule"]], "why": f"{finding['text'].rstrip('.')} ({file})"}
        for figure, bound in (INPUT_WAIT, "input"), (EXCHANGE, "communication"):
            if (share := figure.of(window) or 0.0) >= NOTABLE:
                return {"bound": bound, "why": f"{percent(share, 0)} of its first window is {figure.noun}"}
        return {"why": "it does not wait for input; whether for arithmetic, launches or memory, `profile` shows"}

    def _seconds(self, name: str) -> float:
        """Return about how long an arm takes in a round."""
        opening, step = self.advice.costs[name]
        if name == self.advice.baseline:  # its first sample includes the start of the server that forks all arms
            opening = statistics.median(of[0] for of in self.advice.costs.values())
        return opening + self.advice.steps * step

    def _budget(self) -> None:
        """Choose the steps of a window, and leave out the dearest candidates, until the race has its rounds."""
        costs = self.advice.costs
        samples = [Calibration({}, *cost) for cost in costs.values()]
        steps = window_steps(self.config.bench.window_seconds, costs[self.advice.baseline][1], samples)
        self._update(steps=steps)
        running = sorted(self._running(), key=self._seconds)
        allowed = self.left(RACED_UNTIL) / RACE_ROUNDS - 2 * self._seconds(self.advice.baseline)
        while len(running) > 1 and sum(map(self._seconds, running)) > allowed:
            dear = running.pop()
            seconds = f"{self._seconds(dear):.1f} s a round"
            self._leave_out(dear, "time", f"with its {seconds}, the race would have too few rounds (--minutes, --only)")

    def _race(self, names: Sequence[str], until: float) -> None:
        """Measure rounds in which beaten candidates drop out, or go on with such rounds."""
        before = self.advice.benches[: self.advice.complete]
        (earlier,) = self.advice.benches[self.advice.complete :] or (None,)
        if earlier:
            names = [arm.variant for arm in earlier.arms if arm.variant != self.advice.baseline]
        rules = {"settled": self._beaten, "first_look": FEWEST_ROUNDS, "fewest": FEWEST_ROUNDS}
        self._rounds(
            names, self.left(until), {"turns": 1}, earlier, lambda bench: {"benches": (*before, bench)}, **rules
        )
        self._update(complete=self.advice.complete + 1)

    def _beaten(self, rounds: Rounds) -> Collection[str]:
        advice = self.advice
        race = Race.of(rounds.arms, advice.baseline, self.config.compare.margins)
        running = [name for name in race.names[1:] if name not in advice.out]
        apart = [candidate.name for candidate in advice.candidates if candidate.apart]
        for name, rival in race.beaten(running, apart).items():
            seen = ", ".join(f"{figure.word} {facts.brief(race.ratio(name, rival, figure))}" for figure in RACED)
            self._leave_out(
                name, "beaten", f"{'gains nothing over' if rival == advice.baseline else 'beaten by'} {rival}: {seen}"
            )
        return self.advice.out

    def _estimates(self) -> dict[str, tuple[float, float]]:
        """Return candidate -> its ratios so far, of speed and memory, if it trains as the baseline does and works."""
        failed = {name for name, left in self.advice.out.items() if left.kind != "beaten"}
        return {
            name: (of[THROUGHPUT].estimate or 1.0, of[MEMORY].estimate or 1.0)
            for name, of in self.advice.standing().items()
            if not self.advice.called(name).apart and name not in failed
        }

    def _front(self, estimates: Mapping[str, tuple[float, float]]) -> list[str]:
        running = {name: of for name, of in estimates.items() if name not in self.advice.out}
        return finalists(running, self.config.compare.margins)

    def _combinations(self) -> list[str]:
        """Return the arms of the next combinations: the fastest and the leanest so far, and each of them with one more
        technique that gains something. Empty if there is none, or no time."""
        advice, gaining, known = self.advice, self._estimates(), self._names()
        if advice.complete < len(advice.benches):  # interrupted
            return self._running()
        leading = self._front(gaining)
        if not leading or self.left(COMBINED_UNTIL) <= 0:
            return []
        leaders = dict.fromkeys((leading[0], leading[-1]))
        least, most = 1 + advice.margin(THROUGHPUT), 1 / (1 + advice.margin(MEMORY))
        singles = [
            name for name, of in gaining.items() if (of[0] > least or of[1] < most) and not advice.called(name).made_of
        ]
        new = {
            name: advice.called(name) for name in self._running() if advice.called(name).made_of and name not in gaining
        }
        for partner in sorted(singles, key=lambda name: -gaining[name][0] / gaining[name][1]):
            for leader in leaders:
                pair = advice.called(leader), advice.called(partner)
                one = candidates.combined(self.config, self.machine, self.job.plans[advice.baseline].requested, *pair)
                if one and one.name not in known and len(new) < AT_ONCE:
                    new[one.name] = one
        if not new:
            return []
        self._update(candidates=(*advice.candidates, *(one for name, one in new.items() if name not in known)))
        self._sample([*new], COMBINED_UNTIL)
        sampled = [name for name in self._running() if name in new]
        return [*leaders, *sampled] if sampled else self._combinations()

    def _measure_again(self) -> None:
        """Measure the finalists in rounds of the bench."""
        names, round_seconds = [*self.advice.finalists], 0.0
        while True:
            round_seconds = sum(map(self._seconds, [self.advice.baseline] * 2 + names))
            if len(names) == 1 or self.advice.final or FINAL_ROUNDS * round_seconds <= self.left():
                break
            names.pop(-1 if len(names) == 2 else 1)
        self._update(finalists=tuple(names))
        seconds = max(self.left(), (FINAL_ROUNDS + 1) * round_seconds)
        self._rounds(names, seconds, {}, self.advice.final, lambda bench: {"final": bench}, fewest=FINAL_ROUNDS)

    def _rounds(
        self,
        names: Sequence[str],
        seconds: float,
        settings: Mapping[str, Any],
        earlier: Bench | None,
        stored: Callable[[Bench], dict[str, Any]],
        **rules: Any,
    ) -> None:
        """Measure rounds, and keep them where ``stored`` says. Raises KeyboardInterrupt if they are interrupted."""
        baseline, control = self.job.arms
        specs = [self._spec(name) for name in names]
        round_seconds = sum(map(self._seconds, [self.advice.baseline] * 2 + [*names]))
        self.server.limit = max(self.server.limit, SLOWER * round_seconds)
        variants = {spec.name: spec.plan["requested"] for spec in (baseline, *specs)}
        minutes = (max(seconds, 1.0) + (earlier.seconds if earlier else 0.0)) / 60

        def keep(bench: Bench) -> None:
            self._update(**stored(bench))
            self._show(f"round {bench.rounds}", names)

        about = self.job.facts | {
            "keys": {spec.name: files.json_sha256(spec.plan) for spec in (baseline, *specs)},
            "config": self.job.facts["config"] | {"variants": variants},
        }
        bench = side_by_side(
            "advise",
            [baseline, *specs, control],
            self.config.bench.model_copy(update={"max_minutes": minutes, "max_rounds": None, **settings}),
            self.job.device,
            steps=self.advice.steps,
            round_seconds=round_seconds,
            session=self.session,
            keep=keep,
            earlier=earlier,
            failed=self._failed,
            **rules,
            **about,
        )
        self._update(**stored(bench))
        if bench.interrupted:
            raise KeyboardInterrupt

    def _show(self, news: str, measured: Collection[str] = ()) -> None:
        """Show all ratios so far, and those of what was just ``measured`` where there is no terminal."""
        ratios, out = self.advice.standing() | self.advice.judged(), self.advice.out
        rows = {"candidate": [figure.noun for figure in RACED]}
        for name in sorted(ratios, key=lambda name: name in out):
            rows[name] = [facts.brief(ratio) for ratio in ratios[name].values()] + [self.advice.state(name)]
        line = [
            f"{name} {', '.join(f'{figure.word} {facts.brief(ratio)}' for figure, ratio in ratios[name].items())}"
            for name in measured
            if name in ratios and name not in out
        ]
        self.table.show(news, self.left(), rows, line)
