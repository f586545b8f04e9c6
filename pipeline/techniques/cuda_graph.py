"""Whole-step CUDA graphs: record forward, backward and update once, and replay them with a single launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.distributed import World
from pipeline.errors import PipelineError, first_line
from pipeline.params import GRAPH_WARMUP_STEPS
from pipeline.plans import Plan
from pipeline.step import Inputs, MicroBatches
from pipeline.techniques.base import Setup, Technique

Take = Callable[[MicroBatches], None]


class CudaGraph(Technique):
    """The first steps run without a graph, on a separate stream, while libraries initialise; the next step is recorded.

    A replay reads and writes the addresses of the recording. So each batch is copied into the recorded batch's memory.
    The learning rate is normally a number; here it is copied into a tensor, from which the optimizer reads it. A replay
    also updates gradients, losses and the random generator's state, with the same values as a step without a graph.

    Source: PyTorch documentation, "CUDA semantics", section "Whole-network capture".
    """

    name = "cuda_graph"

    def __init__(self, plan: Plan, world: World) -> None:
        super().__init__(plan, world)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None
        self._warmup_steps = 0
        self._inputs: list[tuple[Inputs, torch.Tensor]] = []

    def change_step(self, setup: Setup) -> None:
        setup.replays = True
        self._optimizer, take = setup.step.optimizer, setup.step.whole
        self._rates = [torch.zeros((), device=self.world.device) for _ in self._optimizer.param_groups]

        def graphed(micro_batches: MicroBatches) -> None:
            batch = list(islice(micro_batches, self.plan.micro_batches))
            for rate, group in zip(self._rates, self._optimizer.param_groups, strict=True):
                rate.fill_(group["lr"])  # without waiting for the device
            if self._warmup_steps < GRAPH_WARMUP_STEPS:
                self._warmup_steps += 1
                self._beside(take, batch)
                return
            if self.graph is None:
                self.graph = self._recorded(take, batch)  # recording runs no kernel
            else:
                for place, values in zip(tree_leaves(self._inputs), tree_leaves(batch), strict=True):
                    place.copy_(values)
            self.graph.replay()

        setup.step.whole = graphed

    def _beside(self, take: Take, batch: list[tuple[Inputs, torch.Tensor]]) -> None:
        """Take a step without a graph, on the stream on which a later step will be recorded."""
        current = torch.cuda.current_stream(self.world.device)
        self._stream = self._stream or torch.cuda.Stream(self.world.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), self._rates_on_device():
            take(iter(batch))
        current.wait_stream(self._stream)

    def _recorded(self, take: Take, batch: list[tuple[Inputs, torch.Tensor]]) -> torch.cuda.CUDAGraph:
        self._inputs = tree_map(torch.clone, batch)
        graph = torch.cuda.CUDAGraph()
        try:
            # Thread-local, because a thread that reads ahead may allocate pinned memory during the capture.
            with (
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
                self._rates_on_device(capturable=True),
            ):
                take(iter(self._inputs))
        except RuntimeError as error:
            raise PipelineError(
                f"{self.where('cuda_graph')}, but a step cannot be recorded: {first_line(error)}. Remove cuda_graph, "
                "or change the part of the model that waits for the device, for example to read a value in Python."
            ) from error
        return graph

    @contextmanager
    def _rates_on_device(self, *, capturable: bool = False) -> Iterator[None]:
        """While the block runs, the optimizer reads its learning rates from tensors on the device.

        ``capturable``: AdamW's option. It is on only during a recording, because at other times it would cause a
        warning. Switching it is safe, because a fused AdamW always keeps its state on the device.
        """
        groups = self._optimizer.param_groups
        before = [group.copy() for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = capturable
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)
