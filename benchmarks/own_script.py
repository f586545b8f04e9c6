"""Compare a technique as a variant with the same technique as a flag of a script that is the same job.

    python -m benchmarks own_script

The net, the batch, the optimizer and the place of the data are the same, and both are measured by the bench. The ratios
of the speeds must agree within their intervals. Memory is compared by the MiB saved, because a variant's peak and a
script's do not count from the same moment.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.own_job import ratios
from benchmarks.pairs import ROOT, Checkout
from benchmarks.stages import pack
from pipeline import results
from pipeline.results import Bench, read_sessions
from pipeline.results.figures import THROUGHPUT

BATCH, MICRO_BATCHES = 1024, 4
JOB: dict[str, Any] = {
    "fetch": {"dataset": "synthetic", "synthetic": {"shape": [1, 28, 28]}},
    "train": {"seeds": [0], "epochs": 2, "batch_size": BATCH},
    "bench": {"max_foreign_load": 1.0},  # the arms' turns alternate, so others disturb all of them
    "variants": {"baseline": {}, "accumulation": {"gradient_accumulation": MICRO_BATCHES}},
}
SCRIPT = f"""
import sys
import torch
from pipeline.models import small_cnn
parts = int(sys.argv[-1]) if len(sys.argv) > 1 else 1
torch.manual_seed(0)
model = small_cnn(channels=1, height=28, width=28, classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
images, labels = torch.randint(256, (10_000, 1, 28, 28), dtype=torch.uint8), torch.randint(10, (10_000,))
while True:
    for rows in torch.randperm(len(images)).split({BATCH})[:-1]:
        optimizer.zero_grad()
        for part in rows.chunk(parts):
            inputs = (images[part].float() / 255 - 0.5) / 0.25
            (torch.nn.functional.cross_entropy(model(inputs), labels[part]) / parts).backward()
        optimizer.step()
"""


def agreement() -> dict[str, Any]:
    """Run both benches; return the ratio of their speeds' ratios, with each one's interval, and the MiB saved."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkout = Checkout(folder / "checkout", **JOB)
        pack(JOB, folder / "raw", folder / "packed")
        checkout.use(folder / "packed")
        checkout.stage("bench")
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        base, arm = f"PYTHONPATH={ROOT} python {folder / 'train.py'}", f"accumulation={MICRO_BATCHES}"
        checkout.stage(
            "script", "--base", base, "--arm", arm, "--minutes", "2.5", "--set", "bench.max_foreign_load=1.0"
        )
        benches = (
            results.read_bench(checkout.path / results.BENCH_FILE),
            read_sessions(checkout.path / "script-report/sessions")[0],
        )
        made = {kind: of_bench(bench) for kind, bench in zip(("variant", "script"), benches, strict=True)}
    ours, theirs = (made[kind][THROUGHPUT.field]["estimate"] for kind in ("variant", "script"))
    return {"median_ratio": theirs / ours, **made}


def of_bench(bench: Bench) -> dict[str, Any]:
    """Return the arm's ratios, and the MiB that it saves in each round that measured memory."""
    base, arm = (bench.arm("variant", name) for name in (bench.baseline, "accumulation"))
    assert base
    assert arm
    peaks = [[sample.peak_memory_bytes for sample in measured.samples] for measured in (base, arm)]
    saved = [(ours - theirs) / 2**20 for ours, theirs in zip(*peaks, strict=False) if ours and theirs]
    by_field = ratios(bench)["accumulation"]
    return {
        "rounds": bench.rounds, "steps": bench.steps, "saved_mib": saved, "median_saved_mib": statistics.median(saved),
        **{key: ratio.model_dump(mode="json", exclude_none=True) for key, ratio in by_field.items()},
    }  # fmt: skip
