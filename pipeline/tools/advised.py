"""What ``advise`` has found: ``reports/advice.json``, and the pages that are made from it alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipeline.comparison import planning, sessions, stats
from pipeline.comparison.racing import RACED, Race, finalists, interaction
from pipeline.comparison.sessions import column
from pipeline.comparison.stats import Difference
from pipeline.errors import count, say
from pipeline.pages import render
from pipeline.params import Compare, entry
from pipeline.report import HUES, facts, pictures, write_pages
from pipeline.results import REPORTS, Bench, Document, Record
from pipeline.results.figures import MEMORY, THROUGHPUT, Figure
from pipeline.tools.candidates import Candidate, Untried

FILE = REPORTS / "advice.json"
DECIDED = "better", "same", "worse"
MOST_NAMED = 3
"""Most undecided candidates that the sentence names."""
Ratios = dict[str, dict[Figure, Difference]]
"""Candidate -> its ratios to the baseline."""


class LeftOut(Record):
    """Why a candidate is not measured any more."""

    kind: Literal["beaten", "failed", "time"]
    """time: it was not measured, or not enough, because the time did not suffice."""
    why: str


class Advice(Document):
    """``reports/advice.json``."""

    key: str
    """Digest of job, machine, code, data and candidates: a later run with the same key goes on."""
    boot_id: str
    baseline: str
    compare: Compare
    candidates: tuple[Candidate, ...]
    """The combinations last."""
    untried: tuple[Untried, ...]
    costs: dict[str, tuple[float, float]]
    """Candidate -> the seconds of its start and of a step, by its first sample."""
    steps: int = 0
    out: dict[str, LeftOut]
    """Candidate that is not measured any more -> why."""
    benches: tuple[Bench, ...] = ()
    """The race, then the rounds of combinations."""
    finalists: tuple[str, ...] = ()
    final: Bench | None = None
    bound: str = ""
    """What binds the baseline's step (``catalogue.Bound``); empty if unknown."""
    why: str = ""
    """What shows what binds the step."""
    memory: str | None = None
    """The memory into which a step must fit; None: any."""
    batches: Mapping[str, int] = {}
    """Baseline or finalist -> the largest batch that is predicted to fit into it."""
    finished: bool = False
    ratios: Mapping[str, Mapping[str, Difference]] = {}
    """Candidate -> figure -> ratio to the baseline, as on the page; for readers of the file (``write``)."""

    def complete(self) -> tuple[Bench, ...]:
        """Return the benches that no interrupt ended."""
        return tuple(bench for bench in self.benches if not bench.interrupted)

    def names(self) -> list[str]:
        return [candidate.name for candidate in self.candidates]

    def candidate(self, name: str) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.name == name)

    def state(self, name: str) -> str:
        """Say whether a candidate is still measured, and why not."""
        if name in self.out:
            return self.out[name].why
        return "finalist" if name in self.finalists else "not decided" if self.finished else "not beaten"

    def races(self) -> list[Race]:
        return [Race.of(bench.arms, self.baseline, self.compare.margins) for bench in self.benches]

    def standing(self) -> Ratios:
        """Return the ratios of the last rounds, before the final ones, in which each candidate took part."""
        return {
            name: {figure: race.ratio(name, self.baseline, figure) for figure in RACED}
            for race in self.races()
            for name in race.names[1:]
        }

    def judged(self) -> Ratios:
        """Return the finalists' ratios in their own rounds, decided together by the rules of the bench."""
        rounds = self._final_rounds()
        if not rounds:
            return {}
        names = [name for name in self.finalists if column(name) in rounds.arms]
        by_figure = {
            figure: stats.decided_together(partial(self._at, rounds, names, figure), len(names)) for figure in RACED
        }
        return {name: {figure: by_figure[figure][name] for figure in RACED} for name in names}

    def _at(
        self, rounds: sessions.Rounds, names: Sequence[str], figure: Figure, undecided: int
    ) -> dict[str, Difference]:
        base, margin, confidence = column(self.baseline), self.margin(figure), stats.confidence_of(undecided)
        return {name: rounds.ratio(column(name), base, figure, margin, confidence, sides=True) for name in names}

    def margin(self, figure: Figure) -> float:
        return figure.margin_in(self.compare.margins)

    def against(self) -> list[tuple[str, str, dict[Figure, Difference]]]:
        """Return pairs of finalists with the ratios of the first to the second."""
        names, rounds = [*self.judged()], self._final_rounds()
        return [
            (first, second, {
                figure: rounds.ratio(column(first), column(second), figure, self.margin(figure)) for figure in RACED
            })
            for place, first in enumerate(names)
            for second in names[place + 1 :]
            if rounds
        ]  # fmt: skip

    def _final_rounds(self) -> sessions.Rounds | None:
        if not self.final:
            return None
        cost = planning.cost_of(self.final, self.final.rounds, self.final.seconds)
        return sessions.Rounds(sessions.columns(self.final), self.baseline, cost, self.compare.max_spread)

    def noises(self) -> dict[Figure, Difference]:
        """Return the baseline against itself, in the finalists' rounds."""
        rounds = self._final_rounds()
        return {figure: rounds.noise(figure) for figure in RACED} if rounds else {}

    def interactions(self) -> Iterable[tuple[Candidate, Figure, Difference]]:
        """Yield each combination that is surely better or worse than the product of the two that it combines."""
        before = self.standing()
        for race in self.races()[1:]:
            for candidate in map(self.candidate, race.names[1:]):
                first, second = candidate.made_of or ("", "")
                if first not in race.names or second not in before:
                    continue
                for figure in RACED:
                    ratio = interaction(race.ratio(candidate.name, first, figure), before[second][figure])
                    if stats.decide(ratio, self.margin(figure)) in ("better", "worse"):
                        yield candidate, figure, ratio

    def best(self) -> dict[str, str]:
        """Return finalist -> when to take it: the fastest always, and the leanest if memory is short. Only what is
        surely better in the final rounds counts. Of those that do not surely need more memory than the leanest, the
        fastest is as lean."""
        judged, chosen, rounds = self.judged(), dict[str, str](), self._final_rounds()

        def best(figure: Figure, among: Iterable[str]) -> str:
            sign = -1 if figure.higher_is_better else 1
            return min(among, key=lambda name: sign * (judged[name][figure].estimate or 1.0))

        faster, leaner = ([name for name in judged if judged[name][figure].decision == "better"] for figure in RACED)
        if faster:
            chosen[best(THROUGHPUT, faster)] = ""
        if leaner and rounds:
            least = column(best(MEMORY, leaner))
            ratios = {name: rounds.ratio(column(name), least, MEMORY, self.margin(MEMORY)) for name in leaner}
            as_lean = [name for name in leaner if column(name) == least or ratios[name].decision != "worse"]
            chosen.setdefault(best(THROUGHPUT, as_lean), f" if {MEMORY.need}")
        return chosen

    def sentence(self) -> str:
        """Say in one sentence what to do."""
        judged, chosen = self.judged(), self.best()
        begun = "" if self.finished else "not finished yet; so far: "
        if chosen:
            words = [f"`{name}`{when}: {in_words(judged[name])}" for name, when in chosen.items()]
            return f"{begun}take {'; '.join(words)}."
        alike = [candidate.name for candidate in self.candidates if not candidate.apart]
        decided = {name for name, left_out in self.out.items() if left_out.kind != "time"}
        decided |= {name for name in judged if {judged[name][figure].decision for figure in RACED} <= set(DECIDED)}
        is_open = [f"`{name}`" for name in alike if name not in decided]
        standing = self.standing()
        raced = {name: standing[name] for name in alike if name in standing}
        if any(name not in decided for name in alike) and 2 * len(raced) < len(alike):
            estimates = {
                name: (ratios[THROUGHPUT].estimate or 1.0, ratios[MEMORY].estimate or 1.0)
                for name, ratios in raced.items()
                if name not in self.out
            }
            ahead = ", ".join(f"`{name}`" for name in finalists(estimates, self.compare.margins))
            shares = f"of {count(len(alike), 'candidate')}, {len(raced)} could be raced"
            shares += ahead and f"; ahead: {ahead}"
            return f"{begun}no advice: {shares} (more minutes or a quieter machine would help)."
        sure = f"each of {count(len(alike), 'candidate')} was beaten, failed or gains less than the margin"
        if is_open:
            named = ", ".join(is_open) if len(is_open) <= MOST_NAMED else count(len(is_open), "candidate")
            sure = f"not decided: {named} (more minutes or a quieter machine would decide)"
        elif any(name in self.out for name in self.standing()):
            sure += f"; an error in at most {stats.ERROR:.0%} of such races"
        return f"{begun}keep `{self.baseline}`: nothing that was tried is surely better; {sure}."


