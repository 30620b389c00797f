"""What fuzzing found in parsers of foreign bytes (tests/fuzz), case by case."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from argus.capture.process import demangler, rust, targets
from argus.capture.process.elf import FunctionTable
from argus.capture.process.symbols import readable
from argus.capture.python import interpreter, layouts
from argus.capture.reader import reader as process_reader
from argus.cli.main import main
from argus.compare.observe import exposed
from argus.compare.observe.plan import Readings
from argus.health.check import Look
from argus.health.checks import xid
from argus.importers import iterations_csv, kineto, nsys, whatif_parquet
from argus.importers.iterations_csv import Columns
from argus.model.errors import ArgusError
from argus.store import reader
from tests.fuzz import storing
from tests.fuzz.parsers import engine_requests, server_answers
from tests.fuzz.small_elf import small_elf
from tests.unit.importers.test_kineto import trace
from tests.unit.importers.test_nsys import PIDS, UTC, export

# ---- names of functions


def test_half_of_a_surrogate_pair_is_no_character_of_a_name() -> None:
    """A table takes no such text."""
    assert rust.strip_legacy("core::$ud800$x::h0123456789abcdef") == "core::$ud800$x"
    assert rust.strip_legacy("core::$u41$x::h0123456789abcdef") == "core::Ax"
    half = "\ud800".encode("punycode").decode()
    symbol = f"_RNvC1au{len(half)}_{half.replace('-', '_')}"
    assert rust.demangle_v0(symbol) is None
    assert readable(symbol) == symbol


def test_a_rust_name_that_repeats_itself_is_bounded() -> None:
    """16 KB of symbol made 21 MB of name, of which thousands were kept."""
    symbol = f"_RINvC3000{'x' * 3000}1fT{'C3000' + 'x' * 3000}{'B1_' * 4000}EE"
    assert len(symbol) < demangler.MAX_SYMBOL + 4096
    assert len(readable(symbol)) <= demangler.MAX_NAME + 20
    long = "_RNvC1a5000" + "y" * 5000
    assert len(readable(long)) <= demangler.MAX_NAME + 20
    assert readable(long) != readable(long[:-1] + "z"), "what was cut differs"
    assert len(readable("_R" + "?" * 10_000)) <= demangler.MAX_NAME + 20, "also one that is none of Rust's"


def test_a_segment_at_the_end_of_memory() -> None:
    image = bytearray(small_elf())
    struct.pack_into("<Q", image, 64 + 16, (1 << 64) - 8)  # p_vaddr of the first segment
    table = FunctionTable(bytes(image))
    assert table.virtual(4) == (1 << 64) - 4
    assert table.virtual(0x1004) is None, "beyond it there is no address"


# ---- processes


def test_a_path_with_a_carriage_return_is_one_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's name could make a second line, with a mapping of its choice."""
    (tmp_path / "7").mkdir()
    line = (
        "7f0000001000-7f0000002000 r-xp 00001000 08:01 12 /x\r1000-2000 r-xp 00000000 08:01 7 /usr/lib/libcuda.so.1\n"
    )
    (tmp_path / "7" / "maps").write_bytes(line.encode())
    monkeypatch.setattr(process_reader, "PROC", tmp_path)
    (mapping,) = targets.executable_mappings(7)
    assert mapping.inode == 12
    assert mapping.path.startswith("/x\r1000-")


@pytest.mark.parametrize("field", ["frame_code", "frame_previous", "code_filename"])
def test_debug_offsets_at_the_end_of_what_a_record_takes(field: str) -> None:
    """The size of a frame, eight bytes more, did not fit into 16 bits: OverflowError."""
    version = max(layouts.DEBUG_OFFSETS)
    layout = layouts.LAYOUTS[version]
    memory = bytearray(4096)
    memory[: len(layouts.DEBUG_COOKIE)] = layouts.DEBUG_COOKIE
    struct.pack_into("<Q", memory, layouts.DEBUG_VERSION, version[0] << 24 | version[1] << 16)
    for name, at in layouts.DEBUG_OFFSETS[version].items():
        value = {"object_type": layouts.OBJECT_TYPE, field: interpreter.NO_OFFSET - 1}.get(name)
        struct.pack_into("<Q", memory, at, getattr(layout, name, 0) if value is None else value)
    read: Any = SimpleNamespace(read=lambda at, size: bytes(memory[:size]))
    found = interpreter._own_offsets(read, 1, version, layout)
    if not isinstance(found, str):
        pytest.fail(f"they were believed, and a record has {interpreter._record(found, (*version, 1))['frame_bytes']}")
    assert "make no sense" in found


