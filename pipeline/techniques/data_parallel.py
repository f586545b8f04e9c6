"""DataParallel, superseded by DDP: one process uses all GPUs, and copies the model to them in each forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeline.techniques.base import Setup, Technique
from pipeline.techniques.lockstep import keep_parameters


class DataParallel(Technique):
    """``torch.nn.DataParallel`` over the first ``plan.devices_per_process`` GPUs; the first GPU holds the parameters.

    Each forward pass sends every GPU the parameters and a part of the micro-batch. It gathers the outputs, so that the
    loss is computed over the whole micro-batch. BatchNorm normalises each GPU's part separately; the running statistics
    come from the first GPU.
    """

    name = "data_parallel"

    def change_model(self, setup: Setup) -> None:
        keep_parameters(setup.model, setup.model.named_parameters, self.where("parallelism"))
        setup.outputs()
        setup.model = nn.DataParallel(setup.model, device_ids=list(range(self.plan.devices_per_process)))

    def state(self) -> dict[str, Any]:
        """Return the random states of all GPUs; the training itself saves only the first GPU's state."""
        return {"cuda": [torch.cuda.get_rng_state(index) for index in range(self.plan.devices_per_process)]}

    def restore(self, state: dict[str, Any]) -> None:
        for index, random in enumerate(state["cuda"]):
            torch.cuda.set_rng_state(random, index)
