"""DataParallel: one process drives all GPUs, copying the model to each in every forward pass. DDP replaced it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeline.techniques.base import Setup, Technique


class DataParallel(Technique):
    """``torch.nn.DataParallel`` over the first ``plan.devices_per_process`` GPUs; the first one holds the parameters.

    Each forward pass sends every GPU the parameters and its part of the micro-batch, and gathers the logits, so that
    the loss is taken over the whole micro-batch. BatchNorm normalises each GPU's part separately; the running
    statistics are the first GPU's.
    """

    name = "data_parallel"

    def change_model(self, setup: Setup) -> None:
        setup.model = nn.DataParallel(setup.model, device_ids=list(range(self.plan.devices_per_process)))

    def state(self) -> dict[str, Any]:
        """The random states of all GPUs; the training itself saves only the first GPU's."""
        return {"cuda": [torch.cuda.get_rng_state(index) for index in range(self.plan.devices_per_process)]}

    def restore(self, state: dict[str, Any]) -> None:
        for index, random in enumerate(state["cuda"]):
            torch.cuda.set_rng_state(random, index)
