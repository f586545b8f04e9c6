"""Turn a plan into a training: set up one process of a variant's job before the first step.

``compose`` makes the model, the techniques, the optimizer, the step and the checkpoint, in this order.
"""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline import environment, models, tasks
from pipeline.data.prepared import read as read_dataset
from pipeline.distributed import ALONE, World, launched_hosts, launched_size
from pipeline.distributed import world as joined_world
from pipeline.environment import code, cores, stages
from pipeline.errors import ConfigError, count, said, say
from pipeline.measurement.detectors import Detector
from pipeline.measurement.windows import Memory
from pipeline.models import loss_and_metric, optimizers
from pipeline.models.keeping import trial
from pipeline.params import Config, Machine, catalogue
from pipeline.plans import Plan, variant_relies_on
from pipeline.plans import plan as plan_of
from pipeline.processes import importing, malloc, randomness
from pipeline.step import Losses, TrainingStep
from pipeline.tasks import Task
from pipeline.tasks.batches import Placement, TrainBatches, choose_placement, evaluation_batches
from pipeline.techniques import Setup, Stored, Technique, of_plan, recipe
from pipeline.techniques.precision import DTYPES
from pipeline.training.loop import Training
from pipeline.training.outcomes import (
    DeviceLosses,
    HostLosses,
    OutOfMemory,
    TooFewSamples,
    without_deterministic_form,
    without_weights,
)

_OF_A_RANK = ("_AFFINITY", "OMP_PLACES", "NCCL_IB_HCA")
"""Ends of the names of variables that bind a rank to cores and cards."""
LONG_IMPORTS = {
    "peft": "peft",
    "timm": "timm",
    "torchmetrics": "torchmetrics",
    "torchvision": "torchvision.models",
    "transformers": "transformers.modeling_utils",
}
"""Library -> its module that takes long to import, and starts no thread that works."""
DETERMINISTIC = "deterministic"
"""The key in ``Plan.decided`` for the reason why ``train.deterministic`` is not possible."""


def planned(config: Config, name: str, machine: Machine, prepared: Path) -> Plan:
    """Return the variant's plan (``plans.plan``). An automatic number of processes is chosen so that the model can be
    divided among the processes.

    ``prepared``: the data set's folder. If a launcher has set the number of processes, the plan keeps this number. The
    number is checked when the model is set up. Raises PipelineError.
    """
    launched = launched_size()
    if launched is not None:
        machine = machine.model_copy(update={"hosts": launched_hosts()})
    planned_variant = plan_of(config, name, machine, launched)
    if planned_variant.model_processes == 1 or launched is not None:
        return planned_variant
    with redirect_stdout(sys.stderr):  # a user's model may print while it is built; training builds it again
        task = tasks.of_job(planned_variant.train, read_dataset(prepared))
        setup = Setup(task.model(), task)
        for kind in of_plan(planned_variant):
            if kind.name == planned_variant.applied.parallelism:
                return plan_of(config, name, machine, None, kind.why_not_held_by(setup))
            kind(planned_variant, ALONE).change_model(setup)
    raise AssertionError(f"{planned_variant.applied.parallelism} is not a technique")


def preload_for(plan: Plan) -> list[str]:
    """Return the modules to import once, before the processes of ``plan`` are forked: what torch imports when it
    creates the first optimizer and, on a CPU, the job's libraries. Otherwise each process would import them itself;
    ``transformers`` alone takes seconds. For GPUs they are left out: while it is imported, a library may ask the driver
    (``torchao`` does), and then no fork can use CUDA."""
    needed = {models.library_of(plan.train.model), *code.libraries_of(plan)} if plan.device == "cpu" else set()
    return ["torch._dynamo", *(module for library, module in LONG_IMPORTS.items() if library in needed)]


