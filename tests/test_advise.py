"""The command ``advise``, on arms of known times and figures, with a simulated clock, and the rule of its race."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.races import Pool, record, replayed
from benchmarks.simulations import racing
from pipeline.benchmark import rounds
from pipeline.benchmark.server import ArmSpec, BenchError
from pipeline.benchmark.stage import Job
from pipeline.comparison.racing import RACED, Race, finalists, interaction
from pipeline.comparison.stats import Difference
from pipeline.errors import ConfigError
from pipeline.pages import size
from pipeline.params import Config, Margins, parse
from pipeline.plans import Plan, plan
from pipeline.results import read_document
from pipeline.results.figures import MEMORY, THROUGHPUT
from pipeline.tools import advise, candidates
from pipeline.tools.advised import FILE, Advice, LeftOut
from tests.factories import make_arm, make_bench, make_ratio
from tests.timed import Known, Timed, play
from tests.workspaces import CPU_ONLY, enter

PARAMS: dict[str, Any] = {"train": {"device": "cpu"}, "variants": {"baseline": {}}}


class Arms(Timed):
    """A server whose combinations act like the product of what they combine, unless they are known themselves.

    ``last``: candidate -> the number of its starts after which it fails.
    """

    def __init__(self, arms: dict[str, Known], last: dict[str, int]) -> None:
        Timed.__init__(self, {"baseline": Known()} | arms)
        self.last, self.opened = last, list[str]()

    def plan(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        asked = parse(PARAMS | {"variants": {"baseline": {}, name: values}})
        return plan(asked, name, CPU_ONLY).model_dump(mode="json")

    def open(self, name: str, plan: dict[str, Any], steps: int, **options: Any) -> None:
        self.opened.append(name)
        super().open(name, plan, steps, **options)
        if self.opened.count(name) > self.last.get(name, 10**9):
            raise BenchError(f"{name} cannot be measured: it ran out of memory.", name)

    def known(self, name: str) -> Known:
        parts = [self.arms.get(part, Known()) for part in name.partition(",")[0].split("--")]
        step, memory = (
            math.prod(getattr(part, of) / getattr(Known(), of) for part in parts) for of in ("step", "memory")
        )
        return self.arms.get(name.partition(",")[0]) or replace(parts[0], step=0.05 * step, memory=memory)


class Advised:
    """A run of ``advise`` for a job whose candidates are like the baseline, but for ``arms``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: dict[str, int] | None = None, **arms: Known) -> None:
        self.server = server = Arms({name.replace("__", "-"): known for name, known in arms.items()}, last or {})
        self.config = config = parse(PARAMS)
        Path("params.yaml").write_text("# ours\n" + yaml.safe_dump(PARAMS), encoding="utf-8")
        base = plan(config, "baseline", CPU_ONLY)
        spec = ArmSpec.of_variant("baseline", server, base.model_dump(mode="json"))
        control = spec.control()
        bench = make_bench()
        facts = {name: getattr(bench, name) for name in ("environment", "commit", "config", "dataset", "margins")}
        facts |= {"baseline": "baseline", "keys": {"baseline": "k"}}
        play(monkeypatch, advise, Job(server, {"baseline": base}, (spec, control), "cpu", facts, dict))
        monkeypatch.setattr(candidates, "_mixes_samples", lambda *_: False)

    def run(self, *only: str, minutes: float = 20.0, add: bool = False, memory: str | None = None) -> Advice:
        """Return the advice; the run must not have taken much longer than its minutes."""
        began = self.server.now
        advise.run(self.config, CPU_ONLY, minutes=minutes, memory=memory, add=add, only=only)
        assert (self.server.now - began + 3.0) / (60 * minutes) <= 1.1
        return self.known()

    def known(self) -> Advice:
        return read_document(FILE, Advice, "")


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch, here: object) -> Callable[..., Advised]:  # noqa: ARG001
    return lambda **options: Advised(monkeypatch, **options)


