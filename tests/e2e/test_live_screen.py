"""The live view in a real terminal: what it shows, and that it leaves nothing behind however it ends."""

from __future__ import annotations

import os
import pty
import re
import shlex
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from argus.cli.screen import Screen
from tests.terminal import Terminal

ROOT = Path(__file__).parents[2]
PROGRAM = f"PYTHONPATH={ROOT} {shlex.quote(sys.executable)} {Path(__file__).parent / 'programs' / 'live_screen.py'}"
LATE = re.compile(r"^ *11 +52\.6 ms +13\.4 ms", re.M)


def is_whole(terminal: Terminal) -> bool:
    """Whether all of a frame is there: its first line, the late rank first of all, its last line; nothing else."""
    rows = terminal.rows
    ranks = [row.split()[0] for row in rows if re.match(r"^ *\d+ +\d+\.\d ms", row)]
    return (
        terminal.in_alternate
        and rows[0].startswith(" DEGRADED  llama")
        and rows[1].startswith("step 5")
        and "compute straggler  rank 11" in rows[2] + rows[3]
        and ranks[:1] == ["11"]
        and rows[-1].startswith("Argus: ")
        and "nothing lost" in rows[-1]
        and terminal.text.count("DEGRADED") == 1
        and terminal.text.count("Argus: ") == 1
    )


def is_as_before(terminal: Terminal) -> bool:
    """Whether what was on the terminal is there again."""
    return not terminal.in_alternate and terminal.cursor_shown and "DEGRADED" not in terminal.text


def check_end(terminal: Terminal, message: str) -> None:
    """Waits until the program has ended with these words, and left the terminal as it was."""
    terminal.wait(lambda: message in terminal.text and terminal.modes_after is not None, what=message)
    assert terminal.modes_after
    assert is_as_before(terminal)


@pytest.mark.parametrize(("columns", "lines"), [(60, 20), (80, 24), (120, 40)])
def test_a_frame_fills_the_terminal_and_q_gives_it_back(columns: int, lines: int) -> None:
    with Terminal(columns, lines) as terminal:
        terminal.type("echo what was there before\n")
        terminal.wait_for("\nwhat was there before")
        terminal.run(PROGRAM)
        terminal.wait(lambda: is_whole(terminal), what="a frame")
        assert LATE.search(terminal.text)
        assert len(terminal.rows) == lines
        assert "→ Check the GPU of rank 11" in terminal.text
        assert not terminal.cursor_shown
        assert not terminal.line_by_line
        terminal.type("?")
        terminal.wait_for("quit: end the trace and sum up")
        terminal.type("?d")
        terminal.wait_for("W1 0.63")
        terminal.type("\x1b")
        terminal.wait(lambda: is_whole(terminal), what="the overview")
        terminal.type("q")
        check_end(terminal, "the end after 1")
        assert "what was there before" in terminal.text


def test_all_ranks_can_be_scrolled() -> None:
    with Terminal(80, 24) as terminal:
        terminal.run(PROGRAM)
        terminal.wait(lambda: is_whole(terminal), what="a frame")
        assert "13 others alike" in terminal.text
        terminal.type("\x1b[B")
        terminal.wait_for(" below")
        terminal.type("\x1b[B" * 20)
        terminal.wait(lambda: re.search(r"^ *15 +37\.9 ms", terminal.text, re.M) is not None, what="the last rank")
        assert "0 below" in terminal.text
        terminal.type("\x1b")
        terminal.wait(lambda: is_whole(terminal), what="the overview")
        terminal.type("q")
        check_end(terminal, "the end after 1")


def test_another_size_is_drawn_clean() -> None:
    with Terminal(80, 24) as terminal:
        terminal.run(PROGRAM)
        terminal.wait(lambda: is_whole(terminal), what="a frame")
        for columns, lines in ((60, 20), (120, 40), (61, 33), (200, 24)):
            terminal.resize(columns, lines)
            terminal.wait(lambda: is_whole(terminal), what=f"a frame of {columns}x{lines}")
        terminal.type("q")
        check_end(terminal, "the end after 1")


