"""Settings of the model that a variant trains, and of a teacher to learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat

from pipeline.params.catalogue.base import Entry
from pipeline.params.sections import Fraction, Section


class Distillation(Section):
    """A teacher, and how much a student learns from it."""

    teacher: Annotated[str, Field(min_length=1)]
    """VARIANT: the weights of that variant, trained with the same seed. Or a file of weights (a state dict), whose path
    contains a dot or a slash."""
    temperature: PositiveFloat = 4.0
    """Divides the logits of teacher and student, so that the teacher's small probabilities count. Unused in tasks
    without logits."""
    alpha: Fraction = 0.5
    """Weight of the distance to the teacher in the loss; the job's own loss has weight 1 - alpha."""
    model: str | None = None
    """The teacher's model. null: the model of the teacher's variant, or, for a file of weights, the job's model."""
    model_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the teacher."""

    def __str__(self) -> str:
        return self.teacher

    @property
    def variant(self) -> str | None:
        """The teacher's name if the teacher is a variant; None if it is a file of weights."""
        return None if is_file(self.teacher) else self.teacher

    @property
    def file(self) -> Path | None:
        """The file of the teacher's weights; None if the teacher is a variant."""
        return Path(self.teacher).expanduser() if is_file(self.teacher) else None


def is_file(teacher: str) -> bool:
    """Return whether ``teacher`` is the path of a file of weights. Otherwise it is the name of a variant."""
    return "." in teacher or "/" in teacher


class ModelSettings(Section):
    """A variant's model, if it differs from the job's."""

    model: str | None = None
    model_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for this model."""
    distillation: Distillation | None = None
    """A variant whose teacher is a variant belongs under students."""


MODELS: tuple[Entry, ...] = (
    Entry(
        name="another_model",
        setting="model: small_cnn",
        searched_for=("student", "smaller model", "model_options", "architecture"),
        does="The variant trains this model instead of train.model",
        pays="when a smaller or faster model is accurate enough; also to show what a teacher adds to this model",
        costs="the comparison is then between models, not only between techniques; the report says so",
        source="not a technique; a comparison of models",
        changes="statistics",
        layer="model",
        requested_if=lambda variant: variant.model is not None,
        details=("model_options",),
    ),
    Entry(
        name="distillation",
        setting="distillation: {teacher: baseline}",
        searched_for=("knowledge distillation", "teacher", "student", "soft targets", "KD", "temperature"),
        does="A part of the loss is the distance between the outputs of the model and of a trained teacher: for logits "
        "the Kullback-Leibler divergence at a temperature, for other outputs the mean squared difference",
        pays="when a small model is to be deployed, and a larger one is trained anyway",
        costs="a forward pass of the teacher in each step, and its weights in the memory of every process. Other "
        "techniques neither split nor compile the teacher, but it computes in the variant's precision",
        source="Hinton et al., Distilling the Knowledge in a Neural Network, 2015",
        changes="statistics",
        layer="forward",
        implementation="distillation.Distillation",
        requested_if=lambda variant: variant.distillation is not None,
        excludes={
            "pipeline": "the teacher needs the inputs and the loss needs the outputs, but no stage has both",
            "chunked_loss": "the distance to the teacher needs all outputs at once, but a chunked loss never has all",
            "data_parallel": "the teacher would compute the whole batch on one GPU",
        },
        without_effect=lambda variant: {"distillation": variant.distillation.model_copy(update={"alpha": 0.0})},  # type: ignore[union-attr]
    ),
)
