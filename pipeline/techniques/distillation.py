"""Knowledge distillation: the model also learns the outputs of a trained teacher."""

from __future__ import annotations

from textwrap import shorten

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pipeline.errors import PipelineError
from pipeline.processes import randomness
from pipeline.step import Inputs
from pipeline.techniques.base import Setup, Technique


class Distillation(Technique):
    """The loss is alpha times the task's distance from the teacher's outputs, plus (1 - alpha) times the job's loss.

    The teacher is in evaluation mode and draws no random numbers. Its forward pass is a part of the step, inside the
    variant's autocast. If a step is only measured or checked, the teacher has random weights, the same on every rank.
    They need the same time and memory as trained weights. Source: Hinton et al., "Distilling the Knowledge in a Neural
    Network", 2015, section 2.
    """

    name = "distillation"

    def change_model(self, setup: Setup) -> None:
        settings, device = self.plan.applied.distillation, self.world.device
        assert settings is not None
        self._settings, self._task = settings, setup.task
        with randomness.kept():
            randomness.seed(0)
            made = self._task.model(settings.model, settings.model_options)
        # A memory prediction's parameters have no values and cannot be moved; they are already on the CPU.
        self._teacher = (made if device.type == "cpu" else made.to(device)).eval().requires_grad_(False)
        setup.kept_models.append(self._teacher)
        if setup.teacher is not None:
            try:
                self._teacher.load_state_dict(setup.teacher)
            except RuntimeError as error:
                section = "students" if settings.variant else "variants"
                raise PipelineError(
                    f"{section}.{self.plan.name}.distillation.teacher: the weights of {settings.teacher} do not fit "
                    f"the model {settings.model}: {shorten(str(error), 250)} Name the model that has these weights: "
                    "distillation: {model: ..., model_options: ...}."
                ) from None

    def change_step(self, setup: Setup) -> None:
        step = setup.step
        forward, criterion = step.forward, step.criterion
        alpha, temperature = self._settings.alpha, self._settings.temperature
        keep = self._task.kept

        def forward_both(inputs: Inputs, targets: Tensor) -> Tensor:
            with torch.no_grad():
                # The teacher may overwrite its inputs, which the model needs.
                self._taught = self._teacher(tree_map(torch.clone, inputs))
            return forward(inputs, targets)

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            distance = self._task.distance(keep(outputs, targets), keep(self._taught, targets), temperature)
            del self._taught
            return alpha * distance + (1 - alpha) * criterion(outputs, targets)

        step.forward, step.criterion = forward_both, loss