# ---- recordings


def kineto_file(tmp_path: Path, **head: Any) -> Path:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({**trace(0, 2), **head}))
    return path


@pytest.mark.parametrize("zero", ["x", -1, 1 << 63, [1], "1e400"])
def test_a_time_zero_that_is_none_is_refused(tmp_path: Path, zero: Any) -> None:
    with pytest.raises(ArgusError, match="baseTimeNanoseconds"):
        kineto.read(kineto_file(tmp_path, baseTimeNanoseconds=zero), 0)


def test_a_number_of_5000_digits_is_an_event_that_cannot_be_read(tmp_path: Path) -> None:
    events = trace(0, 200)["traceEvents"]
    path = kineto_file(tmp_path, traceEvents=events)
    path.write_text(path.read_text().replace('"cbid": 211', f'"cbid": {"9" * 5000}', 1))
    found = kineto.read(path, 0)
    assert found.losses["events_unreadable"] == 1
    path.write_text(f'{{"x": {"9" * 5000}, "traceEvents": []}}')
    with pytest.raises(ArgusError, match="not a JSON trace"):
        kineto.read(path, 0)


@pytest.mark.parametrize("number", ["1e999990", "-3.5E+999990", "1e999999999", "1e-999990"])
def test_a_time_with_a_large_exponent_takes_no_time(tmp_path: Path, number: str) -> None:
    """Each made an integer of a million digits, in 0.3 s and more."""
    path = kineto_file(tmp_path, **trace(0, 20))
    text, changed = re.subn(r'"ts": "?[0-9.]+"?', f'"ts": {number}', path.read_text(), count=2)
    assert changed == 2
    path.write_text(text)
    before = time.process_time()
    with contextlib.suppress(ArgusError):
        kineto.read(path, 0)
    assert time.process_time() - before < 2.0


def test_ranks_and_times_that_do_not_fit_are_not_believed(tmp_path: Path) -> None:
    path = kineto_file(tmp_path, distributedInfo={"rank": 1 << 40, "world_size": 1 << 40})
    found = kineto.read(path, 3)
    assert (found.rank, found.rank_source, found.world_size) == (0, "file name", 0)
    late = trace(0, 200)
    for event in late["traceEvents"][-2:]:
        event["ts"] = "5000000000000000.0"
    found = kineto.read(kineto_file(tmp_path, **late), 0)
    assert found.losses["events_unreadable"] == 2
    storing.store([found])


def test_times_of_a_recording_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    def change(tables: dict[str, list[tuple[Any, ...]]]) -> None:
        row = tables["CUPTI_ACTIVITY_KIND_KERNEL"][0]
        tables["CUPTI_ACTIVITY_KIND_KERNEL"].append((-5, 5, *row[2:]))
        tables["CUPTI_ACTIVITY_KIND_KERNEL"].append((row[0], (1 << 63) - 1, *row[2:]))

    plain = nsys.read(export(tmp_path / "a.sqlite", pids=PIDS[:1]), 0)
    found = nsys.read(export(tmp_path / "b.sqlite", pids=PIDS[:1], change=change), 0)
    assert len(found[0].ops) == len(plain[0].ops)
    assert (plain[0].losses["rows_of_impossible_times"], found[0].losses["rows_of_impossible_times"]) == (0, 2)
    storing.store(found)

    def shift(tables: dict[str, list[tuple[Any, ...]]]) -> None:
        tables["ANALYSIS_DETAILS"] = [(0, 10**9, UTC + 10**18, UTC)]

    (found_one,) = nsys.read(export(tmp_path / "c.sqlite", pids=PIDS[:1], change=shift), 0)
    assert found_one.zero.startswith("unknown"), "it began before 1970"


