"""What ``advise`` has found: ``reports/advice.json``, and the pages that are made from it alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from pipeline.comparison import sessions, stats
from pipeline.comparison.racing import RACED, Race, Ratios, foremost, gain, interaction
from pipeline.comparison.stats import Difference
from pipeline.errors import count, say
from pipeline.pages import render
from pipeline.params import Compare, entry
from pipeline.report import HUES, facts, pictures, write_pages
from pipeline.results import REPORTS, Arm, Bench, Document, Record
from pipeline.results.figures import MEMORY, THROUGHPUT
from pipeline.tools.candidates import Candidate

FILE = REPORTS / "advice.json"
COMBINED_UNTIL = 0.7
"""The share of the minutes after which no race begins. The finalists have the rest, and more if they need it."""


class LeftOut(Record):
    """Why a candidate is not measured any more."""

    why: str
    rival: str = ""
    """What it is beaten by; empty if it failed."""


class Advice(Document):
    """``reports/advice.json``."""

    key: str = ""
    """Digest of boot, job, machine, code, data and candidates: a later run with the same key goes on."""
    baseline: str
    compare: Compare
    candidates: Mapping[str, Candidate]
    """By their names; the combinations last."""
    untried: Mapping[str, str] = {}
    """What cannot run here, or is not worth a try -> why."""
    costs: Mapping[str, tuple[float, float]] = {}
    """Baseline or candidate -> the seconds of its start and of a step, by its first sample."""
    steps: int = 0
    out: Mapping[str, LeftOut] = {}
    """Candidate that is not measured any more -> why."""
    benches: tuple[Bench, ...] = ()
    """The race, then later ones, of combinations and of what there was no time for."""
    finalists: tuple[str, ...] = ()
    final: Bench | None = None
    bound: str = ""
    """What binds the baseline's step by its profile (``catalogue.Bound``); empty if unknown."""
    why: str = ""
    """What shows what binds the step."""
    memory_bytes: int = 0
    """The memory into which a step must fit; 0: any."""
    batches: Mapping[str, int] = {}
    """Baseline or finalist -> the largest batch that is predicted to fit into it."""
    finished: bool = False
    ratios: Mapping[str, Mapping[str, Difference]] = {}
    """Candidate -> figure -> ratio to the baseline, as on the page; for readers of the file (``write``)."""

    def tried(self, *, apart: bool) -> list[str]:
        """Return the candidates that train as the baseline does, or those that change the training, the fastest
        first."""
        candidates, standing = self.candidates.values(), self.standing()
        names = [candidate.name for candidate in candidates if bool(candidate.apart) is apart]
        return sorted(names, key=lambda name: -gain(standing[name], THROUGHPUT) if name in standing else 0.0)

    def unfinished(self) -> Bench | None:
        """Return the bench that an interrupt ended, if any."""
        last = self.final if self.finalists else next(reversed(self.benches), None)
        return last if last and last.interrupted else None

    def state(self, name: str) -> str:
        """Say whether a candidate is still measured, and why not."""
        if name in self.out:
            return self.out[name].why
        if name not in {arm.variant for bench in self.benches for arm in bench.arms}:
            return "no time for it so far (--minutes, --only)"
        return "finalist" if name in self.finalists else "not decided" if self.finished else "not beaten"

    def race(self, arms: Sequence[Arm]) -> Race:
        """Return the race of those ``arms`` that did not fail: what fails beats nobody."""
        failed = {name for name, left_out in self.out.items() if not left_out.rival}
        return Race.of([arm for arm in arms if arm.variant not in failed], self.baseline, self.compare.margins)

    def races(self) -> list[Race]:
        return [self.race(bench.arms) for bench in self.benches]

    def standing(self) -> dict[str, Ratios]:
        """Return the ratios of the last rounds, before the final ones, in which each candidate took part."""
        return {name: race.ratios(name, self.baseline) for race in self.races() for name in race.names[1:]}

    def final_ratios(self, names: Sequence[str], below: str) -> dict[str, Ratios]:
        """Return the ratios of ``names`` to ``below`` in the finalists' rounds, decided together by the rules of the
        bench."""
        if not self.final:
            return {}
        # These rounds have at least this share of the minutes. So advice on more rounds names the minutes of a whole
        # run, which bench.max_rounds does not limit.
        limited = {"seconds": self.final.seconds / (1 - COMBINED_UNTIL), "config": {}}
        table = sessions.table_of([self.final.model_copy(update=limited)], self.compare.max_spread, {})
        of = {figure: table.compared(names, figure, figure.margin_in(self.compare.margins), below) for figure in RACED}
        return {name: {figure: of[figure][name] for figure in RACED} for name in names}

    def judged(self) -> dict[str, Ratios]:
        """Return the finalists' ratios in their own rounds; one that failed is no advice."""
        return self.final_ratios([name for name in self.finalists if name not in self.out], self.baseline)

    def against(self) -> dict[str, Ratios]:
        """Return pairs of finalists with the ratios of the first to the second."""
        pairs = combinations(self.judged(), 2)
        return {f"{above} beside {below}": self.final_ratios([above], below)[above] for above, below in pairs}

    def interactions(self) -> Iterator[tuple[Candidate, Difference, str]]:
        """Yield each combination that is surely better or worse than the product of the two that it combines, with the
        ratio to this product and the figure's noun."""
        before = self.standing()
        for race in self.races()[1:]:
            for candidate in map(self.candidates.__getitem__, race.names[1:]):
                first, second = candidate.made_of or ("", "")
                for figure in RACED if first in race.names and second in before else ():
                    ratio = interaction(race.ratios(candidate.name, first)[figure], before[second][figure])
                    if stats.decide(ratio, ratio.margin) in ("better", "worse"):
                        yield candidate, ratio, figure.noun

    def relieving(self) -> list[str]:
        """Return the candidates that relieve what binds the step."""
        tried = (self.candidates[name] for name in self.tried(apart=False))
        alone = [candidate for candidate in tried if not candidate.made_of]
        return [of.name for of in alone if any(self.bound in entry(name).relieves for name in of.techniques)]

    def best(self) -> dict[str, str]:
        """Return finalist -> when to take it: the fastest always, and the leanest if memory is short. Only what is
        surely better in the final rounds counts."""
        chosen = dict[str, str]()
        for figure, when in (THROUGHPUT, ""), (MEMORY, f" if {MEMORY.need}"):
            better = {name: ratios for name, ratios in self.judged().items() if ratios[figure].decision == "better"}
            if better:
                chosen.setdefault(foremost(better, figure), when)
        return chosen

    def sentence(self) -> str:
        """Say in one sentence what to do."""
        begun = "" if self.finished else "not finished yet; so far: "
        judged, chosen = self.judged(), self.best()
        if chosen:
            words = [f"`{name}`{when}: {in_words(judged[name])}" for name, when in chosen.items()]
            return f"{begun}take {'; '.join(words)}."
        same = {name for name, of in judged.items() if {of[figure].decision for figure in RACED} <= {"same", "worse"}}
        alike, wrong = self.tried(apart=False), f"an error in at most {stats.ERROR:.0%} of such races"
        all_tried = count(len(alike), "candidate")
        sure = f"each of {all_tried} was beaten, failed or gains less than the margin; {wrong}"
        if number := len({*alike} - self.out.keys() - same):
            sure = f"{number} of {all_tried} not decided (more minutes or a quieter machine helps)"
        return f"{begun}keep `{self.baseline}`: nothing that was tried is surely better; {sure}."