def test_suspended_and_resumed() -> None:
    with Terminal(80, 24) as terminal:
        terminal.type(f"{PROGRAM}\n")  # alone in its job: the shell prompts once all of a job has stopped
        terminal.wait(lambda: is_whole(terminal), what="a frame")
        for _ in range(2):
            terminal.type("\x1a")
            terminal.wait_for("Stopped")
            terminal.wait(lambda: is_as_before(terminal), what="the terminal of the shell")
            terminal.type("clear\n")
            terminal.wait(lambda: "Stopped" not in terminal.text, what="an empty terminal")
            terminal.type("fg\n")
            terminal.wait(lambda: is_whole(terminal), what="a frame after fg")
            assert not terminal.line_by_line
        # In the background it keeps quiet, and comes back.
        terminal.type("\x1a")
        terminal.wait_for("Stopped")
        terminal.type("bg\n")
        terminal.type("echo the terminal is $((40 + 2))\n")
        terminal.wait_for("the terminal is 42")
        assert not terminal.in_alternate
        terminal.type("fg\n")
        terminal.wait(lambda: is_whole(terminal), what="a frame after bg and fg")
        terminal.type("q")
        terminal.wait_for("the end after 1")
        assert is_as_before(terminal)


@pytest.mark.parametrize(("keys", "message"), [("\x03", "KeyboardInterrupt"), ("x", "a defect amid the picture")])
def test_an_end_by_force_gives_the_terminal_back(keys: str, message: str) -> None:
    with Terminal(100, 30) as terminal:
        terminal.run(f"{PROGRAM} fail")
        terminal.wait(lambda: is_whole(terminal), what="a frame")
        terminal.type(keys)
        check_end(terminal, message)


def test_a_terminal_that_is_stopped_holds_up_nobody() -> None:
    """Nobody reads what is drawn, as after Ctrl-S: drawing goes on, and the terminal's modes come back at the end."""
    master, slave = pty.openpty()
    try:
        before = termios.tcgetattr(slave)
        with open(slave, "w", closefd=False) as file, Screen(Console(file=file, force_terminal=True), slave) as screen:
            for number in range(200):
                screen.draw([Text(f"{number} " * 20)] * 24)
            assert termios.tcgetattr(slave) != before
        assert termios.tcgetattr(slave) == before
    finally:
        os.close(slave)
        os.close(master)


def test_ctrl_backslash_gives_the_terminal_back() -> None:
    with Terminal(100, 30) as terminal:
        terminal.run(f"ulimit -c 0; {PROGRAM}")
        terminal.wait(lambda: is_whole(terminal), what="a frame")
        terminal.type("\x1c")
        check_end(terminal, "modes")


@pytest.mark.parametrize(
    ("how", "plain"), [("TERM=dumb {}", True), ("{} | cat", True), ("NO_COLOR=1 {}", False), ("{} < /dev/null", False)]
)
def test_where_there_is_no_picture(how: str, plain: bool) -> None:
    with Terminal(80, 24) as terminal:
        terminal.run(how.format(f"env {PROGRAM}"))
        if plain:
            terminal.wait_for("plain lines")
            assert b"\x1b[?1049h" not in terminal.raw
            return
        terminal.wait(lambda: is_whole(terminal), what="a frame")
        if "NO_COLOR" in how:
            assert not re.search(rb"\x1b\[[0-9;]*3[0-7]m", terminal.raw[terminal.raw.index(b"\x1b[?1049h") :])
        terminal.type("\x03")  # without keys the signal is left
        check_end(terminal, "KeyboardInterrupt")


def test_a_terminal_without_unicode() -> None:
    with Terminal(80, 24, {"PYTHONIOENCODING": "ascii"}) as terminal:
        terminal.run(PROGRAM)
        terminal.wait(lambda: is_whole(terminal), what="a frame")
        assert "> Check the GPU" in terminal.text
        assert terminal.raw[terminal.raw.index(b"\x1b[?1049h") :].isascii()
        terminal.type("q")
        check_end(terminal, "the end after 1")