def in_words(ratios: dict[Figure, Difference]) -> str:
    """Say how a finalist differs from the baseline."""
    words, order = [], (*DECIDED, "undecided", "untrusted")
    for figure, ratio in sorted(ratios.items(), key=lambda item: order.index(item[1].decision)):
        if ratio.decision in ("better", "worse"):
            words.append(facts.change(figure.noun, ratio) + facts.uncertain(ratio))
        elif ratio.decision == "same":
            words.append(f"the same {figure.noun}, within {facts.margin(ratio)}")
        else:
            words.append(f"{figure.noun} {ratio.decision}")
    return ", ".join(words)


class Line(NamedTuple):
    """A line of the page's table."""

    name: str
    does: str
    figures: tuple[str, ...]
    state: str


def lines(advice: Advice, *, apart: bool) -> list[Line]:
    """Return the lines of all candidates, or of those that change the training, the fastest first."""
    standing = advice.standing()
    chosen = [candidate for candidate in advice.candidates if bool(candidate.apart) is apart]
    speeds = {name: ratios[THROUGHPUT].estimate or 0.0 for name, ratios in standing.items()}
    return [
        Line(
            candidate.name,
            candidate.apart or "; ".join(f"{key}: {value}" for key, value in candidate.settings.items()),
            tuple(facts.brief(ratio) for ratio in standing.get(candidate.name, {}).values())
            or ("not measured",) * len(RACED),
            advice.state(candidate.name),
        )
        for candidate in sorted(chosen, key=lambda candidate: -speeds.get(candidate.name, 0.0))
    ]


