"""The techniques, in the order in which they apply.

The memory format is set on the bare model, checkpointing changes the bare model's blocks, and the
parallelism wraps whatever is there. Of the forward pass's wrappers the later one is the outer one:
the input changes its format inside autocast, and the loss is divided last.
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
from pipeline.techniques.data_parallel import DataParallel
from pipeline.techniques.ddp import DDP
from pipeline.techniques.gradient_accumulation import GradientAccumulation
from pipeline.techniques.pipeline import Pipeline
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
    DataParallel,
    DDP,
    Pipeline,
    BFloat16,
    Float16,
    GradientAccumulation,
)


def chosen(plan: Plan, world: World) -> list[Technique]:
    """The techniques that the plan applies, in order, ready to be set up."""
    return [technique(plan, world) for technique in ORDER if technique.is_asked(plan)]
