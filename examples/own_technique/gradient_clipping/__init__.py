"""The declaration of gradient clipping. It imports no torch, so that quick commands stay quick."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from pipeline.params import Entry, Section


class Options(Section):
    """The options under ``extra: gradient_clipping:``."""

    max_norm: PositiveFloat = Field(1.0, description="The gradients' largest norm, over all parameters.")


ENTRY = Entry(
    name="gradient_clipping",
    example={"max_norm": 1.0},
    searched_for=("clip_grad_norm_", "gradient norm", "exploding gradients"),
    does="Gradients whose norm over all parameters exceeds max_norm are scaled down to max_norm",
    pays="where single steps with large gradients make training unstable: deep or recurrent nets, high learning rates",
    costs="a pass over all gradients per step",
    source="Pascanu et al., On the Difficulty of Training Recurrent Neural Networks, ICML 2013",
    changes="statistics",
    excludes={
        "fp16": "the gradients are scaled up when they would be clipped",
        "optimizer_in_backward": "a gradient is used and freed before the norm of all gradients is known",
        "pipeline": "each process knows only the gradients of its own stage, and not the norm of all gradients",
        "tensor": "each process has some gradients whole and others in part, so the processes' norms do not add up",
    },
    options=Options,
)
