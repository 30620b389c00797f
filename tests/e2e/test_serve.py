"""``argus serve`` as a process: what it prints, what it answers over sockets, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
import zlib
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argus.store.open import Store, open_store
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.e2e.serving import WITHIN_S, Server
from tests.forked import argus
from tests.stores import new_store

STRANGE = "a<script>alert(1)</script>'\"; –"


LOOK_S, BEAT_S = 0.25, 1.0
QUICK = f"""
from argus.cli.main import main
from argus.report.server import app
app.make_app.__kwdefaults__["look_s"], app.BEAT_S = {LOOK_S}, {BEAT_S}
main()
"""
"""The verb, which looks for new steps and says that it is still there more often than every 2 s and 15 s."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return new_store(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module", autouse=True)
def opened(url: str) -> Iterator[Store]:
    """Its store, with two jobs. Its engine goes on from test to test."""
    with open_store(url, create=False) as store, store.lease():
        for job, fault in (("slow", ["--fault", "compute_straggler:loud:ranks=5"]), (STRANGE, [])):
            done = argus("simulate", "--ranks", "8", "--steps", "40", "--job", job, *fault, "--store", url)
            assert done.returncode == 0, done.stderr
        assert argus("diagnose", "--job", "slow", "--store", url).returncode == 0
        yield store


@pytest.fixture(scope="module")
def server(url: str) -> Iterator[Server]:
    server = Server(url, program=QUICK)
    yield server
    server.end(signal.SIGTERM)


def run_of(server: Server, job: str) -> int:
    return int(next(run["run"] for run in server.json("/api/runs")["runs"] if run["job"] == job))


def test_it_prints_where_it_is(server: Server, url: str) -> None:
    assert server.line.startswith(f"serving {url} at http://127.0.0.1:")
    assert len(server.token) >= 32


def test_runs_with_verdicts_come_first(server: Server) -> None:
    runs = server.json("/api/runs")["runs"]
    assert [run["job"] for run in runs] == ["slow", STRANGE]
    assert (runs[0]["status"], runs[0]["summary"]) == ("degraded", "compute straggler of rank 5")
    assert runs[1]["status"] == ""
    assert all(run["ranks"] == 8 and run["steps"] == 40 and int(run["began_ns"]) > 1 for run in runs)


def test_the_page_of_a_run(server: Server) -> None:
    answer = server.json(f"/api/page?job=slow&run={run_of(server, 'slow')}")
    page = answer["page"]
    assert page["live"] is True
    assert page["verdict"]["findings"][0]["ranks"] == [5]
    heatmap = next(view for panel in page["panels"] for view in panel["views"] if view["view"] == "heatmap")
    assert [row["rank"] for row in heatmap["rows"] if row["pinned"]] == [5]
    assert len(zlib.decompress(b64decode(answer["arrays"]))) >= 8 * 40


def test_a_part_of_the_heat_map_is_the_same_cells(server: Server) -> None:
    where = f"job=slow&run={run_of(server, 'slow')}"
    answer = server.json(f"/api/page?{where}")
    whole = next(view for panel in answer["page"]["panels"] for view in panel["views"] if view["view"] == "heatmap")
    first, last = 10, 19
    for measure in whole["measures"]:
        part = server.json(f"/api/heatmap?{where}&measure={measure['key']}&first={first}&last={last}")
        (own,) = part["heatmap"]["measures"]
        assert part["heatmap"]["edges"] == list(range(first, last + 2))
        assert part["heatmap"]["rows"] == whole["rows"]
        assert (own["low"], own["high"]) == (measure["low"], measure["high"])
        cells, all_cells = (_cells(one, of["cells"]) for one, of in ((part, own), (answer, measure)))
        known = cells != 255
        assert known.any()
        assert np.array_equal(cells[known], all_cells[:, first : last + 1][known])


def _cells(answer: Any, ref: Any) -> np.ndarray[Any, Any]:
    data = zlib.decompress(b64decode(answer["arrays"]))[ref["offset"] : ref["offset"] + ref["length"]]
    return np.frombuffer(data, np.uint8).reshape(ref["shape"])


def test_strange_names_are_names(server: Server) -> None:
    status, content = server.ask("/api/runs")
    assert status == 200
    from urllib.parse import urlencode

    page = server.json("/api/page?" + urlencode({"job": STRANGE, "run": run_of(server, STRANGE)}))["page"]
    assert page["verdict"]["status"] == "healthy"
    assert b"\xe2" not in content, "answers are ASCII"


