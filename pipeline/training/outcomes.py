"""What comes out of a training's steps: their losses, the work that they took, how they fail, and the model's score.

Losses are added up on a CPU as a number, and on a GPU as a tensor, which is seldom read. A step's work is counted
instead of assumed: the samples that enter the model and the loss, and repeated inputs. Evaluation is exact: every test
sample counts once, on one of the ranks, and the ranks add up sums, not means.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from pipeline.distributed import World
from pipeline.errors import PipelineError, count
from pipeline.models.keeping import copied, evaluating
from pipeline.models.loss_and_metric import RESOLUTION, ObjectiveError
from pipeline.results.rejections import Rejection, rejection
from pipeline.step import TrainingStep
from pipeline.tasks import Task
from pipeline.tasks.batches import evaluation_batches


class NonFiniteLoss(PipelineError):
    """The training loss became infinite or NaN.

    ``steps_ago``: how many steps have ended since the first step with a bad loss, including that first step.
    """

    def __init__(self, message: str, steps_ago: int = 0) -> None:
        super().__init__(message)
        self.steps_ago = steps_ago


class HostLosses:
    """Adds up the losses of steps on a CPU, where a loss can be read without waiting.

    ``add`` raises NonFiniteLoss if a loss is infinite or NaN. It raises before the backward pass, so no rank gets the
    gradients of this loss.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.total = 0.0

    def add(self, loss: torch.Tensor) -> None:
        value = loss.item()
        if not math.isfinite(value):
            raise NonFiniteLoss(f"the loss became {value}, and the optimizer did not take this step")
        self.total += value

    def end_step(self) -> None:
        """Do nothing: ``add`` has already raised if the loss is bad."""

    def read(self) -> float:
        """Return the sum over steps since the last ``read_and_reset``, averaged over ranks.

        All ranks call this method together.
        """
        return self.world.sum_(torch.tensor(self.total, dtype=torch.float64)).item() / self.world.size

    def read_and_reset(self) -> float:
        """Return ``read()``, and reset the sum."""
        total = self.read()
        self.total = 0.0
        return total


class DeviceLosses:
    """Adds up the losses of steps on the device, without waiting for the device or for another rank.

    A sum that is NaN or infinite stays so. Therefore ``read`` still finds a bad loss, and its step, some steps later.
    By then the optimizer has taken these steps, so the weights are useless and must not be kept.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.total = torch.zeros((), device=world.device)
        self.bad_steps = torch.zeros((), device=world.device)
        """How many steps this rank has ended since its sum became infinite or NaN, including that step."""

    def add(self, loss: torch.Tensor) -> None:
        self.total += loss.detach()

    def end_step(self) -> None:
        self.bad_steps += torch.nan_to_num(self.total * 0.0, nan=1.0)  # finite: 0; infinite or NaN: 1

    def read(self) -> float:
        """Return the sum over steps since the last ``read_and_reset``, averaged over ranks. Waits for the device.

        All ranks call this method together. If the sum is not finite, all ranks raise NonFiniteLoss.
        """
        total = self.world.sum_(self.total.clone()).item() / self.world.size
        if not math.isfinite(total):
            ended = int(self.world.max_(self.bad_steps))
            raise NonFiniteLoss(
                f"the loss became {total}, which was noticed after {count(ended, 'step')}; by then the weights were "
                "useless, so none are kept",
                ended,
            )
        return total

    def read_and_reset(self) -> float:
        """Return ``read()``, and reset the sum."""
        total = self.read()
        self.total.zero_()
        return total


class OutOfMemory(PipelineError):
    """A device does not have enough memory for a training step."""


class TooFewSamples(PipelineError):
    """A model cannot train with so few samples in a micro-batch."""


_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|CUDA( driver)? error: out of memory|CUDA ran out of memory|\[CUDA\]: out of memory"
    r"|ALLOC(ATION)?_FAILED|CUBLAS_STATUS_NOT_INITIALIZED|Cuda failure (\d+ )?'out of memory'"
)
"""Out-of-memory messages of torch, Triton, cuDNN, cuBLAS and NCCL. Without memory for its workspace, cuBLAS says that
it is not initialised."""
_NO_ENGINE = re.compile(r"(GET|FIND) was unable to find an engine to execute this computation")
"""torch's message if every cuDNN engine lacks memory for its workspace, or if no engine supports the computation."""
LITTLE_MEMORY = 0.1
"""If less than this share of a GPU's memory is free, a missing engine counts as out of memory."""


