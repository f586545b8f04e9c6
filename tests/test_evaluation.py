from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from pipeline.data.prepared import Dataset, Split
from pipeline.distributed import World
from pipeline.models.loss_and_metric import ObjectiveError
from pipeline.training.evaluation import Score, UnshardedModel, evaluate
from tests.nets import ALONE, batch, conv_net
from tests.ranks import run_ranks


def _with_test_samples(dataset: Dataset, count: int) -> Dataset:
    return dataclasses.replace(dataset, test=Split(dataset.test.images[:count], dataset.test.labels[:count]))


def _expected(dataset: Dataset) -> Score:
    """By hand: all samples at once, in float64."""
    model = conv_net(norm=True).eval()
    images = dataset.test.images.float() / 255
    mean, std = torch.tensor(dataset.mean).view(-1, 1, 1), torch.tensor(dataset.std).view(-1, 1, 1)
    with torch.no_grad():
        logits = model((images - mean) / std).double()
    labels = dataset.test.labels
    return Score(int((logits.argmax(1) == labels).sum()), len(labels), F.cross_entropy(logits, labels).item())


def _check(score: Score, dataset: Dataset) -> None:
    expected = _expected(dataset)
    assert (score.correct, score.count) == (expected.correct, expected.count)
    assert score.accuracy == expected.correct / expected.count
    assert score.loss == pytest.approx(expected.loss, rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 7, 64, 1000])
def test_every_sample_counts_once_whatever_the_batch(digits: Dataset, batch_size: int) -> None:
    dataset = _with_test_samples(digits, 50)
    _check(evaluate(conv_net(norm=True), dataset, ALONE, batch_size), dataset)


def _evaluate(joined: World, dataset: Dataset, count: int) -> Score:
    model = conv_net(norm=True)
    if joined.rank:
        torch.nn.init.constant_(model[0][1].running_mean, 3.0)  # type: ignore[index]
    return evaluate(model, _with_test_samples(dataset, count), joined, 8)


@pytest.mark.parametrize(("count", "ranks"), [(51, 2), (50, 3), (2, 3)])
def test_ranks_together_are_exact_for_sizes_that_do_not_divide_and_use_the_main_ranks_statistics(
    digits: Dataset, count: int, ranks: int
) -> None:
    scores = run_ranks(_evaluate, digits, count, size=ranks)
    assert len(set(scores)) == 1
    _check(scores[0], _with_test_samples(digits, count))


def test_the_model_is_left_as_it_was(digits: Dataset) -> None:
    model = conv_net(norm=True, dropout=True)
    before = [value.clone() for value in model.state_dict().values()]
    first = evaluate(model, _with_test_samples(digits, 64), ALONE, 16)
    assert model.training
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert evaluate(model, _with_test_samples(digits, 64), ALONE, 16) == first  # dropout was off


def test_a_mould_casts_the_same_model_from_its_state() -> None:
    model = conv_net(norm=True)
    model.register_buffer("scale", torch.tensor(3.0), persistent=False)  # in no state dict
    images, _ = batch()
    model(images)  # BatchNorm's statistics move
    unsharded, state = UnshardedModel(model), {name: value.clone() for name, value in model.state_dict().items()}
    expected = model.eval()(images)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    cast = unsharded.cast(state, torch.device("cpu")).eval()
    assert torch.equal(cast(images), expected)
    assert cast.get_buffer("scale").item() == 3.0


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_loss_that_is_not_finite_is_no_result(digits: Dataset, value: float) -> None:
    model = conv_net()
    torch.nn.init.constant_(model[2][1].bias, value)  # type: ignore[index]
    with pytest.raises(ObjectiveError, match=r"its mean over the 64 test samples is nan\. Either the training has"):
        evaluate(model, _with_test_samples(digits, 64), ALONE, 16)


def test_a_mould_copies_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = conv_net(norm=True)
    for kind in (torch.nn.Parameter, torch.Tensor):
        monkeypatch.setattr(kind, "__deepcopy__", None)
    form = UnshardedModel(model)._form
    assert {tensor.device.type for tensor in (*form.parameters(), *form.buffers())} == {"meta"}
