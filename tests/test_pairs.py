"""Every pair of techniques: what the catalogue calls compatible trains, and what it calls incompatible is refused."""

from __future__ import annotations

import functools
import itertools
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.environment import machine
from pipeline.errors import ConfigError
from pipeline.params import CATALOGUE, Config, Entry, Machine, exclusions, parse
from pipeline.plans import Plan, plan
from pipeline.training.counting import Work
from tests.factories import alone, setting_of
from tests.nets import assembly_of
from tests.ranks import run_ranks

JOB = {"model": "small_cnn", "batch_size": 32, "epochs": 1, "seeds": [0], "warmup_steps": 4, "without_native": "run"}
STEPS = 6
"""The steps for which a variant is trained: enough for every technique to act. A CUDA graph is recorded in the fourth
step, PowerSGD sends factors from the third on, and post-local SGD averages weights after the fifth."""


def together(one: Entry, other: Entry) -> Iterator[dict[str, Any]]:
    """Yield the variants with both techniques: one per parallelism that either needs, none if both set the same key."""
    mine, theirs = setting_of(one), setting_of(other)
    if mine.keys() & theirs.keys():
        return
    asked = mine | theirs
    needed = dict.fromkeys((*one.needs, *other.needs))
    if "parallelism" in asked or not needed:
        yield asked
    else:
        yield from (asked | {"parallelism": name} for name in needed)


def after(one: Entry) -> tuple[Entry, ...]:
    """Return the techniques after ``one`` in the catalogue, so that each pair is tried once."""
    return CATALOGUE[CATALOGUE.index(one) + 1 :]


def configured(asked: dict[str, Any], device: str = "cpu", processes: int | str = "auto") -> Config:
    adamw = "optimizer_state" in asked  # the technique replaces AdamW
    job = JOB | {"optimizer": "adamw" if adamw else "sgd", "device": device}
    if "sync_batchnorm" in asked:
        job |= {"model": "tests.nets:normed_net"}
    if asked.keys() & {"attention", "loss_chunks"} or asked.get("precision") == "float8":
        job |= {"model": "tests.nets:attending_net"}
    if "model" in asked:
        asked = asked | {"model": job["model"]}
    if asked.get("parallelism", "data_parallel") != "data_parallel":  # data_parallel uses one process
        asked = asked | {"processes": processes}
    if asked.get("data_loading") == "dataloader":
        asked = asked | {"loader_workers": 0}  # each worker would import torch; test_loader has workers
    return parse({"train": job, "compare": {"baseline": "tried"}, "variants": {"tried": asked}})


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda entry: entry.name)
def test_each_technique_is_requested_by_its_setting(one: Entry) -> None:
    assert one.requested_by(configured(alone(one)).variants["tried"])


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda entry: entry.name)
def test_pairs_that_exclude_each_other_are_refused_in_every_parallelism(one: Entry) -> None:
    assert set(one.excludes) <= {each for entry in CATALOGUE for each in (entry.name, entry.key)}
    for other in after(one):
        if other.name in exclusions(one):
            for asked in together(one, other):
                with pytest.raises(ConfigError, match=r"variants\.tried.*: .*(exclude each other|; \w+ needs )"):
                    configured(asked)


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda entry: entry.name)
def test_all_other_pairs_can_be_requested(one: Entry) -> None:
    for other in after(one):
        if other.name not in exclusions(one) and not setting_of(one).keys() & setting_of(other).keys():
            asked = _possible(one, other).variants["tried"]
            assert one.requested_by(asked), other.name
            assert other.requested_by(asked), other.name


@pytest.mark.parametrize("sets", [slice(2), pytest.param(slice(2, None), marks=pytest.mark.slow)])
def test_all_other_pairs_train(digits: Dataset, sets: slice) -> None:
    """The first two variants contain most of the pairs, so the others are left to the slow tests."""
    _try_all(digits, "cpu", sets)


@pytest.mark.gpu
def test_all_other_pairs_train_on_gpus(digits: Dataset) -> None:
    _try_all(digits, "cuda")


