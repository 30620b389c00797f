"""Folders and files that others may change: what root writes, reads or runs there is of root's own choice.

"Others" is uid 65534, to whom files and folders belong.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pyarrow as pa
import pytest

from argus.cli.main import main
from argus.diagnose import owners
from argus.health import config, cron
from argus.live.account import Account
from argus.model.errors import ArgusError
from argus.store import engine, failures, limits, load, spill, spool
from argus.store.arrow import to_arrow
from argus.store.open import open_store
from argus.store.url import parse_url
from argus.system import debug, disk_cache, files, installation
from tests.security.test_off_the_loop import users
from tests.stores import new_store

NOBODY = 65534
ARGUS = [sys.executable, "-m", "argus.cli.main"]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files of other users")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder of another user's."""
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    os.chown(folder, NOBODY, NOBODY)
    return folder


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A file of root's that must stay as it is."""
    file = tmp_path / "roots"
    file.write_text("root's\n" * 300_000)  # 2 MB
    file.chmod(0o600)
    before = file.read_bytes(), file.stat().st_mode, file.stat().st_mtime_ns
    yield file
    assert (file.read_bytes(), file.stat().st_mode, file.stat().st_mtime_ns) == before


COVERAGE = {
    "job": "j",
    "run": 1,
    "host": "h",
    "counter": ["lost"],
    "ts": 1_790_000_000 * 10**9,
    "value": 0,
    "loss": False,
    "version": 1,
}


def a_batch(folder: Path) -> Path:
    """A file of a spool, as Argus writes it."""
    return spool.write(folder, "coverage", "trace/host/1/coverage/0", to_arrow("coverage", COVERAGE))


def a_forged_batch(folder: Path, number: int, **forged: Any) -> Path:
    """One that says what its maker chose: table, token, names of columns, and the zone of its times."""
    rows = to_arrow("coverage", COVERAGE)
    for name in forged.get("columns", ()):
        rows = rows.append_column(name, pa.array(["1"]))
    if zone := forged.get("zone"):
        at = rows.schema.get_field_index("ts")
        rows = rows.set_column(at, "ts", rows.column("ts").cast(pa.timestamp("ns", zone)))
    file = folder / f"{number:06}-coverage.arrow"
    file.write_bytes(spool._encoded(forged.get("table", "coverage"), forged.get("token", "t/1"), rows, 0.0))
    return file


# ---- the module


def test_a_folder_of_others_is_refused(theirs: Path, tmp_path: Path) -> None:
    for make, why in (
        (lambda: theirs, "it belongs to nobody"),
        (lambda: os.chown(theirs, 0, 0) or theirs.chmod(0o777) or theirs, "others may write to it (its mode is 777)"),
        (lambda: theirs.chmod(0o775) or theirs, "others may write to it (its mode is 775)"),
        (lambda: (tmp_path / "link").symlink_to(theirs) or tmp_path / "link", "it is a symbolic link"),
    ):
        with pytest.raises(files.Untrusted) as refused:
            files.open_folder(make())
        assert refused.value.strerror == why
    theirs.chmod(0o755)
    os.close(files.open_folder(theirs))


def test_a_file_of_others_is_refused_and_no_pipe_is_waited_for(tmp_path: Path, secret: Path) -> None:
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "given").write_text("x")
    os.chown(tmp_path / "given", NOBODY, NOBODY)
    os.mknod(tmp_path / "full", 0o600 | stat.S_IFCHR, os.makedev(1, 7))
    with files.opened(tmp_path) as folder:
        for name in ("link", "pipe", "given", "full"):
            for flags in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT, os.O_RDWR | os.O_CREAT):
                with pytest.raises(files.Untrusted):
                    files.open_at(folder, name, flags)
        (tmp_path / "large").write_bytes(b"x" * 101)
        with pytest.raises(OSError) as large:
            files.read_at(folder, "large", 100)
        assert large.value.errno == errno.EFBIG
        files.write_at(folder, "link", b"new")
    assert (tmp_path / "link").read_text() == "new"
    assert not (tmp_path / "link").is_symlink()


def test_a_path_is_followed_within_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("x")
    for name, target in (("up", "../../a"), ("out", "/b/file"), ("loop", "loop")):
        (tmp_path / "a" / name).symlink_to(target)
    root = os.open(tmp_path / "a", os.O_PATH)

    def found(path: str, **more: bool) -> str:
        fd = files.walk(root, path, **more)
        try:
            return os.readlink(f"/proc/self/fd/{fd}").removeprefix(str(tmp_path))
        finally:
            os.close(fd)

    try:
        assert found("/b/../../../../b/./file") == "/a/b/file"
        assert found("out") == "/a/b/file", "a link begins in the folder, too"
        assert found("out", follow=False) == "/a/out"
        for path, number in (
            ("up", errno.ENOENT),
            ("loop", errno.ELOOP),
            ("b/file/x", errno.ENOTDIR),
        ):
            with pytest.raises(OSError) as failure:
                files.walk(root, path)
            assert (failure.value.errno, failure.value.filename) == (number, path)
        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(files, "MAX_DEPTH", 1)
        assert found("b/../" * 99) == "/a"
        with pytest.raises(OSError, match="too long"):
            found("b/file")
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        os.close(root)


