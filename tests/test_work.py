"""Work is counted: training, bench and verify notice a technique that leaves samples out."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipeline import cli
from pipeline.benchmark.rounds import calibrate
from pipeline.benchmark.server import ArmSpec, Server
from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.measurement import detectors
from pipeline.measurement.detectors import of_turns
from pipeline.measurement.windows import Clock
from pipeline.params import Variant, parse, requested
from pipeline.plans import plan
from pipeline.results import Window
from pipeline.results.rejections import rejection
from pipeline.tools.verification.observing import Observed
from pipeline.tools.verification.verifier import Verifier
from pipeline.training.outcomes import Counted, Work, work_of
from tests.conftest import ROOT
from tests.factories import of_the_job
from tests.nets import ALONE, task_of
from tests.outside import on_path, write_techniques
from tests.ranks import run_ranks
from tests.trainings import make_training, weights
from tests.workspaces import CPU_ONLY, furnish

TECHNIQUES = """
import threading
from dataclasses import replace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.params import Entry
from pipeline.techniques import Technique


def entry(name):
    return Entry(name=name, does="", pays="", costs="", source="", changes="statistics")


half, later, padded, whole, busy, replayed, misrecorded, repeats = map(entry, (
    "half", "later", "padded", "whole", "busy", "replayed", "misrecorded", "repeats"))
inside = entry("inside").model_copy(update={"layer": "model"})


class Forward(Technique):
    def change_step(self, setup):
        whole = setup.step.forward
        setup.step.forward = lambda images, labels: self.changed(whole, images, labels)


class Half(Forward):
    name = "half"

    def changed(self, whole, images, labels):
        return whole(images[::2], labels[::2])


class Repeats(Forward):
    name, first = "repeats", None

    def changed(self, whole, images, labels):
        self.first = self.first or (images, labels)
        return whole(*self.first)


class Later(Half):
    name = "later"

    def change_step(self, setup):
        step, take, plain = setup.step, setup.step.whole, setup.step.forward

        def halving(batches):
            take(batches)
            step.forward = lambda images, labels: self.changed(plain, images, labels)

        step.whole = halving


class Replayed(Forward):
    name, every, taken = "replayed", 1, 0

    def changed(self, whole, images, labels):
        every = self.every if self.taken == 4 else 1  # in the step that is recorded
        return whole(images[::every], labels[::every])

    def change_step(self, setup):
        super().change_step(setup)
        setup.replays, take = True, setup.step.whole

        def taking(batches):
            self.taken += 1
            if self.taken <= 4:
                take(batches)

        setup.step.whole = taking


class Misrecorded(Replayed):
    name, every = "misrecorded", 2


class Padding(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images[::2]).repeat_interleave(2, 0)


class Recomputed(Padding):
    def forward(self, images):
        return checkpoint(self.model, images, use_reentrant=False)


class Padded(Technique):
    name, wrapper = "padded", Padding

    def change_model(self, setup):
        setup.model = self.wrapper(setup.model)


class Inside(Padded):
    name = "inside"


class Whole(Padded):
    name, wrapper = "whole", Recomputed


class Busy(Technique):
    name = "busy"

    def change_step(self, setup):
        def work():
            values = torch.ones(2**16)
            while True:
                values.mul_(1.0)
        threading.Thread(target=work, daemon=True).start()
"""
NAMES = ("half", "later", "inside", "padded", "whole", "busy", "replayed", "misrecorded", "repeats")


@pytest.fixture(scope="module", autouse=True)
def own_techniques(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with techniques of a user's own."""
    folder = tmp_path_factory.mktemp("own")
    write_techniques(folder, "own_techniques", TECHNIQUES, NAMES)
    with pytest.MonkeyPatch.context() as patch, on_path(folder):
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, folder))))
        yield folder


def _first_step(joined: World, dataset: Dataset, variant: dict[str, Any]) -> tuple[Work | None, ...]:
    """Return the work counted in a first step, and in a training whose first step ran in another process."""
    training, later = make_training(dataset, joined, **variant), make_training(dataset, joined, **variant)
    step, modules = training.step, [*training.step.model.modules(), training.model]
    before, hooks = (step.criterion, step.backward), [len(module._forward_pre_hooks) for module in modules]
    training.advance(2)
    assert (step.criterion, step.backward) == before
    # A technique's own hook may end with the first step (``lockstep.keep_parameters``).
    assert all(len(module._forward_pre_hooks) <= count for module, count in zip(modules, hooks, strict=True))
    later.restore(joined.announced(joined.wholes_on_main(training.state())))
    later.advance(2)
    return training.work(), later.work()


