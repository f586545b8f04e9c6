"""What the parallelisms promise: the same training as on one device, a share of the memory, and exact resumption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from torch import nn

from pipeline.data.prepared import Dataset
from pipeline.distributed import ALONE, World
from pipeline.params import Train
from pipeline.results import Ledger
from tests.nets import SmallTransformer, conv_net, headed_net
from tests.parallel import TRAIN, Observed, assert_same_training, held_bytes, make_training, observe
from tests.ranks import run_ranks

DDP, ZERO1, FSDP, TENSOR, PIPELINE = ({"parallelism": name} for name in ("ddp", "zero1", "fsdp", "tensor", "pipeline"))
ADAMW = TRAIN.model_copy(update={"optimizer": "adamw", "learning_rate": 0.005})
MUON = {"optimizer": "muon"}
LORA = {"lora": {"targets": ["*"], "rank": 2, "train": ["1.*"]}}
IN_BITS = {"lora": {"targets": ["*"], "rank": 2, "train": ["0.*"]}, "base_weights": "nf4"}
RECIPE: dict[str, Any] = {"clip_norm": 0.5, "ema_decay": 0.7, "no_decay": ["vectors"], "lr_factors": {"2.*": 2.0}}
CLIPPED, CLIPPED_ADAMW = TRAIN.model_copy(update=RECIPE), ADAMW.model_copy(update=RECIPE | {"beta2": 0.95})
normed_net = partial(conv_net, norm=True)


def uncut(net: Callable[[], nn.Module], cut: int) -> float:
    """Return how much two ranks hold together, relative to the net, if they share ``cut`` of its parameters."""
    return 2 - cut / sum(parameter.numel() for parameter in net().parameters())


def frozen_net() -> nn.Module:
    """Return a net whose first block, with BatchNorm, is frozen."""
    net = conv_net()
    net[0] = conv_net(norm=True)[0].requires_grad_(False).eval()
    return net


plain_headed_net = partial(headed_net, norm=False, dropout=False)
HEAD = 64 * 48 + 48 + 48 * 10
MLPS = 2 * (16 * 64 + 64 + 64 * 16)


@dataclass(frozen=True)
class Case:
    """Ranks that must train as one device does with the settings ``alone``."""

    applied: dict[str, Any]
    held: float
    """Parameters that all ranks hold together, relative to the model."""
    net: Callable[[], nn.Module] = conv_net
    size: int = 2
    alone: dict[str, Any] = field(default_factory=dict)
    train: Train = TRAIN


def staged(
    micro_batches: int,
    batch_size: int = 96,
    train: Train = TRAIN,
    net: Callable[[], nn.Module] = normed_net,
    **more: Any,
) -> Case:
    """Return the case of a pipeline. It must train as one device with the same micro-batches."""
    alone = {"gradient_accumulation": micro_batches} | {key: more[key] for key in more if key != "schedule"}
    train = train.model_copy(update={"batch_size": batch_size})
    return Case(PIPELINE | alone | more, 1, net, alone=alone, train=train)


TWICE = {"gradient_accumulation": 2}
CASES = {
    "ddp": Case(DDP | {"gradient_accumulation": 4}, 2, train=CLIPPED),
    "ddp, nf4": Case(DDP | IN_BITS | {"gradient_accumulation": 2}, 2, alone=IN_BITS, train=CLIPPED),
    "zero1": Case(ZERO1, 2),
    "zero1, adamw": Case(ZERO1 | TWICE, 2, train=CLIPPED_ADAMW),
    "ddp, muon": Case(DDP | MUON | TWICE, 2, plain_headed_net, alone=MUON, train=CLIPPED_ADAMW),
    "zero1, muon": Case(ZERO1 | MUON, 2, plain_headed_net, alone=MUON, train=CLIPPED_ADAMW),
    "zero1, nf4": Case(ZERO1 | IN_BITS, 2, alone=IN_BITS),
    "fsdp": Case(FSDP, 1),
    "fsdp, kept": Case(FSDP | {"reshard_after_forward": False}, 1),
    "fsdp, accumulated": Case(FSDP | TWICE, 1, train=CLIPPED),
    "fsdp, frozen": Case(FSDP, 1, frozen_net),
    "fsdp, lora": Case(FSDP | LORA, 1, alone=LORA, train=CLIPPED),
    "tensor": Case(TENSOR, uncut(headed_net, HEAD), headed_net, train=CLIPPED),
    "tensor, checkpointed": Case(TENSOR | {"activation_checkpointing": True}, uncut(headed_net, HEAD), headed_net),
    "tensor, transformer": Case(TENSOR | TWICE, uncut(SmallTransformer, MLPS), SmallTransformer, alone=TWICE),
    # The number of micro-batches is not always a multiple of the number of stages.
    "gpipe, 4": staged(4, schedule="gpipe"),
    # Without BatchNorm: the gradient of a bias before it is zero but for rounding, which Adam makes a full step.
    "1f1b, 4": staged(4, net=plain_headed_net, train=CLIPPED_ADAMW),
    "gpipe, 3": staged(3, 90, schedule="gpipe"),
    "1f1b, 5": staged(5, 90),
    "pipeline, checkpointed": staged(4, activation_checkpointing=True),
    "pipeline, channels_last": staged(4, channels_last=True),
    "pipeline, muon": staged(4, net=partial(headed_net, dropout=False), train=CLIPPED_ADAMW, optimizer="muon"),
    "pipeline, bf16": staged(2, precision="bf16"),
    # Each pipeline has half of the batch and thus smaller micro-batches, so the net must not have BatchNorm.
    "pipeline, replicas": Case(PIPELINE | TWICE | {"replicas": 2}, 2, size=4, train=CLIPPED),
}
of_three = partial(Case, size=3, train=TRAIN.model_copy(update={"batch_size": 36}))
LARGER = {
    "ddp of three": of_three(DDP, 3),
    "zero1 of three": of_three(ZERO1, 3),
    "fsdp of three": of_three(FSDP | TWICE, 1),
    "fsdp of three, checkpointed": of_three(FSDP | {"activation_checkpointing": True, "channels_last": True}, 1),
    "fsdp, replicas": Case(FSDP | {"replicas": 2}, 2, size=4),
    "fsdp, replicas, accumulated": Case(FSDP | {"replicas": 2} | TWICE, 2, size=4, train=CLIPPED),
    "tensor, replicas": Case(
        TENSOR | {"replicas": 2, "channels_last": True} | TWICE,
        2 * uncut(plain_headed_net, HEAD),
        plain_headed_net,
        size=4,
        train=CLIPPED,
    ),
}


@pytest.fixture(scope="module")
def observed(digits: Dataset) -> Callable[[str], tuple[Observed, list[Observed]]]:
    """``observed(name)`` returns the results of one device, and of the ranks of a case."""
    seen: dict[str, Any] = {}

    def of(name: str) -> tuple[Observed, list[Observed]]:
        case = (CASES | LARGER)[name]
        single = repr((case.net, case.train, case.alone))
        if single not in seen:
            seen[single] = observe(ALONE, digits, case.net, case.train, case.alone)
        if name not in seen:
            seen[name] = run_ranks(observe, digits, case.net, case.train, case.applied, size=case.size)
        return seen[single], seen[name]

    return of


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER)])
def test_ranks_train_as_one_device_and_resume(
    name: str, observed: Callable[[str], tuple[Observed, list[Observed]]]
) -> None:
    case = (CASES | LARGER)[name]
    alone, ranks = observed(name)
    # Muon's iteration makes the rounding in small singular values as large as the large ones.
    assert_same_training(ranks, alone, rough=bool(case.alone.keys() & {"precision", "optimizer"}))
    parallelism = case.applied["parallelism"]
    parameters, state = ([rank.parameter_bytes for rank in ranks], [rank.optimizer_bytes for rank in ranks])
    for of_ranks, whole, expected in (
        (parameters, alone.parameter_bytes, case.held),
        (state, alone.optimizer_bytes, 1 if parallelism == "zero1" else case.held),
    ):
        assert sum(of_ranks) == pytest.approx(expected * whole, rel=0.2 if case.size == 3 else 1e-6)  # rows are padded
        assert max(of_ranks) < whole or expected == case.size
        assert len(set(of_ranks)) == 1 or parallelism in ("zero1", "pipeline") or case.size == 3
    # Each parameter belongs to one rank of zero1. The largest two of conv_net's six have 1152 and 640 of 1898 values.
    assert max(state) < 0.62 * alone.optimizer_bytes or parallelism != "zero1"


def test_when_fsdp_gathers_makes_no_difference(observed: Callable[[str], tuple[Observed, list[Observed]]]) -> None:
    assert observed("fsdp")[1][0].straight_sha256 == observed("fsdp, kept")[1][0].straight_sha256


def _measured(joined: World, dataset: Dataset, cases: list[dict[str, Any]]) -> list[tuple[Ledger, int, int]]:
    """Return, for each case, the measured ledger, and the bytes of this rank's parameters and optimizer state."""
    from pipeline.profiling import ledger

    ledgers = []
    for applied in cases:
        training = make_training(dataset, joined, conv_net, **applied)
        training.advance(4)
        measured = ledger.measured(training, 10**9)
        assert measured is not None
        state = [value for values in training.optimizer.state.values() for value in values.values()]
        ledgers.append((measured, held_bytes(training.model.parameters()), held_bytes(state)))
    return ledgers


def test_the_measured_ledger_counts_what_the_rank_holds(digits: Dataset) -> None:
    whole = held_bytes(conv_net().parameters())
    cases: list[dict[str, Any]] = [
        FSDP,
        FSDP | {"reshard_after_forward": False},
        PIPELINE | {"gradient_accumulation": 4},
    ]
    for of_rank in run_ranks(_measured, digits, cases):
        for measured, parameters, state in of_rank:
            assert (measured.parameters_bytes, measured.optimizer_state_bytes) == (parameters, state)
        freed, kept, pipeline = (measured for measured, _, _ in of_rank)
        assert freed.parameters_bytes == whole / 2
        assert max(freed.gradients_bytes, kept.gradients_bytes) <= 0.6 * whole
        assert freed.communication_bytes >= 0.3 * whole
        assert kept.communication_bytes >= whole
        assert pipeline.gradients_bytes == pipeline.parameters_bytes  # after the first micro-batch's backward pass
        assert pipeline.activations_bytes > pipeline.communication_bytes == 0
