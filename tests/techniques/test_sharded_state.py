"""A model that ranks hold in parts has the same scores, checkpoints and results of jobs as the whole model."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook

from pipeline import models, results
from pipeline.data.prepared import Dataset
from pipeline.distributed import ALONE, World
from pipeline.params import parse
from pipeline.results import Result
from pipeline.training import job
from pipeline.training.checkpoints import state_sha256
from pipeline.training.evaluation import Score, evaluate
from tests.conftest import ROOT
from tests.nets import conv_net, stopped, task_of
from tests.parallel import CPU, TRAIN, copied, make_training
from tests.ranks import run_ranks
from tests.techniques.test_ddp import Spare
from tests.techniques.test_parallelisms import headed_net
from tests.test_job import PARAMS, workspace  # noqa: F401
from tests.workspaces import PREPARED

FSDP: dict[str, Any] = {"parallelism": "fsdp"}
TENSOR: dict[str, Any] = {"parallelism": "tensor"}
COUNTS = [97, 33, 1]
"""Numbers of test samples. They give ranks different numbers of samples or of batches, or one rank no sample."""


def attending_net() -> nn.Module:
    """Return a net with a transformer layer over image rows. If no gradient is needed, torch uses another kernel."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Flatten(1, 2), layer, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


def _scores(
    joined: World, dataset: Dataset, cases: list[tuple[Any, dict[str, Any]]]
) -> list[tuple[list[Score], dict[str, torch.Tensor]]]:
    """Return the scores of each case on test sets of ``COUNTS`` samples, and the weights that were scored."""
    found = []
    for net, applied in cases:
        training = make_training(dataset, joined, net, **applied)
        steps = training.run()
        next(steps)
        scores = []
        for count in COUNTS:
            training.task = task_of(replace(dataset, test=dataset.test[:count]))
            scores.append(training.evaluate())
        found.append((scores, copied(training.model_state.read())))
        next(steps)  # a training step must still work after the evaluations
    return found


def _check(dataset: Dataset, cases: list[tuple[Any, dict[str, Any]]], size: int) -> None:
    ranks = run_ranks(_scores, dataset, cases, size=size)
    for (net, _), *of_ranks in zip(cases, *ranks, strict=True):
        scores, weights = of_ranks[0]
        assert all(each == scores for each, _ in of_ranks)
        model = net()
        model.load_state_dict(weights)
        for count, score in zip(COUNTS, scores, strict=True):
            expected = evaluate(model, task_of(replace(dataset, test=dataset.test[:count])), ALONE, 7)
            assert (score.correct, score.count) == (expected.correct, count)
            assert score.loss == pytest.approx(expected.loss, rel=1e-6)


def test_a_sharded_model_has_the_score_of_the_whole_model_whatever_the_shares(digits: Dataset) -> None:
    cases = [(conv_net, FSDP), (conv_net, FSDP | {"parameter_precision": "bf16"}), (attending_net, FSDP)]
    _check(digits, [*cases, (headed_net, TENSOR), (attending_net, TENSOR)], size=2)


@pytest.mark.slow
def test_models_on_four_ranks_have_the_score_of_the_whole_model(digits: Dataset) -> None:
    _check(digits, [(conv_net, FSDP | {"replicas": 2}), (headed_net, TENSOR | {"replicas": 2})], size=4)


def _resumes(joined: World, dataset: Dataset, changes: dict[str, Any]) -> bool:
    train = TRAIN.model_copy(update=changes)
    straight, half, resumed = (make_training(dataset, joined, Spare, train, **FSDP) for _ in range(3))
    stopped(straight, 6)
    resumed.restore(stopped(half, 3))
    stopped(resumed, 3)
    return state_sha256(straight.model_state.read()) == state_sha256(resumed.model_state.read())


@pytest.mark.parametrize("changes", [{"momentum": 0.0}, {"optimizer": "adamw", "learning_rate": 0.005}])
def test_parameters_without_optimizer_state_resume_exactly(digits: Dataset, changes: dict[str, Any]) -> None:
    assert run_ranks(_resumes, digits, changes) == [True, True]


