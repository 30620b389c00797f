"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

store_option = click.option(
    "--store",
    "store_url",
    metavar="URL",
    envvar="ARGUS_STORE",
    help="Where the data is: chdb:///folder, or clickhouse://user@host:8443/database?secure=true with the password in "
    "ARGUS_STORE_PASSWORD or ARGUS_STORE_PASSWORD_FILE. Default: $ARGUS_STORE, else a folder of yours.",
)
"""``--store URL``, passed as ``store_url`` (None: the default). Give it to ``argus.store.open.open_store``."""


def format_option(
    choices: Sequence[str] = ("text", "json"), default: str | None = "text"
) -> Callable[[Command], Command]:
    """``--format``, passed as ``output_format``."""
    return click.option(
        "--format",
        "output_format",
        type=click.Choice(list(choices)),
        default=default,
        show_default=default is not None,
        help="How results are printed.",
    )
