"""The records of a variant's result: the result, each seed's run, the measured window and a row of the history.

A quantity's key ends in the unit, unless the quantity is a count. Unless a field's docstring says otherwise, ``None``
means unknown: the value was rejected (``rejections`` has the reason), or this machine cannot measure the value. No
guess replaces an unknown value.
"""

from __future__ import annotations

import json
import operator
import statistics
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.params import Seed, VariantName
from pipeline.results.figures import FIGURES, Figure
from pipeline.results.rejections import Rejection


class Record(BaseModel):
    """A part of a result's file: frozen, without unknown keys, NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


Count = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[float, Field(ge=0, lt=1e15)]
"""Seconds, shares and other amounts that cannot be negative."""
Positive = Annotated[float, Field(gt=1e-9, lt=1e15)]
"""Speeds, and the times from which speeds are computed: never 0, and within bounds that no measurement reaches."""
Share = Annotated[float, Field(ge=0, le=1)]


class Document(Record):
    """A record that forms a whole file.

    If a class lists ``Document`` as its last base, the keys of ``Document`` come first in its file.
    """

    schema_: int = Field(default=1, ge=1, le=1, alias="schema")
    indent: ClassVar[int] = 2

    def problems(self) -> list[str]:
        """Return one message for each contradiction between figures, which cannot all have been measured."""
        return []

    def to_json(self) -> str:
        """Return the file's text."""
        values = self.model_dump(mode="json", by_alias=True)
        return json.dumps(values, indent=self.indent, allow_nan=False) + "\n"


class HistoryRow(Record):
    """One row of ``history.csv``: the state after ``step`` optimizer steps of one seed's run."""

    seed: Seed
    epoch: float
    """Passes over the training set so far; a whole number at the end of an epoch. For a script, whose epochs are
    unknown, 1 at its end."""
    step: Count
    train_seconds: Amount
    """Wall time spent in training so far, on the main rank, without evaluation and checkpoints."""
    learning_rate: float
    train_loss: float | None
    """Mean training loss over the steps since the last row. None for a script."""
    samples_per_second: Positive | None
    """Samples of the global batches per second since the last row."""
    test_loss: float | None = None
    """Loss on the test set. Only rows at the end of an epoch have ``test_loss`` and ``test_accuracy``."""
    test_accuracy: Share | None = None


Operation = Literal["all_reduce", "reduce_scatter", "all_gather"]


class Exchange(NamedTuple):
    """What a rank would exchange with others in a step."""

    ready_seconds: Amount
    """From the step's start until it could begin."""
    size_bytes: Count
    """Of the tensor that is reduced, or that all ranks hold in the end."""
    operation: Operation = "all_reduce"


class Arithmetic(Record):
    """Steps of ranks that exchange nothing (``Plan.reduces``): their arithmetic alone."""

    hosts: tuple[str, ...]
    """Each rank's host."""
    rank_seconds: tuple[Positive, ...]
    """Each rank's mean step, the wait for input included."""
    latest_seconds: Positive
    """The mean, over the steps, of the rank that is slowest in the step."""
    buckets: tuple[Exchange, ...]
    """The main rank's buckets of gradients (DDP), or what FSDP gathers and scatters, in their order; medians over the
    steps."""

    @property
    def mean_seconds(self) -> float:
        return statistics.fmean(self.rank_seconds)


