from __future__ import annotations

from typing import Any

import pytest

from pipeline.comparison.comparison_file import Comparison
from pipeline.comparison.consistency import ComparisonError
from pipeline.comparison.verdicts import Accuracy, Ratio
from pipeline.report import formats, pictures, sentences
from pipeline.report.tables import tables
from tests.factories import make_bench, make_results, make_run
from tests.report.conftest import REASON, Made, made, plain


def ratio(**changes: Any) -> Ratio:
    values: dict[str, Any] = {
        "estimate": 1.42, "low": 1.38, "high": 1.47, "pairs": 12, "refused": 0, "margin": 0.03, "decision": "better",
        "more_pairs": None, "why_untrusted": None,
    }  # fmt: skip
    return Ratio(**values | changes)


def accuracy(**changes: Any) -> Accuracy:
    values: dict[str, Any] = {
        "mean_fraction": 0.0003, "low_fraction": -0.002, "high_fraction": 0.0026, "seeds": 3, "margin_fraction": 0.01,
        "decision": "same", "more_seeds": None,
    }  # fmt: skip
    return Accuracy(**values | changes)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (formats.number(20_000.4, "samples/s"), "20,000 samples/s"),
        (formats.number(12.345, "ms"), "12.3 ms"),
        (formats.number(None, "ms"), "unknown"),
        (formats.size(0), "0 B"),
        (formats.size(88 * 2**10), "88.0 KiB"),
        (formats.size(200 * 2**20), "200 MiB"),
        (formats.size(3 * 2**29), "1.50 GiB"),
        (formats.scaled(6_300_000, "FLOP"), "6.30 MFLOP"),
        (formats.scaled(1.2e12, "FLOP/s"), "1.20 TFLOP/s"),
        (formats.percent(0.9, 2), "90.00%"),
        (formats.plain_percent(0.03), "3%"),
        (formats.points(-0.00001), "0.00"),
        (formats.points(-0.0123), "-1.23"),
        (formats.plain_points(0.01), "1 point"),
        (formats.plain_points(0.005), "0.5 points"),
        (formats.times(1.5), "1.50x"),
        (formats.times(0.0456), "0.046x"),
        (formats.count(1, "process"), "1 process"),
        (formats.count(2, "process"), "2 processes"),
    ],
)
def test_numbers_have_their_digits_and_their_unit(shown: str, text: str) -> None:
    assert plain(shown) == text


def test_the_ends_of_a_narrow_interval_can_be_told_apart() -> None:
    assert plain(formats.ratio_text(ratio())) == "1.42x (1.38 to 1.47)"
    narrow = ratio(estimate=0.5502, low=0.5488, high=0.5511)
    assert plain(formats.ratio_text(narrow)) == "0.550x (0.549 to 0.551)"


def test_what_is_untrusted_stands_in_brackets() -> None:
    noisy = ratio(decision="untrusted", why_untrusted="throughput: too noisy")
    assert plain(formats.ratio_text(noisy)) == "untrusted [1.42x, 1.38 to 1.47]"
    few = noisy.model_copy(update={"low": None, "high": None, "pairs": 3})
    assert plain(formats.ratio_text(few)) == "untrusted [1.42x, no interval from 3 pairs]"
    unknown = few.model_copy(update={"estimate": None, "pairs": 0})
    assert formats.ratio_text(unknown) == "untrusted"


def test_too_few_pairs_have_no_interval() -> None:
    few = ratio(low=None, high=None, pairs=4, decision="undecided")
    assert plain(formats.ratio_text(few)) == "1.42x undecided (no interval from 4 pairs)"
    one = accuracy(low_fraction=None, high_fraction=None, seeds=1, decision="undecided")
    assert formats.accuracy_lines(one) == ("+0.03 points undecided", "no interval from 1 seed")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "1.42x the throughput (1.38 to 1.47), 1.42x the peak memory (1.38 to 1.47), accuracy unchanged within "
             "1 point (-0.20 to +0.26)."),
        ({"throughput": ratio(estimate=1.0, low=0.98, high=1.01, decision="same")},
         "Throughput unchanged within 3% (0.98 to 1.01), 1.42x the peak memory"),
        ({"throughput": ratio(decision="undecided", more_pairs=6)}, "Throughput undecided at 1.42x (1.38 to 1.47), "),
        ({"throughput": ratio(decision="untrusted", why_untrusted="noise")}, 
         "Throughput untrusted [1.42x, 1.38 to 1.47], 1.42x the peak"),
        ({"accuracy": accuracy(mean_fraction=-0.02, low_fraction=-0.03, high_fraction=-0.01, decision="worse")},
         ", accuracy -2.00 points (-3.00 to -1.00)."),
        ({"accuracy": accuracy(decision="undecided")}, ", accuracy undecided at +0.03 points (-0.20 to +0.26)."),
    ],
)  # fmt: skip
def test_a_sentence_says_what_each_decision_rests_on(usual: Made, changes: dict[str, Any], said: str) -> None:
    values = {"throughput": ratio(), "memory": ratio(decision="worse"), "accuracy": accuracy()} | changes
    assert said in plain(sentences.sentence(usual.comparison.variants[1].model_copy(update=values)))


