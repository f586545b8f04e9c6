from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.errors import ConfigError
from pipeline.params import Machine, parse
from pipeline.plans import plan
from pipeline.profiling import ledger
from pipeline.techniques.activation_offload import ActivationOffload
from tests.nets import INPUTS, batch, conv_net, gradients, make_plan, make_step
from tests.test_training import make_training, weights

LAPTOP = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=True)
SERVER = Machine(gpus=1, gpu_native_bf16=True, cpu_native_bf16=True)


def on_gpu() -> World:
    return World(rank=0, size=1, device=torch.device("cuda", 0), backend=None)


def test_on_a_cpu_it_would_move_nothing_and_is_refused() -> None:
    config = parse({"variants": {"baseline": {}, "away": {"activation_offload": True}}})
    with pytest.raises(ConfigError) as refused:
        plan(config, "away", LAPTOP)
    assert str(refused.value) == (
        "variants.away.activation_offload: found True, but it moves activations to the host's memory, where a run on "
        "the CPU has them already; take it out."
    )
    assert plan(config, "away", SERVER).applied.activation_offload


def test_what_it_takes_is_not_foreseen(digits: Dataset) -> None:
    config = parse({"variants": {"baseline": {}, "away": {"activation_offload": True}}})
    with pytest.raises(ledger.PredictionError, match="what activation_offload takes cannot be foreseen"):
        ledger.predicted(plan(config, "away", SERVER), digits)


@pytest.mark.gpu
def test_activations_leave_the_gpu_and_no_bit_of_the_gradients_changes() -> None:
    images, labels = (part.cuda() for part in batch(4096))
    plain = conv_net(norm=True).cuda()
    away = copy.deepcopy(plain)
    technique = ActivationOffload(make_plan(activation_offload=True), on_gpu())
    away = technique.change_model(away, INPUTS)  # type: ignore[assignment]
    forward = make_step(away, [technique]).forward

    def kept(run: object) -> tuple[torch.Tensor, int]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = run(images, labels)  # type: ignore[operator]
        torch.cuda.synchronize()
        return loss, torch.cuda.memory_allocated() - before

    loss, everything = kept(lambda images, labels: F.cross_entropy(plain(images), labels))
    offloaded_loss, rest = kept(forward)
    assert rest < 0.2 * everything
    loss.backward()
    offloaded_loss.backward()
    assert all(map(torch.equal, gradients(plain), gradients(away)))


@pytest.mark.gpu
def test_the_weights_after_some_steps_are_the_same(digits: Dataset) -> None:
    runs = [make_training(digits, on_gpu(), activation_offload=offload) for offload in (False, True)]
    for training in runs:
        training.advance(20)
    assert weights(runs[0]) == weights(runs[1])
