"""ZeRO, stage 1: DistributedDataParallel that divides the optimizer's state among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from pipeline.errors import ConfigError
from pipeline.techniques.base import Setup, Stored, load_share
from pipeline.techniques.ddp import DDP


class Zero1(DDP):
    """Every rank keeps the optimizer state of its share of the parameters, and updates and broadcasts these parameters.

    Each parameter belongs to one rank. Parameters are assigned in order of size, the largest first, so the shares are
    even unless one parameter is a large part of the model. Source: Rajbhandari et al., "ZeRO", 2020.
    """

    name = "zero1"

    def change_model(self, setup: Setup) -> None:
        model = setup.model
        types = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        if len(types) > 1:
            raise ConfigError(
                f"{self.where('parallelism')}, but {type(model).__name__} has parameters of "
                f"{' and '.join(sorted(map(str, types)))}; allowed: 'ddp', or parameters of one type."
            )
        super().change_model(setup)

    def change_optimizer(self, setup: Setup) -> None:
        choice = setup.optimizer_choice
        setup.optimizer_choice = replace(choice, cls=partial(_SharedOut, make=choice.cls))

    def change_step(self, setup: Setup) -> None:
        super().change_step(setup)
        assert isinstance(setup.step.optimizer, _SharedOut)
        own = setup.step.optimizer.optim

        def update_own_share() -> None:
            for group in own.param_groups:
                group["lr"] = 0.0
            own.step()

        setup.step.trial_update = update_own_share

    def change_checkpoint(self, setup: Setup) -> None:
        optimizer = setup.step.optimizer
        assert isinstance(optimizer, _SharedOut)

        def read() -> dict[str, Any]:
            # The keys of own["state"] are the parameters' indices in the whole model.
            own = torch.optim.Optimizer.state_dict(optimizer)
            parts = self.world.gather(own["state"])
            return own | {"state": dict(sorted((index, values) for part in parts for index, values in part.items()))}

        def load(whole: dict[str, Any]) -> None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            load_share(optimizer.optim, self.world.sent(whole), parameters)
            optimizer.state = optimizer.optim.state
            optimizer._sync_param_groups(optimizer.optim.param_groups, optimizer.param_groups)  # type: ignore[attr-defined]

        setup.optimizer_state = Stored(read, load)


def _passed_on(name: str) -> property:
    return property(
        lambda self: getattr(self.optim, name),
        lambda self, value: setattr(self.optim, name, value),
        lambda self: delattr(self.optim, name),
    )


class _SharedOut(ZeroRedundancyOptimizer):
    """A ``ZeroRedundancyOptimizer`` that exposes the state of this rank's own optimizer, ``optim``.

    ``state`` holds the state of the rank's share of the parameters; ``param_groups`` hold all parameters. ``found_inf``
    and ``grad_scale``, which tell a fused optimizer about overflows and the loss scale, are passed on to ``optim``.
    """

    found_inf = _passed_on("found_inf")
    grad_scale = _passed_on("grad_scale")
    _step_supports_amp_scaling = _passed_on("_step_supports_amp_scaling")

    def __init__(
        self, parameters: Iterable[torch.Tensor], make: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> None:
        super().__init__(parameters, make, **options)  # type: ignore[arg-type]
        self.state = self.optim.state
