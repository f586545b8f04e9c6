from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from pipeline import results
from pipeline.comparison.compare import compare
from pipeline.comparison.comparison_file import Comparison, EqualTime
from pipeline.comparison.consistency import ComparisonError, broken_links, read_all
from pipeline.comparison.stats import Decision, decide
from pipeline.comparison.summaries import accuracy_differences, equal_time, over_rounds, time_to_target
from pipeline.files import file_sha256
from pipeline.params import Compare, Margins
from pipeline.report import facts, markdown
from pipeline.results import Arm, Bench, Result, Unit, summarise
from pipeline.results.figures import (
    ACHIEVED,
    FIRST_STEP,
    MEMORY,
    PREDICTION_ERROR,
    START,
    STEP_P50,
    THROUGHPUT,
    TRAINING,
    UTILISATION,
)
from tests.factories import (
    ENVIRONMENT,
    foreign_load,
    known,
    make_arm,
    make_bench,
    make_comparison,
    make_flops,
    make_histories,
    make_history,
    make_ledgers,
    make_params,
    make_ratio,
    make_result,
    make_results,
    make_run,
    make_window,
    with_samples,
    with_speeds,
)
from tests.report.conftest import without_memory

BASELINE = make_result("baseline")


# Verdicts


def test_every_variant_but_the_baseline_has_a_verdict() -> None:
    baseline, ddp, memory = make_comparison().variants
    assert (baseline.verdict, ddp.verdict, memory.verdict) == (None, "pays", "trades")
    assert (baseline.throughput, baseline.memory, baseline.accuracy, baseline.reasons) == (None, None, None, ())
    speed, peak, accuracy = known(memory.throughput), known(memory.memory), known(memory.accuracy)
    assert [speed.estimate, peak.estimate] == pytest.approx([0.8, 0.55], rel=0.02)
    assert accuracy.estimate == pytest.approx((-10 + 5 + 5) / 10_000 / 3)
    assert (speed.decision, peak.decision, accuracy.decision, memory.reasons) == ("worse", "better", "same", ())


@pytest.mark.parametrize(("unit", "decision"), [(Unit(), "undecided"), (Unit(name="tokens", per_sample=64), "same")])
def test_equal_accuracies_of_many_tokens_are_the_same(unit: Unit, decision: str) -> None:
    few = known(BASELINE.dataset).model_copy(update={"test_count": 32})
    baseline, tokened = (
        make_result(
            name,
            [
                make_run(seed, test_correct=8, test_count=32, test_accuracy=0.25, model_sha256=f"{name} {seed}")
                for seed in (0, 1, 2)
            ],
            dataset=few,
            unit=unit,
        )
        for name in ("baseline", "other")
    )
    accuracy = known(make_comparison([baseline, tokened]).variants[1].accuracy)
    assert (accuracy.estimate, accuracy.decision) == (0.0, decision)


@pytest.mark.parametrize(
    ("throughput", "memory", "correct", "verdict", "front"),
    [
        (1.5, 1.0, 0, "pays", {"other"}),
        (1.0, 0.7, 0, "pays", {"other"}),
        (1.0, 1.0, 300, "pays", {"other"}),
        (1.5, 1.5, 0, "trades", {"baseline", "other"}),
        (1.5, 0.5, -300, "trades", {"baseline", "other"}),
        (0.7, 1.0, 300, "trades", {"baseline", "other"}),
        (1.005, 0.995, 1, "neutral", {"baseline", "other"}),
        (0.7, 1.0, 2, "costs", {"baseline"}),  # more accurate, but within the margin
        (1.0, 1.0, -300, "costs", {"baseline"}),
    ],
)
def test_verdict_and_pareto_front_weigh_throughput_memory_and_accuracy(
    throughput: float, memory: float, correct: int, verdict: str, front: set[str]
) -> None:
    changed = make_result("other", [make_run(seed, test_correct=9000 + correct) for seed in (0, 1, 2)])
    measured = [BASELINE, changed]
    bench = make_bench(measured, throughput={"other": throughput}, memory={"other": memory})
    variants = make_comparison(measured, bench).variants
    assert variants[1].verdict == verdict
    assert {variant.variant for variant in variants if variant.on_front} == front