def test_a_link_of_others_does_not_choose_the_folder(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "mine").symlink_to(tmp_path / "private")
    with files.replacing(tmp_path / "mine" / "file") as file:
        file.write(b"1")
    (theirs / "deeper").symlink_to(tmp_path / "private")
    os.chown(theirs / "deeper", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(files.Untrusted), files.replacing(theirs / "deeper" / "file") as file:
        file.write(b"2")
    assert (tmp_path / "private" / "file").read_bytes() == b"1"
    assert [path.name for path in (tmp_path / "private").iterdir()] == ["file"]


def test_what_root_runs_is_checked_up_to_the_root(theirs: Path, tmp_path: Path) -> None:
    program = tmp_path / "opt" / "bin" / "argus"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    assert files.changeable(program) is None
    program.chmod(0o775)
    assert files.changeable(program) is None, "root's group"
    for part in (program, program.parent, tmp_path / "opt"):
        os.chown(part, NOBODY, 0)
        assert files.changeable(program) == (part, "it belongs to nobody")
        os.chown(part, 0, 0)
        mode = stat.S_IMODE(part.stat().st_mode)
        part.chmod(0o757)
        assert files.changeable(program) == (part, "others may write to it (its mode is 757)")
        part.chmod(mode)
    (tmp_path / "argus").symlink_to(program)
    assert files.changeable(tmp_path / "argus") is None
    os.chown(tmp_path / "argus", NOBODY, 0, follow_symlinks=False)
    assert files.changeable(tmp_path / "argus") == (tmp_path / "argus", "the link belongs to nobody")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        files.changeable(tmp_path / "a")


def test_what_root_creates_is_for_root_alone(tmp_path: Path) -> None:
    program = (
        "import os, sys; from argus.cli import main; from argus.system import files; os.umask(0o022)\n"
        "try: main.main()\nfinally:\n open(os.environ['FILE'], 'w').close(); files.share()\n"
        " open(os.environ['FILE'] + '2', 'w').close()"
    )
    for verb, mode in (("explain", 0o600), ("arm", 0o644)):
        file = tmp_path / verb
        words = [sys.executable, "-c", program, verb, "--help"]
        subprocess.run(words, env={**os.environ, "FILE": str(file)}, check=True, capture_output=True)
        assert stat.S_IMODE(file.stat().st_mode) == mode, verb
        assert stat.S_IMODE(Path(f"{file}2").stat().st_mode) == 0o644


def test_folders_above_what_is_for_its_owner_alone_are_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        for euid in (0, 1000):
            with monkeypatch.context() as other:
                other.setattr(os, "geteuid", lambda euid=euid: euid)
                files.make_folder(tmp_path / f"there/{euid}/b/c", 0o700)
                files.make_folder(tmp_path / f"there/{euid}/b/c", 0o700)
                files.make_folder(tmp_path / f"there/shared{euid}/b")
    finally:
        os.umask(before)
    for euid in (0, 1000):
        own = tmp_path / f"there/{euid}"
        assert [stat.S_IMODE(part.stat().st_mode) for part in (own, own / "b", own / "b/c")] == [0o700] * 3
        assert stat.S_IMODE((tmp_path / f"there/shared{euid}").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "there").stat().st_mode) == 0o755


