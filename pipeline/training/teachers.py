"""Load a teacher's weights for a student."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline import results
from pipeline.errors import PipelineError
from pipeline.params import Config
from pipeline.training import checkpoints


def weights(config: Config, name: str, seed: int) -> dict[str, torch.Tensor] | None:
    """Return the weights of the teacher of ``variants.<name>``, on the CPU; None if there is no teacher.

    If the teacher is a variant, its weights of the same seed are returned. Raises PipelineError if the weights are
    missing or damaged.
    """
    settings, teacher = config.variants[name].distillation, config.teacher_of(name)
    if settings is None:
        return None
    if teacher:
        return checkpoints.weights(results.read(results.result_file(teacher), config), seed)
    try:
        with checkpoints.reading():
            found: dict[str, torch.Tensor] = torch.load(Path(settings.teacher), map_location="cpu", weights_only=True)
            checkpoints.state_sha256(found)
    except FileNotFoundError:
        raise PipelineError(
            f"students.{name}.distillation.teacher: there is no file {settings.teacher}; "
            "set the path of a state dict that torch.save has written."
        ) from None
    except checkpoints.Unreadable as error:
        raise PipelineError(
            f"students.{name}.distillation.teacher: {settings.teacher} cannot be read as weights, a state dict of "
            f"tensors ({error}). Write it with torch.save(model.state_dict(), ...)."
        ) from None
    return found