def test_decided_alone_may_be_undecided_among_many() -> None:
    """All intervals of a figure have one confidence, and each agrees with its decision."""

    def compared(others: int) -> Comparison:
        names = [f"other{number}" for number in range(others)]
        measured = [BASELINE, *(make_result(name, [make_run(seed) for seed in (0, 1, 2)]) for name in names)]
        bench = make_bench(measured, throughput={"other0": 1.045})
        first = known(bench.arm("variant", "other0"))
        alike = with_samples(bench, lambda arm: first.samples if arm.variant in names else arm.samples)
        tenth = {name: 1 + 1e-4 * place for place, name in enumerate(names)}  # no two arms have the same samples
        return make_comparison(measured, with_speeds(alike, lambda arm, _: tenth.get(arm.variant, 1.0)))

    for others, confidence, decision in ((1, 0.95, "better"), (10, 0.99, "undecided")):
        ratios = [variant.throughput for variant in compared(others).variants if variant.throughput]
        assert {ratio.confidence for ratio in ratios} == {confidence}
        assert ratios[0].decision == decision
        assert all(ratio.decision == decide(ratio, ratio.margin) for ratio in ratios)


def test_the_margins_are_the_settings() -> None:
    measured = [BASELINE, make_result("other", [make_run(seed, test_correct=9150) for seed in (0, 1, 2)])]
    bench = make_bench(measured, throughput={"other": 1.1}, memory={"other": 1.2})

    def decisions(**margins: float) -> list[str]:
        comparison = make_comparison(measured, bench, margins=margins)
        assert comparison.margins.model_dump().items() >= margins.items()
        changed = comparison.variants[1]
        return [figure.decision for figure in (changed.throughput, changed.memory, changed.accuracy) if figure]

    assert decisions() == ["better", "worse", "better"]
    assert decisions(throughput=0.15) == ["same", "worse", "better"]
    assert decisions(memory=0.25) == ["better", "same", "better"]
    assert decisions(accuracy=0.02) == ["better", "worse", "same"]


def test_the_same_weights_have_the_same_accuracy() -> None:
    """This is so even if the evaluations differ in precision, and for any number of seeds."""
    baseline = make_result("baseline", [make_run(0, test_correct=9000), make_run(1, test_correct=9010)])
    counted = [make_run(run.seed, test_correct=8800, model_sha256=run.model_sha256) for run in baseline.runs]
    accuracy = known(make_comparison([baseline, make_result("other", counted)]).variants[1].accuracy)
    assert (accuracy.decision, accuracy.low, accuracy.estimate, accuracy.high) == ("same", 0.0, 0.0, 0.0)
    changed = make_result("other", [counted[0], make_run(1, test_correct=9110)])
    assert accuracy_differences(changed, baseline) == {0: 0.0, 1: 0.01}


def test_what_is_undecided_says_what_would_decide_it() -> None:
    measured = [
        make_result("baseline", [make_run(seed, test_correct=9000) for seed in (0, 1, 2)]),
        make_result("other", [make_run(seed, test_correct=9000 + n) for seed, n in ((0, 90), (1, -90), (2, 20))]),
    ]
    bench = make_bench(measured, throughput={"other": 1.05}, noise=0.03)
    changed = make_comparison(measured, bench).variants[1]
    speed, accuracy = changed.reasons
    assert changed.verdict == "undecided"
    assert speed.startswith("throughput is undecided: another session helps most (bench --again); about ")
    assert "(set bench.max_minutes: " in speed
    assert accuracy.startswith("accuracy is undecided with 3 seeds: about ")
    ended = bench.model_copy(update={"config": {"bench": {"max_rounds": 12, "max_minutes": 3.0}}})
    assert "(set bench.max_rounds: " in make_comparison(measured, ended).variants[1].reasons[0]


