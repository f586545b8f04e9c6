"""Count the floating-point operations of training, operator by operator. List the peak throughput of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from pipeline.distributed import ALONE
from pipeline.models.keeping import copied
from pipeline.params import entry
from pipeline.plans import Plan
from pipeline.processes import randomness
from pipeline.results import Flops
from pipeline.tasks import Task
from pipeline.techniques import Setup, Technique, of_plan

_SAMPLES = 2
"""Number of samples in one count. One is too few, because BatchNorm cannot train on a single value per channel."""


class Peak(NamedTuple):
    """A GPU's peak for dense matrices, in 10^12 operations per second. None: unknown, or the GPU lacks the format."""

    fp32: float | None
    """Without TF32. TF32's peak is not listed, so no utilisation is computed for it."""
    bf16: float | None
    fp16: float | None


_A100 = Peak(19.5, 312, 312)
_V100_SXM, _V100_PCIE = Peak(15.7, None, 125), Peak(14, None, 112)

PEAKS = {
    # The keys are names from torch.cuda.get_device_name. The figures are from NVIDIA's data sheets, at the boost clock.
    # For Hopper, Ada and Blackwell the data sheets give 16-bit Tensor Core figures only with sparsity, so half of each
    # figure is used here.
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
    # These figures are from NVIDIA's papers on GA102 and Ada, for 16-bit products accumulated in float32.
    "NVIDIA RTX A6000": Peak(38.7, 154.8, 154.8),
    "NVIDIA GeForce RTX 3090": Peak(35.6, 71, 71),
    "NVIDIA GeForce RTX 4090": Peak(82.6, 165.2, 165.2),
}


def counted(plan: Plan, task: Task, device_name: str) -> Flops:
    """Return the operations of a forward and backward pass for one sample, and the peak throughput of the devices.

    Two counts are made: of the model, with adapters, and of the model with recomputation and teacher too. The models
    run on the meta device, without arithmetic. A model that reads the values of tensors runs on the CPU instead.
    Precision and parallelism do not change the counts. Recomputation inside an attention kernel is not counted. Raises
    ModelError.
    """
    with randomness.kept():
        model = task.model()
        adapting = [technique(plan, ALONE) for technique in of_plan(plan) if entry(technique.name).trains_less]
        recomputing = [technique(plan, ALONE) for technique in of_plan(plan) if entry(technique.name).recomputes]
        counts = [_count(model, task, changing) for changing in (adapting, [*adapting, *recomputing])]
        if taught_by := plan.applied.distillation:
            teacher = task.model(taught_by.model, taught_by.model_options).requires_grad_(False)
            counts[1] += _count(teacher, task, [])
    applied = plan.applied
    precision = "bf16" if applied.parameter_precision == "bf16" else applied.precision
    peak = getattr(PEAKS.get(device_name), precision, None) if plan.device == "cuda" else None
    return Flops(
        model_per_sample=counts[0] // _SAMPLES,
        executed_per_sample=counts[1] // _SAMPLES,
        peak_per_second=None if peak is None else peak * 1e12 * plan.processes * plan.devices_per_process,
    )


def _count(model: nn.Module, task: Task, techniques: Sequence[Technique]) -> int:
    """Count the operations of the forward pass and, if the model has trainable parameters, of the backward pass."""
    try:
        return _count_on("meta", model, task, techniques)
    except Exception:  # without values, an operation can raise any error; a bug in the model raises again on the CPU
        return _count_on("cpu", model, task, techniques)


def _count_on(device: str, model: nn.Module, task: Task, techniques: Sequence[Technique]) -> int:
    setup = Setup(copied(model, lambda tensor: tensor.detach().to(device, copy=True)), task)
    inputs = tree_map(lambda values: values.to(device), task.inputs(_SAMPLES))
    for technique in techniques:
        technique.change_model(setup)
    with FlopCounterMode(display=False) as counter:
        total = setup.model(inputs).sum()  # stands for the loss, whose operations are not counted
        if total.requires_grad:
            total.backward()
    count: int = counter.get_total_flops()
    return count
