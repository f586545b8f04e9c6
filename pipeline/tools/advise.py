"""The command ``advise``: which of all techniques pay for this job, on this machine, found by measuring them.

It is the bench with a list of candidates (``candidates``) and a rule that leaves arms out (``comparison.racing``). All
candidates race in short rounds; what gains something is combined; the best are measured again, in rounds that did not
choose them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from pipeline import files
from pipeline.benchmark.rounds import Rounds, calibrate, window_steps
from pipeline.benchmark.server import ArmSpec, BenchError, Server, ServerLost
from pipeline.benchmark.stage import Job, Settled, begin_session, served, side_by_side
from pipeline.comparison import looks
from pipeline.comparison.racing import FEWEST_ROUNDS, Ratios, finalists, gaining
from pipeline.errors import ConfigError, PipelineError, first_line, say
from pipeline.params import PARAMS_FILE, Config, Machine
from pipeline.results import Bench, ResultError, Session, Window, profile_directory, read_document
from pipeline.results.bench_file import ONE_SESSION
from pipeline.tools import candidates, choices
from pipeline.tools.advised import COMBINED_UNTIL, FILE, Advice, LeftOut, in_words, write
from pipeline.tools.beforehand import parse_bytes
from pipeline.tools.live_table import LiveTable, dearest, in_cells

RACED_UNTIL = 0.55
"""The share of the minutes after which the first race ends."""
SAMPLING = 0.5
"""The share of the time of a race that first samples may take."""
LONGEST, SLOWER = 1 / 8, 3
"""The share of the minutes that an answer of an arm may take, or else so many times as long as the baseline takes."""
RACE_ROUNDS, FINAL_ROUNDS = 4, 8
"""So many rounds of all candidates must fit into the race, and so many of the finalists are measured."""
AT_ONCE = 5
"""Most combinations that are tried at once."""
BOUNDS = {
    "waits_for_input": "input", "waits_for_others": "communication", "is_uneven": "communication", "idles": "launches",
    "updates": "traffic", "computes": "arithmetic",
}  # fmt: skip
"""Rule of a profile's finding -> what binds the step (``catalogue.Bound``)."""


def run(
    config: Config, machine: Machine, *, minutes: float, memory: str | None, add: bool, only: Sequence[str]
) -> None:
    """Measure what pays until about ``minutes`` after the process's start; write ``reports/advice.*``.

    ``memory``: what a step may need, such as 16GiB. ``add``: add the advice to params.yaml. ``only``: groups of
    techniques. Raises ConfigError for a wrong argument, BenchError if the baseline cannot be measured, and
    KeyboardInterrupt after an interrupt, when all is written.
    """
    with begun(config, machine, LiveTable("advise", minutes), only, memory) as adviser:
        adviser.advice = _continued(adviser.advice)
        try:
            adviser.measure()
        except KeyboardInterrupt:
            write(adviser.advice)
            again = "the same command within an hour goes on from it"
            raise KeyboardInterrupt(f"{FILE} keeps what is known; {again}") from None
    write(advice := adviser.advice)
    if add:
        day, judged = advice.final.session.start_utc[:10] if advice.final else "", advice.judged()
        settings = {name: candidates.settings_of(config, advice.candidates[name]) for name in advice.best()}
        comments = {name: f"advise, {day}: {in_words(judged[name])}" for name in settings}
        added = choices.add_to(config, settings, comments)
        say(f"{PARAMS_FILE}: added {', '.join(added) or 'nothing'}")


@contextmanager
def begun(
    config: Config, machine: Machine, table: LiveTable, only: Sequence[str] = (), memory: str | None = None
) -> Iterator[Adviser]:
    """Start the server and choose the candidates; nothing is measured yet. ``only``, ``memory``: as in ``run``."""
    baseline, session = config.compare.baseline, begin_session()
    of_baseline = config.model_copy(update={"variants": {baseline: config.variants[baseline]}})
    with served(of_baseline, machine, Server()) as job:
        most = parse_bytes(memory) if memory else 0
        known, untried = candidates.alone(config, machine, job.plans[baseline], only, most)
        chosen: dict[str, Any] = {"candidates": known, "untried": untried, "memory_bytes": most, **_bound(config)}
        empty = Advice(baseline=baseline, compare=config.compare, **chosen)
        about = [session().boot_id, job.facts["keys"], str(job.facts["dataset"]), empty.to_json()]
        key = files.json_sha256(about)
        yield Adviser(config, machine, job, session, table, empty.model_copy(update={"key": key}))


def _bound(config: Config) -> dict[str, str]:
    """Return what binds the baseline's step, and why, if there is a profile of this job."""
    file = profile_directory(config.compare.baseline) / "profile.json"
    with suppress(OSError, ValueError, KeyError, TypeError, IndexError):
        profile = files.read_json(file)
        if profile["config"]["train"] == config.train.model_dump(mode="json"):
            finding = profile["findings"][0]
            return {"bound": BOUNDS[finding["rule"]], "why": f"{finding['text'].rstrip('.')} ({file})"}
    return {}


