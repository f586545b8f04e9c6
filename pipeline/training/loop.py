"""The loop. Variants differ by what their techniques made of the step, never by code in here."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import nn

from pipeline.data.batches import TrainBatches
from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.errors import PipelineError, first_line
from pipeline.measurement.detectors import Detector
from pipeline.measurement.windows import Clock, Memory
from pipeline.models import loss_and_metric, optimizers
from pipeline.plans import Plan
from pipeline.results import HistoryRow
from pipeline.step import Losses, TrainingStep
from pipeline.techniques import Checkpointed, Inputs, Stored, chosen
from pipeline.training import checkpoints
from pipeline.training.counting import Counted, Work, counted, work_of
from pipeline.training.evaluation import Score, UnshardedModel, evaluate
from pipeline.training.failures import (
    OutOfMemory,
    TooFewSamples,
    is_out_of_memory,
    is_too_few_samples,
    without_deterministic_form,
)
from pipeline.training.losses import DeviceLosses, HostLosses, NonFiniteLoss


class Training:
    """One seed's run of one variant, on one rank.

    ``model`` is a single-device module with this seed's initial weights, the same on every rank; it is
    moved to the rank's device. All ranks do everything in step; what is random after the initialisation
    (dropout, say) differs by rank, unless a technique says otherwise.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        dataset: Dataset,
        batches: TrainBatches,
        world: World,
        seed: int,
        detectors: Sequence[Detector] = (),
    ) -> None:
        self.plan, self.train, self.dataset, self.batches, self.world, self.seed = (
            plan, plan.train, dataset, batches, world, seed,
        )  # fmt: skip
        train = plan.train
        self.detectors = detectors
        self.model = model.to(world.device)
        self.parameter_count = sum(parameter.numel() for parameter in self.model.parameters())
        self.techniques = chosen(plan, world)
        sharded = any(technique.shards_model for technique in self.techniques)
        self._unsharded = UnshardedModel(self.model) if sharded else None
        wrapped, optimizer = self.model, optimizers.of_job(train)
        inputs = Inputs(dataset.shape, lambda: next(batches.epoch(0)))
        for technique in self.techniques:
            wrapped = technique.change_model(wrapped, inputs)
            optimizer = technique.change_optimizer(optimizer)
        self.optimizer = optimizer.make(wrapped.parameters())
        self.objective = loss_and_metric.of_job(train, len(dataset.classes), world.device)
        losses = HostLosses(world) if world.device.type == "cpu" else DeviceLosses(world)
        self.take_step = TrainingStep(wrapped, self.objective.loss, self.optimizer, losses, plan.micro_batches)
        checkpoint = Checkpointed(
            Stored(self.model.state_dict, self.model.load_state_dict),
            Stored(self.optimizer.state_dict, self.optimizer.load_state_dict),
        )
        for technique in self.techniques:
            technique.change_step(self.take_step)
            technique.change_checkpoint(checkpoint, self.optimizer)
        self.model_state, self.optimizer_state = checkpoint.model, checkpoint.optimizer
        alike = any(technique.shared_rng for technique in self.techniques)
        stream = world.rank // plan.model_processes if alike else world.rank
        torch.manual_seed(seed + 1_000_003 * (stream + 1))

        self.clock, self.memory = Clock(world.device), Memory(*world.devices(plan.devices_per_process))
        self.total_steps = train.epochs * batches.steps_per_epoch
        for technique in self.techniques:
            technique.begin_after(optimizers.rising_steps(train, self.total_steps))
        self.steps = 0
        """Optimizer steps taken."""
        self._counted: Counted | None = None
        self.settled = train.warmup_steps
        """The step after which this process is warm and windows are measured."""
        self.score: Score | None = None
        self.evaluate_seconds = 0.0
        self.epoch_loss = 0.0
        self._last_row = (0, 0.0)
        self._advancing: Generator[HistoryRow | None, None, None] | None = None

    @property
    def losses(self) -> Losses:
        """Of the steps since the last row."""
        return self.take_step.losses

    def run(self) -> Generator[HistoryRow | None, None, None]:
        """Train to the end, or on from where ``restore`` left off. Yields once a step: a row where one is due.

        Raises NonFiniteLoss, which says where. On a CPU the rank that saw it does, and the parameters are those of the
        step before. On GPUs all ranks do when the next row is due, and the parameters are of no use.
        """
        per_epoch = self.batches.steps_per_epoch
        settling = {1, self.settled}
        while self.steps < self.total_steps:
            epoch, start = divmod(self.steps, per_epoch)
            batches = self.clock.watch(self.batches.epoch(epoch, start))
            self._open()
            for _ in range(start, per_epoch):
                self._set_learning_rate()
                with self._located(), nullcontext() if self.steps else self._counting():
                    self.take_step(batches)
                self.steps += 1
                self.clock.step()
                if self.steps in settling:
                    self._close()
                    self._open()
                if self.steps % per_epoch == 0:
                    yield self._end_epoch()
                elif self.steps % self.train.history_every_steps == 0:
                    yield self._row(self.clock.train_seconds_now())
                else:
                    yield None

    def fits(self) -> bool:
        """Whether every rank has the memory for a step: one is tried. The training is of no use afterwards.

        Gradients stay on their ranks, for one that fails would leave the others waiting for its own. The second round
        finds the state that an optimizer makes in its first step. Raises TooFewSamples, on all ranks.
        """
        step = self.take_step
        step.syncs = [False] * min(2, len(step.syncs))  # all after the first find gradients to add to
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0

        def gradients() -> None:
            step.zero_grad()
            step.accumulate(self.batches.epoch(0))

        for part in (gradients, step.trial_update or step.update, gradients):
            failed = torch.zeros((), device=self.world.device)
            try:
                part()
            except (RuntimeError, ValueError) as error:
                if not (is_out_of_memory(error) or is_too_few_samples(error)):
                    raise
                failed += 2 if is_too_few_samples(error) else 1
            if (worst := self.world.max_(failed)) > 1:
                raise TooFewSamples(
                    f"train.model: found {self.train.model!r}, whose BatchNorm cannot train with a micro-batch of "
                    f"{self.plan.micro_batch_size} sample(s) a process, as variants.{self.plan.name} has it."
                )
            if worst:
                return False
        return True

    def advance(self, steps: int) -> None:
        """Train so many steps, fewer if the end comes first, in a window of their own."""
        per_epoch = self.batches.steps_per_epoch
        if self._advancing is None:
            self._advancing = self.run()
        elif self.steps % per_epoch:  # a new epoch opens its window itself
            self._open()
        for _ in islice(self._advancing, steps):
            pass
        if self.steps % per_epoch:
            self._close()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Around the first step, which no window holds: all others are as if it had not been counted."""
        with counted(self.take_step, self.model) as self._counted:
            yield

    def work(self) -> Work | None:
        """What the first step took, the same on every rank; None where an earlier process has taken it.

        All ranks call it together.
        """
        if self._counted is None:
            return None
        return work_of(self.world.gather(self._counted), self.train.batch_size, self.plan.model_processes)

    def settle(self, steps: int) -> None:
        """Forget what was measured: ``advance`` warms up for so many steps before it measures."""
        self.batches.close()
        self.clock, self.memory = Clock(self.world.device), Memory(*self.world.devices(self.plan.devices_per_process))
        self.settled = self.steps + steps
        self._last_row = (self.steps, 0.0)
        self._advancing = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside, between two steps, does not count as training."""
        open_window = self.steps % self.batches.steps_per_epoch != 0
        if open_window:
            self._close()
        yield
        if open_window:
            self._open()

    def state(self) -> dict[str, Any]:
        """Everything the rest of the run depends on: tensors and plain values. Call it while paused, on all ranks.

        Raises NonFiniteLoss, like ``run``: nothing goes on from there.
        """
        with self._located():
            self.losses.read()
        ranks = self.world.gather(
            {
                "random": checkpoints.random_state(),
                "losses": float(self.losses.total),
                "clock": self.clock.state(),
                "memory": self.memory.state(),
                "techniques": [technique.state() for technique in self.techniques],
                "detectors": [detector.state() for detector in self.detectors],
            }
        )
        return {
            "model": self.model_state.read(),
            "optimizer": self.optimizer_state.read(),
            "ranks": ranks,
            "steps": self.steps,
            "evaluate_seconds": self.evaluate_seconds,
            "epoch_loss": self.epoch_loss,
            "last_row": self._last_row,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Undo of ``state``, before ``run``."""
        self.model_state.load(state["model"])
        self.optimizer_state.load(state["optimizer"])
        mine = state["ranks"][self.world.rank]
        self.losses.total += mine["losses"]
        self.clock.restore(mine["clock"])
        self.memory.restore(mine["memory"])
        for technique, remembered in zip(self.techniques, mine["techniques"], strict=True):
            technique.restore(remembered)
        for detector, remembered in zip(self.detectors, mine["detectors"], strict=True):
            detector.restore(remembered)
        self.steps, self.evaluate_seconds = state["steps"], state["evaluate_seconds"]
        self.settled = self.steps + self.train.warmup_steps
        self.epoch_loss, self._last_row = state["epoch_loss"], tuple(state["last_row"])
        checkpoints.restore_random_state(mine["random"])

    def _open(self) -> None:
        for detector in self.detectors:
            detector.open()
        self.world.barrier()  # or the time that one rank's detectors take would be all ranks' first step's
        self.memory.open()
        self.clock.open()

    def _close(self) -> None:
        """End the window; it counts as measured once the warm-up is over."""
        measured = self.steps > self.settled
        self.clock.close(measured=measured)
        self.batches.hold()
        self.memory.close(measured=measured)
        for detector in self.detectors:
            detector.close(measured=measured)

    def _end_epoch(self) -> HistoryRow:
        self._close()  # reading the losses is no step's time
        row = self._row(self.clock.train_seconds)
        self._between_phases()
        started = self.clock.now()
        model = self._unsharded.cast(self.model_state.read(), self.world.device) if self._unsharded else self.model
        self.score = evaluate(model, self.dataset, self.world, self.plan.micro_batch_size, self.objective)
        self.evaluate_seconds += self.clock.now() - started
        self._between_phases()
        return row.model_copy(update={"test_loss": self.score.loss, "test_accuracy": self.score.accuracy})

    def _between_phases(self) -> None:
        for technique in self.techniques:
            technique.between_phases()

    def _row(self, seconds: float) -> HistoryRow:
        per_epoch = self.batches.steps_per_epoch
        with self._located():
            loss = self.losses.take()
        last_steps, last_seconds = self._last_row
        self._last_row = (self.steps, seconds)
        new_steps = self.steps - last_steps
        if last_steps % per_epoch == 0:
            self.epoch_loss = 0.0
        self.epoch_loss += loss / per_epoch
        return HistoryRow(
            seed=self.seed,
            epoch=self.steps / per_epoch,
            step=self.steps,
            train_seconds=seconds,
            learning_rate=optimizers.learning_rate(self.train, self.steps - 1, self.total_steps),
            train_loss=loss / new_steps,
            samples_per_second=new_steps * self.train.batch_size / (seconds - last_seconds),
        )

    def _set_learning_rate(self) -> None:
        rate = optimizers.learning_rate(self.train, self.steps, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @contextmanager
    def _located(self) -> Iterator[None]:
        def place(steps_ago: int = 0) -> str:
            epoch, step = divmod(self.steps - steps_ago, self.batches.steps_per_epoch)
            return f"variant {self.plan.name}, seed {self.seed}, epoch {epoch + 1}, step {step + 1}"

        try:
            yield
        except NonFiniteLoss as error:
            raise NonFiniteLoss(
                f"{place(error.steps_ago)}: {error}. Lower train.learning_rate, lengthen train.warmup_fraction, or "
                "look at the data and at the variant's precision."
            ) from None
        except RuntimeError as error:
            operation = without_deterministic_form(error)
            if operation:
                raise PipelineError(
                    f"train.deterministic: found true, but in {place()} {operation} has no deterministic form; "
                    "allowed: false, or techniques that do without it."
                ) from None
            if not is_out_of_memory(error):
                raise
            plan = self.plan
            more = "'auto'" if plan.applied.gradient_accumulation != "auto" else 2 * plan.micro_batches
            raise OutOfMemory(
                f"{place()}: out of memory with micro-batches of {plan.micro_batch_size} samples a process "
                f"({first_line(error)}). Set variants.{plan.name}.gradient_accumulation to {more}, "
                "lower train.batch_size, or end what else takes memory there."
            ) from None
