"""What is special about pipelines: the schedule, the cut, and how they resume and stop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.data.prepared import Dataset
from pipeline.distributed import WorkerError, World
from pipeline.params import Variant
from pipeline.techniques import of_plan, pipeline_cut
from pipeline.techniques.pipeline_cut import Cut
from pipeline.techniques.pipeline_parallel import Pipeline
from pipeline.training.checkpoints import state_sha256
from pipeline.training.loop import Training
from tests.nets import ALONE, chosen, conv_net, make_plan, stopped
from tests.parallel import STEPS, held_bytes, make_training
from tests.ranks import run_ranks
from tests.test_tasks import TRAIN
from tests.test_tasks import training_on as language_training

PIPELINE: dict[str, Any] = {"parallelism": "pipeline", "gradient_accumulation": 4}
normed_net = partial(conv_net, norm=True)


def technique_of(training: Training) -> Pipeline:
    return next(each for each in training.techniques if isinstance(each, Pipeline))


def _steps(joined: World, dataset: Dataset, cases: list[dict[str, Any]]) -> list[tuple[int, Cut]]:
    """Return, for each case, the largest number of micro-batches between their forward and their backward pass through
    this rank's stage, and the cut."""
    found = []
    for applied in cases:
        training = make_training(dataset, joined, normed_net, **PIPELINE | applied)
        technique, flying = technique_of(training), [0]
        technique._module.register_forward_hook(lambda *_, flying=flying: flying.append(flying[-1] + 1))
        first = next(technique._module.parameters())
        first.register_post_accumulate_grad_hook(lambda _, flying=flying: flying.append(flying[-1] - 1))
        training.advance(2)
        found.append((max(flying), technique._cut))
    return found


def test_1f1b_keeps_as_many_micro_batches_as_stages_gpipe_keeps_all_and_bf16_passes_16_bits(digits: Dataset) -> None:
    first, last = run_ranks(_steps, digits, [{"schedule": "gpipe"}, {"schedule": "1f1b"}, {"precision": "bf16"}])
    assert [flying for flying, _ in first] == [4, 2, 2]
    assert [flying for flying, _ in last] == [4, 1, 1]
    assert [cut for _, cut in first] == [cut for _, cut in last]
    assert {form.dtype for form in first[2][1].forms[1:]} == {torch.bfloat16}


# The cut


class _Costly(nn.Linear):
    """A layer whose forward pass takes ``cost`` seconds by a simulated clock."""

    clock = 0.0

    def __init__(self, cost: float) -> None:
        super().__init__(8, 8)
        self.cost = cost

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        _Costly.clock += self.cost
        return super().forward(images)


class _InPlace(nn.Linear):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.relu_())


def _cuts(joined: World, dataset: Dataset) -> list[tuple[int, ...]]:
    found = []
    costs = ((4, 1, 1, 1, 1), (1, 1, 1, 1, 4), (1, 1, 1, 2, 1))
    nets: list[list[nn.Module]] = [[_Costly(cost) for cost in of_net] for of_net in costs]
    nets.append([_Costly(5), _InPlace(8, 8), _Costly(5)])
    for layers in nets:
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *layers, nn.Linear(8, 10))
        before, random = {name: tensor.clone() for name, tensor in net.state_dict().items()}, torch.get_rng_state()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline_cut, "_now", lambda _: _Costly.clock)
            training = make_training(dataset, joined, lambda net=net: net, **PIPELINE)  # type: ignore[misc]
        found.append(technique_of(training)._cut.ends)
        state = training.model_state.read()
        assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
        torch.set_rng_state(random)
        training.advance(1)
    return found


def test_the_cut_makes_the_slowest_stage_as_fast_as_possible(digits: Dataset) -> None:
    """The units are the first layer, the costly layers and the last layer. A layer that changes its input in place is
    joined to the unit before it."""
    expected = [(2, 7), (5, 7), (4, 7), (2, 4)]
    assert run_ranks(_cuts, digits) == [expected, expected]


