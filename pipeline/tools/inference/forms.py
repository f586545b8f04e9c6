"""The forms in which a trained model can be deployed, each made from the same float32 weights.

Every form takes a batch of N raw inputs [N, ...], such as uint8 images, on its device and returns float32 outputs
[N, ...]. The form includes the task's preprocessing. A form that cannot be made here raises ``Unavailable`` with the
reason.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import operator
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from io import BytesIO

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.environment import software
from pipeline.errors import first_line
from pipeline.models.keeping import copied
from pipeline.step import Inputs
from pipeline.tasks import Task

Predict = Callable[[Inputs], torch.Tensor]
CALIBRATION_SAMPLES = 256


class Unavailable(Exception):
    """The form does not work on this machine or with this model; the message says why."""


@dataclass(frozen=True)
class Trained:
    """The trained model, and everything else from which a form is made."""

    model: nn.Module
    """The model in float32 and evaluation mode on the task's device; it maps preprocessed inputs to outputs."""
    task: Task
    batch_sizes: Sequence[int]
    """Batch sizes with which the forms will be called."""
    native: frozenset[str]
    """The 16-bit types (bf16, fp16) in which the device computes natively; with ``train.without_native: run``, both."""

    @cached_property
    def samples(self) -> Inputs:
        """Raw inputs [samples, ...] of at least two training samples on the device, to calibrate and to trace with.
        They are evenly spread over the data set, which may be sorted by class."""
        train = self.task.dataset.train
        rows = torch.linspace(0, len(train) - 1, max(min(CALIBRATION_SAMPLES, len(train)), 2)).round().long()
        return self.task.raw([train.arrays[name][rows].to(self.task.device) for name in self.task.arrays])[0]

    def deployed(self, model: nn.Module | None = None) -> nn.Module:
        """Return the preprocessing followed by ``model`` (default: the trained one)."""
        return nn.Sequential(self.task.preprocess, model or self.model).eval()


@dataclass(frozen=True)
class Made:
    """A form, ready to be called."""

    predict: Predict
    model_bytes: int
    file_bytes: int | None = None


@dataclass(frozen=True)
class Kind:
    """What a form does, and how it is made from a trained model."""

    does: str
    make: Callable[[Trained], Made]


def eager(trained: Trained) -> Made:
    return _made(trained.deployed())


def compiled(trained: Trained) -> Made:
    _need_compiler(trained.task.device)
    deployed = trained.deployed()
    return Made(torch.compile(deployed, dynamic=False), bytes_of(deployed))


def exported(trained: Trained) -> Made:
    """Export the model, save the program, and return it as another process would load it."""
    file = BytesIO()
    torch.export.save(_export(trained.deployed(), trained.samples), file)
    size = len(file.getvalue())
    file.seek(0)
    loaded = torch.export.load(file).module()
    return Made(loaded, bytes_of(loaded), size)


def int8(trained: Trained) -> Made:
    """Return the model with weights and activations in 8 bits. Their ranges are calibrated on training samples (static
    quantisation).

    Source: torchao, PyTorch 2 Export Quantization. torch.compile provides the int8 kernels for x86 CPUs.
    """
    if trained.task.device.type != "cpu":
        raise Unavailable("PyTorch has no maintained int8 convolutions for GPUs, and TensorRT is not part of PyTorch")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise Unavailable(f"the int8 kernels are for x86 CPUs, and this CPU is {platform.machine()}")
    if importlib.util.find_spec("torchao") is None:
        raise Unavailable("it needs torchao, which is not installed: pip install torchao")
    _need_compiler(trained.task.device)
    versions = f"torchao {importlib.metadata.version('torchao')} with torch {torch.__version__}"
    with warnings.catch_warnings(action="ignore"):  # torch warns about its own code
        try:
            return _int8(trained)
        except Exception as error:  # for an unsupported model, the two libraries may raise anything
            raise Unavailable(f"{versions} cannot quantise this model ({cause(error)})") from error


