"""A model that ranks hold in parts has the same scores, checkpoints and results of jobs as the whole model."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torchvision.models import convnext_tiny, resnet18, vgg11, vit_b_16

from pipeline import environment, models, results
from pipeline.data.prepared import Dataset
from pipeline.distributed import ALONE, World
from pipeline.models import build, optimizers
from pipeline.models.gpt import GPT
from pipeline.models.optimizers import OptimizerChoice
from pipeline.params import parse
from pipeline.results import Result
from pipeline.techniques import Technique
from pipeline.techniques.tensor import pairs
from pipeline.training import job
from pipeline.training.checkpoints import state_sha256
from pipeline.training.outcomes import Score, evaluate
from tests import trainings
from tests.conftest import ROOT
from tests.nets import (
    Spare,
    batch,
    changed,
    chosen,
    conv_net,
    headed_net,
    large_net,
    make_plan,
    make_step,
    setup_of,
    stopped,
    task_of,
)
from tests.parallel import CPU, TRAIN, Observed, assert_exact_resume, copied, held_bytes, make_training, observe
from tests.ranks import run_ranks
from tests.trainings import ADAMW, LOW_BIT, learned, needs_library, resumes_exactly
from tests.trainings import training_on as language_training
from tests.workspaces import PARAMS, PREPARED

FSDP: dict[str, Any] = {"parallelism": "fsdp"}


def _observed(joined: World, dataset: Dataset, cases: list[dict[str, Any]]) -> list[Observed]:
    train, net = TRAIN.model_copy(update={"optimizer": "adamw", "learning_rate": 0.005}), partial(conv_net, norm=True)
    return [observe(joined, dataset, partial(net, dropout=True), train, FSDP | applied) for applied in cases]


@pytest.mark.slow
def test_adamw_and_batchnorm_resume_exactly(digits: Dataset) -> None:
    cases: list[dict[str, Any]] = [{"activation_checkpointing": True}, {"parameter_precision": "bf16"}]
    cases += [{"parameter_precision": "bf16", "activation_checkpointing": True, "gradient_accumulation": 2}]
    for ranks in zip(*run_ranks(_observed, digits, cases), strict=True):
        assert_exact_resume(ranks[0])  # the other rank has BatchNorm statistics of its own, which are not saved
        for rank in ranks:
            torch.testing.assert_close(rank.resumed_optimizer_state, rank.optimizer_state, rtol=0, atol=0)
            assert list(rank.weights) == list(conv_net(norm=True).state_dict())
            assert rank.accuracy > 0.2
            assert {value.dtype for value in rank.weights.values()} == {torch.float32, torch.int64}


def _gathered(joined: World) -> dict[str, Any]:
    """Return the bytes that a rank holds between and after its two passes, dtypes, and when gradients are reduced."""
    images, labels = (part.chunk(joined.size)[joined.rank] for part in batch(32))
    seen: dict[str, Any] = {}
    for name, options in (
        ("plain", {}),
        ("kept", {"reshard_after_forward": False}),
        ("bf16", {"parameter_precision": "bf16"}),
    ):
        plan = make_plan(parallelism="fsdp", processes=joined.size, **options)
        (technique,) = chosen(plan, joined)
        model: Any = conv_net(norm=True)
        changed(model, [technique])
        dtypes: list[torch.dtype] = []
        model[0][0].register_forward_hook(lambda _m, _i, output, to=dtypes: to.append(output.dtype))
        model[0][1].register_forward_hook(lambda m, i, _o, to=dtypes: to.extend([i[0].dtype, m.weight.dtype]))
        logits = model(images)
        seen[name] = {
            "units": sum(isinstance(part, FSDPModule) for part in model.modules()),
            "held": held_bytes(model[0].parameters()),
            "dtypes": list(dtypes),
            "logits": logits.dtype,
        }
        F.cross_entropy(logits, labels).backward()
        seen[name]["gradients"] = {parameter.grad.dtype for parameter in model.parameters()}
        seen[name]["after"] = held_bytes(model[0].parameters())
    with make_step(model, [technique]).no_sync():
        for parameter in model.parameters():
            parameter.grad = None
        F.cross_entropy(model(images), labels).backward()
        seen["held back"] = all(parameter.grad is None for parameter in model.parameters())
    F.cross_entropy(model(images), labels).backward()
    seen["then reduced"] = all(parameter.grad is not None for parameter in model.parameters())
    return seen


def test_parameters_are_gathered_freed_and_kept() -> None:
    whole = held_bytes(conv_net(norm=True)[0].parameters())
    for seen in run_ranks(_gathered):
        # Three blocks and the model; with bf16 also two BatchNorms.
        assert (seen["plain"]["units"], seen["bf16"]["units"]) == (4, 6)
        assert seen["plain"]["held"] == seen["plain"]["after"] == whole / 2
        assert seen["kept"]["held"] == whole
        assert seen["kept"]["after"] == whole / 2
        assert seen["plain"]["dtypes"] == [torch.float32] * 3
        assert seen["bf16"]["dtypes"] == [torch.bfloat16, torch.bfloat16, torch.float32]
        assert seen["bf16"]["logits"] == torch.float32
        assert seen["bf16"]["gradients"] == {torch.float32}
        assert seen["held back"]
        assert seen["then reduced"]


def _left_out(joined: World, dataset: Dataset) -> bool:
    """Return whether a step with ``found_inf`` leaves the weights unchanged."""
    training = make_training(dataset, joined, conv_net, **FSDP)
    steps = training.run()
    next(steps)
    before = copied(training.model_state.read())
    training.optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    next(steps)
    return all(map(torch.equal, before.values(), copied(training.model_state.read()).values()))


def test_an_overflow_skips_a_step(digits: Dataset) -> None:
    assert optimizers.of_job(TRAIN).options["fused"]
    assert run_ranks(_left_out, digits) == [True, True]


def _on_gpus(joined: World, dataset: Dataset, applied: dict[str, Any]) -> tuple[Observed, set[str]]:
    training = make_training(dataset, joined, conv_net, **applied)
    return observe(joined, dataset, conv_net, TRAIN, applied), {
        parameter.device.type for parameter in training.model.parameters()
    }


@pytest.mark.gpu
@pytest.mark.parametrize("applied", [FSDP, FSDP | {"cpu_offload": True}, FSDP | {"precision": "fp16"}])
def test_shares_on_gpus_train_as_one_device(digits: Dataset, applied: dict[str, Any]) -> None:
    if environment.machine().gpus < 2:
        pytest.skip("needs two GPUs")
    alone = observe(ALONE, digits, conv_net, TRAIN, {})
    for rank, devices in run_ranks(_on_gpus, digits, applied, device="cuda"):
        assert devices == ({"cpu"} if "cpu_offload" in applied else {"cuda"})
        assert rank.accuracy == pytest.approx(alone.accuracy, abs=0.02)
        assert_exact_resume(rank)


class Uneasy(nn.Module):
    """A net with the old weight_norm, whose weight is computed, and with a buffer whose elements share memory."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Flatten(), *(self._block(size) for size in (inputs, 32)))
        self.head = nn.Linear(32, classes)
        self.register_buffer("scale", torch.ones(1).expand(32))

    @staticmethod
    def _block(inputs: int) -> nn.Module:
        with warnings.catch_warnings(action="ignore"):  # a newer form replaces it
            return nn.Sequential(nn.utils.weight_norm(nn.Linear(inputs, 32)), nn.ReLU())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(images) * self.scale)  # type: ignore[no-any-return]


