from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pipeline.data.prepared import Dataset, Split
from pipeline.distributed import World
from pipeline.errors import ConfigError
from pipeline.params import Train
from pipeline.training.loop import Training
from tests.nets import ALONE, Counts
from tests.ranks import run_ranks
from tests.trainings import ledgers, make_training, rows_of

BATCH, LENGTH, VOCABULARY = 8, 16, 512
GPT: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2}
TRAIN = Train(
    task="language_model", model="gpt", model_options=GPT, batch_size=BATCH, epochs=1, optimizer="adamw",
    learning_rate=0.01, warmup_fraction=0.0, schedule="constant", history_every_steps=1, seeds=[0],
)  # fmt: skip


def tokens(count: int) -> Split:
    generator = torch.Generator().manual_seed(count)
    return Split({"inputs": torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator).to(torch.uint16)})


DATA = Dataset("noise", "0" * 64, (), VOCABULARY, {}, tokens(6 * BATCH), tokens(5))


def of_gpt(joined: World = ALONE, train: Train = TRAIN, **applied: Any) -> Training:
    return make_training(DATA, joined, train=train, **applied)


def losses_of(joined: World, *cases: dict[str, Any]) -> list[tuple[list[float], float]]:
    """Return, for each case, the losses of all steps and the loss of the evaluation."""
    results = []
    for case in cases:
        training = of_gpt(joined, **case)
        losses = [row.train_loss or math.nan for row in rows_of(training.run())]
        assert training.score is not None
        results.append((losses, training.score.loss))
    return results


def gradients(training: Training) -> dict[str, torch.Tensor]:
    training.step.accumulate(training.batches.epoch(0))
    return {name: parameter.grad for name, parameter in training.model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("chunks", [2, 5, 1000])
@pytest.mark.parametrize("applied", [{}, {"gradient_accumulation": 2}, {"activation_checkpointing": True}])
def test_the_gradients_are_those_of_all_logits(chunks: int, applied: dict[str, Any]) -> None:
    whole, chunked = (
        gradients(of_gpt(**applied)),
        gradients(of_gpt(loss_chunks=chunks, **applied)),
    )
    assert whole.keys() == chunked.keys()
    torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-7)


def test_an_own_loss_gets_samples_with_all_tokens() -> None:
    train = TRAIN.model_copy(update={"loss": "tests.techniques.test_chunked_loss:of_last_token"})
    expected, chunked = (gradients(of_gpt(train=train, loss_chunks=chunks)) for chunks in (1, 3))
    torch.testing.assert_close(chunked, expected, rtol=1e-4, atol=1e-7)


def of_last_token(*, vocabulary: int) -> Any:
    assert vocabulary == VOCABULARY
    return lambda outputs, targets: nn.functional.cross_entropy(outputs[:, -1], targets[:, -1])


def test_a_single_row_is_one_chunk() -> None:
    train = TRAIN.model_copy(update={"loss": "tests.techniques.test_chunked_loss:of_last_token"})
    with pytest.raises(ConfigError, match="loss_chunks: found 3, but a micro-batch has a single row of outputs"):
        of_gpt(train=train, loss_chunks=3, gradient_accumulation=BATCH)
    assert of_gpt(loss_chunks=3, gradient_accumulation=BATCH)  # has a row for each token


def test_no_tensor_has_all_logits_or_repeats_products() -> None:
    sizes, flops = [], []
    for chunks in (1, 16):
        training = of_gpt(loss_chunks=chunks)
        with Counts() as counts, FlopCounterMode(display=False) as counter:
            training.step(training.batches.epoch(0))
        sizes.append(counts.largest)
        flops.append(counter.get_total_flops())
    assert sizes == [BATCH * LENGTH * VOCABULARY, VOCABULARY * GPT["width"]]  # logits; the layer's weights
    assert flops[0] == flops[1]


def test_in_bf16_the_sums_stay_float32() -> None:
    whole, chunked = (gradients(of_gpt(precision="bf16", loss_chunks=chunks)) for chunks in (1, 4))
    assert {gradient.dtype for gradient in chunked.values()} == {torch.float32}
    for name, expected in whole.items():
        assert (chunked[name] - expected).norm() <= 0.02 * expected.norm()


def test_ranks_train_a_tied_head_as_one_device() -> None:
    """The head and the embedding share their weights, whose gradient is the sum of the gradients of both."""
    cases = [{"parallelism": name, "loss_chunks": 4} for name in ("ddp", "fsdp", "tensor")]
    cases.append({"parallelism": "ddp", "loss_chunks": 4, "gradient_accumulation": 2})
    ((losses, test_loss),) = losses_of(ALONE, {})
    for rank in run_ranks(losses_of, *cases):
        for of_variant in rank:
            assert of_variant[0] == pytest.approx(losses, rel=1e-3)
            assert of_variant[1] == pytest.approx(test_loss, rel=1e-3)


def _refused_on_rank(joined: World, dataset: Dataset) -> str:
    training = make_training(dataset, joined, parallelism="fsdp", loss_chunks=2)
    with pytest.raises(ConfigError) as refused:
        training.advance(1)
    return str(refused.value)


def test_a_last_layer_whose_parameters_fsdp_frees_is_refused(digits: Dataset) -> None:
    assert all("last linear layer is in a block" in said for said in run_ranks(_refused_on_rank, digits))


def test_the_memory_with_chunks_is_predicted() -> None:
    made = [of_gpt(loss_chunks=chunks) for chunks in (1, 16)]
    for training in made:
        training.advance(2)
    (whole, _), (chunked, foreseen) = map(ledgers, made)
    assert foreseen.peak_bytes == pytest.approx(chunked.tensors_bytes, rel=0.05)
    logits = 4 * BATCH * LENGTH * VOCABULARY
    assert whole.tensors_bytes - chunked.tensors_bytes > 2 * logits  # of three: logits, log-softmax and its gradient
