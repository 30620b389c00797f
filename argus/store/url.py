"""Store URLs: chdb, clickhouse and spool."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit, urlunsplit

from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.system import files, secrets


def default_url() -> str:
    """The store used where neither ``--store`` nor ``ARGUS_STORE`` names one.

    Raises:
        ArgusError: There is no home to have it in.
    """
    if os.geteuid() == 0:
        return ROOTS_STORE
    home = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    if not home.startswith("/"):
        raise ArgusError("no store is named, and this user has no home", "Name one: --store chdb:///folder", EXIT_USAGE)
    return "chdb://" + re.sub("[%?#]", lambda found: quote(found.group()), home) + "/argus"


@dataclass
class Target:
    """A parsed store URL."""

    url: str
    """The URL as shown to people; holds no password."""
    path: Path | None = None
    """Folder of an embedded store; None for a server or a spool."""
    spool: Path | None = None
    """Folder of a spool; None for a store that can be queried."""
    host: str = ""
    port: int = 0
    user: str = "default"
    database: str = "default"
    secure: bool = False
    options: dict[str, str] = field(default_factory=dict)


def parse_url(url: str | None = None) -> Target:
    """Parses a store URL: the argument, else ``ARGUS_STORE``, else the default.

    Raises:
        ArgusError: The URL is malformed, of an unknown kind, or holds a password.
    """
    url = url or os.environ.get("ARGUS_STORE") or default_url()
    try:
        parts = urlsplit(url)
        password = parts.password
    except ValueError as wrong:
        raise ArgusError(f"bad store URL: {wrong}", _URL_HINT, EXIT_USAGE) from None
    try:
        port = parts.port
    except ValueError:
        # Not quoted: what stands there may be a part of a password that has a slash in it.
        raise ArgusError("bad store URL: the port is no number up to 65535", _URL_HINT, EXIT_USAGE) from None
    if password is not None or "password" in parse_qs(parts.query):
        raise ArgusError(
            "the store URL holds a password, which every user of the machine can read in the process list",
            "Take it out, and put it in ARGUS_STORE_PASSWORD or in a file that ARGUS_STORE_PASSWORD_FILE names",
            EXIT_USAGE,
        )
    if parts.scheme in ("chdb", "spool"):
        path = unquote(parts.path)
        if parts.netloc or not path.startswith("/") or path == "/":
            example = f"{parts.scheme}:///var/lib/argus"
            raise ArgusError(f"'{url}' names no folder", f"Write three slashes: {example}", EXIT_USAGE)
        if parts.query or parts.fragment:
            what = "an embedded store" if parts.scheme == "chdb" else "a spool"
            raise ArgusError(f"'{url}' has options, but {what} takes none", _URL_HINT, EXIT_USAGE)
        folder = _folder(path)
        if parts.scheme == "chdb" and "?" in str(folder):  # where chdb takes the rest for settings
            raise ArgusError(
                f"the folder of an embedded store may have no '?' in its name: {folder}", _URL_HINT, EXIT_USAGE
            )
        return Target(url=url, path=folder) if parts.scheme == "chdb" else Target(url=url, spool=folder)
    if parts.scheme == "clickhouse":
        options = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if unknown := set(options) - {"secure", "verify", "ca_cert"}:
            raise ArgusError(
                f"unknown option '{sorted(unknown)[0]}' in the store URL", "Known: secure, verify, ca_cert", EXIT_USAGE
            )
        if not parts.hostname:
            raise ArgusError(f"'{url}' names no host", _URL_HINT, EXIT_USAGE)
        database = unquote(parts.path.strip("/")) or "default"
        if "/" in database:
            raise ArgusError(f"'{url}' names no database", _URL_HINT, EXIT_USAGE)
        secure = truth("secure", options.get("secure", "true" if port in (443, 8443) else "false"))
        return Target(
            url=url,
            host=parts.hostname,
            port=port or (8443 if secure else 8123),
            user=unquote(parts.username or "default"),
            database=database,
            secure=secure,
            options=options,
        )
    raise ArgusError(f"unknown kind of store in '{urlunsplit(parts._replace(query=''))}'", _URL_HINT, EXIT_USAGE)


def _folder(path: str) -> Path:
    """The folder of a store, without links.

    Raises:
        ArgusError: Root runs this, and a user could choose which of root's folders it is. Who called sudo, and
            who owns Argus's own code, is root.
    """
    if os.geteuid() == 0:
        owners = files.counted_as_root(__file__)
        found = None
        with contextlib.suppress(OSError):  # whoever opens it says what is wrong
            found = files.changeable(Path(path), owners, only_where=True)
        if found is not None:
            raise ArgusError(
                f"the store's folder {path} is not used: others choose what it is: {found[0]}: {found[1]}",
                "Name a folder in one that only root may change: --store chdb:///var/lib/argus",
                EXIT_UNAVAILABLE,
            )
    return Path(os.path.realpath(path))


_URL_HINT = "Use chdb:///folder, clickhouse://user@host:8443/database?secure=true or spool:///folder"


MAX_SECRET_BYTES = 4096
"""Of a file with a password."""


def truth(name: str, value: str) -> bool:
    if value.lower() in ("true", "1", "yes", "on", ""):
        return True
    if value.lower() in ("false", "0", "no", "off"):
        return False
    raise ArgusError(f"'{value}' is no value for '{name}' in the store URL", "Use true or false", EXIT_USAGE)


def password_of_environment() -> str:
    if (password := secrets.password()) is not None:
        return password
    if name := os.environ.get("ARGUS_STORE_PASSWORD_FILE"):
        try:
            return files.read_secret(Path(name), MAX_SECRET_BYTES)[0].decode().rstrip("\r\n")
        except (OSError, ValueError) as failure:
            reason = failure.strerror if isinstance(failure, OSError) else "it is no text in UTF-8"
            raise ArgusError(
                f"cannot read the password file '{name}': {reason}", "See ARGUS_STORE_PASSWORD_FILE", EXIT_UNAVAILABLE
            ) from None
    return ""


def clear_text_warning(url: str) -> str:
    """What to warn of where the password for a store would go over the network unencrypted; empty: nothing."""
    try:
        target = parse_url(url)
    except ArgusError:
        return ""  # whoever opens it says what is wrong
    local = target.host in ("localhost", "::1") or target.host.startswith("127.")
    has_password = secrets.password() or os.environ.get("ARGUS_STORE_PASSWORD_FILE")
    if not target.host or target.secure or local or not has_password:
        return ""
    where = f"{target.host}:{target.port}"
    return f"the password and all rows go to {where} unencrypted: write clickhouse://…:8443/…?secure=true"


ROOTS_STORE = "chdb:///var/lib/argus"
