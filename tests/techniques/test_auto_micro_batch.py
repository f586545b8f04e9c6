"""The automatic number of micro-batches, tested with a model that runs out of memory above a number of samples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn

from pipeline import environment, results
from pipeline.benchmark.server import Server
from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.errors import PipelineError
from pipeline.params import Config, parse, techniques
from pipeline.plans import plan
from pipeline.results import Result
from pipeline.training import checkpoints, job
from pipeline.training.checkpoints import checkpoint_file
from pipeline.training.failures import is_out_of_memory
from pipeline.training.loop import Training
from tests.conftest import ROOT
from tests.nets import assembly_of
from tests.ranks import run_ranks
from tests.test_job import CPU_ONLY, PARAMS, workspace  # noqa: F401
from tests.test_training import make_training, weights
from tests.workspaces import PREPARED


class Greedy(nn.Module):
    """Raises an out-of-memory error in training: on rank 1 with more than ``most`` samples, and on any rank in call
    number ``calls``."""

    def __init__(
        self, channels: int, pixels: int, classes: int, most: int, where: str, calls: int, compares: bool
    ) -> None:
        super().__init__()
        linear = nn.Linear(channels * pixels, classes)
        compared = nn.BatchNorm1d(classes) if compares else nn.Identity()
        self.net = nn.Sequential(nn.BatchNorm2d(channels), nn.Flatten(), nn.Dropout(0.1), linear, compared)
        self.most, self.where, self.calls = most, where, calls

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 1
        greedy = self.training and torch.is_grad_enabled() and rank == 1 and len(images) > self.most
        self.calls -= self.training
        if (greedy and self.where == "forward") or self.calls == 0:
            _fail()
        logits: torch.Tensor = self.net(images)
        if greedy and logits.requires_grad:
            logits.register_hook(_fail)
        return logits


def _fail(_: torch.Tensor | None = None) -> None:
    raise torch.OutOfMemoryError("tried to allocate too much")


def net(
    *,
    channels: int,
    height: int,
    width: int,
    classes: int,
    most: int = 8,
    where: str = "forward",
    calls: int = -1,
    compares: bool = False,
) -> nn.Module:
    """Return a ``Greedy`` model. With ``compares``, it cannot train with a single sample."""
    return Greedy(channels, height * width, classes, most, where, calls, compares)


def configure(model: dict[str, Any], variant: dict[str, Any], **train: Any) -> Config:
    settings = PARAMS["train"] | {"model": f"{__name__}:net", "model_options": model, "seeds": [0], "epochs": 1}
    return parse(PARAMS | {"train": settings | train, "compare": {"baseline": "tried"}, "variants": {"tried": variant}})


Try = tuple[dict[str, Any], Any, int]
"""Options of the model, setting gradient_accumulation, and samples of a global batch."""
Outcome = tuple[str, int, dict[str, str]] | str
"""Digest of the final weights, number of micro-batches, and decisions; or the error message."""


def _train(joined: World, dataset: Dataset, tries: list[Try]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for model, accumulation, batch_size in tries:
        variant = {"parallelism": "ddp", "gradient_accumulation": accumulation}
        config = configure(model, variant, batch_size=batch_size, optimizer="adamw", learning_rate=0.01)
        made = plan(config, "tried", CPU_ONLY)
        try:
            with assembly_of(made, joined, dataset).training(0) as training:
                list(training.run())
                outcomes.append((weights(training), training.plan.micro_batches, training.plan.decided))
        except PipelineError as error:
            outcomes.append(str(error))
    return outcomes


def test_ranks_agree_on_micro_batches_that_fit_and_train_as_with_the_number_requested(digits: Dataset) -> None:
    fits = "micro-batches of {} samples per process, because {} did not fit into its memory"
    cases: list[tuple[dict[str, Any], int, int, str]] = [
        ({"most": 64}, 128, 1, "1 micro-batch of 64 samples per process, which is its whole share"),
        ({"most": 16}, 128, 4, f"4 {fits.format(16, 32)}"),
        ({"most": 16, "where": "backward"}, 128, 4, f"4 {fits.format(16, 32)}"),
        ({"most": 30}, 144, 3, f"3 {fits.format(24, 36)}"),
    ]
    tries: list[Try] = []
    for model, batch_size, micro_batches, _ in cases:
        tries += [(model, "auto", batch_size), (model, micro_batches, batch_size)]
    main, other = run_ranks(
        _train, digits, [*tries, ({"most": 0, "where": "backward"}, "auto", 128), ({"most": 32, "calls": 13}, 2, 128)]
    )
    *outcomes, too_large, later = main
    for (_, _, micro_batches, said), found, asked in zip(cases, outcomes[::2], outcomes[1::2], strict=True):
        assert found[1:] == (micro_batches, {"auto_micro_batch": said})
        assert asked == (found[0], micro_batches, {})
    assert other[:-2] == outcomes
    assert too_large.startswith("variants.tried.gradient_accumulation: found 'auto', but even 64 micro-batches of 1 ")
    assert later.startswith(
        "variant tried, seed 0, epoch 1, step 6: out of memory with micro-batches of 32 samples per process "
        "(tried to allocate too much). Set variants.tried.gradient_accumulation to 'auto', "
    )


def test_the_batch_is_not_divided_into_parts_too_small_for_batchnorm(digits: Dataset) -> None:
    """With one sample, rank 1 runs out of memory before it reaches the BatchNorm layer that fails on rank 0."""
    tries: list[Try] = [({"most": 0, "compares": True}, "auto", 16), ({"most": 8, "compares": True}, "auto", 2)]
    main, other = run_ranks(_train, digits, tries)
    assert main == other
    divided, never_fitted = main
    assert "variants.tried.gradient_accumulation: found 'auto', but even 4 micro-batches of 2 samples " in divided
    assert "BatchNorm" in divided
    assert "train.model: found 'tests.techniques.test_auto_micro_batch:net'" in never_fitted
    assert "1 sample " in never_fitted


_NO_ENGINE = "was unable to find an engine to execute this computation"
_OF_NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:94, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.30.7\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure"
)


@pytest.mark.parametrize(
    ("said", "free", "fits"),
    [
        ("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to", 0.9, False),
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", 0.9, False),
        ("CUDA driver error: out of memory", 0.9, False),
        ("CUDA ran out of memory outside PyTorch's allocator. If this workload uses many", 0.9, False),
        ("Triton Error [CUDA]: out of memory", 0.9, False),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", 0.9, False),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", 0.9, False),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", 0.9, False),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", 0.9, False),
        (f"{_OF_NCCL} 2 'out of memory'", 0.9, False),
        (f"{_OF_NCCL} 'out of memory'", 0.9, False),
        (f"GET {_NO_ENGINE}", 0.01, False),
        (f"FIND {_NO_ENGINE}", 0.01, False),
        (f"GET {_NO_ENGINE}", 0.9, None),
        (f"{_OF_NCCL} 700 'an illegal memory access was encountered'", 0.01, None),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle, opa, opb)`", 0.01, None),
    ],
)
def test_out_of_memory_errors_of_libraries_are_recognised(
    said: str, free: float, fits: bool | None, digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If ``fits`` is None, the error has another cause and must be raised again."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * 2**30, 2**30))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    training = make_training(digits)

    def fail(*_: Any) -> None:
        raise RuntimeError(said)

    training.step.forward = fail  # type: ignore[assignment]
    if fits is None:
        with pytest.raises(RuntimeError, match=re.escape(said)):
            training.fits()
    else:
        assert training.fits() is fits


def test_a_process_limited_to_a_part_of_a_gpu_runs_out_of_this_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**33, 2**34))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 2.0**-5)
    for reserved, out in ((2**28, False), (2**29 - 2**20, True)):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda reserved=reserved: reserved)
        assert is_out_of_memory(RuntimeError(f"GET {_NO_ENGINE}")) is out


def _without_memory_for_the_update(joined: World, dataset: Dataset) -> str:
    if joined.rank == 1:
        vars(torch.optim)["AdamW"] = _Hungry  # this process ends with the test
    variant = {"parallelism": "zero1", "gradient_accumulation": "auto"}
    made = plan(configure({"most": 64}, variant, optimizer="adamw", batch_size=8), "tried", CPU_ONLY)
    try:
        with assembly_of(made, joined, dataset).training(0):
            return "there was memory"
    except PipelineError as error:
        return str(error)


class _Hungry(torch.optim.AdamW):
    def step(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
        _fail()


def test_if_one_rank_runs_out_of_memory_in_its_update_no_other_rank_waits(digits: Dataset) -> None:
    said = run_ranks(_without_memory_for_the_update, digits)
    assert all("even 4 micro-batches of 1 sample do not fit" in each for each in said)


@pytest.mark.slow
def test_a_resumed_job_does_not_decide_anew(
    workspace: Path,  # noqa: ARG001, F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = configure({"most": 4}, {"gradient_accumulation": "auto"}, seeds=[0, 1], epochs=2)
    job.run(config, "tried", CPU_ONLY, PREPARED)
    whole = results.read(results.result_file("tried"), config)
    assert (whole.micro_batches, whole.batch_size, whole.learning_rate) == (8, 32, 0.05)
    assert whole.applied["gradient_accumulation"] == "auto"
    save, saved = checkpoints.save, []

    def killed(state: dict[str, Any], path: Path) -> None:
        save(state, path)
        saved.append(path)
        if len(saved) == 4:  # after an epoch, the end and the model of seed 0, and an epoch of seed 1
            raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(checkpoints, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            job.run(config, "tried", CPU_ONLY, PREPARED)
    monkeypatch.setattr(Training, "fits", None)
    job.run(config, "tried", CPU_ONLY, PREPARED)
    resumed = results.read(results.result_file("tried"), config)
    assert saved[-1] == checkpoint_file("tried", 1)
    assert (resumed.micro_batches, resumed.decided) == (8, whole.decided)
    assert [run.model_sha256 for run in resumed.runs] == [run.model_sha256 for run in whole.runs]


@pytest.mark.slow
def test_the_bench_also_chooses_the_number_of_micro_batches(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001, F811
    config = configure({"most": 8}, {"gradient_accumulation": "auto"})
    Path("params.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Server() as server:
        answer = server.measure("tried", server.plan("tried", config.variants["tried"].model_dump(mode="json")), 5)
    assert (answer["micro_batches"], answer["batch_size"]) == (4, 32)
    assert answer["decided"] == {
        "auto_micro_batch": "4 micro-batches of 8 samples per process, because 16 did not fit into its memory"
    }


def test_auto_is_planned_as_one_micro_batch() -> None:
    values = {"gradient_accumulation": "auto", "parallelism": "ddp"}
    made = plan(parse({"variants": {"baseline": values}}), "baseline", CPU_ONLY)
    assert (made.micro_batches, made.micro_batch_size, made.decided) == (1, 128, {})
    assert list(techniques(made.applied)) == ["ddp", "auto_micro_batch"]


@pytest.mark.gpu
def test_on_a_gpu_with_little_memory_more_micro_batches_are_chosen(
    workspace: Path,  # noqa: ARG001, F811
) -> None:
    train = {
        "device": "cuda",
        "seeds": [0],
        "epochs": 4,
        "batch_size": 1024,
        "model": "small_cnn",
        "warmup_fraction": 0.0,
        "warmup_steps": 1,
    }
    params = PARAMS | {"train": PARAMS["train"] | train, "compare": {"baseline": "asked"}}
    found: dict[Any, Result] = {}
    try:
        for accumulation in (1, "auto", None):
            values = {"gradient_accumulation": accumulation or found["auto"].micro_batches}
            config = parse(params | {"variants": {"asked": values}})
            Path("params.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
            job.run(config, "asked", environment.machine(), PREPARED)
            found[accumulation] = results.read(results.result_file("asked"), config)
            if accumulation == 1:
                needed = found[1].runs[0].peak_memory_bytes
                assert needed
                total = torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction(0.9 * needed / total)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found["auto"].micro_batches > 1
    assert [run.model_sha256 for run in found["auto"].runs] == [run.model_sha256 for run in found[None].runs]
    assert all(run.allocator_retries == 0 for run in found["auto"].runs)
