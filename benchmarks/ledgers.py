"""Compare predicted memory ledgers with measured ones: is a variant's memory known before the variant runs?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.stages import pack
from pipeline import environment, tasks
from pipeline.data.prepared import read
from pipeline.distributed import forked
from pipeline.params import parse
from pipeline.plans import Plan, plan
from pipeline.profiling import ledger, prediction
from pipeline.results import Ledger
from pipeline.training.assembly import assembled

WARM_STEPS, MEASURED_STEPS = 2, 2
GRAY: dict[str, Any] = {"shape": [1, 28, 28]}
COLOUR: dict[str, Any] = {"shape": [3, 32, 32]}
TEXT: dict[str, Any] = {"shape": [129], "targets": "tokens", "classes": 257}
TABLE: dict[str, Any] = {"shape": [64], "targets": "floats", "dtype": "float32"}
"""Settings of the synthetic data sets: images, windows of tokens, and rows of a table with numbers to predict."""
STACK = {"precision": "bf16", "channels_last": True, "activation_checkpointing": True, "gradient_accumulation": 4}
VIT = {"model_options": {"image_size": 96}}
GPT = {
    "task": "language_model", "optimizer": "adamw", "learning_rate": 0.001,
    "model_options": {"width": 128, "depth": 4, "heads": 4},
}  # fmt: skip

CASES: dict[str, tuple[dict[str, Any], str, int, dict[str, Any], dict[str, Any]]] = {
    "small_cnn": (GRAY, "small_cnn", 256, {}, {}),
    "small_cnn, ddp": (GRAY, "small_cnn", 256, {"parallelism": "ddp"}, {}),
    "small_cnn, ddp and accumulation": (
        *(GRAY, "small_cnn", 256),
        *({"parallelism": "ddp", "gradient_accumulation": 2}, {}),
    ),
    "small_cnn, memory stack": (GRAY, "small_cnn", 256, STACK, {}),
    "resnet9": (COLOUR, "resnet9", 64, {}, {}),
    "resnet9, channels_last": (COLOUR, "resnet9", 64, {"channels_last": True}, {}),
    "resnet9, checkpointing, accumulation, adamw": (
        *(COLOUR, "resnet9", 64),
        *({"activation_checkpointing": True, "gradient_accumulation": 2}, {"optimizer": "adamw"}),
    ),
    "resnet9, bf16": (COLOUR, "resnet9", 16, {"precision": "bf16"}, {"model_options": {"base_width": 16}}),
    "resnet18": (COLOUR, "resnet18", 64, {}, {}),
    "mobilenet_v3_small": (COLOUR, "mobilenet_v3_small", 64, {}, {"augment": {"crop_padding": 4, "flip": True}}),
    "vit_b_16": (COLOUR, "vit_b_16", 32, {}, VIT),
    "vit_b_16, checkpointing, adamw": (
        *(COLOUR, "vit_b_16", 32),
        *({"activation_checkpointing": True}, VIT | {"optimizer": "adamw"}),
    ),
    "gpt": (TEXT, "gpt", 16, {}, GPT),
    "gpt, chunked loss": (TEXT, "gpt", 16, {"loss_chunks": 8}, GPT),
    "gpt, selective checkpointing": (TEXT, "gpt", 16, {"activation_checkpointing": "selective"}, GPT),
    "gpt, ddp": (TEXT, "gpt", 16, {"parallelism": "ddp"}, GPT),
    "mlp, regression": (TABLE, "mlp", 256, {}, {"task": "regression", "model_options": {"width": 512}}),
    "mlp, regression, 256 outputs": (TABLE | {"classes": 256}, "mlp", 256, {}, {"task": "regression"}),
}
"""Case -> data set, model, global batch, variant, and other settings under ``train``."""


def predictions() -> dict[str, Any]:
    """Return the predicted peak of the tensors' memory divided by the measured peak, for each of ``CASES``.

    Every case is measured in fresh processes, as in the bench, and predicted in another process, which uses no device.
    ``worst_ratio`` is the ratio farthest from 1; a ratio below 1 is inverted first, so lower is better.
    """
    machine = environment.machine()
    cases, ratios = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (data, model, batch_size, variant, train)) in enumerate(CASES.items()):
            made = {"train": 1024, "test": 1024, **data}
            raw, packed = Path(folder, f"raw-{number}"), Path(folder, f"packed-{number}")
            pack({"fetch": {"dataset": "synthetic", "synthetic": made}}, raw, packed)
            values = {"model": model, "batch_size": batch_size, "epochs": 10, "seeds": [0], "without_native": "run"}
            config = parse(
                {
                    "train": values | {"warmup_steps": WARM_STEPS} | train,
                    "compare": {"baseline": "tried"},
                    "variants": {"tried": variant},
                }
            )
            how = plan(config, "tried", machine)
            arguments, preload = (how, packed), ("pipeline.training.assembly", "torch._dynamo")
            with forked(_measure, arguments, how.processes, preload=preload) as ask:
                measured = max(ask(None), key=lambda rank: rank.peak_bytes)
            with forked(_predict, arguments, 1, preload=preload) as ask:
                ((predicted, seconds),) = ask(None)
            ratio = predicted.peak_bytes / measured.tensors_bytes
            ratios.append(ratio)
            cases[name] = {
                "ratio": ratio,
                "measured": measured.model_dump(),
                "predicted": predicted.model_dump(),
                "prediction_seconds": seconds,
            }
            print(f"{name:45} {ratio:.4f}  {measured.tensors_bytes / 2**20:8.1f} MiB  {seconds:.1f} s", flush=True)
    worst = max(max(ratio, 1 / ratio) for ratio in ratios)
    return {"worst_ratio": worst, "target_ratio": 1.05, "lower_is_better": True, "cases": cases}


def evaluations() -> dict[str, Any]:
    """Return the bytes of tensors that an evaluation adds to a process, divided by those of the model's parameters.

    The model is a ``gpt`` that two processes train. ``worst_ratio`` is that of the sharded models, which evaluate
    without ever being whole. The figures also have ``post_local_sgd``, which evaluates a whole copy.
    """
    ways: dict[str, dict[str, Any]] = {
        "fsdp": {"parallelism": "fsdp"},
        "tensor": {"parallelism": "tensor"},
        "post_local_sgd": {"parallelism": "ddp", "communication_hook": "post_local_sgd"},
    }
    options = {"width": 768, "depth": 8, "heads": 12}
    train = {**GPT, "model": "gpt", "model_options": options, "batch_size": 4, "epochs": 1, "seeds": [0]}
    variants = {name: {**options, "processes": 2} for name, options in ways.items()}
    config = parse({"train": train, "compare": {"baseline": "fsdp"}, "variants": variants})
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        raw, packed = Path(folder, "raw"), Path(folder, "packed")
        made = {"train": 64, "test": 64, "shape": [65], "targets": "tokens", "classes": 257}
        pack({"fetch": {"dataset": "synthetic", "synthetic": made}}, raw, packed)
        for name in ways:
            how = plan(config, name, environment.machine())
            with forked(_evaluate, (how, packed), 2, preload=("pipeline.training.assembly", "torch._dynamo")) as ask:
                added, whole = zip(*ask(None), strict=True)
            cases[name] = {"added_bytes": added, "parameters_bytes": whole[0], "ratio": max(added) / whole[0]}
            print(f"{name:45} {cases[name]['ratio']:.4f}  {max(added) / 2**20:8.1f} MiB", flush=True)
    worst = max(cases[name]["ratio"] for name in ("fsdp", "tensor"))
    return {"worst_ratio": worst, "target_ratio": 0.5, "lower_is_better": True, "cases": cases}


def _evaluate(how: Plan, data: Path) -> Generator[tuple[int, int], None, None]:
    """Yield the bytes by which an evaluation raises this process's tensors at their peak, and the parameters' bytes.

    torch's allocator reports each allocation. The resident set would also show freed memory that the C library keeps.
    """
    with assembled(how, data) as assembly, assembly.training(0) as training:
        whole = sum(parameter.nbytes for parameter in assembly.task.model().parameters())
        training.advance(3)
        with training.paused(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            training.evaluate()
        events = profiled.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        yield max(accumulate(change for _, change in changes)), whole


def _measure(how: Plan, data: Path) -> Generator[Ledger, None, None]:
    with assembled(how, data) as assembly, assembly.training(0) as training:
        for _ in islice(training.run(), WARM_STEPS + MEASURED_STEPS):
            pass
        with training.paused():
            measured = ledger.measured(training, training.memory.peak_bytes)
    assert measured is not None, "this machine does not report a process's peak memory"
    yield measured


def _predict(how: Plan, data: Path) -> Generator[tuple[Ledger, float], None, None]:
    started = time.perf_counter()
    yield prediction.predicted(how, tasks.of_job(how.train, read(data))), time.perf_counter() - started
