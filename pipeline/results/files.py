"""Paths of the files that stages write, and functions that read and write these files.

Files are written whole or not at all. If a file cannot be read, the error names the file.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

from pipeline.errors import PipelineError, say
from pipeline.files import LIMIT_BYTES, differing, json_sha256, naming, read_bytes, read_json, read_text, write_text
from pipeline.params import Config, Train, Variant, is_file
from pipeline.results.bench_file import Bench
from pipeline.results.records import Document, HistoryRow, Record, Result, Run

RESULTS = Path("results")
MODELS = Path("models")
PROFILES = Path("profiles")
INFERENCE = Path("inference")
REPORTS = Path("reports")
BENCH_FILE = Path("bench.json")
SESSIONS = Path("sessions")
KEPT_BENCHES = Path("checkpoints/bench")
"""Directory in which the stage ``bench`` also keeps its measurements, even interrupted ones, because DVC deletes
``bench.json`` before a new run."""


class ResultError(PipelineError, ValueError):
    """A file does not contain the expected result. The message names the file."""


D = TypeVar("D", bound=Document)


def result_file(variant: str, root: Path = RESULTS) -> Path:
    return root / f"{variant}.json"


def history_file(variant: str, root: Path = RESULTS) -> Path:
    return root / variant / "history.csv"


def system_file(variant: str, root: Path = RESULTS) -> Path:
    """Return the file with the use of processor, memory and the job's GPUs on the main rank's host, about one row per
    second."""
    return root / variant / "system.csv"


def model_file(variant: str, seed: int, root: Path = MODELS) -> Path:
    """Return the file of one seed's trained weights: a state dict, loadable with ``torch.load(weights_only=True)``."""
    return root / variant / f"seed-{seed}.pt"


def profile_directory(variant: str, root: Path = PROFILES) -> Path:
    """Return the directory of profile.json, profile.md, trace.json.gz, and (only on CUDA) memory.pickle."""
    return root / variant


def inference_file(variant: str, kind: Literal["json", "md"], root: Path = INFERENCE) -> Path:
    """Return the file of the inference measurements with the variant's model: json for programs, md for readers."""
    return root / f"{variant}.{kind}"


def read(path: Path, config: Config) -> Result:
    """Read a variant's result from ``path``, a file with the variant's name. The result must belong to the job
    ``config``.

    Results come from a cache that others may write to. So the pipeline imports, calls and opens only what ``config``
    names, never what a result names, and refuses a result with other settings. Raises ResultError, which names the file
    and every key that differs.
    """
    variant = path.stem
    stage = stage_of(variant, config.variants.get(variant))
    result = read_document(path, Result, f"run `dvc repro`, or `dvc repro {stage}` for this variant alone")
    params = {"train": config.job, **config.model_dump(mode="json", include={"variants"})}
    said = result.config.get("variant")
    if isinstance(said, dict):  # an older result lacks the keys of newer techniques
        said = Variant().model_dump(mode="json") | said
    then = {"train": result.config.get("train"), "variants": {variant: said}}
    problems = [
        f"{json.dumps(path)[1:-1]} is {json.dumps(held)} in the result and {json.dumps(requested)} in params.yaml"
        for path, held, requested in differing(then, params | {"variants": {variant: params["variants"].get(variant)}})
        if path.removeprefix("train.") not in Train.OF_RESUMING  # these keys may change without a new training
    ]
    if result.variant != variant:
        problems.append(f"it holds the result of variant {result.variant!r}")
    if (seeds := [run.seed for run in result.runs]) != config.train.seeds:
        problems.append(f"it holds runs of the seeds {seeds}, not of train.seeds {config.train.seeds}")
    if result.score.name != params["train"]["metric"]:
        problems.append(f"its score is {result.score.name!r}, not train.metric {params['train']['metric']!r}")
    if result.dataset is None and config.script is None:
        problems.append("its data set is unknown")
    if problems:
        raise ResultError(
            f"{path} does not match the present params.yaml: {'; '.join(problems)}. Run `dvc repro`, or "
            f"{train_again(stage)} if DVC considers it up to date."
        )
    _refuse(path, contradictions(result, config.train), f"run {train_again(stage)}")
    return result


