"""The hook of ``pipeline.script`` in the test's own process, and the bench's side of it."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from torch.optim import optimizer as optimizers

from pipeline.script import hook


class Bed:
    """The bench's side of a hook that runs in this process."""

    def __init__(self, folder: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "socket"))
        self.listener.listen(1)
        self.answers: list[dict[str, Any]] = []
        self.open: Any = None
        self.rank = hook.Rank(folder)

    def requests(
        self, *steps: int | None, first: Mapping[str, bool] = MappingProxyType({}), **options: bool
    ) -> threading.Thread:
        """Answer the hook with one request of each of these numbers of steps (None: to the end), then let it go on.
        ``first``: options of the first request."""

        def serve() -> None:
            connection = self.open = Connection(self.listener.accept()[0].detach())
            self.answers.append(connection.recv())
            plain = {"keep": True, "examine": False}
            for number, own in zip(steps, [first, *[{}] * len(steps)], strict=False):
                connection.send({**plain, "steps": number, "anew": True, **options, **own})
                self.answers.append(connection.recv())
            connection.send(plain | {"steps": 10**9, "anew": True})  # an examined one would leave its hook

        thread = threading.Thread(target=serve)
        thread.start()
        return thread


@contextmanager
def hooked() -> Iterator[Bed]:
    """Install the hook in this process, for optimizers that are made from now on; take it out at the end."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # a socket's path must be short
    handles: list[Any] = []
    monkeypatch = pytest.MonkeyPatch()
    for name in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"):
        register = getattr(optimizers, name)
        monkeypatch.setattr(optimizers, name, lambda made, register=register: handles.append(register(made)))
    monkeypatch.setattr(optimizers.Optimizer, "__init__", optimizers.Optimizer.__init__)
    bed = Bed(folder)
    bed.rank.install(optimizers)
    yield bed
    bed.rank.at_exit.cancel()
    for opened in (bed.listener, bed.open, bed.rank.connection):
        opened.close()
    monkeypatch.undo()
    for handle in handles:
        handle.remove()
    shutil.rmtree(folder)
