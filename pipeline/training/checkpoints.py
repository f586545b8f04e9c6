"""Resume points: written whole or not at all, checked when they are read, and exact."""

from __future__ import annotations

import hashlib
import pickle
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from pipeline import files, results
from pipeline.errors import first_line
from pipeline.results import MODELS, Result, ResultError

CHECKPOINTS = Path("checkpoints")
"""Not an output of any stage: DVC deletes outputs before it runs a stage, and a resume point must survive that."""

UNREADABLE = (
    OSError,
    RuntimeError,
    ValueError,
    EOFError,
    KeyError,
    ImportError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)
"""What ``torch.load`` raises for a file that is not what it should be."""


def checkpoint_file(variant: str, seed: int, root: Path = CHECKPOINTS) -> Path:
    return root / variant / f"seed-{seed}.pt"


def save(state: dict[str, Any], path: Path) -> None:
    """Write ``state`` (tensors and plain values) to ``path``, as ``files.whole`` does."""
    with files.whole(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's writer, of bytes that it lacks
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def before(path: Path) -> Path:
    """Where the checkpoint stands that the one at ``path`` came after."""
    return path.with_name(f"{path.name}.before")


def keep(state: dict[str, Any], path: Path) -> None:
    """``save`` a checkpoint, and keep the one that is there as the one ``before``."""
    with suppress(FileNotFoundError):
        path.replace(before(path))  # first, so that the disk has to hold no more than two
    save(state, path)


def discard(path: Path) -> None:
    """Delete the checkpoint, and the one before."""
    for file in (path, before(path)):
        file.unlink(missing_ok=True)


def load(path: Path, identity: str) -> tuple[dict[str, Any], Path] | None:
    """The state at ``path``, on the CPU, and its file, if there is one and it was saved by the very same job; else
    those of the one ``before``.

    ``identity`` stands for all that the run depends on; a checkpoint of another job, or one that is not as it was
    written, is no resume point.
    """
    for file in (path, before(path)):
        try:
            with zipfile.ZipFile(
                file
            ) as written:  # as torch writes it: with a CRC-32 of each part, which it never checks
                if part := written.testzip():
                    raise zipfile.BadZipFile(f"{part} is not as it was written")
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            continue
        except UNREADABLE as error:
            print(
                f"{file} is damaged and is ignored; the run goes on from the checkpoint before, or starts from the "
                f"beginning. ({first_line(error)})",
                flush=True,
            )
            continue
        if isinstance(state, dict) and state.get("identity") == identity:
            return state, file
    return None


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
