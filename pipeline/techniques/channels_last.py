"""channels_last: store images as NHWC in memory, so that convolution kernels read neighbouring channels together."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.errors import ConfigError
from pipeline.step import Inputs
from pipeline.techniques.base import Setup, Technique

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Number of dimensions -> the format with the channels innermost, for images and for volumes."""


class ChannelsLast(Technique):
    """Stores the model's 4-D and 5-D parameters and its input with the channels innermost; shapes and values stay the
    same.

    An input with other dimensions stays unchanged: a later stage of a pipeline may get such an input.
    """

    name = "channels_last"

    def change_model(self, setup: Setup) -> None:
        model, inputs = setup.model, tree_leaves(setup.inputs())
        parameters = [parameter for parameter in model.parameters() if parameter.dim() in _FORMATS]
        if not parameters and not any(values.dim() in _FORMATS for values in inputs):
            raise ConfigError(
                f"{self.where('channels_last')}, but {type(model).__name__} takes inputs of {inputs[0].dim()} "
                "dimensions and has no parameter of 4 or 5, so there is nothing to rearrange; allowed: false."
            )
        for parameter in parameters:
            parameter.data = parameter.data.contiguous(memory_format=_FORMATS[parameter.dim()])

    def change_step(self, setup: Setup) -> None:
        forward = setup.step.forward

        def arranged(values: torch.Tensor) -> torch.Tensor:
            return values.contiguous(memory_format=_FORMATS.get(values.dim(), torch.preserve_format))

        def channels_last(inputs: Inputs, targets: torch.Tensor) -> torch.Tensor:
            return forward(tree_map(arranged, inputs), targets)

        setup.step.forward = channels_last
