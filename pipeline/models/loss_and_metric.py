"""What training minimises and what evaluation counts: the loss and the metric of params.yaml."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.errors import PipelineError
from pipeline.models import factories
from pipeline.params import Train

RESOLUTION = 2.0**20
"""Parts of one to which a metric's score of a sample is rounded. Sums of up to 2^32 such scores are exact in float64,
so that it does not matter which process counted which samples."""

_PROBES = 6
"""Samples of noise with which a loss and a metric are tried; an even and an odd part of them are too."""


class ObjectiveError(PipelineError):
    """train.loss or train.metric cannot be. The message says what was found and what is expected."""


@dataclass(frozen=True)
class Objective:
    """Logits float32 [b, classes] and labels int64 [b] to numbers."""

    loss: Callable[[Tensor, Tensor], Tensor]
    """To their mean loss, a scalar with a gradient."""
    test_losses: Callable[[Tensor, Tensor], Tensor]
    """To the sum of the loss over the samples, a float64 scalar. Of cross-entropy, without label smoothing."""
    scores: Callable[[Tensor, Tensor], Tensor]
    """To what each sample is worth, [b]: true or false, or a number from 0 to 1."""


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Their sum, added up in float64."""
    return F.cross_entropy(logits, labels, reduction="none").double().sum()


def is_right(logits: Tensor, labels: Tensor) -> Tensor:
    """Accuracy: whether the largest logit is the label's."""
    return logits.argmax(1) == labels


CLASSIFICATION = Objective(F.cross_entropy, cross_entropies, is_right)
"""Cross-entropy and accuracy."""


def of_job(train: Train, classes: int, device: torch.device) -> Objective:
    """What ``train`` asks for. Raises ObjectiveError.

    ``train.loss`` is ``cross_entropy`` or ``module:factory``; the factory is called with ``classes`` and
    ``train.loss_options`` and returns the loss, a function or an nn.Module without parameters. ``train.metric`` is
    ``accuracy`` or ``module:function``, which gives every sample a score.
    """
    loss: Callable[[Tensor, Tensor], Tensor]
    if train.loss == "cross_entropy":
        loss, sums = partial(F.cross_entropy, label_smoothing=train.label_smoothing), cross_entropies
    else:
        loss = _own_loss(train, classes, device)
        sums = partial(_summed, loss)
    scores = is_right if train.metric == "accuracy" else partial(_own_scores, train.metric, _metric(train.metric))
    return Objective(loss, sums, scores)


def load(train: Train) -> None:
    """Import what the loss and the metric need: what is imported then is no memory of the training."""
    if train.loss != "cross_entropy":
        _loss_factory(train.loss)
    if train.metric != "accuracy":
        _metric(train.metric)


def check(train: Train, classes: int) -> None:
    """Try the loss and the metric on noise. Raises ObjectiveError for what would make a comparison meaningless.

    The loss of a batch must be the mean of its samples' own losses: devices and micro-batches take parts of a batch,
    and only then do their losses add up to that of the whole.
    """
    objective = of_job(train, classes, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_PROBES, classes, generator=generator)
    labels = torch.randint(classes, (_PROBES,), generator=generator)
    with torch.random.fork_rng(devices=[]):
        if train.loss != "cross_entropy":
            _check_loss(train.loss, objective, logits.requires_grad_(), labels)
        if train.metric != "accuracy":
            _check_scores(train.metric, objective, logits.detach(), labels)


def _check_loss(name: str, objective: Objective, logits: Tensor, labels: Tensor) -> None:
    whole = objective.loss(logits, labels)
    if not isinstance(whole, Tensor) or whole.shape != () or not whole.is_floating_point() or not whole.requires_grad:
        found = f"a tensor of shape {list(whole.shape)}" if isinstance(whole, Tensor) else repr(whole)
        raise ObjectiveError(
            f"train.loss: {name} gave {found}; expected a scalar tensor with a gradient, the mean over the samples."
        )
    parts = torch.stack([objective.loss(logits[rows], labels[rows]) for rows in torch.arange(_PROBES).split(2)])
    if not torch.allclose(parts.mean(), whole, rtol=1e-4, atol=1e-6):
        raise ObjectiveError(
            f"train.loss: {name} is {whole.item():g} for {_PROBES} samples and {parts.mean().item():g} on average for "
            "equal parts of them; expected the mean of the samples' own losses, so that devices and micro-batches can "
            "take parts of a batch. With class weights: weight the losses of the samples, then take their plain mean."
        )


def _check_scores(name: str, objective: Objective, logits: Tensor, labels: Tensor) -> None:
    before = logits.clone()
    scores = objective.scores(logits, labels).double()
    if not bool(((scores >= 0) & (scores <= 1)).all()):
        raise ObjectiveError(
            f"train.metric: {name} gave scores from {scores.min():g} to {scores.max():g}; expected true or false, or a "
            "number from 0 to 1 for every sample."
        )
    if not torch.equal(logits, before):
        raise ObjectiveError(f"train.metric: {name} changes the logits, which others look at too; work on a copy.")
    parts = [objective.scores(logits[rows], labels[rows]).double() for rows in torch.arange(_PROBES).split(2)]
    if not torch.allclose(torch.cat(parts), scores, rtol=1e-4, atol=1e-6):
        raise ObjectiveError(
            f"train.metric: {name} gives samples other scores beside other samples; expected a score that follows from "
            "a sample's own logits and label, for variants are evaluated in batches of different sizes."
        )


def _own_loss(train: Train, classes: int, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    factory = _loss_factory(train.loss)
    loss: Callable[[Tensor, Tensor], Tensor] = factories.call(
        factory, train.loss, "train.loss", train.loss_options, error=ObjectiveError, classes=classes
    )
    if not callable(loss):
        raise ObjectiveError(f"train.loss: {train.loss} returned {loss!r}; expected a function of logits and labels.")
    if isinstance(loss, nn.Module):
        trained = [name for name, _ in loss.named_parameters()]
        if trained:
            raise ObjectiveError(
                f"train.loss: {train.loss} has parameters of its own ({', '.join(trained)}), which nothing would "
                "train; make them a part of the model, or buffers."
            )
        loss = loss.to(device)
    return loss


def _loss_factory(name: str) -> Callable[..., Any]:
    return factories.find(name, "train.loss", "a loss", example="my_losses:focal", error=ObjectiveError)


def _metric(name: str) -> Callable[..., object]:
    return factories.find(name, "train.metric", "scores", example="my_metrics:top_two", error=ObjectiveError)


def _summed(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> Tensor:
    return loss(logits, labels).double() * len(labels)


def _own_scores(name: str, metric: Callable[..., object], logits: Tensor, labels: Tensor) -> Tensor:
    scores = metric(logits, labels)
    if not isinstance(scores, Tensor) or scores.shape != labels.shape:
        found = f"a tensor of shape {list(scores.shape)}" if isinstance(scores, Tensor) else repr(scores)
        raise ObjectiveError(
            f"train.metric: {name} gave {found} for {len(labels)} sample(s); expected a tensor with one score each, "
            f"of shape {list(labels.shape)}."
        )
    return scores
