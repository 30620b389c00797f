"""Names that a program chooses for its functions cost a bounded time and memory, and that program's names only."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from argus.capture.process import demangler
from argus.capture.process.demangle_child import USER
from argus.capture.process.demangler import MAX_NAME, STRIKES, Demangler, is_small
from argus.capture.process.names import demangle

DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def bomb(levels: int, name: str = "f") -> str:
    """A symbol of a function whose parameter is B<B<…>, B<…>>, so many levels deep: its name doubles with each."""
    text, last = f"_Z{len(name)}{name}1A1BIS_S_E", 1
    for _ in range(levels):
        text += f"S0_IS{DIGITS[last]}_S{DIGITS[last]}_E"
        last += 1
    return text


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Demangler]:
    """One whose child may be starved: its limit is of CPU time."""
    monkeypatch.setattr(demangler, "WAIT_S", 60.0)
    monkeypatch.setattr(demangler, "SAVED_S", 60.0)
    made = Demangler()
    yield made
    made.close()


def test_a_name_of_gigabytes_costs_one_name(names: Demangler) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = names.names([bomb(30), bomb(3), bomb(31)])
    assert found[0] == bomb(30), "it stays what it was"
    assert found[1].startswith("f(A, B<A, A>, B<B<A, A>, B<A, A> >")
    assert found[2] == bomb(31)
    assert (names.given_up, names.restarts) == (2, 2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"


def test_a_long_name_is_cut_and_differs_from_others(names: Demangler) -> None:
    one, other = (names.names([bomb(12, name)])[0] for name in ("f", "f"))
    assert one == other
    third = names.names([bomb(13)])[0]
    assert len(one) < MAX_NAME + 20
    assert one[:MAX_NAME] == third[:MAX_NAME]
    assert one != third
    assert re.search(r"… \[[0-9a-f]{8}\]$", one)
    assert names.shortened == 2
    plain = names.names(["x" * 10_000])[0]
    assert len(plain) < MAX_NAME + 20, "also one that is no C++ symbol"


def test_a_process_of_bombs_is_not_waited_for_again_and_others_are(names: Demangler) -> None:
    symbols = [bomb(30, f"f{number}") for number in range(50)]
    assert names.names(symbols, source=7) == symbols
    assert names.restarts == STRIKES
    assert names.given_up == 50
    assert names.names([bomb(9, "honest")], source=8)[0].startswith("honest(")
    names.forget(7)
    assert names.names([bomb(9, "again")], source=7)[0].startswith("again("), "the number is another process's"


def test_names_are_kept_by_their_bytes(names: Demangler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demangler, "CACHE_BYTES", 100_000)
    for number in range(3000):
        names.names([f"_Z{3 + len(str(number))}fun{number}v"])
    assert names.cached_bytes <= 100_000
    assert len(names._cache) < 3000


def test_the_child_has_no_rights(names: Demangler) -> None:
    names.names([bomb(9)])
    process = names._child._process
    assert process is not None
    status = Path(f"/proc/{process.pid}/status").read_text()
    output = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert output["NoNewPrivs"].strip() == "1"
    assert output["Seccomp"].strip() == "2"
    assert Path(f"/proc/{process.pid}/environ").read_bytes() in (b"", b"LC_CTYPE=C.UTF-8\0")
    if os.geteuid() == 0:
        assert output["Uid"].split() == output["Gid"].split() == [str(USER + os.getpid())] * 4, "nobody else's"
        assert int(output["CapEff"], 16) == int(output["CapPrm"], 16) == 0
        assert output["Groups"].strip() == ""
        assert Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() == "1000"


def test_the_child_has_bounded_memory(names: Demangler) -> None:
    """Whatever the asking side does: it may be stopped while the child is at it."""
    names.names([bomb(9)])
    process = names._child._process
    assert process is not None
    lines = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
    space = next(line for line in lines if line.startswith("Max address space")).split()
    assert int(space[3]) < 160 << 20, "the interpreter, and 64 MiB"


def test_the_child_has_bounded_cpu_time(names: Demangler) -> None:
    """It ends by itself: the asking side is in no hurry here."""
    names.names([bomb(9)])
    process = names._child._process
    assert process is not None
    assert names.names([bomb(23)]) == [bomb(23)], "of seconds"
    assert process.returncode == -signal.SIGPROF


@pytest.mark.skipif(os.geteuid() != 0, reason="has rights to give up as root only")
def test_the_child_of_a_trace_that_gave_up_its_rights_has_none_either() -> None:
    program = (
        "from argus.system import privileges; from argus.capture.process.demangler import Demangler\n"
        "privileges.keep({'DAC_READ_SEARCH', 'SYS_PTRACE'})\n"
        f"names = Demangler(); names.names([{bomb(9)!r}])\n"
        "print(open(f'/proc/{names._child._process.pid}/status').read()); names.close()"
    )
    status = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    output = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert output["Uid"].split() == ["0"] * 4, "it may not become another user"
    assert int(output["CapEff"], 16) == int(output["CapPrm"], 16) == 0
    assert output["Seccomp"].strip() == "2"


def test_a_forked_process_does_not_take_its_parents_answers(names: Demangler) -> None:
    def child() -> int:
        process = demangler.shared._child._process
        return 0 if process is None else process.pid

    names.names([bomb(9, "before")])
    demangler.shared.names([bomb(9, "before")])
    here, there = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            name = demangler.shared.names([bomb(9, "forked")])[0][:7]
            os.write(there, f"{name} {child()}".encode())
            demangler.shared.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    name, its_own = os.read(here, 100).decode().split()
    assert name == "forked("
    assert int(its_own) not in (0, child()), "it has a child of its own"
    assert demangler.shared.names([bomb(9, "after")])[0].startswith("after(")
    demangler.shared.close()


def test_what_is_demangled_here_has_a_bounded_name() -> None:
    """Pieces of the grammar in any order: whatever is taken for small is."""
    rng = random.Random(7)
    small = "1BI 1A E S_ S0_ S1_ T_ T0_ P R K N St Dp DpT_ J F v i Li5E L_Z1fvE XL_ Ul E_ DT dt cv ST_ Lb1E M A5_ sZ"
    pieces = re.split(" ", small)
    tried = 0
    for _ in range(40_000):
        symbol = "_Z1f" + "".join(rng.choices(pieces, k=rng.randrange(1, 24)))
        if is_small(symbol):
            tried += 1
            assert len(demangler._demangle_here(symbol)) <= 1 << 17, symbol
    assert tried > 5000
    large = [bomb(levels) for levels in range(1, 19)]
    assert is_small(large[0])
    for symbol in large:
        assert not is_small(symbol) or len(demangler._demangle_here(symbol)) <= 1 << 17, symbol
    assert not is_small("_Z1fIJiiiiiiii" + "ii" * 99 + "EEvDpT_"), "a pack repeats what it holds"


def test_what_is_no_symbol_stays() -> None:
    assert demangle("main") == "main"
    assert demangle("_Znonsense") == "_Znonsense"
    assert demangle("_Z\ud800") == "_Z\ud800"
    assert demangle("_ZN3foo3barEv") == "foo::bar()"
