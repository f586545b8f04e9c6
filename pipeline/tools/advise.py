"""The command ``advise``: which of all techniques pay for this job, on this machine, found by measuring them.

It is the bench with a list of candidates (``candidates``) and a rule that leaves arms out (``comparison.racing``). All
candidates race in short rounds; what gains something is combined; the best are measured again, in rounds that did not
choose them.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from pipeline import files
from pipeline.benchmark.rounds import Rounds, calibrate, window_steps
from pipeline.benchmark.server import ArmSpec, BenchError, OutOfTime, Server, ServerLost
from pipeline.benchmark.stage import Job, begin_session, served, side_by_side
from pipeline.comparison.racing import FEWEST_ROUNDS, RACED, Race, finalists
from pipeline.errors import say
from pipeline.files import PREPARED
from pipeline.pages import percent
from pipeline.params import PARAMS_FILE, Config, Machine, entry
from pipeline.report import facts
from pipeline.results import Bench, ResultError, Session, Window, profile_directory, read_document
from pipeline.results.bench_file import ONE_SESSION
from pipeline.results.figures import EXCHANGE, INPUT_WAIT, MEMORY, THROUGHPUT
from pipeline.tools import candidates, choices
from pipeline.tools.advised import FILE, Advice, LeftOut, in_words, relieving, write
from pipeline.tools.beforehand import parse_bytes
from pipeline.tools.candidates import Candidate
from pipeline.tools.live_table import LiveTable, dearest

SAMPLED, RACED_UNTIL, COMBINED_UNTIL = 0.3, 0.55, 0.7
"""The shares of the minutes after which first samples, the race and the combinations end. The finalists have the rest,
and more if they need it."""
LATE_SAMPLED, LATE_UNTIL = 0.8, 0.95
"""If there is no finalist: the same shares for first samples and a race of those that had no first sample before. There
is no time to measure the best of them again, so they are not advised."""
LONGEST = 1 / 8
"""The share of the minutes that an arm may take in a round."""
FIRST_SECONDS = 300.0
"""However few the minutes are, the baseline may take so long for its first sample."""
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
    table, memory_bytes = LiveTable("advise", minutes, age_seconds), parse_bytes(memory) if memory else None
    interrupted = False
    with begun(config, machine, table, max(FIRST_SECONDS, table.seconds), only, memory) as adviser:
        adviser.advice = _continued(adviser.advice)
        try:
            adviser.measure()
            if memory_bytes:
                finalists = map(adviser.advice.candidate, adviser.advice.finalists)
                plans = {**adviser.job.plans, **candidates.plans_of(config, machine, finalists)}
                adviser.update(batches=candidates.largest_batches(config, plans, memory_bytes, PREPARED))
            adviser.update(finished=True)
        except KeyboardInterrupt:
            interrupted = True
    write(adviser.advice)
    if interrupted:
        raise KeyboardInterrupt(f"{FILE} keeps what is known; the same command within an hour goes on from it")
    if add:
        _add(config, adviser.advice)


@contextmanager
def begun(
    config: Config,
    machine: Machine,
    table: LiveTable,
    limit: float,
    only: Sequence[str] = (),
    memory: str | None = None,
) -> Iterator[Adviser]:
    """Start the server, whose arms may take ``limit`` seconds each, and choose the candidates; nothing is measured yet.
    ``only``, ``memory``: as in ``run``."""
    baseline, session = config.compare.baseline, begin_session()
    of_baseline = config.model_copy(update={"variants": {baseline: config.variants[baseline]}})
    with served(of_baseline, machine, server := Patient(limit)) as job:
        most = parse_bytes(memory) if memory else None
        tried, untried = candidates.alone(config, machine, job.plans[baseline], only, PREPARED, most)
        about = [job.facts["keys"], job.facts["environment"], config.compare.model_dump(mode="json")]
        about += [str(job.facts["dataset"]), [candidate.model_dump(mode="json") for candidate in tried]]
        empty = Advice(
            key=files.json_sha256(about), boot_id=session().boot_id or "", baseline=baseline, compare=config.compare,
            candidates=tuple(tried), untried=tuple(untried), costs={}, out={}, memory=memory,
        )  # fmt: skip
        yield Adviser(config, machine, job, server, session, table, empty)


def _continued(empty: Advice) -> Advice:
    """Return what an interrupted run of the same job left in this boot, within the hour; else ``empty``."""
    with suppress(ResultError, OSError):
        kept = read_document(FILE, Advice, "it is left out")
        recent = time.time() - FILE.stat().st_mtime < ONE_SESSION
        if (kept.key, kept.boot_id) == (empty.key, empty.boot_id) and recent and not kept.finished:
            say(f"advise: goes on from {FILE}")
            return kept
    return empty


def _add(config: Config, advice: Advice) -> None:
    judged = advice.judged()
    day = advice.final.session.start_utc[:10] if advice.final else ""
    settings = {name: advice.candidate(name).settings for name in advice.best()}
    comments = {name: f"advise, {day}: {in_words(judged[name])}" for name in settings}
    added = choices.add_to(config, settings, comments)
    say(f"{PARAMS_FILE}: added {', '.join(added) or 'nothing'}")


@dataclass
class Adviser:
    """A run of ``advise``. What it has measured is in ``advice``, which is written after each step."""

    config: Config
    machine: Machine
    job: Job
    server: Patient
    session: Callable[[], Session]
    table: LiveTable
    advice: Advice
    _specs: dict[str, ArmSpec] = field(default_factory=dict)

    def measure(self) -> None:
        """Go through all parts that are not complete yet."""
        baseline = self.advice.baseline
        self.sample([baseline], 1.0)
        self.server.limit = max(LONGEST * self.table.seconds, SLOWER * self._seconds(baseline))
        if not self.advice.steps:
            self.sample(self._order(), SAMPLED)
            self.choose_steps()
            self._budget(RACED_UNTIL, RACE_ROUNDS)
        if not self.advice.complete() and (running := self.running()):
            self._race(running, RACED_UNTIL)
        while not self.advice.finalists and (names := self._combinations()):
            self._race(names, COMBINED_UNTIL)
        if not self.advice.finalists:
            self.update(finalists=tuple(self._front(self._estimates())))
        if self.advice.finalists:
            self._measure_again()
        elif late := self._unsampled():
            self.update(out={name: why for name, why in self.advice.out.items() if name not in late})
            self.sample(late, LATE_SAMPLED)
            self._budget(LATE_UNTIL, FEWEST_ROUNDS)
            if self.advice.costs.keys() & set(late) & set(running := self.running()):
                self._race(running, LATE_UNTIL)

    def _order(self) -> list[str]:
        """Return the candidates in the order of their first samples: first what relieves what binds the step, then one
        value of each technique before further values, and last what compiles."""
        first, values = relieving(self.advice), Counter[tuple[str, ...]]()
        rank: dict[str, tuple[bool, int, bool]] = {}
        for candidate in self.advice.candidates:
            rank[candidate.name] = candidate.name not in first, values[candidate.techniques], candidate.compiles
            values[candidate.techniques] += 1
        return sorted(rank, key=lambda name: rank[name])

    def _unsampled(self) -> list[str]:
        """Return the candidates for whose first sample there was no time."""
        out = self.advice.out
        return [
            name for name in self._order() if name in out and out[name].kind == "time" and name not in self.advice.costs
        ]

    def running(self) -> list[str]:
        advice = self.advice
        return [name for name in advice.names() if name in advice.costs and name not in advice.out]

    def update(self, **changes: Any) -> None:
        self.advice = self.advice.model_copy(update=changes)
        files.write_text(FILE, self.advice.to_json())

    def _leave_out(self, name: str, kind: Literal["beaten", "failed", "time"], why: str) -> None:
        self.update(out=self.advice.out | {name: LeftOut(kind=kind, why=why)})
        self.table.leave_out(name, why)

    def _failed(self, name: str, error: BenchError) -> None:
        """Leave out an arm that failed, unless it is the baseline's."""
        if name not in self.advice.names():
            raise error
        self._leave_out(name, "time" if isinstance(error, OutOfTime) else "failed", error.reason)
        if isinstance(error, ServerLost) or name in self.advice.costs:  # in a round, other arms may be open
            self.server.restart()

    def _spec(self, name: str) -> ArmSpec:
        """Return the candidate's arm. Raises BenchError if it cannot be planned."""
        if name == self.advice.baseline:
            return self.job.arms[0]
        if name not in self._specs:
            proposed = candidates.planned(self.config, self.machine, name, self.advice.candidate(name).settings)
            if isinstance(proposed, str):
                raise BenchError(proposed, name)
            plan = self.job.server.plan(name, proposed.requested.model_dump(mode="json"))
            self._specs[name] = ArmSpec.of_variant(name, self.job.server, plan)
        return self._specs[name]

    def sample(self, names: Sequence[str], until: float) -> None:
        """Take a first sample of each that has none."""
        for name in names:
            if name in self.advice.costs or name in self.advice.out:
                continue
            if self.table.left(until) <= 0:
                self._leave_out(name, "time", "the time was over before its first sample (--minutes, --only)")
                continue
            try:
                self._first_sample(name)
            except BenchError as error:
                self._failed(name, error)

    def _first_sample(self, name: str) -> None:
        """Take a first sample, and see that its steps take the samples with which they are credited."""
        sample = calibrate(self._spec(name))
        window = Window.model_validate(sample.answer["window"])
        for rejection in window.rejections:
            if rejection.code.startswith("samples_"):
                raise BenchError(rejection.text, name)
        self.update(costs=self.advice.costs | {name: (sample.opening_seconds, sample.step_seconds)})
        if name == self.advice.baseline:
            self.update(**self._bound(window))
            placement = sample.answer["placement"]
            for candidate in self.advice.candidates:
                if placement and {entry(technique).placement for technique in candidate.techniques} == {placement}:
                    self._leave_out(candidate.name, "beaten", f"the baseline's data are {placement} already")
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
            opening = statistics.median(opening for opening, _ in self.advice.costs.values())
        return opening + self.advice.steps * step

    def _round_seconds(self, names: Sequence[str]) -> float:
        """Return about how long a round takes of the baseline, its control and these candidates."""
        return 2 * self._seconds(self.advice.baseline) + sum(map(self._seconds, names))

    def choose_steps(self) -> None:
        openings = [opening for opening, _ in self.advice.costs.values()]
        step_seconds = self.advice.costs[self.advice.baseline][1]
        self.update(steps=window_steps(self.config.bench.window_seconds, step_seconds, openings))

    def _budget(self, until: float, rounds: int) -> None:
        """Leave out the dearest candidates, until the race has so many rounds."""
        costs = {name: self._seconds(name) for name in self.running()}
        allowed = self.table.left(until) / rounds - self._round_seconds(())
        for name in dearest(costs, allowed, len(costs) - 1):
            seconds = f"{costs[name]:.1f} s a round"
            self._leave_out(name, "time", f"with its {seconds}, the race would have too few rounds (--minutes, --only)")

    def _race(self, names: Sequence[str], until: float) -> None:
        """Measure rounds in which beaten candidates drop out, or go on with such rounds."""
        complete = self.advice.complete()
        (earlier,) = self.advice.benches[len(complete) :] or (None,)
        if earlier:
            names = [arm.variant for arm in earlier.arms if arm.variant != self.advice.baseline]
        rules = {"settled": self._beaten, "first_look": FEWEST_ROUNDS, "fewest": FEWEST_ROUNDS}
        self.rounds(
            names,
            self.table.left(until),
            earlier,
            lambda bench: self.update(benches=(*complete, bench)),
            {"turns": 1},
            **rules,
        )

    def _beaten(self, rounds: Rounds) -> Collection[str]:
        advice = self.advice
        race = Race.of(rounds.arms, advice.baseline, self.config.compare.margins)
        running = [name for name in race.names[1:] if name not in advice.out]
        apart = [candidate.name for candidate in advice.candidates if candidate.apart]
        for name, rival in race.beaten(running, apart).items():
            ratios = ", ".join(f"{figure.word} {facts.brief(race.ratio(name, rival, figure))}" for figure in RACED)
            how = "gains nothing over" if rival == advice.baseline else "beaten by"
            self._leave_out(name, "beaten", f"{how} {rival}: {ratios}")
        return self.advice.out

    def _estimates(self) -> dict[str, tuple[float, float]]:
        """Return candidate -> its ratios so far, of speed and memory, if it trains as the baseline does and works."""
        failed = {name for name, left_out in self.advice.out.items() if left_out.kind != "beaten"}
        return {
            name: (ratios[THROUGHPUT].estimate or 1.0, ratios[MEMORY].estimate or 1.0)
            for name, ratios in self.advice.standing().items()
            if not self.advice.candidate(name).apart and name not in failed
        }

    def _front(self, estimates: Mapping[str, tuple[float, float]]) -> list[str]:
        running = {name: ratios for name, ratios in estimates.items() if name not in self.advice.out}
        return finalists(running, self.config.compare.margins)

    def _combinations(self) -> list[str]:
        """Return the arms of the next combinations: the fastest and the leanest so far, and each of them with one more
        technique that gains something. Empty if there is none, or no time."""
        advice, estimates = self.advice, self._estimates()
        if len(advice.complete()) < len(advice.benches):  # interrupted
            return self.running()
        leading = self._front(estimates)
        if not leading or self.table.left(COMBINED_UNTIL) <= 0:
            return []
        leaders = dict.fromkeys((leading[0], leading[-1]))
        least, most = 1 + advice.margin(THROUGHPUT), 1 / (1 + advice.margin(MEMORY))
        gains = {name: speed / memory for name, (speed, memory) in estimates.items() if speed > least or memory < most}
        singles = sorted((name for name in gains if not advice.candidate(name).made_of), key=lambda name: -gains[name])
        unraced = {name for name in self.running() if advice.candidate(name).made_of and name not in estimates}
        base, pairs = self.job.plans[advice.baseline].requested, dict[str, Candidate]()
        for partner, leader in product(map(advice.candidate, singles), map(advice.candidate, leaders)):
            pair = candidates.combined(self.config, self.machine, base, leader, partner)
            if pair and pair.name not in advice.names() and len(unraced) + len(pairs) < AT_ONCE:
                pairs[pair.name] = pair
        if not unraced and not pairs:
            return []
        self.update(candidates=(*advice.candidates, *pairs.values()))
        self.sample([*pairs], COMBINED_UNTIL)
        sampled = [name for name in self.running() if name in unraced or name in pairs]
        return [*leaders, *sampled] if sampled else self._combinations()

    def _measure_again(self) -> None:
        """Measure the finalists in rounds of the bench."""
        names = [*self.advice.finalists]
        while (
            len(names) > 1 and not self.advice.final and FINAL_ROUNDS * self._round_seconds(names) > self.table.left()
        ):
            names.pop(-1 if len(names) == 2 else 1)
        self.update(finalists=tuple(names))
        seconds = max(self.table.left(), (FINAL_ROUNDS + 1) * self._round_seconds(names))
        self.rounds(names, seconds, self.advice.final, lambda bench: self.update(final=bench), {}, fewest=FINAL_ROUNDS)

    def rounds(
        self,
        names: Sequence[str],
        seconds: float,
        earlier: Bench | None,
        record: Callable[[Bench], None],
        settings: Mapping[str, Any],
        **rules: Any,
    ) -> None:
        """Measure rounds, and ``record`` them after each. Raises KeyboardInterrupt if they are interrupted."""
        baseline, control = self.job.arms
        specs = [self._spec(name) for name in names]
        round_seconds = self._round_seconds(names)
        self.server.limit = max(self.server.limit, SLOWER * round_seconds)
        variants = {spec.name: spec.plan["requested"] for spec in (baseline, *specs)}
        minutes = (max(seconds, 1.0) + (earlier.seconds if earlier else 0.0)) / 60

        def keep(bench: Bench) -> None:
            record(bench)
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
        record(bench)
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
        self.table.show(news, rows, line)