def test_the_best_are_combined_and_measured_again(
    advised: Callable[..., Advised], capsys: pytest.CaptureFixture[str]
) -> None:
    """One candidate raises, one hangs, one fails in a later round, two change the training: none ends the run."""
    job = advised(
        last={"gradient_accumulation-4": 2},
        channels_last=Known(step=0.03),
        activation_checkpointing=Known(step=0.055, memory=0.4),
        optimizer_in_backward=Known(memory=0.8),
        chunked_loss__8=Known(fails=True),
        compile=Known(opening=900.0),
        gradient_accumulation__4=Known(step=0.1, memory=0.3),
        for_loop_optimizer=Known(step=0.1, memory=1.2),
        activation_checkpointing____channels_last=Known(step=0.02, memory=0.4),  # less than the product
    )
    advice = job.run(add=True)
    assert advice.out["chunked_loss-8"].why == "cannot be measured: it has no such layer"
    assert advice.out["compile"].why == "cannot be measured: it took too long to open"
    assert advice.out["gradient_accumulation-4"].why == "cannot be measured: it ran out of memory"
    assert advice.out["for_loop_optimizer"].why.startswith(("beaten by ", "gains nothing over baseline: speed 0.5"))
    assert job.server.restarts == 2  # after the one that hangs, and after the one that fails in a round
    assert advice.finished
    best = "activation_checkpointing--channels_last--optimizer_in_backward"
    assert best in advice.finalists
    judged = advice.judged()
    assert judged[best][THROUGHPUT].estimate == pytest.approx(1 / 0.6 / 1.1, rel=0.02)
    assert judged[best][MEMORY].estimate == pytest.approx(0.32, rel=0.02)
    assert advice.ratios[best] == {figure.field: judged[best][figure] for figure in RACED}
    assert advice.ratios.keys() > {*advice.finalists}
    assert advice.final
    assert advice.final.rounds >= 8
    assert {arm.variant for arm in advice.final.arms} == {"baseline", *advice.finalists}
    sentence = advice.sentence()
    assert sentence.startswith("take `activation_checkpointing--channels_last`: ")
    acting = {(one.name, noun): ratio.estimate for one, ratio, noun in advice.interactions()}
    assert acting["activation_checkpointing--channels_last", "throughput"] == pytest.approx(1.65, rel=0.02)
    assert f"`{best}` if memory is short: " in sentence
    assert "<svg" in Path("reports/advice.html").read_text(encoding="utf-8")
    said = capsys.readouterr().out
    assert said.count(f"**{sentence}**") == 1
    assert "- activation_checkpointing + channels_last: the throughput is 1.6" in said
    assert "fp16, " in said[said.index("## Not tried") :]
    written = Path("params.yaml").read_text(encoding="utf-8")
    assert written.startswith("# ours")
    assert "# advise, 2026-11-20: " in written
    assert set(yaml.safe_load(written)["variants"]) == {"baseline", *advice.best()}


def test_without_a_gain_the_baseline_is_kept(advised: Callable[..., Advised]) -> None:
    job = advised(bf16=Known(step=0.2), channels_last=Known(step=0.06), for_loop_optimizer=Known(memory=1.2))
    advice = job.run("speed", "precision")
    assert advice.finalists == ()
    assert not advice.final
    assert "keep `baseline`: nothing that was tried is surely better; each of 6 candidates was beaten, failed or" in (
        advice.sentence()
    )
    assert "an error in at most 5% of such races" in advice.sentence()


def test_late_candidates_have_the_time_of_missing_finalists(advised: Callable[..., Advised]) -> None:
    names = ("activation_checkpointing", "selective_checkpointing", "checkpointing_budget__0__5")
    job = advised(**dict.fromkeys(names, Known(opening=40.0)), channels_last=Known(step=0.02))
    advice = job.run(minutes=6)
    raced = [{arm.variant for arm in bench.arms} for bench in advice.benches]
    assert ["channels_last" in variants for variants in raced] == [False, True]  # there was no time for it before
    assert advice.finalists == ("channels_last",)
    assert advice.sentence().startswith("take `channels_last`: ")


def test_what_was_too_dear_has_the_time_that_is_left(advised: Callable[..., Advised]) -> None:
    """What was left out races after the combinations."""
    job = advised(channels_last=Known(step=0.03), compile=Known(opening=14.0), baseline=Known(opening=3.0))
    advice = job.run("speed", minutes=6)
    raced = [{arm.variant for arm in bench.arms} for bench in advice.benches]
    assert ["compile" in variants for variants in raced] == [False, True]
    assert (advice.finalists, advice.final and advice.final.rounds) == (("channels_last",), 8)


