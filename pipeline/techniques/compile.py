"""torch.compile: fuse the model's operations into generated kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.distributed import World
from pipeline.errors import PipelineError
from pipeline.plans import Plan
from pipeline.techniques.base import Setup, Technique

CACHE = Path(".cache/inductor")
"""Folder in the checkout for the code that TorchInductor and Triton generate. Later processes reuse this code."""


class Compile(Technique):
    """Compiles the model with ``torch.compile``; loss and update are not compiled.

    DistributedDataParallel's own part of a forward pass cannot be in a graph, so DDP wraps the compiled model. The
    compiler then ends a graph where a bucket of gradients ends (DDPOptimizer in torch/_dynamo/backends/distributed.py).
    So one bucket's reduction overlaps with the backward pass of the next graph.

    The batch's shape is the same in every step, so code is generated for this shape only (``dynamic=False``). The whole
    model must be one graph (``fullgraph=True``). If PyTorch would split the model or leave it uncompiled, the run fails
    with the reason, so that only the requested setup is measured. Evaluation uses the bare, uncompiled model.

    On a CPU there are no CUDA graphs, so reduce-overhead is refused, and max-autotune runs without CUDA graphs. Then
    max-autotune tunes only the kernels of batched matrix products, such as those in attention. The other kernels that
    it could tune need constant weights.

    Source: Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
    Compilation", ASPLOS 2024.
    """

    name = "compile"

    def __init__(self, plan: Plan, world: World) -> None:
        super().__init__(plan, world)
        self.mode: str = plan.applied.compile
        if self.mode == "max-autotune" and world.device.type != "cuda":
            self.mode = "max-autotune-no-cudagraphs"

    @classmethod
    def prepare_process(cls) -> None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE.resolve()))  # before torch reads the variable
        import torch._inductor.compile_fx  # noqa: F401

    def change_model(self, setup: Setup) -> None:
        self.prepare_process()
        torch._dynamo.reset()  # otherwise earlier seeds' compilations count towards torch's limit on recompilations
        if isinstance(setup.model, DistributedDataParallel):
            setup.model.module = self._compiled(setup.model.module)
        else:
            setup.model = self._compiled(setup.model)
        setup.replays |= self.mode != "default" and self.world.device.type == "cuda"

    def _compiled(self, model: nn.Module) -> nn.Module:
        from torch._inductor import list_mode_options

        options = dict(list_mode_options(self.mode))
        # On a GPU, another thread compiles the backward pass. That thread gets these options, but not the setting that
        # torch.use_deterministic_algorithms makes for TorchInductor, because the setting holds for one thread only.
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        return cast("nn.Module", torch.compile(model, options=options, fullgraph=True, dynamic=False))

    def change_step(self, setup: Setup) -> None:
        step = setup.step
        step.forward = self._explained()(step.forward)
        step.backward = self._explained()(step.backward)  # the backward pass is compiled when it first runs

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
        from torch._inductor.exc import CppCompileError

        try:
            yield
        except (TorchDynamoException, FailOnRecompileLimitHit, CppCompileError) as error:
            reason = " ".join(str(error).split("\n\n")[0].split())
            raise PipelineError(
                f"{self.where('compile')}, but the model does not compile as one graph: {reason}. Remove compile, or "
                "change this part of the model; TORCH_LOGS=graph_breaks shows more."
            ) from error
