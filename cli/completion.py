"""``argus completion``: TAB completes verbs, options, and from the store jobs, runs and ranks.

A shell asks at each TAB, so that an answer may take some tenths of a second at most, and no failure may print anything.
Names come from a small file per store; an engine that runs is asked for newer ones, and where none runs, a process in
the background starts one and writes the file for the next TAB.

Whoever is traced chooses a job's name, and a shell inserts a word as it comes: only words that no shell obeys are
offered.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click

from argus.system import files, secrets

SHELLS = ("bash", "zsh", "fish")
ANSWER_S = 0.25
"""For so long a TAB waits for the engine, and for names that nobody has asked for before."""
FRESH_S = 10.0
"""So young a file is not asked for anew."""
MAX_BYTES = 16 << 20
"""Of a file of names."""
_INERT = re.compile(r"[A-Za-z0-9_./](?:[A-Za-z0-9_.@:+/%,-]|(?<=[A-Za-z0-9_])=)*")
"""Words that mean nothing but themselves to bash, zsh and fish, and begin no option. ``~``, and ``=`` at the beginning
or after a sign, would be replaced; ``!`` brings back a line."""
_QUERY = (
    "SELECT job, run, arraySort(groupUniqArray(rank)) AS ranks FROM ranks GROUP BY job, run ORDER BY run DESC"
    " FORMAT JSONEachRow"
)
Names = list[dict[str, Any]]
"""A row for each run, the newest first: job, run, ranks."""
_ARGUS = click.Command("argus")
"""Stands for the whole command: neither a shell's script nor the words of a line depend on its verbs."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the script that completes commands, options, jobs, runs and ranks by TAB.

    \b
      argus completion bash > /etc/bash_completion.d/argus      for everybody, or in ~/.bashrc:
      eval "$(argus completion bash)"
      eval "$(argus completion zsh)"                            in ~/.zshrc, after compinit
      argus completion fish > ~/.config/fish/completions/argus.fish
    """
    from click.shell_completion import get_completion_class

    maker = get_completion_class(shell)
    assert maker is not None
    if shell == "bash":
        click.echo(bash_script())
    else:
        click.echo(maker(_ARGUS, {}, "argus", "_ARGUS_COMPLETE").source())


def bash_script() -> str:
    """click's own, without its look at bash's version: that starts bash, and refuses where none is installed."""
    from click.shell_completion import BashComplete

    maker = BashComplete(_ARGUS, {}, "argus", "_ARGUS_COMPLETE")
    return str(maker.source_template % maker.source_vars())


# ---- what the store knows


def answer_from_store(instruction: str) -> bool:
    """Answers a TAB after ``--job``, ``--run``, ``--rank``, ``jobs`` and ``store rm``, as the shell wants it.

    No verb is imported for it, which would take longer than the answer.

    Args:
        instruction: What the shell's script has put into ``_ARGUS_COMPLETE``: ``bash_complete``, …

    Returns:
        False: something else is asked, which click answers.
    """
    from click.shell_completion import CompletionItem, get_completion_class

    shell, _, what = instruction.partition("_")
    maker = get_completion_class(shell)
    if what != "complete" or maker is None:
        return False
    asked = maker(_ARGUS, {}, "argus", "_ARGUS_COMPLETE")
    words, begun = asked.get_completion_args()
    kind = asked_for(words, begun)
    if kind is None:
        return False
    try:
        names = find_names(_after(words, "--store") or os.environ.get("ARGUS_STORE"))
    except Exception:
        names = []
    for word in choices(kind, names, words, begun):
        click.echo(asked.format_completion(CompletionItem(word)))
    return True


def asked_for(words: list[str], begun: str) -> str | None:
    """What stands at the end of a line: ``job``, ``run`` or ``rank``; None: nothing of these.

    Args:
        words: The words before, without ``argus``.
        begun: The word that is being typed.
    """
    if "--" in words:
        return None
    last = words[-1] if words else ""
    if last in ("--job", "--run", "--rank") and words[0] != "trace":
        return last[2:]
    if begun.startswith("-") or last in ("--store", "--format"):
        return None
    if words[:1] == ["jobs"]:
        return "job"
    if words[:2] == ["store", "rm"] and _removed(words) is None:
        return "job"
    return None


def choices(kind: str, names: Names, words: list[str], begun: str) -> list[str]:
    """The words that may stand there, the newest run's first, without those that a shell would not take as they are.

    Args:
        kind: ``job``, ``run`` or ``rank``.
        names: What is stored.
        words: The words before: they may name a job and a run.
        begun: How the word begins; of ranks several may stand there, by comma.
    """
    return [word for word in _beginning(kind, names, words, begun) if _INERT.fullmatch(word)]


def _beginning(kind: str, names: Names, words: list[str], begun: str) -> list[str]:
    if kind == "job":
        return [job for job in dict.fromkeys(str(row["job"]) for row in names) if job.startswith(begun)]
    job, run = _after(words, "--job") or _removed(words), _after(words, "--run")
    rows = [row for row in names if job in (None, row["job"])]
    if kind == "run":
        return [run for run in dict.fromkeys(str(row["run"]) for row in rows) if run.startswith(begun)]
    chosen = [row for row in rows if run in (None, str(row["run"]))][:1]
    head, comma, part = begun.rpartition(",")
    return [f"{head}{comma}{rank}" for row in chosen for rank in row["ranks"] if str(rank).startswith(part)]


def _after(words: list[str], option: str) -> str | None:
    places = [at for at, word in enumerate(words[:-1]) if word == option]
    return words[places[-1] + 1] if places else None


def _removed(words: list[str]) -> str | None:
    """The job that ``store rm`` names."""
    if words[:2] != ["store", "rm"]:
        return None
    plain = [
        word for at, word in enumerate(words[2:], 2) if not word.startswith("-") and not words[at - 1].startswith("--")
    ]
    return plain[0] if plain else None


def find_names(url: str | None) -> Names:
    """The runs of a store, from its file, its engine, or, in the background, from whoever has them."""
    if url is None:
        url = _default_url()
    file = names_file(url)
    known = _read(file)
    with contextlib.suppress(OSError):
        if known is not None and time.time() - file.stat().st_mtime < FRESH_S:
            return known
    if url.startswith("chdb://"):
        asked = _ask_engine(Path(os.path.realpath(url.removeprefix("chdb://"))))
        if asked is not None:
            _write(file, asked)
            return asked
    _refresh_aside(url)
    deadline = time.monotonic() + (ANSWER_S if known is None else 0.0)
    while known is None and time.monotonic() < deadline:
        time.sleep(0.02)
        known = _read(file)
    return known or []


def _default_url() -> str:
    """As ``argus.store.url.default_url``, without what that imports."""
    if os.geteuid() == 0:
        return "chdb:///var/lib/argus"
    return f"chdb://{os.environ.get('XDG_DATA_HOME') or os.path.expanduser('~/.local/share')}/argus"


def names_file(url: str) -> Path:
    """Where the names of a store are kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "argus"
    return folder / f"names-{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"


