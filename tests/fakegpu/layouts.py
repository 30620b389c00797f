#!/usr/bin/env python3
"""Writes the header from which the fake libcupti is built: where each field of a CUPTI record lies, by version.

    layouts.py > cupti_layouts.h

The offsets are those of cupti-python's numpy dtypes, the ids of API functions those of its enums, both asked at build
time; nothing of either is kept here. Exits with 3 where cupti-python is not installed.
"""

from __future__ import annotations

import re
import sys
from typing import Any

# What each wheel of cupti-python decodes, found by importing it: 12.6.0 has Kernel9, Memcpy5, Synchronization; 12.8.0
# Kernel9, Memcpy6, Synchronization2; 13.0.1 Kernel10; 13.2.0 Kernel11; 13.3.1 Kernel12; 13.4.0 Kernel13, Memcpy7,
# Memset5. All have Overhead3, Jit2 and MemcpyPtoP4. What cuptiGetVersion of NVIDIA's libraries says: 22 in 12.4.127, 24
# in 12.6.80, 26 in 12.8.90, 28 in 12.9.79, 130001 in 13.0.85. Nobody was asked about 25: it is taken as the older kind.
_OLD = {
    "KERNEL": "kernel9",
    "MEMCPY": "memcpy5",
    "MEMCPY2": "memcpy_pto_p4",
    "MEMSET": "memset4",
    "API": "api",
    "SYNCHRONIZATION": "synchronization",
    "OVERHEAD": "overhead3",
    "JIT": "jit2",
    "MODULE": "module",
}
_12_8 = {**_OLD, "MEMCPY": "memcpy6", "SYNCHRONIZATION": "synchronization2"}
GENERATIONS = {
    "CUPTI 12.4 to 12.6": (22, 25, _OLD),
    "CUPTI 12.8, 12.9": (26, 99_999, _12_8),
    "CUPTI 13.0": (130_000, 130_099, {**_12_8, "KERNEL": "kernel10"}),
    "CUPTI 13.1, 13.2": (130_100, 130_299, {**_12_8, "KERNEL": "kernel11"}),
    "CUPTI 13.3": (130_300, 130_399, {**_12_8, "KERNEL": "kernel12"}),
    "CUPTI 13.4, 13.5": (130_400, 130_599, {**_12_8, "KERNEL": "kernel13", "MEMCPY": "memcpy7", "MEMSET": "memset5"}),
}

_TIMES = ["kind", "start", "end", "correlation_id"]
_DEVICE = [*_TIMES, "device_id", "context_id", "stream_id", "channel_id", "channel_type", "graph_id", "graph_node_id"]
_DEVICE += ["source_graph_id", "source_graph_node_id"]
_COPY = [*_DEVICE, "bytes", "copy_kind", "src_kind", "dst_kind", "runtime_correlation_id", "copy_count"]
_COPY += ["src_device_id", "dst_device_id", "src_context_id", "dst_context_id"]
_KERNEL = [f"{what}_{axis}" for what in ("grid", "block") for axis in "xyz"]
_KERNEL += ["completed", "static_shared_memory", "dynamic_shared_memory", "grid_id", "name", "launch_type"]
_KERNEL += ["registers_per_thread"]
_CALLBACK = ["callback_site", "function_name", "function_params", "function_return_value", "symbol_name", "context"]
_CALLBACK += ["context_uid", "correlation_data", "correlation_id"]
FIELDS: dict[str, list[str]] = {
    "KERNEL": [*_DEVICE, *_KERNEL],
    "MEMCPY": _COPY,
    "MEMCPY2": _COPY,
    "MEMSET": [*_DEVICE, "bytes", "memory_kind"],
    "API": [*_TIMES, "cbid", "process_id", "thread_id", "return_value"],
    "SYNCHRONIZATION": [*_TIMES, "type", "context_id", "stream_id", "cuda_event_id", "return_value"],
    "OVERHEAD": [*_TIMES, "overhead_kind", "object_kind", "object_id"],
    "JIT": [*_TIMES, "jit_entry_type", "jit_operation_type", "device_id", "process_id", "thread_id"],
    "MODULE": ["kind", "context_id", "id", "cubin_size", "cubin"],
    "CALLBACK": _CALLBACK,
}


def dtype_of(cupti: Any, name: str) -> Any:
    return getattr(cupti, "callback_data_dtype" if name == "callback" else f"activity_{name}_dtype")


def _layout(cupti: Any, record: str, name: str) -> str:
    fields = dtype_of(cupti, name).fields
    places = [(field, fields[field]) for field in FIELDS[record] if field in fields]
    text = ", ".join(f"[F_{field.upper()}] = {{{place[1]}, {place[0].itemsize}}}" for field, place in places)
    return f"[R_{record}] = {{{dtype_of(cupti, name).itemsize}, {{{text}}}}}"


def function_ids(enum: Any, *, versioned: bool) -> dict[str, int]:
    """Ids by function name; of a runtime function that changed its signature, the newest: cudaMalloc_v3020."""
    ids: dict[str, int] = {}
    for member in sorted(enum, key=int):
        name = re.sub(r"_v\d+$", "", member.name) if versioned else member.name
        if name.startswith("cu"):
            ids[name] = int(member)
    return ids


def header(cupti: Any) -> str:
    lines = ["/* Made by layouts.py from cupti-python's dtypes and enums. */"]
    fields = sorted({field for names in FIELDS.values() for field in names})
    lines += ["#ifndef CUPTI_TABLES"]
    lines += [f"enum field {{ {', '.join('F_' + field.upper() for field in fields)}, FIELD_COUNT }};"]
    lines += [f"enum record {{ {', '.join('R_' + record for record in FIELDS)}, RECORD_COUNT }};"]
    lines += ["#else", "static const struct generation generations[] = {"]
    for what, (first, last, names) in GENERATIONS.items():
        lines += [f"    /* {what} */ {{{first}, {last}, {{"]
        lines += [f"        {_layout(cupti, record, name)}," for record, name in names.items()]
        lines += [f"        {_layout(cupti, 'CALLBACK', 'callback')},", "    }},"]
    lines += ["};"]
    for table, enum in (("driver_ids", cupti.DriverApiTraceCbid), ("runtime_ids", cupti.RuntimeApiTraceCbid)):
        ids = function_ids(enum, versioned=table == "runtime_ids")
        lines += [f"static const struct function_id {table}[] = {{ /* sorted by name */"]
        lines += [f'    {{"{name}", {ids[name]}}},' for name in sorted(ids)]
        lines += ["};"]
    return "\n".join([*lines, "#endif", ""])


def main() -> int:
    try:
        from cupti import cupti
    except ImportError as error:
        print(f"no cupti-python for {sys.executable}: {error}", file=sys.stderr)
        return 3
    print(header(cupti), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
