from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.errors import ConfigError
from pipeline.models.loss_and_metric import ObjectiveError
from pipeline.params import Train, parse
from pipeline.training.evaluation import Score, evaluate
from tests.nets import ALONE, batch, conv_net, task_of
from tests.ranks import run_ranks
from tests.test_training import make_training, rows_of

CODE = """
import torch
import torch.nn.functional as F
from torch import nn

def smoothed(*, classes, amount=0.1):
    return lambda logits, labels: F.cross_entropy(logits, labels, label_smoothing=amount)

def summed(*, classes):
    return lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum")

def weighted_by_the_batch(*, classes):
    weights = torch.arange(1.0, classes + 1)
    return lambda logits, labels: F.cross_entropy(logits, labels, weights)

def ignoring_the_last(*, classes):
    return lambda logits, labels: F.cross_entropy(logits, labels, ignore_index=classes - 1)

class Weighted(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.register_buffer("weights", torch.ones(classes))

    def forward(self, logits, labels):
        return (F.cross_entropy(logits, labels, reduction="none") * self.weights[labels]).mean()

class Learned(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

def number(*, classes):
    return 3

def not_reduced(*, classes):
    return lambda logits, labels: F.cross_entropy(logits, labels, reduction="none")

def without_gradient(*, classes):
    return lambda logits, labels: F.cross_entropy(logits, labels).detach()

def top_two(logits, labels):
    return (logits.topk(2).indices == labels.unsqueeze(1)).any(1)

def probability(logits, labels):
    return logits.softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1)

def percentage(logits, labels):
    return 100 * probability(logits, labels)

def in_place(logits, labels):
    return logits.copy_(logits.softmax(1)).gather(1, labels.unsqueeze(1)).squeeze(1)

def relative(logits, labels):
    return probability(logits, labels) / probability(logits, labels).max()

def mean(logits, labels):
    return probability(logits, labels).mean()

def with_text(logits, labels):
    return logits + "x"

def of_text(*, classes):
    return with_text
"""


@pytest.fixture(autouse=True)
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "own_code", raising=False)


def test_the_job_s_own_is_cross_entropy_and_accuracy(digits: Dataset) -> None:
    objective = task_of(digits, Train(label_smoothing=0.1)).objective
    images, labels = batch()
    logits = conv_net()(images)
    assert torch.equal(objective.loss(logits, labels), F.cross_entropy(logits, labels, label_smoothing=0.1))
    assert objective.test_losses(logits, labels).item() == pytest.approx(32 * F.cross_entropy(logits, labels).item())
    assert torch.equal(objective.scores(logits, labels), logits.argmax(1) == labels)


def test_a_loss_of_one_s_own_trains_and_is_the_test_loss_too(digits: Dataset) -> None:
    own = Train(epochs=1, batch_size=32, loss="own_code:smoothed", loss_options={"amount": 0.2})
    built_in = Train(epochs=1, batch_size=32, label_smoothing=0.2)
    ours, theirs = make_training(digits, train=own), make_training(digits, train=built_in)
    assert [row.train_loss for row in rows_of(ours.run())] == [row.train_loss for row in rows_of(theirs.run())]
    assert ours.score is not None
    assert theirs.score is not None
    assert ours.score.correct == theirs.score.correct
    assert ours.score.loss > theirs.score.loss, "ours is smoothed in the evaluation, too"


def test_options_reach_the_loss_and_buffers_its_device(digits: Dataset) -> None:
    train = Train(loss="own_code:Weighted")
    task_of(digits, train).check()
    loss = task_of(digits, train, torch.device("meta")).objective.loss
    assert loss.weights.device.type == "meta"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_code:top_two", r"train\.loss: own_code:top_two is called with classes and train\.loss_options \(none\)"),
        ("own_code:number", r"own_code:number returned 3; expected a function of outputs and targets"),
        ("own_code:Learned", r"own_code:Learned has parameters of its own \(temperature\), which nothing would train"),
        ("own_code:not_reduced", r"returned a tensor of shape \[6\]; expected a scalar tensor with a gradient"),
        ("own_code:without_gradient", r"expected a scalar tensor with a gradient"),
        ("own_code:summed", r"expected the mean of the samples' own losses"),
        (
            "own_code:of_text",
            r"own_code:of_text raised TypeError: .*\(own_code\.py, line \d+, in with_text\)",
        ),
        ("own_code:weighted_by_the_batch", r"With class weights: multiply each sample's loss by its weight"),
    ],
)
def test_what_is_wrong_with_a_loss_is_said(name: str, message: str, digits: Dataset) -> None:
    with pytest.raises(ObjectiveError, match=message):
        task_of(digits, Train(loss=name)).check()


