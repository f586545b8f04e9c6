from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import convnext_tiny, resnet18, vgg11, vit_b_16

from pipeline import models
from pipeline.data.prepared import Dataset
from pipeline.distributed import ALONE, World
from pipeline.models.gpt import GPT
from pipeline.techniques.tensor import pairs
from tests.nets import conv_net
from tests.parallel import make_training
from tests.ranks import run_ranks
from tests.techniques.test_parallelisms import headed_net
from tests.test_tasks import training_on as language_training


def test_pairs_are_found_where_only_elementwise_modules_are_between_the_layers() -> None:
    with torch.device("meta"):
        transformer, convolutional, classifier = vit_b_16(), convnext_tiny(), vgg11()
        encoder = nn.TransformerEncoderLayer(8, 2, 32)
        small = models.small_cnn(channels=1, height=28, width=28, classes=10)
        others = [resnet18(), conv_net()]
    assert [pair.first.out_features for pair in pairs(transformer)] == [3072] * 12
    assert [list(map(type, pair.between)) for pair in pairs(transformer)] == [[nn.GELU, nn.Dropout]] * 12
    assert len(list(pairs(convolutional))) == 18
    assert [(pair.first.in_features, pair.second.out_features) for pair in pairs(classifier)] == [(25088, 4096)]
    assert [pair.first.out_features for pair in pairs(encoder)] == [32]
    assert [(pair.first.out_features, pair.second.out_features) for pair in pairs(small)] == [(50, 10)]
    assert [list(pairs(other)) for other in others] == [[], []]


def test_layers_used_twice_or_with_a_normalisation_between_them_are_not_cut() -> None:
    shared, dropout = nn.Linear(8, 8), nn.Dropout()
    assert not list(pairs(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))))
    assert not list(pairs(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8))))
    assert not list(pairs(nn.Sequential(shared, nn.ReLU(), shared)))
    assert not list(pairs(nn.Sequential(nn.Linear(8, 8), dropout, nn.Linear(8, 8), dropout)))
    tied = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    tied[2].weight = tied[0].weight
    assert not list(pairs(tied))


def _random(joined: World, dataset: Dataset) -> tuple[list[float], torch.Tensor]:
    """Return a rank's next random numbers, and what its dropout layer makes of hidden values that are all ones."""
    training = make_training(dataset, joined, headed_net, parallelism="tensor", replicas=joined.size // 2)
    head: Any = training.model.get_submodule("2")
    return torch.rand(2).tolist(), head[3](torch.ones(1, 24))


def test_ranks_of_one_model_draw_alike_and_their_parts_of_a_mask_differ(digits: Dataset) -> None:
    (first, one), (second, other), (third, _), (fourth, _) = run_ranks(_random, digits, size=4)
    assert first == second != third == fourth
    assert not torch.equal(one, other)
    assert {round(value, 4) for mask in (one, other) for value in mask.flatten().tolist()} == {0.0, round(1 / 0.7, 4)}


def _of_language(joined: World, parallelism: str) -> tuple[list[float], float, int]:
    training = language_training("language_model", joined, parallelism=parallelism)
    losses = [row.train_loss for row in training.run() if row]
    assert training.score is not None
    return losses, training.score.loss, sum(each.numel() for each in training.model.parameters())


def test_a_language_model_s_attention_is_cut_by_heads() -> None:
    losses, test_loss, size = _of_language(ALONE, "none")
    width, depth = 16, 2
    shared_out = depth * (3 * width * width + 3 * width + width * width)  # the query, key and value of a head; out
    shared_out += depth * (4 * width * width + 4 * width + 4 * width * width)
    for rank in run_ranks(_of_language, "tensor"):
        assert rank[0] == pytest.approx(losses, rel=1e-3)
        assert rank[1] == pytest.approx(test_loss, rel=1e-3)
        assert rank[2] == size - shared_out // 2
    model = GPT(vocabulary=8, length=4, width=24, depth=1, heads=3)
    assert [pair.parts for pair in pairs(model)] == [3, 96]
