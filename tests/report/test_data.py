from __future__ import annotations

import csv
import io

from pipeline.report import history_csv, metrics, ratios_csv, verdicts
from tests.factories import known
from tests.report.conftest import Made


def test_metrics_leave_out_untrusted_ratios(mixed: Made) -> None:
    metrics_of = {variant.variant: (variant, metrics(variant)) for variant in mixed.comparison.variants}
    pays, values = metrics_of["pays"]
    names, speed = [f"throughput_ratio{end}" for end in ("", "_low", "_high")], known(pays.throughput)
    interval = (speed.estimate, speed.low, speed.high)
    assert (values["verdict"], *(values[name] for name in names)) == ("pays", *interval)
    assert (values["throughput_pairs"], values["time_to_target_seconds"]) == (12, pays.time_to_target.train_seconds)
    assert all(isinstance(value, int | float | None) for name, value in values.items() if name != "verdict")
    _, untrusted = metrics_of["untrusted"]
    assert [untrusted[name] for name in ("verdict", *names)] == ["untrusted", None, None, None]
    assert (untrusted["throughput_pairs"], untrusted["rejected_samples"]) == (4, 8)
    assert untrusted["peak_memory_ratio"] is not None
    undecided, values = metrics_of["undecided"]
    assert values["throughput_more_pairs"] == known(undecided.throughput).more_pairs


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_plot_data_has_every_run_and_no_blank_field(usual: Made) -> None:
    accuracy, loss = (rows(history_csv(*usual, field)) for field in ("test_accuracy", "train_loss"))
    assert len(accuracy) == 3 * 3 * 3  # variants, seeds, evaluations
    assert len(loss) == 3 * 3 * 12  # rows of history
    assert all(value for row in (*accuracy, *loss) for value in row.values())
    assert list(accuracy[0]) == ["variant", "seed", "epoch", "step", "train_seconds", "test_accuracy"]
    assert list(accuracy[0].values()) == ["baseline", "0", "1.0", "235", "3.0", "0.8"]


def test_the_ratios_file_has_only_trusted_ratios(mixed: Made) -> None:
    by_pair = {(row["variant"], row["quantity"]): row for row in rows(ratios_csv(mixed.comparison))}
    names = {variant.variant for variant in mixed.comparison.variants[1:]} | {"baseline (A/A)"}
    assert by_pair.keys() == {(name, "throughput") for name in names - {"untrusted"}} | {
        (name, "peak memory") for name in names
    }
    row = by_pair["pays", "throughput"]
    assert float(row["low"]) < float(row["estimate"]) < float(row["high"])


def test_dvc_metrics_begin_with_the_trusted_verdicts(mixed: Made) -> None:
    shown = verdicts(mixed.comparison)
    names = ("verdict", "throughput_ratio", "peak_memory_ratio", "accuracy_difference_mean_fraction")
    assert sorted(shown) == list(shown) == [f"{number}_{name}" for number, name in enumerate(names, 1)]  # DVC sorts
    assert shown["1_verdict"] == {variant.variant: variant.verdict for variant in mixed.comparison.variants[1:]}
    assert ["untrusted" in name for name in shown.values()] == [True, False, True, True]
