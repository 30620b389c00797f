"""Argus's own commands do without pandas; a program that imports Argus does not have to."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pandas")

ARRAYS = "import pyarrow as pa; assert pa.chunked_array([pa.array([1, 2])]).to_numpy().tolist() == [1, 2]"


def _python(*lines: str) -> str:
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("arguments", "there"), [("", "False"), ("['--version']", "True")])
def test_a_command_does_without_a_program_does_not(arguments: str, there: str) -> None:
    """Where arguments are given it is not the process's command."""
    output = _python(
        "import sys; sys.argv = ['argus', '--version']",
        "from argus.cli.main import main",
        f"main({arguments})",
        ARRAYS,
        "print('pandas' in sys.modules)",
    )
    assert output.splitlines()[-1] == there


def test_others_code_may_have_it() -> None:
    output = _python(
        "from argus.system.lean import unhide_pandas, hide_pandas",
        "hide_pandas()",
        "try: import pandas",
        "except ModuleNotFoundError as failure: print(failure)",
        "unhide_pandas()",
        "import pandas; print(pandas.Series([1, 2]).sum())",
    )
    assert output.splitlines() == ["argus does without pandas", "3"]


def test_plug_ins_of_health_may_have_it() -> None:
    output = _python(
        "from importlib import metadata",
        "from argus.health.config import ENTRY_POINTS, Check",
        "from argus.system.lean import hide_pandas",
        "theirs = metadata.EntryPoints([metadata.EntryPoint('theirs', 'pandas:Series', ENTRY_POINTS)])",
        "metadata.entry_points = lambda group: theirs.select(group=group)",
        "hide_pandas()",
        "print(Check('theirs', '', 'python', 'pandas:Series', {}).load()([1, 2]).sum())",
    )
    assert output == "3"
