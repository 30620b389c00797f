"""Failures of a store: which of them may pass if the request is repeated, and the error that a user reads for each."""

from __future__ import annotations

import re
import shlex

from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.store.url import Target

BOUND_REACHED = "the store has reached its bound (ARGUS_STORE_MAX) of"

_PASSING = {159, 201, 202, 203, 209, 210, 225, 236, 241, 242, 243, 252, 279, 319, 394, 999}
"""ClickHouse's codes of failures that may pass by themselves: timeouts, memory limits, quotas, too many queries or
parts, no space, trouble with Keeper or network, a read-only replica, a shutdown."""
_DISK = {74, 75, 76, 88, 107, 1000, 1001}
"""Codes of trouble with the store's own files: a disk that failed and is read-only since, a folder that is gone, wrong
rights: CANNOT_OPEN_FILE and its like, or exceptions of C++ libraries (POCO_EXCEPTION, STD_EXCEPTION)."""
READONLY = 164
_FORBIDDEN = {READONLY, 497}
"""Codes of requests for which this user lacks rights, until somebody grants them: READONLY, ACCESS_DENIED."""
_UNKNOWN_TABLE = 60
_TIMEOUT_EXCEEDED = 159
_UNKNOWN_DATABASE = 81
_NO_SPACE = 243
AUTHENTICATION = {192, 193, 194, 516}


def spool_not_queried(target: Target) -> ArgusError:
    """The error for a spool where something must be read."""
    return ArgusError(
        f"{target.url} is a spool, which cannot be queried: load it first",
        load_command(target),
        EXIT_USAGE,
    )


def load_command(target: Target) -> str:
    """The command that brings a spool's rows into a store."""
    return f"argus store load {shlex.quote(str(target.spool))}"


def disk_full(where: str) -> ArgusError:
    """The error for a store that has no room left."""
    return ArgusError(f"{_DISK_FULL} on the disk of the store {where}", "Free some and try again", EXIT_UNAVAILABLE)


_DISK_FULL = "no space is left"


def is_full(failure: BaseException | None) -> bool:
    """Whether a store has no room left (``disk_full``)."""
    return isinstance(failure, ArgusError) and failure.message.startswith(_DISK_FULL)


_RIGHTS_HINT = "docs/store.md lists the rights that Argus needs"
REACH_HINT = "See whether the server runs and the URL is right (--store, ARGUS_STORE)"


def first_line(text: str) -> str:
    """A ClickHouse error as one useful line: without the driver's preamble, version, stack trace and URL."""
    text = re.sub(r"\s*\(for url [^)]*\)\s*\Z", "", text.strip())
    if (start := text.find("DB::Exception: ")) >= 0:
        text = text[start:]
    text = text.split("Stack trace:")[0]
    text = re.sub(r"(Code: \d+\. )?DB::Exception: ", "", text)
    text = re.sub(r"\s*\(version [^)]*\)+\s*\Z", "", text.strip())
    text = re.sub(r"\s*\(([A-Z][A-Z0-9_]+)\)\s*\Z", r" (\1)", text)
    text = " ".join(text.split())
    return text if len(text) <= 400 else text[:300] + " … " + text[-90:]


def transient(failure: BaseException) -> bool:
    """Whether the same request may succeed later: the store was away, busy or out of room, not wrong."""
    if isinstance(failure, ArgusError):
        return failure.exit_code == EXIT_UNAVAILABLE
    if isinstance(failure, OSError):
        return True
    try:
        from argus.store.driver import Error
    except ImportError:
        return False
    if not isinstance(failure, Error):
        return False
    code = getattr(failure, "code", None)
    if code in _PASSING | _DISK | _FORBIDDEN:
        return True
    return code is None and (_network(failure) or _readonly_setting(failure))


def _network(failure: BaseException) -> bool:
    from urllib3.exceptions import HTTPError

    seen: BaseException | None = failure
    while seen is not None:
        if isinstance(seen, (HTTPError, OSError)):
            return True
        seen = seen.__cause__ or seen.__context__
    # ClickHouse gives each refusal a code: an answer without one comes from a proxy or the network in between.
    return bool(re.search(r"HTTP status \d|onnection|timed out", str(failure)))


def _readonly_setting(failure: BaseException) -> bool:
    """Whether the driver has refused a request since the user may change no settings (profiles with readonly = 1)."""
    return bool(re.search(r"Setting \w+ is readonly", str(failure)))


