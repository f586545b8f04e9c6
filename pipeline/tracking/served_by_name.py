"""What MLflow runs to load a model that takes several inputs by name. A copy of this file lies beside the model, which
needs nothing else of this project."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch


class Served:
    """The exported program in ``file``, for arrays by name, such as input_ids int64 [b, t]."""

    def __init__(self, file: str) -> None:
        self._program = torch.export.load(file).module()

    def predict(self, inputs: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return the outputs [b, ...]."""
        with torch.no_grad():
            outputs: torch.Tensor = self._program({name: torch.from_numpy(rows) for name, rows in inputs.items()})
        return outputs.numpy()


_load_pyfunc = Served
"""The name that MLflow calls."""