class Window(Record):
    """Measurements of a window of steps: after the warm-up, without evaluation, in a steady state.

    Besides the fields below, a window may hold any declared figure (``results.figures``).
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Count | Amount | None] = Field(init=False)

    measured_steps: Count
    """Steps in the window, from which the speeds and step times below are computed."""
    samples_per_second: Positive | None
    """Samples of the global batches divided by the slowest rank's wall seconds."""
    disturbed_samples_per_second: Positive | None = Field(None, exclude_if=operator.not_)
    """The speed that was rejected because the machine was disturbed, and for nothing else: ``Arm.undisturbed``."""
    step_p50_ms: Positive | None
    step_p90_ms: Positive | None
    step_p99_ms: Positive | None
    input_wait_fraction: Amount | None
    """Share of the window spent waiting for input, on the rank that waited longest."""
    peak_memory_bytes: Count | None
    """The peak that comparisons use. On GPUs, which have separate memories, it is the largest peak of a rank. On a CPU,
    whose memory the ranks share, it is the sum of the ranks' peaks. The ranks may reach their peaks at different times,
    so the sum can slightly exceed the real peak."""
    peak_memory_rank_bytes: tuple[Count | None, ...]
    """One peak per rank. CUDA: max_memory_allocated, plus what CUDA graphs keep. CPU: the peak resident memory
    minus its peak after the imports, both without the pages of mapped files. Empty if the round was not to measure
    memory (``Figure.taken_in``)."""
    arithmetic_rank_ms: tuple[Amount, ...] = Field((), exclude_if=operator.not_)
    """Each rank's time to compute a step alone (``figures.ARITHMETIC``). Empty if unknown."""
    arithmetic: Arithmetic | None = Field(None, exclude_if=operator.not_)
    """Of ranks that exchange nothing; None for all others."""
    peak_reserved_bytes: Count | None
    """CUDA: the largest max_memory_reserved of all ranks. None on a CPU."""
    driver_memory_bytes: Count | None = None
    """CUDA: memory that the driver held for a process at the window's end, including the context and libraries; the
    largest value of all ranks. None on a CPU, or if the driver does not report it."""
    allocator_retries: Count | None
    """CUDA: number of cudaMalloc retries after a cache flush, summed over all ranks. None on a CPU."""
    rejections: tuple[Rejection, ...]
    """Why some of the numbers above are None or cannot be trusted; empty if there is no reason."""
    joules_per_sample: Positive | None = Field(None, exclude_if=operator.not_)
    """Energy of all ranks' devices per sample of the global batches. None: rejected, unknown or not requested."""
    why_no_energy: Rejection | None = Field(None, exclude_if=operator.not_)
    """Why ``joules_per_sample`` is unknown."""

    @model_validator(mode="after")
    def _of_declared_figures(self) -> Self:
        if undeclared := sorted(self.__pydantic_extra__.keys() - {figure.field for figure in FIGURES}):
            raise ValueError(f"{', '.join(undeclared)}: extra inputs are not permitted")
        return self

    def problems(self, batch_size: int) -> list[str]:
        """Return contradictions between the window's figures. ``batch_size`` is the global batch size."""
        if not (self.samples_per_second and self.step_p50_ms):
            return []
        contradictions = [] if self.measured_steps else ["a speed, although no steps were measured"]
        if not self.step_p50_ms <= (self.step_p90_ms or 0) <= (self.step_p99_ms or 0):
            contradictions.append("percentiles of the step times that are not in ascending order")
        # Half of the steps take the median or longer, so the mean is at least half the median (10% tolerance).
        if self.samples_per_second > 2.2 * batch_size / (self.step_p50_ms / 1e3):
            contradictions.append(
                f"{self.samples_per_second:g} samples/s, although half of the steps of {batch_size} samples took "
                f"{self.step_p50_ms:g} ms or longer"
            )
        return contradictions


class Run(Window):
    """Measurements of one seed's run."""

    seed: Seed
    test_accuracy: Share
    """``train.metric`` of the test set, or its mean over the test samples, 0 to 1: test_correct / test_count."""
    test_correct: Count | Amount
    """For accuracy, the number of correct samples; for other metrics, the sum of the samples' scores."""
    test_count: Count
    """1 for a script, which only says its score."""
    test_loss: float | None
    """Mean of ``train.loss`` over the test set; cross-entropy without label smoothing. None for a script."""
    train_loss: float | None
    """Mean training loss of the last epoch. None for a script."""
    steps: Count
    """Optimizer steps, warm-up included."""
    startup_seconds: Amount | None
    """Time from the process's start to the first step. None after a resume, and for later seeds, which start warm."""
    first_step_seconds: Amount | None
    """Time of the first step, with compilation, autotuning and allocation. None if ``startup_seconds`` is None."""
    train_seconds: Amount
    """Time of all training steps, including the first step and the warm-up, without evaluation and checkpoints."""
    evaluate_seconds: Amount
    """Time of all evaluations together."""
    resumes: Count
    """Number of times that this run was interrupted and resumed."""
    model_sha256: str
    """SHA-256 over names, dtypes, shapes and bytes of the model's state dict, in order."""
    teacher_sha256: str | None = Field(None, exclude_if=operator.not_)
    """The same hash for the teacher's weights, if the variant has a teacher."""
    findings: dict[str, float] = {}
    """Numbers that techniques and the task report on the main rank, such as chosen blocks or perplexity."""


class ScoreName(Record):
    """The metric behind ``test_accuracy`` and the margin of accuracy."""

    name: str
    """``train.metric``."""
    direction: Literal["higher is better"] = "higher is better"
    unit: Literal["fraction"] = "fraction"

    @property
    def in_words(self) -> str:
        """The score as a noun: "token accuracy", "score within tolerance"; "score" for the user's own metric."""
        words = "score" if ":" in self.name else self.name.replace("_", " ")
        return words if words.endswith(("accuracy", "score")) else f"score {words}"


