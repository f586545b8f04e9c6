"""Muon: known updates, the choice of the matrices, and a training like that of torch's own optimizers."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.data.prepared import Dataset
from pipeline.models import optimizers
from pipeline.models.gpt import GPT
from pipeline.techniques.muon import hidden_matrices
from tests.nets import ALONE, SmallTransformer, batch, chosen, headed_net, large_net, make_plan, setup_of
from tests.trainings import ADAMW, make_training, resumes_exactly, weights

MUON: dict[str, Any] = {"optimizer": "muon"}
DECAYED = ADAMW.model_copy(update={"weight_decay": 0.1, "no_decay": ["vectors"], "lr_factors": {"2.1.*": 2.0}})


def iterated(values: Tensor) -> Tensor:
    """Return what Muon's five steps make of a matrix's singular values, whose sum of squares is 1."""
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return values


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_an_update_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    rows, columns = shape
    model = nn.Sequential(nn.Linear(columns, rows, bias=False), nn.Linear(rows, 2))
    (technique,) = chosen(make_plan(train=ADAMW, **MUON), ALONE)
    setup = setup_of(model, torch.zeros(2, columns))
    setup.optimizer_choice = optimizers.of_job(ADAMW.model_copy(update={"weight_decay": 0.25}))
    technique.change_model(setup)
    technique.change_optimizer(setup)
    optimizer = setup.optimizer_choice.make([{"params": list(model.parameters())}])
    matrix: Any = model[0].weight
    before = matrix.detach().clone()
    matrix.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    update = (before * (1 - 0.25 * ADAMW.learning_rate) - matrix.detach()) / (ADAMW.learning_rate * 0.2 * 24**0.5)
    left, sizes, right = torch.linalg.svd(matrix.grad, full_matrices=False)
    expected = iterated(sizes / sizes.norm())  # the first momentum is parallel to the gradient
    assert 0.68 < expected.min() < expected.max() < 1.14
    torch.testing.assert_close(left.T @ update @ right.T, expected.diag(), rtol=0, atol=0.1)  # in bfloat16
    assert not optimizer.state[matrix].keys() - {"momentum_buffer"}


def test_it_trains_as_torch_s_own_optimizers(digits: Dataset) -> None:
    ours, plain = (make_training(digits, model=headed_net(dropout=False), train=DECAYED, **how) for how in (MUON, {}))
    ours.advance(6)
    head: Any = plain.model[2]  # type: ignore[index]
    matrix = head[1].weight
    others = [key for key in plain.model.parameters() if key is not matrix]
    grouped = [
        {"params": [key for key in others if (key.dim() > 1) is decays and (key in set(head[1].parameters())) is fast],
         "weight_decay": 0.1 * decays, "factor": 1.0 + fast}
        for decays in (True, False) for fast in (True, False)
    ]  # fmt: skip
    muon = torch.optim.Muon([{"params": [matrix], "factor": 2.0}], adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(grouped, betas=(0.9, 0.999), fused=True)
    for step, (images, labels) in enumerate(islice(plain.batches.epoch(0), 6)):
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = group["factor"] * optimizers.learning_rate(DECAYED, step, plain.total_steps)
        plain.model.zero_grad()
        F.cross_entropy(plain.model(images), labels).backward()
        muon.step()
        adamw.step()
    assert weights(ours) == weights(plain)


@pytest.mark.parametrize("tied", [True, False])
def test_of_a_gpt_the_blocks_matrices_are_meant(tied: bool) -> None:
    model = GPT(vocabulary=32, length=8, width=16, depth=2, heads=2, tied=tied)
    names = hidden_matrices(model, lambda: model(torch.zeros(2, 8, dtype=torch.int64)))
    parts = ("attention.query_key_value", "attention.out", "mlp.0", "mlp.2")
    assert list(names) == [f"{block}.{part}.weight" for block in (1, 2) for part in parts]


def test_attention_s_own_weights_are_meant_too() -> None:
    model = SmallTransformer()
    names = hidden_matrices(model, lambda: model(batch(2)[0]))
    ends = ("in_proj_weight", "out_proj.weight", "mlp.0.weight", "mlp.3.weight")
    assert len(names) == 2 * len(ends)
    assert all(name.endswith(ends) for name in names), "neither the class token, the positions nor the head"


@pytest.mark.parametrize("applied", [MUON, MUON | {"optimizer_in_backward": True}, MUON | {"loss_chunks": 4}])
def test_a_resumed_run_ends_with_the_same_bits(digits: Dataset, applied: dict[str, Any]) -> None:
    trainings = [make_training(digits, model=large_net(n), train=ADAMW, **applied) for n in (0, 0, 5)]
    assert resumes_exactly(*trainings)
    held = trainings[0].optimizer.state
    matrices = [key for key, state in held.items() if "momentum_buffer" in state]
    assert [key.shape for key in matrices] == [(64, 64)]
    if "loss_chunks" not in applied:
        plain = make_training(digits, model=large_net(), train=ADAMW, **MUON)
        plain.advance(30)
        assert weights(trainings[0]) == weights(plain), "an update in the backward pass is the same"