def code_of(failure: BaseException | None) -> int | None:
    """ClickHouse's code of a failure, or of the one that it was made from; None: it has none."""
    while failure is not None:
        if (code := getattr(failure, "code", None)) is not None:
            return int(code)
        failure = failure.__cause__ or failure.__context__
    return None


def lacks_table(failure: BaseException) -> bool:
    """Whether a request failed since a table is not there."""
    return code_of(failure) == _UNKNOWN_TABLE


def is_forbidden(failure: BaseException | None) -> bool:
    """Whether a store refuses since its user lacks rights: that passes, but not by itself."""
    return isinstance(failure, ArgusError) and failure.hint == _RIGHTS_HINT


_CERTIFICATE = {
    "has expired": ("its certificate has expired", "Renew it; verify=false in the URL believes any, for tests"),
    "not yet valid": ("its certificate is not valid yet", "Compare the clocks of both machines"),
    "mismatch": ("its certificate is for another name", "Write the host in the URL as the certificate has it"),
    "": (
        "its certificate is of an authority that is not trusted here",
        "Name the authority's certificate in the URL: ca_cert=/path/ca.pem",
    ),
}
"""OpenSSL's reasons for rejecting a certificate (X509_verify_cert_error_string), and for each the error and a hint."""


def _reason(failure: BaseException, target: Target) -> tuple[str, str]:
    """Why a server or an embedded engine cannot be reached, and a hint."""
    text = str(failure)
    lowered = text.lower()
    if target.path is not None and "timed out" not in lowered:
        if not target.path.exists():
            return "its folder is gone", "Put it back, or name another store (--store, ARGUS_STORE)"
        return "its engine has ended", "Try again: the next command starts another"
    if "certificate_verify_failed" in lowered:
        what, hint = next(found for phrase, found in _CERTIFICATE.items() if phrase in lowered)
        if what == _CERTIFICATE[""][0] and (file := target.options.get("ca_cert")):
            return f"its certificate is not of the authority in {file}", hint
        return what, hint
    if "wrong version number" in lowered or "record layer failure" in lowered:
        return "TLS was tried on a port that serves plain HTTP; secure=false", REACH_HINT
    ended = ("connection reset", "connection aborted", "remote end closed", "broken pipe")
    if target.host and not target.secure and any(phrase in lowered for phrase in ended):
        return "it ended the connection without an answer", "If the port serves TLS, add to the URL: secure=true"
    for phrase in ("Connection refused", "Name or service not known", "timed out",
                   "Temporary failure in name resolution", "No route to host", "Network is unreachable"):  # fmt: skip
        if phrase.lower() in lowered:
            return phrase.lower(), REACH_HINT
    return first_line(text), REACH_HINT


def explain(failure: Exception, target: Target) -> ArgusError:
    """Turns an exception of clickhouse-connect into one line: what is wrong with the store or the query."""
    code = getattr(failure, "code", None)
    text = first_line(str(failure))
    if code in AUTHENTICATION:
        return ArgusError(
            f"{target.host} refused user '{target.user}'",
            "Set ARGUS_STORE_PASSWORD or ARGUS_STORE_PASSWORD_FILE, and the user in the URL",
            EXIT_UNAVAILABLE,
        )
    if code == _UNKNOWN_DATABASE:
        return ArgusError(
            f"there is no database '{target.database}' on {target.host}",
            f"Create it and its tables: argus store init --store '{target.url}'",
            EXIT_UNAVAILABLE,
        )
    if BOUND_REACHED in text:
        hint = "Remove jobs (argus store rm), keep calls for less long (argus store init --raw-ttl), or raise it"
        return ArgusError(text, hint, EXIT_UNAVAILABLE)
    if code == _NO_SPACE or "No space left" in text:
        return disk_full(target.url)
    if code in _FORBIDDEN or (code is None and _readonly_setting(failure)):
        return ArgusError(text, _RIGHTS_HINT, EXIT_UNAVAILABLE)
    if code is None and transient(failure):
        where = target.url if target.path is not None else f"{target.host}:{target.port}"
        reason, hint = _reason(failure, target)
        return ArgusError(f"cannot reach the store {where}: {reason}", hint, EXIT_UNAVAILABLE)
    # A query that took longer than was allowed is reported as that, not as a store that is away.
    passing = transient(failure) and code != _TIMEOUT_EXCEEDED
    return ArgusError(text, "", EXIT_UNAVAILABLE) if passing else ArgusError(text)
