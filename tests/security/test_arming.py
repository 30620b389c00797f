"""``argus arm`` as root: what others load is written where nobody else may change it, and nobody's code is run.

"Others" is uid 65534, to whom folders belong.
"""

from __future__ import annotations

import errno
import os
import stat
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from argus.cli.main import main
from argus.cupti import arm, build
from argus.model.errors import ArgusError
from argus.system import files
from tests.security.test_files import NOBODY, secret, theirs  # noqa: F401 - fixtures

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files of other users")


@pytest.fixture(autouse=True)
def nobody_called_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)


class Swapping(type(Path())):  # type: ignore[misc]
    """A library, and somebody who puts a link in the place of each unfinished file while it is read."""

    def read_bytes(self) -> bytes:
        for file in self.parent.joinpath("theirs").glob(".*"):
            file.unlink()
            file.symlink_to(self.with_name("roots"))
        return b"library"


def test_the_mode_of_a_copy_is_given_to_nothing_else(
    theirs: Path,  # noqa: F811
    secret: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "library", lambda: Swapping(tmp_path / "library"))
    with pytest.raises(ArgusError, match="belongs to nobody"):
        arm.copy_to(theirs)
    assert not list(theirs.iterdir())
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


@pytest.mark.parametrize("where", ["theirs", "above", "link", "writable", "missing"])
def test_a_helper_is_not_copied_to_where_others_could_exchange_it(
    where: str,
    theirs: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, reason = theirs, f"{theirs}: it belongs to nobody"
    if where == "above":
        folder = theirs / "roots"
        folder.mkdir()
    elif where == "link":
        folder = tmp_path / "link"
        folder.symlink_to(theirs)
    elif where == "writable":
        theirs.chmod(0o777)
        os.chown(theirs, 0, 0)
        reason = f"{theirs}: others may write to it (its mode is 777)"
    elif where == "missing":
        folder = theirs / "new" / "deeper"
    before = sorted(theirs.rglob("*"))
    assert main(["arm", "--copy-to", str(folder)]) == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    line, hint = shown.err.splitlines()
    assert f"the helper is not copied to {folder}: others could exchange it: {reason}" in line
    assert "that root alone may change" in hint
    assert sorted(theirs.rglob("*")) == before


def test_a_helper_is_copied_to_a_folder_of_roots_or_of_who_called_sudo(
    theirs: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "link").symlink_to("shared")
    (tmp_path / "shared").mkdir()
    assert arm.copy_to(tmp_path / "link") == tmp_path / "shared" / build.LIBRARY
    assert arm.copy_to(tmp_path / "new" / "deeper").is_file()
    with pytest.raises(ArgusError):
        arm.copy_to(theirs)
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    assert arm.copy_to(theirs) == theirs / build.LIBRARY
    monkeypatch.delenv("SUDO_UID")
    code = theirs / "files.py"
    code.touch()
    os.chown(code, NOBODY, NOBODY)
    monkeypatch.setattr(files, "__file__", str(code))
    place = arm.copy_to(theirs)
    assert stat.S_IMODE(place.stat().st_mode) == 0o755


def test_a_start_up_file_is_not_written_where_others_could_exchange_it(
    theirs: Path,  # noqa: F811
    secret: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def line(path: Path) -> str:
        for file in theirs.glob(".*"):
            file.unlink()
            file.symlink_to(secret)
        return "\n"

    monkeypatch.setattr(arm, "_site_packages", lambda python: theirs)
    monkeypatch.setattr(arm, "pth_line", line)
    with pytest.raises(ArgusError, match="belongs to nobody"):
        arm.arm_interpreter("python3")
    assert not list(theirs.iterdir())
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


@pytest.fixture
def compiler(theirs: Path, secret: Path, tmp_path: Path) -> Iterator[str]:  # noqa: F811
    """One during which another user puts links in the place of all unfinished files that he may."""
    program = tmp_path / "cc"
    program.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho library > "$2"\ncd "$FOLDER"\n'
        f'exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups sh -c \'for f in .lib* .new-* "$1"; do '
        f'[ -e "$f" ] && rm -f "$f" && ln -s {secret} "$f"; done; true\' - "$2"\n'
    )
    program.chmod(0o755)
    yield str(program)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_a_compiled_helper_gives_its_mode_to_nothing_else(
    theirs: Path,  # noqa: F811
    compiler: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("FOLDER", str(theirs))
    theirs.parent.chmod(0o755)
    for made in build.compile_helper(theirs):
        assert made.read_bytes() == b"library\n"
        assert stat.S_IMODE(made.lstat().st_mode) == 0o755
        assert made.lstat().st_uid == 0
    assert len(list(theirs.iterdir())) == 2


# ---- interpreters


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter of root's, in a virtual environment."""
    venv.create(tmp_path / "venv", with_pip=False)
    return tmp_path / "venv" / "bin" / "python"


@pytest.mark.parametrize("remove", [False, True])
@pytest.mark.parametrize("where", ["file", "folder", "link", "config", "home", "library", "packages", "local"])
def test_root_runs_no_interpreter_that_a_user_may_change(
    where: str,
    remove: bool,
    python: Path,
    theirs: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SUDO_UID", str(NOBODY))  # who calls sudo has no need to: it is theirs
    ran, config = tmp_path / "ran", tmp_path / "venv" / "pyvenv.cfg"
    (packages,) = tmp_path.glob("venv/lib/python3*/site-packages")
    hostile = theirs / "python"
    hostile.write_text(f"#!/bin/sh\ntouch {ran}\n")
    hostile.chmod(0o755)
    part = theirs
    if where in ("file", "folder", "link"):
        exe = hostile
        if where == "file":
            part = tmp_path / "python"
            hostile.rename(part)
            os.chown(part, NOBODY, NOBODY)
            exe = part
        elif where == "link":
            exe = tmp_path / "link"
            exe.symlink_to(hostile)
    elif where == "local":  # of another folder that it imports from, as Debian's have
        exe = tmp_path / "python"
        exe.write_text(f"#!/bin/sh\ncase $2 in -S) echo '[\"{theirs}\"]';; *) touch {ran};; esac\n")
        exe.chmod(0o755)
    else:
        exe = python
        (packages / "hostile.pth").write_text(f"import os; open({str(ran)!r}, 'w').close()\n")
        if where == "home":
            lines = [line for line in config.read_text().splitlines() if not line.startswith("home")]
            config.write_text("\n".join([*lines, f"home = {theirs}"]))
        else:
            part = {"config": config, "library": packages.parents[1], "packages": packages}[where]
            os.chown(part, NOBODY, NOBODY)
    before = sorted(packages.iterdir())
    words = [str(exe), *(["--remove"] if remove else [])]
    assert main(["arm", "--python", *words]) == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    line, hint = shown.err.splitlines()
    assert f"{exe} is not run as root: others may change it: {part}: it belongs to nobody" in line
    assert f"sudo -u nobody argus arm --python {' '.join(words)}" in hint
    assert not ran.exists()
    assert sorted(packages.iterdir()) == before


def test_an_interpreter_that_all_may_write_to_is_to_become_root_s(
    python: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python.parent.chmod(0o777)
    assert main(["arm", "--python", str(python)]) == 3
    line, hint = capsys.readouterr().err.splitlines()
    assert "others may write to it (its mode is 777)" in line
    assert f"chmod go-w {python.parent}" in hint
    python.parent.chmod(0o755)
    assert main(["arm", "--python", str(python)]) == 0


def test_who_may_not_write_there_is_given_the_owner_s_name(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (packages,) = tmp_path.glob("venv/lib/python3*/site-packages")
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)

    def refuse(*words: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files, "write_at", refuse)
    for owner, words in ((0, "sudo argus arm"), (1, "sudo -u daemon argus arm"), (54321, "sudo -u '#54321' argus arm")):
        os.chown(packages, owner, 0)
        with pytest.raises(ArgusError, match="cannot be written: Permission denied") as refused:
            arm.arm_interpreter(str(python))
        assert refused.value.hint.startswith(f"Run it as its owner: {words} --python {python}, or")
