"""The command ``try``: within a few minutes, a first and provisional ranking of the variants, which ends on time.

It measures rounds by the rules of the bench, and keeps them where a later bench of the same session can go on from
them. No verdict is made.
"""

from __future__ import annotations

import math
import select
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline import files
from pipeline.benchmark.rounds import FEWEST_STEPS, Calibration, calibrate, window_steps
from pipeline.benchmark.server import ArmSpec, BenchError, OutOfTime, Server
from pipeline.benchmark.stage import Job, begin_session, file_name, served, side_by_side, unfinished
from pipeline.comparison import looks, planning
from pipeline.comparison.planning import LONGEST_MINUTES, RoundCost
from pipeline.comparison.stats import Difference
from pipeline.comparison.verdicts import SURE
from pipeline.errors import ConfigError, count, did_you_mean, hanging, say
from pipeline.params import Config, Machine
from pipeline.report import facts
from pipeline.results import KEPT_BENCHES, Arm, Bench, Session, Window
from pipeline.results.bench_file import FEWEST_PAIRS
from pipeline.results.figures import THROUGHPUT, Figure
from pipeline.results.rejections import advised
from pipeline.tools.live_table import LiveTable, dearest, in_cells

SAMPLING, SAMPLE = 1 / 2, 1 / 3
"""All first samples together, and each of them, may take these shares of the time that is left before them."""
ROUNDS = 4
"""Variants are dropped if they leave no time for so many rounds, which show the side of an effect of a half in almost
all looks (docs/how-we-know/measuring.md)."""
SHORT = KEPT_BENCHES / "short"
"""Rounds of short windows. No bench goes on from them: all of its windows would be short, and tell less a minute."""
ANSWER_SECONDS = 15.0
"""How long a person may think about variants to drop. Without an answer, they are dropped."""
ENDING = 0.01, 2.0
"""The share of the minutes, and the seconds, that are kept for the end of the arms after the last round."""


def run(config: Config, machine: Machine, names: Sequence[str], *, minutes: float) -> None:
    """Measure the variants ``names`` (none: all) until ``minutes`` after the process's start, and rank them.

    Raises ConfigError for a wrong argument, BenchError if not even the baseline can be measured, and KeyboardInterrupt
    after an interrupt, when the ranking is printed.
    """
    table, baseline = LiveTable("try", minutes), config.compare.baseline
    for name in names:
        if name not in config.variants:
            raise ConfigError(
                f"try: found {name!r}, which is no variant of params.yaml.{did_you_mean(name, config.variants)}"
            )
    chosen = [name for name in config.variants if name == baseline or name in (names or config.variants)]
    session, server, interrupted = begin_session(), Server(), False
    ends = time.monotonic() + table.left(1 - ENDING[0]) - ENDING[1]
    look, server.deadline = Look(config, chosen, minutes, table, server, ends), ends
    say(f"try: {minutes:g} minutes for {', '.join(chosen)}, and {baseline} again as the control (A/A)")
    try:
        with served(config, machine, server) as job:
            look.measure(job, session)
    except OutOfTime as late:
        say(f"try: {late}, and was cut: {table.seconds - table.left():.0f} of {table.seconds:.0f} s are over")
    except BenchError as error:
        if baseline not in look.samples and not look.arms:
            raise
        say(f"try: {error}")
    except KeyboardInterrupt:
        interrupted = True
    say("\n".join(look.ranking()))
    if interrupted:
        raise KeyboardInterrupt(f"{count(look.rounds, 'complete round')} kept")


class _TooLong(Exception):
    """A round took longer than the first samples said, and shorter windows let more rounds fit."""