def uneasy(channels: int, height: int, width: int, classes: int) -> nn.Module:
    return Uneasy(channels * height * width, classes)


def _uneasy(joined: World, dataset: Dataset, applied: dict[str, Any]) -> tuple[int, float]:
    torch.manual_seed(0)
    sizes = {"channels": 1, "height": 8, "width": 8, "classes": 10}
    model = build("tests.techniques.test_sharding:uneasy", {}, sizes, inputs=torch.zeros(2, 1, 8, 8), outputs=(10,))
    training = make_training(dataset, joined, lambda: model, **applied)
    training.advance(training.total_steps)
    score = training.evaluate()
    return score.count, score.loss


@pytest.mark.parametrize("checkpointing", [{}, {"activation_checkpointing": True}, {"activation_checkpointing": 0.5}])
def test_computed_weights_and_expanded_buffers_train_on_ranks(checkpointing: dict[str, Any], digits: Dataset) -> None:
    alone = _uneasy(ALONE, digits, checkpointing)
    for parallelism in ("ddp", "zero1", "fsdp"):
        for count, loss in run_ranks(_uneasy, digits, checkpointing | {"parallelism": parallelism}):
            assert (count, loss) == (alone[0], pytest.approx(alone[1], rel=1e-4)), parallelism


def _made(technique: Technique, net: nn.Module, choice: OptimizerChoice) -> Any:
    setup = setup_of(net)
    setup.optimizer_choice = choice
    technique.change_model(setup)
    technique.change_optimizer(setup)
    return setup.optimizer_choice.make([{"params": list(setup.model.parameters())}])


