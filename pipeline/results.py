"""What was measured, as files: ``results/<variant>.json``, ``results/<variant>/history.csv`` and ``bench.json``.

A key that carries a quantity ends in its unit, or is a count. ``None`` means unknown: it was refused
(``refusals`` says why) or this machine cannot measure it; it is never replaced by a guess.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pipeline.errors import PipelineError
from pipeline.files import naming, write_text
from pipeline.params import Config, Seed, Train, Variant, VariantName

RESULTS = Path("results")
MODELS = Path("models")
PROFILES = Path("profiles")
INFERENCE = Path("inference")
REPORTS = Path("reports")
BENCH_FILE = Path("bench.json")
SESSIONS = Path("sessions")
KEPT_BENCHES = Path("checkpoints/bench")
"""What the stage ``bench`` measured, also when it was interrupted: DVC deletes ``bench.json`` before it runs again."""


class ResultError(PipelineError, ValueError):
    """A file is not the result it should be. The message names it."""


class Record(BaseModel):
    """A part of the result's file: frozen, strict about its keys, and without a number that is none."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


R = TypeVar("R", bound=Record)
D = TypeVar("D", bound="Document")

Count = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[float, Field(ge=0, lt=1e15)]
"""Of seconds or losses that cannot be negative, and shares."""
Positive = Annotated[float, Field(gt=0, lt=1e15)]
"""Speeds, and the times that they follow from: none is 0, and none that is larger was ever measured."""
Share = Annotated[float, Field(ge=0, le=1)]


class Document(Record):
    """A record that is a file of its own. As the last base it has its keys come first."""

    schema_: int = Field(default=1, ge=1, le=1, alias="schema")
    indent: ClassVar[int] = 2

    def problems(self) -> list[str]:
        """Where figures contradict each other, so that not all of them can have been measured."""
        return []

    def to_json(self) -> str:
        """The file's text."""
        values = self.model_dump(mode="json", by_alias=True)
        return json.dumps(values, indent=self.indent, allow_nan=False) + "\n"


class HistoryRow(Record):
    """One row of ``history.csv``: the state after ``step`` optimizer steps of one seed's run."""

    seed: Seed
    epoch: float
    """Passes over the training set so far; a whole number at the end of an epoch."""
    step: Count
    train_seconds: Amount
    """Wall time spent in training so far, on the main rank; evaluation and checkpoints are not in it."""
    learning_rate: float
    train_loss: float
    """Mean training loss over the steps since the last row."""
    samples_per_second: Positive | None
    """Global samples a second since the last row."""
    test_loss: float | None = None
    """Only at the end of an epoch, like test_accuracy."""
    test_accuracy: Share | None = None


class Window(Record):
    """What was measured in a window of steps: warm, without evaluation, at a steady state."""

    measured_steps: Count
    """Steps inside the window, on which the speeds and step times below rest."""
    samples_per_second: Positive | None
    """Samples of the global batch over wall seconds of the slowest rank."""
    step_p50_ms: Positive | None
    step_p90_ms: Positive | None
    step_p99_ms: Positive | None
    input_wait_fraction: Amount | None
    """Share of the window spent waiting for input, on the rank that waited longest."""
    peak_memory_bytes: Count | None
    """What counts. On GPUs, which have a memory each, the largest rank's; on a CPU the sum over the ranks, which share
    it. The ranks' own peaks need not fall together, so that sum can be a little more than was ever taken at once."""
    peak_memory_rank_bytes: tuple[Count | None, ...]
    """One a rank. CUDA: max_memory_allocated. CPU: own resident memory at its peak above that after import."""
    peak_reserved_bytes: Count | None
    """CUDA: max_memory_reserved, largest rank. None on CPU."""
    driver_memory_bytes: Count | None = None
    """CUDA: what the driver held for the process when the window ended, largest rank, with the context and libraries.
    None on CPU, and where the driver does not tell."""
    allocator_retries: Count | None
    """CUDA: cudaMalloc retries after a cache flush, all ranks. None on CPU."""
    refusals: tuple[str, ...]
    """Why numbers above are None or not to be trusted; empty when all is well."""

    def problems(self, batch_size: int) -> list[str]:
        """Where its figures contradict each other. ``batch_size``: global, of the steps that were measured."""
        if not (self.samples_per_second and self.step_p50_ms):
            return []
        found = [] if self.measured_steps else ["a speed over a window of no steps"]
        if not self.step_p50_ms <= (self.step_p90_ms or 0) <= (self.step_p99_ms or 0):
            found.append("percentiles of the step times that do not rise")
        # Half of the steps take the median or longer, so that their mean is half of it at least.
        if self.samples_per_second > 2.2 * batch_size / (self.step_p50_ms / 1e3):
            found.append(
                f"{self.samples_per_second:g} samples/s, although half of the steps of {batch_size} samples took "
                f"{self.step_p50_ms:g} ms or longer"
            )
        return found


