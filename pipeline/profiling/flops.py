"""Floating-point operations of training, counted operation by operation; and what devices could do at most."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pipeline import models
from pipeline.distributed import ALONE
from pipeline.plans import Plan
from pipeline.results import Flops
from pipeline.techniques import Inputs, Technique, of_plan

_SAMPLES = 2
"""Counted at once: BatchNorm does not train on a single value a channel. The count is proportional to them."""


class Peak(NamedTuple):
    """A GPU's dense peak in 10^12 operations a second; None: not known, or not in its hardware."""

    fp32: float | None
    """Without TF32, whose own peak is not listed: for it there is no utilisation."""
    bf16: float | None
    fp16: float | None


_A100 = Peak(19.5, 312, 312)
_V100_SXM, _V100_PCIE = Peak(15.7, None, 125), Peak(14, None, 112)

PEAKS = {
    # By torch.cuda.get_device_name. From NVIDIA's data sheets, at the boost clock; where they give 16-bit Tensor Core
    # figures with sparsity alone (Hopper, Ada, Blackwell), half of those.
    "NVIDIA B200": Peak(None, 2250, 2250),  # its data sheets disagree on fp32
    "NVIDIA H200": Peak(67, 989.5, 989.5),
    "NVIDIA H200 NVL": Peak(60, 835.5, 835.5),
    "NVIDIA H100 80GB HBM3": Peak(67, 989.5, 989.5),  # SXM
    "NVIDIA H100 NVL": Peak(60, 835.5, 835.5),
    "NVIDIA H100 PCIe": Peak(51, 756.5, 756.5),
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA A10": Peak(31.2, 125, 125),
    "NVIDIA L4": Peak(30.3, 121, 121),
    "NVIDIA L40S": Peak(91.6, 362.05, 362.05),
    "Tesla V100-SXM2-16GB": _V100_SXM,
    "Tesla V100-SXM2-32GB": _V100_SXM,
    "Tesla V100-PCIE-16GB": _V100_PCIE,
    "Tesla V100-PCIE-32GB": _V100_PCIE,
    "Tesla T4": Peak(8.1, None, 65),
    # From NVIDIA's architecture papers on GA102 and Ada: 16-bit products that are added up in float32.
    "NVIDIA RTX A6000": Peak(38.7, 154.8, 154.8),
    "NVIDIA GeForce RTX 3090": Peak(35.6, 71, 71),
    "NVIDIA GeForce RTX 4090": Peak(82.6, 165.2, 165.2),
}


def counted(plan: Plan, shape: tuple[int, int, int], classes: int, device_name: str) -> Flops:
    """Operations of one forward and backward pass for one sample of ``shape`` (channels, height, width).

    The model and the variant's techniques run on the meta device, without arithmetic; a model that cannot, because it
    looks at a value, runs on the CPU. Precision and parallelism change no count. What an attention kernel recomputes
    inside itself is not counted. Raises ModelError.
    """
    with torch.random.fork_rng(devices=[]):
        model = models.of_job(plan.train, shape, classes)
        images = torch.zeros(_SAMPLES, *shape)
        recomputing = [each(plan, ALONE) for each in of_plan(plan) if each.recomputes]
        counts = [_count(model, techniques, images) for techniques in ([], recomputing)]
    applied = plan.applied
    precision = "bf16" if applied.parameter_precision == "bf16" else applied.precision
    peak = getattr(PEAKS.get(device_name), precision, None) if plan.device == "cuda" else None
    return Flops(
        model_per_sample=counts[0] // _SAMPLES,
        executed_per_sample=counts[1] // _SAMPLES,
        peak_per_second=None if peak is None else peak * 1e12 * plan.processes * plan.devices_per_process,
    )


def _count(model: nn.Module, techniques: list[Technique], images: torch.Tensor) -> int:
    """Operations of a step's forward and backward pass."""
    try:
        return _count_on("meta", model, techniques, images)
    except Exception:  # whatever the model does that needs values; a mistake in it shows again
        return _count_on("cpu", model, techniques, images)


def _count_on(device: str, model: nn.Module, techniques: list[Technique], images: torch.Tensor) -> int:
    model, images = copy.deepcopy(model).to(device), images.to(device)
    labels = torch.zeros(len(images), dtype=torch.int64, device=device)
    inputs = Inputs((images.shape[1], images.shape[2], images.shape[3]), lambda: (images, labels))
    for technique in techniques:
        model = technique.change_model(model, inputs)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(images), labels).backward()
    total: int = counter.get_total_flops()
    return total
