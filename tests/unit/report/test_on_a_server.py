"""Pages of a ClickHouse server, for users who may not write: what ``argus serve`` answers, and ``argus report``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from argus.cli.main import main
from argus.report.server.answers import Asked
from argus.report.server.front_end import answers_of
from argus.store.open import open_store
from argus.store.schema import init_schema
from tests.builders.stored_job import store_job
from tests.builders.synthetic_job import Fault, ddp, simulate
from tests.clickhouse_server import MISSING, PASSWORD, Server

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

USERS = {"reader": "default", "unchanging": "readonly"}
"""Users and their profiles: one may only SELECT, the other one may not change a setting of a query either."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    users = "".join(
        f"<{user}><password>{PASSWORD}</password><networks><ip>127.0.0.1</ip></networks><profile>{profile}</profile>"
        f"<quota>default</quota><grants><query>GRANT SELECT ON argus.*</query></grants></{user}>"
        for user, profile in USERS.items()
    )
    with pytest.MonkeyPatch.context() as patch, Server(tmp_path_factory.mktemp("server"), users=users) as running:
        patch.setenv("ARGUS_STORE_PASSWORD", PASSWORD)
        with open_store(running.url()) as store:
            init_schema(store)
            store_job(store, "job", simulate(4, 60, ddp(), faults=(Fault("compute", (2,), 1.5),)))
        yield running


@pytest.mark.parametrize("user", USERS)
def test_a_user_who_may_only_select_sees_the_same_page(
    server: Server, user: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ARGUS_STORE_PASSWORD", PASSWORD)
    with open_store(server.url()) as store:
        job = json.loads(answers_of(store).runs())["runs"][0]
        whole = json.loads(answers_of(store).page(Asked(job["job"], job["run"])))["page"]
    with open_store(server.url(user=user)) as store:
        answers = answers_of(store)
        assert json.loads(answers.runs())["runs"] == [job]
        asked = Asked(job["job"], job["run"])
        page = json.loads(answers.page(asked))["page"]
        part = json.loads(answers.heatmap(Asked(asked.job, asked.run, 3, 9), "step"))["heatmap"]
    assert whole["verdict"]["findings"][0]["ranks"] == [2]
    assert page["verdict"]["findings"] == whole["verdict"]["findings"]
    assert {panel["id"]: panel["absent"] for panel in page["panels"]} == {
        panel["id"]: panel["absent"] for panel in whole["panels"]
    }
    assert part["edges"] == list(range(3, 11))
    file = tmp_path / "page.html"
    assert main(["report", "-o", str(file), "--store", server.url(user=user)]) == 0
    assert "rank 2" in capsys.readouterr().out
    assert file.stat().st_size > 10_000
