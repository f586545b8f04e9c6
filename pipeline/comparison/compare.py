"""Compare the results and the bench of all variants with the baseline. The comparison depends on files only.

Throughput and memory come from the bench, which measured all variants side by side. Accuracy and the steps to the
target accuracy come from the training runs. Verdicts use figures of the bench and of the training runs. ``None`` means
unknown: a figure that is in no file is not estimated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.comparison import ablation, consistency, figures, pareto, verdicts
from pipeline.comparison.champion import champion_of
from pipeline.comparison.comparison_file import Compared, Comparison, TimeToTarget
from pipeline.comparison.judging import Judgement, judge
from pipeline.comparison.sessions import PooledSession, arm_of, distinct, noise_of, pooled_like, summary
from pipeline.comparison.verdicts import QUANTITIES, Ratio
from pipeline.environment import without_stages
from pipeline.params import Compare
from pipeline.results import Bench, HistoryRow, Result


def compare(
    measured: Sequence[Result],
    histories: Mapping[str, Sequence[HistoryRow]],
    sessions: Sequence[Bench],
    settings: Compare,
    environment: Mapping[str, Any],
    made_of: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare every result with the baseline's.

    ``sessions``: the present bench, then other benches. A variant's ratios use all benches that measured the variant
    and the baseline as the present bench did, except those of untrusted sessions. The A/A noise comes from the session
    of the present bench. All other figures of the bench come from the present bench only.

    The Pareto front consists of the variants that no other variant beats in throughput, memory and accuracy, each
    relative to the baseline. A difference that is not decided as better or worse is ignored. Untrusted variants are not
    on the front.

    Raises ComparisonError if the results and the bench are not from one job in one environment. ``environment``: the
    content of environment.json. ``made_of``: the files from which the arguments were read (``consistency.made_of``).
    """
    baseline = next(each for each in measured if each.variant == settings.baseline)
    sessions = _accepting_one_load(sessions)
    bench, names = sessions[0], [each.variant for each in measured]
    consistency.check(measured, baseline, bench, environment)
    others = [result for result in measured if result is not baseline]

    pooled = pooled_like(bench, sessions, settings.max_spread)
    own = next(each for each in pooled if any(one is bench for one in each.benches))
    noises = [own.noise(quantity) for quantity in QUANTITIES]
    judgements = {each.variant: judge(each, baseline, pooled, own, settings.margins) for each in others}
    paying = {
        name: (each.throughput, each.memory, each.energy if settings.margins.energy else None)
        for name, each in judgements.items()
        if each.verdict == "pays"
    }
    trusted = {name: tuple(_trusts(own, ratio) for ratio in each[:3]) for name, each in judgements.items()}
    trusted[baseline.variant] = tuple(not noise.why_untrusted for noise in noises)
    trusting = {name: each for name, each in judgements.items() if each.verdict != "untrusted"}
    placed = {name: (each.throughput, each.memory, each.accuracy) for name, each in trusting.items()}
    front = pareto.on_front(baseline.variant, placed) if placed or all(trusted[baseline.variant][:2]) else set()

    benched = {name: figures.of_bench(bench, arm_of(bench, "variant", name), *trusted[name]) for name in names}
    speeds = {name: each["samples_per_second"] for name, each in benched.items()}

    def time_of(each: Result) -> TimeToTarget:
        history, speed = histories[each.variant], speeds[each.variant]
        return figures.time_to_target(each, history, settings.target_accuracy, speed)

    def compared(each: Result) -> Compared:
        judged, time, another = judgements.get(each.variant), time_of(each), figures.another_model(each, baseline)
        differs = another or each.applied.get("distillation")
        return Compared(
            variant=each.variant,
            on_front=each.variant in front,
            **(judged._asdict() if judged else _NOT_JUDGED),
            **benched[each.variant],
            **figures.of_training(each, baseline),
            time_to_target=time,
            time_to_target_ratio=figures.time_ratio(time, time_of(baseline), judged and judged.throughput),
            another_model=another,
            equal_time=figures.equal_time(each, baseline, histories, speeds[baseline.variant], judged.throughput)
            if judged and differs
            else None,
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
        noise_throughput=noises[0],
        noise_memory=noises[1],
        noise_energy=noises[2] if verdicts.tells_energy(bench.arms) else None,
        variants=tuple(map(compared, (baseline, *others))),
        champion=champion_of(paying, pooled),
        sessions=tuple(summary(each, names) for each in pooled),
        sessions_set_aside=len(distinct(sessions)) - sum(len(each.benches) for each in pooled),
        shares=ablation.shares(
            bench,
            {name: each.accuracy for name, each in judgements.items()},
            settings.margins,
            lambda quantity, rounds: noise_of(bench, quantity, settings.max_spread, rounds),
        ),
        bench=bench,
    )


def _accepting_one_load(benches: Sequence[Bench]) -> Sequence[Bench]:
    """Let all rejections advise the same ``bench.max_foreign_load``: the largest value that any of them advises."""
    advised, texts = re.compile(r"(?<=bench\.max_foreign_load: )\d\.\d"), [each.to_json() for each in benches]
    values = [value for text in texts for value in advised.findall(text)]
    return [Bench.model_validate_json(advised.sub(max(values), text)) for text in texts] if values else benches


def _trusts(own: PooledSession, ratio: Ratio | None) -> bool:
    """True if the bench's own session gave a trusted ratio. If False, the session's figures must not be shown."""
    return ratio is not None and any(each.trusted for each in ratio.sessions if each.start_utc == own.start_utc)


_NOT_JUDGED: dict[str, Any] = {**dict.fromkeys(Judgement._fields), "reasons": ()}
"""The fields of ``Judgement`` for the baseline, which is not judged."""
