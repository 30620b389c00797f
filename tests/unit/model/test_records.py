"""bpf/argus.h, bpf/stacks.h and argus/model/records.py describe the same bytes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from argus.model import calls, records

STRUCTS = {
    "argus_launch": records.LAUNCH,
    "argus_collective": records.COLLECTIVE,
    "argus_control": records.CONTROL,
    "argus_math": records.MATH,
    "argus_target": records.TARGET,
    "argus_owner": records.OWNER,
    "argus_torch": records.TORCH,
    "argus_prices": records.PRICES,
    "argus_room": records.ROOM,
    "argus_python": records.PYTHON,
    "argus_frame": records.FRAME,
    "argus_code": records.CODE,
    "argus_stack": records.STACK,
    "argus_pause": records.PAUSE,
    "argus_board": records.BOARD,
    "argus_log": records.LOG,
}
COUNT_KEY = ("stack", "pid", "tid", "what", "window")
STACK_FLAGS = ("PYTHON", "PYTHON_CUT", "PYTHON_REJECTED", "NATIVE_CUT", "KERNEL", "IDLE_PYTHON")
NUMBERS = ("NO_SYSCALL", "FRAME_ENTRY", "NO_OFFSET", "PYTHON_FRAMES", "NATIVE_FRAMES", "WINDOW_BITS")
WHAT = ("SYSCALL", "OFF", "PREEMPTED", "UNINTERRUPTIBLE", "GIL_WAIT", "GIL", "GC", "KERNEL")
FLAGS = ("IN_NCCL", "IN_GROUP", "READ_FAULT", "UNFINISHED", "NAME_ADDRESS")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Sizes, offsets and enum values as a C compiler sees them."""
    root = Path(__file__).resolve().parents[3]
    folder = tmp_path_factory.mktemp("abi")
    lines = ["#include <stdio.h>", "#include <stddef.h>", '#include "stacks.h"', "int main(void) {", 'printf("{");']
    for struct, dtype in STRUCTS.items():
        lines.append(f'printf("\\"{struct}\\": {{\\"sizeof\\": %zu", sizeof(struct {struct}));')
        for name in dtype.names or ():
            lines.append(f'printf(", \\"{name}\\": %zu", offsetof(struct {struct}, {name}));')
        lines.append('printf("}, ");')
    lines.append('printf("\\"enums\\": {\\"count\\": %d, \\"name_len\\": %d", ARGUS_C_COUNT, ARGUS_NAME_LEN);')
    for counter in records.Counter:
        lines.append(f'printf(", \\"C_{counter.name}\\": %d", ARGUS_C_{counter.name});')
    for shape in calls.Shape:
        lines.append(f'printf(", \\"S_{shape.name}\\": %d", ARGUS_S_{shape.name});')
    for flag in FLAGS:
        lines.append(f'printf(", \\"F_{flag}\\": %d", ARGUS_F_{flag});')
    for stack_counter in records.StackCounter:
        lines.append(f'printf(", \\"SC_{stack_counter.name}\\": %d", ARGUS_SC_{stack_counter.name});')
    names = [f"STACK_{flag}" for flag in STACK_FLAGS] + [f"WHAT_{flag}" for flag in WHAT]
    for name in [
        *names,
        "NO_SYSCALL",
        "FRAME_ENTRY",
        "NO_OFFSET",
        "PYTHON_FRAMES",
        "NATIVE_FRAMES",
        "SC_COUNT",
        "WINDOW_BITS",
    ]:
        lines.append(f'printf(", \\"{name}\\": %u", (unsigned)ARGUS_{name});')
    lines.append('printf("}, \\"count\\": {\\"key\\": %zu", sizeof(struct argus_count_key));')
    for name in records.STACK_COUNT.names or ():
        of, base = ("argus_count_key", "0") if name in COUNT_KEY else ("argus_count", "sizeof(struct argus_count_key)")
        lines.append(f'printf(", \\"{name}\\": %zu", {base} + offsetof(struct {of}, {name}));')
    lines.append('printf("}}"); return 0; }')
    source = folder / "abi.c"
    source.write_text("\n".join(lines))
    subprocess.run(["gcc", "-Wall", "-Werror", f"-I{root / 'bpf'}", "-o", folder / "abi", source], check=True)
    return json.loads(subprocess.run([folder / "abi"], check=True, capture_output=True).stdout)


@pytest.mark.parametrize("struct", STRUCTS)
def test_layout_is_that_of_the_header(compiled: dict[str, dict[str, int]], struct: str) -> None:
    dtype = STRUCTS[struct]
    seen = dict(compiled[struct])
    assert dtype.itemsize == seen.pop("sizeof")
    assert {name: dtype.fields[name][1] for name in dtype.names or ()} == seen  # type: ignore[index]


def test_counters_shapes_and_flags_have_the_header_s_values(compiled: dict[str, dict[str, int]]) -> None:
    enums = compiled["enums"]
    assert enums["count"] == len(records.Counter)
    assert enums["name_len"] == records.NAME_LEN
    assert {f"C_{c.name}": int(c) for c in records.Counter}.items() <= enums.items()
    assert {f"S_{s.name}": int(s) for s in calls.Shape}.items() <= enums.items()
    for flag in FLAGS:
        assert getattr(records, f"FLAG_{flag}") == enums[f"F_{flag}"]


def test_what_the_stack_sampler_says_has_the_header_s_values(compiled: dict[str, dict[str, int]]) -> None:
    enums = compiled["enums"]
    assert enums["SC_COUNT"] == len(records.StackCounter)
    assert {f"SC_{c.name}": int(c) for c in records.StackCounter}.items() <= enums.items()
    assert set(records.StackCounter) > records.STACK_LOSS_COUNTERS
    for flag in STACK_FLAGS:
        assert getattr(records, f"STACK_{flag}") == enums[f"STACK_{flag}"]
    for what in WHAT:
        assert getattr(records, f"WHAT_{what}") == enums[f"WHAT_{what}"]
    for name in NUMBERS:
        assert getattr(records, name) == enums[name]


def test_a_row_of_counts_is_the_map_s_key_and_value(compiled: dict[str, dict[str, int]]) -> None:
    seen = dict(compiled["count"])
    key = seen.pop("key")
    assert {name: records.STACK_COUNT.fields[name][1] for name in seen} == seen  # type: ignore[index]
    assert records.STACK_COUNT.itemsize == key + 48
    assert set(seen) == set(records.STACK_COUNT.names or ())


def test_a_cookie_unpacks_to_what_was_packed() -> None:
    for call in calls.CALLS:
        for with_exit in (False, True):
            cookie = call.cookie(with_exit, 0xB5)
            assert cookie < 1 << 64
            assert cookie & 0xFF == call.id
            assert cookie >> 8 & 0x3F == call.shape
            assert cookie >> 14 & 7 == call.layer
            assert cookie >> 17 & 1 == with_exit
            assert cookie >> 18 & 3 == call.scale
            numbers = [cookie >> (20 + 4 * place) & 15 for place in range(6)]
            assert numbers == list(call.args) + [calls.ABSENT] * (6 - len(call.args))
            assert cookie >> 44 & 0xFF == 0xB5
            assert cookie >> 62 & 1 == (call.kind == "module")
            assert cookie >> 52 & 0xFF == call.offset
            assert cookie >> 60 & 3 == call.dims


def test_every_call_has_its_own_number_and_symbol() -> None:
    assert [call.id for call in calls.CALLS] == list(range(len(calls.CALLS)))
    assert len(calls.BY_SYMBOL) == len(calls.CALLS)
    assert len(calls.CALLS) <= np.iinfo("u1").max
