"""A small decoder-only transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.errors import PipelineError


class GPT(nn.Sequential):
    """Maps b samples of t tokens, int64 [b, t], to logits [b, t, vocabulary] for each token's successor.

    t is at most ``length``. The blocks are pre-norm (Radford et al., "Language Models are Unsupervised Multitask
    Learners", 2019), with rotary positions (Su et al., arXiv:2104.09864). If ``tied``, the last layer shares the
    embedding's weights (Press and Wolf, arXiv:1608.05859). A pipeline needs a model that is not tied, because it cuts
    between blocks, and the embedding and the last layer are then in different stages.
    """

    def __init__(
        self, *, vocabulary: int, length: int, width: int = 128, depth: int = 4, heads: int = 4, tied: bool = True
    ) -> None:
        if width % (2 * heads):
            raise PipelineError(f"train.model_options: width {width} is not a multiple of 2 x heads, {2 * heads}.")
        embedding = nn.Embedding(vocabulary, width)
        head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            head.weight = embedding.weight
        blocks = [Block(width, heads, length) for _ in range(depth)]
        super().__init__(embedding, *blocks, nn.LayerNorm(width), head)
        for weight in dict.fromkeys([embedding.weight, head.weight]):
            nn.init.normal_(weight, std=0.02)
        for name, weight in self.named_parameters():  # layers whose outputs add up over the blocks get smaller weights
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                nn.init.normal_(weight, std=0.02 / (2 * depth) ** 0.5)


class Block(nn.Module):
    """Attention, then an MLP of two linear layers. Each takes the normalised ``hidden`` [b, t, width], and its output
    is added to ``hidden``."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads, length)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return out


class Attention(nn.Module):
    """Causal self-attention: a token attends to itself and to earlier tokens.

    The rows of ``query_key_value`` are ordered by head, so that tensor parallelism can split the layer between heads.
    """

    cos_and_sin: Tensor
    tensor_pair = ("query_key_value", "out")

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.head_width = heads, width // heads
        rates = 10_000.0 ** -torch.linspace(0, 1, self.head_width // 2 + 1)[:-1]
        angles = torch.outer(torch.arange(length), rates)
        self.register_buffer("cos_and_sin", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.query_key_value(hidden).unflatten(-1, (-1, 3, self.head_width))  # [b, t, heads, 3, d]
        query, key, value = parts.permute(3, 0, 2, 1, 4).unbind()
        cos, sin = self.cos_and_sin[:, : hidden.shape[1]].to(query.dtype)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def rotated(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of components (i, i + d/2) of ``vectors`` [..., t, d], for t tokens, by the angle whose cosine
    and sine are in ``cos`` and ``sin`` [t, d/2].

    After the rotation, the dot product of two vectors depends on the distance between their tokens.
    """
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
