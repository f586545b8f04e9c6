"""Small, realistic results for the tests of comparison, report, gate and tracking."""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import random
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow
import yaml
from PIL import Image
from pyarrow import parquet

from pipeline.comparison import verdicts
from pipeline.comparison.compare import compare
from pipeline.comparison.comparison_file import Comparison
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.stats import Difference
from pipeline.data.prepared import Description, Statistics
from pipeline.environment import hash_of
from pipeline.params import CATALOGUE, Compare, Config, Entry, Machine, Train, Variant, parse, techniques
from pipeline.params import Bench as BenchSettings
from pipeline.plans import Plan, plan
from pipeline.results import (
    Arm,
    Bench,
    DatasetFacts,
    Flops,
    HistoryRow,
    Ledger,
    Ledgers,
    Result,
    Run,
    ScoreName,
    Session,
    Window,
    figures,
)
from pipeline.results.figures import Figure
from pipeline.results.rejections import Rejection, rejection

Known = TypeVar("Known")

ENVIRONMENT: dict[str, Any] = {
    "hash": None,
    "hardware": {"cpu": {"model": "Example CPU @ 2.0 GHz", "cores": 2, "flags": ["avx2"]}, "memory_gib": 8, "gpus": []},
    "software": {"system": "Linux x86_64", "image": None, "python": "3.12", "torch": "2.11.0"},
    "settings": {"OMP_NUM_THREADS": "2"},
}
"""The content of an environment.json that has only the fingerprint."""
ENVIRONMENT["hash"] = hash_of(ENVIRONMENT, "variants")

DESCRIBED = Description(
    name="fashion_mnist", classes=tuple("0123456789"), vocabulary=None,
    arrays={"inputs": "uint8 [1, 8, 8]", "targets": "int64 []"},
    train_count=60_000, test_count=10_000, train_class_counts=(6_000,) * 10, test_class_counts=(1_000,) * 10,
    statistics={"inputs": Statistics(mean=(0.3,), std=(0.4,))}, files={},
)  # fmt: skip
DESCRIBED = DESCRIBED.model_copy(update={"sha256": DESCRIBED.digest()})
"""The content of dataset.json for every result. The images are small, so that the models are small too."""

SHIPPED: dict[str, Any] = yaml.safe_load((Path(__file__).parent.parent / "params.yaml").read_text(encoding="utf-8"))
"""The content of the shipped params.yaml."""

SECRETS = ("hub-0a1b2c", "cache-pw", "opensesame", "plugin-pw", "16C7e42F292c6912E7710c838347", "me@h0st", "img-pw")
PLANTED = {
    "TORCH_HUB_TOKEN": SECRETS[0],
    "TORCHINDUCTOR_REDIS_URL": f"redis://:{SECRETS[1]}@cache:6379",
    "NCCL_SECRET": SECRETS[2],
    "NCCL_NET_PLUGIN": f"https://{SECRETS[3]}@host/lib.so",
    "NCCL_ALGO": f"ghp_{SECRETS[4]}",
    "GLIBC_TUNABLES": SECRETS[5],
    "PIPELINE_IMAGE": f"https://{SECRETS[6]}@registry.example/pipeline?sig={SECRETS[6]}",
}
"""Environment variables with secrets: some have unknown names, others are known settings with a secret as the value."""

JOB: dict[str, Any] = {
    "skipped": {}, "decided": {}, "batch_size": 256, "learning_rate": 0.1, "micro_batches": 1, "backend": None,
    "world_size": 1, "threads_per_process": 2, "device": "Example CPU @ 2.0 GHz", "placement": "resident",
    "parameter_count": 21_840,
}  # fmt: skip
"""Fields of a result that say how a variant trains the default job of params.yaml on one device."""


def known(value: Known | None) -> Known:
    """Return ``value``; fail the test if it is None."""
    assert value is not None
    return value


