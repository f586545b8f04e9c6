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
    installed = frozenset({"bitsandbytes"})
    return Machine(gpus=count, gpu_native_bf16=True, cpu_native_bf16=True, gpu_tf32=True, installed=installed)


def planned(variant: dict[str, Any], count: int, **train: Any) -> Plan | None:
    """Return the plan on ``count`` GPUs; None if a message refuses the variant and names the key. Assert that the plan
    uses only GPUs that exist, and the whole batch."""
    config = {"train": train, "compare": {"baseline": "tried"}, "variants": {"tried": variant}}
    try:
        made = plan(parse(config), "tried", gpus(count))
    except ConfigError as error:
        if not str(error).removeprefix("params.yaml: ").startswith(("variants.tried", "train.")):
            raise
        return None
    assert 1 <= made.processes <= count
    assert made.processes % made.model_processes == 0
    assert 1 <= made.devices_per_process <= count
    assert made.micro_batch_size * made.data_processes * made.micro_batches == made.train.batch_size
    assert made.micro_batch_size >= 1
    return made


@pytest.mark.parametrize("parallelism", PARALLELISMS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_each_parallelism_is_planned_or_refused(parallelism: str, count: int) -> None:
    choices: list[list[Any]] = [[1, 2, 3, 4, 8], [1, 4, 7, "auto"], ["strong", "weak"], ["auto", 1, 2, 8]]
    plans = []
    for replicas, micro_batches, scaling, processes in itertools.product(*choices):
        variant = {"parallelism": parallelism, "replicas": replicas, "gradient_accumulation": micro_batches,
                   "scaling": scaling, "processes": processes}  # fmt: skip
        plans += [planned(variant, count, batch_size=size) for size in (256, 250, 7)]
    assert any(plans)


@pytest.mark.parametrize("count", range(1, 17))
def test_each_ready_made_variant_is_planned_or_refused(count: int) -> None:
    for name, variant in READY_MADE:
        for optimizer in ("sgd", "adamw"):
            planned(SETS[name][variant], count, optimizer=optimizer)