def is_out_of_memory(error: Exception) -> bool:
    """True if ``error`` says or suggests that torch's allocator or a CUDA library ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(str(error)):
        return True
    return bool(_NO_ENGINE.search(str(error))) and _free_memory_fraction() < LITTLE_MEMORY


def is_too_few_samples(error: Exception) -> bool:
    """True if ``error`` says that a normalisation got only one value per channel, such as one sample of one pixel."""
    return "Expected more than 1 value per channel when training" in str(error)


def _free_memory_fraction() -> float:
    """Return the share of memory that is free; 1 without a GPU.

    This is the smaller of two shares: the free share of the current GPU's memory, and the free share of this process's
    limit on that GPU.
    """
    if not torch.cuda.is_available():
        return 1.0
    free, total = torch.cuda.mem_get_info()
    allowed = torch.cuda.get_per_process_memory_fraction() * total
    return min(free / total, 1 - torch.cuda.memory_reserved() / allowed)


def without_deterministic_form(error: BaseException) -> str | None:
    """Return the operation that torch refused under ``use_deterministic_algorithms``; None for other errors."""
    operation, refused, _ = str(error).partition(" does not have a deterministic implementation")
    if refused:
        return operation.rpartition("\n")[2]
    return "cuBLAS" if "not deterministic because it uses CuBLAS" in str(error) else None


FEWEST_COMPARED = 8
"""Steps with fewer samples are not compared, because two steps may by chance take the same few samples in the
same order."""
COMPARED_SAMPLES, COMPARED_VALUES = 64, 1 << 14
"""Two steps' inputs are compared in part: about ``COMPARED_SAMPLES`` samples of each call of the model, and about
``COMPARED_VALUES`` of these samples' values."""


class WorkLeftOut(PipelineError):
    """A step took fewer samples than it is credited with, or the same samples as another step."""


class Work(NamedTuple):
    """The samples of one step, over all replicas of the model."""

    credited: int
    """Samples of the global batch."""
    model: int
    """Samples that entered the model, not counting passes that only recompute."""
    loss: int | None
    """Samples that entered the step's criterion; None if a technique calls its own loss instead."""
    repeated: bool = False
    """Whether two counted steps took the same inputs in the same order."""

    @property
    def missing(self) -> int:
        """Samples of the global batch that the step left out; all of them if the inputs were repeated."""
        if self.repeated:
            return self.credited
        return max(0, self.credited - min(self.model, self.model if self.loss is None else self.loss))

    @property
    def rejection(self) -> Rejection:
        """Why a measurement with this work is rejected."""
        if self.repeated:
            return rejection("samples_repeated", credited=self.credited)
        if self.loss is None:
            return rejection("samples_left_out", credited=self.credited, model=self.model)
        return rejection("samples_left_out_of_loss", credited=self.credited, model=self.model, loss=self.loss)


class Counted:
    """One rank's counts in one step: the samples of each call of the model and of the loss."""

    def __init__(self) -> None:
        self.model: list[int] = []
        self.loss: list[int] = []
        self.inputs: list[torch.Tensor] = []
        """Some input values of each call of the model, kept on the device so that the step does not wait."""
        self.digest = ""
        """SHA-256 of the values of ``inputs``, set by ``read``; empty if there are none."""

    def read(self) -> Counted:
        """Wait for the device, replace ``inputs`` by their ``digest``, and return this object."""
        if self.inputs:
            content = b"".join(values.contiguous().view(torch.uint8).cpu().numpy().tobytes() for values in self.inputs)
            self.digest, self.inputs = hashlib.sha256(content).hexdigest(), []
        return self