class Run(Window):
    """What was measured of one seed."""

    seed: Seed
    test_accuracy: Share
    """Mean of ``train.metric`` over the test set, 0 to 1: test_correct / test_count."""
    test_correct: Count | Amount
    """Of accuracy, how many are right; of a metric of the user's own, the sum of the samples' scores."""
    test_count: Count
    test_loss: float
    """Mean of ``train.loss`` over the test set; of cross-entropy, without label smoothing."""
    train_loss: float
    """Mean training loss of the last epoch."""
    steps: Count
    """Optimizer steps, warm-up included."""
    startup_seconds: Amount | None
    """Cold: from the start of the process to the first step. Only of the first seed: later ones start warm."""
    first_step_seconds: Amount | None
    """Cold: the first step, with compilation, autotuning and allocation. Only of the first seed."""
    train_seconds: Amount
    """All training steps, first and warm-up steps included, without evaluation and checkpoints."""
    evaluate_seconds: Amount
    """All evaluations together."""
    resumes: Count
    """How often this run was interrupted and taken up again."""
    model_sha256: str
    """Over names, dtypes, shapes and bytes of the model's state, in order."""
    findings: dict[str, float] = {}
    """What techniques found out on the main rank: bytes given back between phases, blocks chosen, and the like."""


class Score(Record):
    """What ``test_accuracy`` and the margin of accuracy are of."""

    name: str
    """``train.metric``."""
    direction: Literal["higher is better"] = "higher is better"
    unit: Literal["fraction"] = "fraction"


class Dataset(Record):
    name: str
    sha256: str
    train_count: Count
    test_count: Count
    test_in_train_count: Count | None = None
    """Test images that are training images too; this and the next as ``dataset.json`` has them."""
    test_repeated_count: Count | None = None


class Summary(Record):
    """The runs in one number each, for ``dvc metrics``."""

    test_accuracy_mean_fraction: float
    test_accuracy_spread_fraction: float | None
    """Sample standard deviation over seeds; None for a single seed."""
    samples_per_second: float | None
    """Median over seeds."""
    step_p50_ms: float | None
    """Median over seeds."""
    peak_memory_bytes: int | None
    """Largest over seeds."""
    train_seconds: float
    """Median over seeds."""


class Setup(Record):
    """How a variant ran on this machine."""

    applied: dict[str, Any]
    """The variant's values as they were applied."""
    left_out: dict[str, str]
    """Technique -> why this machine left it out."""
    decided: dict[str, str]
    """Technique -> what it decided by itself on this machine, and why."""
    batch_size: int
    """Global, as it was trained: under weak scaling a multiple of the job's."""
    learning_rate: float
    """The peak, as it was trained: like batch_size."""
    micro_batches: int
    """A step's, of each process."""
    device: str
    """Name of the GPU or CPU."""
    backend: str | None
    """nccl or gloo; None for a single process."""
    world_size: int
    threads_per_process: int
    """Intra-operation CPU threads of each process."""
    placement: Literal["resident", "streamed", "dataloader"]
    parameter_count: int


