"""What is special about pipelines: the schedule, the cut, and how they resume and stop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeline import models
from pipeline.data.prepared import Dataset
from pipeline.distributed import WorkerError, World
from pipeline.params import Variant
from pipeline.techniques import model_chain, of_plan
from pipeline.techniques.model_chain import Cut, NotAChain, balanced, chain, joined
from pipeline.techniques.pipeline_parallel import Pipeline
from pipeline.training.checkpoints import state_sha256
from pipeline.training.loop import Training
from tests.nets import ALONE, changed, chosen, conv_net, make_plan, stopped
from tests.parallel import STEPS, TRAIN, held_bytes, make_training
from tests.ranks import run_ranks
from tests.trainings import OF_TASK, learned
from tests.trainings import training_on as language_training

PIPELINE: dict[str, Any] = {"parallelism": "pipeline", "gradient_accumulation": 4}
normed_net = partial(conv_net, norm=True)


def technique_of(training: Training) -> Pipeline:
    return next(technique for technique in training.techniques if isinstance(technique, Pipeline))


def _steps(joined: World, dataset: Dataset, cases: list[dict[str, Any]]) -> list[tuple[int, Cut]]:
    """Return, for each case, the largest number of micro-batches between their forward and their backward pass through
    this rank's stage, and the cut."""
    seen = []
    for applied in cases:
        training = make_training(dataset, joined, normed_net, **PIPELINE | applied)
        technique, flying = technique_of(training), [0]
        technique._module.register_forward_hook(lambda *_, flying=flying: flying.append(flying[-1] + 1))
        first = next(technique._module.parameters())
        first.register_post_accumulate_grad_hook(lambda _, flying=flying: flying.append(flying[-1] - 1))
        training.advance(2)
        seen.append((max(flying), technique._cut))
    return seen


def test_1f1b_keeps_fewer_micro_batches_than_gpipe(digits: Dataset) -> None:
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
    cuts = []
    costs = ((4, 1, 1, 1, 1), (1, 1, 1, 1, 4), (1, 1, 1, 2, 1))
    nets: list[list[nn.Module]] = [[_Costly(cost) for cost in of_net] for of_net in costs]
    nets.append([_Costly(5), _InPlace(8, 8), _Costly(5)])
    for layers in nets:
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *layers, nn.Linear(8, 10))
        before, random = {name: tensor.clone() for name, tensor in net.state_dict().items()}, torch.get_rng_state()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_chain, "_now", lambda _: _Costly.clock)
            training = make_training(dataset, joined, lambda net=net: net, **PIPELINE)  # type: ignore[misc]
        cuts.append(technique_of(training)._cut.ends)
        state = training.model_state.read()
        assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
        torch.set_rng_state(random)
        training.advance(1)
    return cuts


def test_the_cut_makes_the_slowest_stage_fast(digits: Dataset) -> None:
    """The units are the first layer, the costly layers and the last layer. A layer that changes its input in place is
    joined to the unit before it."""
    expected = [(2, 7), (5, 7), (4, 7), (2, 4)]
    assert run_ranks(_cuts, digits) == [expected, expected]


def _noisy_net(dataset: Dataset, joined: World) -> Training:
    recipe = {"clip_norm": 0.5, "ema_decay": 0.7, "no_decay": ["vectors"], "lr_factors": {"2.*": 2.0}}
    net = partial(conv_net, norm=True, dropout=True)
    return make_training(dataset, joined, net, TRAIN.model_copy(update=recipe), **PIPELINE)


def _language_model(parallelism: str, joined: World) -> Training:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OF_TASK["language_model"]["model_options"], "tied", False)
        return language_training("language_model", joined, parallelism=parallelism, gradient_accumulation=4)


def _of_language(joined: World, parallelism: str) -> tuple[list[float], float, int]:
    training = _language_model(parallelism, joined)
    return *learned(training), sum(param.nbytes for param in training.model.parameters() if not param.is_meta)