def test_late_candidates_race_after_an_interrupt(advised: Callable[..., Advised]) -> None:
    job = advised(channels_last=Known(step=0.03), compile=Known(opening=14.0), baseline=Known(opening=3.0))

    race = advise.Adviser._race

    def raced(adviser: advise.Adviser, until: float) -> bool:
        if adviser.advice.benches:
            raise KeyboardInterrupt
        return race(adviser, until)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advise.Adviser, "_race", raced)
        with pytest.raises(KeyboardInterrupt, match="goes on from it"):
            job.run("speed", minutes=5)
    advice = job.run("speed", minutes=5)
    assert "compile" in advice.standing()


def test_final_rounds_end_when_all_is_decided(advised: Callable[..., Advised]) -> None:
    final = advised(channels_last=Known(step=0.03)).run("speed", minutes=20).final
    assert final
    assert final.rounds == 8


@pytest.mark.parametrize("final_rounds", [3, 7])
def test_a_finalist_that_fails_is_not_advised(advised: Callable[..., Advised], final_rounds: int) -> None:
    """What only it has beaten is not decided any more, and no further rounds measure the baseline alone."""
    whole = advised(channels_last=Known(step=0.03))
    assert whole.run("speed").finalists == ("channels_last",)
    Path("reports/advice.json").unlink()
    starts = whole.server.opened.count("channels_last") - 8 + final_rounds
    advice = advised(channels_last=Known(step=0.03), last={"channels_last": starts}).run("speed")
    assert advice.final
    assert [len(arm.samples) for arm in advice.final.arms] == [8, final_rounds, 8]
    assert advice.state("channels_last") == "cannot be measured: it ran out of memory"
    assert advice.best() == {}
    assert advice.state("foreach_optimizer") == "not decided"
    assert "nothing that was tried is surely better; 5 of 6 candidates not decided" in advice.sentence()


def test_an_arm_that_fails_beats_nobody(advised: Callable[..., Advised]) -> None:
    """One fails before the others are compared with it, one after it has beaten them all."""
    for starts in (2, 8):
        failing = {"for_loop_optimizer": Known(step=0.02, scatter=0.0)}
        job = advised(last={"for_loop_optimizer": starts}, channels_last=Known(step=0.03, scatter=0.0), **failing)
        advice = job.run("speed")
        assert advice.out["for_loop_optimizer"] == LeftOut(why="cannot be measured: it ran out of memory")
        assert advice.sentence().startswith("take `channels_last`: ")
        Path("reports/advice.json").unlink()


def test_without_its_control_there_is_no_advice(advised: Callable[..., Advised]) -> None:
    job = advised(last={"baseline, A/A control": 2}, channels_last=Known(step=0.03))
    with pytest.raises(BenchError, match="control cannot be measured: it ran out of memory"):
        job.run("speed")


def test_advice_on_more_rounds_names_the_minutes_of_a_whole_run(advised: Callable[..., Advised]) -> None:
    """Neither bench.max_minutes nor bench.max_rounds limits the rounds of the finalists."""
    advice = advised(channels_last=Known(step=0.02), baseline=Known(scatter=0.25)).run("speed", minutes=10)
    assert advice.final
    for settings in (advice.final.config["bench"], {"max_minutes": 2.5, "max_rounds": 6}):
        final = advice.final.model_copy(update={"config": {"bench": settings}})
        why = advice.model_copy(update={"final": final}).judged()["channels_last"][THROUGHPUT].why_untrusted or ""
        minutes = re.search(r"set --minutes: ([\d.]+)", why)
        assert minutes
        assert float(minutes[1]) > 10


def test_without_candidates_there_is_no_advice(advised: Callable[..., Advised]) -> None:
    advice = advised(activation_checkpointing=Known(opening=10.0)).run(minutes=1)
    assert "surely better; 17 of 17 candidates not decided (more minutes" in advice.sentence()