@pytest.mark.parametrize(
    ("variant", "samples"),
    [
        ({}, 32),
        ({"compile": "default"}, 32),
        ({"extra": {"later": {}}}, 16),
        ({"extra": {"later": {}}, "compile": "default"}, 16),
    ],
    ids=str,
)
def test_a_counted_step_trains_and_is_not_measured(
    variant: dict[str, Any], samples: int, digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", _without_kernels)
    plain, counted = (make_training(digits, **variant) for _ in range(2))
    plain.advance(11)
    assert plain.work() == Work(32, 32, 32)
    counted.advance(7)
    compiled = detectors._compile_seconds()
    counted.advance_counted()
    assert detectors._compile_seconds() == compiled
    counted.advance(3)
    assert counted.work() == Work(32, samples, samples)
    assert weights(counted) == weights(plain)
    assert len(counted.clock.step_seconds) == len(plain.clock.step_seconds) - 1 == 7


def _drawn(joined: World, dataset: Dataset, before: int) -> list[set[int]]:
    drawn = []
    for _ in range(20):
        training = make_training(dataset, joined)
        training.steps = before
        training.count_later()
        drawn.append(training.counted_steps - {0})
    return drawn


def test_any_later_step_is_drawn(digits: Dataset) -> None:
    assert {len(draws) for draws in _drawn(ALONE, digits, 0)} == {1}
    last = make_training(digits).total_steps - 1
    assert {*map(frozenset, _drawn(ALONE, digits, last))} == {frozenset({last})}
    assert _drawn(ALONE, digits, last + 1)[0] == set()
    assert len({*map(frozenset, _drawn(ALONE, digits, 0))}) > 5
    first, second = run_ranks(_drawn, digits, 1)
    assert first == second


def test_the_recorded_step_counts_for_replays(digits: Dataset) -> None:
    for name, counted in (("replayed", 32), ("misrecorded", 16)):
        training = make_training(digits, extra={name: {}})
        training.counted_steps.update(range(6, 9))
        training.advance(9)
        assert training.work() == Work(32, counted, counted)


def test_a_step_with_foreign_samples_is_found(digits: Dataset) -> None:
    repeating, plain = make_training(digits, extra={"repeats": {}}), make_training(digits)
    repeating.advance(3)
    repeating.advance_counted()
    work = repeating.work()
    assert work == Work(32, 32, 32, repeated=True)
    assert (work.missing, work.rejection.happened) == (32, "two steps took the same 32 samples")
    plain.counted_steps.update(range(100))
    plain.advance(100)  # more than two epochs
    assert plain.work() == Work(32, 32, 32)


@pytest.mark.parametrize(
    ("variant", "model", "loss"),
    [
        ({}, 32, 32),
        ({"gradient_accumulation": 4}, 32, 32),
        ({"compile": "default"}, 32, 32),
        ({"extra": {"half": {}}}, 16, 16),
        ({"extra": {"half": {}}, "compile": "default"}, 16, 16),
        ({"extra": {"half": {}}, "gradient_accumulation": 4}, 16, 16),
        ({"extra": {"padded": {}}}, 16, 32),
        ({"extra": {"inside": {}}}, 16, 32),
        ({"extra": {"inside": {}}, "compile": "default"}, 32, 32),  # counted where samples enter the compiled graph
        ({"extra": {"whole": {}}}, 32, 32),
    ],
    ids=str,
)
def test_samples_are_counted_where_they_enter(
    variant: dict[str, Any], model: int, loss: int, digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", _without_kernels)
    work = Work(32, model, loss)
    assert _first_step(ALONE, digits, variant) == (work, None)
    assert work.missing == max(0, 32 - min(model, loss))


_compile = torch.compile


def _without_kernels(model: Any, **options: Any) -> Any:
    return _compile(model, backend="eager", fullgraph=options["fullgraph"], dynamic=options["dynamic"])


@pytest.mark.parametrize(
    "variant",
    [{"parallelism": "ddp"}, {"parallelism": "pipeline", "gradient_accumulation": 2}, {"parallelism": "fsdp"}],
    ids=lambda variant: variant["parallelism"],
)
def test_and_added_up_over_replicas(variant: dict[str, Any], digits: Dataset) -> None:
    for counted in run_ranks(_first_step, digits, variant):
        assert counted == (Work(32, 32, 32), None)
    if variant["parallelism"] == "ddp":
        halved = variant | {"extra": {"half": {}}}
        assert [work for work, _ in run_ranks(_first_step, digits, halved)] == [Work(32, 16, 16)] * 2


def test_stages_have_the_input_and_the_loss() -> None:
    ranks = [Counted() for _ in range(4)]
    for rank, model, loss in zip(ranks, (8, 9, 8, 9), (0, 8, 0, 7), strict=True):
        rank.model, rank.loss = [model], [loss]
    assert work_of(ranks, 16, 2) == Work(16, 16, 15)
    ranks[3].loss = []  # a technique that calls its own loss
    assert work_of(ranks, 16, 2) == Work(16, 16, None)
    assert (Work(16, 16, None).missing, Work(16, 12, None).missing, Work(16, 32, 32).missing) == (0, 4, 0)


PARAMS: dict[str, Any] = {
    "fetch": {"dataset": "digits"},
    "train": {"device": "cpu", "seeds": [0], "epochs": 1, "batch_size": 128, "warmup_steps": 2},
    "bench": {"max_foreign_load": 1.0, "max_input_wait": 1.0},
    "publish": {"live": False},
    "variants": {"baseline": {}, **{name: {"extra": {name: {}}} for name in ("half", "later", "busy")}},
}


@pytest.fixture
def workspace(here: Path) -> Path:
    Path("params.yaml").write_text(yaml.safe_dump(PARAMS), encoding="utf-8")
    furnish(parse(PARAMS))
    return here


def values_of(name: str) -> dict[str, Any]:
    return Variant.model_validate(PARAMS["variants"][name]).model_dump(mode="json")


@pytest.mark.parametrize("name", ["half", "later"])
def test_half_of_each_batch_is_refused_by_training(
    name: str, workspace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", name]) == 2
    said = capfd.readouterr().err
    assert f"variants.{name}: of a step's 128 samples, 64 entered the model and 64 entered the loss" in said
    assert not (workspace / f"results/{name}.json").exists()


def test_and_by_the_bench(workspace: Path) -> None:  # noqa: ARG001
    with Server() as server:
        plain, *halved = (
            Window.model_validate(calibrate(ArmSpec.of_variant(name, server, plan), 4).answer["window"])
            for name in ("baseline", "half", "later")
            for plan in [server.plan(name, values_of(name))]
        )
    assert of_the_job(plain.rejections) == ()
    assert bool(plain.samples_per_second) is not bool(plain.rejections)
    assert plain.measured_steps == 4
    for sample in halved:
        left_out = rejection("samples_left_out_of_loss", credited=128, model=64, loss=64)
        assert of_the_job(sample.rejections) == (left_out,)
        assert (sample.samples_per_second, sample.step_p50_ms, sample.peak_memory_bytes) == (None, None, None)


@pytest.mark.parametrize("name", ["half", "later", "inside"])
def test_verify_looks_into_what_is_compiled(name: str, digits_folder: Path, digits: Dataset, tmp_path: Path) -> None:
    variant: dict[str, Any] = {"extra": {name: {}}} | ({"compile": "default"} if name == "inside" else {})
    variants = {"baseline": {}, "tried": variant}
    job = parse(PARAMS | {"train": PARAMS["train"] | {"batch_size": 32}, "variants": variants})
    verifier = Verifier(job, CPU_ONLY, digits_folder, task_of(digits, job.train), tmp_path)
    made = plan(job, "tried", CPU_ONLY)
    if name == "inside":  # as if the compiled model had been trained
        observed = Observed(tmp_path / "state.pt", work=Work(32, 32, 32))
        claim = verifier._worked(made, requested(made.applied), observed)
    else:
        claims = list(verifier.claims(made))
        assert len(claims) == verifier.count(made)
        (claim,) = [claim for claim in claims if claim.claim == "the model and the loss take 32 samples a step"]
    assert (claim.measured, claim.bound, claim.holds) == (16, 0, False)


def test_work_between_turns_is_rejected(workspace: Path) -> None:  # noqa: ARG001
    with Server() as server:
        for name in ("baseline", "busy"):
            server.open(name, server.plan(name, values_of(name)), 8)
        for _ in range(2):
            for name in ("baseline", "busy"):
                server.turn(name, 4)
            threading.Event().wait(0.2)  # while others are measured
        plain, busy = (Window.model_validate(server.close(name)["window"]) for name in ("baseline", "busy"))
    codes = [[rejection.code for rejection in sample.rejections] for sample in (plain, busy)]
    assert ["worked_between_turns" in code for code in codes] == [False, True]
    assert busy.samples_per_second is None


def test_a_twentieth_and_idle_threads_are_nothing() -> None:
    clock = Clock(torch.device("cpu"))
    clock.measured_seconds = 2.0
    assert not [*of_turns(0.1, 0.0, clock), *of_turns(0.2, 10.0, clock)]
    (rejection,) = of_turns(0.11, 0.5, clock)
    assert (rejection.code, rejection.facts["aside_seconds"], rejection.facts["of_measured"]) == (
        "worked_between_turns",
        0.11,
        0.05,
    )