def _noisy_net(dataset: Dataset, joined: World) -> Training:
    return make_training(dataset, joined, partial(conv_net, norm=True, dropout=True), **PIPELINE)


def _language_model(parallelism: str, joined: World) -> Training:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TRAIN["language_model"]["model_options"], "tied", False)
        return language_training("language_model", joined, parallelism=parallelism, gradient_accumulation=4)


def _of_language(joined: World, parallelism: str) -> tuple[list[float], float, int]:
    training = _language_model(parallelism, joined)
    losses = [row.train_loss for row in training.run() if row]
    assert training.score is not None
    return losses, training.score.loss, sum(each.nbytes for each in training.model.parameters() if not each.is_meta)


def test_a_language_model_that_is_not_tied_is_cut_between_its_blocks() -> None:
    losses, test_loss, size = _of_language(ALONE, "none")
    ranks = run_ranks(_of_language, "pipeline")
    for rank in ranks:
        assert rank[0] == pytest.approx(losses, rel=1e-3)
        assert rank[1] == pytest.approx(test_loss, rel=1e-3)
    assert sum(rank[2] for rank in ranks) == size > max(rank[2] for rank in ranks)


def _resumed(joined: World, made: Callable[[World], Training]) -> list[tuple[Any, ...]]:
    """Return the cut, the weights and the bytes of the stage after a run, and after a run that is resumed in a training
    that would cut the model elsewhere."""
    whole = made(joined)
    state = stopped(whole, STEPS // 2)
    whole.advance(STEPS // 2)
    elsewhere = [1, 5] if technique_of(whole)._cut.ends[0] != 1 else [3, 5]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_cut, "balanced", lambda costs, parts: elsewhere)  # noqa: ARG005
        again = made(joined)
    assert technique_of(again)._cut.ends == tuple(elsewhere)
    torch.manual_seed(12345)
    again.restore(state)
    again.advance(STEPS // 2)
    return [
        (
            technique_of(training)._cut.ends,
            state_sha256(training.model_state.read()),
            held_bytes(training.model.parameters()),
        )
        for training in (whole, again)
    ]


def test_a_resumed_run_is_cut_as_it_was_and_ends_with_the_same_weights_to_the_last_bit(digits: Dataset) -> None:
    for made in (partial(_noisy_net, digits), partial(_language_model, "pipeline")):
        for whole, again in run_ranks(_resumed, made):
            assert again == whole


# A loss that is not finite


class _Breaks(nn.Module):
    """Returns its input, or NaN if ``broken``."""

    broken = False

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * float("nan") if self.broken else logits


def _until_broken(joined: World, dataset: Dataset, directory: str) -> None:
    training = make_training(dataset, joined, lambda: nn.Sequential(*conv_net(), _Breaks()), **PIPELINE)
    with Path(directory, str(joined.rank)).open("w") as file:
        for _ in training.run():
            print("step", file=file, flush=True)
            training.model[-1].broken = training.steps == 7  # type: ignore[index]


def test_no_rank_takes_the_step_in_which_the_last_stage_s_loss_is_not_finite(digits: Dataset, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"rank 1: (?s:.*)epoch 1, step 8: the loss became nan"):
        run_ranks(_until_broken, digits, str(tmp_path))
    assert [(tmp_path / rank).read_text().count("step") for rank in "01"] == [7, 7]


def test_the_pipeline_replaces_the_technique_of_gradient_accumulation() -> None:
    accumulating = make_plan(gradient_accumulation=4)
    assert [each.name for each in chosen(accumulating, ALONE)] == ["gradient_accumulation"]
    asked = Variant(parallelism="pipeline", gradient_accumulation=4)
    staged = accumulating.model_copy(update={"applied": asked})
    assert [each.__name__ for each in of_plan(staged)] == ["Pipeline"]
