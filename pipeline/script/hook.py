"""Pause and resume an unchanged training script between two optimizer steps, and measure the steps.

``jobs`` links this file as ``sitecustomize.py`` into a private folder and names the folder in ``PYTHONPATH``, so every
Python process of the script runs it at its start. It imports nothing of this package, because the script may have
modules of the same name; two files of it are run by their paths. A process that takes an optimizer step connects to the
folder's socket. Then it waits at the boundaries of its steps for requests, and answers each with what it measured. When
the connection is closed, the process ends at a boundary, so all ranks end after the same step. A request without a
number of steps lets it train to its end; then it answers as it exits.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import runpy
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from time import perf_counter, process_time  # bound now, before the script can replace them
from typing import Any

FOLDER, PYTHON, OPTIMIZER = (f"PIPELINE_SCRIPT_{name}" for name in ("FOLDER", "PYTHON", "OPTIMIZER"))
"""The environment variables with the private folder, with the place of the pipeline's Python, and with the number of
the optimizer whose steps count, in the order in which they are made (0: the first that takes a step)."""
OPENED = "opened"
"""The file in the folder to which the processes write the files that they open, if it exists."""
PACKAGE = Path(__file__).resolve().parents[1]
MOST_EVENTS = 1000
"""After so many steps of a training to its end, the events of a GPU are read. The host's clock would not do: the host
runs ahead of the GPU, and then waits for many steps at once."""
SAMPLED = 4096
"""How many values of each parameter are compared with those of another arm."""


class Rank:
    """One process of the script that takes optimizer steps. As a finder of modules, it watches the optimizers as soon
    as the script imports their module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[int] = []
        self.stepping: set[int] = set()
        self.owner: Any = None
        """The optimizer whose steps count."""
        self.model: Any = None
        """The module that gets the samples, if one did."""
        self.pid = self.steps = self.entered = 0

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self.install(module)

        spec.loader.exec_module = exec_module
        return spec

    def install(self, optimizers: Any) -> None:
        """Watch the optimizers of the module ``torch.optim.optimizer``."""
        construct = optimizers.Optimizer.__init__

        def made(optimizer: Any, *arguments: Any, **options: Any) -> None:
            construct(optimizer, *arguments, **options)
            if not self.made:
                self.torch = sys.modules["torch"]
                self.note_base(optimizer)
                untraced = self.torch.compiler.disable
                optimizers.register_optimizer_step_pre_hook(untraced(self.before))
                optimizers.register_optimizer_step_post_hook(untraced(self.boundary))
            self.made.append(id(optimizer))

        optimizers.Optimizer.__init__ = made
        ours = "processes/malloc.py", "measurement/windows.py"  # the latter binds the clock before it can be replaced
        self.malloc, self.windows = (runpy.run_path(str(PACKAGE / file)) for file in ours)
        self.malloc["return_freed_memory"]()

    def note_base(self, optimizer: Any) -> None:
        """Let the memory count from what is resident now, without the parameters of the first ``optimizer``."""
        memory = self.windows["Memory"]
        memory(self.torch.device("cpu")).open()  # from now on, the peak is what is resident
        now = self.windows["own_peak_bytes"]()
        held = sum(own.nbytes for own in map(local, parameters(optimizer)) if own.device.type == "cpu")
        memory.imported_bytes = None if now is None else now - held

    def before(self, optimizer: Any, *_: Any) -> None:
        """Before a step: meet the bench if it is the first of the optimizer whose steps count."""
        self.stepping.add(id(optimizer))
        named = int(os.environ.get(OPTIMIZER, 0))
        if self.owner is None and named in (0, self.made.index(id(optimizer)) + 1):
            self.meet(optimizer)

    def meet(self, optimizer: Any) -> None:
        """Connect, say what this process is, and wait for the first request."""
        # Imported here: most processes of a script take no step.
        from multiprocessing.connection import Client
        from multiprocessing.util import Finalize

        self.owner, self.pid = optimizer, os.getpid()
        own, group = [*map(local, parameters(optimizer))], self.torch.distributed
        self.device = own[0].device
        self.on_gpu = self.device.type == "cuda"
        about = self.torch.cuda.get_device_properties(self.device) if self.on_gpu else None
        together = group if group.is_available() and group.is_initialized() else None
        try:
            self.connection = Client(str(self.folder / "socket"))
        except OSError:
            self.leave("a second process takes optimizer steps, or the bench has ended: one command, one training")
        self.at_exit = Finalize(None, self.end, exitpriority=0)  # atexit is not called in a fork of multiprocessing
        self.wait(
            pid=self.pid,
            rank=together.get_rank() if together else 0,
            gpu=about and about.name,
            uuid=about and str(getattr(about, "uuid", "")),
            torch=str(self.torch.__version__),
            conditions={
                "world_size": together.get_world_size() if together else 1,
                "backend": together.get_backend() if together else None,
                "learning_rate": float(optimizer.param_groups[0].get("lr", 0.0)),
                "parameter_count": sum(parameter.numel() for parameter in own),
                "threads_per_process": self.torch.get_num_threads(),
            },
        )

    def boundary(self, optimizer: Any, *_: Any) -> None:
        """Mark the end of a step. After the wanted steps, answer the request and wait for the next one."""
        forked = os.getpid() != self.pid  # such as a worker of a DataLoader
        if optimizer is not self.owner or forked or (self.on_gpu and self.torch.cuda.is_current_stream_capturing()):
            return
        self.steps += 1
        self.clock.step()
        self.samples.append(self.entered)
        self.entered = 0
        if len(self.samples) == self.requested["steps"]:
            self.wait(**self.answer())
        elif self.requested["steps"] is None and len(self.samples) % MOST_EVENTS == 0:
            self.clock.close(measured=True)
            self.clock.open()

    def wait(self, **facts: Any) -> None:
        """Say ``facts``; wait for a request, and begin it. End this process if the connection is closed."""
        since, used = perf_counter(), process_time()
        try:
            self.connection.send(facts)
            self.requested = self.connection.recv()
        except (EOFError, OSError):
            self.leave("the bench has ended", 0)
        self.malloc["keep_freed_memory" if self.requested["keep"] else "return_freed_memory"]()
        if self.requested["anew"]:
            self.clock = self.windows["Clock"](self.device)
            self.memory, self.compiled = self.windows["Memory"](self.device), self.compile_seconds()
            self.waits = [0.0, 0.0]
        else:
            self.waits = [self.waits[0] + process_time() - used, self.waits[1] + perf_counter() - since]
        self.samples: list[int] = []
        if self.requested["examine"]:
            self.start = self.values()
            watch = self.torch.nn.modules.module.register_module_forward_pre_hook
            self.counter = watch(self.torch.compiler.disable(self.count))
        self.memory.open()
        self.clock.open()

    def answer(self) -> dict[str, Any]:
        """Return what the steps since the last request ``anew`` took; of examined steps, also what they did."""
        self.clock.close(measured=True)  # first, because reading the memory takes as long as a short step
        self.memory.close(measured=True)
        facts = {"steps": self.steps, "clock": self.clock.state(), "memory": self.memory.state(), "waits": self.waits}
        facts["compile_seconds"] = self.compile_seconds() - self.compiled
        if self.requested["examine"] or self.requested["steps"] is None:
            facts["ended"], after = self.values()
        if self.requested["examine"]:
            self.counter.remove()
            facts["started"], before = self.start
            facts |= self.trained(before, after) | {"optimizers": len(self.stepping)}
            facts["samples"] = self.samples[1:]  # the request began after the forward pass of the first step
            del self.start
        return facts

    def end(self) -> None:
        """As the process exits, answer the request to train to the end."""
        if self.requested["steps"] is None:
            self.connection.send(self.answer())

    def leave(self, why: str, code: int = 1) -> None:
        """End this process at once, so that nothing of the script runs any more."""
        print(why, file=sys.stderr, flush=True)  # noqa: T201
        sys.stdout.flush()
        os._exit(code)

    def count(self, module: Any, arguments: Any) -> None:
        """Count the samples that enter the step's model: the first dimension of its first tensor.

        The model is the first module in training with a parameter of the optimizer: a transform of images is a module,
        too.
        """
        tensors = [argument for argument in arguments if isinstance(argument, self.torch.Tensor) and argument.dim()]
        if not tensors or not module.training or not self.torch.is_grad_enabled():
            return
        if self.model is None and {*map(id, module.parameters())} & {*map(id, parameters(self.owner))}:
            self.model = module
        if module is self.model:
            self.entered += len(tensors[0])

    def values(self) -> tuple[str, list[Any]]:
        """Return a digest of all parameters, and ``SAMPLED`` values of each as float32."""
        whole, some = hashlib.sha256(), []
        for parameter in map(local, parameters(self.owner)):
            flat = parameter.detach().reshape(-1)
            some.append(flat[:: max(1, len(flat) // SAMPLED)].float().cpu().clone())
            whole.update(f"{parameter.dtype} {tuple(parameter.shape)}".encode())
            whole.update(memoryview(flat.cpu().contiguous().view(self.torch.uint8).numpy()))
        return whole.hexdigest(), some

    def trained(self, before: list[Any], after: list[Any]) -> dict[str, dict[int, Any]]:
        """Return, by each parameter's place, its name, if a module got samples; the root mean square and the size of
        its gradient, if it has one; and the change of its values, as an array, since a connection shares tensors."""
        named = () if self.model is None else self.model.named_parameters()
        names = {id(parameter): name for name, parameter in named}
        facts: dict[str, dict[int, Any]] = {"names": {}, "gradients": {}, "updates": {}}
        for place, parameter in enumerate(parameters(self.owner)[: len(before)]):
            facts["names"][place] = names.get(id(parameter), "a parameter")
            facts["updates"][place] = (after[place] - before[place]).numpy()
            if parameter.grad is not None:
                gradient = local(parameter.grad).detach().float()
                facts["gradients"][place] = float(gradient.square().mean().sqrt()), gradient.numel()
        return facts

    @staticmethod
    def compile_seconds() -> float:
        dynamo = sys.modules.get("torch._dynamo.utils")
        return float(dynamo.calculate_time_spent().get("total_wall_time", 0.0)) if dynamo else 0.0


def parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def local(tensor: Any) -> Any:
    """Return this process's part of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def watch(log: Path) -> None:
    """Append each file that this process, and what it forks, opens to ``log``: a line [whether to write, path]."""
    file, noted = os.open(log, os.O_WRONLY | os.O_APPEND), set()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        writes = bool((arguments[2] or 0) & (os.O_WRONLY | os.O_TRUNC | os.O_EXCL))
        opened = (writes, os.path.abspath(os.fsdecode(arguments[0])))  # noqa: PTH100
        if opened not in noted:
            noted.add(opened)
            with suppress(OSError):  # the script closed all files
                os.write(file, json.dumps(opened).encode() + b"\n")

    sys.addaudithook(note)


def begin(folder: Path) -> None:
    """Install the hook in this process; then run the user's own ``sitecustomize``, if there is one."""
    if os.environ.get(PYTHON) != sys.prefix:
        print(f"The packages are those of {sys.prefix}, not of {os.environ.get(PYTHON)}.", file=sys.stderr)  # noqa: T201
    sys.meta_path.insert(0, Rank(folder))
    if (folder / OPENED).exists():
        watch(folder / OPENED)
    sys.path[:] = [path for path in sys.path if path != str(folder)]
    spec = PathFinder.find_spec("sitecustomize")
    if spec and spec.loader:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize" and FOLDER in os.environ:
    begin(Path(os.environ[FOLDER]))