def test_an_interrupted_run_goes_on(advised: Callable[..., Advised]) -> None:
    fast = {"channels_last": Known(step=0.03), "activation_checkpointing": Known(step=0.07, memory=0.5)}
    job = advised(**fast)
    seen = []
    for seconds in (40, 200, 600):  # in the first samples, in the race, and in the finalists' rounds
        job.server.interrupt_at = job.server.now + seconds
        with pytest.raises(KeyboardInterrupt, match="goes on from it"):
            job.run("speed", "memory", minutes=12)
        kept = job.known()
        assert "not finished" in kept.sentence()
        seen.append((len(kept.costs) > 1, bool(kept.benches), bool(kept.final)))
    assert seen == [(True, False, False), (True, True, False), (True, True, True)]
    job.server.interrupt_at = math.inf
    advice = job.run("speed", "memory", minutes=12)
    assert advice.finished
    assert advice.costs == kept.costs  # no first sample was taken again
    assert kept.final
    assert advice.final
    then, now = kept.final.arms, advice.final.arms
    assert all(arm.samples[: len(was.samples)] == was.samples for arm, was in zip(now, then, strict=True))
    assert len(now[0].samples) > len(then[0].samples)
    assert advice.candidates[advice.finalists[0]].techniques[0] == "channels_last"


def test_a_race_drops_what_another_beats() -> None:
    arms = [
        make_arm("baseline", rounds=4),
        make_arm("both", throughput=1.5, memory=0.5, rounds=4),
        make_arm("slower", throughput=1.2, memory=0.5, rounds=4),
        make_arm("leaner", throughput=1.2, memory=0.3, rounds=4),
        make_arm("alike", rounds=4),
        make_arm("apart", throughput=3.0, memory=0.1, rounds=4),
        make_arm("baseline", role="aa_control", rounds=4),
    ]
    race = Race.of(arms, "baseline", Margins())
    among = race.names[1:]
    assert race.beaten(among, ["apart"]) == {"slower": "both", "alike": "baseline"}
    assert set(race.beaten(among)) == {"both", "slower", "leaner", "alike"}
    one = Race.of([arm.model_copy(update={"samples": arm.samples[:1]}) for arm in arms], "baseline", Margins())
    assert one.beaten(among) == {}  # a single round shows no scatter
    two = Race.of(
        [arm.model_copy(update={"samples": arm.samples[:2]}) for arm in (*arms[:2], arms[-1])], "baseline", Margins()
    )
    assert two.ratios("both", "baseline")[THROUGHPUT].bounds == (0.0, math.inf)  # two rounds of two arms show little
    assert race.ratios("both", "slower")[THROUGHPUT].estimate == pytest.approx(1.25, rel=0.02)


def test_a_profile_chooses_what_comes_first(advised: Callable[..., Advised]) -> None:
    job, file = advised(), Path("profiles/baseline/profile.json")
    file.parent.mkdir(parents=True)
    finding = {"rule": "idles", "text": "The GPU idles for 40% of a step."}
    file.write_text(json.dumps({"config": {"train": job.config.train.model_dump(mode="json")}, "findings": [finding]}))
    advice = job.run("speed", minutes=5)
    assert (advice.bound, advice.why) == ("launches", f"The GPU idles for 40% of a step ({file})")
    assert job.server.opened[1:3] == ["baseline", "compile"]
    assert "is bound by launches of kernels: The GPU idles" in Path("reports/advice.html").read_text(encoding="utf-8")


def test_an_arm_that_fails_takes_no_other_with_it() -> None:
    server, failures = Arms({}, {"second": 2}), list[str]()
    specs = [ArmSpec.of_variant(name, server, {}) for name in ("first", "second", "third")]

    def failed(name: str, _: BenchError) -> None:
        failures.append(name)

    measured = rounds.measure(specs, seconds=1e6, max_rounds=4, steps=10, turns=5, failed=failed)
    assert failures == ["second"]
    assert [len(arm.samples) for arm in measured.arms] == [4, 2, 4]
    with pytest.raises(BenchError, match="second cannot be measured: it ran out of memory"):
        rounds.measure(specs, seconds=1e6, max_rounds=4, steps=10, turns=5)


