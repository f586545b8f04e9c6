from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.models import optimizers
from pipeline.params import Train
from tests.nets import batch, conv_net


@pytest.mark.parametrize(
    ("name", "made_by", "expected"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.999)}),
    ],
)
def test_an_optimizer_has_the_options_in_params(name: Any, made_by: type, expected: dict[str, Any]) -> None:
    train = Train(optimizer=name, momentum=0.8, weight_decay=0.01)
    made = optimizers.of_job(train).make(conv_net().parameters())
    assert isinstance(made, made_by)
    expected |= {"weight_decay": 0.01, "fused": True}
    assert {key: made.defaults[key] for key in expected} == expected


def test_a_first_step_that_is_left_out_leaves_no_garbage_in_the_momentum() -> None:
    net = nn.Linear(200, 200, bias=False)
    nn.init.ones_(net.weight)
    optimizer = optimizers.of_job(Train(momentum=0.9, weight_decay=0.0, learning_rate=0.5)).make(net.parameters())
    net.weight.grad = torch.ones_like(net.weight)
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert torch.equal(net.weight, torch.ones(200, 200))
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    optimizer.step()
    torch.testing.assert_close(net.weight, torch.full((200, 200), 1 - 0.5 * 1.9))  # Nesterov's first step


def test_sgd_whose_momentum_starts_at_zero_trains_as_torch_s_own() -> None:
    ours, plain = conv_net(), conv_net()
    pair = [
        optimizers.of_job(Train(momentum=0.9, weight_decay=0.01, learning_rate=0.1)).make(ours.parameters()),
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
