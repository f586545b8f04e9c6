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
from tests.nets import chosen, conv_net, make_plan, setup_of
from tests.parallel import TRAIN, alone_and_on_ranks, assert_same_training
from tests.ranks import run_ranks
from tests.test_training import make_training, resumes_exactly


@pytest.mark.parametrize(("optimizer", "values"), [("sgd", 1), ("adamw", 2)])
def test_two_ranks_train_as_one_device_and_divide_the_optimizer_state(
    digits: Dataset, optimizer: Any, values: int
) -> None:
    train = TRAIN.model_copy(update={"optimizer": optimizer, "learning_rate": 0.05 if optimizer == "sgd" else 0.005})
    cases: list[dict[str, Any]] = [{"parallelism": "zero1"}, {"parallelism": "zero1", "gradient_accumulation": 2}]
    alone, found = alone_and_on_ranks(digits, conv_net, cases, size=2, train=train)
    assert alone.optimizer_bytes >= values * alone.parameter_bytes
    for ranks in found:
        assert_same_training(ranks, alone, held_whole=True)
        # Each parameter belongs to one rank. The largest two of conv_net's six have 1152 and 640 of 1898 values.
        assert sum(rank.optimizer_bytes for rank in ranks) == alone.optimizer_bytes
        assert max(rank.optimizer_bytes for rank in ranks) < 0.62 * alone.optimizer_bytes


def _made(technique: Technique, net: nn.Module, choice: OptimizerChoice) -> Any:
    setup = setup_of(net)
    setup.optimizer_choice = choice
    technique.change_model(setup)
    technique.change_optimizer(setup)
    return setup.optimizer_choice.make(setup.model.parameters())


def _left_out(joined: World) -> tuple[bool, bool, bool]:
    """Return whether ``found_inf`` skips a step, whether the next step changes weights, and whether its loss scale
    counts."""
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


def _wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def _resumed(joined: World, dataset: Dataset) -> bool:
    train = TRAIN.model_copy(update={"optimizer": "adamw", "learning_rate": 0.002, "epochs": 2})
    how: Any = {"train": train, "parallelism": "zero1", "optimizer_state": "8bit"}
    return resumes_exactly(*(make_training(dataset, joined, model=_wide(), **how) for _ in range(3)))


@pytest.mark.slow
def test_a_share_of_8_bit_state_is_resumed_to_the_last_bit(digits: Dataset) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra low-bit")
    assert run_ranks(_resumed, digits) == [True, True]
