from __future__ import annotations

from typing import Any

import pytest

from pipeline.comparison.ablation import shares
from pipeline.comparison.comparison_file import Share
from pipeline.comparison.sessions import table_of
from pipeline.comparison.stats import Difference
from pipeline.params import Margins
from pipeline.results import Bench
from tests.factories import known, make_accuracy, make_arm, make_bench, make_result, make_results
from tests.report.conftest import without_memory

STACK: dict[str, Any] = {"channels_last": True, "gradient_accumulation": 4}


def shares_of(
    bench: Bench, accuracies: dict[str, Difference] | None = None, max_spread: float = 0.15
) -> dict[str, Share]:
    table = table_of([bench], max_spread, {})
    return {share.technique: share for share in shares(table, accuracies or {}, Margins())}


def bench_of(
    *,
    variant: tuple[float, float] = (1.0, 1.0),
    without: tuple[float, float] = (1.0, 1.0),
    alone: tuple[float, float] = (1.0, 1.0),
    **changes: Any,
) -> Bench:
    """Return a bench of the variant ``stack`` and its technique channels_last.

    Each pair is an arm's throughput and memory, divided by the baseline's.
    """
    arms = (
        make_arm("baseline"),
        make_arm("stack", applied=STACK, throughput=variant[0], memory=variant[1]),
        make_arm("stack", "with", "channels_last", applied={"channels_last": True}, throughput=alone[0],
                 memory=alone[1]),
        make_arm("stack", "without", "channels_last", applied={"gradient_accumulation": 4}, throughput=without[0],
                 memory=without[1]),
        make_arm("baseline", "aa_control"),
    )  # fmt: skip
    measured = [make_result("baseline"), make_result("stack", applied=STACK)]
    return make_bench(measured, **{"arms": arms} | changes)


def test_a_share_is_told_alone_and_in_the_stack() -> None:
    share = shares_of(bench_of(variant=(2.0, 0.5), without=(1.6, 0.7), alone=(1.3, 0.9)))["channels_last"]
    ratios = (share.added_throughput, share.added_memory, share.stacked_throughput, share.stacked_memory)
    for ratio, expected in zip(ratios, (1.3, 0.9, 2.0 / 1.6, 0.5 / 0.7), strict=True):
        low, high = known(ratio).bounds
        assert 0.97 * expected < low <= high < 1.03 * expected
        assert (known(ratio).pairs, known(ratio).rejected, known(ratio).margin) == (12, 0, 0.03)
    assert (share.variant, share.why_not) == ("stack", None)


@pytest.mark.parametrize(
    ("alone", "verdict"),
    [((1.3, 1.0), "pays"), ((1.3, 1.3), "trades"), ((0.8, 1.0), "costs"), ((1.0, 1.0), "neutral")],
)
def test_the_verdict_is_that_of_the_technique_alone(alone: tuple[float, float], verdict: str) -> None:
    share = shares_of(bench_of(alone=alone, variant=(1.0, 1.0), without=(2.0, 0.5)))["channels_last"]
    assert (share.verdict, share.accuracy, share.accuracy_from) == (verdict, None, None)


def test_accuracy_is_of_a_trained_variant_that_applies_this() -> None:
    measured = [
        make_result("baseline"),
        make_result("stack", applied=STACK),
        make_result("wide", applied={"channels_last": True}),
    ]
    arms = [*bench_of(alone=(1.3, 1.0)).arms, make_arm("wide", applied={"channels_last": True})]
    bench = make_bench(measured, arms=tuple(arms))
    same, lost, unknown = (make_accuracy(differences) for differences in ([0.0] * 3, [-0.03] * 3, [0.0]))
    for accuracy, verdict in ((same, "pays"), (lost, "trades"), (unknown, "undecided")):
        share = shares_of(bench, {"stack": lost, "wide": accuracy})["channels_last"]
        assert (share.accuracy_from, share.accuracy, share.verdict) == ("wide", accuracy, verdict)


