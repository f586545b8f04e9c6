"""The techniques, in the order in which they apply.

The memory format is set on the bare model, checkpointing changes the bare model's blocks, and the
parallelism wraps whatever is there. The compiler comes after it, and takes what is inside. Of the forward
pass's wrappers the later one is the outer one: the input changes its format inside autocast, and the loss
is divided last. A CUDA graph records all of a step, and cuDNN's search is on around it. Techniques of other
packages (``extra:``) come after all of these, in the order in which the variant names them: they get the
wrapped model, and what they put around a part of the step is the outermost.
"""

from __future__ import annotations

from pipeline.config import ConfigError, Plan, outside
from pipeline.distributed import World
from pipeline.techniques.activation_checkpointing import ActivationCheckpointing, SelectiveCheckpointing
from pipeline.techniques.activation_offload import ActivationOffload
from pipeline.techniques.allocators import ExpandableSegments, ReleaseCache
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
from pipeline.techniques.checkpointing_budget import CheckpointingBudget
from pipeline.techniques.communication import BF16Compression, FP16Compression, PostLocalSGD, PowerSGD
from pipeline.techniques.compile import Compile
from pipeline.techniques.cuda_graph import CudaGraph
from pipeline.techniques.cudnn_benchmark import CudnnBenchmark
from pipeline.techniques.data_loading import DataLoaderData, ResidentData, StreamedData
from pipeline.techniques.data_parallel import DataParallel
from pipeline.techniques.ddp import DDP, BucketSize, GradientsBesideBuckets, StaticGraph
from pipeline.techniques.fsdp import FSDP
from pipeline.techniques.gradient_accumulation import AutoMicroBatch, GradientAccumulation
from pipeline.techniques.low_bit_optimizer import LowBitOptimizer
from pipeline.techniques.optimizer_choices import (
    FactoredOptimizer,
    ForeachOptimizer,
    ForLoopOptimizer,
    ZeroedGradients,
)
from pipeline.techniques.optimizer_in_backward import OptimizerInBackward
from pipeline.techniques.pipeline import Pipeline
from pipeline.techniques.precision import BFloat16, Float16
from pipeline.techniques.scaling import WeakScaling
from pipeline.techniques.sync_batchnorm import SyncBatchNorm
from pipeline.techniques.tensor import Tensor
from pipeline.techniques.tf32 import TF32
from pipeline.techniques.zero1 import Zero1

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
    "of_plan",
]

ORDER: tuple[type[Technique], ...] = (
    ExpandableSegments,
    ChannelsLast,
    SyncBatchNorm,
    ActivationCheckpointing,
    SelectiveCheckpointing,
    CheckpointingBudget,
    ForeachOptimizer,
    ForLoopOptimizer,
    FactoredOptimizer,
    LowBitOptimizer,
    DataParallel,
    *(BucketSize, GradientsBesideBuckets, StaticGraph),
    DDP,
    Zero1,
    *(FP16Compression, BF16Compression, PowerSGD, PostLocalSGD),
    FSDP,
    Pipeline,
    Tensor,
    Compile,
    BFloat16,
    Float16,
    ActivationOffload,
    GradientAccumulation,
    AutoMicroBatch,
    ZeroedGradients,
    OptimizerInBackward,
    ReleaseCache,
    TF32,
    CudaGraph,
    CudnnBenchmark,
    ResidentData,
    StreamedData,
    DataLoaderData,
    WeakScaling,
)


def of_plan(plan: Plan) -> list[type[Technique]]:
    """The classes of the techniques that the plan applies, in order. Raises ConfigError for a broken one of outside."""
    return [*(each for each in ORDER if each.is_asked(plan)), *map(_from_outside, plan.applied.extra)]


def chosen(plan: Plan, world: World) -> list[Technique]:
    """The techniques that the plan applies, in order, ready to be set up."""
    return [technique(plan, world) for technique in of_plan(plan)]


def _from_outside(name: str) -> type[Technique]:
    found = outside.load(outside.TECHNIQUES, name)
    if not (isinstance(found, type) and issubclass(found, Technique) and found.name == name):
        raise ConfigError(
            f"the entry point {name!r} of the group {outside.TECHNIQUES} is {found!r}; expected a class derived from "
            "pipeline.techniques.Technique whose name it is."
        )
    return found
