from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.processes.malloc import keep_freed_memory
from pipeline.techniques.allocators import ExpandableSegments, ReleaseCache
from tests.commands import printed
from tests.nets import ALONE, GPU, make_plan
from tests.ranks import run_ranks
from tests.trainings import make_training, weights

MIB = 2**20


def _given_back(joined: World) -> tuple[list[int], dict[str, Any]]:
    keep_freed_memory()
    blocks = [torch.ones(MIB // 4) for _ in range(64)]
    del blocks[::2]
    technique = ReleaseCache(make_plan(release_cache=True), joined)
    technique.between_phases()
    technique.between_phases()
    return technique.given_back, technique.findings()


def test_unused_memory_is_returned_to_the_system() -> None:
    """free() alone does not return free pages that are between used pages. The test runs in a new process, which has
    few other free pages."""
    [((first, second), findings)] = run_ranks(_given_back, size=1)
    assert first > 24 * MIB
    assert second < 8 * MIB
    assert findings["release_cache_most_bytes"] == first


def test_release_cache_acts_between_phases_and_changes_no_bit(digits: Dataset) -> None:
    plain, releasing = (make_training(digits, release_cache=release) for release in (False, True))
    for training in (plain, releasing):
        training.advance(2 * training.batches.steps_per_epoch)
    assert weights(releasing) == weights(plain)
    (technique,) = releasing.techniques
    assert technique.findings()["release_cache_phases"] == 4  # two epochs, after training and after evaluation
    resumed = ReleaseCache(make_plan(release_cache=True), ALONE)
    resumed.restore(technique.state())
    assert resumed.findings() == technique.findings()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64,expandable_segments:True"),
        (
            {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8", "PYTORCH_CUDA_ALLOC_CONF": "ignored:1"},
            "garbage_collection_threshold:0.8,expandable_segments:True",
        ),
    ],
)
def test_the_user_s_allocator_settings_are_kept(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", warnings.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ExpandableSegments.prepare_process()
    assert warnings == [expected]


def test_the_allocator_accepts_the_setting() -> None:
    """No GPU is needed. The setting cannot be undone, so the test starts a process for it."""
    run_ranks(_prepare_process, size=1)


def _prepare_process(_: World) -> None:
    ExpandableSegments.prepare_process()


@pytest.mark.gpu("its allocator")
def test_segments_are_expandable_in_a_fresh_process() -> None:
    program = """
import torch
from pipeline.techniques.allocators import ExpandableSegments
ExpandableSegments.prepare_process()
kept = torch.ones(2**20, device="cuda")
assert all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
"""
    printed(program)


@pytest.mark.gpu("its allocator's cache")
def test_cuda_s_cache_is_released() -> None:
    technique = ReleaseCache(make_plan(release_cache=True), GPU)
    block: Any = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    del block
    technique.between_phases()
    assert technique.given_back[0] >= 64 * MIB
