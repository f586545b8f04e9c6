"""channels_last: NHWC in memory. Convolution kernels read neighbouring channels together."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.step import TrainingStep
from pipeline.techniques.base import Inputs, Technique


class ChannelsLast(Technique):
    """The model's 4-D parameters and its input in ``torch.channels_last``; shapes and values stay the same.

    An input that is not 4-D, which a later pipeline stage may get, stays unchanged.
    """

    name = "channels_last"

    def change_model(self, model: nn.Module, inputs: Inputs) -> nn.Module:  # noqa: ARG002
        return model.to(memory_format=torch.channels_last)

    def change_step(self, step: TrainingStep) -> None:
        forward = step.forward

        def channels_last(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            if images.dim() == 4:
                images = images.contiguous(memory_format=torch.channels_last)
            return forward(images, labels)

        step.forward = channels_last