@contextmanager
def assembled(plan: Plan, prepared: Path, **settings: Any) -> Iterator[Assembly]:
    """Set up this process as a rank of the variant's world; yield the parts from which it makes trainings.

    ``prepared``: the data set's folder. ``settings``: plain values that must be the same on all ranks, in addition to
    the plan. Raises PipelineError.
    """
    train, check_followed = plan.train, code.unfollowed(plan)
    with importing():  # these imports do not count as memory of the training
        for module in preload_for(plan):  # building the model, or the first optimizer, would import them
            with suppress(ImportError):
                importlib.import_module(module)
        models.load(train.model)
        if plan.applied.distillation and plan.applied.distillation.model:
            models.load(plan.applied.distillation.model)
        tasks.find(train.task)
        loss_and_metric.load(train)
        wanted = next((used.placement for used in catalogue.in_effect(plan.applied) if used.placement), train.placement)
        if wanted == "dataloader":
            import pipeline.tasks.loader  # noqa: F401
    techniques = of_plan(plan)
    for technique in techniques:
        technique.prepare_process()
    Memory.note_imports()
    task = tasks.of_job(train, read_dataset(prepared))
    task.check()
    with joined_world(plan.device, cores(), lambda: settings | _depends_on(plan, task)) as world:
        _make_exact()
        chosen = choose_placement(task.dataset, world.device) if wanted == "auto" else wanted
        yield Assembly(plan, world, task.on(world.device), world.broadcast(chosen), techniques, check_followed)


def _depends_on(plan: Plan, task: Task) -> dict[str, Any]:
    """Return the plain values that ranks on several hosts must have in common, besides the number of threads.

    The environment is that of this worker, not environment.json's, because a launcher may have changed variables. Those
    in ``_OF_A_RANK`` may differ between the ranks of equal hosts.
    """
    fingerprint = environment.fingerprint({"variants": {plan.name: variant_relies_on(plan.requested, plan.train)}})
    made_of = stages.training(plan)
    return {
        "train": plan.train.model_dump(mode="json"),
        "variants": {plan.name: plan.model_dump(mode="json", exclude={"name", "train", "requested"})},
        "code": made_of["code"] | made_of["variant"]["code"],
        "data": {"name": task.dataset.name, "sha256": task.dataset.sha256},
        "hardware": fingerprint["hardware"],
        "software": fingerprint["software"] | fingerprint["relied_on"]["variants"][plan.name],
        "environment": {
            name: value for name, value in fingerprint["settings"].items() if not name.endswith(_OF_A_RANK)
        },
    }


