"""Log a run's trained model in MLflow's format, for pyfunc and for PyTorch. The model takes raw inputs.

The model is saved as an exported program (MLflow's ``pt2``), not as a pickle, so loading it needs no code of this
project. Loading the file saved here runs only PyTorch's and MLflow's code; loading a file that somebody else put in its
place can run any code. docs/mlflow.md says how to load models without pickles, and which risks remain then.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow.pytorch
import numpy as np
import numpy.typing as npt
import torch
from mlflow.entities import LoggedModel, LoggedModelOutput
from mlflow.entities.logged_model_status import LoggedModelStatus
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema, TensorSpec

from pipeline import results, tasks
from pipeline.data.prepared import read as read_dataset
from pipeline.errors import first_line
from pipeline.files import PREPARED
from pipeline.tasks import Task
from pipeline.tracking import contents
from pipeline.tracking.comparisons import Child
from pipeline.tracking.stores import Store
from pipeline.training import checkpoints

BY_NAME = Path(__file__).with_name("served_by_name.py")
EXAMPLES = 2
"""Samples in the input example. With one sample, the exported program would accept only batches of one sample."""


class NotLoggable(Exception):
    """This model cannot be logged; the message says why. The run is complete without the model."""


def log(store: Store, run_id: str, child: Child) -> LoggedModel:
    """Log the model of ``child`` under its run, and return MLflow's record of the model.

    Raises NotLoggable and MLflow's errors. Raises OSError if the disk for temporary files has no room for the model,
    and ResultError if the weights here are not those that the result names.
    """
    weights = checkpoints.weights(child.result, child.run.seed, child.root / results.MODELS)
    client = store.client
    with tempfile.TemporaryDirectory() as temporary:
        needed = 2 * sum(tensor.nbytes for tensor in weights.values()) + (1 << 20)
        if shutil.disk_usage(temporary).free < needed:  # on a full disk, torch's writer would end the process
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temporary)
        directory = Path(temporary) / "model"
        model = Model(run_id=run_id)
        try:
            _save(*_trained(child, weights), directory, model)
        except Exception as error:  # a missing factory, weights of another model, a model that torch.export refuses
            raise NotLoggable(f"{type(error).__name__}: {first_line(error)}") from error
        logged = client.create_logged_model(
            store.experiment_id,
            name=child.name,  # shown in MLflow's list of models
            source_run_id=run_id,
            params=contents.child_params(child.result),
            tags={"variant": child.variant, "seed": str(child.run.seed), "model_sha256": child.run.model_sha256},
        )
        client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=child.run.steps)])
        model.model_id = model.model_uuid = logged.model_id
        model.artifact_path = logged.artifact_location
        model.save(str(directory / "MLmodel"))
        client.log_model_artifacts(logged.model_id, str(directory))
        return client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)


def _trained(child: Child, weights: dict[str, torch.Tensor]) -> tuple[Task, torch.nn.Module]:
    task = tasks.of_job(child.train, read_dataset(child.root / PREPARED))
    model = task.model()
    model.load_state_dict(weights)
    return task, model


def _save(task: Task, trained: torch.nn.Module, directory: Path, model: Model) -> None:
    parts = OrderedDict(preprocess=task.preprocess, model=trained, postprocess=task.postprocess)
    deployed = torch.nn.Sequential(parts).eval()
    test = task.dataset.test[torch.arange(EXAMPLES) % len(task.dataset.test)]
    inputs = task.raw([test.arrays[name] for name in task.arrays])[0]
    by_name = isinstance(inputs, dict)
    if by_name:  # tokens and masks are given as int64, whatever type they are prepared in
        known = task.dataset.statistics
        inputs = {
            name: rows if name in known or rows.is_floating_point() else rows.long() for name, rows in inputs.items()
        }
    with torch.no_grad():
        outputs = deployed(inputs)
    named = inputs if by_name else {None: inputs}
    example = {name: rows.contiguous().numpy() for name, rows in named.items()}
    about: dict[str, Any] = {
        "mlflow_model": model,
        "signature": ModelSignature(inputs=_schema(example), outputs=_schema({None: outputs.numpy()})),
        "pip_requirements": [
            f"{package.__name__}=={package.__version__.partition('+')[0]}"  # a build such as +cpu is not on PyPI
            for package in (mlflow, torch, np)
        ],
    }
    with warnings.catch_warnings(action="ignore"):  # torch warns about its own modules, such as nn.LSTM
        if by_name:  # MLflow's own form for PyTorch passes one array
            program = directory.with_name("program.pt2")
            shapes = {name: {0: torch.export.Dim.AUTO} for name in inputs}
            torch.export.save(torch.export.export(deployed, (inputs,), dynamic_shapes=(shapes,)), program)
            about |= {"loader_module": BY_NAME.stem, "code_paths": [str(BY_NAME)], "data_path": str(program)}
            logging.getLogger("mlflow.pyfunc").setLevel(logging.WARNING)  # it would say that it checks the example
            mlflow.pyfunc.save_model(str(directory), input_example=example, **about)
        else:
            about |= {"input_example": example[None], "serialization_format": "pt2"}
            mlflow.pytorch.save_model(deployed, str(directory), **about)
            # An exported program runs only where it was exported. By default pyfunc would move it to a GPU.
            model.flavors["python_function"]["config"]["device"] = "cpu"


def _schema(arrays: Mapping[str | None, npt.NDArray[Any]]) -> Schema:
    return Schema([TensorSpec(rows.dtype, (-1, *rows.shape[1:]), name=name) for name, rows in arrays.items()])