def test_the_baseline_is_the_reference(usual: Made, alone: Made) -> None:
    assert plain(sentences.sentence(usual.comparison.variants[0])) == (
        "The reference: 20,215 samples/s, 200 MiB of peak memory, 90.07% test accuracy (mean of 3 seeds)."
    )
    assert "throughput unknown" in sentences.sentence(alone.comparison.variants[0])


def test_on_a_gpu_the_tables_show_what_allocator_and_driver_held(usual: Made) -> None:
    def headings(comparison: Comparison) -> list[str]:
        return [column.heading for column in tables(comparison)[2].columns]

    assert headings(usual.comparison)[0] == "Peak of each process"
    ddp = usual.comparison.variants[1].model_copy(update={"peak_memory_rank_bytes": (2**30, 3 * 2**29)})
    assert plain(tables(usual.comparison)[2].columns[0].cell(ddp).value) == "1.00 GiB / 1.50 GiB"
    told = {"peak_reserved_bytes": 2**30, "driver_memory_bytes": 3 * 2**29, "allocator_retries": 2}
    variants = [each.model_copy(update=told) for each in usual.comparison.variants]
    on_gpu = usual.comparison.model_copy(update={"variants": tuple(variants)})
    assert headings(on_gpu)[0] == "Reserved / driver"
    cell = tables(on_gpu)[2].columns[0].cell(variants[0])
    assert (plain(cell.value), cell.beside) == ("1.00 GiB / 1.50 GiB", ("2 retried",))


def test_the_basis_names_rounds_margins_and_the_baseline_against_itself(usual: Made) -> None:
    rounds, seeds, margins, calm = map(plain, sentences.basis(usual.comparison))
    assert rounds.startswith(
        "Speed and memory: 12 rounds; in each, every variant took 120 steps in a fresh process, in 10 turns between "
        "those of the others."
    )
    assert seeds.startswith("Accuracy: 3 seeds, paired")
    assert "3% of throughput, 3% of memory, 1 point of accuracy" in margins
    assert calm.startswith("A/A, baseline against itself: 0.99x the throughput (0.99 to 1.01), 1.000x the peak memory")


def test_a_noisy_machine_is_called_one(noisy: Made) -> None:
    why = noisy.comparison.noise_throughput.why_untrusted
    assert why
    assert f"Untrusted {why}." in sentences.banner(noisy.comparison)
    assert "A/A, baseline against itself: throughput untrusted [" in sentences.basis(noisy.comparison)[-1]


def test_what_all_verdicts_suffer_from_is_said_once(noisy: Made, mixed: Made, usual: Made) -> None:
    why = noisy.comparison.noise_throughput.why_untrusted
    for each in noisy.comparison.variants[1:]:
        assert each.reasons[0] == why
        assert sentences.reasons(each, noisy.comparison) == sentences.sentences(each.reasons[1:])
    assert sentences.banner(mixed.comparison) == sentences.banner(usual.comparison) == []
    [untrusted] = [each for each in mixed.comparison.variants if each.variant == "untrusted"]
    assert "8 of 12 rounds had to be refused" in sentences.reasons(untrusted, mixed.comparison)[0]
    stopped, _ = made(make_results(), rounds=4, interrupted=True, refused={})
    assert sentences.banner(stopped)[0].startswith("Untrusted throughput and peak memory: the baseline was measured")
    assert sentences.banner(stopped)[1] == "The bench was interrupted after 4 round(s): run `dvc repro bench`."
    decided, _ = made(make_results(), interrupted=True)
    assert sentences.banner(decided) == []


def test_notes_say_what_was_left_out_refused_and_resumed() -> None:
    baseline, ddp, memory = make_results()
    runs = (
        make_run(0),
        make_run(1, refusals=("the GPU throttled",)),
        make_run(2, refusals=("the GPU throttled", "something recompiled."), resumes=1),
    )
    refused = {"ddp": {4: REASON, 6: REASON.replace("31", "48"), 7: "the allocator retried"}}
    comparison, _ = made([baseline, ddp, memory.model_copy(update={"runs": runs})], refused=refused)
    assert sentences.notes(comparison) == [
        ("memory", "Left out: bf16, as this CPU would emulate it."),
        ("memory", "Refused in training, seed 1, 2: the GPU throttled."),
        ("memory", "Refused in training, seed 2: something recompiled."),
        ("memory", "Interrupted and resumed: seed 2."),
        ("ddp", f"Refused in 2 of 12 rounds: in round 5, {REASON}."),
        ("ddp", "Refused in 1 of 12 rounds: in round 8, the allocator retried."),
    ]