def read_values(path: Path, variant: str) -> dict[str, Any]:
    """Read the file of a profile, or of inference measurements. Raises ResultError if it is not of ``variant``."""
    try:
        values = read_json(path)
    except ValueError:
        values = None
    if not isinstance(values, dict) or values.get("variant") != variant:
        raise ResultError(
            f"{path} is not of variant {variant!r}, although its name says so. Remove the file and run `dvc repro`."
        )
    return values


def stage_of(variant: str, settings: Variant | Mapping[str, Any] | None) -> str:
    """Return the stage in dvc.yaml that trains ``variant`` with these settings, such as ``train@baseline``."""
    values = settings.model_dump() if isinstance(settings, Variant) else settings or {}
    teacher = (values.get("distillation") or {}).get("teacher")
    return f"{'distil' if teacher and not is_file(teacher) else 'train'}@{variant}"


def train_again(stage: str) -> str:
    """Return the command that runs ``stage`` even if DVC's cache contains the result; for use in a message."""
    return f"`dvc repro --single-item --force {stage}`"


def read_bench(path: Path = BENCH_FILE) -> Bench:
    """Read the bench's file. Raises ResultError, naming the file, if it is not a valid bench file."""
    return read_document(path, Bench, "run `dvc repro bench`, which writes this file")


def read_document(path: Path, kind: type[D], remedy: str) -> D:
    """Read a file that ``to_json`` made. Raises ResultError, which names the file, the wrong keys and ``remedy``."""
    try:
        document = kind.model_validate_json(read_bytes(path))
    except FileNotFoundError:
        raise ResultError(f"{path} is missing; {remedy}.") from None
    except (OSError, ValueError) as error:
        raise ResultError(f"{path} is not a file that this version can read; {remedy}. ({error})") from None
    _refuse(path, document.problems(), remedy)
    return document


def session_files(directory: Path = SESSIONS) -> list[Path]:
    """Return the files in ``directory`` that may be sessions, sorted by name."""
    return sorted(path for path in directory.glob("*.json") if path.is_file() and path.stat().st_size <= LIMIT_BYTES)


def read_sessions(directory: Path = SESSIONS) -> list[Bench]:
    """Read the earlier benches in ``directory``, sorted by file name. Skip an unreadable file and print its error."""
    return read_documents(directory, Bench, "run `python -m pipeline bench --again`")


def read_documents(directory: Path, kind: type[D], remedy: str) -> list[D]:
    """Read the files in ``directory``, sorted by name. Skip an unreadable file and print its error."""
    documents = []
    for path in sorted(directory.glob("*.json")):
        try:
            documents.append(read_document(path, kind, remedy))
        except ResultError as error:
            say(f"session not used: {error}")
    return documents


def write(result: Result, path: Path) -> None:
    """Write ``result`` to ``path``, whole or not at all."""
    write_text(path, result.to_json())


def read_history(path: Path) -> list[HistoryRow]:
    """Read the rows in file order. Raises ResultError, naming the file, if it is not a history."""
    try:
        return [history_row(row) for row in csv.DictReader(io.StringIO(read_text(path)))]
    except (ValueError, csv.Error) as error:
        raise ResultError(f"{path} is not a history that this version can read: run `dvc repro`. ({error})") from None


def history_row(fields: Mapping[str, str]) -> HistoryRow:
    """Parse a row of the file; a blank field becomes None."""
    return HistoryRow.model_validate({key: value if value != "" else None for key, value in fields.items()})


