from __future__ import annotations

import csv
import io

import pytest

from pipeline.report import accuracy_csv, loss_csv, metrics, ratios_csv
from tests.report.conftest import Made


def test_metrics_are_the_verdict_and_flat_numbers(usual: Made) -> None:
    ddp = usual.comparison.variants[1]
    values = metrics(ddp)
    assert ddp.throughput
    assert values["verdict"] == "pays"
    assert values["throughput_ratio"] == ddp.throughput.estimate
    assert (values["throughput_ratio_low"], values["throughput_ratio_high"]) == (
        ddp.throughput.low,
        ddp.throughput.high,
    )
    assert (values["throughput_pairs"], values["rejected_samples"]) == (11, 1)
    assert values["accuracy_difference_mean_fraction"] == pytest.approx(0.001 / 3)
    assert values["training_samples_per_second"] == 32_000.0
    assert values["time_to_target_seconds"] == ddp.time_to_target.train_seconds
    assert all(isinstance(value, int | float | None) for name, value in values.items() if name != "verdict")


def test_metrics_contain_no_untrusted_ratio(mixed: Made) -> None:
    each = next(each for each in mixed.comparison.variants if each.variant == "untrusted")
    values = metrics(each)
    assert values["verdict"] == "untrusted"
    assert {values[f"throughput_ratio{end}"] for end in ("", "_low", "_high")} == {None}
    assert values["throughput_pairs"] == 4
    assert values["peak_memory_ratio"] is not None


def test_metrics_say_how_many_more_pairs_would_decide(mixed: Made) -> None:
    each = next(each for each in mixed.comparison.variants if each.variant == "undecided")
    assert each.throughput
    assert metrics(each)["throughput_more_pairs"] == each.throughput.more_pairs


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_plot_data_has_every_run_and_no_blank_field(usual: Made) -> None:
    accuracy, loss = rows(accuracy_csv(*usual)), rows(loss_csv(*usual))
    assert len(accuracy) == 3 * 3 * 3  # variants, seeds, evaluations
    assert len(loss) == 3 * 3 * 12  # rows of history
    assert all(value for row in (*accuracy, *loss) for value in row.values())
    assert accuracy[0] == {
        "variant": "baseline",
        "seed": "0",
        "epoch": "1.0",
        "step": "235",
        "train_seconds": "3.0",
        "test_accuracy": "0.8",
    }


def test_the_ratios_file_has_only_trusted_ratios(mixed: Made) -> None:
    found = {(row["variant"], row["quantity"]): row for row in rows(ratios_csv(mixed.comparison))}
    names = {each.variant for each in mixed.comparison.variants[1:]} | {"baseline (A/A)"}
    assert found.keys() == {(name, "throughput") for name in names - {"untrusted"}} | {
        (name, "peak memory") for name in names
    }
    row = found["pays", "throughput"]
    assert float(row["low"]) < float(row["estimate"]) < float(row["high"])