def test_skipped_techniques_are_not_measured_longer() -> None:
    skipped = {"bf16": "this CPU would emulate it"}
    for applied, said in (({}, "it trains exactly like the baseline"), ({"channels_last": True}, "another session")):
        measured = [BASELINE, make_result("other", applied=applied, skipped=skipped)]
        changed = make_comparison(measured, make_bench(measured, throughput={"other": 1.03}, noise=0.02)).variants[1]
        assert changed.verdict == "undecided"
        assert said in changed.reasons[0]
        assert len(changed.reasons) == 1


@pytest.mark.parametrize(("rounds", "verdicts"), [(7, ["pays", "trades"]), (4, ["untrusted", "untrusted"])])
def test_an_interrupted_bench_is_used(rounds: int, verdicts: list[str]) -> None:
    variants = make_comparison(bench=make_bench(rounds=rounds, interrupted=True)).variants[1:]
    assert [variant.verdict for variant in variants] == verdicts
    interrupted = f"the bench was interrupted after {rounds} rounds: run `dvc repro bench`"
    assert [interrupted in variant.shared_reasons for variant in variants] == [rounds == 4] * 2


def test_a_noisy_machine_makes_every_variant_untrusted() -> None:
    for throughput, noise in ((1.1, 0.01), (1.0, 0.5)):
        control = make_arm("baseline", "aa_control", throughput=throughput, noise=noise)
        bench = make_bench()
        bench = bench.model_copy(update={"arms": (*bench.arms[:-1], control)})
        comparison = make_comparison(bench=bench)
        why = known(comparison.noise_throughput.why_untrusted)
        assert "the baseline measured against itself" in why
        ddp, memory = comparison.variants[1:]
        for variant in (ddp, memory):
            assert (variant.verdict, known(variant.memory).decision == "untrusted") == ("untrusted", False)
        assert ddp.shared_reasons == memory.shared_reasons == (f"throughput: {why}",)
        assert memory.reasons == ("decided nevertheless: saves memory",)
        assert not any(variant.on_front for variant in comparison.variants)
    assert make_comparison(max_spread=0.001).variants[1].verdict == "untrusted"


def test_variants_beat_each_other_too() -> None:
    measured = [BASELINE, make_result("fast"), make_result("faster"), make_result("refused")]
    bench = make_bench(
        measured,
        throughput={"fast": 1.3, "faster": 1.6, "refused": 9.0},
        memory={"fast": 1.3, "faster": 1.2},
        rejected={"refused": dict.fromkeys(range(8), "it throttled")},
    )
    variants = make_comparison(measured, bench).variants
    assert known(variants[3].throughput).estimate == pytest.approx(9.0, rel=0.05)  # known, but not trusted
    assert {variant.variant for variant in variants if variant.on_front} == {"baseline", "faster"}


# Figures of the bench


def test_figures_are_medians_of_samples_that_count() -> None:
    fields = ("samples_per_second", "step_p50_ms", "step_p90_ms", "step_p99_ms", "input_wait_fraction")
    windows = [
        make_window(samples_per_second=1e3 * index, step_p50_ms=10.0 + index, step_p90_ms=20.0 + index,
                    step_p99_ms=30.0 + index, input_wait_fraction=0.1 * index, peak_memory_bytes=1000 * index)
        for index in range(1, 8)
    ]  # fmt: skip
    windows[6] = windows[6].model_copy(update=dict.fromkeys(fields) | {"rejections": (foreign_load(),)})
    (measured,) = make_comparison([BASELINE], with_samples(make_bench([BASELINE]), lambda _: windows)).variants
    assert [measured.figures[name] for name in fields] == [3500.0, 13.5, 23.5, 33.5, pytest.approx(0.35)]
    assert (measured.of(MEMORY), measured.rejected) == (4000, 1)  # the seventh sample's memory counts


def test_unknown_memory_leaves_the_rest_to_be_judged() -> None:
    results = make_results()
    comparison = make_comparison(results, without_memory(make_bench(results, throughput={"ddp": 1.6})))
    assert {variant.variant: variant.verdict for variant in comparison.variants}["ddp"] == "pays"


