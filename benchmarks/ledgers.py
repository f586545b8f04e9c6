"""Compare predicted memory ledgers with measured ones: is a variant's memory known before the variant runs?"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Generator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import environment, tasks
from pipeline.data.prepared import DESCRIPTION, Description, Form, Statistics, read
from pipeline.distributed import forked
from pipeline.files import file_sha256
from pipeline.params import parse
from pipeline.plans import Plan, plan
from pipeline.profiling import ledger
from pipeline.results import Ledger
from pipeline.training.assembly import assembled

WARM_STEPS, MEASURED_STEPS = 2, 2
SAMPLES = 1024
Shape = tuple[int, ...]
GRAY, COLOUR = (1, 28, 28), (3, 32, 32)
TEXT, TABLE = (129,), (64,)
"""Shapes of a sample's inputs: a window of tokens, and a row of numbers."""
VOCABULARY = 257
STACK = {"precision": "bf16", "channels_last": True, "activation_checkpointing": True, "gradient_accumulation": 4}
VIT = {"model_options": {"image_size": 96}}
GPT = {
    "task": "language_model", "optimizer": "adamw", "learning_rate": 0.001,
    "model_options": {"width": 128, "depth": 4, "heads": 4},
}  # fmt: skip

CASES: dict[str, tuple[Shape, str, int, dict[str, Any], dict[str, Any]]] = {
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
}
"""Case -> shape of a sample's inputs, model, global batch, variant, and other settings under ``train``."""


def predictions() -> dict[str, Any]:
    """Return the predicted peak of the tensors' memory divided by the measured peak, for each of ``CASES``.

    Every case is measured in fresh processes, as in the bench, and predicted in another process, which uses no device.
    ``worst_ratio`` is the ratio farthest from 1; of a ratio below 1 the inverse is taken, so lower is better.
    """
    machine = environment.machine()
    cases, ratios = {}, []
    with tempfile.TemporaryDirectory() as folder:
        shapes: tuple[Shape, ...] = (GRAY, COLOUR, TEXT, TABLE)
        data = {shape: _random_set(Path(folder, f"{shape[0]}"), shape) for shape in shapes}
        for name, (shape, model, batch_size, variant, train) in CASES.items():
            values = {"model": model, "batch_size": batch_size, "epochs": 10, "seeds": [0], "without_native": "run"}
            config = parse(
                {
                    "train": values | {"warmup_steps": WARM_STEPS} | train,
                    "compare": {"baseline": "tried"},
                    "variants": {"tried": variant},
                }
            )
            how = plan(config, "tried", machine)
            arguments, preload = (how, data[shape]), ("pipeline.training.assembly", "torch._dynamo")
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


def _measure(how: Plan, data: Path) -> Generator[Ledger, None, None]:
    with assembled(how, data) as assembly, assembly.training(0) as training:
        for _ in islice(training.run(), WARM_STEPS + MEASURED_STEPS):
            pass
        with training.paused():
            found = ledger.measured(training, training.memory.peak_bytes)
    assert found is not None, "this machine does not report a process's peak memory"
    yield found


def _predict(how: Plan, data: Path) -> Generator[tuple[Ledger, float], None, None]:
    started = time.perf_counter()
    yield ledger.predicted(how, tasks.of_job(how.train, read(data))), time.perf_counter() - started


def _random_set(folder: Path, shape: Shape) -> Path:
    """Write a prepared data set of random images, windows of tokens, or rows of a table with numbers to predict.

    Return ``folder``. ``shape``: shape of a sample's inputs."""
    random = np.random.default_rng(0)
    folder.mkdir()
    arrays: dict[str, np.ndarray[Any, Any]]
    known: dict[str, int]
    if shape == TABLE:
        arrays = {"inputs": random.normal(size=(SAMPLES, *shape)), "targets": random.normal(size=SAMPLES)}
        arrays = {name: values.astype(np.float32) for name, values in arrays.items()}
        known = {"inputs": shape[0], "targets": 1}
    elif shape == TEXT:
        arrays, known = {"inputs": random.integers(0, VOCABULARY, (SAMPLES, *shape), dtype=np.uint16)}, {}
    else:
        images = random.integers(0, 256, (SAMPLES, *shape), dtype=np.uint8)
        arrays, known = {"inputs": images, "targets": random.integers(0, 10, SAMPLES)}, {"inputs": shape[0]}
    for split in ("train", "test"):
        for name, values in arrays.items():
            np.save(folder / f"{split}_{name}.npy", values)
    labels = len(shape) == len(GRAY)
    description = Description(
        name="random",
        classes=tuple(map(str, range(10))) if labels else (),
        vocabulary=VOCABULARY if shape == TEXT else None,
        arrays={name: Form(dtype=values.dtype.name, shape=values.shape[1:]) for name, values in arrays.items()},
        train_count=SAMPLES,
        test_count=SAMPLES,
        train_class_counts=(0,) * 10 if labels else (),
        test_class_counts=(0,) * 10 if labels else (),
        statistics={name: Statistics(mean=(0.5,) * count, std=(0.29,) * count) for name, count in known.items()},
        files={path.name: file_sha256(path) for path in sorted(folder.glob("*.npy"))},
    )
    summed = description.model_copy(update={"sha256": description.digest()})
    (folder / DESCRIPTION).write_text(summed.model_dump_json(), encoding="utf-8")
    return folder


if __name__ == "__main__":
    print(json.dumps(predictions(), indent=1))