def _continued(empty: Advice) -> Advice:
    """Return what an interrupted run of the same job left in this boot, within the hour; else ``empty``."""
    with suppress(ResultError, OSError):
        kept = read_document(FILE, Advice, "it is left out")
        if kept.key == empty.key and not kept.finished and time.time() - FILE.stat().st_mtime < ONE_SESSION:
            say(f"advise: goes on from {FILE}")
            return kept
    return empty


@dataclass
class Adviser:
    """A run of ``advise``. What it has measured is in ``advice``, which is written after each step."""

    config: Config
    machine: Machine
    job: Job
    session: Callable[[], Session]
    table: LiveTable
    advice: Advice

    def measure(self) -> None:
        """Go through all parts that are not complete yet."""
        self.sample([self.advice.baseline], math.inf)
        self.job.server.limit = max(LONGEST * self.table.seconds, SLOWER * self._seconds(self.advice.baseline))
        if not self.advice.finalists:
            if self.advice.unfinished():
                self.rounds([], self.table.left(RACED_UNTIL), FEWEST_ROUNDS, self._beaten, turns=1)
            until = COMBINED_UNTIL if self.advice.benches else RACED_UNTIL
            while self.table.left(until) > 0 and self._race(until):
                # While nothing gains, what comes late has all time but that of a few final rounds.
                finals = FINAL_ROUNDS * self._round_seconds([]) / self.table.seconds
                until = COMBINED_UNTIL if self._front() else 1 - finals
            names = self._front()
            while len(names) > 1 and FINAL_ROUNDS * self._round_seconds(names) > self.table.left():
                names.pop()
            self.update(finalists=tuple(names))
        if (best := self.advice.finalists) and (not self.advice.final or self.advice.final.interrupted):
            seconds = max(self.table.left(), (FINAL_ROUNDS + 1) * self._round_seconds(best))
            self.rounds(best, seconds, FINAL_ROUNDS, self._settled)
        self.update(batches=self._batches(), finished=True)

    def _race(self, until: float) -> bool:
        """Race the next combinations or, if there are none, what has not raced yet, beside the fastest and the leanest
        so far: take first samples, and measure rounds in which beaten candidates drop out. The dearest take no part, so
        that ``RACE_ROUNDS`` fit. Return False if all has raced."""
        front, raced, first = self._front(), self.advice.standing(), self.advice.relieving()
        leaders = list(dict.fromkeys((*front[:1], *front[-1:])))
        unraced = [name for name in self.advice.candidates if name not in raced and name not in self.advice.out]
        names = self.combine(leaders) or sorted(unraced, key=lambda name: name not in first)
        self.sample(names, SAMPLING * self.table.left(until))
        costs = {name: self._seconds(name) for name in self.running(names)}
        for name in dearest(costs, self.table.left(until) / RACE_ROUNDS - self._round_seconds(leaders), len(costs) - 1):
            why = f"with its {costs.pop(name):.1f} s a round, this race would have too few rounds"
            self.table.leave_out(name, why)
        if costs:
            self.rounds([*leaders, *costs], self.table.left(until), FEWEST_ROUNDS, self._beaten, turns=1)
        return bool(names)

    def combine(self, leaders: Sequence[str], most: int = AT_ONCE) -> list[str]:
        """Add the next combinations of a leader with one more technique that gains something to the candidates, no more
        than ``most``, and return them."""
        standing, known, untried = self._standing(), dict(self.advice.candidates), dict(self.advice.untried)
        alone, pairs = [known[name] for name in gaining(standing) if not known[name].made_of], list[str]()
        for partner, leader in product(alone, leaders):
            pair = candidates.combined(known[leader], partner)
            if pair and pair.name not in known | untried and len(pairs) < most:
                try:
                    candidates.planned(self.config, self.machine, pair, self.advice.memory_bytes)
                    known[pair.name] = pair
                    pairs.append(pair.name)
                except ConfigError as error:
                    untried[pair.name] = first_line(error)
        self.update(candidates=known, untried=untried)
        return pairs

    def _standing(self) -> dict[str, Ratios]:
        """Return the ratios so far of the candidates that train as the baseline does."""
        return {name: of for name, of in self.advice.standing().items() if not self.advice.candidates[name].apart}

    def _front(self) -> list[str]:
        return finalists({name: ratios for name, ratios in self._standing().items() if name not in self.advice.out})

    def _batches(self) -> dict[str, int]:
        """Return baseline or finalist -> the largest batch that is predicted to fit, where it can be predicted."""
        largest, most = dict[str, int](), self.advice.memory_bytes
        for name in (self.advice.baseline, *self.advice.finalists) if most else ():
            candidate = self.advice.candidates.get(name) or candidates.Candidate(name=name, added={}, techniques=())
            with suppress(PipelineError):
                plan = candidates.planned(self.config, self.machine, candidate)
                largest[name] = candidates.estimated(self.config, plan).largest_batch(most) or 0
        return largest

    def running(self, names: Iterable[str]) -> list[str]:
        """Return those that have a first sample and are not left out."""
        return [name for name in names if name in self.advice.costs and name not in self.advice.out]

    def update(self, **changes: Any) -> None:
        self.advice = self.advice.model_copy(update=changes)
        files.write_text(FILE, self.advice.to_json())

    def _leave_out(self, name: str, why: str, rival: str = "") -> None:
        self.update(out={**self.advice.out, name: LeftOut(why=why, rival=rival)})
        self.table.leave_out(name, why)

    def _failed(self, name: str, error: BenchError) -> None:
        """Leave out an arm that failed, unless it is of the baseline. What it has beaten is not beaten any more."""
        if name not in self.advice.candidates:
            raise error
        self.update(out={other: of for other, of in self.advice.out.items() if of.rival != name})
        self._leave_out(name, error.reason)
        if isinstance(error, ServerLost) or name in self.advice.costs:  # in a round, other arms may be open
            self.job.server.restart()

    def _spec(self, name: str) -> ArmSpec:
        """Return the candidate's arm. Raises BenchError if it cannot be planned."""
        if name == self.advice.baseline:
            return self.job.arms[0]
        settings = candidates.settings_of(self.config, self.advice.candidates[name])
        return ArmSpec.of_variant(name, self.job.server, self.job.server.plan(name, settings))

    def sample(self, names: Sequence[str], seconds: float) -> None:
        """Take a first sample of each that has none, and see that its steps take the samples with which they are
        credited. After ``seconds``, no further sample begins. The first sample of all, the baseline's, gives the steps
        of a window."""
        ends = time.monotonic() + seconds
        for name in names:
            if name in self.advice.costs or name in self.advice.out or time.monotonic() >= ends:
                continue
            try:
                spec = self._spec(name)
                if not self.advice.costs:
                    calibrate(spec)  # this start includes that of the process that forks all arms
                first = calibrate(spec)
                for rejection in Window.model_validate(first.answer["window"]).rejections:
                    if rejection.code.startswith("samples_"):
                        raise BenchError(rejection.text, name)
            except BenchError as error:
                self._failed(name, error)
                continue
            opening, step = first.opening_seconds, first.step_seconds
            steps = self.advice.steps or window_steps(self.config.bench.window_seconds, step, [opening])
            self.update(steps=steps, costs={**self.advice.costs, name: (opening, step)})
            self._show(f"first sample of {name}, {opening:.0f} s to start")

    def _seconds(self, name: str) -> float:
        """Return about how long an arm takes in a round."""
        opening, step = self.advice.costs[name]
        return opening + self.advice.steps * step

    def _round_seconds(self, names: Sequence[str]) -> float:
        """Return about how long a round takes of the baseline, its control and these candidates."""
        return sum(map(self._seconds, (self.advice.baseline, self.advice.baseline, *names)))

    def _beaten(self, rounds: Rounds) -> Collection[str]:
        race = self.advice.race(rounds.arms)
        for name, rival in race.beaten(self.running(race.names[1:]), self.advice.tried(apart=True)).items():
            how = "gains nothing over" if rival == self.advice.baseline else "beaten by"
            self._leave_out(name, f"{how} {rival}: {in_cells(race.ratios(name, rival))}", rival)
        return self.advice.out

    def _settled(self, rounds: Rounds) -> Collection[str]:
        return looks.settled(rounds.arms, self.config.compare) | self.advice.out.keys()

    def rounds(self, names: Sequence[str], seconds: float, fewest: int, settled: Settled, **settings: Any) -> None:
        """Measure rounds of the baseline, its control and these candidates, or go on with unfinished rounds, whose time
        counts: at least ``fewest``, until all are ``settled``. Raises KeyboardInterrupt if they are interrupted."""
        (baseline, control), earlier = self.job.arms, self.advice.unfinished()
        if earlier:
            names = [arm.variant for arm in earlier.arms if arm.variant != self.advice.baseline]
        limits = {"max_minutes": max(seconds, 1.0) / 60, "max_rounds": None}
        bench = side_by_side(
            "advise",
            [baseline, *map(self._spec, names), control],
            self.config.bench.model_copy(update=limits | settings),
            self.job.device,
            steps=self.advice.steps,
            round_seconds=self._round_seconds(names),
            session=self.session,
            keep=self._keep,
            earlier=earlier,
            failed=self._failed,
            settled=settled,
            fewest=fewest,
            **self.job.facts | {"budget": "--minutes"},
        )
        self._keep(bench)
        if bench.interrupted:
            raise KeyboardInterrupt

    def _keep(self, bench: Bench) -> None:
        complete = tuple(earlier for earlier in self.advice.benches if not earlier.interrupted)
        self.update(**{"final": bench} if self.advice.finalists else {"benches": (*complete, bench)})
        self._show(f"round {bench.rounds}")

    def _show(self, news: str) -> None:
        ratios, out = {**self.advice.standing(), **self.advice.judged()}, self.advice.out
        shown: Mapping[str, Ratios] = {name: ratios[name] for name in sorted(ratios, key=lambda name: name in out)}
        self.table.show(news, shown, {name: left_out.why for name, left_out in out.items()})
