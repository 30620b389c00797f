"""A built wheel, installed in an empty environment far from the source tree, has everything it needs."""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Path(__file__).resolve().parents[2]
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", folder, root], check=True, capture_output=True, text=True
    )
    (built,) = folder.glob("*.whl")
    return built


def test_one_wheel_serves_every_python_of_an_architecture(wheel: Path) -> None:
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
        assert "Root-Is-Purelib: false" in archive.read(metadata).decode()
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
    assert sorted(libraries) == ["argus/cupti/libargus_cupti.so", "argus/cupti/libargus_cupti_inject.so"]


def test_the_helper_needs_no_new_c_library_and_exports_nothing_else(wheel: Path, tmp_path: Path) -> None:
    """glibc 2.28 is RHEL 8's, the oldest that CUDA 12 and 13 support."""
    expected = {"InitializeInjection", "argus_cupti_claim", "argus_cupti_walk"}
    with zipfile.ZipFile(wheel) as archive:
        for name in ("libargus_cupti.so", "libargus_cupti_inject.so"):
            with ELFFile(io.BytesIO(archive.read(f"argus/cupti/{name}"))) as elf:
                dynamic = elf.get_section_by_name(".dynamic")
                needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
                assert needed <= {"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}
                versions = [
                    auxiliary.name
                    for _, auxiliaries in elf.get_section_by_name(".gnu.version_r").iter_versions()
                    for auxiliary in auxiliaries
                ]
                newer = [v for v in versions if tuple(map(int, v.removeprefix("GLIBC_").split("."))) > (2, 28)]
                assert newer == [], "add the function's older version to helper/glibc.h"
                defined = {
                    symbol.name
                    for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
                    if symbol["st_shndx"] != "SHN_UNDEF" and symbol.name
                }
                assert defined == expected


def test_without_a_compiler_the_wheel_is_refused_with_a_reason(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, root],
        capture_output=True, text=True, check=False, env={**os.environ, "CC": "no-such-compiler"},
    )  # fmt: skip
    assert done.returncode != 0
    assert "there is no C compiler ('no-such-compiler')" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(root)) for path in (root / "argus").rglob("*.py")}
    expected |= {str(path.relative_to(root)) for path in (root / "argus").rglob("*.json") if "web" not in path.parts}
    expected |= {f"argus/report/static/{name}" for name in ("page.js", "page.css", "LICENSES.txt")}
    expected |= {f"argus/cli/{path.name}" for path in (root / "cli").glob("*.py")}
    expected |= {f"argus/{path.relative_to(root)}" for path in (root / "schemas").rglob("*.sql")}
    expected |= {f"argus/{path.relative_to(root)}" for path in (root / "bpf").rglob("*") if path.is_file()}
    expected |= {str(path.relative_to(root)) for path in (root / "argus/cupti/helper").glob("*.[ch]")}
    expected.add("argus/py.typed")
    assert len([name for name in expected if name.startswith("argus/bpf/include")]) >= 9
    assert expected - inside == set()


@pytest.mark.kernel
def test_an_installed_wheel_traces(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dependencies come from the environment of the tests; Argus itself, BPF sources and schemas from the wheel."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    site = Path(subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True, capture_output=True, text=True,
    ).stdout.strip())  # fmt: skip
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    where = subprocess.run(
        [python, "-c", "import argus, argus.cli.main; print(argus.__file__, argus.cli.main.__file__)"],
        check=True, capture_output=True, text=True, cwd=tmp_path,
    ).stdout  # fmt: skip
    assert where.count(str(tmp_path)) == 2
    argus = tmp_path / "venv" / "bin" / "argus"
    # What the tree has compiled is not used: this one's sources are to be.
    monkeypatch.setenv("ARGUS_CACHE_DIR", str(tmp_path / "cache"))
    done = subprocess.run([argus, "check", "--format", "json"], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "cache" / "bpf").glob("*.json"))
    features = {feature["name"]: feature for feature in json.loads(done.stdout)["features"]}
    assert "7 of 7 calls" in features["eBPF"]["detail"]
    made = subprocess.run(
        [argus, "store", "init", "--store", f"chdb://{tmp_path}/store"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
