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
from pipeline.comparison.racing import FEWEST_ROUNDS, RACED, Race, Ratios, finalists, gaining
from pipeline.errors import PipelineError, say
from pipeline.files import PREPARED
from pipeline.params import PARAMS_FILE, Config, Machine
from pipeline.report import facts
from pipeline.results import Bench, ResultError, Session, Window, profile_directory, read_document
from pipeline.results.bench_file import ONE_SESSION
from pipeline.tools import candidates, choices
from pipeline.tools.advised import FILE, Advice, Kind, LeftOut, in_words, write
from pipeline.tools.beforehand import parse_bytes
from pipeline.tools.candidates import Candidate
from pipeline.tools.live_table import LiveTable, dearest

RACED_UNTIL, COMBINED_UNTIL = 0.55, 0.7
"""The shares of the minutes after which the race and the combinations end. The finalists have the rest, and more if
they need it."""
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
        settings = {name: candidates.settings_of(config, advice.candidates[name].added) for name in advice.best()}
        added = choices.add_to(
            config, settings, {name: f"advise, {day}: {in_words(judged[name])}" for name in settings}
        )
        say(f"{PARAMS_FILE}: added {', '.join(added) or 'nothing'}")


@contextmanager
def begun(
    config: Config, machine: Machine, table: LiveTable, only: Sequence[str] = (), memory: str | None = None
) -> Iterator[Adviser]:
    """Start the server and choose the candidates; nothing is measured yet. ``only``, ``memory``: as in ``run``."""
    baseline, session = config.compare.baseline, begin_session()
    of_baseline = config.model_copy(update={"variants": {baseline: config.variants[baseline]}})
    with served(of_baseline, machine, Server()) as job:
        known, untried = candidates.alone(config, machine, job.plans[baseline], only, PREPARED, memory)
        out = {name: LeftOut(kind="untried", why=why) for name, why in untried.items()}
        empty = Advice(baseline=baseline, compare=config.compare, candidates=known, out=out, memory=memory)
        empty = empty.model_copy(update=_bound(config))
        about = [session().boot_id, job.facts["keys"], str(job.facts["dataset"]), empty.to_json()]
        empty = empty.model_copy(update={"key": files.json_sha256(about)})
        yield Adviser(config, machine, job, session, table, empty)


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
            if not self.advice.benches or self.advice.unfinished():
                first = self.advice.relieving()
                self._race(sorted(self.advice.candidates, key=lambda name: name not in first), RACED_UNTIL)
            while self.table.left(COMBINED_UNTIL) > 0 and (pairs := self.combinations(self._leaders())):
                self._race([*self._leaders(), *pairs], COMBINED_UNTIL)
            self._race_late()
            names = self._front()
            while len(names) > 1 and FINAL_ROUNDS * self._round_seconds(names) > self.table.left():
                names.pop()
            self.update(finalists=tuple(names))
        if (best := self.advice.finalists) and (not self.advice.final or self.advice.final.interrupted):
            seconds = max(self.table.left(), (FINAL_ROUNDS + 1) * self._round_seconds(best))
            self.rounds(best, seconds, FINAL_ROUNDS, self._settled)
        if self.advice.memory:
            self.update(batches=self._batches(parse_bytes(self.advice.memory)))
        self.update(finished=True)

    def _race(self, names: Sequence[str], until: float, fewest: int = RACE_ROUNDS) -> None:
        """Take first samples, and measure rounds in which beaten candidates drop out, or go on with such rounds. Of
        those that have not raced before, the dearest take no part, so that ``fewest`` rounds fit."""
        if earlier := self.advice.unfinished():
            running = [arm.variant for arm in earlier.arms if arm.variant != self.advice.baseline]
        else:
            raced = self.advice.standing()
            self.sample(names, SAMPLING * self.table.left(until))
            costs = {name: self._seconds(name) for name in self.running(names) if name not in raced}
            others = self._round_seconds([name for name in names if name in raced])
            for name in dearest(costs, self.table.left(until) / fewest - others, len(costs) - 1):
                why = f"with its {costs[name]:.1f} s a round, the race would have too few rounds (--minutes, --only)"
                self._leave_out(name, "time", why)
            running = self.running(names)
        if running:
            self.rounds(running, self.table.left(until), FEWEST_ROUNDS, self._beaten, turns=1)

    def _race_late(self) -> None:
        """Race what there was no time for, in the time that the final rounds leave."""
        front = self._front() or [self.advice.baseline]
        until = 1 - FINAL_ROUNDS * self._round_seconds(front) / self.table.seconds
        raced, kind = self.advice.standing(), self.advice.kind
        # A candidate that is not left out has begun to be late in a run that was interrupted.
        late = [name for name in self.advice.candidates if name not in raced and kind(name) in ("", "time")]
        if late and self.table.left(until) > 0:
            self.update(out={name: left_out for name, left_out in self.advice.out.items() if name not in late})
            self._race(late, until, fewest=FEWEST_ROUNDS)

    def _leaders(self) -> list[str]:
        """Return the fastest and the leanest so far."""
        front = self._front()
        return list(dict.fromkeys((*front[:1], *front[-1:])))

    def combinations(self, leaders: Sequence[str], most: int = AT_ONCE) -> list[str]:
        """Return the next combinations of a leader with one more technique that gains something, no more than
        ``most``."""
        standing, known = self._standing(), self.advice.candidates
        memory_bytes = parse_bytes(self.advice.memory) if self.advice.memory else 0
        alone = [known[name] for name in gaining(standing) if not known[name].made_of]
        pairs = dict[str, Candidate]()
        for partner, leader in product(alone, leaders):
            pair = candidates.combined(self.config, self.machine, known[leader], partner)
            if not pair or pair.name in {*standing, *self.advice.out, *pairs} or len(pairs) == most:
                continue
            plan = candidates.planned(self.config, self.machine, pair.name, pair.added)
            if why := candidates.too_large(self.config, plan, memory_bytes, PREPARED):
                self._leave_out(pair.name, "untried", why)
            else:
                pairs[pair.name] = pair
        self.update(candidates={**known, **pairs})
        return [*pairs]

    def _standing(self) -> dict[str, Ratios]:
        """Return the ratios so far of the candidates that train as the baseline does and work."""
        standing, known = self.advice.standing().items(), self.advice.candidates
        return {name: of for name, of in standing if not known[name].apart and self.advice.kind(name) in ("", "beaten")}

    def _front(self) -> list[str]:
        return finalists({name: ratios for name, ratios in self._standing().items() if name not in self.advice.out})

    def _batches(self, memory_bytes: int) -> dict[str, int]:
        """Return baseline or finalist -> the largest batch that is predicted to fit, where it can be predicted."""
        largest = {}
        for name in (self.advice.baseline, *self.advice.finalists):
            added = self.advice.candidates[name].added if name in self.advice.candidates else {}
            with suppress(PipelineError):
                plan = candidates.planned(self.config, self.machine, name, added)
                largest[name] = candidates.estimated(self.config, plan, PREPARED).largest_batch(memory_bytes) or 0
        return largest

    def running(self, names: Iterable[str]) -> list[str]:
        """Return those that have a first sample and are not left out."""
        return [name for name in names if name in self.advice.costs and name not in self.advice.out]

    def update(self, **changes: Any) -> None:
        self.advice = self.advice.model_copy(update=changes)
        files.write_text(FILE, self.advice.to_json())

    def _leave_out(self, name: str, kind: Kind, why: str, rival: str = "") -> None:
        self.update(out={**self.advice.out, name: LeftOut(kind=kind, why=why, rival=rival)})
        self.table.leave_out(name, why)

    def _failed(self, name: str, error: BenchError) -> None:
        """Leave out an arm that failed, unless it is the baseline's. What it has beaten is not beaten any more."""
        if name not in self.advice.candidates:
            raise error
        self.update(out={other: of for other, of in self.advice.out.items() if of.rival != name})
        self._leave_out(name, "failed", error.reason)
        if isinstance(error, ServerLost) or name in self.advice.costs:  # in a round, other arms may be open
            self.job.server.restart()

    def _spec(self, name: str) -> ArmSpec:
        """Return the candidate's arm. Raises BenchError if it cannot be planned."""
        if name == self.advice.baseline:
            return self.job.arms[0]
        settings = candidates.settings_of(self.config, self.advice.candidates[name].added)
        return ArmSpec.of_variant(name, self.job.server, self.job.server.plan(name, settings))

    def sample(self, names: Sequence[str], seconds: float) -> None:
        """Take a first sample of each that has none, and see that its steps take the samples with which they are
        credited. After ``seconds``, no further sample begins."""
        ends = time.monotonic() + seconds
        for name in names:
            if name in self.advice.costs or name in self.advice.out:
                continue
            if time.monotonic() >= ends:
                self._leave_out(name, "time", "the time was over before its first sample (--minutes, --only)")
                continue
            try:
                spec = self._spec(name)
                if name == self.advice.baseline:
                    calibrate(spec)  # its start includes that of the process that forks all arms
                sample = calibrate(spec)
                if name == self.advice.baseline:
                    window, starts = self.config.bench.window_seconds, [sample.opening_seconds]
                    self.update(steps=window_steps(window, sample.step_seconds, starts))
                for rejection in Window.model_validate(sample.answer["window"]).rejections:
                    if rejection.code.startswith("samples_"):
                        raise BenchError(rejection.text, name)
            except BenchError as error:
                self._failed(name, error)
            else:
                self.update(costs={**self.advice.costs, name: (sample.opening_seconds, sample.step_seconds)})
                self._show(f"first sample of {name}, {sample.opening_seconds:.0f} s to start")

    def _seconds(self, name: str) -> float:
        """Return about how long an arm takes in a round."""
        opening, step = self.advice.costs[name]
        return opening + self.advice.steps * step

    def _round_seconds(self, names: Sequence[str]) -> float:
        """Return about how long a round takes of the baseline, its control and these candidates."""
        return sum(map(self._seconds, (self.advice.baseline, self.advice.baseline, *names)))

    def _beaten(self, rounds: Rounds) -> Collection[str]:
        race = Race.of(rounds.arms, self.advice.baseline, self.config.compare.margins)
        running = [name for name in race.names[1:] if name not in self.advice.out]
        known = self.advice.candidates.values()
        no_rivals = [one.name for one in known if one.apart or self.advice.kind(one.name) == "failed"]
        for name, rival in race.beaten(running, no_rivals).items():
            ratios = ", ".join(f"{figure.word} {facts.brief(race.ratio(name, rival, figure))}" for figure in RACED)
            how = "gains nothing over" if rival == self.advice.baseline else "beaten by"
            self._leave_out(name, "beaten", f"{how} {rival}: {ratios}", rival)
        return self.advice.out

    def _settled(self, rounds: Rounds) -> Collection[str]:
        return looks.settled(rounds.arms, self.config.compare) | self.advice.out.keys()

    def rounds(self, names: Sequence[str], seconds: float, fewest: int, settled: Settled, **settings: Any) -> None:
        """Measure rounds of the baseline, its control and these candidates, at least ``fewest``, until all are
        ``settled``. Raises KeyboardInterrupt if they are interrupted."""
        (baseline, control), earlier = self.job.arms, self.advice.unfinished()
        minutes = (max(seconds, 1.0) + (earlier.seconds if earlier else 0.0)) / 60
        bench = side_by_side(
            "advise",
            [baseline, *map(self._spec, names), control],
            self.config.bench.model_copy(update={"max_minutes": minutes, "max_rounds": None, **settings}),
            self.job.device,
            steps=self.advice.steps,
            round_seconds=self._round_seconds(names),
            session=self.session,
            keep=self._keep,
            earlier=earlier,
            failed=self._failed,
            settled=settled,
            first_look=fewest,
            fewest=fewest,
            **self.job.facts,
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
