"""The techniques, in the order in which they apply.

The memory format is set on the bare model, checkpointing changes the bare model's blocks, and the
parallelism wraps whatever is there. The compiler comes after it: it must see DistributedDataParallel, so
that it can end a graph where a bucket of gradients ends. Of the forward pass's wrappers the later one is
the outer one: the input changes its format inside autocast, and the loss is divided last. A CUDA graph
records all of a step, and cuDNN's search is on around it.
"""

from __future__ import annotations

from pipeline.config import Plan
from pipeline.distributed import World
from pipeline.techniques.activation_checkpointing import ActivationCheckpointing
from pipeline.techniques.base import (
    Accumulate,
    Backward,
    Criterion,
    Forward,
    HoldSync,
    Losses,
    MicroBatches,
    Step,
    Stored,
    Technique,
    Update,
    ZeroGrad,
)
from pipeline.techniques.channels_last import ChannelsLast
from pipeline.techniques.compile import Compile
from pipeline.techniques.cuda_graph import CudaGraph
from pipeline.techniques.cudnn_benchmark import CudnnBenchmark
from pipeline.techniques.data_loading import DataLoaderData, ResidentData, StreamedData
from pipeline.techniques.ddp import DDP
from pipeline.techniques.gradient_accumulation import GradientAccumulation
from pipeline.techniques.precision import BFloat16, Float16

__all__ = [
    "ORDER",
    "Accumulate",
    "Backward",
    "Criterion",
    "Forward",
    "HoldSync",
    "Losses",
    "MicroBatches",
    "Step",
    "Stored",
    "Technique",
    "Update",
    "ZeroGrad",
    "chosen",
]

ORDER: tuple[type[Technique], ...] = (
    ChannelsLast,
    ActivationCheckpointing,
    DDP,
    Compile,
    BFloat16,
    Float16,
    GradientAccumulation,
    CudaGraph,
    CudnnBenchmark,
    ResidentData,
    StreamedData,
    DataLoaderData,
)


def chosen(plan: Plan, world: World) -> list[Technique]:
    """The techniques that the plan applies, in order, ready to be set up."""
    return [technique(plan, world) for technique in ORDER if technique.is_asked(plan)]