class VariantDocument(Document):
    """A file about one variant."""

    variant: VariantName
    environment: str
    """Hash of what its numbers depend on: ``environment.hash_of`` the fingerprint and the variant, or the forms of
    inference."""
    config: dict[str, dict[str, Any]]
    """``train`` and ``variant``, or ``train`` and ``infer``, as params.yaml asked for them."""
    dataset: Dataset


class Result(Setup, VariantDocument):
    """``results/<variant>.json``."""

    schema_: Literal[2] = Field(default=2, alias="schema")
    """1: without the next three, so that nothing says what it was made from."""
    key: str
    """Digest of the code, plan, settings and environment it was trained with (``stages.key``)."""
    history_sha256: str
    """Of ``history.csv``, which was written with it."""
    score: Score
    summary: Summary
    runs: tuple[Run, ...]


class Ledger(Record):
    """Where the bytes are at the moment of the peak. The parts add up to ``peak_bytes``."""

    parameters_bytes: int
    """Parameters and buffers."""
    gradients_bytes: int
    optimizer_state_bytes: int
    activations_bytes: int
    """What the forward pass keeps for the backward pass, temporary tensors, and what kernels take inside."""
    communication_bytes: int
    """Buckets of the gradients' all-reduce beyond the gradients themselves; with fsdp, gathered parameters and what is
    reduced."""
    data_bytes: int
    """The resident data set (not the mapped file on a CPU), the epoch's random draws and the input batch."""
    rest_bytes: int
    """What belongs to none of them: libraries' workspaces, the allocator's rounding; on a CPU also its free blocks."""
    peak_bytes: int
    """Of the largest rank, by the definition of ``Window.peak_memory_rank_bytes``."""
    tensors_bytes: int
    """Of the peak, what tensors take, as the allocator counts it. CUDA: the peak itself."""


class Ledgers(Record):
    """One variant's ledger, measured and predicted."""

    measured: Ledger
    predicted: Ledger | None
    """Without the device: from fake tensors. It foresees tensors alone, so its peak is to be held against
    ``measured.tensors_bytes``."""
    why_not_predicted: str | None


class Flops(Record):
    """Floating-point operations of training, counted of matrix products, convolutions and attention."""

    model_per_sample: int
    """One forward and one backward pass of the model for one sample. A multiplication and an addition count as two."""
    executed_per_sample: int
    """What the variant really computes, recomputation included."""
    peak_per_second: float | None
    """Dense peak of all the variant's devices at its precision; None for a device that is not known."""


class Arm(Setup):
    """What the bench measures in a fresh process each round."""

    name: str
    role: Literal["variant", "aa_control", "with", "without"]
    """The variant itself; the baseline once more (A/A); the baseline with one technique more; ``variant`` with one
    technique less."""
    variant: VariantName
    technique: str | None
    """The one that is added or taken away."""
    samples: tuple[Window, ...]
    """One a round, or one each of the first rounds; those of one index were measured side by side."""
    settled: bool = False
    """Its ratios were, so that no more rounds were measured of it."""


