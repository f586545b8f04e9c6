"""The training loop. It has no code for particular techniques, which act through their hooks."""

from __future__ import annotations

import copy
import secrets
import statistics
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from pipeline.distributed import World
from pipeline.errors import ConfigError, PipelineError, count, first_line
from pipeline.measurement.detectors import Detector
from pipeline.measurement.energy import Energy
from pipeline.measurement.windows import Clock, Memory, Resumable
from pipeline.models import optimizers
from pipeline.models.keeping import kept_values, put_back
from pipeline.params import GRAPH_WARMUP_STEPS
from pipeline.plans import Plan
from pipeline.processes import randomness
from pipeline.results import HistoryRow
from pipeline.step import Losses
from pipeline.tasks import Task
from pipeline.tasks.batches import TrainBatches
from pipeline.techniques import Setup, Technique
from pipeline.training import checkpoints
from pipeline.training.outcomes import (
    Counted,
    NonFiniteLoss,
    OutOfMemory,
    Score,
    TooFewSamples,
    Work,
    counted,
    evaluate,
    is_out_of_memory,
    is_too_few_samples,
    most_missing,
    without_deterministic_form,
)


@dataclass(eq=False)
class Training:
    """One seed's run of one variant, on one rank.

    All ranks call every method together. Random draws after the initialisation, such as dropout's, differ by rank,
    unless a technique requires that ranks draw the same numbers.
    """

    plan: Plan
    world: World
    task: Task
    batches: TrainBatches
    model: nn.Module
    """The single-device model, on the rank's device. ``setup.step.model`` may wrap or split this model."""
    parameter_count: int
    whole: nn.Module | None
    """The model before any technique, without weights, if evaluation cannot run the trained model; else None."""
    techniques: Sequence[Technique]
    setup: Setup
    step_changes: Mapping[str, Sequence[str]]
    """Each technique -> the parts of the step that it has replaced."""
    seed: int
    detectors: Sequence[Detector] = ()

    def __post_init__(self) -> None:
        self.train, self.step, self.optimizer = self.plan.train, self.setup.step, self.setup.step.optimizer
        self.model_state, self.optimizer_state = self.setup.model_state, self.setup.optimizer_state
        checkpoints.seed_random(self.seed, self.plan, self.world)
        self.total_steps = self.train.epochs * self.batches.steps_per_epoch
        self.steps = 0
        """Optimizer steps taken."""
        self.counted_steps = {0}
        """The steps, numbered from 0, whose samples are counted."""
        self._counted: list[Counted] = []
        self.score: Score | None = None
        self.evaluate_seconds = self.epoch_loss = 0.0
        self._advancing: Generator[HistoryRow | None, None, None] | None = None
        self.restart_measuring(self.train.warmup_steps, self.detectors)

    @property
    def losses(self) -> Losses:
        """The losses of the steps since the last row of the history."""
        return self.step.losses

    def run(self) -> Generator[HistoryRow | None, None, None]:
        """Train from the first step, or from the restored step, to the end. Yields after each step: a row of the
        history if one is due, else None.

        Raises NonFiniteLoss, which names the step, if a loss is infinite or NaN. On a CPU, the rank with this loss
        raises the error before the update, so the parameters are still those of the previous step. On GPUs, all ranks
        raise it when the losses are next read, and by then the parameters are useless.
        """
        per_epoch = self.batches.steps_per_epoch
        window_ends = {1, self.unmeasured_until_step}
        if self.setup.replays:
            self.counted_steps.add(self.steps + GRAPH_WARMUP_STEPS)  # this step is recorded; later steps replay it
        while self.steps < self.total_steps:
            epoch, start = divmod(self.steps, per_epoch)
            batches = self.clock.watch(self.batches.epoch(epoch, start))
            self._open()
            for _ in range(start, per_epoch):
                self._set_learning_rate(optimizers.learning_rate(self.train, self.steps, self.total_steps))
                with self._located(), self._counting() if self.steps in self.counted_steps else nullcontext():
                    self.step(batches)
                self.steps += 1
                self.clock.step()
                if self.steps in window_ends:
                    self._close()
                    self._open()
                if self.steps % per_epoch == 0:
                    yield self._end_epoch()
                elif self.steps % self.train.history_every_steps == 0:
                    yield self._row(self.clock.train_seconds_now())
                else:
                    yield None

    def fits(self) -> bool:
        """Try a step; return True if every rank has enough memory for it. The training cannot be used afterwards.

        Ranks do not exchange gradients, because the other ranks would wait for a rank that fails. Gradients are
        computed again after the update, because the update creates the optimizer's state, which needs memory. If a
        rank's micro-batch has too few samples for the model, all ranks raise TooFewSamples.
        """
        step = self.step
        step.syncs = [False] * min(2, len(step.syncs))  # later micro-batches need as much memory as the second
        self._set_learning_rate(0.0)

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
                    f"{count(self.plan.micro_batch_size, 'sample')} per process, as in variants.{self.plan.name}; "
                    "allowed: a larger train.batch_size, or fewer micro-batches or processes."
                )
            if worst:
                return False
        return True

    def arithmetic_seconds(self, steps: int) -> float | None:
        """Take ``steps`` steps, of which nothing remains but the optimizer's state, without input and without exchange
        between the ranks; return this rank's mean time of one. None if ranks need each other within a step, or if
        steps are replayed. All ranks call this method together, while no window is open.

        A rank does not wait for the others between these steps, and the mean counts: on a core that others use too,
        the system lets a rank that has waited run a step undisturbed, and a few steps take all of the delay.
        """
        if not self.setup.exchanges_only_gradients or self.setup.replays:
            return None
        step, taken = self.step, []
        batches = self.batches.epoch(0)
        self._set_learning_rate(0.0)
        self.world.barrier()
        with step.instrument(syncs=lambda syncs: [False] * len(syncs)):
            for _ in range(min(steps, self.batches.steps_per_epoch)):
                batch = [*islice(batches, len(step.syncs))]
                began = self.clock.now()
                step.zero_grad()
                step.accumulate(iter(batch))
                (step.trial_update or step.update)()
                taken.append(self.clock.now() - began)
        return statistics.fmean(taken)

    def advance(self, steps: int) -> None:
        """Train ``steps`` steps, or fewer if the training ends first, in windows that contain no other steps. A window
        counts as measured if it ends after the warm-up. At the end of an epoch the model is evaluated, outside of the
        windows."""
        per_epoch = self.batches.steps_per_epoch
        if self._advancing is None:
            self._advancing = self.run()
        elif self.steps % per_epoch:  # ``run`` opens the window of a new epoch
            self._open()
        for _ in islice(self._advancing, steps):
            pass
        if self.steps % per_epoch:
            self._close()

    def advance_counted(self) -> None:
        """Take one step, outside of measured windows, and count its samples."""
        self.counted_steps.add(self.steps)
        self.unmeasured_until_step = self.steps + 1
        self.advance(1)

    def count_later(self) -> None:
        """Choose at random one of the steps still to come, except the first step of all, and count its samples. If
        there is no such step, do nothing.

        The choice does not depend on the seed, so code in a step cannot predict the choice. All ranks call this method
        together.
        """
        first = max(1, self.steps)
        if first < self.total_steps:
            self.counted_steps.add(first + self.world.broadcast(secrets.randbelow(self.total_steps - first)))

    @contextmanager
    def _counting(self) -> Iterator[None]:
        with counted(self.step, self.model) as seen:
            yield
        if seen.model or not self.setup.replays:  # a replayed step calls no hooks, so it has no counts
            self._counted.append(seen)

    def work(self) -> Work | None:
        """Return the work of the counted step that left out the most samples; None if no step was counted.

        Every rank returns the same work. All ranks call this method together. Raises ConfigError if a step was counted,
        but a technique had no effect on any rank (``Technique.why_idle``).
        """
        of_rank = [work.read() for work in self._counted], [technique.why_idle() for technique in self.techniques]
        counts, idle = zip(*self.world.gather(of_rank), strict=True)
        steps = list(zip(*counts, strict=True))
        if steps and (error := next((reasons[0] for reasons in zip(*idle, strict=True) if all(reasons)), None)):
            raise ConfigError(error)
        return most_missing(steps, self.train.batch_size, self.plan.model_processes)

    def restart_measuring(
        self, warmup_steps: int, detectors: Sequence[Detector] = (), energy: Energy | None = None
    ) -> None:
        """Discard all measurements. ``advance`` then warms up for ``warmup_steps`` steps, and measures with the given
        ``detectors`` and ``energy``."""
        self.batches.close()
        self.detectors, self.energy = detectors, energy or Energy()
        self.clock, self.memory = Clock(self.world.device), Memory(*self.world.devices(self.plan.devices_per_process))
        self.unmeasured_until_step = self.steps + warmup_steps
        """Windows that end after this step are measured. It is the last step of the warm-up, or a counted step."""
        self._last_row = (self.steps, 0.0)
        self._advancing = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block, which runs between two steps, from the time and memory of the training."""
        open_window = self.steps % self.batches.steps_per_epoch != 0
        if open_window:
            self._close()
        yield
        if open_window:
            self._open()

    def evaluate(self) -> Score:
        """Score the current model on the test set. All ranks call this method together, while no window is open."""
        batch_size = self.plan.micro_batch_size
        if not self.whole:
            with self.setup.deployed():
                return evaluate(self.model, self.task, self.world, batch_size, self.plan.model_processes)
        model = copy.deepcopy(self.whole)
        for technique in self.techniques:
            model = technique.for_evaluation(model)
        model.load_state_dict(self.weights(), assign=True)
        put_back(model, kept_values(self.model, leave_out=set(map(id, self.model.buffers()))))
        return evaluate(model, self.task, self.world, batch_size)

    def weights(self) -> dict[str, Any]:
        """Return the state of the single-device model that is evaluated and kept. All ranks call this method together;
        a tensor of which each holds a part is a DTensor."""
        return self.setup.merged((self.setup.averages or self.model_state).read())

    def state(self) -> dict[str, Any]:
        """Return everything that the rest of the run depends on: plain values and tensors. A tensor of which each rank
        holds a part is a DTensor. All ranks call this method together, while no window is open.

        Raises NonFiniteLoss if a loss since the last row is infinite or NaN, because such a run must not be resumed.
        """
        with self._located():
            self.losses.read()
        in_checkpoint = [held for held in self.model.state_dict(keep_vars=True).values() if torch.is_tensor(held)]
        ranks = self.world.gather(
            {
                "random": randomness.state(),
                "kept": kept_values(self.model, leave_out=set(map(id, in_checkpoint))),
                "last_row": self._last_row,  # holds seconds of this rank's clock
                "losses": float(self.losses.total),
                "parts": [part.state() for part in self._resumable()],
            }
        )
        return {
            "model": self.model_state.read(),
            "optimizer": self.optimizer_state.read(),
            "averages": self.setup.averages and self.setup.averages.read(),
            "ranks": ranks,
            "steps": self.steps,
            "evaluate_seconds": self.evaluate_seconds,
            "epoch_loss": self.epoch_loss,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned, with whole tensors instead of DTensors. Only the main rank needs the
        tensors' values. All ranks call this method before ``run``."""
        # The model is loaded last: to create the optimizer's state, torch may take a step, which changes the model.
        self.optimizer_state.load(state["optimizer"])
        self.model_state.load(state["model"])
        mine = self.world.sent(state["ranks"])[self.world.rank]
        self.losses.total += mine["losses"]
        for part, remembered in zip(self._resumable(), mine["parts"], strict=True):
            part.restore(remembered)
        if self.setup.averages:
            self.setup.averages.load(state["averages"])
        self.steps, self.evaluate_seconds = state["steps"], state["evaluate_seconds"]
        self.unmeasured_until_step = self.steps + self.train.warmup_steps
        self.epoch_loss, self._last_row = state["epoch_loss"], tuple(mine["last_row"])
        put_back(self.model, mine["kept"], self.world.device)
        randomness.restore(mine["random"])

    def _resumable(self) -> list[Resumable | Technique]:
        return [self.clock, self.memory, *self.techniques, *self.detectors]

    def _open(self) -> None:
        """Begin a window. ``run`` ends one after the first step, after the warm-up and after each epoch; ``advance``
        ends one with its last step. A window without a step adds nothing."""
        for detector in self.detectors:
            detector.open()
        self.world.barrier()  # otherwise each rank's first step would include the wait for the slowest rank's detectors
        self.memory.open()
        self.energy.open()
        self.clock.open()

    def _close(self) -> None:
        """End the window; it counts as measured once the warm-up is over."""
        measured = self.steps > self.unmeasured_until_step
        self.clock.close(measured=measured)
        self.energy.close(measured=measured)
        self.batches.hold()
        self.memory.close(measured=measured)
        for detector in self.detectors:
            detector.close(measured=measured)

    def _end_epoch(self) -> HistoryRow:
        self._close()  # first, because reading the losses is not part of a step
        row = self._row(self.clock.train_seconds)
        self._between_phases()
        started = self.clock.now()
        self.score = self.evaluate()
        self.evaluate_seconds += self.clock.now() - started
        self._between_phases()
        return row.model_copy(update={"test_loss": self.score.loss, "test_accuracy": self.score.accuracy})

    def _between_phases(self) -> None:
        for technique in self.techniques:
            technique.between_phases()

    def _row(self, seconds: float) -> HistoryRow:
        per_epoch = self.batches.steps_per_epoch
        with self._located():
            loss = self.losses.read_and_reset()
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

    def _set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_factor"]

    @contextmanager
    def _located(self) -> Iterator[None]:
        def place(steps_ago: int = 0) -> str:
            epoch, step = divmod(self.steps - steps_ago, self.batches.steps_per_epoch)
            return f"variant {self.plan.name}, seed {self.seed}, epoch {epoch + 1}, step {step + 1}"

        try:
            yield
        except NonFiniteLoss as error:
            raise NonFiniteLoss(
                f"{place(error.steps_ago)}: {error}. Lower train.learning_rate, raise train.warmup_fraction, or "
                "check the data and the variant's precision."
            ) from None
        except RuntimeError as error:
            operation = without_deterministic_form(error)
            if operation:
                raise PipelineError(
                    f"train.deterministic: found true, but in {place()} {operation} has no deterministic form; "
                    "allowed: false, or techniques that do not use this operation."
                ) from None
            if not is_out_of_memory(error):
                raise
            plan = self.plan
            more = "'auto'" if plan.applied.gradient_accumulation != "auto" else 2 * plan.micro_batches
            raise OutOfMemory(
                f"{place()}: out of memory with micro-batches of {count(plan.micro_batch_size, 'sample')} per process "
                f"({first_line(error)}). Set variants.{plan.name}.gradient_accumulation to {more}, "
                "lower train.batch_size, or end other programs that use this memory."
            ) from None
