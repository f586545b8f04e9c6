"""Find figures that cannot have been measured, because they contradict the job, the data or each other."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pipeline.params import Train
from pipeline.results.records import HistoryRow, Result, Run, summarise


def of_result(result: Result, train: Train) -> list[str]:
    """Return one message for each figure of a result that contradicts the job ``train``, the data or another figure."""
    problems = [f"seed {run.seed}: {problem}" for run in result.runs for problem in _of_run(run, result, train)]
    seeds: dict[str, list[int]] = {}
    for run in result.runs:
        seeds.setdefault(run.model_sha256, []).append(run.seed)
    problems += [
        f"seeds {', '.join(map(str, equal))} ended in the same weights, so they are copies, or the job ignores its "
        "seed (then training again changes nothing: draw its random numbers from torch's generators, or set "
        f"train.seeds: [{equal[0]}])"
        for equal in seeds.values()
        if len(equal) > 1
    ]
    expected = summarise(result.runs)
    wrong = [key for key in (result.summary | expected) if not _close(result.summary.get(key), expected.get(key))]
    return problems + [
        f"summary.{key} is {result.summary.get(key)}, but the runs give {expected.get(key)}" for key in wrong
    ]


def of_history(result: Result, rows: Iterable[HistoryRow]) -> list[str]:
    """Return one message for each figure of a run that differs from the last row of its seed's history."""
    last = {row.seed: row for row in rows}
    ends = {"steps": "step", "test_accuracy": "test_accuracy", "test_loss": "test_loss"}
    return [
        f"seed {run.seed}: {key} is {getattr(run, key)}, but its history ends with {ended}"
        for run in result.runs
        for key, column in ends.items()
        if not _close(getattr(run, key), ended := getattr(last.get(run.seed), column, None))
    ]


def _of_run(run: Run, result: Result, train: Train) -> list[str]:
    problems, data = run.problems(result.batch_size), result.dataset
    if data is None:
        return [*problems, "the data set is unknown"]
    requested = train.epochs * (data.train_count // max(1, result.batch_size))
    if run.steps != requested:
        problems.append(f"the run has {run.steps} steps, but the job has {requested}")
    # Each process that resumed the run warmed up again.
    fewest, most = (max(0, requested - train.warmup_steps * times) for times in (1 + run.resumes, 1))
    if not fewest <= run.measured_steps <= most:
        expected = f"{most}" if fewest == most else f"{fewest} to {most}, because each resume warms up again"
        problems.append(f"{run.measured_steps} of {run.steps} steps were measured; expected {expected}")
    if run.test_count != data.test_count:
        problems.append(f"{run.test_count} samples were tested, but the data set has {data.test_count} test samples")
    if run.test_correct > run.test_count:
        problems.append(f"{run.test_correct} of only {run.test_count} test samples are right")
    elif not _close(run.test_accuracy * run.test_count, run.test_correct):
        problems.append(f"test_accuracy is {run.test_accuracy}, but {run.test_correct} of {run.test_count} are right")
    return problems


def _close(value: float | None, expected: float | None) -> bool:
    if value is None or expected is None:
        return value == expected
    return math.isclose(value, expected, rel_tol=1e-9)
