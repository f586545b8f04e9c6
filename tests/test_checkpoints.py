from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.training import checkpoints


def test_a_checkpoint_of_the_same_job_comes_back(tmp_path: Path) -> None:
    path = checkpoints.checkpoint_file("ddp", 3, tmp_path)
    checkpoints.save({"identity": "job", "weights": torch.arange(3.0)}, path)
    state = checkpoints.load(path, "job")
    assert state is not None
    assert state["weights"].tolist() == [0.0, 1.0, 2.0]
    assert [file.name for file in path.parent.iterdir()] == ["seed-3.pt"]


def test_a_checkpoint_of_another_job_is_none(tmp_path: Path) -> None:
    path = tmp_path / "seed-0.pt"
    checkpoints.save({"identity": "job"}, path)
    assert checkpoints.load(path, "another") is None
    assert checkpoints.load(tmp_path / "absent.pt", "job") is None


def test_a_broken_checkpoint_is_named_and_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "seed-0.pt"
    checkpoints.save({"identity": "job", "weights": torch.zeros(1000)}, path)
    for broken in (path.read_bytes()[:500], b"garbage", b""):
        path.write_bytes(broken)
        assert checkpoints.load(path, "job") is None
        assert str(path) in capsys.readouterr().out


def test_an_interrupted_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "seed-0.pt"
    checkpoints.save({"identity": "job", "steps": 1}, path)
    with pytest.raises(Exception, match=r"pickle|local object"):
        checkpoints.save({"identity": "job", "steps": lambda: 2}, path)
    state = checkpoints.load(path, "job")
    assert state is not None
    assert state["steps"] == 1


def test_the_random_state_comes_back() -> None:
    state = checkpoints.random_state()
    first = torch.rand(4)
    checkpoints.restore_random_state(state)
    assert torch.equal(torch.rand(4), first)


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
