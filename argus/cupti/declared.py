"""What cupti-python declares: numbers and layouts. Another process reads them, once: they are kept on disk.

cupti-python's import takes 35 MB, which a tracer would never get back, and runs ldconfig.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from argus.system import child, disk_cache

_TIME_LIMIT_S = 60
_KIND = "cupti"
_KEPT = 4
"""Answers that are kept: of so many versions. Each has some 20 KB."""


@dataclass(frozen=True)
class Declared:
    """Numbers are those of CUPTI's headers.

    Attributes:
        kinds: By name, without CUPTI_ACTIVITY_KIND_.
        dtypes: By generation of record, of those that the installed cupti-python knows.
        runtime_calls: Callback ids, of the chosen calls.
        driver_calls: The same.
        zeroed_out_buffer: CUPTI_ACTIVITY_ATTR_ZEROED_OUT_BUFFER.
        thread_object: CUPTI_ACTIVITY_OBJECT_THREAD.
    """

    kinds: dict[str, int]
    dtypes: dict[str, np.dtype[np.void]]
    runtime_calls: list[int]
    driver_calls: list[int]
    zeroed_out_buffer: int
    thread_object: int


def ask(generations: Sequence[str], runtime_calls: str, driver_calls: str) -> Declared:
    """What the installed cupti-python declares.

    Args:
        generations: Of records.
        runtime_calls: Pattern of the calls of the runtime that are wanted.
        driver_calls: The same of the driver.

    Raises:
        ChildError: It is not installed, or does not load.
    """
    wanted = {"generations": list(generations), "runtime_calls": runtime_calls, "driver_calls": driver_calls}
    where = disk_cache.folder(_KIND)
    path = None if where is None else where / f"{_key(wanted)}.json"
    if path is not None and (body := disk_cache.read(path)) is not None:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # not what was kept: it is asked for again
            return _understood(json.loads(body))
    found = child.ask("argus.cupti.declared", wanted, _TIME_LIMIT_S)
    if path is not None:
        disk_cache.keep(path, json.dumps(found).encode(), _KEPT)
    return _understood(found)


def _key(wanted: dict[str, Any]) -> str:
    """A name for all that an answer depends on: what is asked, and the files of cupti-python."""
    seen = hashlib.sha256(json.dumps([sys.byteorder, np.__version__, wanted], sort_keys=True).encode())
    package = importlib.util.find_spec("cupti")
    for folder in (package and package.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*")):
            status = path.stat()
            seen.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return seen.hexdigest()[:32]


def _understood(found: dict[str, Any]) -> Declared:
    return Declared(**{**found, "dtypes": {name: _dtype(plain) for name, plain in found["dtypes"].items()}})


def _answer(wanted: dict[str, Any]) -> dict[str, Any]:
    from cupti import cupti

    known = {name: getattr(cupti, f"activity_{name}_dtype", None) for name in wanted["generations"]}
    return {
        "kinds": {one.name: int(one) for one in cupti.ActivityKind},
        "dtypes": {name: _plain(np.dtype(dtype)) for name, dtype in known.items() if dtype is not None},
        "runtime_calls": _callbacks(cupti.runtime_api_trace_cbid, wanted["runtime_calls"]),
        "driver_calls": _callbacks(cupti.driver_api_trace_cbid, wanted["driver_calls"]),
        "zeroed_out_buffer": int(cupti.ActivityAttribute.ATTR_ZEROED_OUT_BUFFER),
        "thread_object": int(cupti.ActivityObjectKind.THREAD),
    }


def _callbacks(ids: Iterable[Any], wanted: str) -> list[int]:
    return sorted(int(one) for one in ids if re.fullmatch(wanted, one.name))


def _plain(dtype: np.dtype[Any]) -> Any:
    """A dtype as JSON has it: offsets and size included, of records in records, too."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _plain(base), "shape": list(shape)}
    if dtype.fields is None:
        return dtype.str
    names = list(dtype.names or ())
    formats = [_plain(dtype.fields[name][0]) for name in names]
    offsets = [int(dtype.fields[name][1]) for name in names]
    return {"names": names, "formats": formats, "offsets": offsets, "itemsize": dtype.itemsize}


def _dtype(plain: Any) -> np.dtype[Any]:
    described: Any = plain
    if isinstance(plain, dict):
        if "base" in plain:
            described = (_dtype(plain["base"]), tuple(plain["shape"]))
        else:
            described = {**plain, "formats": [_dtype(one) for one in plain["formats"]]}
    made: np.dtype[Any] = np.dtype(described)
    return made


if __name__ == "__main__":
    raise SystemExit(child.serve(_answer))
