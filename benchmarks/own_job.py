"""Measure how long the bench of a user's own job with a larger net takes, and which variants it decides.

    python -m benchmarks own_job

The job trains torchvision's ResNet-18 with the stem for small images on 600 images of 16x16. It has seven variants, one
of them compiled. The bench may take half an hour, and ends when each variant's throughput and peak memory are decided.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.pairs import Checkout
from benchmarks.stages import fashion_mnist, pack, write_images
from pipeline import results
from pipeline.comparison import stats, verdicts
from pipeline.comparison.planning import cost_of
from pipeline.data import prepared
from pipeline.params import Compare
from pipeline.results.figures import MEMORY, THROUGHPUT

MOST_SECONDS = 600.0
JOB: dict[str, Any] = {
    "fetch": {"dataset": "image_folder"},
    "prepare": {"image_size": [16, 16]},
    "train": {"model": "resnet18", "seeds": [0], "epochs": 1, "batch_size": 64},
    "bench": {"max_minutes": 30.0},
    "variants": {
        "baseline": {},
        "ddp": {"parallelism": "ddp"},
        "memory": {"precision": "bf16", "activation_checkpointing": True, "gradient_accumulation": 2},
        "bf16": {"precision": "bf16"},
        "accumulation": {"gradient_accumulation": 4},
        "channels_last": {"channels_last": True},
        "compiled": {"compile": "default"},
    },
}
IMAGES = {"train": 600, "test": 200}


def decided() -> dict[str, Any]:
    """Run the bench; return its seconds, also divided by ``MOST_SECONDS``, and each variant's ratios and samples."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(prepared.read(fashion_mnist(folder)[1]), folder / "images", IMAGES)
        job = JOB | {"fetch": JOB["fetch"] | {"image_folder": str(folder / "images")}}
        checkout = Checkout(folder / "checkout", **job)
        pack(job, folder / "listing", folder / "packed")
        checkout.use(folder / "packed")
        seconds = checkout.stage("bench")
        bench = results.read_bench(checkout.path / results.BENCH_FILE)
    by_variant = ratios(bench)
    return {
        "target_ratio": 1.0,
        "lower_is_better": True,
        "median_ratio": seconds / MOST_SECONDS,
        "seconds": seconds,
        "rounds": bench.rounds,
        "steps": bench.steps,
        "variants": {
            name: {field: ratio.model_dump(mode="json", exclude_none=True) for field, ratio in by_field.items()}
            for name, by_field in by_variant.items()
        },
        "samples": {
            arm.name: [[sample.samples_per_second, sample.peak_memory_bytes] for sample in arm.samples]
            for arm in bench.arms
        },
    }


def ratios(bench: results.Bench) -> dict[str, dict[str, stats.Difference]]:
    """Return variant -> field of throughput or memory -> its ratio to the baseline."""
    baseline, control = bench.arm("variant", bench.baseline), bench.arm("aa_control", bench.baseline)
    assert baseline is not None
    assert control is not None
    settings, by_variant = Compare(), dict[str, dict[str, stats.Difference]]()
    margins = settings.margins
    for quantity, margin in ((THROUGHPUT, margins.throughput), (MEMORY, margins.memory)):
        noise = verdicts.noise_between(
            baseline, control, quantity, settings.max_spread, cost_of(bench, bench.rounds, bench.seconds)
        )
        for arm in bench.arms:
            if arm.role == "variant" and arm is not baseline:
                ratio = verdicts.ratio(arm, [baseline, control], quantity, margin, noise)
                by_variant.setdefault(arm.variant, {})[quantity.field] = ratio
    return by_variant