def _read(file: Path) -> Names | None:
    try:
        with files.opened(file.parent) as folder:
            content = json.loads(files.read_at(folder, file.name, MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, list) else None


def _write(file: Path, names: Names) -> None:
    with contextlib.suppress(OSError), files.opened(file.parent, create=True) as folder:
        files.write_at(folder, file.name, json.dumps(names).encode())


class _Engine(http.client.HTTPConnection):
    def __init__(self, folder: Path) -> None:
        super().__init__("argus", timeout=ANSWER_S)
        self._folder = folder

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(ANSWER_S)
        fd = files.open_folder(self._folder)  # the kernel takes 108 bytes of a path
        try:
            self.sock.connect(f"/proc/self/fd/{fd}/socket")
        finally:
            os.close(fd)


def _ask_engine(folder: Path) -> Names | None:
    """What an engine that runs answers; None: none does, or not soon enough."""
    connection = _Engine(folder)
    try:
        connection.request("POST", "/?" + urlencode({"readonly": "2"}), body=_QUERY)
        answer = connection.getresponse()
        text = answer.read().decode()
        return [json.loads(line) for line in text.splitlines()] if answer.status == 200 else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _refresh_aside(url: str) -> None:
    """Writes a store's names in a process that this one does not wait for, and that prints nothing."""
    from argus.system import child

    environment = {**os.environ, "PYTHONPATH": child.environment()["PYTHONPATH"]}
    environment.pop("_ARGUS_COMPLETE", None)
    password = environment.pop(secrets.VARIABLE, None)
    with contextlib.suppress(OSError), os.fdopen(os.memfd_create("argus")) as given:
        os.pwrite(given.fileno(), os.fsencode(password or ""), 0)
        subprocess.Popen(
            [sys.executable, "-m", __name__, url, *(["-"] if password is not None else [])],
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=environment,
            start_new_session=True,
        )


def refresh(url: str) -> None:
    """Asks a store of any kind for its names, starting its engine where needed, and writes them to their file."""
    from argus.store.open import open_store
    from argus.store.reader import query

    with open_store(url, create=False) as store:
        names: Names = []
        if store.exists():
            names = query(store, _QUERY.removesuffix(" FORMAT JSONEachRow"), timeout_s=5.0).to_pylist()
    _write(names_file(url), names)


if __name__ == "__main__":
    with contextlib.suppress(Exception):
        if "-" in sys.argv[2:]:
            secrets.give(sys.stdin.read())
        refresh(sys.argv[1])
