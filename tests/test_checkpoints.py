from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.training import checkpoints


def test_a_checkpoint_comes_back_for_the_same_job_alone(tmp_path: Path) -> None:
    path = checkpoints.checkpoint_file("ddp", 3, tmp_path)
    checkpoints.save({"identity": "job", "weights": torch.arange(3.0)}, path)
    found = checkpoints.load(path, "job")
    assert found is not None
    state, file = found
    assert (state["weights"].tolist(), file) == ([0.0, 1.0, 2.0], path)
    assert [file.name for file in path.parent.iterdir()] == ["seed-3.pt"]
    assert checkpoints.load(path, "another") is None
    assert checkpoints.load(tmp_path / "absent.pt", "job") is None


def test_a_checkpoint_that_was_cut_or_changed_is_named_and_the_one_before_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        found = checkpoints.load(path, "job")
        assert found is not None
        (state, file), said = found, capsys.readouterr().out
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
    found = checkpoints.load(path, "job")
    assert found is not None
    assert found[0]["steps"] == 1


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
