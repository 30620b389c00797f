"""Entries by which cron or systemd runs ``argus health``: with jitter, an environment, and no needless mail."""

from __future__ import annotations

import contextlib
import hashlib
import pwd
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.system import files, installation
from argus.system.host import host_name

CRON_FILE = Path("/etc/cron.d/argus-health")
UNIT_FOLDER = Path("/etc/systemd/system")
UNIT = "argus-health"
_MARK = "# Written by `argus health install-cron`; `--remove` takes it away."
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAX_FILE = 1 << 20
_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)


@dataclass(frozen=True)
class Plan:
    """What is to run.

    Attributes:
        minutes: How often; divides an hour, or is one.
        arguments: Words after ``argus health --quiet``.
        user: Who runs it.
        mail: MAILTO of cron; empty: no mail is sent, and the system's log has the output.
        jitter_s: Each node waits a time of its own, so that a cluster does not start at the same second; s.
        environment: Variables beside PATH and LC_ALL, by name.
        reads: Files and folders that say what is done: settings, plug-ins. Of those that root reads, each must be for
            root alone to change; one that is missing will do.
    """

    minutes: int = 5
    arguments: tuple[str, ...] = ()
    user: str = "root"
    mail: str = ""
    jitter_s: int = 60
    environment: tuple[tuple[str, str], ...] = ()
    reads: tuple[Path, ...] = ()


def crontab(plan: Plan) -> str:
    """A file for /etc/cron.d: crontab(5)."""
    schedule = "0" if plan.minutes == 60 else f"*/{plan.minutes}" if plan.minutes > 1 else "*"
    words = [*installation.program(), "health", "--quiet", *plan.arguments]
    # In a crontab % is the end of the line; sh needs quotes for the rest.
    command = " ".join(shlex.quote(word) for word in words).replace("%", "\\%")
    wait = f"sleep {_jitter(plan.jitter_s)}; " if plan.jitter_s else ""
    log = "" if plan.mail else " 2>&1 | logger -t argus-health"
    return "\n".join([
        _MARK, "SHELL=/bin/sh", f"PATH={_PATH}", "LC_ALL=C.UTF-8", f'MAILTO="{plan.mail}"',
        *(f'{name}="{value}"' for name, value in plan.environment),
        f"{schedule} * * * * {plan.user} {wait}{command}{log}", "",
    ])  # fmt: skip


def _jitter(most_s: int) -> int:
    """The node's own wait, by its name: the same each time, so that runs keep their distance."""
    return int.from_bytes(hashlib.sha256(host_name().encode()).digest()[:4], "big") % most_s


def units(plan: Plan) -> dict[str, str]:
    """A service and a timer by file name: systemd.service(5), systemd.timer(5)."""
    words = [*installation.program(), "health", "--quiet", *plan.arguments]
    quoted = [
        '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$") + '"'
        for word in words
    ]
    schedule = "hourly" if plan.minutes == 60 else f"*:0/{plan.minutes}"
    service = [
        _MARK, "[Unit]", "Description=Argus checks this node's health", "[Service]", "Type=oneshot",
        f"User={plan.user}",
        f"Environment=PATH={_PATH} LC_ALL=C.UTF-8",
        *(f'Environment="{name}={value.replace("%", "%%")}"' for name, value in plan.environment),
        f"ExecStart={' '.join(quoted)}",
        "# 1 to 3 describe the node, not the service.", "SuccessExitStatus=1 2 3", "Nice=5",
        "TimeoutStartSec=300", "",
    ]  # fmt: skip
    timer = [
        _MARK, "[Unit]", "Description=Argus checks this node's health now and then", "[Timer]",
        f"OnCalendar={schedule}",
        f"RandomizedDelaySec={plan.jitter_s}", "FixedRandomDelay=true", "[Install]", "WantedBy=timers.target", "",
    ]  # fmt: skip
    return {f"{UNIT}.service": "\n".join(service), f"{UNIT}.timer": "\n".join(timer)}


def planned(plan: Plan, *, systemd: bool, cron_file: Path = CRON_FILE, folder: Path = UNIT_FOLDER) -> dict[Path, str]:
    """The files that ``install`` would write, with their text.

    Raises:
        ArgusError: Something in the plan cannot be written so.
    """
    if plan.minutes < 1 or 60 % plan.minutes:
        raise ArgusError(f"cron cannot run every {plan.minutes} minutes", "Take one that divides 60", EXIT_USAGE)
    if not _PLAIN.fullmatch(plan.user) or (plan.mail and not _PLAIN.fullmatch(plan.mail)):
        raise ArgusError("a user or address with such characters cannot be in a crontab", "", EXIT_USAGE)
    if any("\n" in word for word in plan.arguments):
        raise ArgusError("a line break cannot be in a crontab", "", EXIT_USAGE)
    for name, value in plan.environment:
        if not value.isprintable() or set(value) & set("\"\\'"):
            raise ArgusError(f"{name} has characters that cannot be in a crontab", "", EXIT_USAGE)
    try:
        pwd.getpwnam(plan.user)
    except KeyError:
        hint = "cron and systemd would not run it: --user names one that is there"
        raise ArgusError(f"there is no user '{plan.user}'", hint, EXIT_USAGE) from None
    if not systemd and not re.fullmatch(r"[A-Za-z0-9_-]+", cron_file.name):
        hint = "Letters, digits, - and _ only: --cron-file /etc/cron.d/argus-health"
        raise ArgusError(f"cron reads no file of the name '{cron_file.name}'", hint, EXIT_USAGE)
    return {folder / name: text for name, text in units(plan).items()} if systemd else {cron_file: crontab(plan)}


