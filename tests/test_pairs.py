"""Every pair of techniques: what the catalogue calls compatible trains, and what it calls incompatible is refused."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import yaml

from pipeline.config import CATALOGUE, Config, ConfigError, Entry, Plan, exclusions, parse, plan
from pipeline.data.prepared import Dataset, Split
from pipeline.distributed import World
from pipeline.environment import machine
from tests.ranks import run_ranks

JOB = {"model": "small_cnn", "batch_size": 32, "epochs": 1, "seeds": [0], "warmup_steps": 4, "without_native": "run"}
STEPS = 6
"""Of a try: enough for every technique to begin. A CUDA graph is recorded in the fourth step; PowerSGD sends factors
from the third on, and post-local SGD averages weights after the fifth."""


def values(entry: Entry) -> dict[str, Any]:
    return dict(yaml.safe_load("{" + entry.setting + "}"))


def together(one: Entry, other: Entry) -> Iterator[dict[str, Any]]:
    """The variants that ask for both, one for each parallelism that one of them needs; none for two values of a key."""
    mine, theirs = values(one), values(other)
    if mine.keys() & theirs.keys():
        return
    asked = mine | theirs
    needed = dict.fromkeys((*one.needs, *other.needs))
    if "parallelism" in asked or not needed:
        yield asked
    else:
        yield from (asked | {"parallelism": name} for name in needed)


def alone(one: Entry) -> dict[str, Any]:
    return values(one) | ({"parallelism": one.needs[0]} if one.needs else {})


def after(one: Entry) -> tuple[Entry, ...]:
    """Each pair is tried once: with the other techniques that come later."""
    return CATALOGUE[CATALOGUE.index(one) + 1 :]


def configured(asked: dict[str, Any], device: str = "cpu", processes: int | str = "auto") -> Config:
    adamw = "optimizer_state" in asked  # which stands in for AdamW's
    job = JOB | {"optimizer": "adamw" if adamw else "sgd", "device": device}
    if asked.get("parallelism", "data_parallel") != "data_parallel":  # which is one process, as is none
        asked = asked | {"processes": processes}
    return parse({"train": job, "compare": {"baseline": "tried"}, "variants": {"tried": asked}})


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda entry: entry.name)
def test_each_is_asked_for_by_its_setting(one: Entry) -> None:
    assert one.asked(configured(alone(one)).variants["tried"])


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda entry: entry.name)
def test_pairs_that_exclude_each_other_are_refused_in_every_parallelism(one: Entry) -> None:
    assert set(one.excludes) <= {entry.name for entry in CATALOGUE}
    for other in after(one):
        if other.name in exclusions(one):
            for asked in together(one, other):
                with pytest.raises(ConfigError, match=r"variants\.tried.*: .*(exclude each other|; it needs )"):
                    configured(asked)


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda entry: entry.name)
def test_all_other_pairs_can_be_asked_for(one: Entry) -> None:
    for other in after(one):
        if other.name not in exclusions(one) and not values(one).keys() & values(other).keys():
            asked = _possible(one, other).variants["tried"]
            assert one.asked(asked), other.name
            assert other.asked(asked), other.name


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda entry: entry.name)
def test_all_other_pairs_train(one: Entry, digits: Dataset) -> None:
    _try_all(one, digits, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("one", CATALOGUE, ids=lambda entry: entry.name)
def test_all_other_pairs_train_on_gpus(one: Entry, digits: Dataset) -> None:
    _try_all(one, digits, "cuda")


def _possible(one: Entry, other: Entry, device: str = "cpu", processes: int | str = "auto") -> Config:
    """The first variant of both that is not refused when it is read."""
    for asked in together(one, other):
        try:
            return configured(asked, device, processes)
        except ConfigError as error:
            problem = error
    raise AssertionError(f"{one.name} and {other.name} are called compatible: {problem}")


def _try_all(one: Entry, digits: Dataset, device: Literal["cpu", "cuda"]) -> None:
    """Train ``one`` with every later technique with which it is compatible and that runs there."""
    here, on_gpu = machine(), device == "cuda"
    processes = 2 if here.gpus > 1 else "auto"  # the net is too small to be shared out among many
    why_not = one.why_not(here, on_gpu)
    if why_not:
        pytest.skip(f"{one.name} cannot run here: {why_not}")
    tries: list[tuple[Config, Plan]] = []
    for other in after(one):
        apart = other.name in exclusions(one) or values(one).keys() & values(other).keys()
        if apart or other.why_not(here, on_gpu):
            continue
        config = _possible(one, other, device, processes)
        made = plan(config, "tried", here)
        if one.asked(made.applied) and other.asked(made.applied):
            tries.append((config, made))
        else:  # one GPU shares nothing out, and without replicas a pipeline's batch is the global one
            assert made.left_out.keys() & {one.name, other.name}
    if not tries and here.gpus == 1 and one.key == "parallelism":
        pytest.skip(f"{one.name} needs two GPUs")
    few = replace(digits, train=_first(digits.train, STEPS * 32), test=_first(digits.test, 33))
    for size in sorted({made.processes for _, made in tries}):
        of_size = [(config, made) for config, made in tries if made.processes == size]
        for rank, failures in enumerate(run_ranks(_train, of_size, few, size=size, device=device)):
            assert not failures, f"rank {rank}:\n" + "\n".join(failures)


def _train(world: World, tries: list[tuple[Config, Plan]], dataset: Dataset) -> list[str]:
    """Train each a few steps and evaluate it; what went wrong."""
    from pipeline.assembly import Assembly
    from pipeline.data.batches import Placement
    from pipeline.techniques import of_plan

    failures = []
    for config, each in tries:
        try:
            techniques = of_plan(each)
            for technique in techniques:
                technique.prepare_process()
            wanted = (technique.placement for technique in techniques if technique.placement)
            placement: Placement = next(wanted, "resident")
            with Assembly(config, each, world, dataset, placement).training(0) as training:
                losses = [row.train_loss for row in training.run() if row]
                assert training.steps == training.total_steps > 0
                assert all(map(math.isfinite, losses)), losses
                assert training.score is not None
                assert training.score.count == len(dataset.test)
                assert len(training.model_state.read()) > 0
        except Exception:
            failures.append(f"{each.applied.model_dump(exclude_defaults=True)}\n{traceback.format_exc()}")
    return failures


def _first(split: Split, count: int) -> Split:
    return Split(split.images[:count], split.labels[:count])
