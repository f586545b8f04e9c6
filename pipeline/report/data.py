"""The comparison as data for ``dvc metrics``, ``dvc plots`` and MLflow's parent run."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from pipeline.comparison.comparison_file import Compared, Comparison
from pipeline.comparison.stats import Difference
from pipeline.report.pictures import Histories
from pipeline.results.figures import FIGURES, Figure

VERDICTS = ("verdict", "throughput_ratio", "peak_memory_ratio", "accuracy_difference_mean_fraction")


def verdicts(comparison: Comparison) -> dict[str, dict[str, float | int | str]]:
    """Return figure -> variant -> value, for ``dvc metrics show`` and ``dvc metrics diff``.

    DVC sorts by name, so a number before each figure's name keeps the order of ``VERDICTS``. Unknown and untrusted
    values are left out.
    """
    known = {compared.variant: metrics(compared) for compared in comparison.variants}
    return {
        f"{number}_{name}": {variant: value for variant, of in known.items() if (value := of[name]) is not None}
        for number, name in enumerate(VERDICTS, 1)
    }


def metrics(compared: Compared) -> dict[str, float | int | str | None]:
    """Return a variant's figures for ``dvc metrics`` and MLflow's parent run. Unknown and untrusted values are None.
    Optional figures are left out if they are unknown."""
    accuracy = compared.accuracy
    values: dict[str, float | int | str | None] = {"verdict": compared.verdict}
    for figure in FIGURES:
        if figure.optional and compared.of(figure) is None:
            continue
        values[figure.field] = compared.of(figure)
        if figure.margin:
            values |= _ratio(figure.metric, compared.ratios.get(figure))
        if figure.over_rounds and figure.field in compared.trained:
            values[f"training_{figure.field}"] = compared.trained[figure.field]
    return values | {
        "rejected_samples": compared.rejected,
        "test_accuracy_mean_fraction": compared.trained["test_accuracy_mean_fraction"],
        "accuracy_difference_mean_fraction": accuracy.estimate if accuracy else None,
        "accuracy_difference_low_fraction": accuracy.low if accuracy else None,
        "accuracy_difference_high_fraction": accuracy.high if accuracy else None,
        "accuracy_more_seeds": accuracy.more_pairs if accuracy else None,
        "time_to_target_seconds": compared.time_to_target.train_seconds,
    }


def _ratio(name: str, ratio: Difference | None) -> dict[str, float | int | None]:
    trusted = ratio if ratio and ratio.decision != "untrusted" else None
    return {
        f"{name}_ratio": trusted.estimate if trusted else None,
        f"{name}_ratio_low": trusted.low if trusted else None,
        f"{name}_ratio_high": trusted.high if trusted else None,
        f"{name}_pairs": ratio.pairs if ratio else None,
        f"{name}_more_pairs": ratio.more_pairs if ratio else None,
        f"{name}_sessions": trusted.session_count if trusted else None,
        f"{name}_more_sessions": ratio.more_sessions if ratio else None,
    }


def ratios_csv(comparison: Comparison) -> str:
    """Return the intervals of the ratios to the baseline, and of the baseline against itself (A/A). Untrusted ratios
    and ratios without an interval are left out."""
    differences: dict[str, Mapping[Figure, Difference]] = {
        compared.variant: compared.ratios for compared in comparison.variants[1:]
    }
    differences[f"{comparison.baseline} (A/A)"] = comparison.noises
    return _csv(
        ("variant", "quantity", "estimate", "low", "high"),
        (
            (variant, figure.noun, ratio.estimate, ratio.low, ratio.high)
            for variant, ratios in differences.items()
            for figure, ratio in ratios.items()
            if not ratio.why_untrusted and ratio.low is not None
        ),
    )


def accuracy_csv(comparison: Comparison, histories: Histories) -> str:
    """Return one row per evaluation, for all variants and seeds. No field is blank."""
    return _history_csv(comparison, histories, "test_accuracy")


def loss_csv(comparison: Comparison, histories: Histories) -> str:
    """Return the training loss of each row of the histories, for all variants and seeds. No field is blank."""
    return _history_csv(comparison, histories, "train_loss")


def _history_csv(comparison: Comparison, histories: Histories, field: str) -> str:
    columns = ("seed", "epoch", "step", "train_seconds", field)
    return _csv(
        ("variant", *columns),
        (
            (compared.variant, *(getattr(row, column) for column in columns))
            for compared in comparison.variants
            for row in histories[compared.variant]
            if getattr(row, field) is not None
        ),
    )


def _csv(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    writer.writerows(rows)
    return text.getvalue()
