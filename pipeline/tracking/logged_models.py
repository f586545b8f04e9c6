"""A run's trained model, in MLflow's format: raw images in, logits out, ready for pyfunc and for PyTorch.

The model is saved as an exported program (MLflow's ``pt2``), not as a pickle: it needs no code of ours where it is
loaded. Loading what was saved here runs no code but PyTorch's and MLflow's; loading what somebody else has put in its
place can run anything. docs/mlflow.md says how to load without pickles, and what that does not keep out.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import mlflow.pytorch
import numpy as np
import torch
from mlflow.entities import LoggedModel, LoggedModelOutput
from mlflow.entities.logged_model_status import LoggedModelStatus
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema, TensorSpec

from pipeline import models, results
from pipeline.errors import first_line
from pipeline.tracking import labels
from pipeline.tracking.comparisons import PREPARED, Child
from pipeline.tracking.stores import Store
from pipeline.training import checkpoints

EXAMPLES = 2
"""Images in the input example. More than one, or the exported program would accept batches of one alone."""


class NotLoggable(Exception):
    """This model cannot be logged; the message says why. The run is complete without it."""


def log(store: Store, run_id: str, child: Child) -> LoggedModel:
    """Log the model of ``child`` under its run.

    Raises NotLoggable, or what MLflow raises; and ResultError if the weights here are not those that its result names.
    """
    weights = checkpoints.weights(child.result, child.run.seed, child.root / results.MODELS)
    description = json.loads((child.root / PREPARED / "dataset.json").read_text(encoding="utf-8"))
    images = np.array(np.load(child.root / PREPARED / "test_images.npy", mmap_mode="r")[:EXAMPLES])
    if len(images) < EXAMPLES:
        raise NotLoggable(f"exporting it takes {EXAMPLES} test images, but {PREPARED} holds {len(images)}.")
    client = store.client
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "model"
        model = Model(run_id=run_id)
        try:
            classifier = _classifier(child, description, weights)
            _save(classifier, images, len(description["classes"]), directory, model)
        except Exception as error:  # a factory that is not here, weights of another model, what torch.export refuses
            raise NotLoggable(f"{type(error).__name__}: {first_line(error)}") from error
        logged = client.create_logged_model(
            store.experiment_id,
            name=child.name,  # what MLflow's list of models shows
            source_run_id=run_id,
            params=labels.child_params(child.result),
            tags={"variant": child.variant, "seed": str(child.run.seed), "model_sha256": child.run.model_sha256},
        )
        client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=child.run.steps)])
        model.model_id = model.model_uuid = logged.model_id
        model.artifact_path = logged.artifact_location
        # An exported program stays on the device it was exported on; pyfunc would ask for a GPU where there is one.
        model.flavors["python_function"]["config"]["device"] = "cpu"
        model.save(str(directory / "MLmodel"))
        client.log_model_artifacts(logged.model_id, str(directory))
        return client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)


def _classifier(child: Child, description: dict[str, Any], weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    shape = description["channels"], description["height"], description["width"]
    model = models.of_job(child.train, shape, len(description["classes"]))
    model.load_state_dict(weights)
    return models.Classifier(model, description["mean"], description["std"]).eval()


def _save(classifier: torch.nn.Module, images: np.ndarray, classes: int, directory: Path, model: Model) -> None:
    shape = (-1, *images.shape[1:])
    mlflow.pytorch.save_model(
        classifier,
        str(directory),
        mlflow_model=model,
        signature=ModelSignature(
            inputs=Schema([TensorSpec(np.dtype(np.uint8), shape, name=None)]),
            outputs=Schema([TensorSpec(np.dtype(np.float32), (-1, classes), name=None)]),
        ),
        input_example=images,
        serialization_format="pt2",
        pip_requirements=[
            f"{package.__name__}=={package.__version__.partition('+')[0]}"  # a build such as +cpu is not on PyPI
            for package in (mlflow, torch, np)
        ],
    )
