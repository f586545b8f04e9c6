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
from pipeline.training.outcomes import Work
from tests import as_if_cuda
from tests.factories import alone, setting_of
from tests.nets import assembly_of
from tests.ranks import run_ranks

JOB = {"model": "small_cnn", "batch_size": 32, "epochs": 1, "seeds": [0], "warmup_steps": 4, "without_native": "run"}
STEPS = 6
"""The steps for which a variant is trained: enough for every technique to act. A CUDA graph is recorded in the fourth
step, PowerSGD sends factors from the third on, and post-local SGD averages weights after the fifth."""


def together(first: Entry, second: Entry) -> Iterator[dict[str, Any]]:
    """Yield the variants with both techniques: one per parallelism that either needs, none if both set the same key."""
    mine, theirs = setting_of(first), setting_of(second)
    if mine.keys() & theirs.keys():
        return
    asked = mine | theirs
    needed = dict.fromkeys((*first.needs, *second.needs))
    if "parallelism" in asked or not needed:
        yield asked
    else:
        yield from (asked | {"parallelism": name} for name in needed)


def after(technique: Entry) -> tuple[Entry, ...]:
    """Return the techniques after ``one`` in the catalogue, so that each pair is tried once."""
    return CATALOGUE[CATALOGUE.index(technique) + 1 :]


def configured(asked: dict[str, Any], device: str = "cpu", processes: int | str = "auto") -> Config:
    adamw = asked.keys() & {"optimizer", "optimizer_state"}  # the technique replaces AdamW
    job = JOB | {"optimizer": "adamw" if adamw else "sgd", "device": device}
    if asked.keys() & {"sync_batchnorm", "base_weights"}:
        job |= {"model": "tests.nets:normed_net"}
    if asked.keys() & {"attention", "loss_chunks"} or asked.get("precision") == "float8":
        job |= {"model": "tests.nets:attending_net"}
    if (
        "lora" in asked
    ):  # with the first block, since a frozen block keeps no activations, which checkpointing would save
        asked = asked | {
            "lora": asked["lora"] | {"train": ["0.*"], "rank": 64}
        }  # optimizer_state 8bit needs large factors
    if asked.get("attention") == "flex":
        asked = {"compile": "blocks"} | asked
    if "model" in asked:
        asked = asked | {"model": job["model"]}
    if asked.get("parallelism", "data_parallel") != "data_parallel":  # data_parallel uses one process
        asked = asked | {"processes": processes}
    if asked.get("data_loading") == "dataloader":
        asked = asked | {"loader_workers": 0}  # each worker would import torch; test_loader has workers
    return parse({"train": job, "compare": {"baseline": "tried"}, "variants": {"tried": asked}})


@pytest.mark.parametrize("technique", CATALOGUE, ids=lambda entry: entry.name)
def test_each_technique_is_requested_by_its_setting(technique: Entry) -> None:
    assert technique.requested_by(configured(alone(technique)).variants["tried"])


@pytest.mark.parametrize("technique", CATALOGUE, ids=lambda entry: entry.name)
def test_excluding_pairs_are_refused_in_every_parallelism(technique: Entry) -> None:
    assert set(technique.excludes) <= {name for entry in CATALOGUE for name in (entry.name, entry.key)}
    for partner in after(technique):
        if partner.name in exclusions(technique):
            for asked in together(technique, partner):
                with pytest.raises(ConfigError, match=r"variants\.tried.*: .*(exclude each other|; \w+ needs )"):
                    configured(asked)


@pytest.mark.parametrize("technique", CATALOGUE, ids=lambda entry: entry.name)
def test_all_other_pairs_can_be_requested(technique: Entry) -> None:
    for partner in after(technique):
        if partner.name not in exclusions(technique) and not setting_of(technique).keys() & setting_of(partner).keys():
            asked = _possible(technique, partner).variants["tried"]
            assert technique.requested_by(asked), partner.name
            assert partner.requested_by(asked), partner.name


@pytest.mark.parametrize("sets", [slice(2), pytest.param(slice(2, None), marks=pytest.mark.weekly)])
def test_all_other_pairs_train(digits: Dataset, sets: slice) -> None:
    """The first two variants contain most of the pairs, so the others are tried each week."""
    _try_all(digits, "cpu", sets)


@pytest.mark.gpu
def test_all_other_pairs_train_on_gpus(digits: Dataset) -> None:
    _try_all(digits, "cuda")


