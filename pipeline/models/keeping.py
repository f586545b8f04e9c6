"""What a model keeps besides its parameters, so that a trial leaves no trace and a resumed training goes on exactly:
buffers, each part's own mode, generators, and plain attributes, such as a scale that the first batch sets."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipeline.processes import randomness, replaced

TORCHS_OWN = vars(nn.Module()).keys() - {"training"}
"""Attributes of every module that hold its parameters, buffers, parts and hooks."""


def copied(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of ``model``, in which ``change`` has replaced each parameter and buffer, and each attribute that
    autograd has computed: such tensors, as of ``torch.nn.utils.weight_norm``, cannot be copied otherwise. ``change``
    returns tensors that belong to no graph."""
    copies: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        changed = change(tensor)
        if isinstance(tensor, nn.Parameter) and changed is not tensor:
            changed = nn.Parameter(changed, tensor.requires_grad)
        copies[id(tensor)] = changed
    for value in [value for module in model.modules() for value in vars(module).values()]:
        if isinstance(value, Tensor) and not value.is_leaf:
            copies.setdefault(id(value), change(value))
    return copy.deepcopy(model, copies)


def overlaps(tensor: Tensor) -> bool:
    """Return True if several elements of the tensor share one place in memory, as after ``expand``."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def storage_of(tensor: Tensor) -> int:
    """Return a key of the memory that holds the tensor's elements, which several tensors can share. It is also defined
    for fake tensors, which have no address."""
    return int(tensor.untyped_storage()._cdata)


def is_plain(value: Any) -> bool:
    """Return True if a checkpoint can hold the value: tensors, numbers, text, None, and lists, tuples and dicts."""
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    if type(value) in (dict, OrderedDict):
        return all(map(is_plain, (*value, *value.values())))
    return type(value) in (Tensor, bool, int, float, complex, str, type(None))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the whole model into evaluation mode for the block; afterwards each part has its own mode again."""
    with ExitStack() as modes:
        for module in model.modules():
            modes.enter_context(replaced(module, "training", module.training))
        model.eval()
        yield


def kept_values(model: nn.Module, leave_out: Container[int] = ()) -> dict[str, dict[str, Any]]:
    """Return copies of what ``model`` keeps besides its parameters: name of a part -> attribute -> value.

    A generator's value is its state. Values count if they are tensors, numbers, text or None, or lists, tuples and
    dicts of these. ``leave_out``: the ids of tensors that are not needed.
    """
    values: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        values[name] = {}
        for key, value in {**vars(module), **dict(module.named_buffers(recurse=False))}.items():
            state = randomness.OBJECTS[type(value)][0](value) if type(value) in randomness.OBJECTS else value
            elsewhere = isinstance(value, Tensor) and value.is_meta  # on another rank of a pipeline
            if key not in TORCHS_OWN and id(value) not in leave_out and is_plain(state) and not elsewhere:
                values[name][key] = tree_map_only(Tensor, _clone, state)
    return values


def put_back(model: nn.Module, values: dict[str, dict[str, Any]], device: torch.device | None = None) -> None:
    """Restore what ``kept_values`` returned. Tensors of the same form, lists and dicts are restored in place, because
    several parts may share them. ``device``: the device of other tensors; None: they stay where they are."""
    for name, module in model.named_modules():
        for key, value in values.get(name, {}).items():
            held: Any = getattr(module, key, None)
            if type(held) in randomness.OBJECTS:
                randomness.OBJECTS[type(held)][1](held, value)
            elif (restored := _restored(held, value, device)) is not held:
                setattr(module, key, restored)


def _restored(held: Any, value: Any, device: torch.device | None) -> Any:
    """Return ``held`` with the content of ``value`` or, if it cannot take this content, a copy of ``value``."""
    if _alike(held, value):
        with torch.no_grad():
            held.copy_(value)
        return held
    if type(held) is type(value) is list:
        held[:] = [_restored(old, new, device) for old, new in zip_longest(held[: len(value)], value)]
        return held
    if type(held) is type(value) and isinstance(held, dict):
        content = {key: _restored(held.get(key), part, device) for key, part in value.items()}
        held.clear()
        held.update(content)
        return held
    return tree_map_only(Tensor, lambda tensor: tensor.to(device or tensor.device, copy=True), value)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """After the block, restore what the model keeps besides its parameters, and the process's random state."""
    held = [(names, names.copy()) for module in model.modules() for names in (vars(module), module._buffers)]
    values = kept_values(model)
    with randomness.kept():
        try:
            yield
        finally:
            for now, before in held:
                now.clear()
                now.update(before)
            put_back(model, values)


@contextmanager
def trial(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a copy of ``model`` that shares its parameters; after the block, ``model`` and the random state are
    ``unchanged``. A model that cannot be copied is yielded itself, and so is one with hooks or replaced methods: in a
    copy, these would still belong to the model."""
    bound = any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in model.modules())
    with unchanged(model):
        tried = model
        if not bound:
            with suppress(Exception):
                tried = copied(model, lambda tensor: tensor if isinstance(tensor, nn.Parameter) else _clone(tensor))
        yield tried


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _alike(held: Any, value: Any) -> bool:
    """Return True if ``value`` can be copied into ``held``."""
    tensors = isinstance(held, Tensor) and isinstance(value, Tensor)
    return tensors and (held.shape, held.dtype) == (value.shape, value.dtype) and not overlaps(held)
