"""Knowledge distillation: the model also learns the outputs of a trained teacher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from pipeline.errors import PipelineError, first_line
from pipeline.step import TrainingStep
from pipeline.techniques.base import Inputs, Technique


class Distillation(Technique):
    """The loss is alpha times the task's distance from the teacher's outputs, plus 1 - alpha times the job's loss.

    The teacher is in evaluation mode and draws nothing at random. Its forward pass is a part of the step, inside of the
    variant's autocast. Where a step is only measured or checked, it has random weights, the same everywhere: they cost
    the same. Source: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, section 2.
    """

    name = "distillation"

    def change_model(self, model: nn.Module, inputs: Inputs) -> nn.Module:
        settings, device = self.plan.applied.distillation, self.world.device
        assert settings is not None
        assert inputs.task is not None
        self._settings, self._task = settings, inputs.task
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            made = self._task.model(settings.model, settings.model_options)
        # Parameters without values, of a prediction, cannot be moved; they are on the CPU already.
        self._teacher = (made if device.type == "cpu" else made.to(device)).eval().requires_grad_(False)
        return model

    def change_step(self, step: TrainingStep) -> None:
        forward, criterion = step.forward, step.criterion
        alpha, temperature = self._settings.alpha, self._settings.temperature

        def forward_both(inputs: Tensor, targets: Tensor) -> Tensor:
            with torch.no_grad():
                self._taught = self._teacher(inputs)
            return forward(inputs, targets)

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            distance = self._task.distance(outputs, self._taught, temperature)
            del self._taught
            return alpha * distance + (1 - alpha) * criterion(outputs, targets)

        step.forward, step.criterion = forward_both, loss

    def further_models(self) -> Iterator[nn.Module]:
        yield self._teacher

    def learn_from(self, weights: Mapping[str, Tensor]) -> None:
        try:
            self._teacher.load_state_dict(weights)
        except RuntimeError as error:
            raise PipelineError(
                f"students.{self.plan.name}.distillation.teacher: the weights of {self._settings.teacher} do not fit "
                f"its model {self._settings.model}: {first_line(error)} Name the model that has these weights: "
                "distillation: {model: ..., model_options: ...}."
            ) from None
