from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.models import optimizers
from pipeline.params import Train
from tests.nets import batch, conv_net


def test_an_optimizer_has_the_options_in_params() -> None:
    sgd = optimizers.of_job(Train(optimizer="sgd", momentum=0.8, weight_decay=0.01)).make(conv_net().parameters())
    adamw = optimizers.of_job(Train(optimizer="adamw", momentum=0.8, weight_decay=0.01)).make(conv_net().parameters())
    assert isinstance(sgd, torch.optim.SGD)
    assert isinstance(adamw, torch.optim.AdamW)
    expected: dict[str, Any] = {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01, "fused": True}
    assert {key: sgd.defaults[key] for key in expected} == expected
    expected = {"betas": (0.8, 0.999), "weight_decay": 0.01, "fused": True}
    assert {key: adamw.defaults[key] for key in expected} == expected


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


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_complex_parameters_are_trained_and_frozen_ones_get_no_state(name: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64), nn.Linear(2, 2, dtype=torch.complex64))
    net[0].requires_grad_(False)
    frozen, trained = ([each.clone() for each in part.parameters()] for part in net)
    optimizer = optimizers.of_job(Train(optimizer=name)).make(net.parameters())
    net(torch.ones(1, 2, dtype=torch.complex64)).abs().sum().backward()
    optimizer.step()
    assert all(map(torch.equal, frozen, net[0].parameters()))
    assert not any(map(torch.equal, trained, net[1].parameters()))
    assert optimizer.state.keys() == set(net[1].parameters())