def _utc(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo != UTC:
        raise ValueError("expected a time in UTC")
    return text


class Session(Record):
    """One sitting of the bench: when, and what the machine was like. No figure is computed from it."""

    start_utc: Annotated[str, AfterValidator(_utc)]
    """ISO 8601, to the second."""
    boot_id: str | None
    """Two sessions of one boot share what is drawn at boot. None: this system does not tell, as below."""
    uptime_seconds: float | None
    """When it started."""
    load_average: float
    """Of the minute before it started: processes that ran or waited for a processor."""
    steal_fraction: float | None
    """Of all processors' time meanwhile, what a hypervisor gave to others."""


ONE_SESSION = timedelta(hours=1)
"""Benches that began within it share boot, neighbours and time of day: together they count as one session."""


def session_starts(starts: Iterable[str]) -> list[str]:
    """When the sessions began to which benches of these ``starts`` (ISO 8601) belong, the oldest first."""
    found: list[str] = []
    for each in sorted(starts):
        if not found or datetime.fromisoformat(each) - datetime.fromisoformat(found[-1]) >= ONE_SESSION:
            found.append(each)
    return found


class Bench(Document):
    """``bench.json``, and each file of ``sessions``."""

    schema_: Literal[2] = Field(default=2, alias="schema")
    """1: with the role "again" instead of "aa_control". It is not read: to measure anew takes minutes."""
    indent = 1
    environment: str
    """The same, of all variants together."""
    commit: str | None
    """Checked out when this was measured, with "+" if files differed from it. None: no git here."""
    config: dict[str, dict[str, Any]]
    """``train`` and ``bench`` as params.yaml asked for them."""
    dataset: Dataset
    baseline: VariantName
    """The variant that is measured twice a round."""
    steps: int
    """Of each sample."""
    turns: int
    """In so many turns, between those of the other arms, were these steps taken. 1: each arm ran alone."""
    seconds: float
    """The whole measurement took."""
    interrupted: bool
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)]
    ledgers: dict[VariantName, Ledgers]
    """By variant."""
    flops: dict[VariantName, Flops]
    """By variant."""
    not_ablated: dict[VariantName, dict[str, str]]
    """Variant -> technique -> why its share was not measured."""
    session: Session
    keys: dict[VariantName, str]
    """By variant: digest of the code, plan, settings and environment it was measured with (``stages.key``). Sessions
    that have the same ones measured the same."""

    @property
    def rounds(self) -> int:
        """Of the baseline; a variant that was decided early has fewer samples, of the first rounds."""
        return max(len(arm.samples) for arm in self.arms)

    def problems(self) -> list[str]:
        found = [
            f"{arm.name}, round {number}: {problem}"
            for arm in self.arms
            for number, sample in enumerate(arm.samples, 1)
            for problem in (
                *sample.problems(arm.batch_size),
                *([f"{sample.measured_steps} of {self.steps} steps measured, and no reason"]
                  if sample.measured_steps != self.steps and not sample.refusals else []),
            )
        ]  # fmt: skip
        for one, other in combinations(self.arms, 2):
            speeds = [
                {each.samples_per_second for each in pair}
                for pair in zip(one.samples, other.samples, strict=False)
                if all(each.samples_per_second for each in pair)
            ]
            if speeds and all(len(each) == 1 for each in speeds):
                found.append(f"{one.name} and {other.name} are equal sample for sample: one is a copy")
        return found

    def arm(self, role: str, variant: str, technique: str | None = None) -> Arm | None:
        """The arm of this role; None if there is none."""
        wanted = (role, variant, technique)
        return next((arm for arm in self.arms if (arm.role, arm.variant, arm.technique) == wanted), None)


def kind_of(reason: str) -> str:
    """Reasons of a rejection that differ in their numbers alone are of one kind."""
    return re.sub(r"\d+", "", reason)


def rejected(windows: Sequence[tuple[int, Window]]) -> dict[str, list[int]]:
    """The first reason of each kind -> the numbers of the windows that were rejected for one of this kind."""
    kinds: dict[str, tuple[str, dict[int, None]]] = {}
    for number, window in windows:
        for reason in window.refusals:
            kinds.setdefault(kind_of(reason), (reason, {}))[1][number] = None
    return {reason: list(numbers) for reason, numbers in kinds.values()}


def rejections(arm: Arm) -> list[str]:
    """In how many rounds of the bench an arm was rejected, and why: a line a kind of reason."""
    return [
        f"rejected in {len(rounds)} of {len(arm.samples)} rounds: in round {rounds[0]}, {reason.rstrip('.')}"
        for reason, rounds in rejected(list(enumerate(arm.samples, 1))).items()
    ]


def summarise(runs: Sequence[Run]) -> Summary:
    """One number a quantity over the seeds of a variant. Unknown in any run is unknown in the summary."""
    accuracies = [run.test_accuracy for run in runs]
    return Summary(
        test_accuracy_mean_fraction=statistics.fmean(accuracies),
        test_accuracy_spread_fraction=statistics.stdev(accuracies) if len(runs) > 1 else None,
        samples_per_second=_median([run.samples_per_second for run in runs]),
        step_p50_ms=_median([run.step_p50_ms for run in runs]),
        peak_memory_bytes=_largest([run.peak_memory_bytes for run in runs]),
        train_seconds=statistics.median(run.train_seconds for run in runs),
    )


