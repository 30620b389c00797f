"""The server: who may ask, what is answered, and that no path of a URL is one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from starlette.middleware import gzip as middleware
from starlette.testclient import TestClient

from argus.model.errors import ArgusError
from argus.report.server import answers as answers_module
from argus.report.server.access import HEADERS, Access, is_loopback
from argus.report.server.answers import MOST_RUNS, PAGES, REST, Answers, Asked, Built, asked_for
from argus.report.server.app import _Versions, make_app
from argus.store.read.jobs import JobRun

Result = TypeVar("Result")

TOKEN = "kx7-long-enough-to-be-one"
FILES = {"/": b"<!doctype html><p>front end", "/page.js": b"let front", "/page.css": b"p{}", "/LICENSES.txt": b"MIT"}


class Stored:
    """Stands for a store behind :class:`Answers`: counts what is built, and says which version a run has."""

    def __init__(self) -> None:
        self.built: list[Asked] = []
        self.versions: dict[str, str] = {}

    def build(self, _: Any, asked: Asked) -> Built:
        self.built.append(asked)
        if asked.job == "gone":
            raise ArgusError("job 'gone' has no run 1", "Stored are: 2")
        if asked.job == "broken":
            raise ValueError("secret of the inside")
        return Built({"job": asked.job}, b"\x00\x01\x02", self.zoom)

    def zoom(self, measure: str, first: int, last: int) -> tuple[Any, bytes]:
        if measure != "step":
            raise ArgusError("the heat map has no such measure")
        return {"view": "heatmap", "measure": measure, "first": first, "last": last}, b"\x07"


@pytest.fixture
def stored() -> Stored:
    return Stored()


@pytest.fixture
def answers(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> Answers:
    monkeypatch.setattr(Answers, "version", lambda _, asked: stored.versions.get(asked.job, "1"))
    return Answers(None, stored.build)  # type: ignore[arg-type]


def client_of(answers: Answers, access: Access | None = None, base: str = "http://localhost:8480") -> TestClient:
    app = make_app(answers, access or Access(TOKEN, loopback=True), FILES)
    return TestClient(app, base_url=base, raise_server_exceptions=False)


@pytest.fixture
def client(answers: Answers) -> TestClient:
    client = client_of(answers)
    client.headers["authorization"] = f"Bearer {TOKEN}"
    return client


@pytest.mark.parametrize(
    "path", ["/api/runs", "/api/page?job=a&run=1", "/api/heatmap?job=a&run=1", "/api/events?job=a"]
)
@pytest.mark.parametrize(
    "given",
    ["", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer é"],
)
def test_rows_need_the_token(answers: Answers, stored: Stored, path: str, given: str) -> None:
    answer = client_of(answers).get(path, headers={"authorization": given.encode("latin-1")})
    assert answer.status_code == 401
    assert "token" in answer.json()["error"]
    assert not stored.built


def test_the_front_end_needs_no_token_and_says_nothing_of_jobs(answers: Answers) -> None:
    for path, content in FILES.items():
        answer = client_of(answers).get(path)
        assert (answer.status_code, answer.content) == (200, content)


def test_the_front_end_is_packed_once(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers who asked for it again and again kept a core busy."""
    content = b"<p>front end" * 1000
    app = make_app(answers, Access(TOKEN, loopback=True), {"/": content})
    monkeypatch.setattr(middleware, "zlib", None)
    client = TestClient(app, base_url="http://localhost")
    answer = client.get("/", headers={"accept-encoding": "gzip"})
    assert (answer.status_code, answer.headers["content-encoding"], answer.content) == (200, "gzip", content)
    answer = client.get("/", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in answer.headers
    assert answer.content == content


def test_without_a_token_everybody_may_ask(answers: Answers) -> None:
    assert client_of(answers, Access("", loopback=True)).get("/api/page?job=a&run=1").status_code == 200


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost:8480", True), ("127.0.0.1:8480", True), ("[::1]:8480", True), ("LOCALHOST", True),
        ("rebound.example:8480", False), ("localhost.rebound.example", False), ("127.0.0.1.rebound.example", False),
        ("127.0.0.2:8480", True), ("127.8.9.1", True), ("[0:0:0:0:0:0:0:1]", True), ("", False), ("[::1", False),
        ("localhost:80@rebound.example", False), ("[::1]rebound.example", False), ("10.0.0.7", False),
    ],
)  # fmt: skip
def test_on_loopback_no_other_name_is_answered(client: TestClient, host: str, known: bool) -> None:
    assert (client.get("/api/page?job=a&run=1", headers={"host": host}).status_code == 200) is known
    assert (client.get("/", headers={"host": host}).status_code == 200) is known