@dataclass
class Look:
    """What is known so far."""

    config: Config
    chosen: list[str]
    """The variants that are still measured, the baseline among them."""
    minutes: float
    """What the person allowed."""
    table: LiveTable
    server: Server
    ends: float
    """By ``time.monotonic``."""
    samples: dict[str, Calibration] = field(default_factory=dict)
    """Variant -> its first sample."""
    absent: dict[str, str] = field(default_factory=dict)
    """Variant that is not measured any more -> why not."""
    arms: Sequence[Arm] = ()
    """All arms with their rounds."""
    rounds: int = 0
    earlier: Bench | None = None
    """Kept rounds, from which this look goes on."""
    full: int = 0
    slowdown: float = 1.0
    round_seconds: float = 0.0
    folder: Path = KEPT_BENCHES
    kept: str = ""
    disturbed: bool = False
    """Most rounds had to be rejected because the machine was disturbed."""
    _keeps_all: bool = False
    """A person wants to drop no variant."""

    def measure(self, job: Job, session: Callable[[], Session]) -> None:
        """Go on from kept rounds, or take a first sample of each variant; then take rounds until the time is over."""
        if not self._goes_on(job, session()):
            self._sample_all(job)
            self._goes_on(job, session())  # without what was dropped, as perhaps before
        if len(self.chosen) > 1:
            self._take_rounds(job, session)

    def _goes_on(self, job: Job, now: Session) -> bool:
        names = [arm.name for arm in job.arms if arm.variant in self.chosen]
        for folder in (KEPT_BENCHES, SHORT):
            if earlier := unfinished("try", now, job, names, folder):
                self.earlier, self.folder, self.arms, self.rounds = earlier, folder, earlier.arms, earlier.rounds
                return True
        return False

    def _sample_all(self, job: Job) -> None:
        baseline = self.config.compare.baseline
        arms = {arm.variant: arm for arm in job.arms[:-1] if arm.variant in self.chosen}
        self._sample(arms.pop(baseline), SAMPLE * self.left())
        base = self.samples[baseline]
        until = time.monotonic() + SAMPLING * self.left()
        for name in arms:
            about = statistics.fmean(sample.seconds(FEWEST_STEPS) for sample in self.samples.values())
            unsampled = [arm for arm in arms if arm in self.chosen and arm not in self.samples]
            self._drop(dict.fromkeys(unsampled, about), until - time.monotonic(), "about ")
            if name in self.chosen:
                self._sample(arms[name], max(SAMPLE * self.left(), 2 * about))
        step_ms = Window.model_validate(base.answer["window"]).step_p50_ms or 1e3 * base.step_seconds
        openings = [sample.opening_seconds for sample in self.samples.values()]
        self.full = window_steps(self.config.bench.window_seconds, step_ms / 1e3, openings)
        if others := sorted(openings[1:]):  # the baseline's includes the start of the server that forks all arms
            self.samples[baseline] = base._replace(opening_seconds=min(openings[0], others[len(others) // 2]))
        self.table.stay()
        if data := job.facts["dataset"]:
            train, samples = self.config.train, self.samples.items()
            much = len(train.seeds) * train.epochs * data.train_count / 60
            minutes = (f"{name} {much * run.step_seconds / run.answer['batch_size']:.1f}" for name, run in samples)
            trained = f"{count(len(train.seeds), 'seed')} x {count(train.epochs, 'epoch')}"
            say(f"try: minutes to train {trained}, about: {', '.join(minutes)}")
        steps, _ = self._fitting()
        costs = {name: self.samples[name].seconds(steps) for name in self.chosen}
        self._drop(costs, self.left() / ROUNDS - 2 * costs.pop(baseline), "")

    def _fitting(self) -> tuple[int, float]:
        """Return the steps of a window and the seconds of a round: those of earlier rounds, or as many steps as in a
        bench, or as many fewer as let ``FEWEST_PAIRS`` rounds fit."""
        if self.earlier:
            return self.earlier.steps, self.earlier.seconds / self.earlier.rounds
        samples = [self.samples[name] for name in (*self.chosen, self.config.compare.baseline)]
        opening = self.slowdown * sum(sample.opening_seconds for sample in samples)
        step = self.slowdown * sum(sample.step_seconds for sample in samples)
        if opening + (steps := self.full) * step > self.left() / FEWEST_PAIRS:  # for one more: some are slow
            steps = max(FEWEST_STEPS, int((self.left() / (FEWEST_PAIRS + 1) - opening) / step))
        return steps, opening + steps * step

    def _take_rounds(self, job: Job, session: Callable[[], Session]) -> None:
        steps, self.round_seconds = self._fitting()
        if (fit := self.rounds + int(self.left() / self.round_seconds)) < FEWEST_PAIRS:
            missing = (FEWEST_PAIRS + 1 - self.rounds) * self.round_seconds - self.left()
            enough = math.ceil(self.minutes + missing / 60)
            say(f"try: {count(fit, 'round')} can tell only large differences; --minutes {enough} gives {FEWEST_PAIRS}")
        if self.round_seconds > self.left():
            return
        if not self.earlier and steps < self.full:
            self.folder = SHORT
            say(f"try: windows of {steps} steps, not {self.full}, so that more rounds fit; no bench goes on from these")
        seconds = self.left() + (self.earlier.seconds if self.earlier else 0.0)
        settings = {"max_minutes": seconds / 60, "max_rounds": None, "hard_limit": True}
        keys, compare = {name: job.facts["keys"][name] for name in self.chosen}, self.config.compare
        try:
            bench = side_by_side(
                "try",
                [arm for arm in job.arms if arm.variant in self.chosen],
                self.config.bench.model_copy(update=settings),
                job.device,
                steps=steps,
                round_seconds=self.round_seconds,
                session=session,
                keep=self._keep,
                earlier=self.earlier,
                settled=lambda so_far: looks.settled(so_far.arms, compare),
                memory_known=lambda so_far: looks.memory_known(so_far.arms, compare),
                **job.facts | {"keys": keys},
            )
        except _TooLong:
            self._take_rounds(job, session)
            return
        files.write_text(self.folder / file_name(bench), bench.to_json())
        if bench.interrupted:
            raise KeyboardInterrupt

    def left(self) -> float:
        """Return the seconds that are left for measuring."""
        return self.ends - time.monotonic()

    def _sample(self, arm: ArmSpec, seconds: float) -> None:
        """Take a first sample of ``arm``, unless it takes longer than ``seconds``."""
        self.server.deadline, name = min(self.ends, time.monotonic() + seconds), arm.variant
        try:
            sample = calibrate(arm)
        except OutOfTime:
            if self.left() <= 0 or not self.samples:
                raise
            self._leave_out(name, f"cut, because its start and {FEWEST_STEPS} steps take more than {seconds:.0f} s")
            self.server.deadline = self.ends
            self.server.restart()
            self.server.describe()  # the start of the server is not the next arm's
        except BenchError as error:
            if not self.samples:
                raise
            self._leave_out(name, error.reason)
        else:
            self.samples[name] = sample
            self._show(f"first sample of {name}, {sample.opening_seconds:.0f} s to start")
        self.server.deadline = self.ends

    def _drop(self, costs: Mapping[str, float], seconds: float, about: str) -> None:
        """Drop the variants that cost most until the others cost no more than ``seconds``; never the last variant. On
        a terminal, ask before. ``costs``: variant -> seconds."""
        dear = dearest(costs, seconds, len(self.chosen) - 2)
        if not dear or self._keeps_all:
            return
        listed = ", ".join(f"{name} ({about}{costs[name]:.0f} s a round)" for name in dear)
        question = f"try: {self.minutes:g} minutes do not suffice for all; drop {listed}?"
        if sys.stdin.isatty() and sys.stdout.isatty():
            say(f"{question} [Y/n] ", end="")
            self.table.stay()
            if select.select([sys.stdin], [], [], min(ANSWER_SECONDS, max(0.0, self.left())))[0]:
                self._keeps_all = sys.stdin.readline().strip().lower() in ("n", "no")
                if self._keeps_all:
                    return
            else:
                say("")
        for name in dear:
            self._leave_out(name, f"dropped: it costs {about}{costs[name]:.0f} s a round")

    def _leave_out(self, name: str, why: str) -> None:
        self.absent[name] = why
        self.chosen.remove(name)
        self.table.leave_out(name, why)

    def _keep(self, bench: Bench) -> None:
        if bench.rounds == 1 and self.left() < (ROUNDS - 1) * bench.seconds:
            self.slowdown *= bench.seconds / self.round_seconds
            if self.left() // self._fitting()[1] > 1 + self.left() // bench.seconds:
                raise _TooLong
        file = self.folder / file_name(bench)
        files.write_text(file, bench.to_json())
        self.arms, self.rounds, self.kept = bench.arms, bench.rounds, str(file)
        self._show(f"round {bench.rounds}")

    def _show(self, news: str) -> None:
        ratios, noises = self._looked_at()
        known = [figure for figure, noise in noises.items() if noise.low is not None]
        rows = {name: {figure: seen[figure] for figure in known} for name, seen in (ratios | {"A/A": noises}).items()}
        if not known:
            rows, news = {}, news + "; no ratios until A/A shows how much this machine scatters" * bool(self.rounds)
        self.table.show(news, rows, self.absent)

    @property
    def cost(self) -> RoundCost:
        seconds = (self.earlier.seconds if self.earlier else 0.0) + 60 * self.minutes - self.left()
        return RoundCost("--minutes", max(1, self.rounds), max(1.0, seconds), self.minutes)

    def _looked_at(self) -> tuple[dict[str, dict[Figure, Difference]], dict[Figure, Difference]]:
        compare, cost, samples = self.config.compare, self.cost, [sample for arm in self.arms for sample in arm.samples]
        if not samples:
            return {}, {}
        values = advised(rejection for sample in samples for rejection in sample.rejections)
        arms = [arm.advising(values) for arm in self.arms]
        ratios, noises = looks.looked_at(arms, compare, cost)
        mostly = 2 * sum(map(bool, (sample.disturbed_samples_per_second for sample in samples))) > len(samples)
        why = noises.get(THROUGHPUT, Difference()).why_untrusted
        self.disturbed = bool(mostly and why)
        if mostly and why:  # these rounds' speeds show sides beside the load that lie beyond the noise, but no sizes
            of_disturbed, noise = looks.looked_at([arm.undisturbed() for arm in arms], compare, cost, why)
            for name, ratio in of_disturbed.items():
                ratios[name][THROUGHPUT] = ratio[THROUGHPUT]
            noises[THROUGHPUT] = noise[THROUGHPUT]
        return ratios, noises

    def ranking(self) -> list[str]:
        """Return the lines of the provisional ranking, the fastest variant first."""
        ratios, noises = self._looked_at()
        speeds = {name: (seen.get(THROUGHPUT) or Difference()).estimate or 0.0 for name, seen in ratios.items()}
        width, minutes = max(map(len, self.config.variants)), f"{self.minutes:g} minute{'s' * (self.minutes != 1)}"
        basis = f"one look at {count(self.rounds, 'round')}, intervals of {100 * SURE:g}%"
        lines = [f"\nProvisional, not a verdict ({basis}); accuracy was not measured:"]
        for name in sorted(ratios, key=lambda name: -speeds[name]):
            if name not in self.absent:
                words = "; ".join(
                    self._in_words(figure, ratio, minutes) + self._enough(figure, ratio, noises[figure])
                    for figure, ratio in ratios[name].items()
                )
                lines.append(hanging(f"  {name:{width}}  ", words))
        lines += [hanging(f"  {name:{width}}  ", why) for name, why in self.absent.items()]
        unseen = [name for name in self.chosen if name not in ratios and name != self.config.compare.baseline]
        lines += [hanging(f"  {name:{width}}  ", f"cannot be told in {minutes}") for name in unseen]
        doubts = {ratio.why_untrusted for seen in ratios.values() for ratio in seen.values() if ratio.why_untrusted}
        lines += facts.sentences(sorted(doubts))
        if noises:
            lines.append(f"The baseline against itself: {in_cells(noises)}.")
        if self.kept:
            later = "another `try` of the same variants, begun within an hour, goes on from them"
            if self.folder is not SHORT:
                later += ", and so does a bench; `python -m pipeline bench --again` counts them beside others"
            lines.append(f"{self.kept} keeps the rounds: {later}.")
        return lines

    def _in_words(self, figure: Figure, ratio: Difference, minutes: str) -> str:
        """Say what a look shows of a variant's figure."""
        is_speed = figure is THROUGHPUT
        beside = " beside this load" if is_speed and self.disturbed else ""
        if ratio.decision in ("better", "worse"):
            words = ("faster", "slower") if is_speed else (f"less {figure.word}", f"more {figure.word}")
            return f"clearly {words[ratio.decision == 'worse']}{beside}: {facts.brief(ratio)}{facts.uncertain(ratio)}"
        if ratio.decision == "same":
            return f"{figure.noun} the same within {facts.margin(ratio)}: {facts.brief(ratio)}"
        interval = f": {facts.brief(ratio)}" * (ratio.low is not None)
        return f"{figure.noun} cannot be told in {minutes}{beside}{interval}"

    def _enough(self, figure: Figure, ratio: Difference, noise: Difference) -> str:
        """Say how many minutes would tell an undecided ratio, if the rounds go on as they are."""
        if ratio.decision in ("better", "worse", "same"):
            return ""
        if figure is THROUGHPUT and self.disturbed:
            return ", and a bench rejects such rounds"
        calm = planning.calm_pairs(noise, self.config.compare.max_spread, figure.fewest_pairs)
        pairs = max(ratio.pairs + (ratio.more_pairs or 0), calm or 0, figure.fewest_pairs)
        rounds = planning.rounds_for(pairs, ratio.pairs, ratio.rejected) if ratio.pairs else math.inf
        if ratio.more_pairs is None or rounds > self.cost.affordable():
            return f", nor in {LONGEST_MINUTES}, with this scatter and a margin of {facts.margin(ratio)}"
        if rounds <= self.rounds:
            return ", but a bench of as many rounds would tell"
        return f", but about {self.cost.minutes_of(int(rounds)):g} would tell"
