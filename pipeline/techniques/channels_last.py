"""channels_last: store images as NHWC in memory, so that convolution kernels read neighbouring channels together."""

from __future__ import annotations

import torch

from pipeline.techniques.base import Setup, Technique


class ChannelsLast(Technique):
    """Stores the model's 4-D parameters and its input in ``torch.channels_last``; shapes and values stay the same.

    An input that is not 4-D stays unchanged: a later stage of a pipeline may get such an input.
    """

    name = "channels_last"

    def change_model(self, setup: Setup) -> None:
        setup.model = setup.model.to(memory_format=torch.channels_last)

    def change_step(self, setup: Setup) -> None:
        forward = setup.step.forward

        def channels_last(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            return forward(inputs, targets)

        setup.step.forward = channels_last