def test_utilisation_is_the_models_flops_over_the_devices_peak() -> None:
    memory = {"activation_checkpointing": True}
    flops = {"baseline": make_flops({}, 1e12), "ddp": make_flops({}), "memory": make_flops(memory, 1e12)}
    shares = {"baseline": 6.3e-6, "ddp": None, "memory": 6.3e-6}  # without recomputation; ddp's device is unknown
    for variant in make_comparison(bench=make_bench(flops=flops)).variants:
        assert variant.of(ACHIEVED) == 6_300_000 * variant.of(THROUGHPUT)
        share = shares[variant.variant]
        assert variant.of(UTILISATION) == (share and pytest.approx(share * variant.of(THROUGHPUT)))


def test_the_predictions_error_is_against_what_tensors_take() -> None:
    ledgers = make_ledgers()
    peak = {"peak_bytes": round(0.9 * ledgers.measured.tensors_bytes)}
    off = ledgers.model_copy(update={"predicted": known(ledgers.predicted).model_copy(update=peak)})
    unforeseen = make_ledgers(predicted=None, why_not_predicted="ddp is not predicted")
    bench = make_bench(ledgers={"baseline": off, "ddp": unforeseen})
    errors = [variant.of(PREDICTION_ERROR) for variant in make_comparison(bench=bench).variants]
    assert errors == [pytest.approx(-0.1), None, None]


# Figures of the training runs


def test_figures_of_the_training_runs_keep_their_names() -> None:
    runs = [make_run(seed, samples_per_second=speed, peak_memory_bytes=memory * 2**20, train_seconds=6.0)
            for seed, speed, memory in ((0, 29_000.0, 60), (1, 30_000.0, 50), (2, 40_000.0, 40))]  # fmt: skip
    baseline, fast = make_comparison([BASELINE, make_result("fast", runs)]).variants
    assert fast.trained == summarise(runs)
    assert (fast.of(TRAINING), baseline.time_to_target_ratio) == (6.0, None)
    assert (fast.of(START), fast.of(FIRST_STEP)) == (2.4, 0.12)  # of the first seed
    assert fast.runs == tuple(runs)


@pytest.mark.parametrize(
    ("train", "share", "correct", "why"),
    [
        (
            {},
            0.59,
            (5900, 5900),
            "say nothing: the accuracy of `a`, 59.00%, hardly exceeds that of a constant answer, 59.00% (the share",
        ),
        (
            {},
            0.59,
            (5900, 6090),
            "say nothing: the accuracy of `a`, 59.95%, hardly exceeds that of",
        ),  # of 10,000 samples
        ({}, 0.59, (5900, 6110), ""),
        ({"metric": "label_accuracy"}, 0.99, (9000, 9000), ""),
        (
            {"metric": "own:f1", "metric_over": "test_set"},
            0.59,
            (3711, 3711),
            "may say nothing: all seeds of `a` have the same score, 37.11%, as a model has that",
        ),
        ({"metric": "own:f1", "metric_over": "test_set"}, 0.59, (3711, 3712), ""),
    ],
    ids=["constant", "by_chance", "learnt", "labels", "own", "own_learnt"],
)
def test_a_baseline_that_learns_nothing_is_said_first(
    train: dict[str, Any], share: float, correct: tuple[int, int], why: str
) -> None:
    made = [make_result(name, [make_run(seed, test_correct=of) for seed, of in enumerate(correct)]) for name in "ab"]
    for result in made:
        result.config["train"].update(train)
    dataset = made[0].dataset.model_copy(update={"most_frequent_fraction": share}) if made[0].dataset else None
    comparison = make_comparison([result.model_copy(update={"dataset": dataset}) for result in made])
    said = markdown(comparison)
    assert f"> **Comparisons of accuracy {why}" in said if why else "Comparisons of accuracy" not in said


