"""What the compiled CUPTI helper asks of the C library: it runs in containers whose C library is older than the one
that it was compiled with."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from argus.cupti import build

OLDEST = (2, 28)
"""RHEL 8's, the oldest that CUDA 12 and 13 support."""
REDIRECTED = re.compile(r"(__isoc\d+_)?((strto|wcsto)[ui]?(l|ll|max|q|uq)|v?[fs]?w?scanf)(_l)?|arc4random\w*")
"""What headers of glibc 2.38 and later turn into functions of theirs, whatever the standard that is asked for where
_GNU_SOURCE is defined (features.h, ``__GLIBC_USE_C2X_STRTOL``); compiled here it may still look harmless."""


@pytest.mark.parametrize("library", [build.library, build.injected_library])
def test_the_helper_needs_no_c_library_newer_than_rhel_8s(library: Callable[[], Path]) -> None:
    with library().open("rb") as file:
        elf = ELFFile(file)
        versions = {
            version.name: tuple(map(int, version.name.removeprefix("GLIBC_").split(".")))
            for _, wanted in elf.get_section_by_name(".gnu.version_r").iter_versions()
            for version in wanted
        }
        asked = {symbol.name for symbol in elf.get_section_by_name(".dynsym").iter_symbols() if not symbol["st_value"]}
    assert versions
    assert [name for name, number in versions.items() if number > OLDEST] == [], "see helper/glibc.h"
    assert [name for name in asked if REDIRECTED.fullmatch(name)] == [], "newer headers make another function of it"