def test_the_largest_batches_stand_apart(
    advised: Callable[..., Advised], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step needs a MiB a sample; that of channels_last, a GiB."""

    class Estimated:
        def __init__(self, plan: Plan) -> None:
            self.bytes = 2**30 if plan.name == "channels_last" else 2**20

        def ledger(self, size: int) -> SimpleNamespace:
            return SimpleNamespace(peak_bytes=self.bytes * size)

        def largest_batch(self, memory_bytes: int) -> int:
            return memory_bytes // self.bytes

    monkeypatch.setattr(candidates, "estimated", lambda _, plan: Estimated(plan))
    advice = advised(foreach_optimizer=Known(step=0.03)).run("speed", minutes=5, memory="8GiB")
    assert advice.finalists == ("foreach_optimizer",)
    said = capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ")
    assert "- A larger batch: predicted to fit into 8.00 GiB: baseline 8192, foreach_optimizer 8192." in said
    assert "- channels_last: a step would need 256 GiB." in said


def test_a_combination_must_fit_into_the_memory(
    advised: Callable[..., Advised], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of two together needs 9 GiB, of each alone 1 GiB."""

    def estimated(_: Config, plan: Plan) -> SimpleNamespace:
        peak = SimpleNamespace(peak_bytes=9 << 30 if "--" in plan.name else 1 << 30)
        return SimpleNamespace(ledger=lambda _: peak, largest_batch=lambda _: 1)

    monkeypatch.setattr(candidates, "estimated", estimated)
    arms = {"channels_last": Known(step=0.03), "foreach_optimizer": Known(step=0.035)}
    for memory, combines in (("8GiB", False), (None, True)):
        advice = advised(**arms).run("speed", memory=memory)
        assert any(one.made_of for one in advice.candidates.values()) is combines
        reasons = {why for name, why in advice.untried.items() if "--" in name}
        assert reasons == (set() if combines else {f"a step would need {size(9 << 30)}"})


def test_of_two_as_lean_the_faster_is_taken(advised: Callable[..., Advised]) -> None:
    lean, fast = (
        make_arm("lean", throughput=0.3, memory=0.4, noise=0.3),
        make_arm("fast", throughput=0.6, memory=0.41, noise=0.3),
    )
    final = make_bench().model_copy(update={"arms": (make_arm(), lean, fast, make_arm(role="aa_control"))})
    two = {"final": final, "finalists": ("lean", "fast")}
    assert advised().run("precision").model_copy(update=two).best() == {"fast": " if memory is short"}


def test_what_there_was_no_time_for_is_not_decided(advised: Callable[..., Advised]) -> None:
    advice = advised(baseline=Known(opening=10.0), channels_last=Known(opening=60.0)).run("speed", minutes=3)
    assert advice.state("channels_last") == "cannot be measured: it took too long to open"
    assert advice.state("compile") == "no time for it so far (--minutes, --only)"
    assert "surely better; 5 of 6 candidates not decided (more minutes" in advice.sentence()


def test_finalists_are_ends_and_middle_of_the_front() -> None:
    known = {"fast": (2.0, 1.0), "lean": (0.8, 0.3), "middle": (1.7, 0.5), "near": (1.98, 0.98), "worse": (1.6, 0.6)}

    def found(of: dict[str, tuple[float, float]]) -> list[str]:
        return finalists(
            {
                name: {
                    figure: Difference(estimate=ratio, margin=0.03) for figure, ratio in zip(RACED, both, strict=True)
                }
                for name, both in of.items()
            }
        )

    assert found(known) == ["near", "middle", "lean"]  # as fast as the fastest, up to the margin, and leaner
    assert found(known | {"lean too": (0.5, 0.295)}) == ["near", "middle", "lean"]
    assert found({"hardly": (1.02, 1.0), "worse": (0.9, 1.1)}) == []


def test_an_interaction_has_the_errors_of_both() -> None:
    beside, alone = make_ratio(1.5, 1.5 / 1.03, 1.5 * 1.03), make_ratio(1.2, 1.2 / 1.04, 1.2 * 1.04)
    ratio = interaction(beside, alone)
    assert ratio.estimate == pytest.approx(1.25)
    half = math.hypot(math.log(1.03), math.log(1.04))
    assert ratio.bounds == pytest.approx((1.25 * math.exp(-half), 1.25 * math.exp(half)))
    assert interaction(beside, Difference(estimate=1.2)) == Difference(), "without an interval, nothing is known"


@pytest.mark.parametrize("within", [0.04, 0.08])
def test_a_race_seldom_loses_the_best(within: float) -> None:
    outcome = racing(within, trials=100)
    assert outcome["dropped"] <= 0.02
    assert outcome["found"] >= 0.95


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"minutes": 0.0}, "--minutes: found 0; expected a number"),
        ({"minutes": 2e6}, r"--minutes: found 2e\+06; expected a number above 0, at most 1,000,000."),
        ({"only": ["sped"]}, "--only: found 'sped'; .* Did you mean speed"),
    ],
)
def test_a_wrong_argument_is_refused(advised: Callable[..., Advised], options: dict[str, Any], says: str) -> None:
    job = advised()
    values: dict[str, Any] = {"minutes": 1.0, "memory": None, "add": False, "only": []} | options
    with pytest.raises(ConfigError, match=says):
        advise.run(job.config, CPU_ONLY, **values)