def test_accuracy_is_paired_by_seed_not_by_position() -> None:
    baseline = make_result(
        "baseline", [make_run(seed, test_correct=n) for seed, n in ((0, 9000), (1, 9100), (2, 9200))]
    )
    changed = make_result("other", [make_run(seed, test_correct=n) for seed, n in ((2, 9210), (0, 9030), (1, 9080))])
    first, second = make_comparison([baseline, changed]).variants
    difference = known(second.accuracy)
    assert {seed: part.estimate for seed, part in difference.parts.items()} == {"0": 0.003, "1": -0.002, "2": 0.001}
    assert difference.estimate == pytest.approx(0.002 / 3)
    assert difference.deviation == pytest.approx(statistics.stdev([0.003, -0.002, 0.001]))
    assert first.accuracy is None


@pytest.mark.parametrize("field", ["samples_per_second", "peak_memory_bytes"])
def test_a_number_unknown_in_one_training_run_is_unknown(field: str) -> None:
    refused = make_run(1, rejections=("the GPU throttled",)).model_copy(update={field: None})
    partly = make_result("other", [make_run(0), refused, make_run(2)])
    baseline, compared = make_comparison([BASELINE, partly]).variants
    assert compared.trained[field] is None
    assert baseline.trained[field] is not None
    assert compared.trained["train_seconds"] == 9.0  # other figures are still known


@pytest.mark.parametrize(
    ("late", "steps", "samples"),
    [
        ((0.80, 0.84), [470, None, 470], None),
        ((0.80, 0.85), [470, 470, 470], 470 * 256),
        ((0.9,), [470, 235, 470], 470 * 256),
        ((0.9,), [235, 235, 470], None),  # the median lies before the first evaluation
    ],
)
def test_time_to_target_is_the_median_of_all_seeds(
    late: tuple[float, ...], steps: list[int | None], samples: int | None
) -> None:
    first = 0.80 if steps[0] == 470 else 0.86
    history = [*make_history((0,), (first, 0.90)), *make_history((1,), late), *make_history((2,), (0.80, 0.90))]
    reached = time_to_target(BASELINE, history, 0.85, 20_000.0)
    assert [seed.steps for seed in reached.seeds] == steps
    assert (reached.samples, reached.reached_count) == (samples, 3 - steps.count(None))
    assert reached.train_seconds == (samples and samples / 20_000)
    assert time_to_target(BASELINE, history, 0.85, None).train_seconds is None


def test_the_ratio_of_times_is_steps_over_speeds() -> None:
    histories = {"baseline": make_history(), "ddp": make_history(accuracies=(0.7, 0.8, 0.9))}
    measured = [BASELINE, make_result("ddp")]
    ddp = make_comparison(measured, histories=histories).variants[1]
    speed, ratio = known(ddp.throughput), known(ddp.time_to_target_ratio)
    expected = [705 / 470 / known(speed_ratio) for speed_ratio in (speed.estimate, speed.high, speed.low)]
    assert [ratio.estimate, ratio.low, ratio.high] == pytest.approx(expected)
    assert make_comparison(measured, target_accuracy=0.95).variants[1].time_to_target_ratio is None