@dataclass(frozen=True)
class Assembly:
    """The parts from which one rank makes a variant's trainings."""

    plan: Plan
    world: World
    task: Task
    """The job's task, on the world's device."""
    placement: Placement
    techniques: Sequence[type[Technique]]
    """The classes of the techniques that the plan applies, in the order in which they apply."""
    check_followed: Callable[[], None] = lambda: None
    """Raises Unfollowed if a module or file that the user's code uses has no digest (``code.unfollowed``)."""

    @contextmanager
    def training(
        self,
        seed: int,
        detectors: Sequence[Detector] = (),
        change_model: Callable[[nn.Module], nn.Module] = lambda model: model,
        **options: Any,
    ) -> Iterator[Training]:
        """Yield the variant's training with one seed, ready to run; its plan includes the decisions of ``fitted``.

        ``change_model`` changes the single-device model, on the CPU, before any technique. ``options``: more
        arguments of ``compose``.
        """
        plan, world, task = self.fitted(), self.world, self.task
        dataset = task.dataset
        train = plan.train
        if plan.scale > 1 and train.batch_size > len(dataset.train):
            raise ConfigError(
                f"variants.{plan.name}.scaling: found 'weak', with which {plan.scale} processes take "
                f"{train.batch_size} samples per step, but {dataset.name} has {len(dataset.train)}; allowed: 'strong', "
                f"or a train.batch_size of at most {len(dataset.train) // plan.scale}."
            )
        randomness.seed(seed)
        model = change_model(task.begun())
        with (
            self._repeating(plan, model) as plan,
            batches_of(plan, task, world, seed, self.placement) as batches,
        ):
            training = compose(plan, model, task, batches, world, self.techniques, seed, detectors, **options)
            options.clear()  # frees the memory of a teacher's weights
            self.check_followed()
            try:
                yield training
            except Exception as error:
                if not training.steps and not said(error):  # in a plain step, the job may fail with a plain reason
                    task.try_step(task.model())
                raise
            self.check_followed()  # steps may have imported or read more

    def fitted(self) -> Plan:
        """Return the plan. If gradient_accumulation is 'auto', choose the smallest number of micro-batches with which
        a step fits into memory.

        Each number of micro-batches is tried in a training of its own. This training is then discarded, so it cannot
        affect the real training. All ranks call this method together. Raises OutOfMemory if even the smallest
        micro-batch that the model can train with is too large for the memory of some rank.
        """
        plan, technique = self.plan, "auto_micro_batch"
        if plan.applied.gradient_accumulation != "auto" or technique in plan.decided:
            return plan
        samples, failed = plan.micro_batches * plan.micro_batch_size, 0

        def too_large(why_not_fewer: str = "") -> OutOfMemory:
            return OutOfMemory(
                f"variants.{plan.name}.gradient_accumulation: found 'auto', but even {samples // failed} micro-batches "
                f"of {count(failed, 'sample')} do not fit into a process's memory{why_not_fewer}; use a smaller "
                "model, or a technique that saves memory, such as activation_checkpointing."
            )

        for parts in (number for number in range(plan.micro_batches, samples + 1) if samples % number == 0):
            reason = f", because {failed} did not fit into its memory" if failed else ", which is its whole share"
            decision = f"{count(parts, 'micro-batch')} of {count(samples // parts, 'sample')} per process{reason}"
            tried = plan.divided(parts, decided=plan.decided | {technique: decision})
            try:
                with replace(self, plan=tried).training(plan.train.seeds[0]) as training:
                    fits, tried = training.fits(), training.plan
            except TooFewSamples:
                if not failed:
                    raise
                raise too_large(", and the model's BatchNorm cannot train with fewer") from None
            del training
            forget_last_run(self.world)
            if fits:
                if self.world.is_main:
                    say(f"{plan.name}: {technique}: {decision}")
                return tried
            if plan.applied.compile != "none":
                torch.compiler.reset()  # otherwise torch would compile the second try for any batch size
            failed = tried.micro_batch_size
        raise too_large()

    @contextmanager
    def _repeating(self, plan: Plan, model: nn.Module) -> Iterator[Plan]:
        """With ``train.deterministic``, the same seed gives the same numbers inside the block. If the model or its loss
        has an operation without a deterministic form, the yielded plan says so.

        All ranks yield the same decision. For such a model, PyTorch's deterministic mode stays on, but only warns
        about the operation. It stays on because attention's backward pass is deterministic only in this mode.
        """
        if not plan.train.deterministic:
            yield plan
            return
        torch.use_deterministic_algorithms(True)
        try:
            if DETERMINISTIC not in plan.decided:
                operation = next(filter(None, self.world.gather(self._without_deterministic_form(plan, model))), None)
                if operation:
                    decision = f"{operation} has no deterministic form here, so one seed can give different numbers"
                    plan = plan.model_copy(update={"decided": plan.decided | {DETERMINISTIC: decision}})
                    if self.world.is_main:
                        say(f"{plan.name}: {DETERMINISTIC}: {decision}")
            if DETERMINISTIC in plan.decided:
                torch.use_deterministic_algorithms(True, warn_only=True)
                warnings.filterwarnings("ignore", ".*does not have a deterministic implementation")  # printed above
            yield plan
        finally:
            torch.use_deterministic_algorithms(False)

    def _without_deterministic_form(self, plan: Plan, model: nn.Module) -> str | None:
        """Try a step of two samples. Return its first operation that PyTorch refuses in deterministic mode, or None.

        The try runs on this rank alone, so no rank waits for a rank that fails. It runs before any technique, so
        one-time work, such as compilation, still happens in the first step. The model and the random state stay
        unchanged.
        """
        device, task = self.world.device, self.task
        dtype = DTYPES.get(plan.applied.precision)
        model.to(device)
        try:
            samples = evaluation_batches(task.dataset.train, task, rank=0, world_size=1, batch_size=2)
            with trial(model) as tried:
                inputs, targets = next(samples)
                with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                    outputs = tried(inputs)
                    loss = task.objective.loss(outputs, targets)
                loss.backward()
            task.objective.scores(outputs.detach().float(), targets)
        except Exception as error:  # the training itself will raise any other error
            return without_deterministic_form(error)
        finally:
            model.zero_grad()
        return None


