"""What a piece of SQL is, without running it."""

from __future__ import annotations

import itertools
import re

from argus.model.errors import EXIT_FAILURE, EXIT_USAGE, ArgusError

# In this order: a comment mark inside a string is text, and a quote inside a comment is too.
_TOKEN = re.compile(
    r"""--[^\n]*|\#[ !][^\n]*|/\*.*?(?:\*/|\Z)"""
    r"""|'(?:[^'\\]|\\.|'')*(?:'|\Z)|"(?:[^"\\]|\\.|"")*(?:"|\Z)|`(?:[^`\\]|\\.|``)*(?:`|\Z)"""
    r"""|\$(\w*)\$.*?(?:\$\1\$|\Z)|;|[A-Za-z_]\w*|[^\-/'"`;\#$A-Za-z_]+|.""",
    re.DOTALL,
)
_COMMENT = ("--", "/*", "# ", "#!")


def tokens(text: str) -> list[str]:
    """SQL in pieces that add up to it: words, strings, quoted names, comments, semicolons, and the rest."""
    return [match.group(0) for match in _TOKEN.finditer(text)]


def split_statements(text: str) -> list[str]:
    """Splits SQL at its semicolons, except those in strings, quoted names and comments; comments are dropped."""
    statements: list[str] = []
    current: list[str] = []
    for token in tokens(text):
        if token == ";":
            statements.append("".join(current).strip())
            current = []
        else:
            current.append(" " if token.startswith(_COMMENT) else token)
    statements.append("".join(current).strip())
    return [statement for statement in statements if statement]


def is_complete(text: str) -> bool:
    """Whether the last statement has been ended with a semicolon (one outside strings and comments)."""
    meant = [token for token in tokens(text) if not token.startswith(_COMMENT) and token.strip()]
    return bool(meant) and meant[-1] == ";"


def words(text: str) -> list[str]:
    """The words of SQL in upper case: neither strings, quoted names nor comments."""
    return [token.upper() for token in tokens(text) if re.fullmatch(r"[A-Za-z_]\w*", token)]


_CHANGES = set(
    re.findall(
        r"\w+",
        "ALTER ATTACH BACKUP BEGIN CHECK COMMIT COPY CREATE DELETE DETACH DROP EXCHANGE EXECUTE GRANT INSERT KILL MOVE "
        "OPTIMIZE PARALLEL RENAME REPLACE RESTORE REVOKE ROLLBACK SET SYSTEM TRUNCATE UNDROP UPDATE USE WATCH",
    )
)
_READS = {"SELECT", "WITH", "SHOW", "DESCRIBE", "DESC", "EXISTS", "EXPLAIN", "FROM"}


def returns_rows(statement: str) -> bool:
    """Whether a statement is one that returns rows and changes nothing."""
    found = words(statement)
    return bool(found) and found[0] in _READS and not _writes(found)


def _writes(found: list[str]) -> str:
    # ClickHouse's own read-only mode lets these through in chdb, and they write files.
    pairs = set(itertools.pairwise(found))
    if ("INTO", "OUTFILE") in pairs:
        return "INTO OUTFILE"
    if {("INSERT", "INTO"), ("INSERT", "FUNCTION"), ("INSERT", "TABLE")} & pairs:
        return "INSERT"
    return ""


def check_read_only(statement: str) -> None:
    """Refuses a statement that may change something.

    It guards against slips. The engine is asked to be read-only besides (``readonly=2``).

    Raises:
        ArgusError: It does more than read.
    """
    found = words(statement)
    wrong = _writes(found)
    if wrong == "INTO OUTFILE":
        raise ArgusError("INTO OUTFILE is refused: queries only read", "Use --format csv > FILE", EXIT_FAILURE)
    if not wrong and found and found[0] in _READS:
        return
    wrong = wrong or (found or [statement[:20]])[0]
    if wrong in _CHANGES:
        raise ArgusError(f"{wrong} is refused: queries only read", "Allow changes with --write", EXIT_FAILURE)
    raise ArgusError(f"no query begins with '{wrong}'", f"Begin with one of {', '.join(sorted(_READS))}", EXIT_FAILURE)


def check_no_format(statement: str) -> None:
    """Refuses a FORMAT clause, which would contradict the output format asked for.

    Raises:
        ArgusError: There is one.
    """
    if re.search(r"\bFORMAT\s+\w+\s*(SETTINGS\b.*)?\Z", _plain(statement), re.IGNORECASE | re.DOTALL):
        raise ArgusError("the query has a FORMAT clause", "Leave it out and use --format", EXIT_USAGE)


def _plain(statement: str) -> str:
    meant = (token for token in tokens(statement) if not token.startswith(_COMMENT))
    return "".join("''" if token[0] in "'\"`$" else token for token in meant).strip()
