from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.models.loss_and_metric import ObjectiveError
from pipeline.training.evaluation import Score, evaluate, without_weights
from tests.nets import ALONE, batch, conv_net, task_of
from tests.ranks import run_ranks


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


def _evaluate(joined: World, dataset: Dataset, count: int) -> Score:
    model = conv_net(norm=True)
    if joined.rank:
        torch.nn.init.constant_(model[0][1].running_mean, 3.0)  # type: ignore[index]
    return evaluate(model, task_of(_with_test_samples(dataset, count)), joined, 8)


@pytest.mark.parametrize(("count", "ranks"), [(51, 2), (50, 3), (2, 3)])
def test_ranks_together_are_exact_for_sizes_that_do_not_divide_and_use_the_main_ranks_statistics(
    digits: Dataset, count: int, ranks: int
) -> None:
    scores = run_ranks(_evaluate, digits, count, size=ranks)
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


def test_a_model_without_weights_takes_them_from_a_state() -> None:
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


def test_a_model_without_weights_is_made_without_a_copy_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = conv_net(norm=True)
    for kind in (torch.nn.Parameter, torch.Tensor):
        monkeypatch.setattr(kind, "__deepcopy__", None)
    form = without_weights(model)
    assert {tensor.device.type for tensor in (*form.parameters(), *form.buffers())} == {"meta"}