def test_at_equal_time_the_slower_has_come_less_far() -> None:
    runs = [make_run(seed, steps=705) for seed in range(3)]
    applied = {"model": "resnet9", "distillation": {"teacher": "baseline"}}
    baseline, taught = make_result("baseline", runs), make_result("taught", runs, applied=applied, parameter_count=9)
    histories = {"baseline": make_history(), "taught": make_history(accuracies=(0.7, 0.8, 0.95))}
    bench = make_bench([baseline, taught], throughput={"taught": 0.5}, noise=0.0)
    first, second = compare([baseline, taught], histories, [bench], Compare(), ENVIRONMENT).variants
    assert first.equal_time is None
    reached = known(second.equal_time)
    assert reached.train_seconds == pytest.approx(705 * 256 / (2 * second.of(THROUGHPUT)), rel=1e-3)
    assert (reached.accuracy_fraction, reached.baseline_accuracy_fraction) == pytest.approx((0.7, 0.9))
    assert (first.another_model, second.another_model) == (None, "resnet9, 9 parameters")

    def at(estimate: float, decision: Decision, speed: float | None = 4e4, width: float = 0.0) -> EqualTime | None:
        ratio = make_ratio(estimate, estimate - width, estimate + width, margin=0.03, decision=decision)
        return equal_time(taught, baseline, histories, speed, ratio)

    assert at(0.1, "worse") is None  # less than an epoch
    assert at(0.5, "worse", speed=None) is None
    undecided, decided = known(at(0.96, "undecided", width=0.05)), known(at(0.96, "worse", width=0.01))
    # At 0.91 and 0.96 the variant has not had its last evaluation, at 1.01 the baseline has not had its own.
    widest = undecided.accuracy_fraction, undecided.difference_low_fraction, undecided.difference_high_fraction
    assert widest == pytest.approx((0.8, 0.8 - 0.9, 0.95 - 0.86))
    assert decided.difference_low_fraction == decided.difference_high_fraction
    assert at(0.35, "worse", width=0.05) is None  # at the lower end, it is less than an epoch
    assert at(0.5, "untrusted") is None
    assert equal_time(taught, baseline, histories, 4e4, None) is None
    same = known(at(0.98, "same"))  # both end together, so the noise of the speeds costs neither its last epoch
    assert list(same.model_dump().values()) == pytest.approx([4.512, 0.95, 0.9, 0.05, 0.05])


def test_weights_that_the_teacher_no_longer_has_are_said(tmp_path: Path) -> None:
    teacher = make_result("teacher", [make_run(0), make_run(1)])
    hashes = [run.model_sha256 for run in teacher.runs]
    applied = {"distillation": {"teacher": "teacher"}}
    learned = [make_run(seed, teacher_sha256=sha256) for seed, sha256 in enumerate(hashes)]
    assert broken_links([teacher, make_result("taught", learned, applied=applied)], tmp_path) == []
    learned[1] = make_run(1, teacher_sha256="0" * 64)
    (problem,) = broken_links([teacher, make_result("taught", learned, applied=applied)], tmp_path)
    assert "results/taught.json holds a run that learned from weights that teacher no longer has. Run `dvc" in problem
    assert "distil@taught" in problem


def test_a_throughput_that_is_not_trusted_gives_no_time() -> None:
    noisy = make_bench([BASELINE, make_result("ddp")], noise=0.5)
    measured = [BASELINE, make_result("ddp")]
    baseline, ddp = compare(measured, make_histories(measured), [noisy], Compare(), ENVIRONMENT).variants
    assert (baseline.time_to_target.train_seconds, ddp.time_to_target.train_seconds) == (None, None)
    assert (baseline.time_to_target.samples, ddp.time_to_target_ratio) == (470 * 256, None)


def test_the_baseline_comes_first() -> None:
    measured = [make_result("b"), BASELINE, make_result("a")]
    bench = make_bench([BASELINE, *measured[::2]])
    names = [variant.variant for variant in make_comparison(measured, bench, baseline="baseline").variants]
    assert names == ["baseline", "b", "a"]


def test_the_comparison_is_json_with_raw_samples() -> None:
    bench = make_bench()
    values = json.loads(make_comparison(bench=bench).to_json())
    assert next(iter(values)) == "schema"
    assert (values["schema"], values["bench"]["schema"]) == (2, 4)
    assert values["bench"] == json.loads(bench.to_json())
    assert values["environment"] == ENVIRONMENT | {"relied_on": {"variants": {}}}, "stages must be left out"
    assert [variant["verdict"] for variant in values["variants"]] == [None, "pays", "trades"]


OTHER_DATA = known(BASELINE.dataset).model_copy(update={"sha256": "c" * 64})


BENCH = make_bench()
HASH = ENVIRONMENT["hash"][:12]


def with_arm(variant: str, bench: Bench = BENCH, **changes: Any) -> Bench:
    arms = (
        arm.model_copy(update=changes) if (arm.role, arm.variant) == ("variant", variant) else arm for arm in bench.arms
    )
    return bench.model_copy(update={"arms": tuple(arms)})


