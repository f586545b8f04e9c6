"""Pause and resume an unchanged training script between two optimizer steps, and measure the steps.

``jobs`` copies this file to a private folder as ``sitecustomize.py`` and names the folder in ``PYTHONPATH``, so every
Python process of the script runs it at its start. It imports nothing of this package, because the script's interpreter
may be another one. A process that takes an optimizer step connects to the folder's socket. Then it waits at the
boundaries of its steps for requests, one JSON object a line, and answers each with what it measured. When the
connection is closed, the process ends at a boundary, so all ranks end after the same step. A request without a number
of steps lets it train to its end; then it answers as it exits.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.abc
import importlib.util
import json
import os
import runpy
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path
from time import perf_counter  # bound here, before the script can replace it
from typing import Any

FOLDER, OPTIMIZER = "PIPELINE_SCRIPT_FOLDER", "PIPELINE_SCRIPT_OPTIMIZER"
"""The environment variables with the private folder, and with the number of the optimizer whose steps count, in the
order in which they are made (0: the first that takes a step)."""
OPENED = "opened"
"""The file in the folder to which the processes write the files that they open, if it exists."""
COUNTED_STEPS = 4
"""In a training to its end, the samples of this many steps are counted."""
SAMPLED = 4096
"""How many values of each parameter are compared with those of another arm."""


class Rank:
    """One process of the script that takes optimizer steps."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.connection, self.owner = folder, None, None
        self.home = Path.cwd()
        self.made: list[int] = []
        self.stepping: set[int] = set()
        self.base: int | None = None
        """Resident bytes when the first optimizer was made, without its parameters; None if unknown."""
        self.first: Any = None
        """The module that got the samples of the present step."""
        self.steps = self.entered = 0
        self.wanted: float = 0
        self.examined = self.in_child = self.whole = self.stepping_now = self.evaluated = False
        os.register_at_fork(after_in_child=self.leave)

    connection: Any
    counter: Any
    owner: Any
    torch: Any
    gpu: Any

    def leave(self) -> None:
        """Give up the connection in a forked child, such as a worker of a DataLoader."""
        if self.connection:
            self.in_child = True
            self.connection.close()

    def install(self, optimizers: Any) -> None:
        """Watch the optimizers of the module ``torch.optim.optimizer``."""
        construct = optimizers.Optimizer.__init__

        def made(optimizer: Any, *arguments: Any, **options: Any) -> None:
            construct(optimizer, *arguments, **options)
            if not self.made:
                self.torch = sys.modules["torch"]
                held = sum(p.numel() * p.element_size() for p in self.parameters(optimizer) if p.device.type == "cpu")
                now = next(resident(), None)
                self.base = None if now is None else now - held
                untraced = self.torch.compiler.disable
                optimizers.register_optimizer_step_pre_hook(untraced(self.before))
                optimizers.register_optimizer_step_post_hook(untraced(self.boundary))
            self.made.append(id(optimizer))

        optimizers.Optimizer.__init__ = made
        self.malloc = runpy.run_path(str(self.folder / "malloc.py"))
        self.malloc["return_freed_memory"]()

    def parameters(self, optimizer: Any) -> list[Any]:
        """Return the parameters that ``optimizer`` updates; of a sharded parameter, this process's part."""
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in own]

    def before(self, optimizer: Any, *_: Any) -> None:
        """Before a step: meet the bench if it is the first of the optimizer whose steps count."""
        self.stepping.add(id(optimizer))
        named = int(os.environ.get(OPTIMIZER, 0))
        if self.owner is None and named in (0, self.made.index(id(optimizer)) + 1):
            self.meet(optimizer)
        self.stepping_now = self.stepping_now or optimizer is self.owner

    def meet(self, optimizer: Any) -> None:
        """Connect, say what this process is, and wait for the first request."""
        self.owner, parameters, cuda = optimizer, self.parameters(optimizer), self.torch.cuda
        self.names: dict[int, str] = {}
        self.owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.gpu = parameters[0].device if parameters and parameters[0].device.type == "cuda" else None
        about = cuda.get_device_properties(self.gpu) if self.gpu else None
        group = sys.modules.get("torch.distributed")
        together: Any = group if group and group.is_available() and group.is_initialized() else None
        with socket.socket(socket.AF_UNIX) as stream:
            try:
                stream.connect(str(self.folder / "socket"))
            except OSError:  # the bench has ended
                os._exit(1)
            self.connection = stream.makefile("rwb")
        atexit.register(self.end)
        self.say(
            pid=os.getpid(),
            rank=together.get_rank() if together else 0,
            world_size=together.get_world_size() if together else 1,
            backend=together.get_backend() if together else None,
            learning_rate=float(optimizer.param_groups[0].get("lr", 0.0)),
            parameters=sum(parameter.numel() for parameter in parameters),
            threads=self.torch.get_num_threads(),
            gpu=about and about.name,
            uuid=about and str(getattr(about, "uuid", "")),
            python="{}.{}".format(*sys.version_info),
            torch=self.torch.__version__,
        )
        self.wait()

    def boundary(self, optimizer: Any, *_: Any) -> None:
        """Mark the end of a step. After the wanted steps, answer the request and wait for the next one."""
        if optimizer is not self.owner or self.in_child:
            return
        if self.gpu and self.torch.cuda.is_current_stream_capturing():
            return
        self.steps += 1
        self.marks.append(self.mark())
        if not self.whole or len(self.samples) < COUNTED_STEPS:
            self.samples.append(self.entered)
        elif self.counter:
            self.counter = self.counter.remove()
        self.first, self.entered, self.stepping_now, self.evaluated = None, 0, False, False
        if len(self.marks) > self.wanted:
            self.answer()
            self.wait()

    def wait(self) -> None:
        """Wait for a request, and begin it. End this process if the connection is closed."""
        line = self.connection.readline()
        if not line:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(0)
        request = json.loads(line)
        self.malloc[request["malloc"]]()
        self.whole, self.examined = request["steps"] is None, request["examine"]
        self.wanted = float("inf") if self.whole else request["steps"]
        self.samples: list[int] = []
        if self.examined:
            self.start = self.values()
            watch = self.torch.nn.modules.module.register_module_forward_pre_hook
            self.counter = watch(self.torch.compiler.disable(self.count))
        self.compiled, self.retries = self.compile_seconds(), self.allocator_retries()
        if self.gpu:
            self.torch.cuda.synchronize(self.gpu)
            self.torch.cuda.reset_peak_memory_stats(self.gpu)
        elif self.base is not None:
            try:
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            except OSError:
                self.base = None
        self.began = perf_counter()
        self.marks = [self.mark()]

    def mark(self) -> Any:
        """Return a mark of the present moment: on a GPU an event, so that no step waits for the device. In a training
        to its end, there would be too many events."""
        if not self.gpu or self.whole:
            return perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def answer(self) -> None:
        """Say what the steps of the request took."""
        if self.gpu:
            self.torch.cuda.synchronize(self.gpu)
        wall = perf_counter() - self.began  # reading the memory takes as long as a short step
        facts: dict[str, Any] = {"peak": None, "reserved": None, "retries": None}
        if self.gpu:
            cuda = self.torch.cuda
            facts["peak"] = cuda.max_memory_allocated(self.gpu) + self.graphs_bytes()
            facts["reserved"], facts["retries"] = cuda.max_memory_reserved(self.gpu), self.allocator_retries()
            facts["retries"] -= self.retries
        elif self.base is not None:
            facts["peak"] = max(0, [*resident()][1] - self.base)
        seconds = [b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3 for a, b in pairwise(self.marks)]
        facts |= {"seconds": seconds, "wall": wall, "compile_seconds": self.compile_seconds() - self.compiled}
        if self.examined:
            if self.counter:
                self.counter.remove()
            (started, before), (ended, after) = self.start, self.values()
            facts |= {"started": started, "ended": ended, "optimizers": len(self.stepping)}
            if not self.whole:  # to its end, a training can have got further parameters
                facts["update"] = str(self.folder / f"update-{os.getpid()}")
                facts["trained"] = [*self.trained()]
                self.torch.save([now - then for then, now in zip(before, after, strict=True)], facts["update"])
            facts["sources"] = dict(self.sources())
            facts["samples"] = self.samples[1:]  # the request began after the forward pass of the first step
            del self.start
        self.say(steps=self.steps, **facts)

    def end(self) -> None:
        """As the process exits, answer the request to train to the end."""
        if self.whole and not self.in_child:
            self.answer()
            self.whole = False

    def graphs_bytes(self) -> int:
        """Return the bytes that CUDA graphs keep for their replays, which no peak includes."""
        return sum(
            segment["total_size"] - segment["allocated_size"]
            for segment in self.torch.cuda.memory_snapshot()
            if segment["device"] == self.gpu.index and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
        )

    def say(self, **facts: Any) -> None:
        try:
            self.connection.write(json.dumps(facts).encode() + b"\n")
            self.connection.flush()
        except OSError:  # the bench has ended
            os._exit(1)

    def count(self, module: Any, arguments: Any) -> None:
        """Count the samples that enter the step's model: the first dimension of its first tensor.

        The model is the first module in training with a parameter of the optimizer: a transform of images is a module,
        too. Inside of a step, a closure may evaluate the same samples several times.
        """
        tensors = [argument for argument in arguments if isinstance(argument, self.torch.Tensor) and argument.dim()]
        if not tensors or not module.training or not self.torch.is_grad_enabled() or self.in_child:
            return
        if self.first is None and any(id(parameter) in self.owned for parameter in module.parameters()):
            self.first = module
            self.names = self.names or {id(parameter): name for name, parameter in module.named_parameters()}
        if module is self.first and not self.evaluated:
            self.entered += len(tensors[0])
            self.evaluated = self.stepping_now

    def values(self) -> tuple[str, list[Any]]:
        """Return a digest of all parameters, and ``SAMPLED`` values of each as float32."""
        whole, some = hashlib.sha256(), []
        for parameter in self.parameters(self.owner):
            flat = parameter.detach().reshape(-1)
            some.append(flat[:: max(1, len(flat) // SAMPLED)].float().cpu().clone())
            whole.update(f"{parameter.dtype} {tuple(parameter.shape)}".encode())
            for part in flat.split(1 << 24):
                whole.update(memoryview(part.cpu().contiguous().view(self.torch.uint8).numpy()))
        return whole.hexdigest(), some

    def trained(self) -> Iterator[tuple[str, float | None]]:
        """Yield each parameter's name, if a module got samples, and the root mean square of its gradient, if it has
        one."""
        parameters = [parameter for group in self.owner.param_groups for parameter in group["params"]]
        for place, parameter in enumerate(parameters, 1):
            gradient = parameter.grad
            if gradient is not None:
                own = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                gradient = float(own.detach().float().norm()) / max(1, own.numel()) ** 0.5
            yield self.names.get(id(parameter), f"parameter {place}"), gradient

    def sources(self) -> Iterator[tuple[str, str]]:
        """Yield the script's own modules, as files below the working directory, and digests of them."""
        for module in [*sys.modules.values()]:
            path = self.home / (getattr(module, "__file__", None) or os.devnull)
            if path.is_relative_to(self.home) and "site-packages" not in path.parts and path.is_file():
                yield str(path.relative_to(self.home)), hashlib.sha256(path.read_bytes()).hexdigest()

    @staticmethod
    def compile_seconds() -> float:
        dynamo = sys.modules.get("torch._dynamo.utils")
        return float(dynamo.calculate_time_spent().get("total_wall_time", 0.0)) if dynamo else 0.0

    def allocator_retries(self) -> int:
        return int(self.torch.cuda.memory_stats(self.gpu)["num_alloc_retries"]) if self.gpu else 0


def resident() -> Iterator[int]:
    """Yield this process's present and peak resident bytes, without the pages of mapped files; nothing if unknown."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        sizes = dict(line.split(":", 1) for line in status.splitlines())
        mapped, *held = (int(sizes[name].split()[0]) * 1024 for name in ("RssFile", "VmRSS", "VmHWM"))
    except (OSError, KeyError):
        return
    yield from (size - mapped for size in held)


class Finder(importlib.abc.MetaPathFinder):
    """Installs the hook as soon as the script imports the module of the optimizers."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self.rank.install(module)

        spec.loader.exec_module = exec_module
        return spec


def watch(log: Path) -> None:
    """Append each file that this process, and what it forks, opens to ``log``: a line ["r" or "w", path] of JSON."""
    file, noted = os.open(log, os.O_WRONLY | os.O_APPEND), set()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "sqlite3.connect") or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        name = os.fsdecode(arguments[0])
        if event == "sqlite3.connect":
            name, arguments = name.removeprefix("file:").partition("?")[0], (name, None, os.O_RDONLY)
        path = os.path.abspath(name)  # noqa: PTH100
        writes = (arguments[2] or 0) & (os.O_WRONLY | os.O_TRUNC | os.O_EXCL)
        opened = ("w" if writes else "r", path)
        if opened in noted:
            return
        noted.add(opened)
        if path.endswith(".pyc"):
            with suppress(ValueError):
                opened = (opened[0], importlib.util.source_from_cache(path))
        with suppress(OSError):  # the script closed all files
            os.write(file, json.dumps(opened).encode() + b"\n")

    sys.addaudithook(note)


def begin(folder: Path) -> None:
    """Install the hook in this process; then run the user's own ``sitecustomize``, if there is one."""
    sys.meta_path.insert(0, Finder(Rank(folder)))
    if (folder / OPENED).exists():
        watch(folder / OPENED)
    sys.path[:] = [path for path in sys.path if path != str(folder)]
    spec = PathFinder.find_spec("sitecustomize")
    if spec and spec.loader:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize" and FOLDER in os.environ:
    begin(Path(os.environ[FOLDER]))
