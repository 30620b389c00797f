"""``argus serve``: the pages of a store's runs in a browser, kept up to date while the runs go on."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.text import printable
from argus.store.open import Store, open_store
from argus.store.reader import nothing_stored
from argus.system import files, privileges
from argus.system.files import owner

from .options import store_option

DEFAULT_LISTEN = "127.0.0.1:8480"
LEAST_TOKEN = 16
"""Characters of a token that somebody chose: shorter ones can be guessed over a network."""
_TOKEN_BYTES = 24
_TOKEN_FILE_BYTES = 4_096
_HEAD_BYTES = 16_384
"""Of a request's line and headers: h11's own limit, set here since it bounds the memory that a stranger can take."""
_CONNECTIONS = 256


@click.command()
@click.option(
    "--listen",
    default=DEFAULT_LISTEN,
    show_default=True,
    metavar="ADDRESS:PORT",
    help="Address to listen on. Other machines can connect only to an address of this machine; port 0: any free one.",
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False),
    help="The token that browsers need, in a file. Default: a new one, printed with the address.",
)
@click.option("--no-token", is_flag=True, help="No token is needed. Only on loopback, for every user of this node.")
@click.option("--certificate", type=click.Path(dir_okay=False), help="Serve HTTPS with this certificate (PEM).")
@click.option("--key", type=click.Path(dir_okay=False), help="The key of the certificate, if it is in another file.")
@store_option
def command(
    listen: str, token_file: str | None, no_token: bool, certificate: str | None, key: str | None, store_url: str | None
) -> int:
    """Show the runs of a store in a browser: newest verdicts first, each as a page that is kept up to date.

    It only reads. It listens on this machine alone, and asks for the token that it prints; from elsewhere:
    ssh -L 8480:localhost:8480 NODE. Ctrl-C ends it.

    \b
      argus serve                                     what this user's traces stored
      argus serve --store clickhouse://reader@db/argus
      argus serve --listen 0.0.0.0:8480 --token-file /etc/argus/token --certificate cert.pem --key key.pem
    """
    address, port = _address(listen)
    from argus.report.server.access import is_loopback  # starlette takes 0.1 s

    loopback = is_loopback(address)
    if no_token and token_file:
        raise ArgusError("--no-token cannot be used with --token-file", "Give one of them", EXIT_USAGE)
    if no_token and not loopback:
        raise ArgusError("an address that other machines can reach needs a token", "Leave out --no-token", EXIT_USAGE)
    if key and not certificate:
        raise ArgusError("--key needs --certificate", "Add --certificate FILE", EXIT_USAGE)
    token = "" if no_token else _token(token_file)
    with open_store(store_url, create=False) as store, _bound(address, port) as bound:
        if not store.exists():
            raise nothing_stored(store)
        scheme = "https" if certificate else "http"
        shown, at = f"[{address}]" if ":" in address else address, bound.getsockname()[1]
        run = _prepared(store, token, loopback, certificate, key)
        click.echo(f"serving {store.url} at {scheme}://{shown}:{at}/" + (f"#token={token}" if token else ""))
        if not loopback and not certificate:
            click.echo("without --certificate, the token can be read by anyone who can listen on the network", err=True)
        return run(bound)


def _address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    is_port = re.fullmatch("[0-9]{1,5}", port) and int(port) < 65536
    if not colon or not host or (":" in host) != bracketed or not is_port:
        raise ArgusError(f"--listen {listen} is not ADDRESS:PORT", f"As in {DEFAULT_LISTEN} or [::1]:8480", EXIT_USAGE)
    return host, int(port)


def _token(file: str | None) -> str:
    if file is None:
        return secrets.token_urlsafe(_TOKEN_BYTES)
    from argus.report.server.access import MOST_TOKEN

    try:
        text, status = files.read_secret(Path(file), _TOKEN_FILE_BYTES)
        token = text.decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as failure:
        why = getattr(failure, "strerror", None) or "it is not plain text"
        raise ArgusError(f"the token in {file} cannot be read: {why}", "", EXIT_UNAVAILABLE) from None
    if not LEAST_TOKEN <= len(token) <= MOST_TOKEN or not token.isprintable() or " " in token:
        hint = f"{LEAST_TOKEN} to {MOST_TOKEN} characters without spaces: head -c 24 /dev/urandom | base64 > {file}"
        raise ArgusError(f"the token in {file} is too short, too long, or not one word", hint, EXIT_USAGE)
    if stat.S_ISREG(status.st_mode) and status.st_uid not in (0, os.geteuid()):
        whose = printable(owner(status.st_uid))
        click.echo(f"the token in {file} belongs to {whose}, who may read and change it: make it your own", err=True)
    elif stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
        click.echo(f"other users of this machine may read or change the token: chmod 600 {file}", err=True)
    return token


@contextlib.contextmanager
def _bound(address: str, port: int) -> Any:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        bound = socket.create_server((address, port), family=family, backlog=128)
    except OSError as failure:
        hint = "--listen with another port (0: any)" if port else ""
        why = failure.strerror or str(failure)
        raise ArgusError(f"cannot listen on {address}:{port}: {why}", hint, EXIT_UNAVAILABLE) from None
    with bound:
        yield bound


def _prepared(
    store: Store, token: str, loopback: bool, certificate: str | None, key: str | None
) -> Callable[[socket.socket], int]:
    """What answers on a socket until a signal comes, and returns the exit code.

    Raises:
        ArgusError: The certificate cannot be used.
    """
    import ssl

    import uvicorn

    from argus.report.server.access import Access
    from argus.report.server.app import make_app
    from argus.report.server.connections import Connection
    from argus.report.server.front_end import answers_of, front_end

    if privileges.own_process:
        # Rows are the engine's to read; whatever goes wrong here has no rights beyond its user's.
        with contextlib.suppress(OSError):
            privileges.keep(())
    app = make_app(answers_of(store), Access(token, loopback), front_end())
    try:
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, date_header=False, lifespan="off", ws="none",
            http=Connection, limit_concurrency=_CONNECTIONS, timeout_keep_alive=30,
            h11_max_incomplete_event_size=_HEAD_BYTES, timeout_graceful_shutdown=1, ssl_certfile=certificate,
            ssl_keyfile=key,
        )  # fmt: skip
        config.load()
    except (OSError, ssl.SSLError) as failure:
        raise ArgusError(f"the certificate cannot be used: {failure}", "", EXIT_UNAVAILABLE) from None

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Any:
            # Its own way raises the signal again once all is closed; argus's handlers have the exit code.
            def end(number: int, _: object) -> None:
                self.should_exit = self.force_exit = True
                ended.append(number)

            before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    ended: list[int] = []

    def run(bound: socket.socket) -> int:
        Server(config).run(sockets=[bound])
        return 128 + ended[0] if ended else 0

    return run
