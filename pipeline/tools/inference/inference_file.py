"""What inference with a trained model gave, as ``inference/<variant>.json``."""

from __future__ import annotations

from typing import Literal

from pipeline.params import Seed
from pipeline.results import Record, VariantDocument


class Latency(Record):
    """Of one image at a time, from the call to its logits being there."""

    p50_ms: float
    p50_low_ms: float
    """The smallest and the largest of the rounds' medians."""
    p50_high_ms: float
    p99_ms: float | None
    """None below ``FEWEST_FOR_P99`` calls, of which the slowest hundredth would be less than one."""
    calls: int


class Throughput(Record):
    """Of batches of one size, one after the other."""

    batch_size: int
    samples_per_second: float
    """The median over rounds."""
    low_samples_per_second: float
    """The slowest and the fastest round."""
    high_samples_per_second: float
    ratio: float | None
    """To the plain form in the same round: the median over rounds, with its 95% interval. None: refused, see Noise."""
    ratio_low: float | None
    ratio_high: float | None


class Agreement(Record):
    """With the predictions of the plain float32 form on the same device, over the whole test set."""

    equal_count: int
    """Images with the same predicted class."""
    correct_count: int
    test_count: int
    largest_logit_difference: float

    @property
    def equal_fraction(self) -> float:
        return self.equal_count / self.test_count

    @property
    def accuracy(self) -> float:
        return self.correct_count / self.test_count


class Measured(Record):
    """What one form does."""

    prepare_seconds: float
    """Cold: to make the form (compile, export, calibrate) and to call it once with each batch size."""
    model_bytes: int
    """Of its parameters, buffers and constants."""
    file_bytes: int | None
    """Of the saved program, for a form that is one."""
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
    """Why it could not run here; None if it did."""
    measured: Measured | None


class Noise(Record):
    """The plain form against itself in the same rounds: what a ratio of 1 looks like here."""

    device_type: Literal["cpu", "cuda"]
    batch_size: int
    ratio: float
    refused: str | None
    """Why no ratio with this batch size is believed; None if they are."""


class Inference(VariantDocument):
    """``inference/<variant>.json``."""

    seed: Seed
    model_sha256: str
    rounds: int
    threads: int
    """CPU threads of an operation."""
    forms: tuple[Form, ...]
    noise: tuple[Noise, ...]
