"""The automatic number of micro-batches, tested with a model that runs out of memory above a number of samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn

from pipeline import environment, results
from pipeline.benchmark.rounds import calibrate
from pipeline.benchmark.server import ArmSpec, Server
from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.errors import PipelineError
from pipeline.params import Config, parse, techniques
from pipeline.plans import plan
from pipeline.results import Result
from pipeline.training import checkpoints, job
from pipeline.training.checkpoints import checkpoint_file
from pipeline.training.loop import Training
from pipeline.training.outcomes import is_out_of_memory
from tests.conftest import ROOT
from tests.nets import LooksAtValues, assembly_of
from tests.ranks import run_ranks
from tests.trainings import make_training, weights
from tests.workspaces import CPU_ONLY, PARAMS, PREPARED


class Greedy(nn.Module):
    """Raises an out-of-memory error in training: on rank 1, or without ranks, with more than ``most`` samples; on any
    rank in call number ``calls``. With ``compares``, it cannot train with a single sample."""

    def __init__(
        self, *, most: int = 8, where: str = "forward", calls: int = -1, compares: bool = False, **sizes: int
    ) -> None:
        super().__init__()
        assert sizes == {"channels": 1, "height": 8, "width": 8, "classes": 10}
        compared = nn.BatchNorm1d(10) if compares else nn.Identity()
        self.net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10), compared)
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


def configure(model: dict[str, Any], variant: dict[str, Any], **train: Any) -> Config:
    settings = PARAMS["train"] | {"model": f"{__name__}:Greedy", "model_options": model, "seeds": [0], "epochs": 1}
    return parse(PARAMS | {"train": settings | train, "compare": {"baseline": "tried"}, "variants": {"tried": variant}})


Try = tuple[dict[str, Any], Any, int]
"""Options of the model, the value of gradient_accumulation, and the samples of a global batch."""
Outcome = tuple[str, int, dict[str, str]] | str
"""Digest of the final weights, number of micro-batches, and decisions; or the error message."""


def _train(joined: World, dataset: Dataset, tries: list[Try], parallelism: str = "ddp") -> list[Outcome]:
    outcomes: list[Outcome] = []
    for model, accumulation, batch_size in tries:
        variant = {"parallelism": parallelism, "gradient_accumulation": accumulation}
        config = configure(model, variant, batch_size=batch_size, optimizer="adamw", learning_rate=0.01)
        made = plan(config, "tried", CPU_ONLY)
        try:
            with assembly_of(made, joined, dataset).training(0) as training:
                list(training.run())
                outcomes.append((weights(training), training.plan.micro_batches, training.plan.decided))
        except PipelineError as error:
            outcomes.append(str(error))
    return outcomes


def test_ranks_agree_on_micro_batches_that_fit(digits: Dataset) -> None:
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
    outcomes, others = run_ranks(_train, digits, tries)
    for (_, _, micro_batches, said), parts, asked in zip(cases, outcomes[::2], outcomes[1::2], strict=True):
        assert parts[1:] == (micro_batches, {"auto_micro_batch": said})
        assert asked == (parts[0], micro_batches, {})
    assert others == outcomes


def test_ranks_agree_that_no_number_fits(digits: Dataset) -> None:
    """Parts must not be too small for BatchNorm: with one sample, rank 1 runs out of memory before it reaches the
    BatchNorm layer that fails on rank 0."""
    tries: list[Try] = [({"most": 0, "where": "backward"}, "auto", 128), ({"most": 32, "calls": 11}, 2, 128)]
    tries += [({"most": 0, "compares": True}, "auto", 16), ({"most": 8, "compares": True}, "auto", 2)]
    (too_large, later, divided, never_fitted), others = run_ranks(_train, digits, tries)
    assert too_large.startswith("variants.tried.gradient_accumulation: found 'auto', but even 64 micro-batches of 1 ")
    assert later.startswith(
        "variant tried, seed 0, epoch 1, step 6: out of memory with micro-batches of 32 samples per process "
        "(tried to allocate too much). Set variants.tried.gradient_accumulation to 'auto', "
    )
    assert "variants.tried.gradient_accumulation: found 'auto', but even 4 micro-batches of 2 samples " in divided
    assert "BatchNorm" in divided
    assert "train.model: found 'tests.techniques.test_auto_micro_batch:Greedy'" in never_fitted
    assert "1 sample " in never_fitted
    assert others[0] == too_large
    assert others[2:] == [divided, never_fitted]


_NO_ENGINE = "was unable to find an engine to execute this computation"
_OF_NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:94, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.30.7\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure"
)


@pytest.mark.parametrize(
    ("said", "free", "out"),
    [
        ("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to", 0.9, True),
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", 0.9, True),
        ("CUDA driver error: out of memory", 0.9, True),
        ("CUDA ran out of memory outside PyTorch's allocator. If this workload uses many", 0.9, True),
        ("Triton Error [CUDA]: out of memory", 0.9, True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", 0.9, True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", 0.9, True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", 0.9, True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", 0.9, True),
        (f"{_OF_NCCL} 2 'out of memory'", 0.9, True),
        (f"{_OF_NCCL} 'out of memory'", 0.9, True),
        (f"GET {_NO_ENGINE}", 0.01, True),
        (f"FIND {_NO_ENGINE}", 0.01, True),
        (f"GET {_NO_ENGINE}", 0.9, False),
        (f"{_OF_NCCL} 700 'an illegal memory access was encountered'", 0.01, False),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle, opa, opb)`", 0.01, False),
    ],
)
def test_out_of_memory_errors_of_libraries_are_recognised(
    said: str, free: float, out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``free``: the free share of the GPU's memory, or of the memory to which the process is limited."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 2.0**-5)
    for of_gpu, of_limit in ((free, 1.0), (1.0, free)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda of_gpu=of_gpu: (of_gpu * 2**34, 2**34))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda of_limit=of_limit: (1 - of_limit) * 2**29)
        assert is_out_of_memory(RuntimeError(said)) is out


def test_another_failure_of_a_step_raises_its_error(digits: Dataset) -> None:
    training = make_training(digits, model=LooksAtValues(nn.Linear(3, 3)))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        training.fits()


class _Hungry(torch.optim.AdamW):
    def step(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
        _fail()


def _without_memory_for_the_update(joined: World, dataset: Dataset) -> list[Outcome]:
    if joined.rank == 1:
        vars(torch.optim)["AdamW"] = _Hungry  # this process ends with the test
    return _train(joined, dataset, [({"most": 64}, "auto", 8)], "zero1")


def test_no_rank_waits_for_one_without_memory(digits: Dataset) -> None:
    said = run_ranks(_without_memory_for_the_update, digits)
    assert all("even 4 micro-batches of 1 sample do not fit" in message for [message] in said)


@pytest.mark.slow
@pytest.mark.usefixtures("workspace")
def test_a_resumed_job_does_not_decide_anew(monkeypatch: pytest.MonkeyPatch) -> None:
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
@pytest.mark.usefixtures("workspace")
def test_the_bench_also_chooses_the_number_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure({"most": 8}, {"gradient_accumulation": "auto"})
    Path("params.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Server() as server:
        sent = server.plan("tried", config.variants["tried"].model_dump(mode="json"))
        answer = calibrate(ArmSpec.of_variant("tried", server, sent), 5).answer
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
@pytest.mark.usefixtures("workspace")
def test_little_gpu_memory_means_more_micro_batches() -> None:
    train = {"device": "cuda", "seeds": [0], "epochs": 4, "batch_size": 1024, "model": "small_cnn"}
    train |= {"warmup_fraction": 0.0, "warmup_steps": 1}
    params = PARAMS | {"train": PARAMS["train"] | train, "compare": {"baseline": "asked"}}
    by_memory: dict[Any, Result] = {}
    try:
        for accumulation in (1, "auto", None):
            values = {"gradient_accumulation": accumulation or by_memory["auto"].micro_batches}
            config = parse(params | {"variants": {"asked": values}})
            Path("params.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
            job.run(config, "asked", environment.machine(), PREPARED)
            by_memory[accumulation] = results.read(results.result_file("asked"), config)
            if accumulation == 1:
                needed = by_memory[1].runs[0].peak_memory_bytes
                assert needed
                total = torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction(0.9 * needed / total)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (by_memory["auto"].micro_batches or 0) > 1
    assert [run.model_sha256 for run in by_memory["auto"].runs] == [run.model_sha256 for run in by_memory[None].runs]
    assert all(run.allocator_retries == 0 for run in by_memory["auto"].runs)