def result_file(variant: str, root: Path = RESULTS) -> Path:
    return root / f"{variant}.json"


def history_file(variant: str, root: Path = RESULTS) -> Path:
    return root / variant / "history.csv"


def system_file(variant: str, root: Path = RESULTS) -> Path:
    """Samples of the main rank's host: processor, memory and the job's GPUs there, about one a second."""
    return root / variant / "system.csv"


def model_file(variant: str, seed: int, root: Path = MODELS) -> Path:
    """The trained weights of one seed: a state dict, loadable with ``torch.load(weights_only=True)``."""
    return root / variant / f"seed-{seed}.pt"


def profile_directory(variant: str, root: Path = PROFILES) -> Path:
    """Holds profile.json, profile.md, trace.json.gz, and on CUDA memory.pickle."""
    return root / variant


def inference_file(variant: str, kind: Literal["json", "md"], root: Path = INFERENCE) -> Path:
    """What inference with the variant's model gave, for programs and for a person."""
    return root / f"{variant}.{kind}"


def read(path: Path, config: Config) -> Result:
    """The result of the variant that ``path`` is named after, if it is of the job that ``config`` describes.

    Results come from a cache that others may write to, so what they say is never imported, called or opened: that
    follows ``config``, and a result that says anything else is refused. Raises ResultError, which names the file and
    every key that differs.
    """
    variant = path.stem
    result = read_document(path, Result, f"run `dvc repro`, or `dvc repro train@{variant}` for this variant alone")
    params = json.loads(config.model_dump_json(include={"train", "variants"}))
    said = result.config.get("variant")
    if isinstance(said, dict):  # of a technique that was not known then it says nothing
        said = Variant().model_dump(mode="json") | said
    then = {"train": result.config.get("train"), "variants": {variant: said}}
    problems = [
        f"{json.dumps(path)[1:-1]} is {json.dumps(found)} there and {json.dumps(asked)} in params.yaml"
        for path, found, asked in differing(then, params | {"variants": {variant: params["variants"].get(variant)}})
        if path.removeprefix("train.") not in Train.OF_RESUMING  # DVC does not train again for these
    ]
    if result.variant != variant:
        problems.append(f"it holds the result of variant {result.variant!r}")
    if (seeds := [run.seed for run in result.runs]) != config.train.seeds:
        problems.append(f"it holds runs of the seeds {seeds}, not of train.seeds {config.train.seeds}")
    if result.score.name != config.train.metric:
        problems.append(f"its score is {result.score.name!r}, not train.metric {config.train.metric!r}")
    if problems:
        raise ResultError(
            f"{path} is not the result of what params.yaml says now: {'; '.join(problems)}. Run `dvc repro`, or "
            f"{train_again(variant)} if DVC takes it for up to date."
        )
    _refuse(path, _contradictions(result, config.train), f"run {train_again(variant)}")
    return result


def read_values(path: Path, variant: str) -> dict[str, Any]:
    """The content of a profile's or an inference's record. Raises ResultError unless it is one of ``variant``."""
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict) or values.get("variant") != variant:
        raise ResultError(f"{path} is not of variant {variant!r}, after which it is named: remove it, run `dvc repro`.")
    return values


def train_again(variant: str) -> str:
    """What trains ``variant`` whatever DVC's cache holds, for a message."""
    return f"`dvc repro --single-item --force train@{variant}`"


