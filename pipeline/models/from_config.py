"""Models of the library ``transformers``, with random weights, from a configuration on disk: causal language models,
and classifiers of sequences and of tokens."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from pipeline import environment, factories
from pipeline.errors import PipelineError, count, first_line
from pipeline.files import read_bytes
from pipeline.processes import hush_torchao, replaced

LIMIT_BYTES = 1 << 20
"""Largest allowed size of a configuration's file."""
LIMIT_LAYERS = 1_000
"""Largest allowed number of layers."""
LIMIT_MODULES = 100_000
"""Largest allowed number of modules in a model."""
BUILT_IN = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
"""Allowed implementations of attention and of experts. The library would look for others on a hub."""
LABELS = ("id2label", "label2id")
"""Keys whose values are names of classes, which may hold any character."""
_CLASSES = {
    "causal language model": "AutoModelForCausalLM",
    "classifier": "AutoModelForSequenceClassification",
    "token classifier": "AutoModelForTokenClassification",
}
UNUSED = ("_name_or_path", "name_or_path", "auto_map", "quantization_config")
"""Keys that name where the weights or their code came from, or how the weights were stored. They are ignored."""


class FromConfig(nn.Module):
    """Maps b samples of t tokens, int64 [b, t], to logits.

    Without ``classes`` and ``labels``, these are logits [b, t, vocabulary] for each token's successor. A classifier
    takes the inputs by their names in the library, such as ``attention_mask``. Its logits are [b, classes] or, if each
    of the ``labels`` tokens has a label, [b, labels, classes].

    t is at most ``length``. ``config`` is the path of a model's config.json. The data's vocabulary size replaces the
    file's; for a classifier, if it is larger. Nothing is downloaded, and only the library's code runs. Raises
    PipelineError if the library is missing or refuses the configuration.
    """

    def __init__(self, *, vocabulary: int, length: int, classes: int = 0, labels: int = 0, config: str = "") -> None:
        super().__init__()
        where = f"train.model_options.config: found {config!r}"
        kind = "token classifier" if labels else "classifier" if classes else "causal language model"
        configurations, models = load(kind)
        self._options = {"use_cache": False} if kind == "causal language model" else {}
        try:
            values = _checked(json.loads(read_bytes(Path(config), LIMIT_BYTES)))
            # There are no special tokens, because a padding token's embedding would not be trained. A language model is
            # a decoder, because in an encoder a token would attend to later tokens.
            changes: dict[str, Any] = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
            if kind == "causal language model":
                changes |= {"vocab_size": vocabulary, "is_decoder": True}
            else:
                changes |= {"vocab_size": max(vocabulary, values.get("vocab_size", 0)), "num_labels": classes}
                values = {key: value for key, value in values.items() if key not in LABELS}
            hub = factories.library("huggingface_hub.constants", "train.model: found 'transformers'", PipelineError)
            with replaced(hub, "HF_HUB_OFFLINE", True):
                configuration = configurations.for_model(**values | changes)
                _check_size(models, configuration)
                self.net = models.from_config(configuration, dtype=torch.float32).train()
        except Exception as error:
            raise PipelineError(
                f"{where}, from which transformers cannot make a {kind}: {first_line(error)}"
            ) from error
        longest = getattr(configuration, "max_position_embeddings", length)
        if longest < length:
            raise PipelineError(f"{where}, for {longest} tokens; reduce prepare.window, now {length}, to {longest}.")

    def forward(self, *tokens: Tensor, **inputs: Tensor) -> Tensor:
        logits: Tensor = self.net(*tokens, **inputs, **self._options).logits
        return logits


def _checked(values: Any, key: str = "") -> Any:
    """Return the configuration's ``values`` without the keys in ``UNUSED``. Raises ValueError for code from elsewhere,
    and for too many layers. ``key``: the key of ``values`` in the configuration."""
    if isinstance(values, dict):
        used = {name: value for name, value in values.items() if name not in UNUSED}
        kept = key if "implementation" in key or key in LABELS else ""  # what holds for the key holds inside of it
        return {name: _checked(value, kept or name) for name, value in used.items()}
    if isinstance(values, list):
        return [_checked(value, key) for value in values]
    of_code = "implementation" in key
    if isinstance(values, str) and (values not in BUILT_IN if of_code else "/" in values and key not in LABELS):
        remedy = f"allowed: {', '.join(BUILT_IN)}" if of_code else "remove it"
        raise ValueError(f"{key}: found {values!r}, which may name code on a hub, or a file; {remedy}.")
    if isinstance(values, int) and re.search(r"layers?$", key) and values > LIMIT_LAYERS:
        raise ValueError(f"{key}: found {values}; allowed: at most {LIMIT_LAYERS:,}.")
    return values


def _check_size(models: Any, configuration: Any) -> None:
    """Raise ValueError if the model has more than ``LIMIT_MODULES`` modules, or is larger than the memory. To find out,
    it is built on the meta device, which has no memory."""
    numbers = itertools.count(1)

    def counted(*_: Any) -> None:
        if next(numbers) > LIMIT_MODULES:
            raise ValueError(f"the model has more than {count(LIMIT_MODULES, 'module')}.")

    hook = register_module_module_registration_hook(counted)
    try:
        with torch.device("meta"):
            net = models.from_config(configuration, dtype=torch.float32)
    finally:
        hook.remove()
    needed = sum(tensor.nbytes for tensor in net.state_dict().values())
    memory = min([psutil.virtual_memory().total, *environment.memory_limits()])
    if needed > memory and type(torch.empty(0)) is Tensor:  # a fake tensor needs no memory
        raise ValueError(f"its weights take {needed:,} bytes, but this machine has {memory:,}.")


def load(kind: str = "causal language model") -> tuple[Any, Any]:
    """Import and return AutoConfig and the class that makes models of this kind. Raises PipelineError if
    ``transformers`` is missing."""
    hush_torchao()
    transformers = factories.library("transformers", "train.model: found 'transformers'", PipelineError)
    return transformers.AutoConfig, getattr(transformers, _CLASSES[kind])
