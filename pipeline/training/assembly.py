"""From a plan to a training: what one process of a variant's job puts together before the first step."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from pipeline import models
from pipeline.data.batches import Placement, TrainBatches, choose_placement, evaluation_batches
from pipeline.data.prepared import Dataset
from pipeline.data.prepared import read as read_dataset
from pipeline.distributed import ALONE, World, launched_size
from pipeline.distributed import world as joined_world
from pipeline.environment import cores
from pipeline.errors import ConfigError
from pipeline.interpreter import importing
from pipeline.measurement.detectors import Detector
from pipeline.measurement.windows import Memory
from pipeline.models import loss_and_metric
from pipeline.params import Config, Machine
from pipeline.plans import Plan
from pipeline.plans import plan as plan_of
from pipeline.techniques import Inputs, of_plan
from pipeline.techniques.precision import DTYPES
from pipeline.training.failures import OutOfMemory, TooFewSamples, without_deterministic_form
from pipeline.training.loop import Training

DETERMINISTIC = "deterministic"
"""In ``Plan.decided``: that ``train.deterministic`` cannot be had, and why."""


def planned(config: Config, name: str, machine: Machine, prepared: Path) -> Plan:
    """``plans.plan`` for who starts the processes, with no more of them than can hold the model together.

    ``prepared``: where the data set lies. Under a launcher the processes are there, and find out themselves. Raises
    PipelineError.
    """
    launched = launched_size()
    found = plan_of(config, name, machine, launched)
    if found.model_processes == 1 or launched is not None:
        return found
    dataset = read_dataset(prepared)
    with redirect_stdout(sys.stderr):  # what a user's model prints is said when it trains
        model = models.of_job(found.train, dataset.shape, len(dataset.classes))
        for kind in of_plan(found):
            if kind.name == found.applied.parallelism:
                return plan_of(config, name, machine, None, kind.why_not_held_by(model, dataset.shape))
            model = kind(found, ALONE).change_model(model, Inputs(dataset.shape, _no_sample))
    raise AssertionError(f"{found.applied.parallelism} is no technique")


def _no_sample() -> NoReturn:
    raise AssertionError("no technique that comes before a parallelism tries the model")


@contextmanager
def assembled(plan: Plan, prepared: Path) -> Iterator[Assembly]:
    """This process as a rank of the variant's world, with all set up that comes before a model.

    ``prepared``: where the data set lies. Raises PipelineError.
    """
    train = plan.train
    with importing():  # none of it counts as memory of the training
        import torch._dynamo  # noqa: F401  (as the first optimizer would)

        models.load(train.model)
        loss_and_metric.load(train)
    techniques = of_plan(plan)
    for technique in techniques:
        technique.prepare_process()
    Memory.note_imports()
    dataset = read_dataset(prepared)
    loss_and_metric.check(train, len(dataset.classes))
    with joined_world(plan.device, cores()) as world:
        _make_exact()
        wanted = next((each.placement for each in techniques if each.placement), train.placement)
        chosen = choose_placement(dataset, world.device) if wanted == "auto" else wanted
        yield Assembly(plan, world, dataset, world.broadcast(chosen))


@dataclass(frozen=True)
class Assembly:
    """What one rank makes a variant's trainings from."""

    plan: Plan
    world: World
    dataset: Dataset
    placement: Placement

    @contextmanager
    def training(
        self,
        seed: int,
        detectors: Sequence[Detector] = (),
        change_model: Callable[[nn.Module], nn.Module] = lambda model: model,
    ) -> Iterator[Training]:
        """The variant's training with one seed, ready to run; its plan says what it decided (``fitted``).

        ``change_model``: of the single-device model, on the CPU, before any technique.
        """
        plan, world, dataset = self.fitted(), self.world, self.dataset
        train = plan.train
        if plan.scale > 1 and train.batch_size > len(dataset.train):
            raise ConfigError(
                f"variants.{plan.name}.scaling: found 'weak', with which {plan.scale} processes take "
                f"{train.batch_size} samples a step, but {dataset.name} has {len(dataset.train)}; allowed: 'strong', "
                f"or a train.batch_size of at most {len(dataset.train) // plan.scale}."
            )
        torch.manual_seed(seed)
        model = change_model(models.of_job(train, dataset.shape, len(dataset.classes)))
        with (
            self._repeating(plan, model) as plan,
            TrainBatches(
                dataset,
                batch_size=train.batch_size,
                micro_batches=plan.micro_batches,
                rank=world.rank // plan.model_processes,
                world_size=plan.data_processes,
                seed=seed,
                augment=train.augment,
                placement=self.placement,
                device=world.device,
                workers=plan.applied.loader_workers,
            ) as batches,
        ):
            yield Training(plan, model, dataset, batches, world, seed, detectors)

    def fitted(self) -> Plan:
        """The plan with as few micro-batches as every rank has the memory for, where it is asked to find out.

        Each try is a training of its own that is thrown away, so that what follows begins as if there had been none.
        All ranks call it together. Raises OutOfMemory if the fewest samples that the model trains with are too many.
        """
        plan, technique = self.plan, "auto_micro_batch"
        if plan.applied.gradient_accumulation != "auto" or technique in plan.decided:
            return plan
        samples, count, failed = plan.micro_batches * plan.micro_batch_size, plan.micro_batches, 0

        def too_large(why_not_fewer: str = "") -> OutOfMemory:
            return OutOfMemory(
                f"variants.{plan.name}.gradient_accumulation: found 'auto', but even {samples // failed} micro-batches "
                f"of {failed} sample(s) do not fit into a process's memory{why_not_fewer}; take a smaller model, or a "
                "technique that saves memory, such as activation_checkpointing."
            )

        while True:
            reason = f", as {failed} did not fit into a process's memory" if failed else ", which is all of its share"
            decision = f"{count} micro-batch(es) of {samples // count} samples a process{reason}"
            tried = plan.divided(count, decided=plan.decided | {technique: decision})
            try:
                with replace(self, plan=tried).training(plan.train.seeds[0]) as training:
                    fits, tried = training.fits(), training.plan
            except TooFewSamples:
                if not failed:
                    raise
                raise too_large(", and its BatchNorm cannot train with fewer") from None
            del training
            forget_last_run(self.world)
            if fits:
                break
            if plan.applied.compile != "none":
                torch.compiler.reset()  # or it would compile for batches of any size from the second on
            failed = tried.micro_batch_size
            if failed == 1:
                raise too_large()
            count = next(more for more in range(count + 1, samples + 1) if samples % more == 0)
        if self.world.is_main:
            print(f"{plan.name}: {technique}: {decision}", flush=True)
        return tried

    @contextmanager
    def _repeating(self, plan: Plan, model: nn.Module) -> Iterator[Plan]:
        """While the block runs, a seed repeats exactly; where that cannot be had, the plan says so, on all ranks.

        By PyTorch's strict mode. It is more than an error: attention's backward pass is deterministic only under it.
        """
        if not plan.train.deterministic:
            yield plan
            return
        torch.use_deterministic_algorithms(True)
        try:
            if DETERMINISTIC not in plan.decided:
                operation = next(filter(None, self.world.gather(self._without_deterministic_form(plan, model))), None)
                if operation:
                    decision = f"{operation} has no deterministic form here, so a seed need not repeat exactly"
                    plan = plan.model_copy(update={"decided": plan.decided | {DETERMINISTIC: decision}})
                    if self.world.is_main:
                        print(f"{plan.name}: {DETERMINISTIC}: {decision}", flush=True)
            if DETERMINISTIC in plan.decided:
                torch.use_deterministic_algorithms(True, warn_only=True)
                warnings.filterwarnings("ignore", ".*does not have a deterministic implementation")  # it has been said
            yield plan
        finally:
            torch.use_deterministic_algorithms(False)

    def _without_deterministic_form(self, plan: Plan, model: nn.Module) -> str | None:
        """The first operation of the job that PyTorch refuses in its strict mode, by a try with two samples.

        On this rank alone, before any technique: so no rank waits for another that was refused, and what a cold first
        step takes, such as compilation, stays in the first step. Model and random state stay as they are.
        """
        device, data = self.world.device, self.dataset
        before = [(buffer, buffer.clone()) for buffer in model.to(device).buffers()]
        dtype = DTYPES.get(plan.applied.precision)
        try:
            objective = loss_and_metric.of_job(plan.train, len(data.classes), device)
            samples = evaluation_batches(data.train, data, rank=0, world_size=1, batch_size=2, device=device)
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                images, labels = next(samples)
                with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                    logits = model(images)
                    loss = objective.loss(logits, labels)
                loss.backward()
            objective.scores(logits.detach().float(), labels)
        except Exception as error:  # any other one is the training's to tell
            return without_deterministic_form(error)
        finally:
            model.zero_grad()
            for buffer, values in before:
                buffer.copy_(values)
        return None


def _make_exact() -> None:
    """float32 means float32: cuDNN's convolutions would use TF32 (10 bits of mantissa) unless told otherwise."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def forget_last_run(world: World) -> None:
    """Checkpointed blocks refer to themselves; without this their memory would count for the next seed's run."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
