from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score
from torch import nn

from pipeline.data.prepared import Dataset
from pipeline.distributed import WorkerError, World
from pipeline.errors import ConfigError
from pipeline.models import optimizers
from pipeline.models.loss_and_metric import ObjectiveError
from pipeline.params import Train, parse
from pipeline.training.outcomes import Score, evaluate, without_weights
from tests.nets import ALONE, batch, conv_net, task_of
from tests.ranks import run_ranks
from tests.trainings import make_training, rows_of

CODE = """
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score
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

def macro_f1(logits, labels):
    return f1_score(labels, logits.argmax(1), average="macro")

class MacroF1:  # like a metric of torchmetrics, which would gather among the ranks of a process group by itself
    distributed_available_fn = staticmethod(torch.distributed.is_initialized)

    def __init__(self):
        self.labels, self.predicted = [], []

    def update(self, logits, labels):
        self.labels += labels.tolist()
        self.predicted += logits.argmax(1).tolist()

    def compute(self):
        assert not self.distributed_available_fn()
        return torch.tensor(f1_score(self.labels, self.predicted, average="macro"))

    def __call__(self, logits, labels):
        raise AssertionError("called in place of update and compute")

made = MacroF1()

def matthews(logits, labels):
    return -0.5

def with_text(logits, labels):
    return logits + "x"

def of_text(*, classes):
    return with_text
"""


@pytest.fixture(autouse=True)
def own_code(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "own_code.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    monkeypatch.delitem(sys.modules, "own_code", raising=False)


def test_the_job_s_own_is_cross_entropy_and_accuracy(digits: Dataset) -> None:
    objective = task_of(digits, Train(label_smoothing=0.1)).objective
    images, labels = batch()
    logits = conv_net()(images)
    assert torch.equal(objective.loss(logits, labels), F.cross_entropy(logits, labels, label_smoothing=0.1))
    assert objective.test_losses(logits, labels).item() == pytest.approx(32 * F.cross_entropy(logits, labels).item())
    assert torch.equal(objective.scores(logits, labels), logits.argmax(1) == labels)


def test_an_own_loss_is_the_test_loss_too(digits: Dataset) -> None:
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
        ("own_code:of_text", r"own_code:of_text raised TypeError: .*, line \d+, in with_text\)"),
        ("own_code:weighted_by_the_batch", r"With class weights: multiply each sample's loss by its weight"),
    ],
)
def test_what_is_wrong_with_a_loss_is_said(name: str, message: str, digits: Dataset) -> None:
    with pytest.raises(ObjectiveError, match=message):
        task_of(digits, Train(loss=name)).check()


@pytest.mark.parametrize("name", ["own_code:weighted_by_the_batch", "own_code:ignoring_the_last"])
@pytest.mark.parametrize("last", [1, 100])
def test_a_mean_over_the_batch_is_found(name: str, last: int, digits: Dataset) -> None:
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
        ("own_code:with_text", r"own_code:with_text raised TypeError: .*, line \d+, in with_text\)"),
        ("own_code:mean", r"returned a tensor of shape \[\] for 6 samples; .*set train\.metric_over: test_set"),
    ],
)
def test_what_is_wrong_with_a_metric_is_said(name: str, message: str, digits: Dataset) -> None:
    with pytest.raises(ObjectiveError, match=message):
        task_of(digits, Train(metric=name)).check()


def _evaluate(joined: World, dataset: Dataset, metric: str, batch_size: int) -> Score:
    return evaluate(conv_net(), task_of(dataset, Train(metric=metric)), joined, batch_size)


def test_an_own_metric_counts_every_sample_exactly(digits: Dataset) -> None:
    alone = _evaluate(ALONE, digits, "own_code:probability", 16)
    assert isinstance(alone.correct, float)
    assert not alone.correct.is_integer()
    assert set(run_ranks(_evaluate, digits, "own_code:probability", 16, size=3)) == {alone}, "to the last bit"
    top_two = _evaluate(ALONE, digits, "own_code:top_two", 64)
    assert isinstance(top_two.correct, int)
    assert _evaluate(ALONE, digits, "accuracy", 64).accuracy < top_two.accuracy < 1


def _over_set(joined: World, dataset: Dataset, names: Sequence[str]) -> list[Score]:
    return [
        evaluate(conv_net(), task_of(dataset, Train(metric=name, metric_over="test_set")), joined, batch_size)
        for name, batch_size in itertools.product(names, (7, 64))
    ]