@pytest.mark.parametrize(
    ("bench", "named"),
    [
        (
            make_bench(environment="a" * 64),
            f"environment aaaaaaaaaaaa, but environment.json describes environment {HASH}",
        ),
        (
            make_bench(dataset=OTHER_DATA),
            "bench.json was measured on fashion_mnist (60000 + 10000 samples, SHA-256 ccccc",
        ),
        (with_arm("ddp", world_size=4), "variant 'ddp' with world_size 4, but it was trained with 2"),
        (with_arm("ddp", placement="streamed"), "with 'resident' (set train.placement if memory was short)"),
        (make_bench(baseline="ddp"), "the baseline 'baseline' against itself"),
        (
            BENCH.model_copy(update={"arms": tuple(arm for arm in BENCH.arms if arm.variant != "ddp")}),
            "did not measure variant 'ddp'",
        ),
        (BENCH.model_copy(update={"arms": BENCH.arms[:-1]}), "the baseline 'baseline' against itself"),
        (with_arm("baseline", samples=BENCH.arms[0].samples[:-1]), "of the baseline than 12 rounds give"),
    ],
)
def test_a_bench_of_other_results_is_refused(bench: Bench, named: str) -> None:
    with pytest.raises(ComparisonError, match=f"{re.escape(named)}.*Run `dvc repro"):
        make_comparison(make_results(), bench)


def test_all_rejections_advise_one_value_of_the_foreign_load() -> None:
    """The raw samples keep the values that they advised."""
    rejected = {"ddp": {2: foreign_load(0.21, 0.4)}, "memory": dict.fromkeys(range(8), foreign_load())}
    benches = make_bench(rejected=rejected), make_bench(rejected={"ddp": {1: foreign_load(0.73, 0.9)}}, keys={})
    comparison = compare(make_results(), make_histories(make_results()), benches, Compare(), ENVIRONMENT)
    assert comparison.bench.to_json() == benches[0].to_json()
    assert re.findall(r"max\\_foreign\\_load: (\S+)\.", markdown(comparison)) == ["0.9"] * 3


def test_margins_that_were_changed_after_the_measurement_are_told() -> None:
    def told(then: Margins | None) -> list[str]:
        compared = make_comparison(bench=make_bench(margins=then), margins={"throughput": 0.1})
        return facts.moved_margins(compared)

    assert told(Margins(throughput=0.1)) == told(None) == []
    assert told(Margins()) == ["compare.margins.throughput from 0.03 to 0.1"]


def test_decided_early_pairs_with_the_first_rounds() -> None:
    whole = make_bench(rounds=8, rejected={})
    longer = make_bench(rounds=12, rejected={})
    stopped = with_arm("ddp", longer, samples=longer.arms[1].samples[:8])
    early, later = (known(variant.throughput) for variant in make_comparison(bench=stopped).variants[1:])
    assert (early.pairs, later.pairs) == (8, 12)
    assert early.estimate == known(make_comparison(bench=whole).variants[1].throughput).estimate
    assert facts.ended_early(stopped) == ["ddp after 8 rounds"]
    nearly = with_arm(
        "ddp", make_bench(throughput={"ddp": 1.03}, rejected={}), samples=longer.arms[0].samples[:8], settled=True
    )
    assert "bench --again" in " ".join(make_comparison(bench=nearly, margins={"throughput": 0.001}).variants[1].reasons)


def test_settled_early_is_judged_by_its_own_rounds() -> None:
    """In the first ten of thirty rounds, the baseline is 7% slower than its control."""

    def factor(arm: Arm, number: int) -> float:
        if number >= 10:
            return arm.variant == "baseline"
        return 1 / 1.07 if arm.name == "baseline" else 1

    throughput = {"ddp": 1.06, "memory": 1.06}
    usual = make_bench(rounds=30, rejected={}, throughput=throughput, memory={}, ablate=True)
    comparison = make_comparison(bench=with_speeds(usual, factor))
    assert not comparison.noise_throughput.why_untrusted
    assert "excludes 1" in str(comparison.variants[1].reasons)
    judged = [
        ratio for share in comparison.shares for ratio in (share.added_throughput, share.stacked_throughput) if ratio
    ]
    assert {ratio.decision for ratio in judged} == {"untrusted"}