def wide_net() -> nn.Sequential:
    """Return a net whose memory is mostly parameters: 4 MB in eight blocks of two layers, which tensor can cut."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)) for _ in range(8)]
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 256)), *layers, nn.Linear(256, 10))


def _peaks(joined: World, dataset: Dataset, applied: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of the whole model, and the bytes by which evaluation, checkpoint and restoring raise this GPU's
    memory at their peak."""
    train = TRAIN.model_copy(update={"optimizer": "adamw"})
    training = make_training(dataset, joined, wide_net, train, **applied)
    steps = training.run()
    next(steps)
    added = {"whole": sum(each.nbytes for each in wide_net().parameters())}

    def measured(name: str, part: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        value = part()
        added[name] = torch.cuda.max_memory_allocated() - before
        return value

    with training.paused():
        measured("evaluation", training.evaluate)
        state = measured("checkpoint", lambda: joined.wholes_on_main(training.state()))
        measured("restoring", lambda: training.restore(joined.announced(state)))
    return added


def _gathered(joined: World, dataset: Dataset) -> tuple[int, int]:
    """Return the most bytes of linear layers that are whole at once in an evaluation, and the bytes of the model."""
    training = make_training(dataset, joined, wide_net, **FSDP)
    most, layers = 0, set[nn.Module]()

    def note(module: nn.Module, *_: Any) -> None:
        nonlocal most
        layers.update({module} if isinstance(module, nn.Linear) else {})
        held = [each for layer in layers for each in layer.parameters()]
        most = max(most, sum(each.nbytes for each in held if not isinstance(each, DTensor)))

    hook = register_module_forward_hook(note)
    training.evaluate()
    hook.remove()
    return most, sum(each.nbytes for each in training.model.parameters())


def test_an_evaluation_gathers_a_block_at_a_time(digits: Dataset) -> None:
    for most, whole in run_ranks(_gathered, digits):
        assert 0 < most < whole / 4


@pytest.mark.gpu
@pytest.mark.parametrize("applied", [FSDP, TENSOR])
def test_no_gpu_holds_the_whole_model(digits: Dataset, applied: dict[str, Any]) -> None:
    for added in run_ranks(_peaks, digits, applied, device="cuda"):
        whole = added.pop("whole")
        assert all(each < whole / 2 for each in added.values()), (whole, added)


VARIANTS: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "variants" / "sharded.yaml").read_text(encoding="utf-8"))


def train(name: str) -> Result:
    short = PARAMS["train"] | {"seeds": [3], "epochs": 1}
    config = parse(PARAMS | {"train": short, "variants": {"baseline": {}} | VARIANTS})
    job.run(config, name, CPU, PREPARED)
    return results.read(results.result_file(name), config)


@functools.cache
def baseline() -> Result:
    """Return the single-device result that all tests share."""
    return train("baseline")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("fsdp", "tensor") else pytest.mark.slow)
        for name, values in VARIANTS.items()
        if "cpu_offload" not in values
    ],
)
@pytest.mark.usefixtures("workspace")
def test_each_ready_made_variant_trains_as_the_baseline_does(name: str) -> None:
    plain_result, result = baseline(), train(name)
    assert (result.backend, result.world_size) == ("gloo", 4 if name.endswith("replicas") else 2)
    assert result.skipped == {}
    assert result.applied["parallelism"] == name.partition("-")[0]
    assert result.parameter_count == plain_result.parameter_count
    (run,), (plain,) = result.runs, plain_result.runs
    assert run.steps == plain.steps
    assert run.train_loss == pytest.approx(plain.train_loss, rel=0.05 if "bf16" in name else 0.02)
    assert abs(run.test_correct - plain.test_correct) <= (8 if "bf16" in name else 3)
    assert len(run.peak_memory_rank_bytes) == result.world_size
    model = models.small_cnn(channels=1, height=8, width=8, classes=10)
    model.load_state_dict(torch.load(results.model_file(name, 3), weights_only=True))
    assert state_sha256(model.state_dict()) == run.model_sha256