@pytest.mark.parametrize("name", ["own_code:weighted_by_the_batch", "own_code:ignoring_the_last"])
@pytest.mark.parametrize("last", [1, 100])
def test_a_mean_that_depends_on_the_batch_is_found_in_a_sorted_data_set(name: str, last: int, digits: Dataset) -> None:
    """``last``: the number of samples of the last class."""
    order = digits.train.targets.argsort(stable=True)
    rows = torch.cat((order[digits.train.targets[order] < 9], order[-last:]))
    ordered = replace(digits, train=digits.train[rows])
    with pytest.raises(ObjectiveError, match="expected the mean of the samples' own losses"):
        task_of(ordered, Train(loss=name)).check()
    task_of(ordered, Train(loss="own_code:smoothed")).check()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_code:percentage", r"train\.metric: own_code:percentage returned scores from .*; expected true or false"),
        ("own_code:in_place", r"train\.metric: own_code:in_place changes the outputs, which are used again"),
        ("own_code:relative", r"own_code:relative gives a sample different scores in different batches"),
        (
            "own_code:with_text",
            r"own_code:with_text raised TypeError: .*\(own_code\.py, line \d+, in with_text\)",
        ),
        ("own_code:mean", r"returned a tensor of shape \[\] for 6 samples; expected .*\[6\]"),
    ],
)
def test_what_is_wrong_with_a_metric_is_said(name: str, message: str, digits: Dataset) -> None:
    with pytest.raises(ObjectiveError, match=message):
        task_of(digits, Train(metric=name)).check()


def _evaluate(joined: World, dataset: Dataset, metric: str, batch_size: int) -> Score:
    return evaluate(conv_net(), task_of(dataset, Train(metric=metric)), joined, batch_size)


def test_a_metric_of_one_s_own_counts_every_sample_exactly_on_any_number_of_ranks(digits: Dataset) -> None:
    alone = _evaluate(ALONE, digits, "own_code:probability", 16)
    assert isinstance(alone.correct, float)
    assert not alone.correct.is_integer()
    assert set(run_ranks(_evaluate, digits, "own_code:probability", 16, size=3)) == {alone}, "to the last bit"
    top_two = _evaluate(ALONE, digits, "own_code:top_two", 64)
    assert isinstance(top_two.correct, int)
    assert _evaluate(ALONE, digits, "accuracy", 64).accuracy < top_two.accuracy < 1


def test_a_score_that_is_out_of_bounds_on_a_real_sample_alone_is_refused(digits: Dataset) -> None:
    with pytest.raises(ObjectiveError, match=r"359 of 359 test samples have a score that is not from 0 to 1"):
        _evaluate(ALONE, digits, "own_code:percentage", 64)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"loss": "focal"}, "train.loss: found 'focal'; expected cross_entropy, or module:name of your own."),
        ({"metric": "top2"}, "train.metric: found 'top2'; expected accuracy, or module:name of your own."),
        ({"loss_options": {"gamma": 2}}, "train.loss_options: found {'gamma': 2}, but cross_entropy takes no options"),
        ({"loss": "a:b", "label_smoothing": 0.1}, "train.label_smoothing: found 0.1, which 'a:b' ignores"),
        (
            {"task": "translation"},
            "train.task: found 'translation'; expected classification, language_model, regression",
        ),
        ({"task": "regression", "loss": "cross_entropy"}, "expected mean_squared_error, or module:name"),
        ({"task": "regression", "label_smoothing": 0.1}, "train.label_smoothing: found 0.1, which 'mean_sq"),
    ],
)
def test_what_params_yaml_cannot_mean_is_said_before_any_work(train: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"train": train, "variants": {"baseline": {}}})
    assert message in str(caught.value)