def differing(found: Any, asked: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The dotted path of each value that is not the one asked for, and both values."""
    if isinstance(found, Mapping) and isinstance(asked, Mapping):
        for key in dict.fromkeys([*asked, *found]):
            yield from differing(found.get(key), asked.get(key), f"{path}.{key}" if path else key)
    elif found != asked:
        yield path, found, asked


def read_bench(path: Path = BENCH_FILE) -> Bench:
    """Read the bench's file. Raises ResultError, naming the file, if it is not one."""
    return read_document(path, Bench, "run `dvc repro bench`, which measures it")


def read_document(path: Path, kind: type[D], remedy: str) -> D:
    """Undo of ``to_json``. Raises ResultError, which names the file and its wrong keys, and ends in ``remedy``."""
    try:
        document = kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ResultError(f"{path} is missing; {remedy}.") from None
    except (OSError, ValueError) as error:
        what = f"is not a {kind.__name__.lower()} that this version can read"
        raise ResultError(f"{path} {what}; {remedy}. ({error})") from None
    _refuse(path, document.problems(), remedy)
    return document


def read_sessions(directory: Path = SESSIONS) -> list[Bench]:
    """Those that were added to the bench's own, the oldest first. One of another version is named and set aside."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            found.append(read_document(path, Bench, "make again"))
        except ResultError as error:
            print(f"set aside: {error}")
    return found


def write(result: Result, path: Path) -> None:
    """Write ``path`` whole or not at all."""
    write_text(path, result.to_json())


def read_history(path: Path) -> list[HistoryRow]:
    """Rows in file order."""
    with path.open(newline="", encoding="utf-8") as file:
        return [history_row(row) for row in csv.DictReader(file)]


def history_row(fields: Mapping[str, str]) -> HistoryRow:
    """A row of the file; a blank field is None."""
    return HistoryRow.model_validate({key: value if value != "" else None for key, value in fields.items()})


def write_history(rows: Iterable[HistoryRow], path: Path) -> None:
    """Write all rows, whole or not at all."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(HistoryRow.model_fields))
    writer.writeheader()
    writer.writerows(row.model_dump() for row in rows)
    write_text(path, text.getvalue())


def append_history(row: HistoryRow, path: Path) -> None:
    """Add one row to a file that ``write_history`` began."""
    with naming(path), path.open("a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, list(HistoryRow.model_fields)).writerow(row.model_dump())


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest(record: Record) -> str:
    """SHA-256 over a record's content: equal records, and only those, share it."""
    return hashlib.sha256(json.dumps(record.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _contradictions(result: Result, train: Train) -> list[str]:
    """Where the figures of a result of the job ``train`` contradict it, its data or each other."""
    found = [f"seed {run.seed}: {problem}" for run in result.runs for problem in _of_run(run, result, train)]
    found += [
        f"seeds {one.seed} and {other.seed} ended in the same weights, so one is no run of its own"
        for one, other in combinations(result.runs, 2)
        if one.model_sha256 == other.model_sha256
    ]
    told, expected = result.summary.model_dump(), summarise(result.runs).model_dump()
    wrong = [key for key in told if not _close(told[key], expected[key])]
    return found + [f"summary.{key} is {told[key]}, of its runs it is {expected[key]}" for key in wrong]


def _of_run(run: Run, result: Result, train: Train) -> list[str]:
    found = run.problems(result.batch_size)
    asked = train.epochs * (result.dataset.train_count // max(1, result.batch_size))
    if run.steps != asked:
        found.append(f"{run.steps} steps, where the job has {asked}")
    # Each process that took the run up warmed up anew.
    fewest, most = (max(0, asked - train.warmup_steps * times) for times in (1 + run.resumes, 1))
    if not fewest <= run.measured_steps <= most:
        found.append(f"{run.measured_steps} of {run.steps} steps measured, where {fewest} to {most} are warm")
    if run.test_count != result.dataset.test_count:
        found.append(f"{run.test_count} samples tested of {result.dataset.test_count}")
    if run.test_correct > run.test_count:
        found.append(f"{run.test_correct} right of {run.test_count} test samples")
    elif not _close(run.test_accuracy * run.test_count, run.test_correct):
        found.append(f"test_accuracy is {run.test_accuracy}, where {run.test_correct} of {run.test_count} are right")
    return found


def _close(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isclose(one, other, rel_tol=1e-9))


def _refuse(path: Path, problems: Sequence[str], remedy: str) -> None:
    """Raise ResultError if there are any."""
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ResultError(f"{path} holds what was not measured: {'; '.join(problems[:5])}{more}. To go on, {remedy}.")


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def _largest(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None
