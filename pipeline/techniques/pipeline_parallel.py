"""Pipeline parallelism: each process runs one stage of the model, and micro-batches pass through the stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.utils import swap_tensors

from pipeline.distributed import World
from pipeline.errors import ConfigError, count, say
from pipeline.models import optimizers
from pipeline.plans import Plan, WhyNot, WhyNotHeldBy
from pipeline.step import MicroBatches, TrainingStep
from pipeline.techniques.base import Setup, Stored, Technique, load_share
from pipeline.techniques.lockstep import USE_EVERY_PART, keep_parameters
from pipeline.techniques.model_chain import Cut, NotAChain, best_cut, chain, described, joined, parts
from pipeline.techniques.precision import DTYPES

Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Micro-batches of a model with one input."""
_SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


_ALLOWED = (
    "fewer processes, another parallelism, or a model that is a chain of enough modules, such as an "
    "nn.Sequential or a ResNet"
)


class Pipeline(Technique):
    """Each rank keeps one stage of the model; ``torch.distributed.pipelining`` schedules a step's micro-batches.

    The model is cut so that the slowest stage is as fast as possible. The main rank times each unit of the model's
    chain on its device, without communication. The cut does not change the computed sums. But a layer that draws random
    numbers uses its rank's generator, so with another cut it draws other numbers.

    Consecutive ranks form a pipeline. With replicas there are several pipelines, whose gradients are averaged stage by
    stage at the end of a step's schedule.
    """

    name = "pipeline"

    def __init__(self, plan: Plan, world: World) -> None:
        super().__init__(plan, world)
        mesh = world.mesh(replica=plan.data_processes, stage=plan.model_processes)
        self._stages, self._replicas = plan.model_processes, plan.data_processes
        self._pipeline, self._alike = mesh.get_group("stage"), mesh.get_group("replica")
        self._index = world.rank % self._stages
        self._module = _Stage()
        """This rank's stage of the model. ``restore`` replaces its units if the checkpoint's cut differs."""
        self._schedule: PipelineScheduleSingle | None = None
        self._sent: dict[str, dict[str, Any]] = {}
        """The states of the model and of the optimizer that ``restore`` will load."""

    @property
    def _is_last(self) -> bool:
        return self._index == self._stages - 1

    @property
    def _bounds(self) -> tuple[int, int]:
        """The index of this rank's first unit, and the index after its last unit."""
        ends = (0, *self._cut.ends)
        return ends[self._index], ends[self._index + 1]

    @classmethod
    def why_not_held_by(cls, setup: Setup) -> WhyNotHeldBy:
        model = setup.model
        try:
            most, why_not = len(parts(model, setup.inputs())[0]), ""
        except NotAChain as reason:
            most, why_not = 1, str(reason)
        why_not = why_not or f"{type(model).__name__} can be cut into {count(most, 'part')} at most"
        return lambda stages: WhyNot(why_not, _ALLOWED) if stages > most else None

    def change_model(self, setup: Setup) -> None:
        self._model = model = setup.model
        cut: Cut | str | None = None
        if self.world.is_main:  # other ranks wait: on a CPU they would slow down the timed units
            try:
                cut = best_cut(model, setup.sample()[0], self._stages, self.world, self._autocast)
                say(f"{self.plan.name}: {described(cut, self.plan.micro_batches)}")
            except NotAChain as reason:
                cut = str(reason)
        cut = self.world.broadcast(cut)
        if not isinstance(cut, Cut):
            why_not = WhyNot(str(cut), _ALLOWED)
            raise ConfigError(f"{self.where('parallelism')} of {self._stages} stages, but {why_not}.")
        self._split(cut)
        setup.model, setup.shard_group = self._module, self._pipeline
        if self._replicas > 1:
            keep_parameters(self._module, self._module.named_parameters, f"{self.where('parallelism')} with replicas")

    def change_step(self, setup: Setup) -> None:
        step = setup.step
        criterion = step.criterion

        def scheduled(micro_batches: MicroBatches) -> None:
            if self._schedule is None:
                self._schedule = self._scheduled(step)
            inputs, targets = zip(*islice(cast("Pairs", micro_batches), self.plan.micro_batches), strict=True)
            self._schedule.step(
                *([torch.cat(inputs)] if self._index == 0 else []),  # the schedule splits the batch again
                target=torch.cat(targets) if self._is_last else None,
                return_outputs=False,
            )
            if self._replicas > 1:  # average over the replicas of this stage
                held = [parameter.grad for parameter in self._module.parameters() if parameter.requires_grad]
                if any(gradient is None for gradient in held):  # other replicas would wait for this gradient
                    where = f"{self.where('parallelism')} with replicas, which average the gradients of all parameters"
                    raise ConfigError(f"{where}, but a step did not use some parameters. {USE_EVERY_PART}.")
                self.world.average_(cast("list[torch.Tensor]", held), self._alike)

        step.accumulate = scheduled
        if self._is_last:
            step.criterion = lambda outputs, targets: criterion(outputs, targets) / self.plan.micro_batches
        else:
            step.criterion = lambda output, targets: output  # noqa: ARG005

    def change_checkpoint(self, setup: Setup) -> None:
        self._setup, self._optimizer = setup, setup.step.optimizer
        # ``restore`` loads both states, because it may first have to cut the model again.
        setup.model_state = Stored(self._read_model, partial(self._keep, "model"))
        setup.optimizer_state = Stored(self._read_optimizer, partial(self._keep, "optimizer"))

    def _keep(self, name: str, announced: dict[str, Any]) -> None:
        self._sent[name] = self.world.sent(announced)

    def _read_model(self) -> dict[str, Any]:
        held = self._model.state_dict()
        owners = self.world.gather([name for name, tensor in held.items() if not tensor.is_meta])
        whole = {}
        for name, tensor in held.items():
            # The first ranks are the first pipeline, so BatchNorm's statistics come from the first pipeline.
            source = next(rank for rank, names in enumerate(owners) if name in names)
            if self.world.rank == source:
                whole[name] = tensor.contiguous()
            else:
                whole[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.world.device)
            dist.broadcast(whole[name], src=source)
        return whole

    def _read_optimizer(self) -> dict[str, Any]:
        own, places = self._optimizer.state_dict(), {id(weight): n for n, weight in enumerate(self._model.parameters())}
        held = [places[id(parameter)] for group in self._optimizer.param_groups for parameter in group["params"]]
        mine = {held[index]: state for index, state in own["state"].items()}
        groups = [[held[index] for index in group["params"]] for group in own["param_groups"]]
        stages = self.world.gather((mine, groups))[: self._stages]
        return {
            "state": {place: state for part, _ in stages for place, state in sorted(part.items())},
            "param_groups": [
                {**group, "params": sorted(place for _, theirs in stages for place in theirs[number])}
                for number, group in enumerate(own["param_groups"])
            ],
        }

    def state(self) -> dict[str, Any]:
        return {"ends": self._cut.ends}

    def restore(self, state: dict[str, Any]) -> None:
        """Load the states of the model and of the optimizer. If the checkpoint's cut differs from this run's cut, first
        cut the model as the checkpoint says."""
        if tuple(state["ends"]) != self._cut.ends:
            self._split(self._cut._replace(ends=tuple(state["ends"])))
            groups = optimizers.grouped(self.plan.train, self._model.named_parameters())
            for group, regrouped in zip(self._optimizer.param_groups, groups, strict=True):
                group["params"] = regrouped["params"]
            self._optimizer.state.clear()
        self._load_model(self._sent.pop("model"))
        self._setup.model_state = Stored(self._read_model, lambda state: self._load_model(self.world.sent(state)))
        load_share(self._optimizer, self._sent.pop("optimizer"), list(self._model.parameters()))

    def _load_model(self, whole: dict[str, Any]) -> None:
        self._model.load_state_dict(
            {name: tensor if tensor.is_meta else whole[name] for name, tensor in self._model.state_dict().items()}
        )

    def _autocast(self) -> AbstractContextManager[object]:
        """Return the step's autocast, which decides the dtypes of the tensors between stages."""
        dtype = DTYPES.get(self.plan.applied.precision)
        return torch.autocast(self.world.device.type, dtype) if dtype else nullcontext()

    def _split(self, cut: Cut) -> None:
        """Keep this rank's stage on the device, and the other stages, without values, on the meta device.

        A tensor that moves from the meta device to this rank's device is uninitialised. Buffers that the state dict
        leaves out stay on the device, because no checkpoint has their values.
        """
        self._cut = cut
        stored = {id(tensor) for tensor in self._model.state_dict(keep_vars=True).values()}
        begin, end = self._bounds
        units = joined(chain(self._model), cut.joins)
        for index, unit in enumerate(units):
            device = self.world.device if begin <= index < end else torch.device("meta")
            for tensor in (*unit.parameters(), *unit.buffers()):
                if id(tensor) in stored and tensor.is_meta != (device.type == "meta"):
                    moved = torch.empty_like(tensor, device=device)
                    trained = isinstance(tensor, nn.Parameter)
                    swap_tensors(tensor, nn.Parameter(moved, tensor.requires_grad) if trained else moved)
        self._module.units = nn.Sequential(*units[begin:end])

    def _scheduled(self, step: TrainingStep) -> PipelineScheduleSingle:
        begin, end = self._bounds
        entering = self._cut.forms[begin].empty()
        leaving = entering if self._is_last else self._cut.forms[end].empty()
        stage = PipelineStage(
            _Arriving() if self._is_last else _Passing(step),
            self._index,
            self._stages,
            self.world.device,
            input_args=entering.detach() if self._index == 0 else entering,  # the batch needs no gradient
            output_args=leaving,
            group=self._pipeline,
        )

        def loss(passing: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            """Run the last stage's forward pass here, because the schedule passes the targets only to its loss."""
            share = step.forward(passing, targets)
            # Losses are averaged over ranks, and only a pipeline's last rank has losses.
            step.losses.add(share.detach() * self._stages)
            return share

        schedule = _SCHEDULES[self.plan.applied.schedule]
        return schedule(stage, self.plan.micro_batches, loss_fn=loss, scale_grads=False)


class _Stage(nn.Module):
    """Runs a rank's units one after the other. The output is contiguous, because it is sent to the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.Sequential()

    def forward(self, passing: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.units(passing)
        return output.flatten().view(output.shape)


class _Passing(nn.Module):
    """Runs the step's forward, techniques included, in the stages before the last; these stages need no targets."""

    def __init__(self, step: TrainingStep) -> None:
        super().__init__()
        self._step = step

    def forward(self, passing: torch.Tensor) -> torch.Tensor:
        return self._step.forward(passing, torch.empty(0, dtype=torch.int64, device=passing.device))


class _Arriving(nn.Module):
    """Passes the last stage's input on to the schedule's loss, which runs the stage.

    Returns a view of the input, because older releases of torch detach any other output in place.
    """

    def forward(self, passing: torch.Tensor) -> torch.Tensor:
        return passing.view_as(passing)
