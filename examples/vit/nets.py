"""A small vision transformer in plain PyTorch, and a loss and a metric for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Maps [b, tokens, width] to the same shape: self-attention, then two linear layers, each pre-norm and residual.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.dropout(self._attention(self.norm_attention(tokens)))
        changed: Tensor = tokens + self.dropout(self.layers(self.norm_layers(tokens)))
        return changed

    def _attention(self, tokens: Tensor) -> Tensor:
        batch, count, width = tokens.shape
        split = self.queries_keys_values(tokens).view(batch, count, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries, keys, values)
        joined: Tensor = self.joined(attended.transpose(1, 2).reshape(batch, count, width))
        return joined


class Patches(nn.Module):
    """Maps images [b, C, H, W] to tokens [b, patches, width], and adds a learned position to each token."""

    def __init__(self, channels: int, patches: int, patch: int, width: int) -> None:
        super().__init__()
        self.embedded = nn.Conv2d(channels, width, patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn(1, patches, width))

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.embedded(images).flatten(2).transpose(1, 2) + self.places
        return tokens


class Head(nn.Module):
    """Maps the mean of the normalised tokens to logits."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(tokens).mean(1))
        return logits


def vit(
    *,
    channels: int,
    height: int,
    width: int,
    classes: int,
    patch: int = 2,
    features: int = 64,
    depth: int = 4,
    heads: int = 4,
    dropout: float = 0.1,
) -> nn.Module:
    """Return the model; ``train.model`` names this function. ``patch`` must divide both sides of the images, and
    ``heads`` must divide ``features``."""
    patches = (height // patch) * (width // patch)
    blocks = [Block(features, heads, dropout) for _ in range(depth)]
    return nn.Sequential(Patches(channels, patches, patch, features), *blocks, Head(features, classes))


def focal(*, classes: int, gamma: float = 2.0) -> Callable[[Tensor, Tensor], Tensor]:  # noqa: ARG001
    """Return the focal loss; ``train.loss`` names this function. Samples that are already classified well count little.

    Source: Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017.
    """

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        surprise = F.cross_entropy(logits, labels, reduction="none")
        return ((1 - torch.exp(-surprise)) ** gamma * surprise).mean()

    return loss


def top_two(logits: Tensor, labels: Tensor) -> Tensor:
    """Return whether each label has one of the two largest logits, bool [b]; ``train.metric`` names this function."""
    return (logits.topk(2).indices == labels.unsqueeze(1)).any(1)
