"""DistributedDataParallel: every rank has the model and a share of the batch; the backward pass averages gradients."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.distributed import World
from pipeline.models.keeping import unchanged
from pipeline.plans import Plan
from pipeline.techniques.base import Setup, Technique, explained
from pipeline.techniques.lockstep import USE_EVERY_PART, keep_parameters

_NO_BROADCAST = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"  # the option's name before torch 2.15
)


class GradientsBesideBuckets(Technique):
    """Gradients have their own memory, instead of being views of DDP's buckets."""

    name = "gradients_beside_buckets"

    def change_step(self, setup: Setup) -> None:
        gradients = [parameter for parameter in setup.model.parameters() if parameter.requires_grad]
        setup.kept_bytes.append(lambda: sum(parameter.nbytes for parameter in gradients))


def replicated(model: nn.Module, plan: Plan, world: World, **options: Any) -> DistributedDataParallel:
    """Wrap ``model`` in DistributedDataParallel, with the plan's settings. ``options``: further arguments of
    DistributedDataParallel, such as the ``process_group`` of the replicas."""
    arguments: dict[str, Any] = {
        "bucket_cap_mb": plan.applied.bucket_mb,
        "gradient_as_bucket_view": plan.applied.gradient_as_bucket_view,
        "static_graph": plan.applied.static_graph,
        _NO_BROADCAST: False,
    }
    wrapped = DistributedDataParallel(
        model, [world.device] if world.device.type == "cuda" else None, **arguments, **options
    )
    keep_parameters(wrapped, model.named_parameters, _where(plan))
    return wrapped


@contextmanager
def reduced(model: DistributedDataParallel, plan: Plan) -> Iterator[None]:
    """Raise ConfigError if the block's backward pass did not use all parameters.

    Otherwise this rank would go on without the reduction of gradients, and the other ranks would wait for it.
    """
    static = "" if plan.applied.static_graph else "set static_graph: true if every step uses the same parameters, or "
    explanation = (
        f"{_where(plan)}, which waits for the gradients of all parameters, but a step did not use some parameters. "
        f"{USE_EVERY_PART}, {static}remove unused parameters from the model. TORCH_DISTRIBUTED_DEBUG=DETAIL names them."
    )
    with explained("finished reduction in the prior iteration|training graph has changed", explanation):
        yield
        model._check_reducer_finalized()


def _where(plan: Plan) -> str:
    return f"variants.{plan.name}.parallelism: found {plan.applied.parallelism!r}"


def arrange_buckets(model: DistributedDataParallel, setup: Setup, plan: Plan) -> None:
    """Make DDP use rebuilt buckets from the first step of a resumed training on; call this before that step.

    After the first backward pass DDP rebuilds its buckets, in the order in which the gradients became ready. With more
    than two ranks, a gradient's place in its bucket decides in which order the ranks' values are added. This order
    decides how the sum is rounded. Therefore this function runs a forward and a backward pass, and discards the
    gradients. The model and the random state stay unchanged.
    """
    with unchanged(model.module), reduced(model, plan):
        setup.step.forward(*setup.sample()).backward()
    for parameter in model.parameters():
        parameter.grad = None


class DDP(Technique):
    """Wraps the model in ``torch.nn.parallel.DistributedDataParallel``.

    Other code does the rest, in the same way for every parallelism. ``plans.plan`` sets the number of processes,
    ``TrainBatches`` gives each process its part of the batch, and ``window_of`` joins the processes' measurements.

    Buffers are not broadcast before each forward pass, because training does not read BatchNorm's running statistics,
    and evaluation uses the main rank's statistics anyway (``World.broadcast_buffers_``).
    """

    name = "ddp"

    def restore(self, state: dict[str, Any]) -> None:  # noqa: ARG002
        arrange_buckets(self.model, self._setup, self.plan)

    def change_model(self, setup: Setup) -> None:
        self._setup = setup
        setup.model = self.model = replicated(setup.model, self.plan, self.world)

    def change_step(self, setup: Setup) -> None:
        setup.step.accumulate = reduced(self.model, self.plan)(setup.step.accumulate)
        setup.step.no_sync = self.model.no_sync
        setup.exchanges_only_gradients = not any(isinstance(part, nn.SyncBatchNorm) for part in self.model.modules())
