"""A built wheel, installed in an empty environment far from the source tree, has everything it needs."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Path(__file__).resolve().parents[2]
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", folder, root], check=True, capture_output=True, text=True
    )
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(root)) for path in (root / "argus").rglob("*.py")}
    expected |= {str(path.relative_to(root)) for path in (root / "argus").rglob("*.json")}
    expected |= {f"argus/cli/{path.name}" for path in (root / "cli").glob("*.py")}
    expected |= {f"argus/schemas/{path.name}" for path in (root / "schemas").glob("*.sql")}
    expected |= {f"argus/{path.relative_to(root)}" for path in (root / "bpf").rglob("*") if path.is_file()}
    expected.add("argus/py.typed")
    assert len([name for name in expected if name.startswith("argus/bpf/include")]) >= 9
    assert expected - inside == set()


@pytest.mark.kernel
def test_an_installed_wheel_traces(wheel: Path, tmp_path: Path) -> None:
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
    done = subprocess.run([argus, "check", "--format", "json"], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    features = {feature["name"]: feature for feature in json.loads(done.stdout)["features"]}
    assert "7 of 7 calls" in features["eBPF"]["detail"]
    made = subprocess.run(
        [argus, "store", "init", "--store", f"chdb://{tmp_path}/store"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