def test_no_job_no_run(server: Server) -> None:
    for where in ("job=none&run=1", "job=slow&run=1"):
        status, content = server.ask(f"/api/page?{where}")
        assert status == 404
        assert json.loads(content)["error"]


def test_others_are_refused(server: Server) -> None:
    assert server.ask("/api/runs", Authorization="Bearer wrong")[0] == 401
    assert server.ask("/", Host="rebound.example")[0] == 421
    assert server.ask("/", Authorization="")[0] == 200


def test_paths_are_not_the_file_system_s(server: Server) -> None:
    for path in ("/../../../../etc/passwd", "/static/../../etc/passwd", "/static/%2e%2e/page.py", "/static/", "//etc"):
        status, content = server.ask(path)
        assert status == 404, path
        assert b"root:" not in content


def test_what_is_no_request_ends_its_connection_alone(server: Server) -> None:
    for noise in (
        b"\0" * 4096,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 200_000,
        b"\x16\x03\x01\x02\x00",
        b"\r\n\r\n",
    ):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=WITHIN_S)
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(noise)
            with contextlib.suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        assert server.ask("/")[0] == 200


def test_connections_that_say_nothing_do_not_keep_others_out(server: Server) -> None:
    """Of which the server would keep 256, and refuse every request from then on."""
    watching = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WITHIN_S)
    run = run_of(server, "slow")
    watching.request("GET", f"/api/events?job=slow&run={run}", headers={"Authorization": f"Bearer {server.token}"})
    answer = watching.getresponse()
    assert answer.readline() == b"event: watching\n"
    with contextlib.ExitStack() as stack:
        for number in range(400):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=WITHIN_S))
            silent.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a" if number % 2 else b"")
        assert server.ask("/")[0] == 200
        assert server.ask("/api/runs")[0] == 200
        # Who has the token keeps the connection: lines come on it that were not sent before.
        until = time.monotonic() + 2 * BEAT_S
        while not (line := answer.readline()).startswith(b": still") or time.monotonic() < until:
            assert line, "the server ended it"
    watching.close()


def test_a_page_hears_of_new_steps(server: Server, opened: Store) -> None:
    run = run_of(server, "slow")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WITHIN_S)
    headers = {"Authorization": f"Bearer {server.token}"}
    connection.request("GET", f"/api/events?job=slow&run={run}", headers=headers)
    answer = connection.getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.readline() == b"event: watching\n"
    version = server.json(f"/api/page?job=slow&run={run}")["version"]
    with Writer(opened, source="test") as writer:
        last = query_columns(opened, "SELECT max(ts) AS ts, max(step) AS step FROM iterations WHERE job = 'slow'")
        writer.append("iterations", {
            "job": "slow", "run": run, "rank": list(range(8)), "step": int(last["step"][0]) + 1, "host": "node0000",
            "ts": int(last["ts"][0]) + 10**9, "duration_ns": 10**8, "collectives": 1, "launches": 1, "method": "marks",
            "confidence": 1.0,
        })  # fmt: skip
    lines = []
    while not lines or b"changed" not in lines[-1]:
        lines.append(answer.readline())
        assert lines[-1], "the server ended it"
    connection.close()
    fresh = server.json(f"/api/page?job=slow&run={run}")
    assert fresh["version"] != version
    assert fresh["page"]["window"]["last_step"] == 40


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_ends_at_once_also_while_pages_watch(url: str, number: int, code: int) -> None:
    server = Server(url)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WITHIN_S)
    run = run_of(server, "slow")
    connection.request("GET", f"/api/events?job=slow&run={run}", headers={"Authorization": f"Bearer {server.token}"})
    answer = connection.getresponse()
    assert answer.readline() == b"event: watching\n"
    ended = server.end(number)
    assert ended == (code, "")
    connection.close()


