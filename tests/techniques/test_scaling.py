from __future__ import annotations

from typing import Any

import pytest

from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.errors import ConfigError
from pipeline.params import Machine, parse
from pipeline.plans import plan
from tests.nets import ALONE, assembly_of, batches_of, conv_net, task_of, training_of
from tests.ranks import run_ranks
from tests.test_training import TRAIN

CPU = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=False)
GPUS = Machine(gpus=8, gpu_native_bf16=True, cpu_native_bf16=True)
WEAK = {"parallelism": "ddp", "scaling": "weak"}


def made(machine: Machine, *, train: dict[str, Any] | None = None, **values: Any) -> Any:
    config = parse({"train": train or {}, "variants": {"baseline": {}, "weak": WEAK | values}})
    found = plan(config, "weak", machine)
    return found, found.train


def test_each_process_takes_the_batch_and_the_rate_grows_with_them() -> None:
    found, job = made(GPUS, train={"batch_size": 100, "learning_rate": 0.1}, gradient_accumulation=4)
    assert (found.processes, found.scale, found.micro_batches, found.micro_batch_size) == (8, 8, 4, 25)
    assert (job.batch_size, job.learning_rate) == (800, pytest.approx(0.8))
    assert found.skipped == {}, "no GPU is left out for a batch that does not divide among them"


def test_strong_scaling_leaves_the_job_as_it_is() -> None:
    found, job = made(GPUS, train={"batch_size": 256}, scaling="strong")
    assert (found.scale, found.micro_batch_size, job.batch_size, job.learning_rate) == (1, 32, 256, 0.1)


def _train(joined: World, dataset: Dataset, weak: bool) -> tuple[list[float], list[float], int]:
    """Return the losses, the learning rates and the number of steps of a run."""
    size = 32 if weak else 64
    config = parse({
        "train": TRAIN.model_dump() | {"batch_size": size, "learning_rate": 0.05 if weak else 0.1},
        "variants": {"baseline": WEAK if weak else {}},
    })  # fmt: skip
    found = plan(config, "baseline", CPU)
    training = training_of(found, conv_net(), task_of(dataset, found.train), batches_of(dataset, found, joined), joined)
    rows = [row for row in training.run() if row]
    return [row.train_loss for row in rows], [row.learning_rate for row in rows], training.steps


def test_two_ranks_train_as_one_device_with_twice_the_batch_and_rate(digits: Dataset) -> None:
    losses, rates, steps = _train(ALONE, digits, False)
    assert steps == 2 * (len(digits.train) // 64)
    for rank_losses, rank_rates, rank_steps in run_ranks(_train, digits, True):
        assert rank_losses == pytest.approx(losses, rel=1e-3)
        assert rank_rates == pytest.approx(rates)
        assert rank_steps == steps


def _beyond_the_data(joined: World, dataset: Dataset) -> str:
    config = parse({"train": {"batch_size": 1000}, "variants": {"baseline": WEAK}})
    made = plan(config, "baseline", CPU)
    with (
        pytest.raises(ConfigError) as caught,
        assembly_of(made, joined, dataset).training(0),
    ):
        pass
    return str(caught.value)


def test_a_batch_that_outgrows_the_data_is_refused_in_the_user_s_terms(digits: Dataset) -> None:
    for said in run_ranks(_beyond_the_data, digits):
        assert said.startswith("variants.baseline.scaling: found 'weak'")
        assert "allowed: 'strong', or a train.batch_size of at most 719" in said