class Unit(Record):
    """The unit in which throughput is counted: samples, or parts of a sample, such as tokens."""

    name: str = "samples"
    per_sample: Count = 1


class DatasetFacts(Record):
    name: str
    sha256: str
    train_count: Count
    test_count: Count
    test_in_train_count: Count | None = None
    """Number of test inputs that are also training inputs. This count and the next come from ``dataset.json``."""
    test_repeated_count: Count | None = None
    """Number of test inputs that repeat an earlier test input."""
    most_frequent_fraction: Share | None = Field(None, exclude_if=lambda value: value is None)
    """Share of the most frequent class among the test labels; None if the targets are not labels."""


class RunConditions(Record):
    """How a variant ran on this machine."""

    applied: dict[str, Any]
    """The variant's settings as they were applied."""
    skipped: dict[str, str]
    """Technique that was skipped, or GPUs that stayed unused ("GPU" or "1 of 3 GPUs") -> the reason."""
    decided: dict[str, str]
    """Technique -> its automatic choice on this machine, and the reason. The key ``deterministic`` holds the reason why
    a deterministic run is impossible."""
    batch_size: Count
    """Global batch size of the training; with weak scaling, a multiple of the job's batch size."""
    learning_rate: float
    """Peak learning rate of the training; with weak scaling, a multiple of the job's learning rate."""
    micro_batches: int | None
    """Micro-batches of each process in one step. None if unknown."""
    device: str
    """Name of the GPU or CPU."""
    backend: str | None
    """nccl or gloo; None for a single process."""
    world_size: int
    hosts: int = Field(1, exclude_if=(1).__eq__)
    """Number of hosts among which the processes were divided."""
    threads_per_process: int
    """Intra-operation CPU threads of each process."""
    placement: Literal["resident", "streamed", "dataloader"] | None
    """None if unknown."""
    parameter_count: int
    trained_count: int | None = Field(None, exclude_if=lambda count: count is None)
    """Number of parameters that are trained; None: all."""
    changed: str = Field("", exclude_if=operator.not_)
    """What ran instead of a variant's settings, such as the arguments of a command."""

    @property
    def conditions(self) -> RunConditions:
        """Only the fields of ``RunConditions``, from a record that has further fields."""
        return RunConditions(**{key: getattr(self, key) for key in RunConditions.model_fields})


class VariantDocument(Document):
    """A file about one variant."""

    variant: VariantName
    environment: str
    """Hash of the environment on which the numbers depend: ``environment.hash_of`` for the variant or, in a file of
    inference measurements, for the forms in ``infer.forms``."""
    config: dict[str, dict[str, Any]]
    """``train`` and ``variant``, or ``train`` and ``infer``, as params.yaml asked for them."""
    dataset: DatasetFacts | None
    """None if unknown."""


class Result(RunConditions, VariantDocument):
    """``results/<variant>.json``."""

    schema_: Literal[4] = Field(default=4, alias="schema")
    """Files of older versions are refused."""
    key: str
    """Digest of the code, plan, settings and environment of the training (``stages.key``)."""
    history_sha256: str
    """SHA-256 of the ``history.csv`` that was written with this result."""
    score: ScoreName
    unit: Unit = Unit()
    directions: dict[str, Literal["higher is better", "lower is better"]] = {}
    """For each of the task's figures in the runs' ``findings``: whether higher or lower values are better."""
    runs: tuple[Run, ...]


def summarise(runs: Sequence[Run]) -> dict[str, int | float | None]:
    """Return the seeds' mean accuracy, its sample standard deviation (None for a single seed), and each figure that is
    joined over seeds; None if a seed's value is unknown, or without seeds."""
    accuracies = [run.test_accuracy for run in runs]
    return {
        "test_accuracy_mean_fraction": statistics.fmean(accuracies) if runs else None,
        "test_accuracy_spread_fraction": statistics.stdev(accuracies) if len(runs) > 1 else None,
        **{figure.field: over_seeds(figure, runs) for figure in FIGURES if figure.over_seeds in ("median", "largest")},
    }


def over_seeds(figure: Figure, runs: Sequence[Run]) -> Any:
    """Join the seeds' values of ``figure``; return None if a value is unknown, or without seeds."""
    values = [figure.of(run) for run in runs] or [None]
    if figure.over_seeds == "first":
        return values[0]
    if None in values:
        return None
    return max(values) if figure.over_seeds == "largest" else statistics.median(values)