def test_nothing_is_written(opened: Store, url: str) -> None:
    def rows() -> dict[str, int]:
        found = query_columns(
            opened, "SELECT name, ifNull(total_rows, 0) AS n FROM system.tables WHERE database = currentDatabase()"
        )
        return dict(zip(found["name"].tolist(), found["n"].tolist(), strict=True))

    before = rows()
    server = Server(url)
    server.json("/api/page?job=slow&run=" + str(run_of(server, "slow")))
    server.end()
    assert rows() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--listen", "8480"], "is not ADDRESS:PORT"),
        (["--listen", "127.0.0.1:99999"], "is not ADDRESS:PORT"),
        (["--listen", "::1"], "is not ADDRESS:PORT"),
        (["--listen", "::1:8480"], "is not ADDRESS:PORT"),
        (["--listen", "[localhost]:8480"], "is not ADDRESS:PORT"),
        (["--listen", "127.0.0.1:" + "0" * 5_000], "is not ADDRESS:PORT"),
        (["--listen", "203.0.113.7:0"], "cannot listen on"),
        (["--listen", "0.0.0.0:0", "--no-token"], "needs a token"),
        (["--token-file", "/no/such/file"], "cannot be read: No such file"),
        (["--no-token", "--token-file", "/no/such/file"], "--no-token cannot be used with --token-file"),
        (["--key", "/no/such/file"], "--key needs --certificate"),
        (["--listen", "127.0.0.1:0", "--certificate", "/no/such/file"], "certificate cannot be used"),
    ],
)
def test_what_cannot_be_served_is_one_line(url: str, words: list[str], message: str) -> None:
    done = argus("serve", *words, "--store", url)
    assert done.returncode not in (0, 130)
    assert message in done.stderr
    assert done.stdout == "", "it says that it serves, and does not"
    assert len(done.stderr.splitlines()) <= 2
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken(server: Server, url: str) -> None:
    done = argus("serve", "--listen", f"127.0.0.1:{server.port}", "--store", url)
    assert f"cannot listen on 127.0.0.1:{server.port}: Address already in use" in done.stderr
    assert done.returncode not in (0, 130)


def test_a_token_of_one_s_own(url: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("short\n")
    assert "too short" in argus("serve", "--token-file", str(file), "--store", url).stderr
    file.write_text("long" * 200)
    assert "too long" in argus("serve", "--token-file", str(file), "--store", url).stderr
    os.mkfifo(pipe := tmp_path / "pipe")
    assert "too short" in argus("serve", "--token-file", str(pipe), "--store", url).stderr
    assert "is a directory" in argus("serve", "--token-file", str(tmp_path), "--store", url).stderr
    file.write_text("a-token-that-is-long-enough\n")
    file.chmod(0o600)
    server = Server(url, "--token-file", str(file))
    assert server.token == "a-token-that-is-long-enough"
    assert server.ask("/api/runs")[0] == 200
    assert server.end()[0] == 130


def test_a_token_that_others_may_read_is_told(url: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-that-is-long-enough\n")
    file.chmod(0o644)
    done = argus("serve", "--token-file", str(file), "--listen", "203.0.113.7:0", "--store", url)
    assert f"other users of this machine may read or change the token: chmod 600 {file}" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_token_that_another_user_owns_is_told(url: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-that-is-long-enough\n")
    file.chmod(0o600)
    os.chown(file, 65534, 65534)
    done = argus("serve", "--token-file", str(file), "--listen", "203.0.113.7:0", "--store", url)
    assert f"the token in {file} belongs to " in done.stderr
    assert "who may read and change it" in done.stderr


@pytest.mark.parametrize("address", ["127.0.0.2", "[::1]", "localhost"])
def test_it_answers_where_it_says_that_it_is(url: str, address: str) -> None:
    server = Server(url, "--listen", f"{address}:0")
    shown = server.line.split(" at http://")[1].partition("/")[0]
    try:
        assert shown == f"{address}:{server.port}"
        connection = http.client.HTTPConnection(address.strip("[]"), server.port, timeout=WITHIN_S)
        connection.request("GET", "/api/runs", headers={"Authorization": f"Bearer {server.token}", "Host": shown})
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        assert server.end()[0] == 130


def test_a_store_without_runs(store_url: str, tmp_path: Path) -> None:
    server = Server(store_url)
    assert server.json("/api/runs") == {"store": store_url, "runs": [], "left_out": 0}
    assert server.ask("/api/page?job=a&run=1")[0] == 404
    assert server.end()[0] == 130
    done = argus("serve", "--store", f"chdb://{tmp_path}/none")
    assert done.returncode not in (0, 130)
    assert "nothing is stored" in done.stderr
    assert len(done.stderr.splitlines()) <= 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to give up")
def test_root_gives_its_rights_up(server: Server) -> None:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff"))
    assert int(effective.split()[1], 16) == 0


def test_many_pages_at_once(server: Server) -> None:
    run, codes = run_of(server, "slow"), []
    threads = [
        threading.Thread(target=lambda: codes.append(server.ask(f"/api/page?job=slow&run={run}")[0])) for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [200] * 12