def test_a_metric_of_the_test_set_is_scikit_learn_s(digits: Dataset) -> None:
    names = ["own_code:macro_f1", "own_code:MacroF1", "own_code:made"]
    task = task_of(digits)
    images, labels = task.batch([digits.test.inputs, digits.test.targets])
    with torch.no_grad():
        expected = f1_score(labels, conv_net()(images).argmax(1), average="macro")
    task_of(digits, Train(metric="own_code:made", metric_over="test_set")).check()
    for scores in (_over_set(ALONE, digits, names), *run_ranks(_over_set, digits, names, size=3)):
        assert [score.accuracy for score in scores] == pytest.approx([expected] * 6, rel=1e-6)
        assert {score.count for score in scores} == {len(labels)}
    with pytest.raises(WorkerError, match=r"own_code:matthews returned -0\.5; expected a number from 0 to 1"):
        run_ranks(_over_set, digits, ["own_code:matthews"])


def test_a_score_out_of_bounds_is_refused(digits: Dataset) -> None:
    with pytest.raises(ObjectiveError, match=r"359 of 359 test samples have a score that is not from 0 to 1"):
        _evaluate(ALONE, digits, "own_code:percentage", 64)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"loss": "focal"}, "train.loss: found 'focal'; expected cross_entropy, or module:name of your own."),
        ({"metric_over": "test_set"}, "train.metric_over: found 'test_set', but 'accuracy' is a score per sample"),
        ({"metric": "top2"}, "train.metric: found 'top2'; expected accuracy, or module:name of your own."),
        ({"loss_options": {"gamma": 2}}, "train.loss_options: found {'gamma': 2}, but cross_entropy takes no options"),
        ({"loss": "a:b", "label_smoothing": 0.1}, "train.label_smoothing: found 0.1, which 'a:b' ignores"),
        ({"task": "translation"}, "train.task: found 'translation'; expected classification, language"),
        ({"task": "regression", "loss": "cross_entropy"}, "expected mean_squared_error, or module:name"),
        ({"task": "regression", "label_smoothing": 0.1}, "train.label_smoothing: found 0.1, which 'mean_sq"),
    ],
)
def test_impossible_params_are_refused_before_any_work(train: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"train": train, "variants": {"baseline": {}}})
    assert message in str(caught.value)


def _with_test_samples(dataset: Dataset, count: int) -> Dataset:
    return dataclasses.replace(dataset, test=dataset.test[:count])


def _expected(dataset: Dataset) -> Score:
    """Return the score, computed from all samples at once, with the loss in float64."""
    model = conv_net(norm=True).eval()
    images = dataset.test.inputs.float() / 255
    known = dataset.statistics["inputs"]
    mean, std = torch.tensor(known.mean).view(-1, 1, 1), torch.tensor(known.std).view(-1, 1, 1)
    with torch.no_grad():
        logits = model((images - mean) / std).double()
    labels = dataset.test.targets
    return Score(int((logits.argmax(1) == labels).sum()), len(labels), F.cross_entropy(logits, labels).item())


def _check(score: Score, dataset: Dataset) -> None:
    expected = _expected(dataset)
    assert (score.correct, score.count) == (expected.correct, expected.count)
    assert score.accuracy == expected.correct / expected.count
    assert score.loss == pytest.approx(expected.loss, rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 7, 64, 1000])
def test_every_sample_counts_once_whatever_the_batch(digits: Dataset, batch_size: int) -> None:
    dataset = _with_test_samples(digits, 50)
    _check(evaluate(conv_net(norm=True), task_of(dataset), ALONE, batch_size), dataset)


def _evaluate_of_evaluation(joined: World, dataset: Dataset, count: int) -> Score:
    model = conv_net(norm=True)
    if joined.rank:
        torch.nn.init.constant_(model[0][1].running_mean, 3.0)  # type: ignore[index]
    return evaluate(model, task_of(_with_test_samples(dataset, count)), joined, 8)


@pytest.mark.parametrize(("count", "ranks"), [(51, 2), (50, 3), (2, 3)])
def test_ranks_evaluate_exactly_for_any_size(digits: Dataset, count: int, ranks: int) -> None:
    scores = run_ranks(_evaluate_of_evaluation, digits, count, size=ranks)
    assert len(set(scores)) == 1
    _check(scores[0], _with_test_samples(digits, count))


def test_evaluation_leaves_the_model_unchanged(digits: Dataset) -> None:
    model = conv_net(norm=True, dropout=True)
    before = [value.clone() for value in model.state_dict().values()]
    first = evaluate(model, task_of(_with_test_samples(digits, 64)), ALONE, 16)
    assert model.training
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert evaluate(model, task_of(_with_test_samples(digits, 64)), ALONE, 16) == first  # dropout was off


