"""Small jobs for simulated GPUs: the ready-made variants, and what their steps wait for and send."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipeline import results
from pipeline.params import CATALOGUE, Config, Machine, Variant, load, parse, requested
from pipeline.results import Result
from pipeline.step import TrainingStep
from pipeline.tools import choices
from pipeline.training import job
from tests.as_if_cuda import Traffic, played
from tests.conftest import ROOT
from tests.factories import alone
from tests.workspaces import PREPARED, furnish

STEPS = 16
PARAMS: dict[str, Any] = {
    "fetch": {"dataset": "digits"},
    "prepare": {"train_limit": 256, "test_limit": 64},
    "train": {"seeds": [0], "epochs": 2, "batch_size": 32, "learning_rate": 0.05, "warmup_steps": 4,
              "history_every_steps": 6, "checkpoint_every_steps": 3},
    "publish": {"live": False},
    "variants": {"baseline": {}},
}  # fmt: skip
SETS: dict[str, dict[str, dict[str, Any]]] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "variants").glob("*.yaml"))
}


def _unnamed() -> dict[str, dict[str, Any]]:
    """Return a variant for each technique that needs a GPU, runs alone, and that no ready-made variant uses."""
    able = Machine(gpus=1, gpu_native_bf16=True, cpu_native_bf16=True, gpu_tf32=True, gpu_float8=True)
    variants = (Variant(**values) for variants in SETS.values() for values in variants.values())
    named = {technique.name for variant in variants for technique in requested(variant)}
    return {
        technique.name: alone(technique)
        for technique in CATALOGUE
        if technique.name not in named
        and technique.why_not(able, False)
        and not technique.why_refused(Variant(**alone(technique)), able, on_gpu=True)
    }


if unnamed := _unnamed():
    SETS["unnamed"] = unnamed
LANGUAGE_MODEL: dict[str, dict[str, Any]] = {
    "baseline": {},
    "stack": {"precision": "bf16", "attention": "flash", "loss_chunks": 4, "activation_checkpointing": "selective"},
    "float8": {"precision": "float8"},
    "flex": {"precision": "bf16", "attention": "flex", "compile": "blocks", "optimizer": "muon"},
}
"""Variants that train a language model: FlexAttention needs ``compile``, so it is in no set."""
READY_MADE = [(set_name, name) for set_name, variants in SETS.items() for name in variants]
"""Pairs of a set's name and a variant's name."""


@dataclass
class Step:
    """A training step on one rank."""

    waits: list[str] = field(default_factory=list)
    """The lines of code at which the host waited for the simulated GPU."""
    sent: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Kind of collective -> number of calls, number of bytes."""


def job_of(variant: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of ``train`` that a variant needs: another optimizer, or a model with BatchNorm."""
    changes: dict[str, Any] = {}
    if variant.keys() & {"optimizer", "optimizer_state"}:
        changes |= {"optimizer": "adamw", "learning_rate": 0.003}
    if "sync_batchnorm" in variant:
        changes |= {"model": "tests.nets:normed_net"}
    return changes


def furnished(
    folder: Path, variants: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **train: Any
) -> Config:
    """Make ``folder``, which must be the current directory, a checkout in which training can run.

    ``data``: sections of params.yaml for another data set than the digits. For simulated GPUs, call this function
    inside ``as_if_cuda``.
    """
    params = PARAMS | (data or {}) | {"train": PARAMS["train"] | train}
    if variants:
        params |= {"variants": variants, "compare": {"baseline": next(iter(variants))}}
    (folder / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    (folder / "variants").mkdir(exist_ok=True)
    for name, values in SETS.items():
        (folder / "variants" / f"{name}.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    config = parse(params)
    furnish(config)
    return config


def offered(name: str, variant: str, machine: Machine) -> Config | None:
    """Run ``variants NAME --add`` and return the new config; None if the command did not offer the variant."""
    choices.show_variants(machine, name, add=True)
    config = load()
    return config if variant in config.variants else None


@contextmanager
def watched(steps: list[Step]) -> Iterator[None]:
    """While the block runs, record for each training step its waits (on simulated GPUs) and its communication."""
    take, waits = TrainingStep.__call__, played().waits

    def noted(step: TrainingStep, micro_batches: Any) -> None:
        before = len(waits)
        torch.cuda.set_sync_debug_mode("warn")
        with Traffic() as traffic:
            take(step, micro_batches)
        torch.cuda.set_sync_debug_mode("default")
        sent = {kind: (count, traffic.bytes[kind]) for kind, count in traffic.calls.items()}
        steps.append(Step(waits[before:], sent))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStep, "__call__", noted)
        yield


def train(config: Config, name: str, machine: Machine) -> list[Step]:
    """Train ``variants.<name>`` in this process, which may be one of several ranks; return its steps."""
    steps: list[Step] = []
    with watched(steps):
        job.run(config, name, machine, PREPARED)
    return steps


def result_of(config: Config, name: str) -> Result:
    return results.read(results.result_file(name), config)


def on_rank(config: Config, name: str, machine: Machine, folder: Path) -> Generator[list[Step], None, None]:
    os.chdir(folder)
    torch.set_num_threads(1)
    yield train(config, name, machine)
