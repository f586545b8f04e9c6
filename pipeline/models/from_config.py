"""Causal language models of the library ``transformers``, with random weights, from a configuration on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline import factories
from pipeline.errors import PipelineError, first_line


class FromConfig(nn.Module):
    """Maps b samples of t tokens, int64 [b, t], to logits [b, t, vocabulary] for each token's successor.

    t is at most ``length``. ``config`` is the path of a model's config.json. The data's vocabulary size replaces the
    file's. Nothing is downloaded, and only the library's code runs. Raises PipelineError if the library is missing or
    refuses the configuration.
    """

    def __init__(self, *, vocabulary: int, length: int, config: str = "") -> None:
        super().__init__()
        where = f"train.model_options.config: found {config!r}"
        configurations, models = load()
        try:
            values = json.loads(Path(config).read_text(encoding="utf-8"))
            # There are no special tokens, because a padding token's embedding would not be trained. The model is a
            # decoder, because in an encoder a token would attend to later tokens.
            special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
            found = configurations.for_model(**values | special | {"vocab_size": vocabulary, "is_decoder": True})
            self.net = models.from_config(found, dtype=torch.float32).train()
        except Exception as error:
            raise PipelineError(
                f"{where}, from which transformers cannot make a causal language model: {first_line(error)}"
            ) from error
        longest = getattr(found, "max_position_embeddings", length)
        if longest < length:
            raise PipelineError(f"{where}, for {longest} tokens; reduce prepare.window, now {length}, to {longest}.")

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(input_ids=tokens, use_cache=False).logits
        return logits


def load() -> tuple[Any, Any]:
    """Import and return AutoConfig and AutoModelForCausalLM. Raises PipelineError if ``transformers`` is missing."""
    transformers = factories.library("transformers", "train.model: found 'transformers'", PipelineError)
    return transformers.AutoConfig, transformers.AutoModelForCausalLM
