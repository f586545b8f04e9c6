"""Every pair of techniques: what the catalogue calls compatible trains, and what it calls incompatible is refused."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml

from pipeline.config import CATALOGUE, Config, ConfigError, Entry, Machine, Plan, exclusions, parse, plan
from pipeline.data.prepared import Dataset, Split
from pipeline.distributed import World
from pipeline.environment import machine
from tests.ranks import run_ranks

JOB = {"model": "small_cnn", "batch_size": 32, "epochs": 1, "seeds": [0], "warmup_steps": 4, "without_native": "run"}


def values(entry: Entry) -> dict[str, Any]:
    return dict(yaml.safe_load("{" + entry.setting + "}"))


def together(one: Entry, other: Entry) -> dict[str, Any] | None:
    """The variant that applies both; None where there is none: they are two values of one key, or need two."""
    mine, theirs = values(one), values(other)
    if mine.keys() & theirs.keys():
        return None
    asked = mine | theirs
    possible = [set(entry.needs) for entry in (one, other) if entry.needs]
    if possible and "parallelism" not in asked:
        apart = exclusions(one).keys() | exclusions(other).keys()
        both = [name for name in (one.needs or other.needs) if all(name in names for names in possible)]
        asked["parallelism"] = next((name for name in both if name not in apart), None)
    if any(asked["parallelism"] not in names for names in possible):
        return None
    return asked


def alone(one: Entry) -> dict[str, Any]:
    return values(one) | ({"parallelism": one.needs[0]} if one.needs else {})


def pairs(one: Entry) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """``one`` with every other that comes after it, as far as a variant can ask for both."""
    for other in CATALOGUE[CATALOGUE.index(one) + 1 :]:
        asked = together(one, other)
        if asked is not None:
            yield other, asked


def configured(asked: dict[str, Any]) -> Config:
    adamw = "optimizer_state" in asked  # which stands in for AdamW's
    job = JOB | {"optimizer": "adamw" if adamw else "sgd"}
    return parse({"train": job, "compare": {"baseline": "tried"}, "variants": {"tried": asked}})


def planned(asked: dict[str, Any], here: Machine) -> tuple[Config, Plan]:
    config = configured(asked)
    return config, plan(config, "tried", here)


def runs_here(entry: Entry, here: Machine) -> bool:
    return entry.why_not(here, here.gpus > 0) is None


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda entry: entry.name)
def test_each_is_asked_for_by_its_setting(one: Entry) -> None:
    assert one.asked(configured(alone(one)).variants["tried"])


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda entry: entry.name)
def test_pairs_that_exclude_each_other_are_refused(one: Entry) -> None:
    assert set(one.excludes) <= {entry.name for entry in CATALOGUE}
    for other, asked in pairs(one):
        if other.name in exclusions(one):
            with pytest.raises(ConfigError, match=r"variants\.tried: .*exclude each other"):
                configured(asked)


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda entry: entry.name)
def test_all_other_pairs_train(one: Entry, digits: Dataset) -> None:
    here = machine()
    if not runs_here(one, here):
        pytest.skip(f"{one.name} cannot run here: {one.why_not(here, here.gpus > 0)}")
    few = replace(digits, train=_first(digits.train, 96), test=_first(digits.test, 33))
    tries = [
        planned(asked, here)
        for other, asked in pairs(one)
        if other.name not in exclusions(one) and runs_here(other, here)
    ]
    for size in sorted({each.processes for _, each in tries}):
        of_size = [(config, each) for config, each in tries if each.processes == size]
        for rank, failures in enumerate(run_ranks(_train, of_size, few, size=size)):
            assert not failures, f"rank {rank}:\n" + "\n".join(failures)


def _train(world: World, tries: list[tuple[Config, Plan]], dataset: Dataset) -> list[str]:
    """Train each a few steps and evaluate it; what went wrong."""
    from pipeline.assembly import Assembly

    failures = []
    for config, each in tries:
        try:
            with Assembly(config, each, world, dataset, "resident").training(0) as training:
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
