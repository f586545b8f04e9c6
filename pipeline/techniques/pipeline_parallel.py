"""Pipeline parallelism: each process runs one stage of the model, and micro-batches pass through the stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from pipeline.distributed import World
from pipeline.errors import ConfigError, PipelineError, count
from pipeline.plans import Plan, WhyNotHeldBy
from pipeline.step import MicroBatches, TrainingStep
from pipeline.techniques.base import Setup, Stored, Technique
from pipeline.techniques.cutting import Cut, best_cut, described, parts
from pipeline.techniques.model_chain import NotAChain, chain, joined
from pipeline.techniques.precision import DTYPES

_SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


_ALLOWED = (
    "allowed: fewer processes, another parallelism, or a model that is a chain of enough modules, such as an "
    "nn.Sequential or a ResNet"
)


class Pipeline(Technique):
    """Each rank keeps one stage of the model; ``torch.distributed.pipelining`` schedules a step's micro-batches.

    The model is cut so that the slowest stage is as fast as possible. The main rank times each unit of the model's
    chain on its device, without communication. Where the model is cut does not change the computed sums. But a layer
    that draws random numbers uses its rank's generator, so with other cuts it draws other numbers.

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
        self._loads: list[Callable[[], object]] = []

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
            most, why_not = len(parts(model, setup.zeros())[0]), ""
        except NotAChain as reason:
            most, why_not = 1, str(reason)
        why_not = why_not or f"{type(model).__name__} can be cut into {count(most, 'part')} at most"
        return lambda stages: f"{why_not}; {_ALLOWED}" if stages > most else None

    def change_model(self, setup: Setup) -> None:
        self._model = model = setup.model
        found: Cut | str | None = None
        if self.world.is_main:  # other ranks wait: on a CPU they would slow down the timed units
            try:
                found = best_cut(model, setup.sample()[0], self._stages, self.world, self._autocast)
                print(f"{self.plan.name}: {described(found, self.plan.micro_batches)}", flush=True)
            except NotAChain as reason:
                found = str(reason)
        found = self.world.broadcast(found)
        if not isinstance(found, Cut):
            raise ConfigError(
                f"variants.{self.plan.name}.parallelism: found 'pipeline' of {self._stages} stages, but {found}; "
                f"{_ALLOWED}."
            )
        self._split(found)
        setup.model = self._module

    def change_step(self, setup: Setup) -> None:
        step = setup.step
        criterion = step.criterion

        def scheduled(micro_batches: MicroBatches) -> None:
            if self._schedule is None:
                self._schedule = self._scheduled(step)
            inputs, targets = zip(*islice(micro_batches, self.plan.micro_batches), strict=True)
            self._schedule.step(
                *([torch.cat(inputs)] if self._index == 0 else []),  # the schedule splits the batch again
                target=torch.cat(targets) if self._is_last else None,
                return_outputs=False,
            )
            if self._replicas > 1:  # average over the replicas of this stage
                held = (parameter.grad for parameter in self._module.parameters())
                self.world.average_([gradient for gradient in held if gradient is not None], self._alike)

        step.accumulate = scheduled
        if self._is_last:
            step.criterion = lambda outputs, targets: criterion(outputs, targets) / self.plan.micro_batches
        else:
            step.criterion = lambda output, targets: output  # noqa: ARG005

    def change_checkpoint(self, setup: Setup) -> None:
        self._optimizer = setup.step.optimizer
        setup.model_state, setup.optimizer_state = self._whole_model(), self._whole_optimizer()

    def _whole_model(self) -> Stored:
        def read() -> dict[str, Any]:
            whole = {}
            for name, tensor in self._model.state_dict().items():
                # The first ranks are the first pipeline, so BatchNorm's statistics come from the first pipeline.
                source = self._stage_of.get(name, 0)
                is_source = self.world.rank == source
                whole[name] = (
                    tensor.contiguous()
                    if is_source
                    else torch.empty(tensor.shape, dtype=tensor.dtype, device=self.world.device)
                )
                dist.broadcast(whole[name], src=source)
            return whole

        def load(whole: dict[str, Any]) -> object:
            held = self._model.state_dict()
            return self._model.load_state_dict(
                {name: tensor if tensor.is_meta else whole[name] for name, tensor in held.items()}
            )

        return Stored(read, self._again(load))

    def _whole_optimizer(self) -> Stored:
        def read() -> dict[str, Any]:
            own = self._optimizer.state_dict()
            places = self._places()
            mine = {places[index]: state for index, state in own["state"].items()}
            groups = [[places[index] for index in group["params"]] for group in own["param_groups"]]
            stages = self.world.gather((mine, groups))[: self._stages]
            return {
                "state": {place: state for part, _ in stages for place, state in sorted(part.items())},
                "param_groups": [
                    {**group, "params": sorted(place for _, theirs in stages for place in theirs[number])}
                    for number, group in enumerate(own["param_groups"])
                ],
            }

        def load(whole: dict[str, Any]) -> object:
            places = self._places()
            state = {index: whole["state"][place] for index, place in places.items() if place in whole["state"]}
            own = self._optimizer.state_dict()["param_groups"]
            groups = [
                {**group, "params": mine["params"]} for group, mine in zip(whole["param_groups"], own, strict=True)
            ]
            return self._optimizer.load_state_dict({"state": state, "param_groups": groups})

        return Stored(read, self._again(load))

    def _again(self, load: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
        """Return a ``load`` that remembers its calls; ``restore`` repeats them if the checkpoint's cut differs."""

        def remembered(announced: dict[str, Any]) -> object:
            self._loads.append(partial(load, self.world.sent(announced)))
            return self._loads[-1]()

        return remembered

    def state(self) -> dict[str, Any]:
        return {"joins": self._cut.joins, "costs": self._cut.costs, "ends": self._cut.ends}

    def restore(self, state: dict[str, Any]) -> None:
        """If the checkpoint's cut differs from this run's cut, cut the model like the checkpoint and reload the
        stage."""
        ends, loads = tuple(state["ends"]), self._loads
        self._loads = []
        if ends == self._cut.ends:
            return
        if tuple(state["joins"]) != self._cut.joins or len(self._optimizer.param_groups) != 1:
            raise PipelineError(
                f"variants.{self.plan.name}: the checkpoint's pipeline is cut differently, and this run cannot repeat "
                "that cut; remove the checkpoint to train from the start."
            )
        self._split(self._cut._replace(costs=tuple(state["costs"]), ends=ends))
        self._optimizer.state.clear()
        self._optimizer.param_groups[0]["params"] = list(self._module.parameters())
        self._schedule = None
        for load in loads:
            load()

    def _autocast(self) -> AbstractContextManager[object]:
        """Return the step's autocast, which decides the dtypes of the tensors between stages."""
        dtype = DTYPES.get(self.plan.applied.precision)
        return torch.autocast(self.world.device.type, dtype) if dtype else nullcontext()

    def _split(self, cut: Cut) -> None:
        """Keep this rank's stage on the device, and the rest of the model, without values, on the meta device."""
        self._cut = cut
        units = joined(chain(self._model), cut.joins)
        stages = [units[begin:end] for begin, end in pairwise((0, *cut.ends))]
        stage_of = {
            id(tensor): stage
            for stage, parts in enumerate(stages)
            for part in parts
            for tensor in (*part.parameters(), *part.buffers())
        }
        self._stage_of = {
            name: stage_of[id(tensor)]
            for name, tensor in self._model.state_dict(keep_vars=True).items()
            if id(tensor) in stage_of
        }
        placed: dict[int, torch.Tensor] = {}  # tied parameters stay tied
        for name, module in self._model.named_modules():
            prefix = f"{name}." if name else ""
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    stage = self._stage_of.get(prefix + key)
                    if tensor is not None and stage is not None:
                        if id(tensor) not in placed:
                            placed[id(tensor)] = self._placed(tensor, stage)
                        tensors[key] = placed[id(tensor)]
        begin, end = self._bounds
        units = joined(chain(self._model), cut.joins)  # with the model's new tensors
        self._module.units = nn.Sequential(*units[begin:end])

    def _placed(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        """Return ``tensor`` on the device if ``stage`` is this rank's stage, else on the meta device.

        A tensor that is moved from the meta device to this rank's device is uninitialised.
        """
        device = self.world.device if stage == self._index else torch.device("meta")
        if tensor.is_meta == (device.type == "meta"):
            return tensor
        moved = torch.empty_like(tensor, device=device)
        return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved

    def _places(self) -> dict[int, int]:
        """Return a dict: a parameter's index in this rank's optimizer -> its index in a single device's optimizer."""
        names = {id(parameter): index for index, parameter in enumerate(self._model.parameters())}
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return {index: names[id(parameter)] for index, parameter in enumerate(held)}

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
    """Returns the last stage's input as a view, because older releases of torch detach any other output in place."""

    def forward(self, passing: torch.Tensor) -> torch.Tensor:
        return passing.view_as(passing)
