"""What grows with the number of processes, on which docs/how-we-know/several-hosts.md counts for 64 of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.data import prepared
from pipeline.distributed import World, forked, world
from tests.ranks import run_ranks
from tests.trainings import make_training


def counted(act: Callable[[], object]) -> Counter[str]:
    """Return how often each of gloo's collectives ran, DDP's own included."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        act()
    return Counter(event.name for event in seen.events() if event.name.startswith("gloo:"))


def collectives(joined: World, folder: Path, parallelism: str) -> dict[str, Counter[str]]:
    training = make_training(prepared.read(folder), joined, parallelism=parallelism)
    training.advance(5)
    return {
        "five steps": counted(lambda: training.advance(5)),
        "evaluation": counted(training.evaluate),
        "checkpoint": counted(lambda: joined.wholes_on_main(training.state())),
        "values of all ranks": counted(lambda: joined.gather("x")),
    }


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", ["ddp", "zero1", "fsdp"])
def test_only_a_checkpoint_s_broadcasts_grow_with_ranks(parallelism: str, digits_folder: Path) -> None:
    """Each rank's random state is broadcast."""
    two, four = (run_ranks(collectives, digits_folder, parallelism, size=size)[0] for size in (2, 4))
    assert four["checkpoint"].pop("gloo:broadcast") - two["checkpoint"].pop("gloo:broadcast") == 2
    assert two == four
    assert two["five steps"].total() > 5
    assert two["evaluation"].total() > 0
    assert two["values of all ranks"] == {"gloo:all_gather": 2}


def open_files() -> Generator[int, None, None]:
    with world("cpu") as joined:
        joined.sum_(torch.zeros(1))
        yield len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_open_files_grow_by_one_per_rank() -> None:
    of_size = {}
    for size in (2, 4):
        with forked(open_files, (), size, preload=["pipeline.training.loop"]) as ask:
            of_size[size] = ask(None)
    assert set(of_size[4]) == {of_size[2][0] + 2}
