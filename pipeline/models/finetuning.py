"""Fine-tuning: a training that begins with the weights of a file, and leaves parts of the model as they are."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline.errors import PipelineError, first_line
from pipeline.models.optimizers import check_patterns, matches
from pipeline.params import Train

INDEX = "model.safetensors.index.json"
"""The file of a ``transformers`` folder that says which shard holds which tensor."""
LISTED = 5
"""Number of mistakes that an error lists."""


class WeightsError(PipelineError):
    """The weights of train.weights cannot be read, or do not fit the model."""


def load(model: nn.Module, train: Train) -> None:
    """Load ``train.weights`` into ``model``, in place; without them, do nothing.

    The file must have each tensor of the model's state dict, in its shape, and no others, except for names that
    ``train.allow_new`` matches: those keep their initial values if the file lacks them or has another shape. Of tensors
    that share memory, one suffices. Raises WeightsError.
    """
    if not train.weights:
        return
    where, saved = f"train.weights: {train.weights}", read(Path(train.weights).expanduser())
    tensors = {name: held for name, held in model.state_dict(keep_vars=True).items() if isinstance(held, Tensor)}
    if tensors.keys().isdisjoint(saved):
        saved = {f"net.{name}": values for name, values in saved.items()}  # our model holds that of transformers so
    fitting = {name: saved[name] for name, held in tensors.items() if name in saved and saved[name].shape == held.shape}
    known = {id(tensors[name]) for name in fitting}
    problems = {
        name: f"has shape {list(saved[name].shape)}, not {list(tensors[name].shape)}" if name in saved else "is missing"
        for name in tensors.keys() - fitting.keys()
        if id(tensors[name]) not in known
    } | dict.fromkeys(saved.keys() - tensors.keys(), "is not in the model")
    wrong = [f"{name} {problem}" for name, problem in sorted(problems.items()) if not matches(name, train.allow_new)]
    if wrong or not fitting:
        more = f", and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise WeightsError(
            f"{where} does not fit {train.model}: {'; '.join(wrong[:LISTED]) or 'no name is known'}{more}. Set "
            "train.allow_new to patterns of what begins with new values, such as [head.*]."
        )
    model.load_state_dict(fitting, strict=False)


def read(path: Path) -> dict[str, Tensor]:
    """Return the state dict at ``path``, on the CPU: a .safetensors file, a folder of ``transformers`` that has one or
    several, or a file that torch.save wrote. No code in a file runs. Raises WeightsError."""
    try:
        if path.is_dir():
            index = path / INDEX
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index.is_file() else ()
            names = sorted({Path(shard).name for shard in shards}) or ["model.safetensors"]
            return {name: values for shard in names for name, values in load_file(path / shard).items()}
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise TypeError("it is no dict of names and tensors")
    except Exception as error:  # torch's and safetensors' errors for a damaged file have no common class
        raise WeightsError(f"train.weights: {path} cannot be read as weights ({first_line(error)}).") from error
    return state


def freeze(model: nn.Module, train: Train) -> None:
    """Freeze the parameters that ``train.frozen`` matches, in place: they require no gradient.

    A part whose parameters are all frozen, or whose name matches, gets into evaluation mode and stays there. So the
    statistics of its BatchNorms do not move, and its dropout drops nothing. Raises ConfigError for a pattern that
    matches nothing, and WeightsError if nothing is left to train.
    """
    if not train.frozen:
        return
    named = dict(model.named_parameters(remove_duplicate=False))
    check_patterns(train, named, "frozen")
    for name, parameter in named.items():
        if matches(name, train.frozen):
            parameter.requires_grad_(False)
    for name, part in model.named_modules():
        parameters = list(part.parameters())
        if not any(held.requires_grad for held in parameters) and (parameters or matches(name, train.frozen)):
            part.eval()
    if not any(parameter.requires_grad for parameter in named.values()):
        raise WeightsError(f"train.frozen: {train.frozen} leaves no parameter of {train.model} to train.")
