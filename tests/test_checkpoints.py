from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.processes import randomness
from pipeline.training import checkpoints
from tests.factories import known


def test_a_checkpoint_comes_back_for_the_same_job_alone(tmp_path: Path) -> None:
    path = checkpoints.checkpoint_file("ddp", 3, tmp_path)
    checkpoints.save({"identity": "job", "weights": torch.arange(3.0)}, path)
    state, file = known(checkpoints.load(path, "job"))
    assert (state["weights"].tolist(), file) == ([0.0, 1.0, 2.0], path)
    assert [file.name for file in path.parent.iterdir()] == ["seed-3.pt"]
    assert checkpoints.load(path, "another") is None
    assert checkpoints.load(tmp_path / "absent.pt", "job") is None


def test_a_damaged_checkpoint_is_named_and_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "seed-0.pt"
    for steps in (1, 2, 3):
        checkpoints.keep({"identity": "job", "steps": steps, "weights": torch.full((40,), float(steps))}, path)
    written = path.read_bytes()
    flipped = [
        written[:at] + bytes([written[at] ^ 1 << at % 8]) + written[at + 1 :] for at in range(0, len(written), 5)
    ]
    refused = 0
    for broken in (b"", b"garbage", written[:500], written[:-1], *flipped):
        path.write_bytes(broken)
        (state, file), said = known(checkpoints.load(path, "job")), capsys.readouterr().out
        refused += file != path
        steps = 3 if file == path else 2  # a flipped bit outside of the content is not noticed
        assert (state["steps"], state["weights"].tolist()) == (steps, [float(steps)] * 40)
        assert (str(path) in said) is (steps == 2)
    assert refused > len(flipped) / 2
    checkpoints.discard(path)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "seed-0.pt"
    checkpoints.save({"identity": "job", "steps": 1}, path)
    with pytest.raises(Exception, match=r"pickle|local object"):
        checkpoints.save({"identity": "job", "steps": lambda: 2}, path)
    state, _ = known(checkpoints.load(path, "job"))
    assert state["steps"] == 1


def test_the_random_state_comes_back_from_a_file(tmp_path: Path) -> None:
    def drawn() -> list[float]:
        return [*torch.rand(4).tolist(), *np.random.rand(4), *np.random.randn(1), random.random(), random.gauss()]

    np.random.randn(1)  # numpy keeps the second normal number of a pair for the next call
    checkpoints.save(randomness.state(), tmp_path / "state.pt")
    first = drawn()
    randomness.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    assert drawn() == first


def test_state_sha256_depends_on_all_of_extra_state() -> None:
    states: list[dict[str, Any]] = [
        {"_extra_state": {"step": step, "scales": [torch.full((2,), scale)]}}
        for step, scale in ((1, 2.0), (1, 3.0), (2, 2.0))
    ]
    assert len({checkpoints.state_sha256(state) for state in [*states, copy.deepcopy(states[0])]}) == 3


def test_state_sha256_depends_on_name_dtype_shape_and_values() -> None:
    base = {"a": torch.zeros(2, 3)}
    others = [
        {"b": torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3, dtype=torch.float64)},
        {"a": torch.zeros(3, 2)},
        {"a": torch.full((2, 3), -0.0)},
    ]
    assert checkpoints.state_sha256(base) == checkpoints.state_sha256({"a": torch.zeros(3, 2).t()})
    assert len({checkpoints.state_sha256(state) for state in [base, *others]}) == 5
