"""Muon: orthogonalised momentum for the matrices of hidden layers, and AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.techniques.base import Setup, Technique

RMS = 0.2
"""Root mean square of the values of an orthogonal update, relative to the learning rate, as in AdamW's updates. So the
update's singular values are about ``RMS`` times the root of the matrix's longer side."""
_OF_JOB = ("lr", "weight_decay")
"""The settings that Muon shares with AdamW, each from the parameter's group."""


class Muon(Technique):
    """torch's Muon updates the hidden layers' matrices (``hidden_matrices``), with the job's learning rates and decays.

    Each update is momentum whose singular values five steps of a Newton-Schulz iteration bring near 1. Source: Jordan
    et al., "Muon: An Optimizer for Hidden Layers in Neural Networks", 2024; its scale, with which AdamW's learning rate
    fits: Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982.
    """

    name = "muon"

    def change_model(self, setup: Setup) -> None:
        self._matrices = {*hidden_matrices(setup.model, setup.outputs).values()}
        if not self._matrices:
            raise ConfigError(
                f"{self.where('optimizer')}, but {type(setup.model).__name__} trains no matrix of a linear layer "
                "before its last layer; allowed: null, which is train.optimizer."
            )

    def change_optimizer(self, setup: Setup) -> None:
        choice = setup.optimizer_choice
        setup.optimizer_choice = replace(choice, cls=partial(_MuonAndAdamW, self._matrices))


def hidden_matrices(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """Return the trained weights with two dimensions, by name, except those of embeddings and of the last layer that
    ``run`` calls, which runs the model once. A layer that shares its weight with one of these is left out, too."""
    weights = {
        part: {name: weight for name, weight in part.named_parameters(recurse=False) if _is_matrix(name, weight)}
        for part in model.modules()
    }
    called: list[nn.Module] = []
    with ExitStack() as hooks:
        for part, held in weights.items():
            if held:
                hooks.enter_context(part.register_forward_pre_hook(lambda part, _: called.append(part)))
        run()
    apart = {*called[-1:], *(part for part in weights if isinstance(part, (nn.Embedding, nn.EmbeddingBag)))}
    others = {weight for part in apart for weight in weights[part].values()}
    hidden = {weight for held in weights.values() for weight in held.values()} - others
    return {name: weight for name, weight in model.named_parameters() if weight in hidden}


def _is_matrix(name: str, weight: Tensor) -> bool:
    return weight.dim() == 2 and weight.requires_grad and name.endswith("weight")


class _MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for the ``matrices``, torch's AdamW for the other parameters.

    Groups and state are those of one AdamW, except that a matrix's state is its momentum.
    """

    def __init__(self, matrices: Set[Tensor], parameters: Iterable[Any], **options: Any) -> None:
        shared = {key: options[key] for key in _OF_JOB}
        muon = torch.optim.Muon([{"params": []}], **shared, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW([{"params": []}], **options)
        own = {key: value for key, value in muon.defaults.items() if key not in _OF_JOB}
        self._parts: tuple[tuple[torch.optim.Optimizer, dict[str, Any], bool], ...] = (
            (muon, own, True),
            (adamw, {}, False),
        )
        self._matrices = matrices
        super().__init__(parameters, adamw.defaults)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for optimizer, own, of_matrices in self._parts:
            optimizer.state = self.state
            optimizer.param_groups = [
                group | own | {"params": [key for key in group["params"] if (key in self._matrices) is of_matrices]}
                for group in self.param_groups
            ]
            optimizer.step()
