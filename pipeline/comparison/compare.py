"""Compare the results and the bench of all variants with the baseline. The comparison depends on files only.

Throughput and memory come from the bench, which measured all variants side by side. Accuracy and the steps to the
target accuracy come from the training runs. Verdicts use figures of the bench and of the training runs. ``None`` means
unknown: a figure that is in no file is not estimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.comparison import ablation, advice, consistency, summaries, verdicts
from pipeline.comparison.champion import champion_of, on_front
from pipeline.comparison.comparison_file import Compared, Comparison, fields_of
from pipeline.comparison.sessions import SampleTable, column, table_of
from pipeline.comparison.stats import Difference, Verdict
from pipeline.comparison.trends import trends
from pipeline.environment import without_stages
from pipeline.params import Compare
from pipeline.results import Bench, HistoryRow, Result
from pipeline.results.figures import MEMORY, QUANTITIES, THROUGHPUT, Figure
from pipeline.results.rejections import advised


class Judgement(NamedTuple):
    """A variant's verdict, and the reasons behind it."""

    verdict: Verdict
    possible: tuple[Verdict, ...]
    reasons: tuple[str, ...]
    shared_reasons: tuple[str, ...]


def judge(
    result: Result,
    baseline: Result,
    table: SampleTable,
    noises: Mapping[Figure, Difference],
    ratios: Mapping[Figure, Difference],
    accuracy: Difference | None,
) -> Judgement:
    """Return the verdict on ``result``, with the reasons behind it.

    The decisions on all ``ratios`` and on the ``accuracy`` give the verdict. ``noises``: the noise of all rounds of the
    present session.
    """
    arms = [table.arms[column(trained.variant)] for trained in (result, baseline)]
    outcomes = verdicts.outcomes(ratios, arms, accuracy)
    own = table.own.rounds(column(result.variant))
    # The machine's noise is told once, among the reasons that all variants share.
    of_machine = [
        figure
        for figure, ratio in ratios.items()
        if ratio.why_untrusted and noises[figure].why_untrusted and own and own.noise(figure) == noises[figure]
    ]
    as_baseline = bool(result.skipped) and result.applied == baseline.applied
    reasons = advice.of_variant(
        outcomes, ratios, accuracy, table.bench, of_machine, stopped=arms[0].settled, as_baseline=as_baseline
    )
    verdict, possible = verdicts.verdict([*outcomes.values()]), verdicts.possible([*outcomes.values()])
    return Judgement(verdict, tuple(possible) if verdict == "undecided" else (), *reasons)


def compare(
    measured: Sequence[Result],
    histories: Mapping[str, Sequence[HistoryRow]],
    benches: Sequence[Bench],
    settings: Compare,
    environment: Mapping[str, Any],
    made_of: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare every result with the baseline's.

    ``benches``: the present bench, then other benches. A variant's ratios use all benches that measured the variant
    and the baseline as the present bench did, except those of untrusted sessions. The A/A noise comes from the session
    of the present bench. All other figures of the bench come from the present bench only.

    The Pareto front consists of the variants that no other variant beats in throughput, memory and accuracy, each
    relative to the baseline. A difference that is not decided as better or worse is ignored. Untrusted variants are not
    on the front.

    Raises ComparisonError if the results and the bench are not from one job in one environment. ``environment``: the
    content of environment.json. ``made_of``: the files from which the arguments were read (``consistency.made_of``).
    """
    baseline = next(result for result in measured if result.variant == settings.baseline)
    bench, names = benches[0], [result.variant for result in measured]
    consistency.check(measured, baseline, bench, environment)
    others = {result.variant: result for result in measured if result is not baseline}
    samples = (sample for bench in benches for arm in bench.arms for sample in arm.samples)
    values = advised(rejection for sample in samples for rejection in sample.rejections)
    table = table_of(benches, settings.max_spread, values)
    rounds = table.own.rounds()
    assert rounds is not None  # consistency.check has checked it
    noises = {figure: rounds.noise(figure) for figure in QUANTITIES if verdicts.asked_for(figure, bench.arms)}
    margins = settings.margins
    by_figure = {figure: table.compared([*others], figure, figure.margin_in(margins)) for figure in noises}
    ratios = {name: {figure: of_variants[name] for figure, of_variants in by_figure.items()} for name in others}
    accuracies = summaries.accuracies([*others.values()], baseline, margins.accuracy)
    judged = {
        name: judge(result, baseline, table, noises, ratios[name], accuracies.get(name))
        for name, result in others.items()
    }
    own = table.own.start_utc
    trusted = {baseline.variant: {figure.margin: not noise.why_untrusted for figure, noise in noises.items()}}
    for name, of_variant in ratios.items():
        trusted[name] = {figure.margin: not ratio.parts[own].why_untrusted for figure, ratio in of_variant.items()}
    fields = {
        result.variant: summaries.of_variant(
            result, bench, histories[result.variant], settings, trusted[result.variant]
        )
        for result in measured
    }
    front = on_front(
        baseline.variant,
        {
            name: (of_variant[THROUGHPUT], of_variant[MEMORY], accuracies.get(name))
            for name, of_variant in ratios.items()
            if judged[name].verdict != "untrusted"
        },
        (noises[THROUGHPUT], noises[MEMORY]),
    )
    paying = {name: of_variant for name, of_variant in ratios.items() if judged[name].verdict == "pays"}

    def compared(result: Result) -> Compared:
        name = result.variant
        of_variant = ratios.get(name, {})  # empty for the baseline, which is not judged
        return Compared(
            on_front=name in front,
            **fields_of(of_variant),
            accuracy=accuracies.get(name),
            **(judged[name]._asdict() if name in judged else {}),
            **fields[name],
            **summaries.against_baseline(result, baseline, histories, fields, of_variant.get(THROUGHPUT)),
        )

    return Comparison(
        baseline=baseline.variant,
        target_accuracy_fraction=settings.target_accuracy,
        margins=settings.margins,
        made_of=made_of or {},
        settings=settings,
        environment=without_stages(environment),
        device=baseline.device,
        dataset=baseline.dataset,
        train=baseline.config["train"],
        parameter_count=baseline.parameter_count,
        unit=baseline.unit,
        directions=baseline.directions,
        seeds=tuple(run.seed for run in baseline.runs),
        **fields_of(noises, "noise_"),
        variants=tuple(map(compared, (baseline, *others.values()))),
        learnt_nothing=summaries.learnt_nothing(baseline),
        champion=champion_of(paying, table),
        sessions=tuple(summaries.of_session(session, names) for session in table.sessions),
        sessions_set_aside=table.set_aside,
        shares=ablation.shares(table, accuracies, settings.margins),
        trends=trends(table, benches, settings),
        advised=values,
        bench=bench,
    )
