"""The loss that training minimises and the metric that evaluation computes; params.yaml selects both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline import factories
from pipeline.errors import PipelineError, count
from pipeline.params import Train
from pipeline.processes import randomness

OfBatch = Callable[[Tensor, Tensor], Tensor]
"""A function of outputs [b, ...] and targets [b, ...]."""
RESOLUTION = 2.0**20
"""A metric's scores are rounded to multiples of 1 / ``RESOLUTION``. Sums of up to 2^32 such scores are exact in
float64, so a sum does not depend on how the samples are distributed over processes."""


class ObjectiveError(PipelineError):
    """train.task, train.loss or train.metric is invalid. The message says what was found and what is expected."""


@dataclass(frozen=True)
class Objective:
    """Functions of the model's outputs float32 [b, ...] and the targets [b, ...] for b samples."""

    loss: OfBatch
    """Returns the mean loss, a scalar with a gradient."""
    test_losses: OfBatch
    """Returns the sum of the losses of samples, or of the labels that count, a float64 scalar."""
    scores: OfBatch
    """Returns each sample's score, [b]: true or false, or a number from 0 to 1. Or the scores of the labels that
    count."""
    counted: Callable[[Tensor], Tensor | int]
    """Returns the number by which the sum of ``test_losses`` is divided, from the targets."""
    over_set: Callable[[Tensor, Tensor], float] | None = None
    """Returns the score, from 0 to 1, from the outputs and targets of the whole test set; None if the score is the mean
    of ``scores``."""


def of_job(train: Train, task: Objective, device: torch.device, arguments: Mapping[str, int]) -> Objective:
    """Return the loss and metric that ``train`` asks for: the ``task``'s, or the user's own. Raises ObjectiveError.

    A user's ``train.loss`` is ``module:factory``. The factory gets the ``arguments`` that describe the outputs, and
    ``train.loss_options``. The factory returns the loss, which is a function or an nn.Module without parameters. A
    user's ``train.metric`` is ``module:function``. The function returns a score for every sample or, with
    ``train.metric_over: test_set``, one for the test set.
    """
    objective = task
    if ":" in train.loss:
        loss = _own_loss(train, device, arguments)
        objective = replace(objective, loss=loss, test_losses=partial(_summed, loss, task.counted))
    if train.metric_over == "test_set":
        objective = replace(objective, over_set=partial(_over_set, train.metric, _metric(train.metric)))
    elif ":" in train.metric:
        objective = replace(objective, scores=partial(_own_scores, train.metric, _metric(train.metric)))
    return objective


def load(train: Train) -> None:
    """Import the modules of the user's loss and metric, so that their memory is not counted as the training's."""
    if ":" in train.loss:
        _loss_factory(train.loss)
    if ":" in train.metric:
        _metric(train.metric)


def check(train: Train, objective: Objective, outputs: Tensor, targets: Tensor) -> None:
    """Try the loss and metric on a few samples, if they or the task are the user's own. Raises ObjectiveError if they
    are unfit to compare variants.

    The loss of a batch must be the mean of its samples' losses. Otherwise the average of the losses that devices and
    micro-batches compute for parts of a batch would differ from the whole batch's loss.
    """
    own = {key: name for key in ("task", "loss", "metric") if ":" in (name := getattr(train, key))}
    with randomness.kept():
        for key in own.keys() & {"task", "loss"}:
            with factories.naming(own[key], f"train.{key}", ObjectiveError):
                _check_loss(f"train.{key}: {own[key]}", objective, outputs.clone().requires_grad_(), targets)
        for key in own.keys() & ({"task"} if objective.over_set else {"task", "metric"}):
            with factories.naming(own[key], f"train.{key}", ObjectiveError):
                _check_scores(f"train.{key}: {own[key]}", objective, outputs, targets)


def _check_loss(where: str, objective: Objective, outputs: Tensor, targets: Tensor) -> None:
    whole = objective.loss(outputs, targets)
    if not isinstance(whole, Tensor) or whole.shape != () or not whole.is_floating_point() or not whole.requires_grad:
        shown = f"a tensor of shape {list(whole.shape)}" if isinstance(whole, Tensor) else repr(whole)
        raise ObjectiveError(
            f"{where} returned {shown}; expected a scalar tensor with a gradient, the mean over the samples."
        )
    parts = torch.stack([objective.loss(outputs[rows], targets[rows]) for rows in torch.arange(len(outputs)).split(2)])
    if not torch.allclose(parts.mean(), whole, rtol=1e-4, atol=1e-6):
        raise ObjectiveError(
            f"{where} is {whole.item():g} for {len(outputs)} samples and {parts.mean().item():g} on average for "
            "equal parts of them; expected the mean of the samples' own losses, so that devices and micro-batches can "
            "take parts of a batch. With class weights: multiply each sample's loss by its weight, and take the "
            "plain mean of the products."
        )


