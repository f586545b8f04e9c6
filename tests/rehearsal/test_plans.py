"""Plans for one to sixteen GPUs: a plan or a ConfigError, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest

from pipeline.errors import ConfigError
from pipeline.params import Machine, Variant, parse
from pipeline.plans import Plan, plan
from tests.rehearsal.jobs import READY_MADE, SETS

PARALLELISMS = get_args(Variant.model_fields["parallelism"].annotation)


def gpus(count: int) -> Machine:
    return Machine(
        gpus=count, gpu_native_bf16=True, cpu_native_bf16=True, gpu_tf32=True, installed=frozenset({"bitsandbytes"})
    )


def check(made: Plan, count: int) -> None:
    """Assert that the plan uses only GPUs that exist, and takes the requested batch."""
    assert 1 <= made.processes <= count
    assert made.processes % made.model_processes == 0
    assert 1 <= made.devices_per_process <= count
    shares = made.data_processes * made.micro_batches
    assert made.micro_batch_size * shares == made.train.batch_size
    assert made.micro_batch_size >= 1


@pytest.mark.parametrize("parallelism", PARALLELISMS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_each_parallelism_on_any_number_of_gpus_is_planned_or_refused(parallelism: str, count: int) -> None:
    planned = 0
    choices: list[list[Any]] = [
        [1, 2, 3, 4, 8],
        [1, 4, 7, "auto"],
        ["strong", "weak"],
        ["auto", 1, 2, 8],
        [256, 250, 7],
    ]
    for replicas, micro_batches, scaling, processes, batch_size in itertools.product(*choices):
        values = {"parallelism": parallelism, "replicas": replicas, "gradient_accumulation": micro_batches,
                  "scaling": scaling, "processes": processes}  # fmt: skip
        try:
            config = parse(
                {"train": {"batch_size": batch_size}, "compare": {"baseline": "x"}, "variants": {"x": values}}
            )
            made = plan(config, "x", gpus(count))
        except ConfigError:
            continue
        check(made, count)
        planned += 1
    assert planned


@pytest.mark.parametrize("count", range(1, 17))
def test_each_ready_made_variant_is_planned_or_refused_with_its_name(count: int) -> None:
    refused: dict[str, str] = {}
    for name, variant in READY_MADE:
        for optimizer in ("sgd", "adamw"):
            config = parse(
                {
                    "train": {"optimizer": optimizer},
                    "compare": {"baseline": variant},
                    "variants": {variant: SETS[name][variant]},
                }
            )
            try:
                made = plan(config, variant, gpus(count))
            except ConfigError as error:
                refused[str(error)] = variant
            else:
                check(made, count)
    assert all(said.startswith((f"variants.{variant}.", "train.")) for said, variant in refused.items())