@pytest.mark.parametrize(
    ("processes", "world_size", "same"), [("auto", 2, True), (2, 2, True), ("auto", 4, False), (4, 4, False)]
)
def test_processes_are_part_of_what_was_trained(processes: int | str, world_size: int, same: bool) -> None:
    ddp = {"parallelism": "ddp", "processes": processes}
    arms = [
        *(arm for arm in bench_of().arms if arm.role != "with"),
        make_arm("stack", "with", "ddp", applied={"parallelism": "ddp"}, world_size=2, backend="gloo"),
        make_arm("ddp", applied=ddp, world_size=world_size, backend="gloo"),
    ]
    share = shares_of(make_bench(make_results(), arms=tuple(arms)), {"ddp": make_accuracy([0.0] * 3)})["ddp"]
    assert share.accuracy_from == ("ddp" if same else None)


def test_what_was_not_measured_says_why_and_nothing_else() -> None:
    bench = bench_of(not_ablated={"stack": {"bf16": "this CPU would emulate it"}})
    share = shares_of(bench)["bf16"]
    assert share == Share(variant="stack", technique="bf16", why_not="this CPU would emulate it")
    assert list(shares_of(bench)) == ["channels_last", "bf16"]
    none = shares_of(make_bench(not_ablated={"ddp": {"ddp": "it is all that ddp applies"}}))
    assert none == {"ddp": Share(variant="ddp", technique="ddp", why_not="it is all that ddp applies")}


def test_one_half_of_a_share_stands_alone() -> None:
    bench = bench_of(alone=(1.3, 1.0))
    reduced = bench.model_copy(update={"arms": tuple(arm for arm in bench.arms if arm.role != "without")})
    share = shares_of(reduced)["channels_last"]
    assert (share.verdict, share.stacked_throughput, share.stacked_memory) == ("pays", None, None)
    assert share.interaction is None
    alone = bench.model_copy(update={"arms": tuple(arm for arm in bench.arms if arm.role != "with")})
    share = shares_of(alone)["channels_last"]
    assert (share.verdict, share.added_throughput) == (None, None)
    assert share.stacked_throughput


def test_a_noisy_machine_leaves_no_share_to_trust() -> None:
    share = shares_of(bench_of(alone=(1.3, 1.0), variant=(0.5, 1.0)), max_spread=0.0001)["channels_last"]
    assert (share.verdict, known(share.added_throughput).decision, share.interaction) == (
        "untrusted",
        "untrusted",
        None,
    )


def test_unknown_memory_leaves_the_rest_to_be_judged() -> None:
    bench = without_memory(bench_of(alone=(1.3, 1.0)))
    share = shares_of(bench)["channels_last"]
    assert (share.verdict, known(share.added_memory).decision) == ("pays", "untrusted")


@pytest.mark.parametrize(
    ("alone", "beside", "noun"),
    [
        ((1.3, 1.0), (0.8, 1.0), "throughput"),
        ((1.3, 1.0), (1.6, 1.0), "throughput"),
        ((0.7, 1.0), (0.9, 1.0), "throughput"),
        ((1.0, 0.7), (1.0, 1.4), "peak memory"),
        ((1.0, 0.7), (1.0, 0.71), None),  # the intervals do not overlap, but the difference is within the margin
    ],
)
def test_interactions_are_named_where_alone_and_beside_others_disagree(
    alone: tuple[float, float], beside: tuple[float, float], noun: str | None
) -> None:
    sentence = shares_of(bench_of(alone=alone, variant=beside))["channels_last"].interaction
    assert sentence == (noun and f"The effect on {noun} is different in combination with the other techniques.")


def test_intervals_that_overlap_are_no_interaction() -> None:
    """The estimates differ by more than the margin, but the noise makes the intervals wide."""
    noisy = [
        make_arm("baseline", noise=0.3),
        make_arm("stack", applied=STACK, noise=0.3),
        make_arm("stack", "with", "channels_last", throughput=1.2, noise=0.3),
        make_arm("stack", "without", "channels_last", noise=0.3),
        make_arm("baseline", "aa_control", noise=0.3),
    ]
    share = shares_of(bench_of(arms=tuple(noisy)), max_spread=9.0)["channels_last"]
    added, stacked = (known(ratio).estimate for ratio in (share.added_throughput, share.stacked_throughput))
    assert abs(known(added) - known(stacked)) > 0.03
    assert share.interaction is None