def test_an_untied_language_model_is_cut_between_blocks() -> None:
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
        patch.setattr(model_chain, "balanced", lambda costs, parts: elsewhere)  # noqa: ARG005
        again = made(joined)
    assert technique_of(again)._cut.ends == tuple(elsewhere)
    torch.manual_seed(12345)
    again.restore(state)
    again.advance(STEPS // 2)
    return [
        (
            technique_of(training)._cut.ends,
            [state_sha256(state) for state in (training.model_state.read(), training.weights())],
            held_bytes(training.model.parameters()),
        )
        for training in (whole, again)
    ]


def test_a_resumed_pipeline_is_cut_as_before(digits: Dataset) -> None:
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


def test_no_stage_takes_a_step_without_finite_loss(digits: Dataset, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"rank 1: (?s:.*)epoch 1, step 8: the loss became nan"):
        run_ranks(_until_broken, digits, str(tmp_path))
    assert [(tmp_path / rank).read_text().count("step") for rank in "01"] == [7, 7]


def test_the_pipeline_replaces_the_technique_of_gradient_accumulation() -> None:
    accumulating = make_plan(gradient_accumulation=4)
    assert [technique.name for technique in chosen(accumulating, ALONE)] == ["gradient_accumulation"]
    asked = Variant(parallelism="pipeline", gradient_accumulation=4)
    staged = accumulating.model_copy(update={"applied": asked})
    assert [technique.__name__ for technique in of_plan(staged)] == ["Pipeline"]


def parts_of(costs: list[float], ends: list[int]) -> list[float]:
    return [sum(costs[begin:end]) for begin, end in pairwise((0, *ends))]


@given(costs=st.lists(st.integers(0, 50), min_size=1, max_size=9), data=st.data())
def test_no_other_cut_costs_less(costs: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    cut = balanced(costs, parts)
    assert len(cut) == parts
    assert cut[-1] == len(costs)
    assert all(begin < end for begin, end in pairwise((0, *cut)))
    cuts = combinations(range(1, len(costs)), parts - 1)
    assert max(parts_of(costs, cut)) == min(max(parts_of(costs, [*inner, len(costs)])) for inner in cuts)


class _TwoBranches(nn.Module):
    """A sequence of blocks, and a branch that bypasses all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
        self.last = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        start = passing = self.first(images)
        for block in self.blocks:
            passing = block(passing)
        logits: torch.Tensor = self.last(passing + start)
        return logits


def built(name: str, side: int = 8, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    sizes = {"channels": 1, "height": side, "width": side, "classes": 10}
    model = models.build(name, options, sizes, inputs=torch.zeros(2, 1, side, side), outputs=(10,))
    return model, torch.randn(4, 1, side, side)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Return a vision transformer with two encoder blocks and a hook that resizes its images, and images for it."""
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(32, 16, num_layers=2, num_heads=2, hidden_dim=12, mlp_dim=8, dropout=0.1)
    model.register_forward_pre_hook(lambda _, inputs: F.interpolate(inputs[0], (32, 32)))
    return model, torch.randn(4, 3, 16, 16)


CHAINS = {
    "small_cnn": (lambda: built("small_cnn"), 4),
    "resnet9": (lambda: built("resnet9", base_width=4), 11),
    "conv_net with BatchNorm": (lambda: (conv_net(norm=True, dropout=True), torch.randn(4, 1, 8, 8)), 5),
    # Two units of the stem, eight residual blocks, and the last linear layer.
    "resnet18": (lambda: built("resnet18", 16), 11),
    # Patches, the class token, positions, two encoder blocks, a LayerNorm, and the last linear layer.
    "vision transformer": (lambda: transformer(), 7),
    "densenet121": (lambda: built("densenet121", 16), None),
    "vgg11": (lambda: built("vgg11", 16), 11),
    "a model of branches": (lambda: (_TwoBranches(), torch.randn(4, 8)), 3),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_computes_what_its_model_computes(name: str) -> None:
    make, count = CHAINS[name]
    model, images = make()  # type: ignore[no-untyped-call]
    units = chain(model)
    assert len(units) == count if count else len(units) > 4
    assert all(any(True for _ in unit.parameters()) for unit in units)
    own = [id(parameter) for unit in units for parameter in unit.parameters()]
    assert sorted(own) == sorted(id(parameter) for parameter in model.parameters())
    torch.manual_seed(1)
    expected = model(images)
    torch.manual_seed(1)
    assert torch.equal(nn.Sequential(*units)(images), expected)


def test_units_are_joined_to_the_one_before() -> None:
    model = conv_net(norm=True)
    units = joined(chain(model), (1, 3, 4))
    assert len(units) == 2
    images = torch.randn(4, 1, 8, 8)
    assert torch.equal(units[1](units[0](images)), model(images))


def test_a_checkpointed_block_stays_whole() -> None:
    model = changed(conv_net(norm=True), chosen(make_plan(activation_checkpointing=True), ALONE))
    units = chain(model)
    assert len(units) == 3
    assert any(module is model.get_submodule("1") for module in units[1].modules())


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(self.other(self.layer(images)))
        return logits


class _TwoInputs(nn.Module):
    def forward(self, images: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return images * scale


def _hooked() -> nn.Module:
    model = conv_net()
    model.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_Tied, "weight is used in more than one place"),
        (_TwoInputs, "_TwoInputs takes or returns more than one tensor"),
        (_hooked, "Sequential as a whole has hooks"),
    ],
)
def test_the_error_says_why_a_model_is_no_chain(make: Any, reason: str) -> None:
    with pytest.raises(NotAChain, match=reason):
        chain(make())
