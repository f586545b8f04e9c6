from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Clone
from tests.servers import serving
from tests.workflows.runner import ACT, GitHub, Runner


@pytest.fixture
def github() -> Iterator[GitHub]:
    made = GitHub()
    with serving(made.reply) as made.address:
        yield made


@pytest.fixture
def runner(clone: Callable[..., Clone], github: GitHub, tmp_path: Path) -> Runner:
    """A repository of two commits on ``main``, checked out at the second one."""
    if ACT is None:
        pytest.skip("needs act, from requirements-dev.lock")
    checkout = clone()
    checkout.run("git", "branch", "--move", "main")
    checkout.commit()
    return Runner(checkout, tmp_path / "github", github.address)