def _check_scores(where: str, objective: Objective, outputs: Tensor, targets: Tensor) -> None:
    before = outputs.clone()
    scores = objective.scores(outputs, targets).double()
    if not bool(((scores >= 0) & (scores <= 1)).all()):
        raise ObjectiveError(
            f"{where} returned scores from {scores.min():g} to {scores.max():g}; expected true or false, or a "
            "number from 0 to 1 for every sample."
        )
    if not torch.equal(outputs, before):
        raise ObjectiveError(f"{where} changes the outputs, which are used again; work on a copy.")
    parts = [objective.scores(outputs[rows], targets[rows]).double() for rows in torch.arange(len(outputs)).split(2)]
    if not torch.allclose(torch.cat(parts), scores, rtol=1e-4, atol=1e-6):
        raise ObjectiveError(
            f"{where} gives a sample different scores in different batches; expected a score that depends only on "
            "the sample's own output and target, because variants are evaluated in batches of different sizes."
        )


def _own_loss(train: Train, device: torch.device, arguments: Mapping[str, int]) -> OfBatch:
    factory = _loss_factory(train.loss)
    loss: OfBatch = factories.call(
        factory, train.loss, "train.loss", train.loss_options, error=ObjectiveError, **arguments
    )
    if not callable(loss):
        raise ObjectiveError(f"train.loss: {train.loss} returned {loss!r}; expected a function of outputs and targets.")
    if isinstance(loss, nn.Module):
        if trained := [name for name, _ in loss.named_parameters()]:
            raise ObjectiveError(
                f"train.loss: {train.loss} has parameters of its own ({', '.join(trained)}), which nothing would "
                "train; make them a part of the model, or buffers."
            )
        loss = loss.to(device)
    return loss


def _loss_factory(name: str) -> Callable[..., Any]:
    return factories.find(name, "train.loss", "a loss", example="my_losses:focal", error=ObjectiveError)


def _metric(name: str) -> Callable[..., Any]:
    return factories.find(name, "train.metric", "scores", example="my_metrics:top_two", error=ObjectiveError)


def _over_set(name: str, metric: Any, outputs: Tensor, targets: Tensor) -> float:
    """Return the metric's value. A copy of an object is used, so its earlier values do not count."""
    with factories.naming(name, "train.metric", ObjectiveError):
        if hasattr(metric, "update") and hasattr(metric, "compute"):
            metric = metric() if isinstance(metric, type) else copy.deepcopy(metric)
            if hasattr(metric, "distributed_available_fn"):  # torchmetrics would gather once more, and wait forever
                metric.distributed_available_fn = lambda: False
            metric.update(outputs, targets)
            value = metric.compute()
        else:
            value = metric(outputs, targets)
        score = float(value)
    if not 0 <= score <= 1:
        raise ObjectiveError(f"train.metric: {name} returned {score:g}; expected a number from 0 to 1.")
    return score


def _summed(loss: OfBatch, counted: Callable[[Tensor], Tensor | int], outputs: Tensor, targets: Tensor) -> Tensor:
    return loss(outputs, targets).double() * counted(torch.zeros_like(targets))  # as if no label were left out


def _own_scores(name: str, metric: Callable[..., object], outputs: Tensor, targets: Tensor) -> Tensor:
    scores = metric(outputs, targets)
    if not isinstance(scores, Tensor) or scores.shape != (len(targets),):
        shown = f"a tensor of shape {list(scores.shape)}" if isinstance(scores, Tensor) else repr(scores)
        raise ObjectiveError(
            f"train.metric: {name} returned {shown} for {count(len(targets), 'sample')}; expected a tensor with one "
            f"score per sample, of shape [{len(targets)}]. If it is a metric of all outputs and targets, such as "
            "macro-F1, set train.metric_over: test_set."
        )
    return scores
