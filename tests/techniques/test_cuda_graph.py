from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.data.prepared import Dataset
from pipeline.errors import PipelineError
from pipeline.measurement.windows import graphs_bytes
from pipeline.params import GRAPH_WARMUP_STEPS, Train, entry
from pipeline.profiling.ledger import measured
from pipeline.techniques.cuda_graph import CudaGraph
from pipeline.training.loop import Training
from pipeline.training.losses import NonFiniteLoss
from tests.nets import ALONE, GPU, LooksAtValues, chosen, conv_net, make_plan
from tests.test_training import TRAIN, make_training, rows_of, weights


def test_the_cuda_graph_is_applied_after_all_techniques_but_the_cudnn_benchmark() -> None:
    techniques = chosen(make_plan(cuda_graph=True, cudnn_benchmark=True, gradient_accumulation=2), ALONE)
    assert [technique.name for technique in techniques][-2:] == ["cuda_graph", "cudnn_benchmark"]
    assert entry(CudaGraph.name).needs_measuring


# On a GPU.


def make(dataset: Dataset, train: Train = TRAIN, **applied: Any) -> Training:
    return make_training(dataset, GPU, train=train, model=conv_net(norm=True), **applied)


def technique_of(training: Training) -> CudaGraph:
    (found,) = (technique for technique in training.techniques if isinstance(technique, CudaGraph))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "more", [{}, {"gradient_accumulation": 2}, {"precision": "bf16", "channels_last": True}, {"cudnn_benchmark": True}]
)
def test_replays_train_as_steps_do_while_the_learning_rate_changes(
    digits: Dataset, optimizer: str, more: dict[str, Any]
) -> None:
    train = TRAIN.model_copy(update={"optimizer": optimizer, "learning_rate": 0.05 if optimizer == "sgd" else 0.003})
    plain, graphed = make(digits, train, **more), make(digits, train, cuda_graph=True, **more)
    calls = []
    graphed.model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    rows = [rows_of(training.run()) for training in (plain, graphed)]
    tolerance = 0.05 if "precision" in more else 0.01
    assert [row.train_loss for row in rows[1]] == pytest.approx([row.train_loss for row in rows[0]], rel=tolerance)
    assert [row.learning_rate for row in rows[1]] == [row.learning_rate for row in rows[0]]
    # Python ran the model in the first steps and in the recording, and afterwards only in evaluations.
    assert calls.count(True) == (GRAPH_WARMUP_STEPS + 1) * more.get("gradient_accumulation", 1)
    assert technique_of(graphed).graph is not None
    assert all(isinstance(group["lr"], float) for group in graphed.optimizer.param_groups)


@pytest.mark.gpu
def test_each_replay_draws_dropout_anew_and_a_resumed_run_ends_with_the_same_weights(digits: Dataset) -> None:
    def made() -> Training:
        return make_training(digits, GPU, model=conv_net(dropout=True), cuda_graph=True)

    first = made()  # sets the generator that all trainings share, so one training must follow the other
    first.advance(60)
    again = made()
    again.advance(60)
    assert weights(first) == weights(again)
    plain = make_training(digits, first.world, model=conv_net(dropout=True))
    plain.advance(60)
    assert first.losses.read_and_reset() == pytest.approx(plain.losses.read_and_reset(), rel=0.05)
    half, resumed = made(), made()
    half.advance(30)
    resumed.restore(half.state())
    resumed.advance(30)
    torch.testing.assert_close(dict(resumed.model.state_dict()), dict(first.model.state_dict()), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_replays_count_the_steps_since_a_bad_loss(digits: Dataset) -> None:
    training = make(digits, cuda_graph=True)
    training.advance(8)
    training.losses.total.fill_(torch.nan)
    with pytest.raises(NonFiniteLoss, match="step 9: the loss became nan"):
        training.advance(8)


@pytest.mark.gpu("its allocator's pools")
def test_the_peak_includes_the_memory_of_replays_and_the_ledger_is_unknown(digits: Dataset) -> None:
    train = TRAIN.model_copy(update={"batch_size": 512, "epochs": 12})
    plain, graphed = make(digits, train), make(digits, train, cuda_graph=True)
    for training in (plain, graphed):
        training.advance(20)
    assert graphs_bytes(torch.device("cuda", 0)) > 0
    assert plain.memory.peak_bytes
    assert graphed.memory.peak_bytes
    assert graphed.memory.peak_bytes > 0.9 * plain.memory.peak_bytes
    assert measured(graphed, graphed.memory.peak_bytes) is None
    assert measured(plain, plain.memory.peak_bytes) is not None


@pytest.mark.gpu
def test_a_model_that_asks_for_a_value_is_refused(digits: Dataset) -> None:
    training = make_training(digits, GPU, model=LooksAtValues(), cuda_graph=True)
    with pytest.raises(PipelineError, match=r"variants\.tried\.cuda_graph: found true, but a step cannot be recorded"):
        training.advance(GRAPH_WARMUP_STEPS + 1)