def test_elsewhere_any_name_is(answers: Answers) -> None:
    reached = client_of(answers, Access(TOKEN, loopback=False), "http://node7.example:8480")
    assert reached.get("/").status_code == 200
    assert reached.get("/api/page?job=a&run=1").status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2fetc%2fpasswd", "//etc/passwd", "/page.js/",
        "/page.js%00.css", "/static/page.js", "/app.py", "/api", "/api/", "/api/page/../../etc/passwd", "/page.js;x",
        "/api/runs/1", "/~root", "/.git/config", "/etc/passwd", "/C:%5Cwindows",
    ],
)  # fmt: skip
def test_no_path_reaches_a_file(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert b"root:" not in answer.content


@pytest.mark.parametrize("path", ["/", "/page.js", "/api/runs", "/api/page?job=a&run=1", "/nothing", "/api/page"])
def test_every_answer_has_the_headers(client: TestClient, path: str) -> None:
    answer = client.get(path)
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert "access-control-allow-origin" not in answer.headers


def test_refusals_have_the_headers_too(answers: Answers) -> None:
    answer = client_of(answers).get("/api/runs")
    assert answer.status_code == 401
    assert answer.headers.items() >= HEADERS.items()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/api/page?job=a&run=1", "/api/runs"])
def test_it_only_reads(client: TestClient, stored: Stored, method: str, path: str) -> None:
    assert client.request(method, path, headers={"origin": "https://elsewhere.example"}).status_code == 405
    assert not stored.built


def test_a_page_is_built_once_for_each_state_of_its_run(client: TestClient, stored: Stored) -> None:
    first = client.get("/api/page?job=a&run=1").json()
    assert first == {"page": {"job": "a"}, "arrays": "AAEC", "version": "1"}
    assert client.get("/api/page?job=a&run=1").json() == first
    assert stored.built == [Asked("a", 1)]
    client.get("/api/page?job=a&run=1&first=3&last=9")
    assert stored.built == [Asked("a", 1), Asked("a", 1, 3, 9)]
    stored.versions["a"] = "2"
    assert client.get("/api/page?job=a&run=1").json()["version"] == "2"
    assert stored.built[2:] == [Asked("a", 1)]


def test_a_page_of_a_run_that_goes_on_rests(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else somebody who looks at it keeps the store of the traced node busy all the time."""
    now_s, steps = 100.0, 0
    build = stored.build

    def slow(store: Any, asked: Asked) -> Built:
        nonlocal now_s
        now_s += 2
        return build(store, asked)

    def read(*_: object) -> dict[str, list[int]]:
        nonlocal steps
        steps += 1
        return {"step": [steps], "judged": [0], "open": [1], "covered": [0], "known": [1]}

    monkeypatch.setattr(answers_module, "query_columns", read)
    answers = Answers(None, slow, clock=lambda: now_s)  # type: ignore[arg-type]
    asked = Asked("a", 1)
    first = answers.page(asked)
    now_s += REST * 2 - 0.1
    assert answers.page(asked) == first
    assert answers.version(asked) == "1.0.1"
    now_s += 0.1
    assert answers.version(asked) == "2.0.1"
    assert answers.page(asked) != first
    assert len(stored.built) == 2


def test_who_asks_at_the_same_time_shares_a_page(answers: Answers, stored: Stored) -> None:
    begun, go_on = threading.Event(), threading.Event()
    build = stored.build

    def slow(store: Any, asked: Asked) -> Built:
        begun.set()
        assert go_on.wait(60)
        return build(store, asked)

    answers._build = slow
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(answers.page(Asked("a", 1)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(got) == 3
    assert len(set(got)) == 1
    assert stored.built == [Asked("a", 1)]


def test_who_asks_for_runs_that_cannot_be_shown_takes_no_memory(answers: Answers) -> None:
    for run in range(100):
        with pytest.raises(ArgusError):
            answers.page(Asked("gone", run))
    assert not answers._locks


def test_a_long_list_of_runs_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [JobRun("a", run, 1, 1, 1, 0, run, False, 5, 9, "", "", [], 0) for run in range(MOST_RUNS + 7)]
    monkeypatch.setattr(answers_module, "find_job_runs", lambda _: list(runs))
    answer = json.loads(Answers(SimpleNamespace(url="chdb:///x"), lambda *_: None).runs())  # type: ignore[arg-type]
    assert (len(answer["runs"]), answer["left_out"]) == (MOST_RUNS, 7)
    assert answer["runs"][0]["run"] == MOST_RUNS + 6, "the newest are there"


def test_few_pages_are_kept(answers: Answers, stored: Stored) -> None:
    for run in range(PAGES + 3):
        answers.page(Asked("a", run))
    assert len(answers._pages) == PAGES
    assert len(answers._locks) <= PAGES + 1
    answers.page(Asked("a", PAGES + 2))
    assert len(stored.built) == PAGES + 3
    answers.page(Asked("a", 0))
    assert len(stored.built) == PAGES + 4


def test_part_of_a_heat_map(client: TestClient, stored: Stored) -> None:
    answer = client.get("/api/heatmap?job=a&run=1&measure=step&first=5&last=9")
    part = {"view": "heatmap", "measure": "step", "first": 5, "last": 9}
    assert answer.json() == {"heatmap": part, "arrays": "Bw=="}
    assert stored.built == [Asked("a", 1)], "the scale is that of the whole page"
    stored.versions["a"] = "2"
    client.get("/api/heatmap?job=a&run=1&measure=step&first=6&last=6")
    assert stored.built == [Asked("a", 1)], "and of the one that is looked at"
    for wrong in ("", "&first=5", "&last=5", "&first=9&last=5"):
        assert client.get(f"/api/heatmap?job=a&run=1&measure=step{wrong}").status_code == 404
    assert client.get("/api/heatmap?job=a&run=1&measure=x&first=5&last=9").status_code == 404


def test_a_part_of_a_run_that_is_gone(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page is kept for a while. That it has no such measure would be said of a run that is there."""
    asked = "/api/heatmap?job=a&run=1&measure={}&first=5&last=9"
    assert client.get(asked.format("step")).status_code == 200

    def version(*_: object) -> str:
        raise ArgusError("no such run is stored", "The list of runs has those that are")

    monkeypatch.setattr(Answers, "version", version)
    assert client.get(asked.format("x")).json()["error"] == "no such run is stored"


@pytest.mark.parametrize(
    "query",
    [
        "", "job=a", "run=1", "job=a&run=", "job=a&run=x", "job=a&run=-1", "job=a&run=1.5", "job=a&run=99999999999999",
        "job=a&run=1&first=x", "job=a&run=%D9%A1", "job=a&run=000000000001" + "1" * 5_000,
        "job=a&run=4294967296", "job=a&run=1&last=0000000000099999999999999", "job=" + "a" * 2_000 + "&run=1",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/api/page", "/api/heatmap", "/api/events"])
def test_what_is_no_run_is_refused(client: TestClient, stored: Stored, path: str, query: str) -> None:
    answer = client.get(f"{path}?{query}")
    assert answer.status_code == 404
    assert answer.json()["error"]
    assert not stored.built


def test_names_are_what_they_are() -> None:
    name = "<script>'\"; DROP TABLE jobs --"
    assert asked_for({"job": name, "run": "7", "last": "12"}) == Asked(name, 7, None, 12)


@pytest.mark.parametrize("length", [16, 512])
def test_a_token_of_any_length_that_is_taken_works(answers: Answers, length: int) -> None:
    token = "t" * length
    client = client_of(answers, Access(token, loopback=True))
    for given, status in ((token, 200), (token + "t", 401), (token[1:], 401)):
        answer = client.get("/api/page?job=a&run=1", headers={"authorization": f"Bearer {given}"})
        assert answer.status_code == status


def heard(app: Any, query: str, events: int) -> list[str]:
    """The first events that somebody who watches gets."""

    async def run() -> list[str]:
        got = b""
        enough = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await enough.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal got
            got += message.get("body", b"")
            if got.count(b"event:") >= events:
                enough.set()

        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {TOKEN}".encode())]
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
                 "path": "/api/events", "raw_path": b"/api/events", "query_string": query.encode(), "root_path": "",
                 "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8480)}  # fmt: skip
        await asyncio.wait_for(app(scope, receive, send), 60)
        return [line.removeprefix("event: ") for line in got.decode().splitlines() if line.startswith("event:")]

    return finished(run())


def finished(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """What it returns, in a thread: this one has a loop already where a browser was driven before."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, coroutine).result()


def test_who_watches_hears_of_what_came_while_the_page_was_made(answers: Answers, stored: Stored) -> None:
    for version, known, event in (("1", "", "watching"), ("1", "1", "watching"), ("2", "1", "changed")):
        stored.versions["a"] = version
        app = make_app(answers, Access(TOKEN, loopback=True), FILES, look_s=0.01)
        assert heard(app, f"job=a&run=1&version={known}", 1) == [event]


def test_many_who_watch_a_run_ask_the_store_once(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Asked] = []
    monkeypatch.setattr(Answers, "version", lambda _, one: asked.append(one) or "1")
    versions = _Versions(answers, fresh_s=60)

    async def ask(jobs: str) -> list[str]:
        return await asyncio.gather(*(versions.of(Asked(job, 1)) for job in jobs))

    assert finished(ask("aaaaaabb")) == ["1"] * 8
    assert sorted(one.job for one in asked) == ["a", "b"]


def test_a_store_that_fails_is_trouble_and_ends_no_stream(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([ArgusError("gone"), ValueError("secret"), "1"])

    def version(*_: object) -> str:
        turn = next(turns, "1")
        if isinstance(turn, Exception):
            raise turn
        return turn

    monkeypatch.setattr(Answers, "version", version)
    app = make_app(answers, Access(TOKEN, loopback=True), FILES, look_s=0.01)
    assert heard(app, "job=a&run=1", 3) == ["trouble", "trouble", "changed"]


def test_errors_are_one_line_without_the_inside(client: TestClient) -> None:
    gone = client.get("/api/page?job=gone&run=1")
    assert (gone.status_code, gone.json()) == (404, {"error": "job 'gone' has no run 1", "hint": "Stored are: 2"})
    broken = client.get("/api/page?job=broken&run=1")
    assert broken.status_code == 500
    assert "secret" not in broken.text
    assert "Traceback" not in broken.text


@pytest.mark.parametrize(
    ("address", "alone"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.7", False), ("node7", False), ("localhost.example", False)],
)  # fmt: skip
def test_loopback(address: str, alone: bool) -> None:
    assert is_loopback(address) is alone
