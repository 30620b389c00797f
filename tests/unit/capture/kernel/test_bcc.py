"""bcc: found where distributions put it, never the unrelated package of that name, reported when absent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from argus.capture.kernel import bcc
from argus.live import preflight
from argus.model.errors import ArgusError
from argus.system.resources import resource_dir


def test_its_absence_is_one_line_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bcc, "_search_path", list)
    bcc.load.cache_clear()
    try:
        with pytest.raises(ArgusError) as failure:
            bcc.load()
        assert "\n" not in str(failure.value)
        assert "apt install python3-bpfcc" in failure.value.hint
        features = {feature.name: feature for feature in preflight.check_all()}
    finally:
        bcc.load.cache_clear()
    assert not features["bcc"].on
    assert "apt install python3-bpfcc" in features["bcc"].fix
    assert not features["eBPF"].on
    assert not preflight.tracing_works(list(features.values()))


def test_the_lattice_package_of_the_same_name_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lattice, real = tmp_path / "one" / "bcc", tmp_path / "two" / "bcc"
    for package in (lattice, real):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    (real / "libbcc.py").touch()
    monkeypatch.setattr(bcc, "_search_path", lambda: [tmp_path / "one", tmp_path / "two"])
    assert bcc.find() == real


def test_it_compiles_against_the_bundled_headers_whatever_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BCC_KERNEL_SOURCE", "/nonexistent")
    bcc.load.cache_clear()
    try:
        bcc.load()
        assert os.environ["BCC_KERNEL_SOURCE"] == str(resource_dir("bpf") / "include")
    finally:
        bcc.load.cache_clear()


@pytest.mark.thorough
@pytest.mark.kernel
@pytest.mark.parametrize("machine", ["x86", "arm64"])
def test_the_programs_compile_for_both_architectures(machine: str) -> None:
    """Compiled, not run: bcc takes the target's register layout from ARCH."""
    script = """
import os, sys
os.environ["ARCH"] = sys.argv[1]
from argus.capture.probes import SOURCES, flags
from argus.capture.kernel import bcc
from argus.system.resources import resource_dir
module, folder = bcc.load(), resource_dir("bpf")
text = "\\n".join((folder / name).read_text() for name in SOURCES)
if sys.argv[1] == "arm64":
    text += "\\n#if REGISTER_ARGS != 8\\n#error not compiled for aarch64\\n#endif\\n"
# Debian 13's clang turns this machine's -fcf-protection on by itself, which is an error for another one.
module.BPF(text=text.encode(), cflags=[f"-I{folder}", *flags(1 << 20), "-fcf-protection=none"])
"""
    done = subprocess.run([sys.executable, "-c", script, machine], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
