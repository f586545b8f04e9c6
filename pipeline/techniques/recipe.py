"""The parts of the job's recipe that act in each step: the limit of the gradients' norm, and the weights' average.

They are settings of the job and not techniques, so they apply to every variant, after the variant's techniques.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils._pytree import tree_map_only

from pipeline.distributed import own_part
from pipeline.params import Train
from pipeline.techniques.base import Setup, Stored, Technique


def of_job(train: Train) -> list[type[Technique]]:
    """Return the parts of the recipe that ``train`` sets, in the order in which they apply."""
    return [Clipping] * bool(train.clip_norm) + [Averaging] * bool(train.ema_decay)


class Clipping(Technique):
    """Scales the gradients of a step down to the norm ``train.clip_norm``, if they are longer.

    The norm is that of a single device: over all parameters, after all micro-batches, without a loss scale. Ranks that
    hold parts of the gradients add up the squares of their parts' norms. Source: Pascanu et al., "On the Difficulty of
    Training Recurrent Neural Networks", ICML 2013.
    """

    name = "clip_norm"

    def change_step(self, setup: Setup) -> None:
        step, update, limit = setup.step, setup.step.update, self.plan.train.clip_norm
        assert limit is not None

        def clipped() -> object:
            held = (parameter for group in step.optimizer.param_groups for parameter in group["params"])
            trained = [parameter for parameter in held if parameter.grad is not None]
            step.unscale()
            clip_grads_with_norm_(trained, limit, self._norm(trained, setup))
            return update()

        if setup.shard_group:
            step.trial_update = step.trial_update or update  # a trial must not wait for the other ranks
        step.update = clipped

    def _norm(self, parameters: list[nn.Parameter], setup: Setup) -> torch.Tensor:
        gradients: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for parameter in parameters:
            shard = setup.shard_group is not None and setup.is_shard(parameter)
            gradients[shard].append(own_part(parameter.grad))
        if setup.shard_group is None:
            return get_total_norm(gradients[False])
        # On the rank's device, because offloaded gradients are on the host, which NCCL cannot reach.
        squares = self.world.sum_(get_total_norm(gradients[True]).to(self.world.device).square(), setup.shard_group)
        return (squares + get_total_norm(gradients[False]).to(self.world.device).square()).sqrt()


class Averaging(Technique):
    """After each update, moves an average of the trained weights towards the weights. Evaluation uses the average.

    The average begins with the initial weights. Buffers, such as BatchNorm's statistics, are not averaged. Each rank
    averages the weights, or the parts of weights, that it holds. Source: Polyak and Juditsky, "Acceleration of
    Stochastic Approximation by Averaging", 1992.
    """

    name = "ema_decay"

    def change_step(self, setup: Setup) -> None:
        self._setup, self._module = setup, nn.Module()
        setup.kept_models.append(self._module)
        self._begin()
        update = setup.step.update
        assert self.plan.train.ema_decay is not None
        move: Any = get_ema_multi_avg_fn(self.plan.train.ema_decay)

        def averaged() -> None:
            update()
            move(self._averages, self._weights(), None)

        setup.step.update = averaged

    def change_checkpoint(self, setup: Setup) -> None:
        setup.averages, setup.deployed = Stored(self._read, self._load), self._in_model

    def _weights(self) -> list[torch.Tensor]:
        groups = self._setup.step.optimizer.param_groups
        return [own_part(parameter) for group in groups for parameter in group["params"]]

    def _begin(self) -> None:
        """Begin the average with the weights as they are."""
        self._averages = [nn.Parameter(weight.detach().clone(), requires_grad=False) for weight in self._weights()]
        self._module.averages = nn.ParameterList(self._averages)

    @contextmanager
    def _in_model(self) -> Iterator[None]:
        """While the block runs, the model has the average, and the average is in turn what the model was."""
        self._exchange()
        yield
        self._exchange()

    def _exchange(self) -> None:
        with torch.no_grad():
            for average, weight in zip(self._averages, self._weights(), strict=True):
                held = weight.clone()
                weight.copy_(average)
                average.copy_(held)

    def _read(self) -> dict[str, Any]:
        with self._in_model():
            average: dict[str, Any] = tree_map_only(torch.Tensor, torch.clone, self._setup.model_state.read())
        return average

    def _load(self, average: dict[str, Any]) -> None:
        self._begin()  # anew, because a pipeline may just have been cut elsewhere
        with self._in_model():
            self._setup.model_state.load(average)
