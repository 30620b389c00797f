"""Each parser of foreign bytes, on a few hundred inputs that are the same each time: ``scripts/fuzz`` runs more.

A case that raises what it may not, or takes too long, fails; so does one that breaks what the parser promises.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.fuzz import harness
from tests.fuzz.harness import Bounded, Failed

ROOT = Path(__file__).resolve().parents[2]
CASES = 300
NEEDS = {"cupti_memory": "cupti.cupti", "cupti_records": "cupti.cupti"}


@pytest.mark.parametrize("name", harness.names())
def test_a_parser_takes_any_bytes(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    tally = harness.fuzz(name, CASES, seed=20)
    assert tally.cases >= CASES
    assert tally.refused < tally.cases, "its seeds are accepted"


@pytest.mark.parametrize("name", harness.names())
def test_a_parser_accepts_its_seeds(name: str) -> None:
    """Else the inputs made of them would test nothing but the first look at them."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    parser = harness.load(name)
    bounded = Bounded(parser, limit_memory=False)
    assert any(bounded.case(seed) for seed in parser.seeds)


def test_the_driver_is_imported_in_one_place() -> None:
    """Where its compiled reader is switched off."""
    told = re.compile(r"^\s*(import|from) clickhouse_connect\b", re.MULTILINE)
    files = [*(ROOT / "argus").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]
    assert [path.name for path in files if told.search(path.read_text(encoding="utf-8"))] == ["driver.py"]


def test_an_answer_that_announces_more_than_it_has_ends_no_process() -> None:
    """The compiled reader of the driver runs past its end."""
    answer = b"\0\0\0\r\x0025.8.1.1\tUTC\nX\0\3\2\4name\6String\x0bmax_threads\x18d" + b"\xff" * 46
    answer += b"istributed_product_mode\5value\6String\x018\4deny\x08readonly\x18distr\0\0"
    script = (
        "from tests.fuzz.parsers import server_answers as parser\n"
        f"try: parser.run({answer!r})\nexcept parser.ALLOWED: print('refused')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def made(**words: Any) -> harness.Parser:
    """A parser that takes anything, but for what is given."""
    module: Any = ModuleType("made")
    module.__doc__ = "Made."
    module.ALLOWED, module.CODE = (ValueError,), []
    module.seeds, module.run = lambda: [b"seed"], lambda data: None
    vars(module).update(words)
    return harness.describe("made", module)


def refuses(data: bytes) -> None:
    if b"x" in data:
        raise ValueError
    if b"y" in data:
        raise KeyError
    if b"z" in data:
        until = time.process_time() + 10
        while time.process_time() < until:
            pass


def test_what_a_parser_may_not_raise_is_a_failure() -> None:
    bounded = Bounded(made(run=refuses), limit_memory=False)
    assert bounded.case(b"a")
    assert not bounded.case(b"x")
    assert bounded.tally.refused == 1
    with pytest.raises(Failed, match="KeyError"):
        bounded.case(b"y")
    assert bounded.tally.failing == b"y"


def test_a_slow_case_is_a_failure() -> None:
    bounded = Bounded(made(run=refuses, SECONDS=0.05), limit_memory=False)
    with pytest.raises(Failed, match="s of CPU"):
        bounded.case(b"z")
    assert bounded.tally.failing == b"z"


def test_the_same_seed_makes_the_same_inputs() -> None:
    parser = made(seeds=lambda: [bytes(range(200)), b"12,34"], TOKENS=[b"{", b"null"])
    some = [[next(inputs) for _ in range(200)] for inputs in (harness.mutations(parser, n) for n in (1, 1, 2))]
    assert some[0] == some[1] != some[2]
    assert len(set(some[0])) > 150


def test_a_failure_is_kept_and_reported(tmp_path: Path) -> None:
    """A parser that is broken while it is fuzzed as scripts/fuzz does it: memory beyond its bound."""
    broken = (
        "import sys\nfrom tests.fuzz.parsers import line_tables\n"
        "real = line_tables.run\n"
        "def run(data):\n    if len(data) % 7 == 3: bytearray(2 << 30)\n    real(data)\n"
        "line_tables.run = run\n"
        "from tests.fuzz.__main__ import main\nmain()\n"
    )
    words = ["line_tables", "--cases", "1000", "--seed", "1", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", broken, *words], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 77, done.stderr
    assert "MemoryError" in (tmp_path / "failure").read_text()
    assert len((tmp_path / "failing").read_bytes()) % 7 == 3