def _possible(first: Entry, second: Entry, device: str = "cpu", processes: int | str = "auto") -> Config:
    """Return the settings of the first variant with both techniques that ``parse`` accepts."""
    for asked in together(first, second):
        try:
            return configured(asked, device, processes)
        except ConfigError as error:
            problem = error
    raise AssertionError(f"{first.name} and {second.name} are called compatible: {problem}")


def _try_all(digits: Dataset, device: Literal["cpu", "cuda"], sets: slice = slice(None)) -> None:
    """Train the variants of ``covering`` that ``sets`` selects, and fail the test with their errors."""
    few = replace(digits, train=digits.train[: STEPS * 32], test=digits.test[:33])
    tries = list(itertools.islice(covering(machine(), device), sets.start, sets.stop))
    failed: list[str] = []
    for size in sorted({made.processes for made in tries}):
        of_size = [planned for planned in tries if planned.processes == size]
        for failures in run_ranks(_train, of_size, few, size=size, device=device):
            failed += failures
    assert not failed, "\n".join(failed)


def covering(here: Machine, device: Literal["cpu", "cuda"]) -> Iterator[Plan]:
    """Yield a few plans that together contain every compatible pair that can run here. Each begins with a pair that no
    earlier plan has, and adds each technique that fits and brings another such pair."""
    on_gpu = device == "cuda"
    processes = 2 if here.gpus > 1 else "auto"  # the net is too small to be split among many GPUs
    # Inside of bitsandbytes's kernels, no GPU is simulated for the tensors that they make.
    unplayable = {"low_bit_base"} if as_if_cuda._PLAYED else set()
    able = [entry for entry in CATALOGUE if not entry.why_not(here, on_gpu) and entry.name not in unplayable]
    missing = {
        frozenset({a.name, b.name}): (a, b)
        for a in able
        for b in after(a)
        if b in able and b.name not in exclusions(a) and not setting_of(a).keys() & setting_of(b).keys()
    }
    while missing:
        pair, (first, second) = next(iter(missing.items()))
        made = plan(_possible(first, second, device, processes), "tried", here)
        applied = _applied(made)
        if not pair <= applied:  # the plan skips one, such as a parallelism on one GPU
            assert made.skipped.keys() & pair
            del missing[pair]
            continue
        for further in able:
            if not any(frozenset({further.name, name}) in missing for name in applied - {further.name}):
                continue
            asked = made.requested.model_dump(exclude_defaults=True)
            if setting_of(further).keys() & asked.keys():
                continue
            try:
                tried = plan(configured(asked | setting_of(further), device, processes), "tried", here)
            except ConfigError:
                continue
            if _applied(tried) >= applied | {further.name}:
                made, applied = tried, _applied(tried)
        missing = {pair_left: entries for pair_left, entries in missing.items() if not pair_left <= applied}
        yield made


def _applied(made: Plan) -> frozenset[str]:
    return frozenset(technique.name for technique in CATALOGUE if technique.requested_by(made.applied))


def _train(world: World, tries: list[Plan], dataset: Dataset) -> list[str]:
    """Train each plan a few steps and evaluate it; return the errors."""
    from pipeline.params.catalogue import in_effect
    from pipeline.tasks.batches import Placement
    from pipeline.techniques import activation_offload, of_plan

    # Never undone, because no other test uses this process. The net's activations are too small to be offloaded.
    torch.compile = functools.partial(_without_kernels, torch.compile)
    activation_offload.LEAST_BYTES = 1
    failures = []
    for planned in tries:
        try:
            for technique in of_plan(planned):
                technique.prepare_process()
            wanted = (technique.placement for technique in in_effect(planned.applied) if technique.placement)
            placement: Placement = next(wanted, "resident")
            with assembly_of(planned, world, dataset, placement).training(0) as training:
                losses = [row.train_loss or math.nan for row in training.run() if row]
                assert training.steps == training.total_steps > 0
                assert training.work() == Work(*(planned.train.batch_size,) * 3)
                assert all(map(math.isfinite, losses)), losses
                assert training.score is not None
                assert training.score.count == len(dataset.test)
                assert len(training.model_state.read()) > 0
        except Exception:
            failures.append(f"{planned.applied.model_dump(exclude_defaults=True)}\n{traceback.format_exc()}")
    return failures


def _without_kernels(compile_: Callable[..., Any], model: Any, **options: Any) -> Any:
    """Compile ``model`` to graphs without kernels: building kernels takes most of a minute and has tests of its own."""
    return compile_(model, backend="aot_eager", **{name: value for name, value in options.items() if name != "mode"})
