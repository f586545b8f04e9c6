"""The measurements of a trained model's inference, stored in ``inference/<variant>.json``."""

from __future__ import annotations

import operator
from typing import Literal

from pydantic import Field

from pipeline.comparison.stats import Difference
from pipeline.params import Seed
from pipeline.results import Record, VariantDocument


class Latency(Record):
    """Latency of calls with one sample, from the call until the outputs are computed."""

    p50_ms: float
    p50_low_ms: float
    """``p50_low_ms`` and ``p50_high_ms``: the smallest and the largest of the rounds' medians."""
    p50_high_ms: float
    p99_ms: float | None
    """None if there were fewer than ``FEWEST_FOR_P99`` calls, because one hundredth of them is less than one call."""
    calls: int


class Throughput(Record):
    """Throughput of successive calls with batches of one size."""

    batch_size: int
    samples_per_second: float
    """The median over rounds."""
    low_samples_per_second: float
    """``low_...`` and ``high_...``: the slowest and the fastest round."""
    high_samples_per_second: float
    ratio: Difference
    """Ratio to the plain form in the same rounds; no numbers if it is not trusted. For the plain form itself: the ratio
    to its second measurement, which shows the noise."""
    joules_per_sample: float | None = Field(None, exclude_if=operator.not_)
    """Energy of the device per sample (``measurement.energy``): the median over rounds. ``low_...`` and ``high_...``:
    the smallest and the largest value of a round."""
    low_joules_per_sample: float | None = Field(None, exclude_if=operator.not_)
    high_joules_per_sample: float | None = Field(None, exclude_if=operator.not_)
    why_no_energy: str | None = Field(None, exclude_if=operator.not_)
    """Why the energy is unknown. None if the energy is known, or was not asked for."""


class Agreement(Record):
    """Agreement with the predictions of the plain float32 form on the same device, over the whole test set."""

    equal_count: int | float
    """Sum of the samples' scores against the plain form's predictions. For classes, this is the number of samples with
    the same predicted class."""
    correct_count: int | float
    """Sum of the samples' scores against the targets."""
    test_count: int
    largest_logit_difference: float

    @property
    def equal_fraction(self) -> float:
        return self.equal_count / self.test_count

    @property
    def accuracy(self) -> float:
        return self.correct_count / self.test_count


class Measured(Record):
    """The figures of one form."""

    prepare_seconds: float
    """Time to make the form (compile, export, calibrate) and to call it once with each batch size."""
    model_bytes: int
    """Size of the form's parameters, buffers and constants."""
    file_bytes: int | None
    """Size of the saved program; None if the form is not saved."""
    latency: Latency
    throughput: tuple[Throughput, ...]
    agreement: Agreement
    remarks: tuple[str, ...]


class Form(Record):
    """One form of the model on one device."""

    name: str
    device: str
    """Name of the GPU or CPU."""
    device_type: Literal["cpu", "cuda"]
    does: str
    why_not: str | None
    """Why the form could not run here; None if it ran."""
    measured: Measured | None


class Inference(VariantDocument):
    """``inference/<variant>.json``."""

    schema_: Literal[2] = Field(default=2, alias="schema")
    seed: Seed
    model_sha256: str
    rounds: int
    threads: int
    """CPU threads per operation."""
    forms: tuple[Form, ...]
