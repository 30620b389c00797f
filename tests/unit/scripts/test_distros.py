"""What scripts/distros deletes, reads out of logs and calls right. The roots themselves are not made here: each takes
minutes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"

LOG = """
setup: ready: .venv/bin/argus
tests/kernel/test_x.py ..s
SKIPPED [1] tests/kernel/test_x.py:70: no CPython was found (tests/pythons.py)
\x1b[33m==== \x1b[32m2 passed\x1b[0m, \x1b[33m1 skipped\x1b[0m\x1b[33m in 61.20s (0:01:01)\x1b[0m\x1b[33m ====\x1b[0m
FAILED tests/unit/test_y.py::test_z - AssertionError: 3 passed
============= 1 failed, 1234 passed, 2 errors in 3.21s =============
"""


@pytest.fixture
def distros(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("distros")
    sys.modules.pop("distros", None)


def test_nothing_is_deleted_where_something_is_mounted(
    distros: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies behind a mount is this machine's own."""
    root = tmp_path / "root"
    (root / "opt").mkdir(parents=True)
    (root / "opt" / "mine").touch()
    with monkeypatch.context() as patch:
        patch.setattr(distros, "mounts_below", lambda folder: [f"{folder}/opt"])
        with pytest.raises(distros.Failure, match=r"root/opt is a mount: .* nothing was deleted"):
            distros.remove(root)
    assert (root / "opt" / "mine").exists()
    distros.remove(root)
    assert not root.exists()
    distros.remove(root)


def test_mounts_are_those_of_a_folder_and_below_it(distros: ModuleType, tmp_path: Path) -> None:
    assert distros.mounts_below(tmp_path) == []
    assert "/proc" in distros.mounts_below(Path("/"))
    assert "/proc" in distros.mounts_below(Path("/proc"))
    assert "/proc" not in distros.mounts_below(Path("/pro"))


def test_outcomes_are_summed_over_all_runs_of_a_log(distros: ModuleType) -> None:
    counted, skipped = distros.outcomes(LOG)
    assert counted == {"passed": 1236, "skipped": 1, "failed": 1, "error": 2}
    assert skipped == ["tests/kernel/test_x.py: no CPython was found (tests/pythons.py)"]


def result(title: str, *, code: int = 0, skipped: tuple[str, ...] = (), **counted: int) -> dict[str, Any]:
    versions = {"python": "3.13.5", "bcc": "0.31.0+ds-7", "clang": "19", "glibc": "2.41-12+deb13u5"}
    test = {"code": code, "seconds": 600, "outcomes": counted, "skipped": list(skipped), "words": []}
    return {"title": title, "versions": versions, "demo": {"code": 0, "seconds": 9}, "test": test, "seconds": 660}


def test_a_table_shows_what_one_skips_and_another_does_not(
    distros: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    same = [result("Debian 12", passed=1000), result("Debian 13", passed=1000)]
    assert distros.show(same)
    assert "| Debian 13 | 3.13.5 | 0.31.0 | 19 | 2.41 | right | 1,000 / 0 / 0 | 11 |" in capsys.readouterr().out
    other = result("Debian 13", passed=999, skipped=("tests/a.py: no ip",))
    assert not distros.show([same[0], other])
    assert "skipped on Debian 13, not on Debian 12: tests/a.py: no ip" in capsys.readouterr().out
    assert not distros.show([same[0], result("Debian 13", code=1, passed=999, failed=1)])
    assert "Debian 13: scripts/test ended with 1" in capsys.readouterr().out


def test_a_distribution_without_a_mirror_is_left_out_with_a_reason(
    distros: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def mirror(origin: str) -> str:
        if origin == "Debian":
            return "http://mirror"
        raise distros.Failure(f"apt has no mirror of {origin} here")

    monkeypatch.setattr(distros.debian, "mirror", mirror)
    options = type("Options", (), {"names": []})
    assert distros.chosen(options) == ["debian12", "debian13"]
    assert "Ubuntu 24.04 is left out: apt has no mirror of Ubuntu here" in capsys.readouterr().err
