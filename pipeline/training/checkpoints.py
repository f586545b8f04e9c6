"""Resume points: written whole or not at all, and exact."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from pipeline import results
from pipeline.errors import first_line
from pipeline.results import MODELS, Result, ResultError

CHECKPOINTS = Path("checkpoints")
"""Not an output of any stage: DVC deletes outputs before it runs a stage, and a resume point must survive that."""

UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, KeyError, ImportError, pickle.UnpicklingError)
"""What ``torch.load`` raises for a file that is not what it should be."""


def checkpoint_file(variant: str, seed: int, root: Path = CHECKPOINTS) -> Path:
    return root / variant / f"seed-{seed}.pt"


def save(state: dict[str, Any], path: Path) -> None:
    """Write ``state`` (tensors and plain values) to ``path``, whole or not at all, also when the power fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load(path: Path, identity: str) -> dict[str, Any] | None:
    """The state at ``path``, on the CPU, if there is one and it was saved by the very same job.

    ``identity`` stands for all that the run depends on; a checkpoint of another job, or one that cannot
    be read, is no resume point: None.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        print(
            f"{path} cannot be read and is ignored; the run starts from the beginning. ({first_line(error)})",
            flush=True,
        )
        return None
    return state if isinstance(state, dict) and state.get("identity") == identity else None


def weights(result: Result, seed: int, root: Path = MODELS) -> dict[str, torch.Tensor]:
    """The trained weights of one seed of ``result``, on the CPU: those whose digest it names, and no others.

    Raises ResultError, naming the file, if it is missing, cannot be read or holds something else.
    """
    path, retrain = results.model_file(result.variant, seed, root), results.train_again(result.variant)
    expected = next(run.model_sha256 for run in result.runs if run.seed == seed)
    try:
        state: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        found = state_sha256(state)
    except FileNotFoundError:
        raise ResultError(f"{path} is missing; run `dvc repro train@{result.variant}` first.") from None
    except (*UNREADABLE, AttributeError, TypeError) as error:
        raise ResultError(f"{path} cannot be read as weights ({first_line(error)}). Run {retrain}.") from None
    if found != expected:
        raise ResultError(
            f"{path} does not hold the weights that its result is about: expected model_sha256 {expected}, found "
            f"{found}. Train again: {retrain}."
        )
    return state


def random_state() -> dict[str, torch.Tensor]:
    """This process's generators: the CPU's and, where one is in use, the current GPU's."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    """Undo of ``random_state``."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def state_sha256(state: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of a model's state dict, in its order."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return digest.hexdigest()
