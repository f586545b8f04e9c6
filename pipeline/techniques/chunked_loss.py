"""Chunked loss: compute, use and free the outputs of the model's last layer one chunk at a time."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from pipeline.errors import ConfigError
from pipeline.techniques.base import Setup, Technique


class ChunkedLoss(Technique):
    """The head (the model's last linear layer) and the loss are computed for one chunk of rows after the other.

    If the job uses the task's own loss, and the task's ``loss_by_row`` is true, a row is a vector of the outputs, such
    as a token's. Otherwise a row is a sample, because every loss is a mean over samples. While the model trains, its
    head returns its input, and the step's criterion applies the head. A chunk's logits and their gradient are freed
    before the logits of the next chunk are computed. Only the gradients of the head's input and parameters are kept, so
    no product is computed twice.

    Source: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024; Wijmans et al., "Cut Your
    Losses in Large-Vocabulary Language Models", ICLR 2025.
    """

    name = "chunked_loss"

    def change_model(self, setup: Setup) -> None:
        layer = head(setup)
        if layer is None or not layer.training:  # in evaluation mode, the head would be applied twice
            raise ConfigError(
                f"{self.where('loss_chunks')}, but {type(setup.model).__name__} does not return the unchanged outputs "
                "of an nn.Linear in training mode that it calls only once; allowed: 1, or a model that does."
            )
        self._head = layer
        layer.__class__ = _Head  # changes the module in place, so the names in the state dict stay the same

    def change_step(self, setup: Setup) -> None:
        criterion = setup.step.criterion
        by_row = setup.task.loss_by_row and ":" not in self.plan.train.loss
        if self.plan.micro_batch_size * (math.prod(setup.task.output_shape()[:-1]) if by_row else 1) == 1:
            raise ConfigError(
                f"{self.where('loss_chunks')}, but a micro-batch has a single row of outputs, which is one chunk; "
                "allowed: 1, or a larger micro-batch."
            )

        def chunked(hidden: Tensor, targets: Tensor) -> Tensor:
            weight, bias = self._head.weight, self._head.bias
            if isinstance(weight, DTensor):
                raise ConfigError(
                    f"{self.where('loss_chunks')}, but the last linear layer is in a block, and fsdp gathers a block's "
                    "parameters only for its forward pass; allowed: 1, or a last layer outside of all blocks."
                )
            if by_row:  # makes each row a sample
                ones = [1] * (hidden.ndim - 2)
                hidden, targets = hidden.reshape(-1, *ones, hidden.shape[-1]), targets.reshape(-1, *ones)
            loss: Tensor = _LossOfChunks.apply(hidden, weight, bias, targets, criterion, self.plan.applied.loss_chunks)
            return loss

        setup.step.criterion = chunked


class _Head(nn.Linear):
    """A linear layer that returns its input unchanged in training mode."""

    def forward(self, input: Tensor) -> Tensor:
        return input if self.training else super().forward(input)


def head(setup: Setup) -> nn.Linear | None:
    """Run the model once; return the linear layer whose output is the model's output.

    Returns None if there is no such layer, or if the model calls the layer more than once.
    """
    seen: dict[nn.Linear, list[Tensor]] = {linear: [] for linear in setup.model.modules() if type(linear) is nn.Linear}
    with ExitStack() as hooks:
        for linear in seen:
            hooks.enter_context(linear.register_forward_hook(lambda layer, _, output: seen[layer].append(output)))
        outputs = setup.outputs()
    return next((layer for layer, made in seen.items() if len(made) == 1 and made[0] is outputs), None)


class _LossOfChunks(torch.autograd.Function):
    """The mean loss over n samples. A linear layer computes their outputs from ``hidden`` [n, ..., d].

    ``forward`` computes the loss and its gradients together, chunk by chunk. ``backward`` only scales the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, criterion: Any, chunks: int
    ) -> Tensor:
        slope_of_hidden, slope_of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        slope_of_bias = None if bias is None else torch.zeros_like(bias)
        losses = []
        parts = zip(hidden.chunk(chunks), targets.chunk(chunks), slope_of_hidden.chunk(chunks), strict=True)
        for rows, of_rows, slope_of_rows in parts:
            outputs = F.linear(rows, weight, bias).requires_grad_()
            with torch.enable_grad():
                loss = criterion(outputs, of_rows) * (len(rows) / len(hidden))
            losses.append(loss.detach())
            (slope,) = torch.autograd.grad(loss, outputs)
            slope_of_rows.copy_(slope @ weight)
            slope, rows = slope.flatten(0, -2), rows.flatten(0, -2)
            if slope.dtype == slope_of_weight.dtype:
                torch.addmm(slope_of_weight, slope.T, rows, out=slope_of_weight)  # no temporary of the weight's size
            else:
                slope_of_weight += slope.T @ rows
            if slope_of_bias is not None:
                slope_of_bias += slope.sum(0)
            # Otherwise these tensors would still take memory while the next chunk's logits are computed.
            del outputs, loss, slope
        ctx.save_for_backward(slope_of_hidden, slope_of_weight, slope_of_bias)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        return hidden.mul_(slope), weight.mul_(slope), None if bias is None else bias.mul_(slope), None, None, None