@pytest.mark.parametrize("kind", ["chdb", "spool"])
def test_a_user_does_not_choose_which_folder_of_roots_is_the_store(
    kind: str, theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    roots, sticky = tmp_path / "root", tmp_path / "sticky"
    for folder in (roots, sticky, theirs / "moved"):
        folder.mkdir(mode=0o700)
    sticky.chmod(0o1777)
    (roots / "config.xml").write_text("root's")
    for link in (theirs / "l", sticky / "theirs"):
        link.symlink_to(roots)
        os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    for where in (
        theirs / "l",
        theirs / "moved",
        theirs / "new" / "store",
        sticky / "theirs",
        tmp_path / "theirs/../root",
    ):
        url = f"{kind}://{where}"
        assert main(["simulate", "--store", url]) == 3
        assert main(["jobs", "--store", url]) == 3
        (line, *_) = capsys.readouterr().err.splitlines()
        assert f"the store's folder {where} is not used: others choose what it is: " in line
        assert "belongs to nobody" in line
    assert [each.name for each in roots.iterdir()] == ["config.xml"]
    assert not any((theirs / "moved").iterdir())
    assert not (theirs / "new").exists()
    (sticky / "mine").symlink_to(roots)
    for where in (sticky / "mine", roots / "new" / "store"):
        parse_url(f"{kind}://{where}")
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    parse_url(f"{kind}://{theirs / 'moved'}")
    monkeypatch.delenv("SUDO_UID")
    # Who owns Argus's code can change what root runs anyway.
    code = theirs / "url.py"
    code.touch()
    os.chown(code, NOBODY, NOBODY)
    monkeypatch.setattr("argus.store.url.__file__", str(code))
    parse_url(f"{kind}://{theirs / 'moved'}")


# ---- C4a: spools


@pytest.mark.parametrize("where", ["theirs", "writable", "link"])
def test_a_spool_that_others_may_write_to_is_neither_loaded_nor_written(
    where: str, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool_folder = tmp_path / "spool"
    spool_folder.mkdir(mode=0o700)
    a_batch(spool_folder)
    if where == "theirs":
        os.chown(spool_folder, NOBODY, NOBODY)
    elif where == "writable":
        spool_folder.chmod(0o777)
    else:
        spool_folder.rename(tmp_path / "moved")
        spool_folder.symlink_to(tmp_path / "moved")
    assert main(["store", "load", str(spool_folder), "--store", f"chdb://{tmp_path}/store"]) != 0
    output = capsys.readouterr().err
    assert f"{spool_folder} is not loaded: " in output
    assert not (tmp_path / "store").exists()
    with pytest.raises(ArgusError, match="is not used"):
        spool.prepare(spool_folder)
    with pytest.raises(ArgusError, match="is not used"):
        a_batch(spool_folder)


def test_names_and_tokens_of_a_spool_are_those_of_the_schema(tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir(mode=0o700)
    target = tmp_path / "written"
    for number, (hostile, why) in enumerate(
        (
            ({"table": f"FUNCTION file('{target}','TSVRaw','a String')"}, "which this Argus does not have"),
            ({"table": "schema_migrations"}, "which this Argus does not have"),
            ({"table": "iterations_rollup"}, "which this Argus does not have"),
            ({"token": "x\n* * * * * root id > /etc/passwd\n"}, "a token that Argus did not make"),
            ({"token": ""}, "a token that Argus did not make"),
            ({"token": "t" * 301}, "a token that Argus did not make"),
            ({"columns": ["x`) FORMAT Null --"]}, "which coverage does not have"),
            ({"zone": "WTC"}, "times of the zone 'WTC'; Argus writes UTC"),
        ),
        1,
    ):
        file = a_forged_batch(folder, number, **hostile)
        with pytest.raises(spool.Foreign, match=re.escape(why)):
            spool.read(file)
    file = a_batch(folder)
    assert spool.read(file).rows.num_rows == 1
    assert file.name == "000009-coverage.arrow"
    with open_store(new_store(tmp_path)) as store:
        (folder / ".loaded").symlink_to(secret)
        with pytest.raises(ArgusError, match="symbolic link"):
            load.load_spool(folder, store, progress=lambda done, of: None)
        (folder / ".loaded").unlink()
        found = load.load_spool(folder, store, progress=lambda done, of: None)
        assert (found.files, len(found.trouble)) == (1, 8)
        assert not target.exists()
        assert len((folder / ".loaded").read_text().splitlines()) == 1


def test_a_file_of_a_spool_is_a_regular_file_of_bounded_size(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "spool"
    folder.mkdir(mode=0o700)
    good = a_batch(folder)
    (folder / "000002-jobs.arrow").symlink_to(good)
    os.mkfifo(folder / "000003-jobs.arrow")
    for name in ("000002-jobs.arrow", "000003-jobs.arrow"):
        with pytest.raises(spool.Damaged, match="is not read"):
            spool.read(folder / name)
    monkeypatch.setattr(spool, "MAX_FILE_BYTES", 100)
    with pytest.raises(ArgusError, match="larger than"):
        spool.read(good)


# ---- C4b: embedded stores


@pytest.mark.parametrize("name", ["lock", "config.xml", "engine.log", "db"])
def test_links_in_a_stores_folder_lead_nowhere(name: str, tmp_path: Path, secret: Path) -> None:
    """Left by whoever had the folder before it became root's."""
    store = tmp_path / "store"
    store.mkdir(mode=0o700)
    target = secret
    if name == "db":
        target = tmp_path / "elsewhere"
        target.mkdir()
        os.chown(target, NOBODY, NOBODY)
    (store / name).symlink_to(target)
    code = main(["sql", "SELECT 1", "--store", f"chdb://{store}"])
    with open_store(f"chdb://{store}") as opened:
        if name == "config.xml":  # replaced, not written to
            with opened.lease() as client:
                assert client.command("SELECT 1") == 1
        else:
            with pytest.raises(ArgusError, match=r"symbolic link|belongs to nobody"), opened.lease():
                pass
    assert code != 0 or name == "config.xml"
    assert not (tmp_path / "elsewhere").exists() or not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_store_of_another_user_is_refused(mode: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    (store / "db").mkdir(parents=True)
    store.chmod(mode)
    if mode == 0o755:
        os.chown(store, NOBODY, NOBODY)
    for words in (["jobs"], ["sql", "SELECT 1"], ["store", "init"]):
        assert main([*words, "--store", f"chdb://{store}"]) != 0
        assert f"the store's folder {store} is not used: " in capsys.readouterr().err
    assert sorted(path.name for path in store.iterdir()) == ["db"]


def test_an_engine_of_another_user_is_not_talked_to(theirs: Path) -> None:
    theirs.chmod(0o777)
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()\n"
        "print('on', flush=True)\n"
        "while True: c, _ = s.accept(); c.recv(999); c.send(b'HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n')"
    )
    # Through a descriptor: the folders above are root's alone.
    folder = os.open(theirs, os.O_PATH)
    words = [
        "setpriv",
        "--reuid",
        str(NOBODY),
        "--regid",
        str(NOBODY),
        "--clear-groups",
        "/usr/bin/python3",
        "-c",
        program,
    ]
    fake = subprocess.Popen(
        [*words, f"/proc/self/fd/{folder}/socket"], pass_fds=(folder,), stdout=subprocess.PIPE, text=True
    )
    try:
        assert fake.stdout is not None
        assert fake.stdout.readline() == "on\n"
        os.chown(theirs, 0, 0)
        theirs.chmod(0o700)
        (theirs / "db").mkdir()
        with pytest.raises(ArgusError, match="it is answered by nobody"), open_store(f"chdb://{theirs}").lease():
            pass
    finally:
        fake.kill()
        fake.wait()
        os.close(folder)


def test_only_root_has_root_s_engine_read_files(tmp_path: Path) -> None:
    """Who may run ``argus sql`` as root reads any file by it (docs/security.md, Sudo); nobody else reaches that engine,
    also where the folder of its store is open to all."""
    secret = tmp_path / "secret"
    secret.write_text("root's own\n")
    secret.chmod(0o600)
    url = new_store(tmp_path)
    store_folder = Path(url.removeprefix("chdb://"))
    read = f"SELECT line FROM file('{secret}', 'LineAsString', 'line String')"
    with open_store(url) as store, store.lease() as client:
        assert client.query(read).result_rows == [("root's own",)]
        store_folder.chmod(0o755)
        folder = os.open(store_folder, os.O_PATH)  # the folders above are root's alone
        try:
            words = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "/usr/bin/python3"]
            ask = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print('connected')"
            done = subprocess.run(
                [*words, "-c", ask, f"/proc/self/fd/{folder}/socket"],
                pass_fds=(folder,),
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            os.close(folder)
            store_folder.chmod(0o700)
    assert done.stdout == ""
    assert "PermissionError" in done.stderr
    sudo = Path(__file__).parents[2].joinpath("docs", "security.md").read_text().split("## Sudo")[1]
    assert "`argus sql`" in sudo
    assert "`file()`" in sudo


def exchange(one: Path, other: Path) -> None:
    """At once (renameat2(2), RENAME_EXCHANGE)."""
    here = -100
    assert ctypes.CDLL(None).renameat2(here, os.fsencode(one), here, os.fsencode(other), 2) == 0


def test_an_engine_stays_in_the_folder_that_was_checked(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may rename the folder's parent cannot choose what chdb writes to."""
    monkeypatch.setenv("SUDO_UID", str(NOBODY))  # or a store is not opened there at all
    url = new_store(theirs)
    with open_store(url) as store, store.lease() as client:
        client.command("CREATE TABLE t (a Int32) ENGINE = MergeTree ORDER BY a")
        (theirs / "other" / "db").mkdir(parents=True)
        # An engine whose socket is not there any more ends, which takes 0.2 s.
        os.link(theirs / "store" / "socket", theirs / "other" / "socket")
        exchange(theirs / "store", theirs / "other")
        client.command("INSERT INTO t SELECT number FROM numbers(1000)")
        assert client.command("SELECT count() FROM t") == 1000
        assert {path.name for path in (theirs / "store").rglob("*")} == {"db", "socket"}
        exchange(theirs / "store", theirs / "other")


def test_files_of_stores_and_checks_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with open_store(f"chdb://{tmp_path}/lib/argus") as store, store.lease():
            pass
        settings = tmp_path / "health.toml"
        settings.write_text(f'state_dir = "{tmp_path}/var/argus/health"\n')
        settings.chmod(0o644)
        main(["health", "--config", str(settings), "--only", "memory", "--no-store"])
    finally:
        os.umask(before)
    for folder in ("lib", "lib/argus", "var", "var/argus", "var/argus/health"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700, folder
    for file in (
        "lib/argus/lock",
        "lib/argus/engine.log",
        "lib/argus/config.xml",
        "var/argus/health/state.json",
        "var/argus/health/lock",
    ):
        assert stat.S_IMODE((tmp_path / file).stat().st_mode) == 0o600, file


def test_the_cache_and_the_spill_of_others_are_not_used(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_cache.keep(theirs / "x.json", b"data", 4)
    assert not list(theirs.iterdir())
    (theirs / "x.json").write_bytes(b"")
    assert disk_cache.read(theirs / "x.json") is None
    monkeypatch.setenv("ARGUS_SPILL_DIR", str(theirs))
    place = spill.place(parse_url("chdb:///nowhere"))
    assert place is not None
    os.mkdir(place.folder)
    os.chown(place.folder, NOBODY, NOBODY)
    with pytest.raises(ArgusError, match="belongs to nobody"):
        spill.create(place, "session")
    os.chown(place.folder, 0, 0)
    spill.create(place, "session").close()


# ---- S7: bounds

MEASURED_S = 4.0


@pytest.fixture
def measured_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines measure their stores every ``MEASURED_S`` instead of every ten seconds."""
    code = f"from argus.store import engine; engine.MEASURE_S = {MEASURED_S}; engine.main()"
    popen = subprocess.Popen

    def start(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        is_engine = words[1:3] == ["-m", "argus.store.engine"]
        return popen([words[0], "-c", code, *words[3:]] if is_engine else words, **options)

    monkeypatch.setattr(subprocess, "Popen", start)


@pytest.mark.usefixtures("measured_often")
def test_a_store_takes_no_rows_beyond_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = new_store(tmp_path)
    monkeypatch.setenv("ARGUS_STORE_MAX", "1K")
    with open_store(url) as store, store.lease() as client:
        client.command("CREATE TABLE t (a UInt64) ENGINE = MergeTree ORDER BY a AS SELECT number FROM numbers(10000)")
        deadline = time.monotonic() + 60
        while True:
            try:
                client.insert("t", [[1]], column_names=["a"])
            except Exception as failure:
                refused = store.explain(failure)
                break
            assert time.monotonic() < deadline, "nothing was refused"
            time.sleep(0.1)
        assert "reached its bound (ARGUS_STORE_MAX)" in refused.message
        assert "argus store rm" in refused.hint
        assert failures.transient(refused), "rows wait, they are not thrown away"
        client.command("DROP TABLE t SYNC")


@pytest.mark.usefixtures("measured_often")
def test_a_store_stays_below_its_bound_however_fast_rows_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is measured now and then; and it takes rows again once some were removed."""
    url = new_store(tmp_path)
    monkeypatch.setenv("ARGUS_STORE_MAX", "8M")
    size = "SELECT sum(bytes_on_disk) FROM system.parts"

    def insert(_: int) -> bool:
        """2 MiB that no codec makes much smaller. Whether they were taken."""
        try:
            client.insert("t", [[os.urandom(1 << 20).hex()]], column_names=["a"])
        except Exception as failure:
            if "reached its bound" not in store.explain(failure).message:
                raise
            return False
        return True

    with open_store(url) as store, store.lease() as client:
        client.command("CREATE TABLE t (a String) ENGINE = MergeTree ORDER BY tuple()")
        assert 3 <= sum(map(insert, range(40))) <= 6
        until = time.monotonic() + 1.2 * MEASURED_S
        while time.monotonic() < until:  # it is measured meanwhile
            insert(0)
            time.sleep(0.1)
        assert int(client.command(size)) <= (8 << 20) + (3 << 20), "the bound, and the last row"
        deadline = time.monotonic() + 60
        client.command("TRUNCATE TABLE t SYNC")
        while not insert(0):
            assert time.monotonic() < deadline, "there is room, and nothing is taken"
            time.sleep(0.1)
        client.command("DROP TABLE t SYNC")


def test_room_is_left_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"<min_free_disk_bytes_to_perform_insert>{limits.kept_free(tmp_path)}<" in engine.config(tmp_path)
    a_batch(tmp_path)
    disk = os.statvfs(tmp_path)
    monkeypatch.setattr(limits, "kept_free", lambda place: disk.f_bavail * disk.f_frsize * 2)
    with pytest.raises(ArgusError, match="no space is left"):
        a_batch(tmp_path)
    monkeypatch.undo()
    free = os.statvfs(tmp_path)
    assert limits.kept_free(tmp_path) == min(int(free.f_blocks * free.f_frsize * 0.05), 5 << 30)
    with open_store(new_store(tmp_path)) as store, store.lease() as client:
        asked = "SELECT value FROM system.merge_tree_settings WHERE name = 'min_free_disk_bytes_to_perform_insert'"
        assert int(client.command(asked)) == limits.kept_free(tmp_path)


# ---- H11: health --output


def health(tmp_path: Path, output: Path) -> subprocess.CompletedProcess[str]:
    settings = tmp_path / "health.toml"
    settings.write_text(f'state_dir = "{tmp_path}/state"\n')
    words = ["health", "--config", str(settings), "--only", "memory", "--no-store", "--output", str(output)]
    return subprocess.run([*ARGUS, *words], capture_output=True, text=True, timeout=60)


def test_an_output_in_a_folder_of_others_follows_no_link_and_waits_for_no_pipe(
    tmp_path: Path, theirs: Path, secret: Path
) -> None:
    output = theirs / "argus.prom"
    for target in (secret, Path("/dev/full"), tmp_path / "not-there"):
        output.symlink_to(target)
        done = health(tmp_path, output)
        assert done.returncode != 3, done.stderr
        assert stat.S_ISREG(output.lstat().st_mode)
        assert stat.S_IMODE(output.lstat().st_mode) == 0o644
        output.unlink()
    assert not (tmp_path / "not-there").exists()
    os.mkfifo(output)
    os.chown(output, NOBODY, NOBODY)
    done = health(tmp_path, output)
    assert done.returncode == 3
    assert "cannot write" in done.stderr
    (theirs / "up").symlink_to(tmp_path)
    os.chown(theirs / "up", NOBODY, NOBODY, follow_symlinks=False)
    done = health(tmp_path, theirs / "up" / "argus.prom")
    assert "the link up on the way to it belongs to nobody" in done.stderr
    assert not (tmp_path / "argus.prom").exists()


def test_an_output_to_a_device_of_roots_still_works(tmp_path: Path) -> None:
    assert health(tmp_path, Path("/dev/null")).returncode != 3
    done = health(tmp_path, Path("/dev/stdout"))
    assert "memory" in done.stdout or "ok" in done.stdout.lower(), done.stdout
    done = health(tmp_path, Path("/dev/full"))
    assert (done.returncode, "No space left" in done.stderr) == (3, True)


# ---- H12: install-cron


def test_cron_runs_nothing_that_a_user_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "venv" / "bin" / "argus"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(installation, "program", lambda: [str(program)])
    file = tmp_path / "argus-health"
    for part in (program, program.parent.parent):
        os.chown(part, NOBODY, NOBODY)
        with pytest.raises(ArgusError, match="it belongs to nobody") as refused:
            cron.install(cron.Plan(), systemd=False, cron_file=file)
        assert str(part) in refused.value.message
        assert "chown" in refused.value.hint
        assert not file.exists()
        cron.install(cron.Plan(user="nobody"), systemd=False, cron_file=file)
        file.unlink()
        os.chown(part, 0, 0)
    if installation.changeable() is None:  # where the tests run
        assert cron.install(cron.Plan(), systemd=False, cron_file=file) == [file]
        assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_cron_does_nothing_that_a_file_of_others_says(
    tmp_path: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings say which plug-ins are run and where rows go. Who called sudo does not count as root here: cron's runs
    go on when sudo is over."""
    monkeypatch.setattr(installation, "changeable", lambda: None)
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    entry, settings, plugins = tmp_path / "argus-health", tmp_path / "health.toml", tmp_path / "plugins"
    settings.write_text(f'plugins = "{plugins}"\n')
    words = ["health", "install-cron", "--config", str(settings), "--cron-file", str(entry)]
    assert main(words) == 0, "a folder of plug-ins may be missing"
    plugins.mkdir()
    entry.unlink()
    for part in (settings, plugins, tmp_path):
        os.chown(part, NOBODY, NOBODY)
        capsys.readouterr()
        assert main(words) == 3
        shown = capsys.readouterr().err.strip().splitlines()
        assert "nothing was installed" in shown[0]
        assert f"others may change {part}: it belongs to nobody" in shown[0]
        assert "chown" in shown[1]
        assert len(shown) == 2
        assert not entry.exists()
        os.chown(part, 0, 0)
    (theirs / "health.toml").write_text("")
    assert main([*words[:3], str(theirs / "health.toml"), *words[4:]]) == 3
    monkeypatch.setenv("ARGUS_STORE_PASSWORD_FILE", str(theirs / "health.toml"))
    assert main(words) == 3
    monkeypatch.delenv("ARGUS_STORE_PASSWORD_FILE")
    monkeypatch.setattr(config, "DEFAULT_FILE", theirs / "health.toml")
    assert main([*words[:2], *words[4:]]) == 3, "settings that are read without being named"
    assert not entry.exists()
    assert main([*words[:3], str(theirs / "health.toml"), *words[4:], "--user", "nobody"]) == 0
    assert entry.exists()


def test_root_reads_no_settings_that_others_may_change(
    tmp_path: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    file, inside, link = tmp_path / "file", theirs / "file", tmp_path / "link"
    for one in (file, inside):
        one.write_text("no = [\n")
    link.symlink_to(file)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)

    def refusals(named: Path) -> Iterator[str]:
        for words in (
            ["health", "--list", "--config", str(named)],
            ["observe", "-f", str(named), "--out", f"{tmp_path}/out"],
        ):
            capsys.readouterr()
            main(words)
            yield capsys.readouterr().err
        with pytest.raises(ArgusError) as refused:
            owners._of_the_site.__wrapped__(named)
        yield refused.value.message

    for named, part, why in (
        (inside, theirs, "it belongs to nobody"),
        (link, link, "the link belongs to nobody"),
        (file, file, "others may write to it (its mode is 666)"),
    ):
        file.chmod(0o666 if named == file else 0o644)
        for shown in refusals(named):
            assert f"root does not read {named}: others may change {part}: {why}" in shown
            assert len(shown.splitlines()) <= 2
    file.chmod(0o644)
    for shown in refusals(file):
        assert "root does not read" not in shown
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    for shown in refusals(inside):
        assert "root does not read" not in shown, "whoever called sudo gives root settings of their own"


def test_settings_are_no_pipe_that_would_be_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for words in (["health", "--config", str(pipe)], ["observe", "-f", str(pipe), "--out", str(tmp_path / "out")]):
        done = subprocess.run([*ARGUS, *words], capture_output=True, text=True, timeout=20)
        assert done.returncode in (2, 3)
        assert "regular file" in done.stderr or "is not a file" in done.stderr
        assert len(done.stderr.strip().splitlines()) <= 2


def test_argus_check_says_who_may_change_what_root_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from argus.live import preflight

    program = tmp_path / "argus"
    program.write_text("")
    os.chown(program, NOBODY, NOBODY)
    monkeypatch.setattr(installation, "program", lambda: [str(program)])
    state = preflight._installation()
    assert not state.on
    assert f"{program}: it belongs to nobody" in state.detail
    assert "chown" in state.fix


@pytest.mark.parametrize("part", [
    "venv/bin/argus", "venv/bin/python", "venv/pyvenv.cfg", "lib", "argus/__init__.py", "argus", "cli/main.py", "venv",
])  # fmt: skip
def test_all_of_an_installation_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str) -> None:
    import argus
    import argus.cli

    for folder in ("venv/bin", "lib", "argus", "cli"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("venv/bin/argus", "venv/bin/python", "venv/pyvenv.cfg", "argus/__init__.py", "cli/main.py"):
        (tmp_path / file).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "lib")])
    monkeypatch.setattr(argus, "__path__", [str(tmp_path / "argus")])
    monkeypatch.setattr(argus.cli, "__path__", [str(tmp_path / "cli")])
    assert installation.changeable() is None
    entry = tmp_path / "argus-health"
    os.chown(tmp_path / part, NOBODY, 0)
    assert installation.changeable() == (tmp_path / part, "it belongs to nobody")
    with pytest.raises(ArgusError, match="it belongs to nobody") as refused:
        cron.install(cron.Plan(), systemd=False, cron_file=entry)
    assert str(tmp_path / part) in refused.value.message
    assert not entry.exists()


# ---- exports, logs


def test_an_export_into_a_folder_of_others_replaces_what_is_there(theirs: Path, secret: Path, tmp_path: Path) -> None:
    from argus.cli.export import _write

    output = theirs / "flame.svg"
    output.symlink_to(secret)
    (theirs / f"flame.svg.{os.getpid()}.part").symlink_to(secret)
    _write(str(output), "<svg/>")
    assert output.read_text() == "<svg/>"
    assert not output.is_symlink()


def test_a_log_that_several_ranks_begin_at_once_is_everybody_s(tmp_path: Path) -> None:
    """As of one command line for all ranks of a node."""
    for number in range(20):
        path, start = tmp_path / f"log{number}", Barrier(4)

        def begin(path: Path = path, start: Barrier = start) -> None:
            start.wait()
            fd = files.open_log(path)
            os.write(fd, b"rank\n")
            os.close(fd)

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(begin) for _ in range(4)]:
                done.result()
        assert path.read_text() == "rank\n" * 4


def test_links_of_who_called_sudo_are_followed(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To what they may name themselves, and of others no more than before."""
    (theirs / "there").mkdir()
    (theirs / "link").symlink_to("there")
    os.lchown(theirs / "link", NOBODY, NOBODY)
    monkeypatch.delenv("SUDO_UID", raising=False)
    for use in (files.make_folder, lambda folder: os.close(files.open_output_folder(folder))):
        with pytest.raises(files.Untrusted, match="the link link on the way"):
            use(theirs / "link" / "man1")
        monkeypatch.setenv("SUDO_UID", str(NOBODY))
        use(theirs / "link" / "man1")
        assert (theirs / "there" / "man1").is_dir()
        monkeypatch.delenv("SUDO_UID")


def test_an_output_that_is_a_pipe_of_one_s_own_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device") as failed, files.replacing(pipe):
        pass
    assert failed.value.filename == str(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with files.replacing(pipe) as file:
        file.write(b"whole")
    assert os.read(reader, 9) == b"whole"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


def test_an_output_that_is_a_device_is_written_to_and_stays(tmp_path: Path) -> None:
    full = tmp_path / "full"
    os.mknod(full, 0o600 | stat.S_IFCHR, os.makedev(1, 7))
    with pytest.raises(OSError, match="No space"), files.replacing(full) as file:
        file.write(b"x")
    assert stat.S_ISCHR(full.lstat().st_mode)
    null = tmp_path / "link"
    os.mknod(tmp_path / "null", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    null.symlink_to("null")
    with files.replacing(null) as file:
        file.write(b"x" * 100_000)
    assert null.is_symlink(), "as /dev/stdout is a link"
    os.mknod(tmp_path / "disk", 0o600 | stat.S_IFBLK, os.makedev(7, 250))
    with pytest.raises(OSError, match="block device"), files.replacing(tmp_path / "disk"):
        pass
    assert stat.S_ISBLK((tmp_path / "disk").lstat().st_mode)


NO_DRIVER = os.makedev(253, 1048575)
"""A device that cannot be opened: who tries gets ENXIO."""


@pytest.fixture(params=["theirs", "above", "sticky", "link"])
def planted(request: pytest.FixtureRequest, theirs: Path, tmp_path: Path) -> Path:
    """A path at which somebody else could have put a device of root's: whoever opens one may do something by that."""
    folder = theirs
    if request.param == "above":
        folder = theirs / "roots"
        folder.mkdir()
    elif request.param == "sticky":
        folder = tmp_path / "sticky"
        folder.mkdir()
        folder.chmod(0o1777)
    os.mknod(folder / "device", 0o600 | stat.S_IFCHR, NO_DRIVER)
    if request.param == "link":
        (tmp_path / "link").symlink_to(folder)
        folder = tmp_path / "link"
    return folder / "device"


def test_a_device_that_others_could_have_put_there_is_not_opened(planted: Path, tmp_path: Path) -> None:
    refused = pytest.raises(files.Untrusted, match="it is no regular file, and others may change")
    with refused, files.replacing(planted):
        pass
    done = health(tmp_path, planted)
    assert done.returncode == 3
    assert f"cannot write {planted}: it is no regular file, and others may change" in done.stderr
    with pytest.raises(files.Untrusted, match="it is no regular file, and others may change"):
        files.open_log(planted)
    account = tmp_path / "account"
    account.symlink_to(planted)
    for output in (planted, account):
        with pytest.raises(ArgusError, match="cannot be written: it is no regular file, and others may change"):
            Account(output, "on")
    assert stat.S_ISCHR(planted.lstat().st_mode)


def test_devices_and_descriptors_of_one_s_own_are_written_to(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for name in ("/dev/stdout", "/dev/fd/3", "/proc/self/fd/3"):
        words = ["simulate", "--ranks", "2", "--steps", "3", "--store", f"spool://{tmp_path}/spool", "--truth", name]
        with open(file, "wb") as output:
            script = 'exec "$@" 3>&1'
            done = subprocess.run(
                ["sh", "-c", script, "-", *ARGUS, *words], stdout=output, stderr=subprocess.PIPE, timeout=60, text=True
            )
        assert (done.returncode, done.stderr) == (0, ""), name
        text = file.read_text()
        assert text.startswith("{"), "from where the descriptor was, not over what was there"
        assert "rows in" in text
        done = subprocess.run(
            ["sh", "-c", f"{script} | cat", "-", *ARGUS, *words], capture_output=True, timeout=60, text=True
        )
        assert done.stdout.startswith("{")
        assert health(tmp_path, Path(name.replace("fd/3", "fd/1"))).stdout
    closed = max(map(int, os.listdir("/proc/self/fd"))) + 50
    for name in (f"/dev/fd/{closed}", "/dev/fd/99999999999999999999", f"/proc/self/fd/{closed}"):
        with pytest.raises(OSError, match="Bad file descriptor"), files.replacing(Path(name)):
            pass
        assert "cannot write" in health(tmp_path, Path(name)).stderr
    for name in ("/dev/null", "/dev/zero", "/dev/./null"):
        with files.replacing(Path(name)) as sink:
            sink.write(b"x")
        os.close(files.open_log(Path(name)))
    with pytest.raises(OSError, match="No space"), files.replacing(Path("/dev/full")) as sink:
        sink.write(b"x")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert health(tmp_path, pipe).returncode != 3
        assert b"all is well" in os.read(reader, 1 << 16)
    finally:
        os.close(reader)


def test_an_output_of_others_that_is_a_link_to_a_device_is_replaced(theirs: Path) -> None:
    (theirs / "link").symlink_to("/dev/full")
    with files.replacing(theirs / "link") as file:
        file.write(b"x")
    assert (theirs / "link").read_bytes() == b"x"
    assert not (theirs / "link").is_symlink()


def test_a_log_of_argus_run_is_not_somebody_elses(theirs: Path, secret: Path) -> None:
    (theirs / "link").symlink_to(secret)
    os.mkfifo(theirs / "pipe")
    (theirs / "given").write_text("")
    os.chown(theirs / "given", NOBODY, NOBODY)
    os.link(secret, theirs / "second name")
    for name in ("link", "pipe", "given", "second name"):
        done = subprocess.run(
            [*ARGUS, "run", "--log", str(theirs / name), "--", "true"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode != 0
        assert "cannot be written" in done.stderr


# ---- whatever else root writes


def test_manual_pages_are_written_through_no_link(
    theirs: Path, secret: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (theirs / "man1").mkdir()
    (theirs / "man1" / "argus.1").symlink_to(secret)
    (theirs / "man1" / "argus-run.1").symlink_to(tmp_path / "new")
    assert main(["man", "--out", str(theirs)]) == 0
    for name in ("argus.1", "argus-run.1"):
        assert (theirs / "man1" / name).read_text().startswith(".TH")
        assert stat.S_ISREG((theirs / "man1" / name).lstat().st_mode)
    (tmp_path / "private").mkdir()
    (theirs / "up").symlink_to(tmp_path / "private")
    os.chown(theirs / "up", NOBODY, NOBODY, follow_symlinks=False)
    for below in (".", "deeper"):
        assert main(["man", "--out", str(theirs / "up" / below)]) == 1
        assert "the link up on the way to it belongs to nobody" in capsys.readouterr().err
    assert not list((tmp_path / "private").iterdir())
    assert main(["man", "--out", str(tmp_path / "private" / "new" / "deeper")]) == 0
    assert not (tmp_path / "new").exists()


def test_the_truth_of_a_simulation_is_written_through_no_link(theirs: Path, secret: Path, tmp_path: Path) -> None:
    (theirs / "truth.json").symlink_to(secret)
    words = ["simulate", "--ranks", "2", "--steps", "3", "--store", f"spool://{tmp_path}/spool"]
    assert main([*words, "--truth", str(theirs / "truth.json")]) == 0
    assert stat.S_ISREG((theirs / "truth.json").lstat().st_mode)
    assert "faults" in (theirs / "truth.json").read_text()


def test_a_folder_is_made_through_no_link_of_others(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (theirs / "up").symlink_to(tmp_path / "private")
    os.chown(theirs / "up", NOBODY, NOBODY, follow_symlinks=False)
    for make in (files.make_folder, lambda folder: files.open_folder(folder, create=True)):
        with pytest.raises(files.Untrusted, match="the link up on the way to it belongs to nobody"):
            make(theirs / "up" / "new" / "deeper")
    assert not list((tmp_path / "private").iterdir())
    (tmp_path / "mine").symlink_to("private")
    files.make_folder(tmp_path / "mine" / ".." / "mine" / "new" / "deeper")
    files.make_folder(tmp_path / "mine" / "new" / "deeper")
    assert (tmp_path / "private" / "new" / "deeper").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        files.make_folder(tmp_path / "file" / "new")


_WRITERS = {
    r"\.write_text\(|\.write_bytes\(": {
        "argus/health/isolate.py",  # of /proc/self
        "argus/store/engine.py",  # of /proc/self
        "argus/system/limits.py",  # of /proc/self
    },
    r"(?<!f)chmod\(|(?<!f)chown\(|setxattr\(": set(),
    r"\butime\(": {"argus/system/disk_cache.py"},  # in a folder that was checked
    r"shutil\.(copy|move|unpack|make_archive)|copytree\(|\bextract(all)?\(": set(),
    r"mkstemp\(|NamedTemporaryFile\(|mktemp\(": set(),
    r"mkdtemp\(|TemporaryDirectory\(": {
        "argus/compare/observe/traced.py",  # a spool for itself
        "argus/cupti/build.py",  # what the compiler writes, read from there
        "argus/importers/nsys.py",  # a copy for itself
    },
    r"\bopen\(.*[\"'][rbt]*[wax+][rbt+]*[\"']": {
        "argus/capture/prices.py",  # a file in memory
        "argus/capture/process/demangle_child.py",  # of /proc/self
        "argus/capture/reader/process.py",  # of /proc/self
        "argus/compare/observe/sanitize.py",  # files.replacing
        "argus/importers/nsys.py",  # in a folder of its own
        "argus/store/open.py",  # a descriptor of files.open_at
        "argus/store/spool.py",  # a descriptor of a folder that was checked
        "argus/system/debug.py",  # a descriptor of a folder that was checked
        "argus/system/files.py",
        "cli/health.py",  # a descriptor of files
        "cli/main.py",  # /dev/null
    },
    r"\bO_(CREAT|WRONLY|RDWR|APPEND|TRUNC)\b": {
        "argus/capture/process/cupti.py",  # the helper's memory
        "argus/capture/reader/process.py",  # refuses them
        "argus/compare/observe/records.py",  # files.open_at
        "argus/cupti/load.py",  # memory of a process
        "argus/health/isolate.py",  # /dev/null
        "argus/health/run.py",  # files.open_at
        "argus/live/command.py",  # /dev/null
        "argus/store/engine.py",  # files.open_at
        "argus/store/open.py",  # files.open_at
        "argus/store/spill.py",  # files.open_at
        "argus/store/spool.py",  # in a folder that was checked, O_EXCL
        "argus/system/debug.py",  # in a folder that was checked, O_EXCL
        "argus/system/files.py",
        "cli/health.py",  # /dev/null
        "cli/main.py",  # /dev/null
    },
    r"\.(mkdir|touch|rename|symlink_to|hardlink_to)\(|os\.(makedirs|replace|link|symlink|truncate|mkfifo|mknod)\(": {
        "argus/compare/observe/records.py",  # in a folder that was checked
        "argus/live/tracer.py",  # of a session, no file
        "argus/store/spill.py",  # in a folder that was checked
        "argus/store/spool.py",  # in a folder that was checked
        "argus/system/files.py",
    },
}
"""What writes files or makes folders, and where it may stand: everything else has ``argus/system/files.py`` do it."""


@pytest.mark.parametrize("pattern", _WRITERS)
def test_nothing_else_writes_files_by_their_names(pattern: str) -> None:
    assert users(pattern) == _WRITERS[pattern]


def test_old_files_are_removed_from_the_folder_that_was_checked(theirs: Path, tmp_path: Path) -> None:
    """By its owner the folder may be exchanged meanwhile for a link to another one of root's."""
    folder, other = theirs / "logs", tmp_path / "other"
    for where in (folder, other):
        where.mkdir()
        for number in range(9):
            (where / f"{number}.log").write_text("")
            os.utime(where / f"{number}.log", (number, number))
    (folder / "kept.txt").write_text("")
    fd = files.open_folder(folder)
    folder.rename(theirs / "before")
    folder.symlink_to(other)
    files.keep_newest(fd, lambda name: name.endswith(".log"), 3)
    os.close(fd)
    assert sorted(path.name for path in (theirs / "before").iterdir()) == ["6.log", "7.log", "8.log", "kept.txt"]
    assert len(list(other.iterdir())) == 9


def test_logs_and_cache_entries_are_removed_by_no_path() -> None:
    for module in (debug, disk_cache):
        assert not re.search(r"unlink\(|glob\(|\.stat\(", Path(module.__file__).read_text())
