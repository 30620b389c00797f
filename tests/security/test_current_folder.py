"""Root in a folder of somebody else's: nothing that lies there is run, or believed."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import pytest

from argus.live import preflight
from argus.system import child
from tests.stores import new_store

PROOF = "import os, pathlib\npathlib.Path(os.environ['PROOF']).write_text('it was run')\n"
SETTINGS = """<clickhouse>
<logger><level>trace</level><log>{folder}/log</log><errorlog>{folder}/errors</errorlog></logger>
<path>{folder}/data/</path>
</clickhouse>
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "theirs"
    for package in ("argus", "argus/system", "numpy"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(PROOF)
    (folder / "chdb.py").write_text(PROOF)
    (folder / "config.xml").write_text(SETTINGS.format(folder=folder))
    monkeypatch.setenv("PROOF", str(tmp_path / "proof"))
    monkeypatch.chdir(folder)
    return folder


def test_check_reads_no_settings_of_the_engine_there(hostile: Path, tmp_path: Path) -> None:
    before = set(hostile.iterdir())
    state = preflight._store_engine()
    assert state.on, state.detail
    assert "ClickHouse 2" in state.detail
    assert set(hostile.iterdir()) == before
    assert not (tmp_path / "proof").exists()


def test_tab_runs_no_module_there(hostile: Path, tmp_path: Path) -> None:
    """As the shell's script calls it, with a store whose names are not known yet."""
    environment = {
        **child.environment(), "COMP_WORDS": "argus diagnose --job ", "COMP_CWORD": "3",
        "_ARGUS_COMPLETE": "bash_complete", "ARGUS_STORE": new_store(tmp_path), "ARGUS_CACHE_DIR": str(tmp_path),
        "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }  # fmt: skip
    program = "import os, sys; sys.path.remove(''); from argus.cli.main import main; sys.argv[0] = 'argus'; main()"
    subprocess.run([sys.executable, "-c", program], env=environment, check=False, timeout=60)
    until = time.monotonic() + 60
    while not list((tmp_path / "cache").rglob("*.json")) and time.monotonic() < until:
        time.sleep(0.05)
    assert list((tmp_path / "cache").rglob("*.json")), "the names were asked for"
    assert not (tmp_path / "proof").exists()


def relative_paths(python: str) -> list[str]:
    """Where an interpreter looks for modules in the current folder, by start-up files of its site-packages."""
    program = "import sys; print('\\n'.join(path for path in sys.path if path and not path.startswith('/')))"
    done = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, check=True, cwd="/")
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


def test_an_installation_for_development_looks_for_nothing_in_the_current_folder() -> None:
    assert relative_paths(sys.executable) == []


@pytest.mark.parametrize("packed", [False, True])
def test_argus_runs_no_module_there(root: Path, hostile: Path, tmp_path: Path, packed: bool) -> None:
    """Wherever a start-up file of site-packages leads: that of an editable installation may be a relative path."""
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "argus").mkdir()
    for part in [*(root / "argus").iterdir(), root / "cli"]:
        (packages / "argus" / part.name).symlink_to(part)
    paths = [path for path in sys.path if path.endswith("-packages")]
    (packages / "there.pth").write_text("import sys; sys.path.append('decoy')\n")
    decoy = hostile / "decoy"
    if packed:
        with zipfile.ZipFile(decoy, "w") as archive:
            for name in ("argus/__init__.py", "sitecustomize.py", "click.py"):
                archive.writestr(name, PROOF)
    else:
        (decoy / "argus").mkdir(parents=True)
        for name in ("argus/__init__.py", "sitecustomize.py", "click.py"):
            (decoy / name).write_text(PROOF)
    (packages / "thus.pth").write_text("".join(f"{path}\n" for path in paths))
    program = environment / "bin" / "argus"
    shutil.copy(root / "bin" / "argus", program)
    program.chmod(0o755)
    found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([program, "--version"], env=found, capture_output=True, text=True, check=False)
    assert not (tmp_path / "proof").exists()
    assert done.returncode == 0, done.stderr
    # A path of the user's is one of the current folder.
    done = subprocess.run([program, "man", "--out", "man"], env=found, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (hostile / "man").is_dir()


def starts_in_the_current_folder(source: str) -> list[int]:
    """Lines that start this Python, which would import from the current folder."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], (ast.List, ast.Tuple)):
            continue
        words = [ast.unparse(word) for word in node.args[0].elts]
        folder = next((ast.unparse(one.value) for one in node.keywords if one.arg == "cwd"), "")
        if words[:1] == ["sys.executable"] and "'-I'" not in words and folder != "'/'":
            found.append(node.lineno)
    return found


def test_no_python_is_started_there(root: Path) -> None:
    assert starts_in_the_current_folder("run([sys.executable, '-m', name])\nrun([sys.executable, '-I', name])") == [1]
    found = {
        str(path.relative_to(root)): lines
        for path in [*(root / "argus").rglob("*.py"), *(root / "cli").rglob("*.py")]
        if (lines := starts_in_the_current_folder(path.read_text()))
    }
    assert not found


def test_only_the_engine_s_own_process_loads_it(root: Path) -> None:
    """It reads settings from the current folder."""
    loading = {
        str(path.relative_to(root))
        for path in [*(root / "argus").rglob("*.py"), *(root / "cli").rglob("*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(one.name.split(".")[0] == "chdb" for one in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "chdb")
        or (isinstance(node, ast.Call) and "import_module('chdb" in ast.unparse(node))
    }
    assert loading == {"argus/store/engine.py"}
