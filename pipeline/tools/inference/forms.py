"""The forms in which a trained model can be deployed, each made of the same float32 weights.

Every form takes uint8 images [N, C, H, W] on its device and returns float32 logits [N, classes]; the normalisation is a
part of it. A form that cannot be made here raises ``Unavailable`` with the reason.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import operator
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from pipeline.environment import software
from pipeline.errors import first_line
from pipeline.models import Classifier

Predict = Callable[[torch.Tensor], torch.Tensor]


class Unavailable(Exception):
    """This machine, or this model, has no such form; the message says why."""


@dataclass(frozen=True)
class Trained:
    """What every form is made of."""

    model: nn.Module
    """float32, in evaluation mode, on the device: normalised images to logits."""
    mean: Sequence[float]
    std: Sequence[float]
    device: torch.device
    samples: torch.Tensor
    """Training images uint8 [n, C, H, W] on the device, to calibrate and to trace with; at least two."""
    batch_sizes: Sequence[int]
    """With which the forms will be called."""
    native: frozenset[str]
    """Of bf16 and fp16, those that the device computes itself and does not emulate."""
    scratch: Path
    """A directory for files."""

    def classifier(self, model: nn.Module | None = None) -> nn.Module:
        """``model`` (default: the trained one) behind the normalisation."""
        return Classifier(model or self.model, self.mean, self.std).to(self.device).eval()


@dataclass(frozen=True)
class Made:
    """A form, ready to be called."""

    predict: Predict
    model_bytes: int
    file_bytes: int | None = None


@dataclass(frozen=True)
class Kind:
    """What a form does, and how it is made of a trained model."""

    does: str
    make: Callable[[Trained], Made]


def eager(trained: Trained) -> Made:
    return _made(trained.classifier())


def compiled(trained: Trained) -> Made:
    _need_compiler(trained.device)
    classifier = trained.classifier()
    return Made(torch.compile(classifier, dynamic=False), bytes_of(classifier))


def bf16(trained: Trained) -> Made:
    return _half(trained, "bf16", torch.bfloat16)


def fp16(trained: Trained) -> Made:
    return _half(trained, "fp16", torch.float16)


def exported(trained: Trained) -> Made:
    """Saved and loaded back, so that what is measured is what another process would run."""
    file = trained.scratch / "model.pt2"
    program = _export(trained.classifier(), trained.samples)
    torch.export.save(program, file)
    loaded = torch.export.load(file).module()
    return Made(loaded, bytes_of(loaded), file.stat().st_size)


def int8(trained: Trained) -> Made:
    """Weights and activations in 8 bits, with ranges calibrated on training images ("static" quantisation).

    Source: torchao, PyTorch 2 Export Quantization. Its kernels on x86 CPUs come with torch.compile.
    """
    if trained.device.type != "cpu":
        raise Unavailable("PyTorch has no kept int8 convolutions for GPUs; TensorRT, which has, is not part of it")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise Unavailable(f"the int8 kernels are for x86 CPUs, and this one is {platform.machine()}")
    if importlib.util.find_spec("torchao") is None:
        raise Unavailable("it needs torchao, which is not installed: pip install torchao")
    _need_compiler(trained.device)
    versions = f"torchao {importlib.metadata.version('torchao')} with torch {torch.__version__}"
    with warnings.catch_warnings(action="ignore"):  # torch warns of its own code
        try:
            made = _int8(trained)
        except Exception as error:  # whatever stops these two at a net that they do not know
            raise Unavailable(f"{versions} cannot quantise this model ({cause(error)})") from error
    if made is None:
        raise Unavailable(f"{versions} found nothing in this model that it has an int8 kernel for")
    return made


FORMS: Mapping[str, Kind] = {
    "eager": Kind("float32, operator by operator: the plain form, with which the others are compared", eager),
    "compiled": Kind("float32 by torch.compile (Inductor)", compiled),
    "bf16": Kind("weights and activations in bfloat16", bf16),
    "fp16": Kind("weights and activations in float16", fp16),
    "int8": Kind("weights and activations in 8 bits, calibrated on training images (torchao PT2E, Inductor)", int8),
    "exported": Kind("float32, exported with torch.export, saved as .pt2 and loaded back", exported),
}


def bytes_of(module: nn.Module) -> int:
    """Of the parameters, buffers and constants of a module, each counted once; of a graph, those that it reads."""
    if isinstance(module, torch.fx.GraphModule):  # a quantised one also keeps the weights that it was made of
        read = (operator.attrgetter(str(node.target))(module) for node in module.graph.nodes if node.op == "get_attr")
        tensors = [value for value in read if isinstance(value, torch.Tensor)]
    else:
        tensors = [*module.parameters(), *module.buffers()]
    return sum({value.data_ptr(): value.nbytes for value in tensors}.values())


def cause(error: Exception) -> str:
    """What went wrong, in a line: of a compiler's failure, what failed inside it."""
    inside: Exception = getattr(error, "inner_exception", error)
    kind, said = type(inside).__name__, first_line(inside)
    return kind if said == kind else f"{kind}: {said}"


def _int8(trained: Trained) -> Made | None:
    """None: nothing in the model could be quantised."""
    import torch._inductor.config as inductor
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(_export(trained.classifier(), trained.samples).module(), quantizer)
    for batch in trained.samples.split(32):
        prepared(batch)
    converted = convert_pt2e(prepared)
    if "quantize_per_tensor" not in str(converted.graph):
        return None
    predict: Predict = torch.compile(converted, dynamic=False)
    with inductor.patch(freezing=True):  # what is compiled now takes the weights as constants and packs them for int8
        for size in trained.batch_sizes:
            predict(trained.samples[torch.arange(size) % len(trained.samples)])
    return Made(predict, bytes_of(converted))


class _InPrecision(nn.Module):
    """A model whose weights and activations have another type; float32 outside."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = copy.deepcopy(model).to(dtype), dtype

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(images.to(self.dtype))
        return logits.float()


def _half(trained: Trained, name: str, dtype: torch.dtype) -> Made:
    if name not in trained.native:
        device = "GPU" if trained.device.type == "cuda" else "CPU"
        raise Unavailable(f"this {device} has no native {name} and would emulate it, several times slower")
    return _made(trained.classifier(_InPrecision(trained.model, dtype)))


def _made(module: nn.Module) -> Made:
    return Made(module, bytes_of(module))


def _export(classifier: nn.Module, samples: torch.Tensor) -> torch.export.ExportedProgram:
    """For batches of any size: the example has two images, because one would be taken for a constant."""
    batch = torch.export.Dim("batch")
    return torch.export.export(classifier, (samples[:2],), dynamic_shapes=({0: batch},))


def _need_compiler(device: torch.device) -> None:
    """Raise Unavailable if torch.compile cannot build code for the CPU here."""
    if device.type == "cpu" and (reason := software.no_kernels(software.cpu_compiler())):
        raise Unavailable(f"torch.compile cannot build code for this CPU: {reason}")
