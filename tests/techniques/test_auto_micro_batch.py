"""As many micro-batches as the memory asks for: with a model that runs out of it above so many samples, on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import benchmark, environment, job, results
from pipeline.checkpoints import checkpoint_file
from pipeline.config import PipelineError, parse, plan
from pipeline.results import Result
from tests.test_job import CPU_ONLY, PARAMS, PREPARED, workspace  # noqa: F401

GREEDY = """
import os
import torch, torch.distributed as dist
from torch import nn
from pipeline.models import build

class Greedy(nn.Module):
    def __init__(self, most, where, calls, **shape):
        super().__init__()
        self.net = nn.Sequential(build("small_cnn", {}, **shape), nn.BatchNorm1d(shape["classes"]), nn.Dropout(0.1))
        self.most, self.where, self.calls = most, where, calls

    def forward(self, images):
        rank = dist.get_rank() if dist.is_initialized() else 1
        greedy = self.training and rank == 1 and len(images) > self.most
        self.calls -= self.training
        if greedy and self.where == "forward" or self.calls == 0:
            raise torch.OutOfMemoryError("tried to allocate too much")
        logits = self.net(images)
        if greedy:
            logits.register_hook(self.fail)
        return logits

    def fail(self, gradient):
        raise torch.OutOfMemoryError("tried to allocate too much")

def net(most=8, where="forward", calls=-1, **shape):
    return Greedy(most, where, calls, **shape)