def setting_of(technique: Entry) -> dict[str, Any]:
    """Return the keys of a variant that ask for the technique, and for the one whose detail it is."""
    wholes = (entry for entry in CATALOGUE if technique.key in entry.details)
    return {entry.key: entry.value if entry.example is None else entry.example for entry in (*wholes, technique)}


def alone(technique: Entry) -> dict[str, Any]:
    """Return the keys of a variant with only the technique and the parallelism that the technique needs."""
    return setting_of(technique) | ({"parallelism": technique.needs[0]} if technique.needs else {})


def planned(machine: Machine, tried: dict[str, Any], launched: int | None = None, **train: Any) -> Plan:
    """Return the plan of a variant with the keys ``tried`` in a job with these settings of ``train``."""
    config = parse({"train": train, "compare": {"baseline": "tried"}, "variants": {"tried": tried}})
    return plan(config, "tried", machine, launched)


def make_run(seed: int = 0, *, test_correct: int = 9000, **changes: Any) -> Run:
    """Return one seed's run. Only the first seed (0) has cold-start times, as in a real result."""
    values: dict[str, Any] = {
        "seed": seed,
        "test_accuracy": test_correct / 10_000,
        "test_correct": test_correct,
        "test_count": 10_000,
        "test_loss": 0.28,
        "train_loss": 0.25,
        "steps": 468,
        "measured_steps": 463,
        "step_p50_ms": 12.5,
        "step_p90_ms": 13.5,
        "step_p99_ms": 18.0,
        "startup_seconds": 2.4 if seed == 0 else None,
        "first_step_seconds": 0.12 if seed == 0 else None,
        "train_seconds": 9.0,
        "evaluate_seconds": 0.9,
        "resumes": 0,
        "model_sha256": hashlib.sha256(f"{seed} {test_correct}".encode()).hexdigest(),
    }
    return Run(**dict(make_window()) | values | changes)


def make_result(variant: str = "baseline", runs: Sequence[Run] | None = None, **changes: Any) -> Result:
    """Return a variant's result, by default with three seeds. ``applied``: a variant's keys in params.yaml."""
    runs = tuple(runs) if runs is not None else tuple(make_run(seed) for seed in (0, 1, 2))
    applied = Variant(**changes.pop("applied", {})).model_dump()
    train = Train(seeds=[run.seed for run in runs]).model_dump()
    values: dict[str, Any] = {
        "variant": variant,
        "environment": ENVIRONMENT["hash"],
        "config": {"train": train, "variant": applied},
        "applied": applied,
        **JOB,
        "dataset": DatasetFacts(name="fashion_mnist", sha256=DESCRIBED.sha256, train_count=60_000, test_count=10_000),
        "key": "k" * 64,
        "history_sha256": "f" * 64,
        "score": ScoreName(name="accuracy"),
        "runs": runs,
    }
    return Result(**values | changes)


def make_params(measured: Sequence[Result], **sections: Any) -> Config:
    """Return the settings that request the results ``measured``; the first result is the baseline."""
    values = {
        "train": measured[0].config["train"],
        "variants": {result.variant: result.config["variant"] for result in measured},
        "compare": {"baseline": measured[0].variant},
    }
    return parse(values | sections)


def make_history(
    seeds: Sequence[int | Run] = (0, 1, 2),
    accuracies: Sequence[float] = (0.80, 0.86, 0.90),
    *,
    rows_per_epoch: int = 4,
) -> list[HistoryRow]:
    """Return rows in which each seed ends epoch n with ``accuracies[n - 1]`` after ``3 * n`` seconds.

    If a run is given instead of a seed, its last row has the run's final figures.
    """
    rows = []
    for seed_or_run in seeds:
        seed, run = (seed_or_run.seed, seed_or_run) if isinstance(seed_or_run, Run) else (seed_or_run, None)
        for part in range(1, len(accuracies) * rows_per_epoch + 1):
            epoch = part / rows_per_epoch
            ends = part % rows_per_epoch == 0
            rows.append(
                HistoryRow(
                    seed=seed,
                    epoch=epoch,
                    step=round(epoch * 235),
                    train_seconds=epoch * 3.0,
                    learning_rate=0.1 * (1 - epoch / (len(accuracies) + 1)),
                    train_loss=2.3 / (1 + 3 * epoch) + 0.01 * seed,
                    samples_per_second=60_000 / 3.0,
                    test_loss=0.5 / epoch if ends else None,
                    test_accuracy=accuracies[round(epoch) - 1] if ends else None,
                )
            )
        if run:
            end = {"step": run.steps, "test_loss": run.test_loss, "test_accuracy": run.test_accuracy}
            rows[-1] = rows[-1].model_copy(update=end)
    return rows


