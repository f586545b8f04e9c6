"""Check that files come from one job and one environment, and have not changed since they were written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from pipeline import environment as environments
from pipeline import results
from pipeline.data.prepared import described
from pipeline.environment import ENVIRONMENT_FILE, hash_of, stages
from pipeline.errors import PipelineError, count
from pipeline.files import LIMIT_BYTES, PREPARED, differing, file_sha256, read_bytes
from pipeline.params import Config
from pipeline.results import RESULTS, Bench, DatasetFacts, HistoryRow, Result, RunConditions

EQUAL = ("world_size", "hosts", "batch_size", "micro_batches", "parameter_count", "trained_count", "placement")
"""What the training and the bench of a variant must have in common."""


class ComparisonError(PipelineError, ValueError):
    """The results cannot be compared. The message names each file or variant, the reason, and what to do."""


def read_all(params: Config, root: Path = RESULTS) -> tuple[list[Result], dict[str, list[HistoryRow]]]:
    """Read the results, in the order of the variants in ``params``, and the histories by variant.

    Raises ComparisonError, listing every file that is missing, unreadable, from another job or variant, or changed
    (``broken_links``). Raises PipelineError if environment.json cannot be read.
    """
    measured: list[Result] = []
    histories: dict[str, list[HistoryRow]] = {}
    problems = []
    for variant in params.variants:
        result_file, history_file = results.result_file(variant, root), results.history_file(variant, root)
        try:
            measured.append(results.read(result_file, params))
        except ValueError as error:
            problems.append(str(error))  # names the file
        try:
            histories[variant] = results.read_history(history_file)
        except FileNotFoundError:
            problems.append(f"{history_file} is missing: run `dvc repro`.")
        except ValueError as error:
            problems.append(str(error))
    problems += broken_links(measured, root.parent)
    if problems:
        raise ComparisonError("\n".join(dict.fromkeys(problems)))  # one history can be reported twice
    return measured, histories


LOCK = Path("dvc.lock")
LIMIT_LOCK_BYTES = 1 << 20
"""Largest allowed size of dvc.lock. Its parser reads about 100 KB in a second."""
DATASET = PREPARED / "dataset.json"


def broken_links(measured: Sequence[Result], root: Path, *others: Path) -> list[str]:
    """Check files under ``root``: results, histories, the bench and ``others``. Return a message for each contradiction
    between a file and dvc.lock, or between a file and those from which it was made. Missing files are not checked.

    Raises ComparisonError if dvc.lock cannot be read, and PipelineError if environment.json cannot be read.
    """
    present = environments.read(root / ENVIRONMENT_FILE) if (root / ENVIRONMENT_FILE).exists() else None
    problems, data = [], None
    try:
        data = described((root / DATASET).parent) if (root / DATASET).exists() else None
    except PipelineError as error:
        problems.append(str(error))  # names the file
    files = [results.BENCH_FILE, *others]
    weights = {result.variant: {run.seed: run.model_sha256 for run in result.runs} for result in measured}
    for result in measured:
        file, history = results.result_file(result.variant), results.history_file(result.variant)
        files += [file, history]
        if present:
            elsewhere = _elsewhere(f"variant {result.variant!r}", result.environment, present, result.variant)
            if problem := elsewhere or _key_problem(result.key, present, "train", result.variant):
                problems.append(f"{problem}. Run `dvc repro`, which trains the variant here as it is now.")
        again = f"Run {results.train_again(results.stage_of(result.variant, result.applied))}."
        teacher = (result.applied.get("distillation") or {}).get("teacher", "")
        now = weights.get(teacher, {})
        if any(now.get(run.seed, run.teacher_sha256) != run.teacher_sha256 for run in result.runs):
            problems.append(f"{file} holds a run that learned from weights that {teacher} no longer has. {again}")
        if (root / history).exists() and file_sha256(root / history, LIMIT_BYTES) != result.history_sha256:
            problems.append(f"{history} is not the history that was written together with {file}. {again}")
        elif (root / history).exists():
            try:
                ends = results.contradictions_of_history(result, results.read_history(root / history))
                problems += [f"{file} holds impossible values: {'; '.join(ends)}. {again}"] if ends else []
            except PipelineError as error:
                problems.append(str(error))
        if data and result.dataset and data.sha256 != result.dataset.sha256:
            problems.append(
                f"{file} was measured on {_described(result.dataset)}, not on the data set of {DATASET}. {again}"
            )
    recorded = _recorded(root / LOCK)
    for file in files:
        if str(file) in recorded and (root / file).exists() and _md5(root / file) != recorded[str(file)]:
            problems.append(
                f"{file} differs from the version that DVC recorded in {LOCK}. Run `dvc repro`, or restore the "
                f"recorded version with `dvc checkout {file}`. If you ran the file's stage by hand, run `dvc commit`."
            )
    return problems


def _md5(path: Path) -> str:
    return hashlib.md5(read_bytes(path), usedforsecurity=False).hexdigest()


def check_here(config: Config, environment: Mapping[str, Any]) -> None:
    """Raise ComparisonError if code or settings of the measuring stages differ from ``environment``, except settings
    that change only how much is measured (``stages.HOW_LONG``).

    A comparison must describe the code that is checked out.
    """
    recorded = environment.get("stages", {})
    changed = [
        path
        for stage, present in stages.described(config, {}, stages.MEASURING)["stages"].items()
        for path, *_ in differing(
            recorded.get(stage) if isinstance(recorded, dict) else None, present, f"stages.{stage}"
        )
        if path.rpartition(".")[2] not in stages.HOW_LONG
    ]
    if changed:
        raise ComparisonError(f"{', '.join(changed)} changed since {ENVIRONMENT_FILE} was written. Run `dvc repro`.")


def _recorded(lock: Path) -> dict[str, str]:
    """Return output -> MD5 from dvc.lock; empty if there is no lock file."""
    try:  # not by the loader in C, which crashes on deep nesting
        made = yaml.safe_load(read_bytes(lock, LIMIT_LOCK_BYTES)).get("stages", {}).values()
        return {out["path"]: out["md5"] for stage in made for out in stage.get("outs", ()) if "md5" in out}
    except FileNotFoundError:
        return {}
    except (OSError, yaml.YAMLError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ComparisonError(
            f"{lock} cannot be read. Restore it with `git checkout {lock.name}`, or run `dvc repro`. ({error})"
        ) from None


def made_of(measured: Sequence[Result], root: Path = Path()) -> dict[str, str]:
    """Return file -> SHA-256, for the files from which a comparison of these results is made."""
    files = [file(result.variant) for result in measured for file in (results.result_file, results.history_file)]
    sessions = [path.relative_to(root) for path in results.session_files(root / results.SESSIONS)]
    return {path.as_posix(): file_sha256(root / path, LIMIT_BYTES) for path in (*files, results.BENCH_FILE, *sessions)}


def changed_since(made_of: Mapping[str, str], root: Path) -> list[str]:
    """Return the files in ``Comparison.made_of`` that changed after the comparison was made, or no longer exist."""
    then = {root / name: (name, sha) for name, sha in made_of.items()}
    return [name for file, (name, sha) in then.items() if not file.is_file() or file_sha256(file, LIMIT_BYTES) != sha]


def check(measured: Sequence[Result], baseline: Result, bench: Bench, environment: Mapping[str, Any]) -> None:
    """Raise ComparisonError, naming every contradiction, unless all arguments are from one job in one environment.

    ``read_all`` has checked already that each result is of the present job and environment.
    """
    runs = {"the baseline": baseline}
    runs |= {f"variant {result.variant!r}": result for result in measured if result is not baseline}
    problems = [f"{problem}. Run `dvc repro`." for problem in _thread_problems(runs)]
    for name, dataset in {**{name: run.dataset for name, run in runs.items()}, "bench.json": bench.dataset}.items():
        if dataset != baseline.dataset:
            problems.append(
                f"{name} was measured on {_described(dataset)}, but the baseline on {_described(baseline.dataset)}. "
                "Run `dvc repro`."
            )
    problems += [
        f"bench.json: {problem}. Run `dvc repro bench`."
        for problem in _bench_problems(bench, measured, baseline, environment)
    ]
    if problems:
        raise ComparisonError("\n".join(problems))


def _elsewhere(what: str, recorded: str, environment: Mapping[str, Any], *variants: str) -> str:
    """Return a message if ``recorded``, the hash in ``what``, is not the hash of ``environment``; else an empty
    string."""
    present = hash_of(environment, "variants", *variants)
    if recorded == present:
        return ""
    return (
        f"{what} was measured in environment {recorded[:12]}, but environment.json describes environment "
        f"{present[:12]}: numbers from different machines or software are not compared"
    )


def _key_problem(
    key: str | None, environment: Mapping[str, Any], stage: Literal["train", "bench"], variant: str
) -> str:
    """Return a message if the variant ran with other code, another plan or other settings than ``environment`` records;
    else an empty string. The string is also empty if ``environment`` records no stages."""
    try:
        if "stages" not in environment or key == stages.key(environment, stage, variant):
            return ""
    except (AttributeError, KeyError, TypeError):  # the environment lacks the variant, or is malformed
        pass
    return (
        f"variant {variant!r} ran with other code, another plan or other settings than environment.json records "
        f"(stages.{stage}, variants.{variant})"
    )


def _thread_problems(runs: Mapping[str, RunConditions]) -> list[str]:
    """Return a message for each run whose number of threads per process differs from that of the first run with the
    same world size. ``runs``: name -> run."""
    first: dict[int, tuple[str, int]] = {}
    problems = []
    for name, run in runs.items():
        first_name, threads = first.setdefault(run.world_size, (name, run.threads_per_process))
        if threads != run.threads_per_process:
            problems.append(
                f"{name} computed with {count(run.threads_per_process, 'thread')} per process, but {first_name} with "
                f"{threads}: the job's code changes the number of threads (torch.set_num_threads). Use the same number "
                "in all variants"
            )
    return problems


def _bench_problems(
    bench: Bench, measured: Sequence[Result], baseline: Result, environment: Mapping[str, Any]
) -> list[str]:
    """Return a message for each contradiction between the bench and the training runs or ``environment``. Code, plan,
    job and settings are compared by their digest (``stages.key``)."""
    variants = [arm.variant for arm in bench.arms if arm.role == "variant"]
    names = [result.variant for result in measured]
    keys = (_key_problem(bench.keys.get(name), environment, "bench", name) for name in names)
    elsewhere = _elsewhere("the bench", bench.environment, environment, *variants)
    problems = [elsewhere] if elsewhere else [problem for problem in keys if problem]
    if bench.baseline != baseline.variant or not bench.arm("aa_control", baseline.variant):
        problems.append(f"the bench did not measure the baseline {baseline.variant!r} against itself")
    for result in measured:
        arm = bench.arm("variant", result.variant)
        if arm is None:
            problems.append(f"the bench did not measure variant {result.variant!r}")
            continue
        for key in EQUAL:
            benched, trained = getattr(arm, key), getattr(result, key)
            if benched != trained:
                problems.append(
                    f"the bench measured variant {result.variant!r} with {key} {benched!r}, but it was trained with "
                    f"{trained!r}{' (set train.placement if memory was short)' if key == 'placement' else ''}"
                )
    problems += _thread_problems({arm.name: arm for arm in bench.arms})
    counts = {arm.name: len(arm.samples) for arm in bench.arms if arm.variant == bench.baseline}
    if set(counts.values()) != {bench.rounds}:
        problems.append(f"the bench has fewer samples of the baseline than {bench.rounds} rounds give: {counts}")
    return problems


def _described(dataset: DatasetFacts | None) -> str:
    if dataset is None:
        return "unknown data"
    return f"{dataset.name} ({dataset.train_count} + {dataset.test_count} samples, SHA-256 {dataset.sha256[:12]})"
