"""Small models and plans for tests of techniques and training."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models import VisionTransformer

from pipeline import tasks
from pipeline.data.prepared import Dataset, Split
from pipeline.distributed import ALONE as ALONE
from pipeline.distributed import World
from pipeline.params import Train, Variant
from pipeline.plans import Plan
from pipeline.step import Losses, TrainingStep
from pipeline.tasks import Task
from pipeline.tasks.batches import Placement, TrainBatches
from pipeline.techniques import Setup, Technique, of_plan
from pipeline.training import assembly
from pipeline.training.assembly import Assembly
from pipeline.training.loop import Training
from pipeline.training.outcomes import HostLosses


def make_plan(
    name: str = "tried",
    *,
    processes: int = 1,
    devices_per_process: int = 1,
    batch_size: int = 32,
    train: Train | None = None,
    **applied: Any,
) -> Plan:
    """Return a plan for the CPU in which all techniques of the variant apply."""
    variant = Variant(**applied)
    micro_batches = 1 if variant.gradient_accumulation == "auto" else variant.gradient_accumulation
    model_processes = processes // variant.copies if variant.parallelism in ("pipeline", "tensor") else 1
    return Plan(
        name=name,
        requested=variant,
        applied=variant,
        skipped={},
        device="cpu",
        processes=processes,
        model_processes=model_processes,
        micro_batches=micro_batches,
        micro_batch_size=batch_size // (processes // model_processes) // micro_batches,
        devices_per_process=devices_per_process,
        train=train or Train(batch_size=batch_size),
    )


def conv_net(*, norm: bool = False, dropout: bool = False, seed: int = 0) -> nn.Sequential:
    """Return two convolutional blocks and a classifier for [N, 1, 8, 8] images of 10 classes."""
    torch.manual_seed(seed)

    def block(before: int, after: int) -> nn.Sequential:
        layers: list[nn.Module] = [nn.Conv2d(before, after, 3, padding=1)]
        layers += [nn.BatchNorm2d(after)] * norm
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Dropout(0.3)] * dropout
        return nn.Sequential(*layers)

    return nn.Sequential(block(1, 8), block(8, 16), nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


def normed_net(*, channels: int, height: int, width: int, classes: int) -> nn.Sequential:
    """Return a net like ``conv_net`` with BatchNorm, for scikit-learn's digits. Tests name this function in
    ``train.model``.

    It has one more linear layer than ``conv_net``, so large that bitsandbytes stores the layer's state in 8 bits.
    """
    assert (channels, height, width, classes) == (1, 8, 8, 10)
    *blocks, classifier = conv_net(norm=True)
    return nn.Sequential(*blocks, nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU()), classifier)


class Counting(nn.Sequential):
    """Counts its batches in training mode, and keeps the count as extra state."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(normed_net(**sizes))
        self.batches = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.batches += self.training
        logits: torch.Tensor = self[0](images)
        return logits

    def get_extra_state(self) -> dict[str, Any]:
        return {"batches": self.batches, "shares": [torch.ones(2)]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


class Attending(nn.Module):
    """Adds self-attention among the pixels to images [N, C, H, W]. It has two heads and no parameters."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        heads = images.flatten(2).unflatten(1, (2, -1)).transpose(2, 3).contiguous()  # for the flash kernel
        attended = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.dropout)
        return images + attended.transpose(2, 3).reshape(images.shape)


def attending_net(*, dropout: float = 0.0, **data: int) -> nn.Sequential:
    """Return a net like ``normed_net`` with attention in its second block. Its third block has two linear layers that
    tensor parallelism can cut; the last linear layer is in no block."""
    first, second, *_ = normed_net(**data)
    pair = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return nn.Sequential(first, nn.Sequential(second, Attending(dropout)), pair, nn.Linear(64, 10))


class LooksAtValues(nn.Module):
    """A model whose control flow depends on a tensor's value."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or conv_net()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(images)
        return logits if logits.sum().item() > 0 else -logits


class OfFirstBatch(nn.Module):
    """Normalises by the spread of its first batch, which it keeps as a plain attribute; counts and draws, too."""

    ema: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.spread: torch.Tensor | None = None
        self.calls, self.shapes = 0, [0]
        self.generator, self.own = torch.Generator().manual_seed(1), random.Random(1)
        self.register_buffer("ema", torch.zeros(2), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.spread is None:
            self.spread = images.std()
        self.calls += 1
        self.shapes.append(len(images))
        self.ema = 0.5 * self.ema + images.mean().detach()
        torch.rand(1, generator=self.generator)
        self.own.random(), random.random(), np.random.rand()
        return images / self.spread


def headed_net(*, norm: bool = True, dropout: bool = True) -> nn.Sequential:
    """Return ``conv_net`` with a head of two linear layers and 48 values between them."""
    net = conv_net(norm=norm, dropout=dropout)
    drops: list[nn.Module] = [nn.Dropout(0.3)] * dropout
    wide, narrow = nn.Linear(64, 48), nn.Linear(48, 10)
    net[2] = nn.Sequential(nn.Flatten(), wide, nn.ReLU(inplace=True), *drops, narrow, nn.Hardtanh(-9, 9, inplace=True))
    return net


class SmallTransformer(nn.Module):
    """A vision transformer for [N, 1, 8, 8] images, with dropout in its MLPs and around them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 64, "num_classes": 10}
        self.net = VisionTransformer(image_size=8, patch_size=4, dropout=0.1, **sizes)
        nn.init.normal_(self.net.heads.head.weight, std=0.1)  # torchvision starts it at zero

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(images.expand(-1, 3, -1, -1))
        return logits


class Spare(nn.Module):
    """A model with a parameter that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = conv_net(), nn.Linear(2, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(images)
        return logits


def large_net(seed: int = 0) -> nn.Sequential:
    """Return a net with BatchNorm, and a layer whose state bitsandbytes keeps in 8 bits."""
    *blocks, _ = conv_net(norm=True, seed=seed)
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Counts(TorchDispatchMode):
    """Counts the operations by name, and notes the most values in a tensor that one returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        result = func(*args, **(kwargs or {}))
        self.largest = max(self.largest, result.numel() if isinstance(result, torch.Tensor) else 0)
        return result


def batches_of(
    dataset: Dataset, plan: Plan, joined: World, seed: int = 0, placement: Placement = "resident"
) -> TrainBatches:
    """Return the batches that a training with ``plan`` reads on this rank."""
    return assembly.batches_of(plan, task_of(dataset, plan.train, joined.device), joined, seed, placement)


def stopped(training: Training, after: int) -> dict[str, Any]:
    """Run ``after`` steps; return on every rank the state that a job would save on the main rank."""
    steps = training.run()
    for _ in range(after):
        next(steps)
    with training.paused():
        state = training.world.broadcast(training.world.wholes_on_main(training.state()))
    return {**state, "model": {name: value.clone() for name, value in state["model"].items()}}


def changed(model: nn.Module, techniques: Sequence[Technique]) -> nn.Module:
    """Return the model after the techniques have changed it."""
    setup = setup_of(model)
    for technique in techniques:
        technique.change_model(setup)
    return setup.model


def chosen(plan: Plan, world: World) -> list[Technique]:
    """Return the techniques that the plan applies, in the order in which they are applied."""
    return [technique(plan, world) for technique in of_plan(plan)]


def training_of(
    plan: Plan, model: nn.Module, task: Task, batches: TrainBatches, world: World, seed: int = 0, **options: Any
) -> Training:
    return assembly.compose(plan, model, task, batches, world, of_plan(plan), seed, **options)


def assembly_of(plan: Plan, world: World, dataset: Dataset, placement: Placement = "resident") -> Assembly:
    return Assembly(plan, world, task_of(dataset, plan.train, world.device), placement, of_plan(plan))


def setup_of(model: nn.Module, zeros: torch.Tensor | None = None) -> Setup:
    """Return the setup in which a technique changes ``model``. The model takes images [b, 1, 8, 8], or inputs like
    ``zeros``."""
    task: Any = SimpleNamespace(inputs=lambda count: batch(count)[0] if zeros is None else zeros)
    return Setup(model, task, batch)


def batch(size: int = 32, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random images float32 [size, 1, 8, 8] and labels int64 [size]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 1, 8, 8, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def task_of(dataset: Dataset, train: Train | None = None, device: torch.device = ALONE.device) -> Task:
    return tasks.of_job(train or Train(), dataset, device)


def labelled(images: torch.Tensor, labels: torch.Tensor) -> Split:
    return Split({"inputs": images, "targets": labels})


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of all gradients, in parameter order."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


GPU = World(rank=0, size=1, device=torch.device("cuda", 0), backend=None)


def make_step(
    model: nn.Module,
    techniques: Sequence[Technique] = (),
    *,
    optimizer: torch.optim.Optimizer | None = None,
    losses: Losses | None = None,
    micro_batches: int = 1,
) -> TrainingStep:
    """Return the training step of ``model`` after the techniques have changed the step. Change the model with them
    before. The default optimizer changes no weight."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    step = TrainingStep(model, F.cross_entropy, optimizer, losses or HostLosses(ALONE), micro_batches)
    setup = setup_of(model)
    setup.step = step
    for technique in techniques:
        technique.change_step(setup)
    return step


def take_within(technique: Technique, take: Callable[[Any], None]) -> None:
    """Run a training step that only calls ``take``, after the technique has changed the step."""
    setup = setup_of(nn.Linear(1, 1))
    setup.step = make_step(setup.model)
    setup.step.whole = take
    technique.change_step(setup)
    setup.step(iter(()))