def test_micro_batches_of_a_batchnorm_stand_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_mixes_samples", lambda *_: True)
    config = parse(PARAMS | {"train": {"device": "cpu", "optimizer": "adamw"}})
    base = plan(config, "baseline", CPU_ONLY)
    found, untried = candidates.alone(config, CPU_ONLY, base, ["memory"])
    apart = {name: one.apart for name, one in found.items() if one.apart}
    assert set(apart) == {f"gradient_accumulation-{number}" for number in (2, 4, 8)} | {"factored_optimizer"}
    assert apart["gradient_accumulation-4"] == "the model mixes samples (BatchNorm), and sees 64 at once"
    assert set(untried) == {
        *("activation_offload", "auto_micro_batch", "expandable_segments", "low_bit_optimizer", "release_cache"),
        "zeroed_gradients",
    }


@pytest.mark.parametrize(
    ("second", "why_not"),
    [
        ({"compile": "default"}, None),
        ({"channels_last": True}, "it adds nothing"),
        ({"precision": "bf16"}, "it is skipped here: "),
        ({"precision": "fp16"}, "found 'fp16', but "),
    ],
)
def test_what_excludes_another_is_not_combined(second: dict[str, Any], why_not: str | None) -> None:
    first = candidates.Candidate(name="first", added={"channels_last": True}, techniques=("channels_last",))
    technique = next(iter(second.values())) if "precision" in second else next(iter(second))
    other = candidates.Candidate(name="second", added=second, techniques=(technique,))
    pair = candidates.combined(first, other)
    assert (pair is None) is (why_not == "it adds nothing")
    if pair:
        assert pair.added == {"channels_last": True} | second
        with pytest.raises(ConfigError, match=why_not) if why_not else nullcontext():
            candidates.planned(parse(PARAMS), CPU_ONLY, pair)


def test_a_combination_with_too_long_a_name_is_refused() -> None:
    long, short = {"channels_last": True}, {"compile": "default"}
    first = candidates.Candidate(name="a" * 100, added=long, techniques=("channels_last",))
    pair = candidates.combined(first, candidates.Candidate(name="b", added=short, techniques=("compile",)))
    assert pair
    with pytest.raises(ConfigError, match="at most 100 characters"):
        candidates.planned(parse(PARAMS), CPU_ONLY, pair)


def test_two_that_exclude_each_other_are_refused_with_the_reason() -> None:
    added = {"optimizer_in_backward": True, "optimizer_kernel": "foreach"}
    pair = candidates.Candidate(name="two", added=added, techniques=("foreach_optimizer", "optimizer_in_backward"))
    with pytest.raises(ConfigError, match=r"^the two exclude each other: optimizer_in_backward updates one parameter"):
        candidates.planned(parse(PARAMS), CPU_ONLY, pair)


