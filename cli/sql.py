"""``argus sql``: query everything Argus stored."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import click

from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.units import seconds
from argus.store.open import Store, open_store
from argus.store.read.render import FORMATS, MAX_CELL, run_statement, table_lines
from argus.store.read.status import describe_table, list_tables
from argus.store.reader import query_columns
from argus.store.statements import is_complete, split_statements
from argus.system import files

from . import interrupt
from .options import Span, format_option, store_option

_HELP = r"""\d or .tables   tables and views, with comments and rows
\d TABLE        columns of a table, with types and comments
\q or Ctrl-D    leave
Ctrl-C          drop the line, or end a running query
A query ends with a semicolon and may span lines. TAB completes; arrow keys bring back earlier queries."""

_KEYWORDS = re.findall(
    r"\w+",
    "ALL AND ANY ARRAY AS ASC ASOF BETWEEN BY CASE CAST COUNT DESC DESCRIBE DISTINCT ELSE END EXISTS "
    "EXPLAIN FINAL FROM GROUP HAVING IN INNER INTERVAL IS JOIN LEFT LIKE LIMIT NOT NULL OFFSET ON OR "
    "ORDER OVER PARTITION PREWHERE QUALIFY RIGHT SELECT SETTINGS SHOW TABLES THEN UNION USING WHEN WHERE "
    "WINDOW WITH arrayJoin avg countIf groupArray max median min quantile quantiles round sum sumIf "
    "toDateTime uniq uniqExact",
)


class _Timeout(Span):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return 0.0 if value == "0" else super().convert(value, param, ctx)


HISTORY_LINES = 10_000
_HISTORY, _HISTORY_BYTES = "sql_history", 16 << 20
_LIBEDIT = "_HiStOrY_V2_"
"""First line of a file that libedit wrote."""
LATEST = "latest_"
"""How the views of the run traced last begin (schemas/latest.sql)."""


@click.command()
@click.argument("sql", required=False)
@store_option
@format_option(FORMATS, default="table")
@click.option("--param", "params", metavar="NAME=VALUE", multiple=True, help="Value for {NAME:Type} in the query.")
@click.option("--tables", is_flag=True, help="List the tables and views.")
@click.option("--describe", metavar="TABLE", help="List a table's columns.")
@click.option("--max-rows", default=1000, show_default=True, help="Most rows of a table that are shown; 0: all.")
@click.option(
    "--timeout",
    type=_Timeout(),
    default=300.0,
    show_default=True,
    metavar="SPAN",
    help="Longest a query may run; 0: any.",
)
@click.option("--write", "allow_writes", is_flag=True, help="Allow statements that change data. Without it, none can.")
def command(
    sql: str | None,
    store_url: str | None,
    output_format: str,
    params: tuple[str, ...],
    tables: bool,
    describe: str | None,
    max_rows: int,
    timeout: float,
    allow_writes: bool,
) -> None:
    """Query everything Argus stored, in ClickHouse's SQL.

    Without SQL: a prompt, or the queries piped in. Tables and examples are in docs/sql.md.

    A table has the rows of every job and run. Its view latest_TABLE has those of the run traced last.

    \b
      argus sql --tables
      argus sql "SELECT rank, avg(duration_ns) AS mean_ns FROM latest_iterations GROUP BY rank"
      argus sql --format csv "SELECT * FROM latest_collectives" > collectives.csv
      argus sql --param job=llama "SELECT * FROM newest_runs WHERE job = {job:String}"
      argus sql --format jsonl - < query.sql | jq .
    """
    values = _parameters(params)
    with open_store(store_url, create=False) as store:

        def run(statement: str) -> tuple[int, int]:
            terminal = sys.stdout.isatty()
            return run_statement(
                store,
                statement,
                sys.stdout.write,
                output_format=output_format,
                params=values,
                allow_writes=allow_writes,
                max_rows=max_rows,
                max_cell=MAX_CELL if terminal else 0,
                timeout_s=timeout,
            )

        if tables:
            _show_tables(store)
        elif describe:
            _show_columns(store, describe)
        elif sql is None and sys.stdin.isatty():
            _interactive(store, run)
        else:
            text = sys.stdin.read() if sql in (None, "-") else sql or ""
            # Bytes that the locale could not decode: SQL is UTF-8 whatever the locale.
            text = os.fsencode(text).decode("utf-8", errors="replace")
            statements = split_statements(text)
            if not statements:
                raise ArgusError("there is no query", 'Try: argus sql "SHOW TABLES"', EXIT_USAGE)
            for statement in statements:
                if statement.startswith(("\\d", ".tables")):
                    _meta(store, statement)
                else:
                    _report_cut(run(statement)[1], max_rows)


def _parameters(params: tuple[str, ...]) -> dict[str, str]:
    values = {}
    for param in params:
        name, equals, value = param.partition("=")
        if not equals or not name.isidentifier():
            raise ArgusError(f"'{param}' is no parameter", "Write --param NAME=VALUE", EXIT_USAGE)
        values[name] = value
    return values


def _report_cut(left_out: int, max_rows: int) -> None:
    if left_out:
        sys.stdout.flush()
        click.echo(f"{left_out:,} more rows were cut after {max_rows:,}: see --max-rows and --format", err=True)


def _show_tables(store: Store) -> None:
    tables = list_tables(store)
    latest = {LATEST + t.name for t in tables} & {t.name for t in tables}
    rows = [[t.name, "view" if t.rows is None else f"{t.rows:,}", t.comment] for t in tables if t.name not in latest]
    if latest:
        rows.append([f"{LATEST}NAME", "view", f"NAME of the run traced last, each row once: of {len(latest)} of these"])
    for line in table_lines(["table", "rows", "comment"], rows, [False, True, False]):
        click.echo(line)


def _show_columns(store: Store, table: str) -> None:
    rows = [list(column) for column in describe_table(store, table)]
    for line in table_lines(["column", "type", "comment"], rows, [False, False, False]):
        click.echo(line)


def _meta(store: Store, line: str) -> None:
    verb, _, name = line.strip().rstrip(";").strip().partition(" ")
    if verb in ("\\d", "\\dt", ".tables", ".schema") and name:
        _show_columns(store, name.strip())
    elif verb in ("\\d", "\\dt", ".tables"):
        _show_tables(store)
    else:
        click.echo(_HELP)


def _interactive(store: Store, run: Any) -> None:
    with contextlib.suppress(ImportError), _line_editing(store):
        _prompt(store, run)


def _prompt(store: Store, run: Any) -> None:
    click.echo(f"{store.url}  (\\? helps, \\d lists tables, \\q leaves)")
    interrupt.interrupt_plainly()  # Ctrl-C ends a query, not the prompt
    text = ""
    while True:
        try:
            line = input("argus> " if not text else "   ... ")
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()
            text = ""
            continue
        word = line.strip().rstrip(";").strip()
        if not text and word in ("\\q", "quit", "exit"):
            return
        try:
            if not text and word.startswith(("\\", ".")):
                _meta(store, word)
                continue
            text += line + "\n"
            if not is_complete(text):
                text = text if text.strip() else ""
                continue
            complete, text = text, ""
            for statement in split_statements(complete):
                start = time.monotonic()
                rows, left_out = run(statement)
                note = f", {left_out:,} more cut (--max-rows)" if left_out else ""
                click.echo(f"({rows:,} rows{note}, {seconds(time.monotonic() - start)})")
        except ArgusError as failure:
            click.echo(f"{failure.message}" + (f"\n{failure.hint}" if failure.hint else ""), err=True)
        except KeyboardInterrupt:
            # The engine ends a query whose client hangs up.
            store.close()
            click.echo("stopped")


@contextlib.contextmanager
def _line_editing(store: Store) -> Any:
    """Arrow keys, history and completion, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    for line in read_history():
        readline.add_history(line)
    names = _KEYWORDS + _names(store)
    matches: list[str] = []

    def complete(start: str, index: int) -> str | None:
        if index == 0:
            matches[:] = completions(start, names)
        return matches[index] if index < len(matches) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n`~!@#$%^&*()-=+[{]}|;:'\",<>/?")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        count = readline.get_current_history_length()
        write_history(
            [readline.get_history_item(place) or "" for place in range(max(count - HISTORY_LINES, 0) + 1, count + 1)]
        )


def _history_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "argus"


def read_history() -> list[str]:
    """The lines that were typed at earlier prompts, oldest first; none where others may change the file."""
    with contextlib.suppress(OSError), files.opened(_history_folder()) as folder:
        text = files.read_at(folder, _HISTORY, _HISTORY_BYTES).decode(errors="replace")
        return [line for line in text.splitlines() if line and line != _LIBEDIT][-HISTORY_LINES:]
    return []


def write_history(lines: list[str]) -> None:
    """Keeps lines for the next prompt, in a file for its owner alone."""
    with contextlib.suppress(OSError), files.opened(_history_folder(), create=True) as folder:
        text = "".join(f"{line}\n" for line in lines if line)
        files.write_at(folder, _HISTORY, text.encode(errors="replace"))


def completions(start: str, names: list[str]) -> list[str]:
    """The names that begin with ``start``, whatever its case; a keyword takes the case it was begun in."""
    matching = {name for name in names if name.lower().startswith(start.lower())}
    return sorted(name.lower() if name.isupper() and start.islower() else name for name in matching)


def _names(store: Store) -> list[str]:
    columns = query_columns(
        store, "SELECT DISTINCT arrayJoin([table, name]) AS name FROM system.columns WHERE database = currentDatabase()"
    )
    return [str(name) for name in columns["name"]]
