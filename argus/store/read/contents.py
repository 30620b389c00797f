"""Whether rows of no host are what their number says, which is a hash of what they hold: kernels and stacks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from argus.model.stacks import Frame, Stack

_AT_ONCE = 256
_NO_FRAME = Frame("", "")


def numbered_by_content(table: str, rows: pa.Table) -> bool:
    """Whether the number of each row is the hash of its content, and what follows from the content does. Of other
    tables than ``HASHED`` nothing is known: True.

    Args:
        table: Their table.
        rows: All its columns but optional ones.
    """
    fits = HASHED.get(table)
    return fits is None or all(
        fits(row)
        for first in range(0, rows.num_rows, _AT_ONCE)
        for row in rows.slice(first, _AT_ONCE).to_pylist()
    )  # fmt: skip


def _is_kernel(row: Mapping[str, Any]) -> bool:
    """As ``argus.compress.kernels.kernel_id`` numbers kernels. The name in full is not part of it."""
    if None in row["grid"] or None in row["block"]:
        return False
    text = f"{row['kernel']}\0{row['stream']}\0{tuple(row['grid'])}\0{tuple(row['block'])}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return bool(row["kernel_id"] == int.from_bytes(digest, "little"))


def _is_stack(row: Mapping[str, Any]) -> bool:
    lists = [row[name] for name in ("kinds", "functions", "files", "lines")]
    if len({len(each) for each in lists}) > 1 or any(None in each for each in lists):
        return False
    frames = tuple(Frame(*each) for each in zip(*lists, strict=True))
    stack = Stack(frames, row["python"], row["native"])
    leaf, python = frames[-1] if frames else _NO_FRAME, stack.deepest_python or _NO_FRAME
    follows = {
        "stack_id": stack.id, "depth": min(len(frames), 2**16 - 1),
        "leaf_kind": leaf.kind, "leaf_function": leaf.function, "leaf_file": leaf.file,
        "python_function": python.function, "python_file": python.file, "python_line": python.line,
    }  # fmt: skip
    return all(row[name] == value for name, value in follows.items())


HASHED: dict[str, Callable[[Mapping[str, Any]], bool]] = {"kernel_groups": _is_kernel, "stacks": _is_stack}
"""Tables whose rows are numbered by what they hold, and of each the test of a row."""
