"""Techniques of precision: the number formats in which a model computes."""

from __future__ import annotations

from typing import Literal

from pipeline.params.catalogue.base import Entry, needs_gpu, needs_package, without_native_bf16
from pipeline.params.machine import Machine
from pipeline.params.sections import Section


def _why_no_tf32(machine: Machine, on_gpu: bool) -> str | None:
    return None if on_gpu and machine.gpu_tf32 else "it needs a GPU with TF32 (compute capability 8.0 or above)"


def _without_float8(machine: Machine, on_gpu: bool) -> str | None:
    return None if on_gpu and machine.gpu_float8 else "only GPUs from compute capability 8.9 multiply in float8"


class PrecisionSettings(Section):
    """A variant's settings for precision."""

    precision: Literal["fp32", "tf32", "bf16", "fp16", "float8"] = "fp32"


PRECISION: tuple[Entry, ...] = (
    Entry(
        name="tf32",
        setting="precision: tf32",
        searched_for=("TensorFloat-32", "allow_tf32", "set_float32_matmul_precision", "fp32_precision"),
        does="Matrix products and convolutions of float32 numbers run on Tensor Cores, which read 10 bits of mantissa",
        pays="on GPUs from compute capability 8.0, for float32 models that spend most time in matrix products and "
        "convolutions",
        costs="each factor keeps 10 of its 23 bits of mantissa; sums stay in float32",
        source="NVIDIA A100 Tensor Core GPU Architecture, 2020",
        changes="rounding",
        roundoff=2.0**-11,
        implementation="tf32.TF32",
        why_not=_why_no_tf32,
    ),
    Entry(
        name="bf16",
        setting="precision: bf16",
        searched_for=("bfloat16", "automatic mixed precision", "AMP", "autocast"),
        does="Matrix products and convolutions run in bfloat16; parameters and sums stay float32",
        pays="on GPUs from compute capability 8.0 and CPUs with AVX-512 BF16 or AMX, for models whose speed is limited "
        "by arithmetic, not by memory",
        costs="activations and their gradients keep 7 bits of mantissa",
        source="Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019",
        changes="rounding",
        roundoff=2.0**-8,
        layer="forward",
        implementation="precision.BFloat16",
        emulated=without_native_bf16,
    ),
    Entry(
        name="fp16",
        setting="precision: fp16",
        searched_for=("float16", "half precision", "GradScaler", "automatic mixed precision", "AMP", "autocast"),
        does="Matrix products and convolutions run in float16. The loss is multiplied by a scale, which is adapted "
        "so that gradients neither vanish nor overflow",
        pays="on GPUs with Tensor Cores but without bfloat16 (V100, T4)",
        costs="numbers range only from 6e-8 to 65504, and steps whose gradients overflow are skipped; each step reads "
        "the gradients once more",
        source="Micikevicius et al., Mixed Precision Training, ICLR 2018",
        changes="rounding",
        roundoff=2.0**-11,
        layer="forward",
        implementation="precision.Float16",
        why_not=needs_gpu,
    ),
    Entry(
        name="float8",
        setting="precision: float8",
        searched_for=("FP8", "e4m3", "e5m2", "torchao.float8", "Float8Linear", "Transformer Engine"),
        does="All linear layers except the last multiply in float8 (e4m3, and e5m2 for gradients), with a scale per "
        "tensor. Everything else runs as with bf16, and parameters stay float32",
        pays="with compile, on GPUs from compute capability 8.9, for linear layers that are wide (4,096 and more)",
        costs="factors keep 3 bits of mantissa, gradients 2 bits; each factor is read once more to compute its scale, "
        "unless compile fuses this. Layers whose sides are not multiples of 16 stay in bf16",
        source="Micikevicius et al., FP8 Formats for Deep Learning, 2022; torchao documentation: torchao.float8",
        changes="rounding",
        roundoff=2.0**-3,
        needs_measuring=True,
        layer="model",
        implementation="precision.Float8",
        why_not=needs_package("torchao", "float8"),
        emulated=_without_float8,
        relies_on=("torchao",),
        excludes={
            "data_parallel": "DataParallel's threads do not inherit autocast's number format",
            "tensor": "tensor cuts the layers, and each part would have its own scale",
            "pipeline": "pipeline records the model as a chain, but cannot record layers that scale their factors",
            "parameter_precision": "the factors would be rounded twice, to bfloat16 and to float8",
        },
    ),
)