@pytest.mark.slow
def test_real_arms_are_advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = {"device": "cpu", "seeds": [0], "batch_size": 128, "warmup_steps": 2, "model": "resnet9"}
    bench = {"window_seconds": 0.05, "max_foreign_load": 1.0}
    variants: dict[str, Any] = {"baseline": {}}
    params = {"fetch": {"dataset": "digits"}, "train": train, "bench": bench, "variants": variants}
    config = enter(tmp_path, monkeypatch, params)
    base = plan(config, "baseline", CPU_ONLY)
    found, untried = candidates.alone(config, CPU_ONLY, base, ["memory"], 175 * 2**20)
    apart = {name for name, candidate in found.items() if candidate.apart}
    assert apart == {f"gradient_accumulation-{number}" for number in (4, 8)}  # resnet9 has a BatchNorm
    assert [name for name, why in untried.items() if "a step would need 1" in why] == ["gradient_accumulation-2"]
    assert "chunked_loss-8" in found  # its first sample shows that it cannot run
    assert 64 < (candidates.estimated(config, base).largest_batch(175 * 2**20) or 0) < 128
    monkeypatch.setattr(advise, "FINAL_ROUNDS", 1)
    monkeypatch.setattr("pipeline.processes.age_seconds", lambda: 0.0)
    advise.run(config, CPU_ONLY, minutes=0.5, memory=None, add=False, only=["data-loading"])
    advice = read_document(FILE, Advice, "")
    assert advice.finished
    assert advice.candidates.keys() >= {"resident_data", "streamed_data", "dataloader"}
    late = {name for name in advice.candidates if advice.state(name).startswith("no time for it")}
    assert advice.candidates.keys() <= {*advice.costs, *advice.out} | late


def recorded(scatter: float) -> dict[str, Any]:
    """Return made-up rounds of four candidates: one is faster, one leaner, one worse in both, one takes minutes."""
    random = np.random.default_rng(0)

    def arm(speed: float, memory: int) -> dict[str, Any]:
        speeds = [*(speed * np.exp(random.normal(0, scatter, 12)))]
        return {"samples_per_second": speeds, "peak_memory_bytes": [memory] * 12}

    arms = {"base": arm(100, 100), "fast": arm(150, 100), "lean": arm(90, 50), "bad": arm(80, 120), "dear": arm(99, 99)}
    costs = {name: [1.0, 0.1] for name in arms} | {"dear": [500.0, 0.1]}
    return {"arms": arms | {"base, A/A control": arm(100, 100)}, "costs": costs, "rounds": 12, "steps": 5, "apart": {}}


def test_a_recorded_pool_has_the_combinations(advised: Callable[..., Advised], monkeypatch: pytest.MonkeyPatch) -> None:
    job = advised(channels_last=Known(step=0.03), activation_checkpointing=Known(memory=0.5))
    monkeypatch.setattr("pipeline.params.load", lambda: job.config)
    monkeypatch.setattr("pipeline.environment.machine", lambda: CPU_ONLY)
    recorded = record("known", 30.0)
    ((name, parts),) = recorded["made_of"].items()
    assert (name, {*parts}) == (
        "activation_checkpointing--channels_last",
        {"activation_checkpointing", "channels_last"},
    )
    pool = Pool.of(recorded)
    assert len(pool.names) == 19  # the baseline, 17 candidates and their combination
    assert [*pool.made_of] == [pool.names.index(name)]
    assert math.exp(pool.logs[0].mean(axis=-1)[18] - pool.logs[0].mean(axis=-1)[0]) == pytest.approx(5 / 3, rel=0.02)


def test_a_replay_knows_what_it_planted() -> None:
    exact = replayed(Pool.of(recorded(0.0)), 20.0, trials=5)
    assert exact["no_time_for"] == ["dear"]
    assert (exact["dropped"], exact["front"], exact["ends"], exact["stopwatch"]) == (0, 1, 1, 0)
    pool = recorded(0.0)
    both = {"samples_per_second": [180.0] * 12, "peak_memory_bytes": [40] * 12}
    together = pool | {"arms": pool["arms"] | {"both": both}, "costs": pool["costs"] | {"both": [1.0, 0.1]}}
    assert replayed(Pool.of(together | {"made_of": {"both": ["fast", "lean"]}}), 20.0, trials=5)["ends"] == 1
    assert replayed(Pool.of(together | {"made_of": {"both": ["bad", "dear"]}}), 20.0, trials=5)["ends"] == 0
    noisy = replayed(Pool.of(recorded(0.3)), 20.0, trials=40)
    assert noisy["stopwatch"] > 0.1
    assert noisy["dropped"] < 0.05