def _possible(one: Entry, other: Entry, device: str = "cpu", processes: int | str = "auto") -> Config:
    """Return the settings of the first variant with both techniques that ``parse`` accepts."""
    for asked in together(one, other):
        try:
            return configured(asked, device, processes)
        except ConfigError as error:
            problem = error
    raise AssertionError(f"{one.name} and {other.name} are called compatible: {problem}")


def _try_all(digits: Dataset, device: Literal["cpu", "cuda"], sets: slice = slice(None)) -> None:
    """Train the variants of ``covering`` that ``sets`` selects, and fail the test with their errors."""
    few = replace(digits, train=digits.train[: STEPS * 32], test=digits.test[:33])
    tries = list(itertools.islice(covering(machine(), device), sets.start, sets.stop))
    failed: list[str] = []
    for size in sorted({made.processes for made in tries}):
        of_size = [each for each in tries if each.processes == size]
        for failures in run_ranks(_train, of_size, few, size=size, device=device):
            failed += failures
    assert not failed, "\n".join(failed)


def covering(here: Machine, device: Literal["cpu", "cuda"]) -> Iterator[Plan]:
    """Yield a few plans that together contain every compatible pair that can run here. Each begins with a pair that no
    earlier plan has, and adds each technique that fits and brings another such pair."""
    on_gpu = device == "cuda"
    processes = 2 if here.gpus > 1 else "auto"  # the net is too small to be split among many GPUs
    able = [each for each in CATALOGUE if not each.why_not(here, on_gpu)]
    missing = {
        frozenset({one.name, other.name}): (one, other)
        for one in able
        for other in after(one)
        if other in able and other.name not in exclusions(one) and not setting_of(one).keys() & setting_of(other).keys()
    }
    while missing:
        pair, (one, other) = next(iter(missing.items()))
        made = plan(_possible(one, other, device, processes), "tried", here)
        applied = _applied(made)
        if not pair <= applied:  # the plan skips one, such as a parallelism on one GPU
            assert made.skipped.keys() & pair
            del missing[pair]
            continue
        for each in able:
            if not any(frozenset({each.name, name}) in missing for name in applied - {each.name}):
                continue
            asked = made.requested.model_dump(exclude_defaults=True)
            if setting_of(each).keys() & asked.keys():
                continue
            try:
                tried = plan(configured(asked | setting_of(each), device, processes), "tried", here)
            except ConfigError:
                continue
            if _applied(tried) >= applied | {each.name}:
                made, applied = tried, _applied(tried)
        missing = {each: entries for each, entries in missing.items() if not each <= applied}
        yield made


def _applied(made: Plan) -> frozenset[str]:
    return frozenset(each.name for each in CATALOGUE if each.requested_by(made.applied))


def _train(world: World, tries: list[Plan], dataset: Dataset) -> list[str]:
    """Train each plan a few steps and evaluate it; return the errors."""
    from pipeline.params.catalogue import in_effect
    from pipeline.tasks.batches import Placement
    from pipeline.techniques import of_plan

    torch.compile = functools.partial(_without_kernels, torch.compile)  # never undone: no other test uses this process
    failures = []
    for each in tries:
        try:
            for technique in of_plan(each):
                technique.prepare_process()
            wanted = (one.placement for one in in_effect(each.applied) if one.placement)
            placement: Placement = next(wanted, "resident")
            with assembly_of(each, world, dataset, placement).training(0) as training:
                losses = [row.train_loss for row in training.run() if row]
                assert training.steps == training.total_steps > 0
                assert training.work() == Work(*(each.train.batch_size,) * 3)
                assert all(map(math.isfinite, losses)), losses
                assert training.score is not None
                assert training.score.count == len(dataset.test)
                assert len(training.model_state.read()) > 0
        except Exception:
            failures.append(f"{each.applied.model_dump(exclude_defaults=True)}\n{traceback.format_exc()}")
    return failures


def _without_kernels(compile_: Callable[..., Any], model: Any, **options: Any) -> Any:
    """Compile ``model`` to graphs without kernels: building kernels takes most of a minute and has tests of its own."""
    return compile_(model, backend="aot_eager", **{name: value for name, value in options.items() if name != "mode"})
