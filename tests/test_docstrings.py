"""The examples in the docstrings are run."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.imports import modules

WITH_EXAMPLES = [name for name, path in modules().items() if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_what_a_docstring_shows_is_so(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried
    assert not failed
