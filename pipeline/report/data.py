"""The comparison as data for ``dvc metrics``, ``dvc plots`` and MLflow's parent run."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from pipeline.comparison.comparison_file import Compared, Comparison
from pipeline.comparison.verdicts import QUANTITIES, Ratio
from pipeline.report.pictures import Histories

VERDICTS = ("verdict", "throughput_ratio", "peak_memory_ratio", "accuracy_difference_mean_fraction")


def verdicts(comparison: Comparison) -> dict[str, dict[str, float | int | str]]:
    """Return figure -> variant -> value, for ``dvc metrics show`` and ``dvc metrics diff``.

    DVC sorts by name, so a number before each figure's name keeps the order of ``VERDICTS``. Unknown and untrusted
    values are left out.
    """
    known = {each.variant: metrics(each) for each in comparison.variants}
    return {
        f"{number}_{name}": {variant: value for variant, of in known.items() if (value := of[name]) is not None}
        for number, name in enumerate(VERDICTS, 1)
    }


def metrics(each: Compared) -> dict[str, float | int | str | None]:
    """Return a variant's figures for ``dvc metrics`` and MLflow's parent run. Unknown and untrusted values are None.
    Figures of energy are left out if the energy is unknown."""
    difference, accuracy, joules = each.accuracy_difference, each.accuracy, each.joules_per_sample
    return {
        "verdict": each.verdict,
        "samples_per_second": each.samples_per_second,
        **_ratio("throughput", each.throughput),
        "peak_memory_bytes": each.peak_memory_bytes,
        **_ratio("peak_memory", each.memory),
        **({"joules_per_sample": joules, **_ratio("energy", each.energy)} if joules else {}),
        "rejected_samples": each.rejected,
        "test_accuracy_mean_fraction": each.test_accuracy_mean_fraction,
        "accuracy_difference_mean_fraction": difference.mean_fraction if difference else None,
        "accuracy_difference_low_fraction": accuracy.low_fraction if accuracy else None,
        "accuracy_difference_high_fraction": accuracy.high_fraction if accuracy else None,
        "accuracy_more_seeds": accuracy.more_seeds if accuracy else None,
        "memory_prediction_error_fraction": each.prediction_error_fraction,
        "time_to_target_seconds": each.time_to_target.train_seconds,
        **{name: getattr(each, name) for name in _AS_IN_FILE},
    }


_AS_IN_FILE = (
    *("step_p50_ms", "model_flops_per_second", "utilisation_fraction", "training_samples_per_second"),
    *("training_peak_memory_bytes", "train_seconds"),
)
"""Further figures, which have the same names in ``Compared``."""


def _ratio(name: str, ratio: Ratio | None) -> dict[str, float | int | None]:
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
    noises = (comparison.noise_throughput, comparison.noise_memory, comparison.noise_energy)
    told = {each.variant: (each.throughput, each.memory, each.energy) for each in comparison.variants[1:]}
    rows = [
        (variant, quantity.noun, ratio)
        for variant, ratios in {**told, f"{comparison.baseline} (A/A)": noises}.items()
        for quantity, ratio in zip(QUANTITIES, ratios, strict=True)
    ]
    return _csv(
        ("variant", "quantity", "estimate", "low", "high"),
        (
            (variant, quantity, ratio.estimate, ratio.low, ratio.high)
            for variant, quantity, ratio in rows
            if ratio and not ratio.why_untrusted and ratio.low is not None
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
            (each.variant, *(getattr(row, column) for column in columns))
            for each in comparison.variants
            for row in histories[each.variant]
            if getattr(row, field) is not None
        ),
    )


def _csv(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    writer.writerows(rows)
    return text.getvalue()