def _make_exact() -> None:
    """Switch off TF32 (10 bits of mantissa), which cuDNN's convolutions use by default. Also switch off cuDNN's search
    for fast algorithms, and the filling of uninitialised memory in deterministic mode."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def forget_last_run(world: World) -> None:
    """Free the last run's memory, so that it does not count as the next run's memory.

    ``gc.collect`` is needed because checkpointed blocks form reference cycles.
    """
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    malloc.trim()


def batches_of(plan: Plan, task: Task, world: World, seed: int, placement: Placement) -> TrainBatches:
    """Return the micro-batches that this rank trains on."""
    return TrainBatches(
        task,
        batch_size=plan.train.batch_size,
        micro_batches=plan.micro_batches,
        rank=world.rank // plan.model_processes,
        world_size=plan.data_processes,
        seed=seed,
        augment=plan.train.augment,
        placement=placement,
        workers=plan.applied.loader_workers,
    )


def compose(
    plan: Plan,
    model: nn.Module,
    task: Task,
    batches: TrainBatches,
    world: World,
    techniques: Sequence[type[Technique]],
    seed: int,
    detectors: Sequence[Detector] = (),
    *,
    losses: Losses | None = None,
    steady: bool = False,
    teacher: Mapping[str, torch.Tensor] | None = None,
) -> Training:
    """Compose the training of ``model``, which is moved to the rank's device. All ranks call this function together.

    ``model``: a single-device module with the same initial weights on every rank. ``losses``: adds up the losses;
    by default HostLosses on a CPU and DeviceLosses on a GPU. ``steady``: True if a steady state is measured; techniques
    then do not wait for the learning rate's warm-up. ``teacher``: the weights of the variant's teacher.
    """
    train, model = plan.train, model.to(world.device)
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    whole = without_weights(model) if any(used.evaluates_whole for used in catalogue.in_effect(plan.applied)) else None
    rising = optimizers.rising_steps(train, train.epochs * batches.steps_per_epoch)
    made = [technique(plan, world) for technique in (*techniques, *recipe.of_job(train))]
    trained_count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    setup = Setup(model, task, lambda: next(batches.epoch(0)), 0 if steady else rising, teacher, trained_count)
    for technique in made:
        technique.change_model(setup)
    setup.optimizer_choice = optimizers.of_job(train)
    for technique in made:
        technique.change_optimizer(setup)
    # Names are those of the single-device model, where a pipeline's rank also has the other stages' parameters.
    named = {parameter: name for part in (setup.model, model) for name, parameter in part.named_parameters()}
    if plan.applied.model is None:  # a variant's own model has other names
        optimizers.check_patterns(train, named.values(), "no_decay", "lr_factors")
    optimizer = setup.optimizer_choice.make(optimizers.grouped(train, ((name, key) for key, name in named.items())))
    losses = losses or (HostLosses(world) if world.device.type == "cpu" else DeviceLosses(world))
    criterion = batches.weighed(task.objective.loss)
    setup.step = step = TrainingStep(setup.model, criterion, optimizer, losses, plan.micro_batches)
    setup.model_state = Stored(model.state_dict, lambda state: model.load_state_dict(world.sent(state)))
    setup.optimizer_state = Stored(optimizer.state_dict, lambda state: optimizer.load_state_dict(world.sent(state)))
    changes = {}
    for technique in made:
        before = vars(step).copy()
        technique.change_step(setup)
        changes[technique.name] = [name for name, part in vars(step).items() if part is not before[name]]
    for technique in made:
        technique.change_checkpoint(setup)
    setup.teacher = None  # frees memory: the teacher model has these weights
    return Training(
        plan, world, task, batches, model, parameter_count, whole, made, setup, changes, seed=seed, detectors=detectors
    )
