"""argus/cupti/helper/argus_cupti.h and argus/cupti/shared.py describe the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from argus.cupti import shared

STRUCTS = {
    "argus_cupti_layout": shared.LAYOUT,
    "argus_cupti_attribute": shared.ATTRIBUTE,
    "argus_cupti_control": shared.CONTROL,
    "argus_cupti_slot": shared.SLOT,
    "argus_cupti_name": shared.NAME,
}
CONSTANTS = (
    *("MAGIC", "HEAD_BYTES", "SLOTS_OFFSET", "MAX_SLOTS", "NAMES_OFFSET", "NAMES_BYTES", "BUFFERS_OFFSET"),
    *("MAX_KINDS", "MAX_CALLBACKS", "INDEX_DIVISOR"),
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Sizes, offsets and constants as a C compiler sees them."""
    header = Path(shared.__file__).parent / "helper"
    folder = tmp_path_factory.mktemp("abi")
    lines = [
        "#include <stdio.h>",
        "#include <stddef.h>",
        '#include "argus_cupti.h"',
        "int main(void) {",
        'printf("{");',
    ]
    for struct, dtype in STRUCTS.items():
        lines.append(f'printf("\\"{struct}\\": {{\\"sizeof\\": %zu", sizeof(struct {struct}));')
        for name in dtype.names or ():
            lines.append(f'printf(", \\"{name}\\": %zu", offsetof(struct {struct}, {name}));')
        lines.append('printf("}, ");')
    lines.append('printf("\\"constants\\": {\\"MEMFD\\": \\"%s\\"", ARGUS_CUPTI_MEMFD);')
    values = [*CONSTANTS, *(one.name for one in (*shared.State, *shared.Command, *shared.SlotState))]
    for name in values:
        lines.append(f'printf(", \\"{name}\\": %llu", (unsigned long long)ARGUS_CUPTI_{name});')
    lines.append('printf("}}"); return 0; }')
    source = folder / "abi.c"
    source.write_text("\n".join(lines))
    subprocess.run(["gcc", "-Wall", "-Werror", f"-I{header}", "-o", folder / "abi", source], check=True)
    return json.loads(subprocess.run([folder / "abi"], check=True, capture_output=True).stdout)


@pytest.mark.parametrize("struct", STRUCTS)
def test_layout_is_that_of_the_header(compiled: dict[str, dict[str, int]], struct: str) -> None:
    dtype = STRUCTS[struct]
    seen = dict(compiled[struct])
    assert dtype.itemsize == seen.pop("sizeof")
    assert {name: dtype.fields[name][1] for name in dtype.names or ()} == seen  # type: ignore[index]


def test_constants_and_states_have_the_header_s_values(compiled: dict[str, dict[str, int]]) -> None:
    seen = compiled["constants"]
    assert seen["MEMFD"] == shared.MEMFD
    for name in CONSTANTS:
        assert seen[name] == getattr(shared, name)
    for one in (*shared.State, *shared.Command, *shared.SlotState):
        assert seen[one.name] == one


def test_what_one_mapping_writes_another_reads() -> None:
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, shared.total_bytes(2, 16384))
        here, there = shared.Memory(fd, shared.total_bytes(2, 16384)), shared.Memory(fd)
        here.store("command_seq", 7)
        here.wake("command_seq")  # nobody sleeps: nothing happens
        here.store_text("reason", b"no\x1bmemory")
        assert there.load("command_seq") == 7
        assert int(there.control["command_seq"]) == 7
        assert there.text("reason") == "no\\x1bmemory"
        buffer, index = here.buffer(1, 16384)
        assert len(buffer) == 16384
        assert len(index) == 16384 // shared.INDEX_DIVISOR // 4
        index[-1] = 5
        assert here.view(shared.total_bytes(2, 16384) - 4, 1, "<u4")[0] == 5
        with pytest.raises((ValueError, TypeError)):
            here.buffer(2, 16384)
        del buffer, index
    finally:
        os.close(fd)


def test_a_helper_cannot_fill_a_text_beyond_its_end() -> None:
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, shared.HEAD_BYTES)
        memory = shared.Memory(fd)
        memory.control["reason"][:] = np.frombuffer(b"\xff" * shared.REASON_BYTES, "u1")
        assert memory.text("reason") == "\\xff" * shared.REASON_BYTES
    finally:
        os.close(fd)