def in_words(ratios: Ratios) -> str:
    """Say how a finalist differs from the baseline."""
    return ", ".join(
        facts.change(figure.noun, ratio) + facts.uncertain(ratio)
        if ratio.decision in ("better", "worse")
        else f"{figure.noun}: {ratio.decision}"
        for figure, ratio in ratios.items()
    )


def write(advice: Advice, directory: Path = REPORTS) -> None:
    """Write the advice as JSON, Markdown and a page, all or none; print the Markdown."""
    judged, standing, best = advice.judged(), advice.standing(), advice.best()
    ratios = {name: {figure.field: ratio for figure, ratio in of.items()} for name, of in (standing | judged).items()}
    advice = advice.model_copy(update={"ratios": ratios})
    spots = [pictures.Spot(1, advice.baseline, None, None, False)]
    for number, (name, of) in enumerate((standing | judged).items(), 2):
        bare = {} if name in judged else {"low": None, "high": None}  # all intervals would hide those of the finalists
        speed, memory = (of[figure].model_copy(update=bare) for figure in RACED)
        if not advice.candidates[name].apart:
            spots.append(pictures.Spot(number, name, speed, memory, name in best))
    content: dict[str, Any] = {
        "advice": advice, "facts": facts, "raced": RACED, "judged": judged, "standing": standing,
        "doubts": sorted({ratio.why_untrusted for of in judged.values() for ratio in of.values()} - {None}),
        "front": pictures.front_of(spots), "hues": {spot.variant: f"v{(spot.number - 1) % HUES}" for spot in spots},
    }  # fmt: skip
    write_pages(FILE.stem, directory, advice.to_json(), escape="markdown", **content)
    say(render("advice.md", **content), end="")
