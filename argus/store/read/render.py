"""Query results as text: an aligned table, JSON, CSV or TSV, written as they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from argus.model.errors import ArgusError
from argus.model.text import printable
from argus.model.units import duration
from argus.store.failures import READONLY, first_line
from argus.store.open import LEASE_TIMEOUT_S, Store
from argus.store.statements import check_no_format, check_read_only, returns_rows

FORMATS = ("table", "json", "jsonl", "csv", "tsv")
"""What ``run_statement`` writes."""
MAX_CELL = 100
"""Characters of a cell in a table on a terminal."""

_CLICKHOUSE_FORMAT = {
    "table": "JSONCompactEachRowWithNamesAndTypes",
    "json": "JSONEachRow",
    "jsonl": "JSONEachRow",
    "csv": "CSVWithNames",
    "tsv": "TabSeparatedWithNames",
}
_SETTINGS = {
    # Exact: JSON has no limit on integers, only some of its readers have.
    "output_format_json_quote_64bit_integers": 0,
    "output_format_json_quote_denormals": 0,
    "output_format_json_quote_decimals": 0,
    "format_csv_null_representation": "",
    # An error in the middle of the rows is an error, not text between them.
    "wait_end_of_query": 1,
    # Of rows that are replaced by newer versions (ranks, jobs, features) the newest counts, without FINAL.
    "final": 1,
}


def run_statement(
    store: Store,
    statement: str,
    write: Callable[[str], object],
    *,
    output_format: str = "table",
    params: Mapping[str, Any] | None = None,
    allow_writes: bool = False,
    max_rows: int = 0,
    max_cell: int = 0,
    timeout_s: float = 0,
) -> tuple[int, int]:
    """Runs one statement and writes its result.

    Args:
        store: The store.
        statement: The SQL, without a semicolon.
        write: Takes the text, piece by piece.
        output_format: One of ``FORMATS``.
        params: Values for ``{name:Type}``.
        allow_writes: Whether it may change something.
        max_rows: The most rows of a table; 0: all.
        max_cell: The most characters of a cell in a table; 0: all.
        timeout_s: The longest it may run; 0: any time.

    Returns:
        Rows written, and rows of a table left out.

    Raises:
        ArgusError: The store cannot be reached, or the statement is refused or fails.
    """
    from urllib3.exceptions import HTTPError

    from argus.store.driver import Error

    if not allow_writes:
        check_read_only(statement)
    check_no_format(statement)
    settings: dict[str, Any] = {} if allow_writes else {"readonly": 2}
    if timeout_s:
        settings["max_execution_time"] = timeout_s
    with store.lease(LEASE_TIMEOUT_S) as client:
        try:
            if not returns_rows(statement):
                client.command(statement, parameters=dict(params or {}), settings=_allowed(client, settings))
                return 0, 0
            stream = client.raw_stream(
                statement,
                parameters=dict(params or {}),
                settings=_allowed(client, {**_SETTINGS, **settings}),
                # Not as a clause: errors would quote it, and `SELECT 1 FROM` would read from a table called FORMAT.
                transport_settings={"X-ClickHouse-Format": _CLICKHOUSE_FORMAT[output_format]},
            )
            with stream:
                lines = _lines(stream)
                if output_format == "table":
                    return _write_table(lines, write, max_rows, max_cell)
                if output_format == "json":
                    return _write_json(lines, write), 0
                count = 0
                for line in lines:
                    write(line + "\n")
                    count += 1
                return max(0, count - (output_format != "jsonl")), 0
        except (Error, HTTPError) as failure:
            if not allow_writes and getattr(failure, "code", None) == READONLY:
                # The query's own doing, whatever the user's rights.
                raise ArgusError(first_line(str(failure))) from None
            raise store.explain(failure) from None


def _allowed(client: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that the user may not change. ClickHouse's own profile ``readonly`` lets its users change
    none (``readonly = 1``): they still get answers, in the server's way of writing them, and within its limits."""
    known = client.server_settings
    return {name: value for name, value in settings.items() if name not in known or not known[name].readonly}


def _lines(stream: Any) -> Iterator[str]:
    """Lines without their ends. Only "\\n" ends one: other separators may stand inside a quoted CSV cell."""
    rest = b""
    while chunk := stream.read(1 << 16):
        parts = (rest + chunk).split(b"\n")
        rest = parts.pop()
        for part in parts:
            yield part.decode("utf-8", "replace")
    if rest:
        yield rest.decode("utf-8", "replace")


def _write_json(lines: Iterable[str], write: Callable[[str], object]) -> int:
    count = 0
    for line in lines:
        write(("[\n " if count == 0 else ",\n ") + line)
        count += 1
    write("\n]\n" if count else "[]\n")
    return count


def _write_table(lines: Iterator[str], write: Callable[[str], object], max_rows: int, max_cell: int) -> tuple[int, int]:
    try:
        names: list[str] = json.loads(next(lines))
        types: list[str] = json.loads(next(lines))
    except StopIteration:
        return 0, 0
    rows: list[list[str]] = []
    left_out = 0
    for line in lines:
        if max_rows and len(rows) >= max_rows:
            left_out += 1
            continue
        values = json.loads(line)
        rows.append([_cell(v, n, t, max_cell) for v, n, t in zip(values, names, types, strict=True)])
    for line in table_lines([printable(name) for name in names], rows, [_is_number(t) for t in types]):
        write(line + "\n")
    return len(rows), left_out


def table_lines(names: list[str], rows: list[list[str]], right: list[bool]) -> Iterator[str]:
    """An aligned table of ASCII lines.

    Args:
        names: The header.
        rows: Cells as text.
        right: For each column, whether it is aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        pairs = zip(cells, widths, right, strict=True)
        return "  ".join(cell.rjust(width) if r else cell.ljust(width) for cell, width, r in pairs).rstrip()

    return chain([line(names), "  ".join("-" * width for width in widths)], map(line, rows))


def _is_number(kind: str) -> bool:
    return bool(re.match(r"(Nullable\(|LowCardinality\()*(U?Int|Float|Decimal|BFloat)", kind))


def _cell(value: Any, name: str, kind: str, max_cell: int) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)) and name.endswith("_ns") and _is_number(kind):
        return "-1" if value == -1 else duration(value)  # -1: not measured
    if isinstance(value, float):
        text = repr(value)
        return text if len(text) <= 12 else f"{value:.9g}"
    text = printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text if not max_cell or len(text) <= max_cell else text[: max_cell - 3] + "..."
