from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.models import optimizers
from pipeline.models.optimizers import OptimizerChoice
from pipeline.techniques import Technique
from tests.nets import chosen, make_plan, setup_of
from tests.ranks import run_ranks
from tests.techniques.test_promises import ADAMW, LOW_BIT, large_net, needs_library
from tests.test_training import TRAIN, make_training, resumes_exactly


def _made(technique: Technique, net: nn.Module, choice: OptimizerChoice) -> Any:
    setup = setup_of(net)
    setup.optimizer_choice = choice
    technique.change_model(setup)
    technique.change_optimizer(setup)
    return setup.optimizer_choice.make(setup.model.parameters())


def _left_out(joined: World) -> tuple[bool, bool, bool]:
    """Return whether a step with ``found_inf`` is skipped, whether the next step changes weights, and whether its loss
    scale divides its update."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    (technique,) = chosen(make_plan(parallelism="zero1", processes=joined.size), joined)
    optimizer = _made(technique, net, optimizers.of_job(TRAIN.model_copy(update={"weight_decay": 0.0})))

    def step() -> float:
        before = [parameter.detach().clone() for parameter in net.parameters()]
        for parameter in net.parameters():  # new ones, because a kernel with a loss scale divides gradients in place
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return max((a - b).abs().max().item() for a, b in zip(before, net.parameters(), strict=True))

    assert optimizer._step_supports_amp_scaling
    optimizer.found_inf = torch.ones(())
    left_out = step() == 0
    optimizer.found_inf = torch.zeros(())
    optimizer.grad_scale = torch.full((), 2.0)
    halved = step()
    del optimizer.grad_scale, optimizer.found_inf
    for values in optimizer.state.values():
        values["momentum_buffer"].zero_()
    return left_out, halved > 0, step() == pytest.approx(2 * halved)


def _left_out_unfused(joined: World) -> tuple[bool, bool]:
    """Return whether each of two steps changes the weights; the first step's gradient is infinite."""
    net = nn.Linear(8, 8)
    (technique,) = chosen(make_plan(parallelism="zero1", processes=joined.size), joined)
    optimizer = _made(technique, net, OptimizerChoice(torch.optim.SGD, {"lr": 0.1, "foreach": True}))
    scaler, changes = torch.amp.GradScaler("cpu"), []
    scaler.scale(torch.ones(()))
    for gradient in (torch.inf, 1.0):
        before = net.weight.detach().clone()
        net.weight.grad = torch.full_like(net.weight, gradient)
        scaler.step(optimizer)
        scaler.update()
        changes.append(not torch.equal(before, net.weight))
    return changes[0], changes[1]


def test_an_overflow_reaches_an_optimizer_that_is_not_fused() -> None:
    assert run_ranks(_left_out_unfused) == [(False, True)] * 2


def test_an_overflow_and_a_loss_scale_reach_the_rank_s_own_optimizer() -> None:
    assert run_ranks(_left_out) == [(True, True, True)] * 2


def _resumed(joined: World, dataset: Dataset) -> bool:
    how: Any = {"train": ADAMW, "parallelism": "zero1"} | LOW_BIT
    return resumes_exactly(*(make_training(dataset, joined, model=large_net()[2:], **how) for _ in range(3)))


@pytest.mark.slow
@needs_library
def test_a_share_of_8_bit_state_is_resumed_to_the_last_bit(digits: Dataset) -> None:
    assert run_ranks(_resumed, digits) == [True, True]
