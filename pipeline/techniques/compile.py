"""torch.compile: fuse the model's operations into generated kernels."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.distributed import World
from pipeline.errors import ConfigError, PipelineError, say
from pipeline.plans import Plan
from pipeline.techniques.activation_checkpointing import blocks
from pipeline.techniques.base import Setup, Technique

CACHE = Path(".cache/inductor")
"""Folder in the checkout for the code that TorchInductor and Triton generate. Later processes reuse this code."""
LONG_SECONDS = 15.0
"""If a pass compiles for longer, a line says so."""


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
    compiled_part = "the model"
    passes = 0
    """Passes that may have compiled something."""

    def __init__(self, plan: Plan, world: World) -> None:
        super().__init__(plan, world)
        self.mode: str = plan.applied.compile
        if self.mode == "max-autotune" and world.device.type != "cuda":
            self.mode = "max-autotune-no-cudagraphs"

    @classmethod
    def prepare_process(cls) -> None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE.resolve()))  # before torch reads the variable
        # Otherwise each process without a GPU says where a CUDA toolkit is.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        import torch._inductor.compile_fx  # noqa: F401

    def change_model(self, setup: Setup) -> None:
        self.prepare_process()
        torch._dynamo.reset()  # otherwise earlier seeds' compilations count towards torch's limit on recompilations
        if isinstance(setup.model, DistributedDataParallel):
            setup.model.module = cast("nn.Module", self._compiled(setup.model.module))
        else:
            setup.model = cast("nn.Module", self._compiled(setup.model))
        setup.replays |= self.mode != "default" and self.world.device.type == "cuda"

    def _compiled(self, part: Callable[..., Any], recompile_limit: int | None = None) -> Callable[..., Any]:
        from torch._inductor import list_mode_options

        options = dict(list_mode_options(self.mode))
        # On a GPU, another thread compiles the backward pass. That thread gets these options, but not the setting that
        # torch.use_deterministic_algorithms makes for TorchInductor, because the setting holds for one thread only.
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        compiled: Callable[..., Any] = torch.compile(  # type: ignore[call-overload]
            part, options=options, fullgraph=True, dynamic=False, recompile_limit=recompile_limit
        )
        return compiled

    def change_step(self, setup: Setup) -> None:
        step = setup.step
        step.forward = self._explained()(step.forward)
        step.backward = self._explained()(step.backward)  # the backward pass is compiled when it first runs

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
        from torch._inductor.exc import CppCompileError

        notice = None
        if self.passes < 2 and self.world.is_main:  # the first forward and the first backward pass
            self.passes += 1
            notice = Timer(LONG_SECONDS, say, [f"{self.plan.name}: compiling {self.compiled_part} ..."])
            notice.start()
        try:
            yield
        except (TorchDynamoException, FailOnRecompileLimitHit, CppCompileError) as error:
            reason = " ".join(str(error).split("\n\n")[0].split())
            raise PipelineError(
                f"{self.where('compile')}, but {self.compiled_part} does not compile as one graph: {reason}. Remove "
                "compile, or change this part of the model; TORCH_LOGS=graph_breaks shows more."
            ) from error
        finally:
            if notice:
                notice.cancel()


class CompiledBlocks(Compile):
    """Compiles each block of the model (``blocks``) alone, as one graph; what lies between blocks is not compiled.

    Blocks of the same class and sizes share one graph, so a deep model compiles as fast as one of its blocks. With
    fsdp, a block's hooks, which gather its parameters, run outside of its graph. Source: PyTorch recipe, "Reducing
    torch.compile cold start compilation time with regional compilation".
    """

    name = "compiled_blocks"
    compiled_part = "a block"
    ran = False
    """Whether a compiled block has run."""

    def __init__(self, plan: Plan, world: World) -> None:
        super().__init__(plan, world)
        self.mode = "default"

    def change_model(self, setup: Setup) -> None:
        self.prepare_process()
        torch._dynamo.reset()
        model = setup.model.module if isinstance(setup.model, DistributedDataParallel) else setup.model
        options = list(blocks(model))
        if not options:
            raise ConfigError(
                f"{self.where('compile')}, but {type(model).__name__} has no blocks to compile: none of its submodules "
                "has submodules of its own; allowed: 'default', which compiles the whole model."
            )
        for block in options:
            block.forward = self._in_training(block.forward, len(options))

    def why_idle(self) -> str:
        if self.ran:
            return ""
        return (
            f"{self.where('compile')}, but no block ran compiled, because the model calls its blocks by another method "
            "than forward; allowed: 'default', or blocks that are called like functions."
        )

    def _in_training(self, forward: Callable[..., Any], most: int) -> Callable[..., Any]:
        """Return the compiled ``forward``, of which there may be ``most`` kinds. Without gradients it runs as it is:
        evaluation has other batches, for which the block would be compiled again."""
        compiled = self._compiled(forward, recompile_limit=max(8, most))

        def in_training(*inputs: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*inputs, **named)
            self.ran = True
            return compiled(*inputs, **named)

        return in_training
