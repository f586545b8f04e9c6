"""The training of a seed repeats exactly, or the plan says why it may not."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.data.prepared import Dataset, read
from pipeline.distributed import World
from pipeline.errors import PipelineError
from pipeline.params import Machine, parse
from pipeline.plans import Plan, plan
from pipeline.training.assembly import assembled
from tests.nets import ALONE, assembly_of, conv_net
from tests.ranks import run_ranks

CPU = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=True)
STRICT, WARNS = 2, 1


class Puts(nn.Module):
    """Calls ``put_``, which has no deterministic form, on ``ranks``, in each forward pass after number ``first``."""

    def __init__(self, inner: nn.Module, first: int = 0, ranks: str = "01") -> None:
        super().__init__()
        self.inner, self.first, self.ranks, self.calls = inner, first, ranks, 0

    def forward(self, images: Tensor) -> Tensor:
        if self.calls >= self.first and os.environ.get("RANK", "0") in self.ranks:
            torch.zeros(2).put_(torch.tensor([0]), torch.tensor([1.0]))
        self.calls += 1
        logits: Tensor = self.inner(images)
        return logits


def job(variant: dict[str, Any], **train: Any) -> Plan:
    values = {"train": {"batch_size": 32, "seeds": [0], "device": "cpu"} | train, "variants": {"baseline": variant}}
    return plan(parse(values), "baseline", CPU)


@pytest.mark.parametrize(("deterministic", "mode"), [(True, STRICT), (False, 0)])
def test_a_training_is_strict_if_asked(digits_folder: Path, deterministic: bool, mode: int) -> None:
    made = job({}, deterministic=deterministic)
    with assembled(made, digits_folder) as assembly, assembly.training(0) as training:
        training.advance(1)
        assert torch.get_deterministic_debug_mode() == mode
        assert training.plan.decided == {}
    assert torch.get_deterministic_debug_mode() == 0


def test_the_plan_names_non_deterministic_operations(digits_folder: Path) -> None:
    made = job({"gradient_accumulation": "auto"})
    with assembled(made, digits_folder) as assembly:
        with assembly.training(0, change_model=Puts) as training:
            training.advance(2)
            assert torch.get_deterministic_debug_mode() == WARNS
            assert set(training.plan.decided) == {"auto_micro_batch", "deterministic"}
            assert training.plan.decided["deterministic"].startswith("put_ has no deterministic form")
        with assembly.training(0) as training:  # another model
            assert torch.get_deterministic_debug_mode() == STRICT


def test_the_trial_leaves_no_trace(digits: Dataset) -> None:
    made = job({})
    model = conv_net(norm=True, dropout=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    random = torch.get_rng_state()
    with assembly_of(made, ALONE, digits)._repeating(made, model) as plan:
        assert plan is made
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random, torch.get_rng_state())


def test_an_operation_after_the_trial_is_an_error(digits: Dataset) -> None:
    made, third_step = job({}), partial(Puts, first=2)  # the trial leaves no trace
    with (
        assembly_of(made, ALONE, digits).training(0, change_model=third_step) as training,
        pytest.raises(PipelineError, match=r"train.deterministic: found true.*epoch 1, step 3 put_ has no"),
    ):
        training.advance(5)


def _decided(joined: World, folder: Path) -> tuple[dict[str, str], int]:
    made = job({"parallelism": "ddp"})
    with assembly_of(made, joined, read(folder)).training(0, change_model=partial(Puts, ranks="1")) as training:
        return training.plan.decided, torch.get_deterministic_debug_mode()


def test_all_ranks_decide_alike_about_determinism(digits_folder: Path) -> None:
    first, second = run_ranks(_decided, digits_folder)
    assert first == second
    assert (list(first[0]), first[1]) == (["deterministic"], WARNS)
