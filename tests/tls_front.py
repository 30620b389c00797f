"""TLS in front of a server that speaks plain HTTP, and certificates for it: clickhouse-local cannot listen for HTTPS.

Certificates are made by the ``openssl`` command.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import subprocess
import threading
from pathlib import Path


class Authority:
    """A certificate authority of one's own, in a folder.

    Attributes:
        file: Its certificate, PEM.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.file = folder, name, folder / f"{name}.pem"
        _openssl(
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", folder / f"{name}.key", "-out", self.file,
            "-days", "2", "-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE",
        )  # fmt: skip

    def sign(self, name: str, *, host: str = "IP:127.0.0.1", days: int = 2) -> tuple[Path, Path]:
        """A server's certificate and key, for so many days from now on; -1: it expired yesterday."""
        files = {kind: self.folder / f"{name}.{kind}" for kind in ("pem", "key", "csr", "ext")}
        files["ext"].write_text(f"subjectAltName={host}\nauthorityKeyIdentifier=keyid\n")
        _openssl(
            "req", "-newkey", "rsa:2048", "-nodes", "-keyout", files["key"], "-out", files["csr"], "-subj", "/CN=db"
        )
        _openssl(
            "x509", "-req", "-in", files["csr"], "-CA", self.file, "-CAkey", self.folder / f"{self.name}.key",
            "-CAcreateserial", "-days", str(days), "-extfile", files["ext"], "-out", files["pem"],
        )  # fmt: skip
        return files["pem"], files["key"]


def _openssl(*words: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


class TlsFront:
    """Listens on a port of the loopback, and passes on to another port what comes through TLS.

    Args:
        certificate: PEM file of it and of its key; None: bytes are passed on as they come, and the connection behind is
            kept until the server ends it. The library (26.7.2.1) aborts when a client goes away while it reads
            something that is no HTTP, as a client does that has tried TLS.
        to: The port behind it.
    """

    def __init__(self, certificate: tuple[Path, Path] | None, to: int) -> None:
        self._context: ssl.SSLContext | None = None
        if certificate is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(*certificate)
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                raw, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        with contextlib.suppress(OSError), raw:  # one that cannot agree with us, or has gone
            raw.settimeout(30)
            if self._context is None:
                with socket.create_connection(("127.0.0.1", self._to)) as server:
                    with contextlib.suppress(OSError):
                        _relay(raw, server)
                    server.settimeout(30)
                    while server.recv(1 << 16):
                        pass
                return
            with (
                self._context.wrap_socket(raw, server_side=True) as client,
                socket.create_connection(("127.0.0.1", self._to)) as server,
            ):
                _relay(client, server)

    def close(self) -> None:
        """Listens no longer."""
        self._listener.close()


def _relay(client: socket.socket, server: socket.socket) -> None:
    """Passes bytes both ways until one of them ends."""
    # One request after the other: a TLS socket must not be read and written by two threads at once.
    client.settimeout(0.02)
    server.settimeout(0.02)
    for one in (client, server):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        # What TLS has decrypted already is not seen by select.
        decrypted = isinstance(client, ssl.SSLSocket) and client.pending()
        ready = [client] if decrypted else select.select([client, server], [], [])[0]
        for source in ready:
            sink = server if source is client else client
            with contextlib.suppress(TimeoutError, ssl.SSLWantReadError):
                data = source.recv(1 << 16)
                if not data:
                    return
                sink.settimeout(30)
                sink.sendall(data)
                sink.settimeout(0.02)