def test_damage_whose_name_is_no_utf8_is_reported(tmp_path: Path) -> None:
    path = export(tmp_path / "a.sqlite", steps=1, pids=PIDS[:1])
    data = path.read_bytes()
    path.write_bytes(data.replace(b"CREATE TABLE PROCESSES", b"CREATE TABL\xff PROCESSES"))
    with pytest.raises(ArgusError, match="cannot be read"):
        nsys.read(path, 0)


def test_a_table_of_text_with_a_cell_of_megabytes_is_refused(tmp_path: Path) -> None:
    """All cells of a column were made as wide: terabytes."""
    path = tmp_path / "times.csv"
    path.write_text(
        "worker,step,ms\n" + "".join(f"{n % 8},{n // 8},5\n" for n in range(80_000)) + f"{'w' * 300_000},1,5\n"
    )
    with pytest.raises(ArgusError, match="row 80001: worker is 'wwww"), storing.dropped():
        iterations_csv.write(None, "job", path, Columns("worker", "step", "ms"))  # type: ignore[arg-type]
    path.write_bytes(b"worker,\xa2step,ms\n0,1,5\n")
    with pytest.raises(ArgusError, match="UTF-8"):
        iterations_csv.write(None, "job", path, Columns("worker", "step", "ms"))  # type: ignore[arg-type]


def test_text_of_a_parquet_file_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    raw = pa.array([b"forward", b"back\xe6"]).view(pa.binary())
    columns = {"step": [0, 0], "optype": pa.StringArray.from_buffers(2, *raw.buffers()[1:]), "start_ts": [0.0, 1.0],
               "duration": [0.5, 0.5], "rank": [0, 1]}  # fmt: skip
    path = tmp_path / "trace.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(ArgusError, match="cannot be read as Parquet"):
        whatif_parquet.read(path, None)


# ---- HTTP


@pytest.mark.parametrize("body", [b"garbage", b"", b"\xff" * 64, b"ARROW1\0\0"])
def test_an_answer_that_is_no_rows_is_an_error_of_the_store(body: bytes) -> None:
    pool = server_answers._Pool(server_answers._good)
    store = server_answers._connected(pool)
    pool.answer = lambda asked: (200, server_answers.HEADERS[0], body)
    with pytest.raises(ArgusError, match="not rows"):
        reader.query(store, "SELECT 1")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\nSELECT 1",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\nSELECT 1",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffff\r\nabc\r\n",
    ],
)
def test_a_request_that_cannot_be_read_is_answered(request_bytes: bytes) -> None:
    connection: Any = engine_requests._Connection(request_bytes)
    connection.got.close = lambda: None
    engine_requests._Handler(connection, "", engine_requests._server)
    assert connection.got.getvalue().startswith(b"HTTP/1.1 400 ")


def test_an_answer_whose_footer_is_damaged_is_an_error_of_the_store() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([("a", pa.int64())])) as out:
        out.write_table(pa.table({"a": [1, 2]}))
    whole = sink.getvalue().to_pybytes()
    footer = int.from_bytes(whole[-10:-6], "little")
    damaged = whole[: -10 - footer] + b"\xff" * footer + whole[-10:]
    pool = server_answers._Pool(server_answers._good)
    store = server_answers._connected(pool)
    pool.answer = lambda asked: (200, server_answers.HEADERS[0], whole)
    assert reader.query(store, "SELECT a").num_rows == 2
    pool.answer = lambda asked: (200, server_answers.HEADERS[0], damaged)
    with pytest.raises(ArgusError, match=r"not rows: .*Footer"):
        reader.query(store, "SELECT a")