def test_a_disturbed_training_says_so_where_its_times_stand(usual: Made) -> None:
    runs = (make_run(0), make_run(1, refusals=("the GPU throttled",)), make_run(2))
    ddp = usual.comparison.variants[1].model_copy(update={"runs": runs})
    headline, time, _ = tables(usual.comparison)
    for column in (headline.columns[3], time.columns[2]):
        assert column.cell(ddp).beside[-1] == "seed 1 disturbed"
        assert "disturbed" not in str(column.cell(usual.comparison.variants[1]))
    comparison = usual.comparison.model_copy(update={"variants": (usual.comparison.variants[0], ddp)})
    chart = pictures.charts(comparison, {each.variant: [] for each in comparison.variants})[0]
    assert chart.x_label == "training seconds, without evaluation; ddp: seed 1 disturbed"


@pytest.mark.parametrize(("images", "said"), [(1999, True), (2000, False)])
def test_a_small_test_set_is_called_one(usual: Made, images: int, said: bool) -> None:
    dataset = usual.comparison.dataset.model_copy(update={"test_count": images})
    accuracy = tables(usual.comparison.model_copy(update={"dataset": dataset}))[0].columns[2]
    assert ("on these test images" in accuracy.definition) is said


def test_notes_say_what_a_variant_decided_and_that_weak_scaling_is_another_job() -> None:
    baseline, ddp, _ = make_results()
    applied = {**ddp.applied, "scaling": "weak", "gradient_accumulation": "auto"}
    decided = {"auto_micro_batch": "2 micro-batch(es) of 128 samples a process, as 256 did not fit"}
    changed = {"applied": applied, "batch_size": 512, "learning_rate": 0.2, "micro_batches": 2, "decided": decided}
    measured = [baseline, ddp.model_copy(update=changed)]
    bench = make_bench(measured, refused={})
    arms = tuple(arm.model_copy(update=changed) if arm.variant == "ddp" else arm for arm in bench.arms)
    comparison, _ = made(measured, refused={}, arms=arms)
    assert sentences.notes(comparison) == [
        ("ddp", "Decided by auto_micro_batch: 2 micro-batch(es) of 128 samples a process, as 256 did not fit."),
        (
            "ddp",
            "Weak scaling: another job than the others', with a global batch of 512 and a peak learning rate of 0.2. "
            "Throughput is in samples, so its ratio stands; a step is longer.",
        ),
    ]
    with pytest.raises(ComparisonError, match=r"in 2 process\(es\) and 2 micro-batch\(es\) was trained"):
        made(measured, refused={}, arms=bench.arms)


def test_notes_say_whose_memory_is_not_counted() -> None:
    baseline, ddp, _ = make_results()
    changed = {"applied": {**ddp.applied, "data_loading": "dataloader"}}
    measured = [baseline, ddp.model_copy(update=changed)]
    arms = tuple(
        arm.model_copy(update=changed) if arm.variant == "ddp" else arm for arm in make_bench(measured, refused={}).arms
    )
    comparison, _ = made(measured, refused={}, arms=arms)
    (note,) = sentences.notes(comparison)
    assert note == (
        "ddp",
        "Peak memory is the trainer's: that of the DataLoader's worker processes, if any, is in no figure.",
    )


def test_shares_that_disagree_or_are_missing_are_named(usual: Made) -> None:
    notes = sentences.share_notes(usual.comparison)
    assert any(note.startswith("activation_checkpointing in memory: The effect on peak memory") for note in notes)
    assert "bf16 in memory was not measured: this CPU would emulate it." in notes
    assert notes[-1].startswith("A verdict beside an accuracy that is not trained alone is of throughput and peak")
    known = [each.model_copy(update={"verdict": None}) for each in usual.comparison.shares]
    assert sentences.share_notes(usual.comparison.model_copy(update={"shares": tuple(known)})) == notes[:-1]


@pytest.mark.parametrize(
    ("commit", "said"),
    [("0123456789abcdef", "0123456789ab"), ("0123456789abcdef+", "0123456789ab, with changes"), (None, "unknown")],
)
def test_the_commit_of_the_measurement(usual: Made, commit: str | None, said: str) -> None:
    assert sentences.measured_at(usual.comparison.bench.model_copy(update={"commit": commit})) == said


def test_lists_of_devices_are_shown_key_by_key() -> None:
    assert formats.flat({"gpus": [{"model": "A"}, {"model": "B"}], "none": [], "flags": ["x"]}) == [
        ("gpus.0.model", "A"),
        ("gpus.1.model", "B"),
        ("none", "[]"),
        ("flags", '["x"]'),
    ]


def test_a_loss_and_a_metric_of_the_user_s_own_are_named(usual: Made) -> None:
    train = usual.comparison.train | {"loss": "my_losses:focal", "metric": "my_scores:top_two"}
    own = usual.comparison.model_copy(update={"train": train})
    assert {"loss my_losses:focal", "accuracy is the mean of my_scores:top_two"} <= set(sentences.job(own))
    assert not any("accuracy" in part or "loss" in part for part in sentences.job(usual.comparison))
    assert sentences.metric(own) == "Mean of my_scores:top_two, a score from 0 to 1 a sample,"
    assert sentences.metric(usual.comparison) == "Correct"