def bytes_of(module: nn.Module) -> int:
    """Return the bytes of a module's parameters, buffers and constants, each counted once. In a graph module, only the
    tensors that its graph reads are counted."""
    if isinstance(module, torch.fx.GraphModule):  # a quantised module also keeps its float32 weights
        read = (operator.attrgetter(str(node.target))(module) for node in module.graph.nodes if node.op == "get_attr")
        tensors = [value for value in read if isinstance(value, torch.Tensor)]
    else:
        tensors = [*module.parameters(), *module.buffers()]
    return sum({value.data_ptr(): value.nbytes for value in tensors}.values())


def cause(error: Exception) -> str:
    """Return the error in one line. For a compiler's error, return the error that it contains."""
    if isinstance(error, Unavailable):
        return str(error)
    inside: Exception = getattr(error, "inner_exception", error)
    kind, said = type(inside).__name__, first_line(inside)
    return kind if said == kind else f"{kind}: {said}"


def _int8(trained: Trained) -> Made:
    import torch._inductor.config as inductor
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(_export(trained.deployed(), trained.samples).module(), quantizer)
    for rows in torch.arange(len(tree_leaves(trained.samples)[0])).split(32):
        prepared(_rows(trained.samples, rows))
    converted = convert_pt2e(prepared)
    if "quantize_per_tensor" not in str(converted.graph):
        raise Unavailable("they have no int8 kernel for any part of it")
    predict: Predict = torch.compile(converted, dynamic=False)
    with inductor.patch(freezing=True):  # the calls compile; freezing packs the weights for int8
        for size in trained.batch_sizes:
            predict(_rows(trained.samples, torch.arange(size) % len(tree_leaves(trained.samples)[0])))
    return Made(predict, bytes_of(converted))


class _InPrecision(nn.Module):
    """A copy of a model with weights and activations in another dtype. Its outputs are float32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = copied(model, lambda tensor: tensor.detach().clone()).to(dtype), dtype

    def forward(self, inputs: Inputs) -> torch.Tensor:
        outputs: torch.Tensor = self.model(tree_map(self._converted, inputs))
        return outputs.float()

    def _converted(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.dtype) if values.is_floating_point() else values


def _rows(inputs: Inputs, rows: torch.Tensor | slice) -> Inputs:
    return tree_map(lambda values: values[rows], inputs)


def _made(module: nn.Module) -> Made:
    return Made(module, bytes_of(module))


def _export(deployed: nn.Module, samples: Inputs) -> torch.export.ExportedProgram:
    """Return the exported program for batches of any size. The example batch has two samples, because torch.export
    would treat a size of 1 as a constant."""
    batch = torch.export.Dim("batch")
    shapes = tree_map(lambda _: {0: batch}, samples)
    return torch.export.export(deployed, (_rows(samples, slice(2)),), dynamic_shapes=(shapes,))


def _need_compiler(device: torch.device) -> None:
    """Raise Unavailable if torch.compile cannot build code for the CPU here."""
    if device.type == "cpu" and (reason := software.no_kernels(software.cpu_compiler())):
        raise Unavailable(f"torch.compile cannot build code for this CPU: {reason}")


def _half(name: str, dtype: torch.dtype, trained: Trained) -> Made:
    if name not in trained.native:
        device = "GPU" if trained.task.device.type == "cuda" else "CPU"
        raise Unavailable(f"this {device} has no native {name} and would emulate it, several times slower")
    return _made(trained.deployed(_InPrecision(trained.model, dtype)))


_HALF = "weights and activations in {} (autocast, which training uses, keeps float32 weights)"
FORMS: Mapping[str, Kind] = {
    "eager": Kind("float32, operator by operator: the plain form, with which the other forms are compared", eager),
    "compiled": Kind("float32 by torch.compile (Inductor)", compiled),
    "bf16": Kind(_HALF.format("bfloat16"), partial(_half, "bf16", torch.bfloat16)),
    "fp16": Kind(_HALF.format("float16"), partial(_half, "fp16", torch.float16)),
    "int8": Kind("weights and activations in 8 bits, calibrated on training samples (torchao PT2E, Inductor)", int8),
    "exported": Kind("float32, exported with torch.export, saved as .pt2 and loaded back", exported),
}