def test_a_refused_query_that_is_no_utf8_is_answered() -> None:
    connection: Any = engine_requests._Connection(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nX\x9e")
    connection.got.close = lambda: None
    engine_requests._Handler(connection, "", engine_requests._server)
    answer = connection.got.getvalue()
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert answer.endswith(b": X\\udc9e. (SYNTAX_ERROR)")


def test_a_request_that_can_be_read_is_answered_with_rows() -> None:
    answered: io.BytesIO = io.BytesIO()
    connection: Any = engine_requests._Connection(engine_requests.seeds()[1])
    connection.got = answered
    answered.close = lambda: None  # type: ignore[method-assign]
    engine_requests._Handler(connection, "", engine_requests._server)
    assert answered.getvalue().startswith(b"HTTP/1.1 200 ")


# ---- files of the prompt and of TAB


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_the_history_of_queries_is_its_owner_s_file(home: Path) -> None:
    from argus.cli import sql

    assert sql.read_history() == []
    sql.write_history(["SELECT 1;", "SELECT 'ü';"])
    kept = home / "state" / "argus" / "sql_history"
    assert sql.read_history() == ["SELECT 1;", "SELECT 'ü';"]
    assert kept.stat().st_mode & 0o777 == 0o600
    treasure = home / "treasure"
    treasure.write_text("root's\n")
    kept.unlink()
    kept.symlink_to(treasure)
    assert sql.read_history() == [], "a link is not followed"
    sql.write_history(["SELECT 2;"])
    assert treasure.read_text() == "root's\n"
    kept.unlink()
    os.mkfifo(kept)
    assert sql.read_history() == [], "a pipe is not waited for"
    kept.unlink()
    kept.write_text("SELECT 3;\n")
    kept.parent.chmod(0o777)
    assert sql.read_history() == [], "others may have put it there"


def test_names_for_completion_are_their_owner_s_file(home: Path) -> None:
    from argus.cli import completion

    file = completion.names_file("chdb:///x")
    completion._write(file, [{"job": "j", "run": 1, "ranks": [0]}])
    assert completion._read(file) == [{"job": "j", "run": 1, "ranks": [0]}]
    treasure = home / "treasure"
    treasure.write_text("[]")
    file.unlink()
    file.symlink_to(treasure)
    assert completion._read(file) is None
    file.unlink()
    os.mkfifo(file)
    assert completion._read(file) is None
    file.unlink()
    file.write_text("[" * 100_000)
    assert completion._read(file) is None
    file.write_text("[]")
    file.parent.chmod(0o777)
    assert completion._read(file) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: what root may not use")
def test_a_store_that_root_may_not_use_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on NFS with root_squash, where root is nobody."""
    (tmp_path / "store" / "db").mkdir(parents=True)
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **words: str(path) != f"{tmp_path}/store" and real(path, mode))
    assert main(["jobs", "--store", f"chdb://{tmp_path}/store"]) != 0
    output = capsys.readouterr().err
    assert "root_squash" in output
    assert "--store chdb:///var/lib/argus" in output
    assert "Use sudo" not in output
    os.chown(tmp_path / "store", 65534, 65534)
    monkeypatch.undo()
    assert main(["jobs", "--store", f"chdb://{tmp_path}/store"]) != 0
    output = capsys.readouterr().err
    assert "it belongs to nobody" in output
    assert "chown -R root:root" in output


@pytest.mark.parametrize("head", ["6,1,200²", "²,1,200", f"6,1,{'9' * 5000}", f"{'9' * 5000},1,200"])
def test_a_record_of_a_kernel_log_with_no_numbers_is_passed_over(head: str, tmp_path: Path) -> None:
    code = "9" * 5000
    (tmp_path / "kmsg").write_text(
        f"{head},-;NVRM: loading\n6,2,200,-;NVRM: Xid (PCI:0000:3b:00): {code}, x\n"
        f"6,3,200,-;nvidia-nvswitch{code}: SXid (PCI:0000:c1:00.0): {code}, Fatal, x\n"
    )
    found = xid.check(Look({"hours": 1e6, "ignore": []}, kmsg=tmp_path / "kmsg"))
    assert (found.status, found.figures) == ("ok", {"xids": 0.0, "sxids": 0.0})


def test_a_histogram_of_too_many_takes_no_memory() -> None:
    """Its lines add up to more than a count may be: each of them stood for a hundred thousand latencies."""
    lines = [f'a_bucket{{n="{n}",le="{le}"}} {1 << 53}' for n in range(100) for le in ("1", "+Inf")]
    ((name, one),) = exposed.histograms("\n".join(lines)).items()
    values, count, _ = exposed.samples_between(exposed.Histogram(), one, name, Readings())
    assert (len(values), count) == (exposed.MOST_SAMPLES, 1 << 53)


def test_numpy_is_of_a_version_that_refuses_what_does_not_fit() -> None:
    """Tests here rely on it."""
    with pytest.raises(OverflowError):
        np.zeros(1, np.uint16)[0] = 1 << 16