def install(plan: Plan, *, systemd: bool, cron_file: Path = CRON_FILE, folder: Path = UNIT_FOLDER) -> list[Path]:
    """Writes the entry, in place of an older one, and starts the timer. Returns the files.

    Raises:
        ArgusError: Something in the plan cannot be written so, or the files cannot be, or root would run what others
            may change, or obey a file that they may.
    """
    planned_files = planned(plan, systemd=systemd, cron_file=cron_file, folder=folder)
    _check_program(plan)
    for file, text in planned_files.items():
        _write(file, text)
    if systemd and folder == UNIT_FOLDER:
        _systemctl("daemon-reload")
        _systemctl("enable", "--now", f"{UNIT}.timer")
    return list(planned_files)


def remove(*, cron_file: Path = CRON_FILE, folder: Path = UNIT_FOLDER) -> list[Path]:
    """Takes away what ``install`` wrote, of either kind; files of others stay. Returns what was removed."""
    removed = []
    timer = folder / f"{UNIT}.timer"
    if folder == UNIT_FOLDER and timer.exists():
        _systemctl("disable", "--now", f"{UNIT}.timer")
    for file in (cron_file, folder / f"{UNIT}.service", timer):
        try:
            if file.read_bytes().startswith(_MARK.encode()):
                file.unlink()
                removed.append(file)
        except FileNotFoundError:
            continue
        except OSError as failure:
            raise _refused(file, failure) from None
    if folder == UNIT_FOLDER and timer in removed:
        _systemctl("daemon-reload")
    return removed


def _check_program(plan: Plan) -> None:
    """Refuses to have root run, every few minutes, what somebody else may change, or do what a file of theirs says.

    Raises:
        ArgusError: Somebody may.
    """
    if plan.user != "root":
        return
    changeable = installation.changeable()
    if changeable is not None:
        part, reason = changeable
        hint = f"{installation.fix(part)}; or --user NAME has another user run it"
        raise ArgusError(f"nothing was installed: root would run {part}, and {reason}", hint, EXIT_UNAVAILABLE)
    for path in plan.reads:
        try:
            changeable = files.changeable(path.absolute())
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as failure:
            message = f"nothing was installed: {path} cannot be looked at: {failure.strerror}"
            raise ArgusError(message, "Is it a link to itself?", EXIT_UNAVAILABLE) from None
        if changeable is not None:
            part, reason = changeable
            name = shlex.quote(str(part))
            hint = f"chown -h root:root {name}; chmod go-w {name}; or --user NAME has another user run it"
            message = f"nothing was installed: root would obey {path}, and others may change {part}: {reason}"
            raise ArgusError(message, hint, EXIT_UNAVAILABLE)


def _write(file: Path, text: str) -> None:
    # cron reads only files that root alone may write, and none with a dot in its name: the new one is not yet read.
    try:
        with files.opened(file.parent) as folder:
            with contextlib.suppress(FileNotFoundError):
                if not files.read_at(folder, file.name, _MAX_FILE).startswith(_MARK.encode()):
                    raise ArgusError(f"{file} is not Argus's", "Move it away", EXIT_UNAVAILABLE)
            files.write_at(folder, file.name, text.encode(), 0o644)
    except OSError as failure:
        raise _refused(file, failure) from None


def _refused(file: Path, failure: OSError) -> ArgusError:
    hint = "See df and mount: the disk takes no writes"
    if isinstance(failure, files.Untrusted):
        hint = failure.fix
    elif isinstance(failure, PermissionError):
        hint = "Run it as root"
    elif isinstance(failure, FileNotFoundError | NotADirectoryError):
        hint = "Is cron installed? There is --systemd-timer, too"
    return ArgusError(f"cannot change {file}: {failure.strerror}", hint, EXIT_UNAVAILABLE)


def _systemctl(*words: str) -> None:
    try:
        done = subprocess.run(["systemctl", *words], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise ArgusError(f"systemctl {words[0]}: {failure}", "Without systemd, leave out --systemd-timer") from None
    if done.returncode:
        raise ArgusError(f"systemctl {words[0]}: {done.stderr.strip().splitlines()[-1:] or done.returncode}", "")
