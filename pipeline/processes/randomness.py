"""A process's random generators: torch's, numpy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

OBJECTS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}
"""Classes of generators that a model may own -> the functions that read and set such a generator's state."""


def seed(number: int) -> None:
    """Seed all generators with ``number``; numpy's takes its lowest 32 bits."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def state() -> dict[str, Any]:
    """Return the generators' states, as tensors and plain values. If a GPU is in use, the state of the current GPU's
    generator is included."""
    name, key, *rest = np.random.get_state()
    assert isinstance(key, np.ndarray)
    states = {"cpu": torch.get_rng_state(), "python": random.getstate(), "numpy": (name, key.tolist(), *rest)}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore(states: dict[str, Any]) -> None:
    """Restore what ``state`` returned."""
    torch.set_rng_state(states["cpu"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


@contextmanager
def kept() -> Iterator[None]:
    """Restore the generators' states after the block."""
    before = state()
    try:
        yield
    finally:
        restore(before)