def make_results() -> list[Result]:
    """Return the results of baseline, ddp with two processes, and memory, in which bf16 was skipped."""
    correct = {"baseline": (9000, 9030, 8990), "ddp": (9010, 9020, 9000), "memory": (8990, 9035, 8995)}
    runs = {
        name: [
            make_run(seed, test_correct=right, samples_per_second=20_000.0 * THROUGHPUT.get(name, 1.0))
            for seed, right in enumerate(rights)
        ]
        for name, rights in correct.items()
    }
    memory = {"channels_last": True, "activation_checkpointing": True, "gradient_accumulation": 4}
    return [
        make_result("baseline", runs["baseline"]),
        make_result(
            "ddp", runs["ddp"], applied={"parallelism": "ddp"}, backend="gloo", world_size=2, threads_per_process=1
        ),
        make_result("memory", runs["memory"], applied=memory, skipped={"bf16": "this CPU would emulate it"}),
    ]


def make_window(
    *, samples_per_second: float = 20_000.0, peak_memory_bytes: int = 200 * 2**20, processes: int = 1, **changes: Any
) -> Window:
    """Return one sample of the bench. If it has ``rejections``, its speed, step times and wait for input are None."""
    speed = None if changes.get("rejections") else samples_per_second
    values: dict[str, Any] = {
        "measured_steps": 120,
        "samples_per_second": speed,
        "step_p50_ms": speed and 256e3 / speed,
        "step_p90_ms": speed and 1.1 * 256e3 / speed,
        "step_p99_ms": speed and 1.4 * 256e3 / speed,
        "input_wait_fraction": speed and 0.004,
        "peak_memory_bytes": peak_memory_bytes,
        "peak_memory_rank_bytes": (peak_memory_bytes // processes,) * processes,
        "peak_reserved_bytes": None,
        "allocator_retries": None,
        "rejections": (),
    }
    return Window(**values | changes)


def make_arm(
    variant: str = "baseline",
    role: str = "variant",
    technique: str | None = None,
    *,
    throughput: float = 1.0,
    memory: float = 1.0,
    rounds: int = 12,
    noise: float = 0.01,
    rejected: Mapping[int, str | Rejection] | None = None,
    **changes: Any,
) -> Arm:
    """Return an arm whose figures are those of ``make_window`` times ``throughput`` and ``memory``.

    Each sample has noise with the standard deviation ``noise`` (memory: a tenth of it) and a drift that all arms
    share; both are the same at every call. ``rejected``: round -> why its sample was rejected. ``applied``: a variant's
    keys in params.yaml.
    """
    name = "-".join(filter(None, [variant, role if role != "variant" else None, technique]))
    applied = Variant(**changes.pop("applied", {})).model_dump()
    draw = random.Random(name)
    samples = tuple(
        make_window(
            samples_per_second=20_000 * throughput * (1 + 0.1 * math.sin(index)) * math.exp(draw.gauss(0, noise)),
            peak_memory_bytes=round(200 * 2**20 * memory * math.exp(draw.gauss(0, 0.1 * noise))),
            processes=changes.get("world_size", 1),
            rejections=(rejected[index],) if rejected and index in rejected else (),
        )
        for index in range(rounds)
    )
    values: dict[str, Any] = {
        "name": name, "role": role, "variant": variant, "technique": technique, "applied": applied, "samples": samples,
    }  # fmt: skip
    return Arm(**JOB | values | changes)


THROUGHPUT = {"ddp": 1.6, "memory": 0.8}
MEMORY = {"ddp": 1.01, "memory": 0.55}


def foreign_load(share: float = 0.31, accepting: float = 0.5) -> Rejection:
    """Return the rejection of a sample in which other processes took this share of the CPU time."""
    taken = {"taken_seconds": 2 * share, "due_seconds": 2.0, "share": share, "limit": 0.1}
    return rejection("foreign_load", ("bench.max_foreign_load", accepting), **taken)


def of_the_job(rejections: Iterable[Rejection]) -> tuple[Rejection, ...]:
    """Return the rejections that a busy machine does not explain. A test that really measures may get the others."""
    of_machine = {"foreign_load", "cpu_throttled", "clocks_disagree", "input_wait"}
    return tuple(rejection for rejection in rejections if rejection.code not in of_machine)


REFUSED = {"ddp": {4: foreign_load()}}
SHARES = {
    "channels_last": (1.4, 1.0, 1.0),
    "activation_checkpointing": (0.75, 0.7, 0.9),
    "gradient_accumulation=4": (0.9, 0.8, 0.78),
}
"""Technique of the variant ``memory`` -> three ratios: of the throughput with the technique to that without it, of the
baseline's memory with the technique to that without it, and of the variant's memory to that without the technique."""


def make_bench(
    measured: Sequence[Result] | None = None,
    *,
    throughput: Mapping[str, float] = THROUGHPUT,
    memory: Mapping[str, float] = MEMORY,
    rounds: int = 12,
    noise: float = 0.01,
    rejected: Mapping[str, Mapping[int, str | Rejection]] = REFUSED,
    ablate: bool = False,
    **changes: Any,
) -> Bench:
    """Return the bench of ``measured`` (default: ``make_results()``), whose first result is the baseline.

    ``throughput``, ``memory``: a variant's figure as a multiple of the baseline's; 1 for a variant not named.
    ``rejected``: variant -> round -> why its sample was rejected. ``ablate``: also ablate the techniques of ``memory``.
    """
    measured = make_results() if measured is None else measured
    baseline = measured[0]
    arms = [
        make_arm(
            result.variant,
            throughput=throughput.get(result.variant, 1.0),
            memory=memory.get(result.variant, 1.0),
            rounds=rounds,
            noise=noise,
            rejected=rejected.get(result.variant),
            **dict(result.conditions),
        )
        for result in measured
    ]
    if ablate:
        stack = Variant.model_validate(next(result for result in measured if result.variant == "memory").applied)
        base, faster = Variant.model_validate(baseline.applied), throughput.get("memory", 1.0)
        for technique, (speed, alone, stacked) in SHARES.items():
            (key,) = techniques(stack)[technique]
            made = {
                "with": (speed, alone, base.model_copy(update={key: getattr(stack, key)})),
                "without": (faster / speed, memory.get("memory", 1.0) / stacked,
                            stack.model_copy(update={key: getattr(Variant(), key)})),
            }  # fmt: skip
            arms += [
                make_arm("memory", role, technique, throughput=speed, memory=alone, rounds=rounds, noise=noise,
                         applied=values.model_dump())
                for role, (speed, alone, values) in made.items()
            ]  # fmt: skip
    arms.append(make_arm(baseline.variant, "aa_control", rounds=rounds, noise=noise, applied=baseline.applied))
    values: dict[str, Any] = {
        "environment": baseline.environment,
        "commit": "c" * 40,
        "config": {
            "train": baseline.config["train"],
            "bench": BenchSettings(ablate=["memory"] if ablate else []).model_dump(),
            "variants": {result.variant: result.config["variant"] for result in measured},
        },
        "dataset": baseline.dataset,
        "baseline": baseline.variant,
        "steps": 120,
        "turns": 10,
        "seconds": 178.0,
        "interrupted": False,
        "arms": tuple(arms),
        "ledgers": {result.variant: make_ledgers(memory.get(result.variant, 1.0)) for result in measured},
        "flops": {result.variant: make_flops(result.applied) for result in measured},
        "not_ablated": {"memory": {"bf16": "this CPU would emulate it"}} if ablate else {},
        "session": make_session(),
        "keys": {result.variant: "k" for result in measured},
    }
    return Bench(**values | changes)


def make_ratio(
    estimate: float, low: float | None = None, high: float | None = None, pairs: int = 10, **changes: Any
) -> Difference:
    return Difference(estimate=estimate, low=low, high=high, pairs=pairs, **changes)


def make_log_ratio(log: float, half: float = 0.01, pairs: int = 8, **changes: Any) -> Difference:
    """Return a ratio by its logarithm and its interval's half-width on the logarithmic scale."""
    return make_ratio(math.exp(log), math.exp(log - half), math.exp(log + half), pairs, **changes)


CALM = make_ratio(1.0, 0.99, 1.01, 12, margin=0.15, decision="same")
"""The noise of a quiet machine."""


TEN_IN_TEN_MINUTES = RoundCost("bench.max_minutes", 10, 600.0)


def arm_with(values: Sequence[float | str | Rejection | None], quantity: Figure = figures.THROUGHPUT) -> Arm:
    """Return an arm with one figure per round. A text is the reason for a rejection; None is an unknown figure."""
    samples = []
    for value in values:
        known: dict[str, Any] = {quantity.field: value}
        if isinstance(value, str | Rejection):
            known = {quantity.field: None, "rejections": (Rejection.model_validate(value),)}
        samples.append(make_window().model_copy(update=known))
    return make_arm(samples=tuple(samples))


def ratio_of(
    over: Sequence[Any], under: Sequence[Any], quantity: Figure = figures.THROUGHPUT, margin: float = 0.03
) -> Difference:
    """Return the ratio of two arms, given their figures, on a calm machine."""
    return verdicts.ratio(arm_with(over, quantity), [arm_with(under, quantity)], quantity, margin, CALM)


def make_accuracy(differences: Sequence[float], margin: float = 0.01, base: float = 0.9, **changes: Any) -> Difference:
    """Judge one difference per seed, for the seeds from 0 on."""
    return verdicts.accuracy(dict(enumerate(differences)), margin, base, **changes)


def make_session(start: str = "2026-11-20T08:00", **changes: Any) -> Session:
    """Return a session that starts at ``start`` (UTC), in a boot that began with November 2026."""
    uptime = datetime.fromisoformat(start) - datetime.fromisoformat("2026-11-01")
    values: dict[str, Any] = {
        "start_utc": f"{start}:00+00:00",
        "boot_id": "b",
        "uptime_seconds": uptime.total_seconds(),
        "load_average": 0.3,
        "steal_fraction": 0.0,
        "spins": 300_000,
    }
    return Session(**values | changes)


def with_samples(bench: Bench, samples_of: Callable[[Arm], Iterable[Window]]) -> Bench:
    """Return ``bench`` with other samples for each arm."""
    arms = (arm.model_copy(update={"samples": tuple(samples_of(arm))}) for arm in bench.arms)
    return bench.model_copy(update={"arms": tuple(arms)})


def with_speeds(bench: Bench, factor: Callable[[Arm, int], float]) -> Bench:
    """Return ``bench`` with each speed multiplied by ``factor(arm, round)``. An arm ends at its first factor of 0."""

    def samples_of(arm: Arm) -> Iterable[Window]:
        factors = itertools.takewhile(bool, (factor(arm, index) for index in range(len(arm.samples))))
        for sample, times in zip(arm.samples, factors, strict=False):
            yield sample.model_copy(
                update={"samples_per_second": sample.samples_per_second and sample.samples_per_second * times}
            )

    return with_samples(bench, samples_of)


def make_ledgers(memory: float = 1.0, **changes: Any) -> Ledgers:
    """Return memory ledgers for a peak of ``memory`` times 200 MiB; the prediction is 2% above the tensors' memory."""
    peak = round(200 * 2**20 * memory)
    fixed = {"parameters_bytes": 90_000, "gradients_bytes": 86_000, "optimizer_state_bytes": 86_000,
             "communication_bytes": 0, "data_bytes": 47_100_000}  # fmt: skip
    rest = peak // 8
    tensors = peak - rest
    predicted = round(1.02 * tensors)

    def ledger(total: int, rest: int) -> Ledger:
        activations = total - rest - sum(fixed.values())
        return Ledger(
            **fixed, activations_bytes=activations, rest_bytes=rest, peak_bytes=total, tensors_bytes=total - rest
        )

    values: dict[str, Any] = {
        "measured": ledger(peak, rest), "predicted": ledger(predicted, 0), "why_not_predicted": None
    }  # fmt: skip
    return Ledgers(**values | changes)


def make_flops(applied: Mapping[str, Any], peak_per_second: float | None = None) -> Flops:
    """Return the FLOPs of a small model: 6.3 million per sample, plus a third if ``applied`` recomputes activations."""
    recomputed = 2_100_000 if applied.get("activation_checkpointing") else 0
    return Flops(
        model_per_sample=6_300_000, executed_per_sample=6_300_000 + recomputed, peak_per_second=peak_per_second
    )


def make_comparison(
    measured: Sequence[Result] | None = None,
    bench: Bench | None = None,
    histories: Mapping[str, Sequence[HistoryRow]] | None = None,
    **settings: Any,
) -> Comparison:
    """Return the comparison of ``measured`` (default: ``make_results()``). ``settings``: keys of section compare."""
    measured = make_results() if measured is None else measured
    known = make_histories(measured) | dict(histories or {})
    chosen = Compare(**{"baseline": measured[0].variant} | settings)
    return compare(measured, known, [bench or make_bench(measured)], chosen, ENVIRONMENT)


def with_changes(comparison: Comparison, variant: str, /, **changes: Any) -> Comparison:
    """Return ``comparison`` with other values in the fields of one variant."""
    variants = (
        compared.model_copy(update=changes if compared.variant == variant else {}) for compared in comparison.variants
    )
    return comparison.model_copy(update={"variants": tuple(variants)})


def make_histories(measured: Sequence[Result]) -> dict[str, Sequence[HistoryRow]]:
    """Return variant -> the history of the seeds of its result."""
    return {result.variant: make_history([run.seed for run in result.runs]) for result in measured}


def write_wheel(folder: Path, name: str, version: str, code: str) -> str:
    """Write a wheel with the single module ``name`` into ``folder``; return the wheel's line for a lock file."""
    wheel, about = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", code)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def saved(write: Callable[[io.BytesIO], object]) -> bytes:
    out = io.BytesIO()
    write(out)
    return out.getvalue()


def picture(kind: str) -> bytes:
    pixels = np.arange(20 * 30 * 3, dtype=np.uint8).reshape(20, 30, 3)
    return saved(lambda out: Image.fromarray(pixels).save(out, kind))


def parquet_of(**columns: Any) -> bytes:
    return saved(lambda out: parquet.write_table(pyarrow.table(columns), out, row_group_size=17))


def listed(values: npt.NDArray[Any]) -> pyarrow.Array:
    """Return a column of numbers, or of lists of one length, which may be nested."""
    column = pyarrow.array(values.ravel())
    for size in reversed(values.shape[1:]):
        column = pyarrow.FixedSizeListArray.from_arrays(column, size)
    return column


def parquet_table(values: dict[str, npt.NDArray[Any]]) -> bytes:
    """Return a file of Parquet with a column for each array."""
    return parquet_of(**{name: listed(array) for name, array in values.items()})


def places(values: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of ``values`` and of each value in it."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [path, *(place for key, value in items for place in places(value, (*path, key)))]