def write_history(rows: Iterable[HistoryRow], path: Path) -> None:
    """Write all rows, whole or not at all."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(HistoryRow.model_fields))
    writer.writeheader()
    writer.writerows(row.model_dump() for row in rows)
    write_text(path, text.getvalue())


@contextmanager
def adding_to_history(path: Path) -> Iterator[Callable[[HistoryRow], None]]:
    """Yield a function that appends a row to ``path`` and writes it to the file at once. ``write_history`` must have
    begun the file.

    The file is opened once, with the first row, because opening it for each row would slow down the steps.
    """
    opened: list[TextIO] = []

    def add(row: HistoryRow) -> None:
        with naming(path):
            opened[:] = opened or [path.open("a", newline="", encoding="utf-8", buffering=1)]
            append_history(row, opened[0])

    try:
        yield add
    finally:
        with naming(path):
            for file in opened:
                file.close()


def append_history(row: HistoryRow, file: TextIO) -> None:
    csv.DictWriter(file, list(HistoryRow.model_fields)).writerow(row.model_dump())


def digest(record: Record) -> str:
    """Return the SHA-256 of a record's content. Only equal records have equal digests."""
    return json_sha256(record.model_dump(mode="json"))


def _refuse(path: Path, problems: Sequence[str], remedy: str) -> None:
    """Raise ResultError if there are any ``problems``."""
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ResultError(f"{path} holds impossible values: {'; '.join(problems[:5])}{more}. To go on, {remedy}.")


def contradictions(result: Result, train: Train) -> list[str]:
    """Return one message for each figure of a result that contradicts the job ``train``, the data or another figure."""
    problems = [f"seed {run.seed}: {problem}" for run in result.runs for problem in _of_run(run, result, train)]
    seeds: dict[str, list[int]] = {}
    for run in result.runs:
        seeds.setdefault(run.model_sha256, []).append(run.seed)
    problems += [
        f"seeds {', '.join(map(str, equal))} ended in the same weights, so they are copies, or the job ignores its "
        "seed (then training again changes nothing: draw its random numbers from torch's generators, or set "
        f"train.seeds: [{equal[0]}])"
        for equal in seeds.values()
        if len(equal) > 1
    ]
    return problems


def contradictions_of_history(result: Result, rows: Iterable[HistoryRow]) -> list[str]:
    """Return one message for each figure of a run that differs from the last row of its seed's history."""
    last = {row.seed: row for row in rows}
    ends = {"steps": "step", "test_accuracy": "test_accuracy", "test_loss": "test_loss"}
    return [
        f"seed {run.seed}: {key} is {getattr(run, key)}, but its history ends with {ended}"
        for run in result.runs
        for key, column in ends.items()
        if not _close(getattr(run, key), ended := getattr(last.get(run.seed), column, None))
    ]


def _of_run(run: Run, result: Result, train: Train) -> list[str]:
    problems, data = run.problems(result.batch_size), result.dataset
    if data is None:  # of a script
        return problems
    requested = train.epochs * (data.train_count // max(1, result.batch_size))
    if run.steps != requested:
        problems.append(f"the run has {run.steps} steps, but the job has {requested}")
    # Each process that resumed the run warmed up again.
    fewest, most = (max(0, requested - train.warmup_steps * times) for times in (1 + run.resumes, 1))
    if not fewest <= run.measured_steps <= most:
        expected = f"{most}" if fewest == most else f"{fewest} to {most}, because each resume warms up again"
        problems.append(f"{run.measured_steps} of {run.steps} steps were measured; expected {expected}")
    if run.test_count != data.test_count:
        problems.append(f"{run.test_count} samples were tested, but the data set has {data.test_count} test samples")
    if run.test_correct > run.test_count:
        problems.append(f"{run.test_correct} of only {run.test_count} test samples are right")
    elif not _close(run.test_accuracy * run.test_count, run.test_correct):
        problems.append(f"test_accuracy is {run.test_accuracy}, but {run.test_correct} of {run.test_count} are right")
    return problems


def _close(value: float | None, expected: float | None) -> bool:
    if value is None or expected is None:
        return value == expected
    return math.isclose(value, expected, rel_tol=1e-9)