@contextmanager
def counted(step: TrainingStep, model: nn.Module) -> Iterator[Counted]:
    """While the block runs, count the samples of each call of ``model``, the bare module, and of the step's criterion.

    Hooks cannot see into a compiled graph. So in a compiled model the samples that enter the compiled module are
    counted. In a pipeline, the samples that enter the stage are counted.
    """
    counts = Counted()
    inward = [part for part in step.model.modules() if part is model or isinstance(part, torch._dynamo.OptimizedModule)]
    entrance = inward[0] if model in inward else step.model

    def entering(_: nn.Module, arguments: Sequence[Any], named: dict[str, Any]) -> None:
        inputs = next(leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor))
        counts.model.append(len(inputs))
        # A fake tensor has no values. A copy made while a CUDA graph is recorded would be overwritten by each replay.
        if type(inputs) is torch.Tensor and not (inputs.is_cuda and torch.cuda.is_current_stream_capturing()):
            some = inputs.detach()[:: max(1, len(inputs) // COMPARED_SAMPLES)].flatten()
            counts.inputs.append(some[:: max(1, len(some) // COMPARED_VALUES)].clone())

    def into_loss(criterion: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counting(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            counts.loss.append(len(targets))
            return criterion(outputs, targets)

        return counting

    def recomputing(backward: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        def uncounted(loss: torch.Tensor) -> None:
            before = len(counts.model)
            backward(loss)
            del counts.model[before:]

        return uncounted

    hook = entrance.register_forward_pre_hook(entering, with_kwargs=True)
    try:
        with step.instrument(criterion=into_loss, backward=recomputing):
            yield counts
    finally:
        hook.remove()


def work_of(ranks: Sequence[Counted], credited: int, model_processes: int) -> Work:
    """Add up the counts of all ``ranks``. Each group of ``model_processes`` consecutive ranks holds one model: inputs
    enter on the group's first rank, and the loss is computed on its last rank."""
    losses = [rank.loss for rank in ranks[model_processes - 1 :: model_processes]]
    model = sum(sum(rank.model) for rank in ranks[::model_processes])
    return Work(credited, model, sum(map(sum, losses)) if all(losses) else None)


def most_missing(steps: Sequence[Sequence[Counted]], credited: int, model_processes: int) -> Work | None:
    """Return the work of the step that left out the most samples; None if ``steps`` is empty.

    ``steps``: for each counted step, the counts of all ranks. If two steps of at least ``FEWEST_COMPARED`` samples took
    the same inputs, return the work of the first of all ``steps``, with ``repeated`` set.
    """
    works = [work_of(ranks, credited, model_processes) for ranks in steps]
    taken = [tuple(rank.digest for rank in ranks[::model_processes]) for ranks in steps]
    if credited >= FEWEST_COMPARED and any(any(digests) and taken.count(digests) > 1 for digests in taken):
        return works[0]._replace(repeated=True)
    return max(works, key=lambda work: work.missing, default=None)


@dataclass(frozen=True)
class Score:
    """A model's result on the test set."""

    correct: int | float
    """Sum of the samples' scores; for accuracy, the number of correct samples. If labels are scored instead, their mean
    score times ``count``."""
    count: int
    loss: float
    """Mean of the job's loss over the samples, or over the labels that count. Cross-entropy is computed without label
    smoothing and weights of classes."""

    @property
    def accuracy(self) -> float:
        """The metric's mean over the samples, 0 to 1."""
        return self.correct / self.count


def without_weights(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` on the meta device; only buffers that its state dict leaves out keep their values."""
    stored = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="meta") if id(tensor) in stored else tensor.detach().clone()

    return copied(model, changed)


def evaluate(model: nn.Module, task: Task, world: World, batch_size: int, model_processes: int = 1) -> Score:
    """Score ``model`` on the test split with all ranks, in float32 even if the training has another precision.

    The ranks take disjoint shares of the split, without padding, and add up their scores, so the accuracy is that of a
    single device. Each group of ``model_processes`` consecutive ranks computes one share. The forward pass of a sharded
    model waits for all ranks, so a rank with fewer batches also evaluates a sample that is not counted.
    A metric of the whole test set gets the outputs of all ranks in the order of the split, on the CPU of each rank; the
    main rank's value counts.
    BatchNorm uses the main rank's running statistics. Raises ObjectiveError for a score outside 0 to 1, and for a loss
    that is not finite.
    """
    objective, test = task.objective, task.dataset.test
    (share, member), shares = divmod(world.rank, model_processes), world.size // model_processes
    batches = evaluation_batches(test, task, rank=share, world_size=shares, batch_size=batch_size)
    most = math.ceil(math.ceil(len(test) / shares) / batch_size)
    not_counted = next(evaluation_batches(test[:1], task, rank=0, world_size=1, batch_size=1))
    world.broadcast_buffers_(model)
    # scores, samples, losses, scores out of bounds, number of scores, number of losses
    sums = torch.zeros(6, dtype=torch.float64, device=world.device)
    scored_batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad(), evaluating(model):
        for _ in range(most):
            batch = next(batches, not_counted)
            inputs, targets = batch
            outputs = model(inputs).float()
            if batch is not_counted or member:  # only the first rank of a group adds to the sums
                continue
            if objective.over_set:
                scored_batches.append(task.of_labels(outputs.cpu(), targets.cpu()))
            scores = objective.scores(outputs, targets)
            if scores.dtype != torch.bool:
                sums[3] += (~((scores >= 0) & (scores <= 1))).sum()  # also counts NaN
                scores = (scores.double() * RESOLUTION).round() / RESOLUTION
            sums[0] += scores.sum()
            sums[1] += len(targets)
            sums[2] += objective.test_losses(outputs, targets)
            sums[4] += len(scores)
            sums[5] += objective.counted(targets)
    total, count, loss, outside, scored, losses = world.sum_(sums).tolist()
    if outside:
        raise ObjectiveError(
            f"train.metric: {outside:.0f} of {scored:.0f} test samples have a score that is not from 0 to 1. "
            "Change the metric: it must return a score from 0 to 1 for each sample."
        )
    if not math.isfinite(loss):
        raise ObjectiveError(
            f"train.loss: its mean over the {count:.0f} test samples is {loss}. If the training has diverged, "
            "lower train.learning_rate. If your own loss is not finite for bad outputs, bound it."
        )
    if objective.over_set:
        outputs, targets = map(torch.cat, zip(*chain(*world.gather(scored_batches)), strict=True))
        total, scored = world.broadcast(objective.over_set(outputs, targets)), 1.0
    correct = total if scored == count else total / max(scored, 1) * count
    correct = int(correct) if correct.is_integer() else correct
    return Score(correct=correct, count=int(count), loss=loss / max(losses, 1))
