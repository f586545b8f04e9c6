"""Save and load checkpoints, from which runs resume exactly. Each checkpoint is written whole or not at all, and
checked when it is read."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import MappingKey, tree_leaves_with_path

from pipeline import files, results
from pipeline.distributed import World, whole
from pipeline.errors import PipelineError, first_line, say
from pipeline.params import Config, catalogue
from pipeline.plans import Plan
from pipeline.processes import randomness
from pipeline.results import MODELS, Result, ResultError

CHECKPOINTS = Path("checkpoints")
"""The folder of the checkpoints. It is not an output of a stage: DVC deletes a stage's outputs before it runs the
stage, but checkpoints must be kept."""


class Unreadable(Exception):
    """A file is damaged, or does not hold what it should. The message is the first line of the original error's
    message."""


@contextmanager
def reading() -> Iterator[None]:
    """Turn every error of the block into Unreadable, except FileNotFoundError. Every error is caught because torch's
    errors for a damaged file have no common class."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        raise Unreadable(first_line(error)) from None


def checkpoint_file(variant: str, seed: int, root: Path = CHECKPOINTS) -> Path:
    return root / variant / f"seed-{seed}.pt"


def save(state: dict[str, Any], path: Path) -> None:
    """Write ``state`` (tensors and plain values) to ``path``, completely or not at all (``files.whole``)."""
    with files.whole(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # from torch's writer, if a write failed
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def before(path: Path) -> Path:
    """Return the path of the checkpoint that was saved before the checkpoint at ``path``."""
    return path.with_name(f"{path.name}.before")


def keep(state: dict[str, Any], path: Path) -> None:
    """``save`` a checkpoint, after moving the existing checkpoint to ``before(path)``."""
    with suppress(FileNotFoundError):
        path.replace(before(path))  # moved before saving, so that the disk never holds three checkpoints
    save(state, path)


def discard(path: Path) -> None:
    """Delete the checkpoint at ``path`` and the checkpoint before it."""
    for file in (path, before(path)):
        file.unlink(missing_ok=True)


def finished(path: Path) -> Path:
    """Return the file that keeps what the finished run of the checkpoint at ``path`` gave."""
    return path.with_suffix(".finished")


def all_finished(variant: str, root: Path = CHECKPOINTS) -> set[Path]:
    return set((root / variant).glob("*.finished"))


def finish(path: Path) -> None:
    """Keep only the record, history and weights of the finished run of the checkpoint at ``path``, so that a training
    with more seeds need not repeat it. DVC deletes the outputs of the stage before the stage runs again."""
    if path.exists():
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        save({key: state[key] for key in ("identity", "resumes", "history", "run", "plan", "model")}, finished(path))
    discard(path)


def load(path: Path, identity: str) -> tuple[dict[str, Any], Path] | None:
    """Load the checkpoint at ``path`` or, if this checkpoint cannot be used, the checkpoint at ``before(path)``.

    Returns the state, on the CPU, and the file; None if no checkpoint can be used. ``identity``: a digest of everything
    that the run depends on. A checkpoint with another identity is ignored. A damaged checkpoint is ignored too, and a
    line is printed.
    """
    for file in (path, before(path)):
        try:
            with reading():
                with zipfile.ZipFile(file) as written:  # torch writes a CRC-32 of each part, but never checks it
                    if part := written.testzip():
                        raise zipfile.BadZipFile(f"{part} has changed since it was written")
                state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except FileNotFoundError:
            continue
        except Unreadable as error:
            say(
                f"{file} is damaged and is ignored; the run continues from the previous checkpoint, or starts from the "
                f"beginning. ({error})",
            )
            continue
        if isinstance(state, dict) and state.get("identity") == identity:
            return state, file
    return None


def weights(result: Result, seed: int, root: Path = MODELS) -> dict[str, torch.Tensor]:
    """Load the trained weights of one seed of ``result``, on the CPU, and check their digest.

    Raises ResultError, which names the file, if the file is missing, cannot be read or holds other weights.
    """
    path, stage = results.model_file(result.variant, seed, root), results.stage_of(result.variant, result.applied)
    retrain = results.train_again(stage)
    expected = next(run.model_sha256 for run in result.runs if run.seed == seed)
    try:
        state, why_not = _weights_in(path)
    except FileNotFoundError:
        raise ResultError(f"{path} is missing; run `dvc repro {stage}` first.") from None
    except Unreadable as error:
        raise ResultError(f"{path} cannot be read as weights ({error}). Run {retrain}.") from None
    if why_not != expected:
        raise ResultError(
            f"{path} does not hold the weights that its result describes: expected model_sha256 {expected}, found "
            f"{why_not}. Train again: {retrain}."
        )
    return state


def teacher_weights(config: Config, name: str, seed: int) -> dict[str, torch.Tensor] | None:
    """Return the weights of the teacher of ``variants.<name>``, on the CPU; None if there is no teacher.

    If the teacher is a variant, its weights of the same seed are returned. Raises PipelineError if the weights are
    missing or damaged.
    """
    settings = config.variants[name].distillation
    if settings is None:
        return None
    if settings.file is None:
        return weights(results.read(results.result_file(settings.teacher), config), seed)
    try:
        return _weights_in(settings.file)[0]
    except (FileNotFoundError, Unreadable) as error:
        raise PipelineError(
            f"variants.{name}.distillation.teacher: {settings.teacher} cannot be read as weights, a state dict of "
            f"tensors ({error}). Write it with torch.save(model.state_dict(), ...), or set the path of such a file."
        ) from None


def _weights_in(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Return the state dict in the file, on the CPU, and its digest. Raises Unreadable or FileNotFoundError."""
    with reading():
        state: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict):
            raise TypeError(f"found {type(state).__name__}; expected a dict")
        return state, state_sha256(state)


def seed_random(seed: int, plan: Plan, world: World) -> None:
    """Seed the random draws that follow the model's initialisation. The draws differ by rank. But if a technique needs
    equal draws, all ranks that share one model draw the same numbers."""
    alike = any(entry.shared_rng for entry in catalogue.in_effect(plan.applied))
    stream = world.rank // plan.model_processes if alike else world.rank
    randomness.seed(seed + 1_000_003 * (stream + 1))


def state_sha256(state: dict[str, Any]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes of a model's state dict, in the dict's order. A module's
    extra state counts as its parts; a part that is no tensor counts as its representation.

    If ranks hold parts of tensors, all ranks call this function together.
    """
    digest = hashlib.sha256()
    for path, value in tree_leaves_with_path(state):
        name = ".".join(str(key.key if isinstance(key, MappingKey) else key) for key in path)
        if not isinstance(value, torch.Tensor):
            digest.update(f"{name} {value!r}\n".encode())
            continue
        plain = whole(value).detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return digest.hexdigest()