def relieving(advice: Advice) -> list[str]:
    """Return the candidates that relieve what binds the step."""
    return [
        candidate.name
        for candidate in advice.candidates
        if not candidate.made_of and any(advice.bound in entry(name).relieves for name in candidate.techniques)
    ]


def _by_reason(advice: Advice, apart: bool) -> dict[str, str]:
    """Return reason -> the settings that are not tried for it."""
    reasons: dict[str, list[str]] = {}
    for untried in advice.untried:
        if untried.apart is apart:
            technique = f"{untried.technique} (`{untried.setting}`)" if apart else f"`{untried.setting}`"
            reasons.setdefault(untried.why, []).append(technique)
    return {why: ", ".join(settings) for why, settings in reasons.items()}


def write(advice: Advice, directory: Path = REPORTS) -> None:
    """Write the advice as JSON, Markdown and a page, all or none; print the Markdown."""
    judged, standing = advice.judged(), advice.standing()
    ratios = {name: {figure.field: ratio for figure, ratio in of.items()} for name, of in (standing | judged).items()}
    advice = advice.model_copy(update={"ratios": ratios})
    best, doubts = advice.best(), (ratio.why_untrusted for ratios in judged.values() for ratio in ratios.values())
    bare = {"low": None, "high": None}  # intervals of all would hide those of the finalists
    drawn = {
        name: {figure: ratio.model_copy(update=bare) for figure, ratio in ratios.items()}
        for name, ratios in standing.items()
        if not advice.candidate(name).apart
    }
    spots = [
        pictures.Spot(number, name, ratios[THROUGHPUT], ratios[MEMORY], name in best)
        for number, (name, ratios) in enumerate((drawn | judged).items(), 2)
    ]
    content: dict[str, Any] = {
        "advice": advice, "facts": facts, "raced": RACED, "judged": judged,
        "doubts": sorted(set(filter(None, doubts))),
        "untried": {apart: _by_reason(advice, apart) for apart in (False, True)},
        "alike": lines(advice, apart=False), "apart": lines(advice, apart=True), "relieving": relieving(advice),
        "forests": pictures.forests_of(judged, advice.noises(), advice.baseline, advice.compare.margins),
        "front": pictures.front_of([pictures.Spot(1, advice.baseline, None, None, False), *spots]),
        "hues": {spot.variant: f"v{spot.number % HUES}" for spot in spots} | {advice.baseline: "v0"},
    }  # fmt: skip
    write_pages(FILE.stem, directory, advice.to_json(), escape="markdown", **content)
    say(render("advice.md", **content), end="")