def test_evaluation_leaves_each_part_in_its_own_mode(digits: Dataset) -> None:
    model = conv_net(norm=True)
    model[0].eval()
    modes = [part.training for part in model.modules()]
    with pytest.raises(RuntimeError, match="forward"):
        evaluate(nn.Sequential(model, Failing()), task_of(digits), ALONE, 64)
    evaluate(model, task_of(_with_test_samples(digits, 64)), ALONE, 16)
    assert [part.training for part in model.modules()] == modes
    assert set(modes) == {True, False}


class Failing(nn.Module):
    def forward(self, _: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("forward")


def test_a_model_takes_weights_from_a_state() -> None:
    model = conv_net(norm=True)
    model.register_buffer("scale", torch.tensor(3.0), persistent=False)  # in no state dict
    images, _ = batch()
    model(images)  # BatchNorm's statistics move
    form = without_weights(model)
    form.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(form.eval()(images), model.eval()(images))
    assert form.get_buffer("scale").item() == 3.0
    assert form.get_buffer("scale").data_ptr() != model.get_buffer("scale").data_ptr()
    assert form.get_parameter("0.0.weight").data_ptr() == model.get_parameter("0.0.weight").data_ptr()


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_loss_that_is_not_finite_is_an_error(digits: Dataset, value: float) -> None:
    model = conv_net()
    torch.nn.init.constant_(model[2][1].bias, value)  # type: ignore[index]
    with pytest.raises(ObjectiveError, match=r"its mean over the 64 test samples is nan\. If the training has"):
        evaluate(model, task_of(_with_test_samples(digits, 64)), ALONE, 16)


def test_a_model_is_made_without_copied_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = conv_net(norm=True)
    for kind in (torch.nn.Parameter, torch.Tensor):
        monkeypatch.setattr(kind, "__deepcopy__", None)
    form = without_weights(model)
    assert {tensor.device.type for tensor in (*form.parameters(), *form.buffers())} == {"meta"}


def test_an_optimizer_has_the_options_in_params() -> None:
    sgd = optimizers.optimizer_of(Train(optimizer="sgd", momentum=0.8, weight_decay=0.01), conv_net())
    adamw = optimizers.optimizer_of(Train(optimizer="adamw", momentum=0.8, weight_decay=0.01), conv_net())
    assert isinstance(sgd, torch.optim.SGD)
    assert isinstance(adamw, torch.optim.AdamW)
    expected: dict[str, Any] = {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01, "fused": True}
    assert {key: sgd.defaults[key] for key in expected} == expected
    expected = {"betas": (0.8, 0.999), "weight_decay": 0.01, "fused": True}
    assert {key: adamw.defaults[key] for key in expected} == expected


def test_a_skipped_first_step_leaves_momentum_clean() -> None:
    net = nn.Linear(200, 200, bias=False)
    nn.init.ones_(net.weight)
    optimizer = optimizers.optimizer_of(Train(momentum=0.9, weight_decay=0.0, learning_rate=0.5), net)
    net.weight.grad = torch.ones_like(net.weight)
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert torch.equal(net.weight, torch.ones(200, 200))
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    optimizer.step()
    torch.testing.assert_close(net.weight, torch.full((200, 200), 1 - 0.5 * 1.9))  # Nesterov's first step


def test_sgd_trains_as_torch_s_own() -> None:
    ours, plain = conv_net(), conv_net()
    pair = [
        optimizers.optimizer_of(Train(momentum=0.9, weight_decay=0.01, learning_rate=0.1), ours),
        torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ]
    for step in range(4):
        for net, optimizer in zip((ours, plain), pair, strict=True):
            images, labels = batch(32, seed=step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()
    torch.testing.assert_close(list(ours.parameters()), list(plain.parameters()))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("one_cycle", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_the_rate_warms_up_and_follows_the_schedule(schedule: Any, expected: list[float]) -> None:
    train = Train(learning_rate=1.0, warmup_fraction=1 / 3, schedule=schedule)
    assert [optimizers.learning_rate(train, step, 6) for step in range(6)] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_complex_parameters_train_and_frozen_ones_lack_state(name: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64), nn.Linear(2, 2, dtype=torch.complex64))
    net[0].requires_grad_(False)
    frozen, trained = ([parameter.clone() for parameter in part.parameters()] for part in net)
    optimizer = optimizers.optimizer_of(Train(optimizer=name), net)
    net(torch.ones(1, 2, dtype=torch.complex64)).abs().sum().backward()
    optimizer.step()
    assert all(map(torch.equal, frozen, net[0].parameters()))
    assert not any(map(torch.equal, trained, net[1].parameters()))
    assert optimizer.state.keys() == set(net[1].parameters())
