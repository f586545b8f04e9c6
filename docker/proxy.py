"""A proxy with a password that reads TLS by an authority of its own: proxy.py FOLDER writes ca.crt and port there."""

import select
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

FOLDER, ONE = Path(sys.argv[1]), threading.Lock()


def certify(name: str, *options: str) -> Path:
    file = FOLDER / f"{name}.crt"
    if not file.exists():
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-noenc", "-days", "2", "-subj", f"/CN={name}"]
        command += ["-keyout", str(file.with_suffix(".key")), "-out", str(file.with_suffix(".new")), *options]
        subprocess.run(command, check=True, capture_output=True)
        file.with_suffix(".new").replace(file)
    return file


class Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        near, head = self.request, b""
        while b"\r\n\r\n" not in head:
            head += near.recv(65536) or b"\r\n\r\n"
        method, target, *_ = head.decode("latin-1").split()
        if b"proxy-authorization: basic " not in head.lower():
            near.sendall(b"HTTP/1.1 407 No password\r\nProxy-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n")
            return
        url = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = url.hostname or "", url.port or 80
        print(method, host, flush=True)
        far = socket.create_connection((host, port), 60)
        if method == "CONNECT":
            near.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            authority = ("-CA", str(FOLDER / "ca.crt"), "-CAkey", str(FOLDER / "ca.key"))
            with ONE:
                file = certify(host, *authority, "-addext", f"subjectAltName=DNS:{host}")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(file, file.with_suffix(".key"))
            near = context.wrap_socket(near, server_side=True)
            far = ssl.create_default_context().wrap_socket(far, server_hostname=host)
        else:
            far.sendall(head)
        other = {near: far, far: near}
        while True:
            waiting = [end for end in other if isinstance(end, ssl.SSLSocket) and end.pending()]
            for end in waiting or select.select([*other], [], [])[0]:
                with suppress(ssl.SSLWantReadError):
                    end.settimeout(0)
                    data = end.recv(65536)
                    other[end].settimeout(60)
                    other[end].sendall(data)
                    if not data:
                        return


socketserver.ThreadingTCPServer.daemon_threads = True
certify("ca")
with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection) as server:
    (FOLDER / "port").write_text(f"{server.server_address[1]}\n")
    server.serve_forever()
