"""Settings of a site: small TOML files."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.text import printable, shortened
from argus.model.units import binary_size
from argus.system import files

_MAX_SIZE = 1 << 20


def read(file: Path, hint: str, unreadable: str) -> dict[str, Any] | None:
    """The tables of a file; None: there is none.

    Args:
        file: Which.
        hint: What to do about a file that is no TOML.
        unreadable: What to do about one that cannot be read.

    Raises:
        ArgusError: It cannot be read, is no TOML, or has more than a MiB; or root reads it, and others may change it.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        tables: dict[str, Any] = tomllib.loads(files.read_settings(file, _MAX_SIZE).decode())
        return tables
    except FileNotFoundError:
        return None
    except files.Untrusted as failure:
        raise refused(file, failure) from None
    except files.NotRegular:
        raise ArgusError(f"{file} is not a file", "Pipes and devices are not read", EXIT_USAGE) from None
    except OSError as failure:
        if failure.errno == errno.EFBIG:
            raise ArgusError(f"{file} has more than {binary_size(_MAX_SIZE)}", hint, EXIT_USAGE) from None
        raise ArgusError(f"cannot read {file}: {failure.strerror}", unreadable, EXIT_UNAVAILABLE) from None
    except RecursionError:
        raise ArgusError(f"{file} is no TOML: it is nested too deeply", hint, EXIT_USAGE) from None
    except ValueError as failure:  # no TOML, no UTF-8, or a number of thousands of digits
        raise ArgusError(f"{file} is no TOML: {shortened(printable(str(failure)), 200)}", hint, EXIT_USAGE) from None


def refused(file: Path, failure: files.Untrusted) -> ArgusError:
    """What to raise of settings that others could have written."""
    return ArgusError(
        f"root does not read {file}: others may change {failure.filename}: {failure.strerror}",
        failure.fix,
        EXIT_UNAVAILABLE,
    )