"""


def configure(model: dict[str, Any], variant: dict[str, Any], **train: Any) -> Any:
    Path("greedy_model.py").write_text(GREEDY, encoding="utf-8")
    settings = PARAMS["train"] | {"model": "greedy_model:net", "model_options": model, "seeds": [0], "epochs": 1}
    variants = {"tried": {"parallelism": "ddp"} | variant}
    params = PARAMS | {"train": settings | train, "variants": variants, "compare": {"baseline": "tried"}}
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    return parse(params)


def trained(model: dict[str, Any], accumulation: Any, **train: Any) -> Result:
    config = configure(model, {"gradient_accumulation": accumulation}, **train)
    job.run(config, "tried", CPU_ONLY, PREPARED)
    return results.read(results.result_file("tried"))


@pytest.mark.parametrize(
    ("most", "where", "batch_size", "micro_batches", "said"),
    [
        (16, "forward", 32, 1, "1 micro-batch(es) of 16 samples a process, which is all of its share"),
        (4, "forward", 32, 4, "4 micro-batch(es) of 4 samples a process, as 8 did not fit into a process's memory"),
        (4, "backward", 32, 4, "4 micro-batch(es) of 4 samples a process, as 8 did not fit into a process's memory"),
        (2, "forward", 36, 9, "9 micro-batch(es) of 2 samples a process, as 3 did not fit into a process's memory"),
    ],
)
def test_all_ranks_take_what_one_has_the_memory_for_and_the_weights_are_those_of_asking_for_it(
    workspace: Path,  # noqa: ARG001, F811
    most: int,
    where: str,
    batch_size: int,
    micro_batches: int,
    said: str,
) -> None:
    options = {"most": most, "where": where}
    found = trained(options, "auto", batch_size=batch_size, optimizer="adamw", learning_rate=0.01)
    asked = trained(options, micro_batches, batch_size=batch_size, optimizer="adamw", learning_rate=0.01)
    assert (found.micro_batches, found.batch_size, found.learning_rate) == (micro_batches, batch_size, 0.01)
    assert found.decided == {"auto_micro_batch": said}
    assert (asked.micro_batches, asked.decided) == (micro_batches, {})
    assert [run.model_sha256 for run in found.runs] == [run.model_sha256 for run in asked.runs]
    assert [run.test_loss for run in found.runs] == [run.test_loss for run in asked.runs]
    assert found.applied["gradient_accumulation"] == "auto"


def test_where_a_single_sample_does_not_fit_it_says_so(workspace: Path) -> None:  # noqa: ARG001, F811
    with pytest.raises(PipelineError, match=r"variants\.tried: a process runs out of memory with a single sample"):
        trained({"most": 0}, "auto")


def test_memory_that_runs_out_later_ends_the_job_with_what_to_do(workspace: Path) -> None:  # noqa: ARG001, F811
    problem = (
        r"variant tried, seed 0, epoch 1, step 6: out of memory with micro-batches of 8 samples a process "
        r"\(tried to allocate too much\)\. Set variants\.tried\.gradient_accumulation to 'auto'"
    )
    with pytest.raises(PipelineError, match=problem):
        trained({"calls": 12}, 2)


def test_a_job_that_goes_on_does_not_decide_anew(
    workspace: Path,  # noqa: ARG001, F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = {"gradient_accumulation": "auto", "parallelism": "none"}
    config = configure({"most": 4}, asked, seeds=[0, 1], epochs=2)
    job.run(config, "tried", CPU_ONLY, PREPARED)
    whole = results.read(results.result_file("tried"))
    save, saved = job.checkpoints.save, []

    def killed(state: dict[str, Any], path: Path) -> None:
        save(state, path)
        saved.append(path)
        if len(saved) == 4:  # an epoch, the end and the model of seed 0; an epoch of seed 1
            raise KeyboardInterrupt

    monkeypatch.setattr(job.checkpoints, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        job.run(config, "tried", CPU_ONLY, PREPARED)
    monkeypatch.undo()
    monkeypatch.setattr(job.Training, "fits", None)
    job.run(config, "tried", CPU_ONLY, PREPARED)
    resumed = results.read(results.result_file("tried"))
    assert saved[-1] == checkpoint_file("tried", 1)
    assert (resumed.micro_batches, resumed.decided) == (8, whole.decided)
    assert [run.model_sha256 for run in resumed.runs] == [run.model_sha256 for run in whole.runs]


def test_the_bench_takes_as_many(workspace: Path) -> None:  # noqa: ARG001, F811
    config = configure({"most": 8}, {"gradient_accumulation": "auto"})
    with benchmark.Server() as server:
        answer = server.measure("tried", config.variants["tried"].model_dump(mode="json"), 5, ledgers=True)
    assert (answer["micro_batches"], answer["batch_size"]) == (2, 32)
    assert json.loads(json.dumps(answer["decided"])) == {
        "auto_micro_batch": "2 micro-batch(es) of 8 samples a process, as 16 did not fit into a process's memory"
    }


def test_it_is_planned_as_one_micro_batch_and_excludes_what_waits_in_the_forward_pass() -> None:
    values = {"gradient_accumulation": "auto", "parallelism": "ddp"}
    made = plan(parse({"variants": {"baseline": values}}), "baseline", CPU_ONLY)
    assert (made.micro_batches, made.micro_batch_size, made.decided) == (1, 128, {})
    assert list(made.applied.techniques()) == ["ddp", "auto_micro_batch"]


@pytest.mark.gpu
def test_a_gpu_with_little_memory_takes_more_micro_batches(
    workspace: Path,  # noqa: ARG001, F811
) -> None:
    import torch

    train = {
        "device": "cuda",
        "seeds": [0],
        "epochs": 1,
        "batch_size": 1024,
        "model": "resnet18",
        "warmup_fraction": 0.0,
    }
    params = PARAMS | {"train": PARAMS["train"] | train, "compare": {"baseline": "asked"}}
    found: dict[Any, Result] = {}
    torch.cuda.set_per_process_memory_fraction(2**29 / torch.cuda.get_device_properties(0).total_memory)
    try:
        for accumulation in ("auto", None):
            values = {"gradient_accumulation": accumulation or found["auto"].micro_batches}
            config = parse(params | {"variants": {"asked": values}})
            Path("params.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
            job.run(config, "asked", environment.machine(), PREPARED)
            found[accumulation] = results.read(results.result_file("asked"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found["auto"].micro_batches > 1
    assert [run.model_sha256 for run in found["auto"].runs] == [run.model_sha256 for run in found[None].runs]
    assert all(run.allocator_retries == 0 for run in found["auto"].runs)
