"""What a job learns from its data: classification, a language model, regression, or a task of the user's own.

``batches`` shuffles and shards the samples, and lets the task make batches. ``loader`` does the same with PyTorch's
DataLoader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipeline import factories
from pipeline.data.prepared import Dataset
from pipeline.params import Train
from pipeline.tasks.base import CPU, Task, TaskError
from pipeline.tasks.classification import Classification
from pipeline.tasks.language_model import LanguageModel
from pipeline.tasks.regression import Regression

__all__ = ["Task", "TaskError", "of_job"]

_OWN = {"classification": Classification, "language_model": LanguageModel, "regression": Regression}


def of_job(train: Train, dataset: Dataset, device: torch.device = CPU) -> Task:
    """Return the task ``train.task`` for the job's settings and data set.

    Raises TaskError if the task does not fit the data set. It also raises TaskError for an array, other than ``inputs``
    and ``targets``, that the task does not take, because the array's name may be misspelled.
    """
    has = {"labels": dataset.classes, "tokens": dataset.vocabulary, "float targets": "targets" in dataset.statistics}
    task = find(train.task)(train, dataset, device)
    if not isinstance(task, Task):
        raise TaskError(f"train.task: {train.task} returned {task!r}; expected a pipeline.tasks.Task.")
    if task.needs and not has.get(task.needs):
        fitting = [name for name, own in _OWN.items() if has[own.needs]]
        raise TaskError(
            f"train.task: {train.task} needs {task.needs}, and {dataset.name} has none; allowed: "
            f"{', '.join([*fitting, 'module:class of your own'])}."
        )
    found, takes = set(dataset.train.arrays), set(task.arrays)
    if takes - found or found - takes - {"inputs", "targets"}:
        raise TaskError(
            f"train.task: {dataset.name} has the arrays {', '.join(sorted(found))}, but {train.task} takes "
            f"{', '.join(task.arrays)}: rename or drop arrays, or name them in `arrays` of a task of your own."
        )
    return task


def find(name: str) -> Callable[..., Any]:
    """Return the class of the task ``name``; a user's own task is imported. Raises TaskError if the import fails."""
    if ":" not in name:
        return _OWN[name]
    return factories.find(name, "train.task", "a task", example="my_tasks:Autoencoding", error=TaskError)
