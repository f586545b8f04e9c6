"""The job's recipe does in each step what its settings say, and nothing where none is set."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from pipeline.data.prepared import Dataset
from pipeline.errors import ConfigError
from pipeline.models.optimizers import learning_rate
from pipeline.params import Train, parse
from pipeline.plans import plan as plan_of
from pipeline.training.outcomes import evaluate
from tests.nets import ALONE, gradients, stopped
from tests.parallel import CPU
from tests.trainings import TRAIN, ledgers, make_training, weights

CLIP = 0.125


def norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())


def of_first_step(digits: Dataset, applied: dict[str, Any], **recipe: Any) -> list[torch.Tensor]:
    training = make_training(digits, train=TRAIN.model_copy(update=recipe), **applied)
    training.advance(1)
    return gradients(training.model)


@pytest.mark.parametrize("applied", [{}, {"gradient_accumulation": 4}, {"precision": "fp16"}])
def test_only_gradients_above_the_norm_are_scaled(digits: Dataset, applied: dict[str, Any]) -> None:
    plain = of_first_step(digits, applied | ({"precision": "fp32"} if applied else {}))
    longest = norm(plain)
    assert longest > 2 * CLIP
    clipped = of_first_step(digits, applied, clip_norm=CLIP)
    assert norm(clipped) == pytest.approx(CLIP, rel=1e-4)
    near = 0.05 if "precision" in applied else 1e-4
    for ours, expected in zip(clipped, plain, strict=True):
        torch.testing.assert_close(ours, expected * CLIP / longest, rtol=near, atol=near * CLIP)
    if not applied:
        assert all(map(torch.equal, of_first_step(digits, {}, clip_norm=2 * longest), plain))


def test_the_average_is_scored_kept_and_resumed(digits: Dataset) -> None:
    decay, steps = 0.75, 30
    recipe = TRAIN.model_copy(update={"ema_decay": decay, "clip_norm": CLIP})
    training = make_training(digits, train=recipe)
    average = [parameter.detach().double() for parameter in training.model.parameters()]
    for _ in islice(training.run(), steps):
        own = [parameter.detach().double() for parameter in training.model.parameters()]
        average = [decay * old + (1 - decay) * new for old, new in zip(average, own, strict=True)]
    before, kept = weights(training), training.weights()
    for ours, expected in zip(kept.values(), average, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-6)
    score = training.evaluate()
    assert weights(training) == before, "training goes on with its own weights"
    own_score = evaluate(training.model, training.task, ALONE, 32)
    training.model.load_state_dict(kept)
    assert evaluate(training.model, training.task, ALONE, 32) == score != own_score

    whole, half, resumed = (make_training(digits, train=recipe) for _ in range(3))
    whole.advance(steps)
    resumed.restore(stopped(half, 13))
    resumed.advance(steps - 13)
    assert all(map(torch.equal, resumed.weights().values(), whole.weights().values()))
    assert not all(map(torch.equal, whole.weights().values(), whole.model_state.read().values()))


def test_the_average_s_memory_is_foreseen(digits: Dataset) -> None:
    recipe = {"model": "small_cnn", "ema_decay": 0.9, "clip_norm": CLIP}
    training = make_training(digits, train=TRAIN.model_copy(update=recipe))
    training.advance(4)
    measured, foreseen = ledgers(training)
    assert foreseen.peak_bytes == pytest.approx(measured.tensors_bytes, rel=0.05)
    assert measured.parameters_bytes == 2 * sum(parameter.nbytes for parameter in training.model.parameters())


def test_groups_have_their_rates_and_their_decay(digits: Dataset) -> None:
    recipe = {"no_decay": ["vectors", "1.0.weight"], "lr_factors": {"2.*": 10.0, "*.bias": 0.5}, "lr_warmup_steps": 4}
    training = make_training(digits, train=TRAIN.model_copy(update=recipe | {"weight_decay": 0.1}))
    training.advance(2)
    name_of = {parameter: name for name, parameter in training.model.named_parameters()}
    found = {
        name_of[parameter]: (group["lr"] / TRAIN.learning_rate, group["weight_decay"])
        for group in training.optimizer.param_groups
        for parameter in group["params"]
    }
    assert found == {
        "0.0.weight": (pytest.approx(0.5), 0.1),
        "0.0.bias": (pytest.approx(0.25), 0.0),
        "1.0.weight": (pytest.approx(0.5), 0.0),
        "1.0.bias": (pytest.approx(0.25), 0.0),
        "2.1.weight": (pytest.approx(5.0), 0.1),
        "2.1.bias": (pytest.approx(2.5), 0.0),
    }
    assert learning_rate(training.train, 3, 100) == learning_rate(training.train, 4, 100) == TRAIN.learning_rate
    wrong = TRAIN.model_copy(update={"no_decay": ["norm*"]})
    with pytest.raises(ConfigError, match=r"train.no_decay: 'norm\*' matches no parameter .* 0.0.weight, .*2.1.bias"):
        make_training(digits, train=wrong)


def test_a_plain_step_does_nothing_more(digits: Dataset) -> None:
    training = make_training(digits)
    assert training.step.update.__self__ is training.optimizer  # type: ignore[attr-defined]
    assert not training.step_changes
    assert not training.setup.kept_models
    assert training.state()["averages"] is None
    assert Train(batch_size=32).model_dump().keys().isdisjoint({"clip_norm", "ema_decay", "lr_factors", "beta2"})


def test_what_a_recipe_cannot_have_is_refused() -> None:
    def planned(train: dict[str, Any], **applied: Any) -> None:
        plan_of(parse({"train": train, "variants": {"baseline": applied}}), "baseline", CPU)

    with pytest.raises(
        ConfigError, match=r"optimizer_in_backward: found True, but it frees gradients before .*clip_norm"
    ):
        planned({"clip_norm": 1.0}, optimizer_in_backward=True)
    local = {"parallelism": "ddp", "processes": 2, "communication_hook": "post_local_sgd"}
    with pytest.raises(ConfigError, match=r"communication_hook: found 'post_local_sgd', but its .* train.ema_decay"):
        planned({"ema_decay": 0.9}, **local)
    with pytest.raises(ConfigError, match=r"train\.beta2: found 0.95, which sgd ignores"):
        planned({"beta2": 0.95})
    planned({"beta2": 0.95, "optimizer": "adamw", "clip_norm": 1.0, "ema_decay": 0.9})
