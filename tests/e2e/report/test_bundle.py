"""The bundle that is committed: of these sources, small, with its licences; and its modules' own tests."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args, get_origin, get_type_hints, is_typeddict

import pytest

from argus.report import page as report_page
from argus.report import panel

ROOT = Path(__file__).resolve().parents[3]
needs_npm = pytest.mark.skipif(not shutil.which("npm"), reason="no npm here: ARGUS_WITH_BROWSER=1 scripts/setup")


def run(*words: str) -> str:
    done = subprocess.run(["scripts/web", *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@needs_npm
def test_what_is_committed_is_what_the_sources_give() -> None:
    assert "what is committed is what the sources give" in run("--check")


@needs_npm
def test_modules_do_what_their_tests_say() -> None:
    output = run("--test")
    found = re.search(r"pass (\d+)", output)
    assert found is not None
    assert int(found[1]) >= 20


def test_the_bundle_is_small_and_names_its_licences() -> None:
    files = {path.name: path.stat().st_size for path in (ROOT / "argus/report/static").iterdir()}
    assert set(files) == {"page.js", "page.css", "LICENSES.txt"}
    assert sum(files.values()) < 300_000
    licenses = report_page.asset("LICENSES.txt").decode()
    packages = set(re.findall(r'^    "([\w-]+)":', _dependencies(), re.MULTILINE))
    assert packages == {"uplot"}
    assert all(f"\n{name} " in licenses for name in packages)
    assert "Permission is hereby granted" in licenses
    program = report_page.asset("page.js")
    assert b"</script" not in program
    assert b"</style" not in report_page.asset("page.css")
    for word in (b"innerHTML", b"insertAdjacentHTML", b"document.write", b"new Function", b"eval("):
        assert word not in program, word


def _dependencies() -> str:
    text = (ROOT / "argus/report/web/package.json").read_text()
    return text.split('"dependencies": {')[1].split("}")[0]


def test_the_front_end_knows_the_fields_that_python_sends() -> None:
    """``contract.ts`` against ``panel.py``: names of types and of their fields."""
    source = (ROOT / "argus/report/web/src/contract.ts").read_text()
    found = {
        name: set(re.findall(r"(\w+)\??:", re.sub(r"//.*", "", body)))
        for name, body in re.findall(r"export interface (\w+) \{(.*?)\}", source, re.DOTALL)
    }
    kinds = {name: kind for name, kind in vars(panel).items() if is_typeddict(kind) and name != "TypedDict"}
    assert len(kinds) > 20
    for name, kind in kinds.items():
        assert found[name] == set(get_type_hints(kind)), name
    views = {get_args(get_type_hints(kind)["view"])[0] for kind in get_args(panel.View)}
    assert get_origin(panel.View) is not None
    drawn = set(re.findall(r'case "(\w+)"', (ROOT / "argus/report/web/src/panel.ts").read_text()))
    assert views == drawn