def test_settled_early_is_shown_at_everyone_s_pace() -> None:
    def factor(arm: Arm, number: int) -> float:
        return 1 if number < 10 else 0.5 * (arm.variant != "ddp")

    usual = make_bench(rounds=30, rejected={}, noise=0.0, throughput={"ddp": 1.5})
    baseline, ddp, _ = make_comparison(bench=with_speeds(usual, factor)).variants
    assert ddp.of(THROUGHPUT) == pytest.approx(1.5 * baseline.of(THROUGHPUT))


def test_every_problem_is_named_at_once() -> None:
    measured = [BASELINE, make_result("ddp", dataset=OTHER_DATA), make_result("memory", threads_per_process=1)]
    with pytest.raises(ComparisonError) as raised:
        make_comparison(measured, make_bench([BASELINE], environment="b" * 64))
    for said in (
        "variant 'ddp' was measured on fashion_mnist (60000 + 10000 samples, SHA-256 cccccccccccc)",
        "variant 'memory' computed with 1 thread per process, but the baseline with 2",
        "the bench was measured in environment bbbbbbbbbbbb",
        "the bench did not measure variant 'ddp'",
    ):
        assert said in str(raised.value)


def save(result: Result, root: Path, name: str | None = None) -> Result:
    history = results.history_file(name or result.variant, root)
    results.write_history(make_history(result.runs), history)
    written = result.model_copy(update={"history_sha256": file_sha256(history)})
    results.write(written, results.result_file(name or result.variant, root))
    return written


def test_files_are_read_in_the_order_asked_for(tmp_path: Path) -> None:
    ddp, baseline = (save(result, tmp_path / "results") for result in (make_result("ddp"), BASELINE))
    params = make_params([BASELINE, make_result("ddp")])
    measured, histories = read_all(params, tmp_path / "results")
    assert measured == [baseline, ddp]
    assert histories == dict.fromkeys(("baseline", "ddp"), make_history(BASELINE.runs))


def test_every_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    save(BASELINE, tmp_path)
    save(make_result("other"), tmp_path, name="renamed")
    save(make_result("cut"), tmp_path)
    save(make_result("older", config=BASELINE.config | {"train": BASELINE.config["train"] | {"epochs": 9}}), tmp_path)
    results.result_file("cut", tmp_path).write_text('{"schema": 1', encoding="utf-8")
    results.history_file("cut", tmp_path).write_text("seed,epoch\n0,one\n", encoding="utf-8")
    results.history_file("baseline", tmp_path).unlink()
    with pytest.raises(ComparisonError) as raised:
        read_all(make_params([make_result(name) for name in ("baseline", "ddp", "renamed", "cut", "older")]), tmp_path)
    message = str(raised.value)
    for file, said in (
        ("ddp.json", "is missing"),
        ("ddp/history.csv", "is missing"),
        ("baseline/history.csv", "is missing"),
        ("renamed.json", "does not match the present params.yaml: it holds the result of variant 'other'"),
        ("older.json", "does not match the present params.yaml: train.epochs is 9 in the result and 2 in params.yaml"),
        ("cut.json", "is not a file"),
        ("cut/history.csv", "is not a history"),
    ):
        assert f"{tmp_path / file} {said}" in message
    assert sum("dvc repro" in line for line in message.splitlines()) == 7


@pytest.mark.parametrize(("accepted", "shown"), [(3, None), (2, 12.8)])
def test_percentiles_of_few_judged_rounds_stay_unknown(accepted: int, shown: float | None) -> None:
    disturbed = make_window(step_p50_ms=None)  # accepted by a raised limit: it has kept its speed alone
    assert over_rounds(STEP_P50, [disturbed] * accepted + [make_window()] * 2) == shown