def _left_out_of_zero1(joined: World) -> tuple[bool, bool, bool]:
    """Return whether a step with ``found_inf`` is skipped, whether the next step changes weights, and whether its loss
    scale divides its update."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    (technique,) = chosen(make_plan(parallelism="zero1", processes=joined.size), joined)
    optimizer = _made(technique, net, optimizers.of_job(trainings.TRAIN.model_copy(update={"weight_decay": 0.0})))

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


def test_an_overflow_reaches_the_rank_s_own_optimizer() -> None:
    assert run_ranks(_left_out_of_zero1) == [(True, True, True)] * 2


def _resumed(joined: World, dataset: Dataset) -> bool:
    how: Any = {"train": ADAMW, "parallelism": "zero1"} | LOW_BIT
    return resumes_exactly(*(trainings.make_training(dataset, joined, model=large_net()[2:], **how) for _ in range(3)))


@pytest.mark.slow
@needs_library
def test_a_share_of_8_bit_state_resumes_exactly(digits: Dataset) -> None:
    assert run_ranks(_resumed, digits) == [True, True]


def test_pairs_have_only_elementwise_modules_between_them() -> None:
    with torch.device("meta"):
        transformer, convolutional, classifier = vit_b_16(), convnext_tiny(), vgg11()
        encoder = nn.TransformerEncoderLayer(8, 2, 32)
        small = models.small_cnn(channels=1, height=28, width=28, classes=10)
        others = [resnet18(), conv_net()]
    assert [pair.first.out_features for pair in pairs(transformer)] == [3072] * 12
    assert [list(map(type, pair.between)) for pair in pairs(transformer)] == [[nn.GELU, nn.Dropout]] * 12
    assert len(list(pairs(convolutional))) == 18
    assert [(pair.first.in_features, pair.second.out_features) for pair in pairs(classifier)] == [(25088, 4096)]
    assert [pair.first.out_features for pair in pairs(encoder)] == [32]
    assert [(pair.first.out_features, pair.second.out_features) for pair in pairs(small)] == [(50, 10)]
    assert [list(pairs(module)) for module in others] == [[], []]


def test_layers_used_twice_or_normalised_are_not_cut() -> None:
    shared, dropout = nn.Linear(8, 8), nn.Dropout()
    assert not list(pairs(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))))
    assert not list(pairs(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8))))
    assert not list(pairs(nn.Sequential(shared, nn.ReLU(), shared)))
    assert not list(pairs(nn.Sequential(nn.Linear(8, 8), dropout, nn.Linear(8, 8), dropout)))
    tied = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    tied[2].weight = tied[0].weight
    assert not list(pairs(tied))


def _random(joined: World, dataset: Dataset) -> tuple[list[float], torch.Tensor]:
    """Return a rank's next random numbers, and what its dropout layer makes of hidden values that are all ones."""
    training = make_training(dataset, joined, headed_net, parallelism="tensor", replicas=joined.size // 2)
    head: Any = training.model.get_submodule("2")
    return torch.rand(2).tolist(), head[3](torch.ones(1, 24))


def test_ranks_draw_alike_and_their_masks_differ(digits: Dataset) -> None:
    (first, b), (second, d), (third, _), (fourth, _) = run_ranks(_random, digits, size=4)
    assert first == second != third == fourth
    assert not torch.equal(b, d)
    assert {round(value, 4) for mask in (b, d) for value in mask.flatten().tolist()} == {0.0, round(1 / 0.7, 4)}


def _of_language(joined: World, parallelism: str) -> tuple[list[float], float, int]:
    training = language_training("language_model", joined, parallelism=parallelism)
    return *learned(training), sum(parameter.numel() for parameter in training.model.parameters())


def test_a_language_model_s_attention_is_cut_by_heads() -> None:
    losses, test_loss, size = _of_language(ALONE, "none")
    width, depth = 16, 2
    shared_out = depth * (3 * width * width + 3 * width + width * width)  # the query, key and value of a head; out
    shared_out += depth * (4 * width * width + 4 * width + 4 * width * width)
    for rank in run_ranks(_of_language, "tensor"):
        assert rank[0] == pytest.approx(losses, rel=1e-3)
        assert rank[1] == pytest.approx(test_loss, rel=1e-3)
        assert rank[2] == size - shared_out // 2
    model = GPT(vocabulary=8, length=4, width=24, depth=1, heads=3)
    assert [pair.parts for pair in pairs(model)] == [3, 96]


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
    scores_seen = []
    for net, applied in cases:
        training = make_training(dataset, joined, net, **applied)
        steps = training.run()
        next(steps)
        scores = []
        for count in COUNTS:
            training.task = task_of(replace(dataset, test=dataset.test[:count]))
            scores.append(training.evaluate())
        scores_seen.append((scores, copied(training.model_state.read())))
        next(steps)  # a training step must still work after the evaluations
    return scores_seen


def _check(dataset: Dataset, cases: list[tuple[Any, dict[str, Any]]], size: int) -> None:
    ranks = run_ranks(_scores, dataset, cases, size=size)
    for (net, _), *of_ranks in zip(cases, *ranks, strict=True):
        scores, weights = of_ranks[0]
        assert all(rank_scores == scores for rank_scores, _ in of_ranks)
        model = net()
        model.load_state_dict(weights)
        for count, score in zip(COUNTS, scores, strict=True):
            expected = evaluate(model, task_of(replace(dataset, test=dataset.test[:count])), ALONE, 7)
            assert (score.correct, score.count) == (expected.correct, count)
            assert score.loss == pytest.approx(expected.loss, rel=1e-6)


def test_a_sharded_model_has_the_whole_model_s_score(digits: Dataset) -> None:
    cases = [(conv_net, FSDP), (conv_net, FSDP | {"parameter_precision": "bf16"}), (attending_net, FSDP)]
    _check(digits, [*cases, (headed_net, TENSOR), (attending_net, TENSOR)], size=2)


@pytest.mark.slow
def test_four_ranks_have_the_whole_model_s_score(digits: Dataset) -> None:
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
    added = {"whole": sum(parameter.nbytes for parameter in wide_net().parameters())}

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


def _gathered_of_sharded_state(joined: World, dataset: Dataset) -> tuple[int, int]:
    """Return the most bytes of linear layers that are whole at once in an evaluation, and the bytes of the model."""
    training = make_training(dataset, joined, wide_net, **FSDP)
    most, layers = 0, set[nn.Module]()

    def note(module: nn.Module, *_: Any) -> None:
        nonlocal most
        layers.update({module} if isinstance(module, nn.Linear) else {})
        held = [parameter for layer in layers for parameter in layer.parameters()]
        most = max(most, sum(tensor.nbytes for tensor in held if not isinstance(tensor, DTensor)))

    hook = register_module_forward_hook(note)
    training.evaluate()
    hook.remove()
    return most, sum(parameter.nbytes for parameter in training.model.parameters())


def test_an_evaluation_gathers_a_block_at_a_time(digits: Dataset) -> None:
    for most, whole in run_ranks(_gathered_of_sharded_state, digits):
        assert 0 < most < whole / 4


@pytest.mark.gpu
@pytest.mark.parametrize("applied", [FSDP, TENSOR])
def test_no_gpu_holds_the_whole_model(digits: Dataset, applied: dict[str, Any]) -> None:
    for added in run_ranks(_peaks, digits, applied, device="cuda"):
        whole = added.pop("whole")
        assert all(count < whole / 2 for count in added.values()), (whole, added)


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
