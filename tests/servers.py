"""An HTTP server on the loopback interface, for tests of clients."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil

LO = next(name for name, cards in psutil.net_if_addrs().items() if "127.0.0.1" in {card.address for card in cards})
"""The name of the loopback interface."""
Reply = Callable[[BaseHTTPRequestHandler], tuple[int, str]]


@contextmanager
def serving(reply: Reply) -> Iterator[str]:
    """Start a server that answers every request with the status and text of ``reply``; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = reply(self)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_HEAD = do_POST = do_PATCH = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError):  # the client did not wait
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def hang(_: BaseHTTPRequestHandler) -> tuple[int, str]:
    """Reply after 30 seconds, which is longer than a client waits."""
    time.sleep(30)
    return 200, ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
