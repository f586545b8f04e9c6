"""A proxy with a password that reads TLS by an authority of its own: proxy.py FOLDER writes ca.crt and port there."""

import ssl
import subprocess
import sys
import threading
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER, ONE = Path(sys.argv[1]), threading.Lock()


def certify(name: str, *options: str) -> Path:
    file = FOLDER / f"{name}.crt"
    if not file.exists():
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-noenc", "-days", "2", "-subj", f"/CN={name}"]
        command += ["-keyout", str(file.with_suffix(".key")), "-out", str(file), *options]
        subprocess.run(command, check=True, capture_output=True)
    return file


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_CONNECT(self) -> None:
        if not self.headers.get("Proxy-Authorization", "").startswith("Basic "):
            return self.reply(407, {"Proxy-Authenticate": "Basic", "Content-Length": "0"})
        self.host = self.path.partition(":")[0]
        print("CONNECT", self.host, flush=True)
        self.reply(200, {})
        with ONE:
            authority = ("-CA", str(FOLDER / "ca.crt"), "-CAkey", str(FOLDER / "ca.key"))
            file = certify(self.host, *authority, "-addext", f"subjectAltName=DNS:{self.host}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file, file.with_suffix(".key"))
        self.request = context.wrap_socket(self.request, server_side=True)
        self.close_connection = False  # although pip asks for the tunnel by HTTP 1.0
        return self.setup()

    def do_GET(self) -> None:
        far = HTTPSConnection(self.host, timeout=60)
        far.request(self.command, self.path, headers=dict(self.headers))
        answer = far.getresponse()
        body, headers = answer.read(), dict(answer.getheaders())
        headers.pop("Transfer-Encoding", None)
        self.reply(answer.status, headers if self.command == "HEAD" else headers | {"Content-Length": f"{len(body)}"})
        self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def reply(self, status: int, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


certify("ca")
with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
    (FOLDER / "port").write_text(f"{server.server_address[1]}\n")
    server.serve_forever()
