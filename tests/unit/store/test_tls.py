"""A real ClickHouse server behind TLS: certificate authorities of one's own, and what is said of what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from argus.cli.main import main
from argus.model.errors import EXIT_UNAVAILABLE
from argus.store.open import open_store
from argus.store.reader import query_columns
from argus.store.schema import init_schema
from argus.store.writer import Writer
from tests.clickhouse_server import MISSING, PASSWORD, Server
from tests.tls_front import Authority, TlsFront
from tests.unit.store.test_writer import iterations

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """Ports of one server: ``plain``; ``tls``; and with certificates that are wrong in one way."""
    folder = tmp_path_factory.mktemp("tls")
    ours, _ = Authority(folder, "ours"), Authority(folder, "theirs")
    certificates = {
        "plain": None, "tls": ours.sign("good"), "expired": ours.sign("old", days=-1),
        "elsewhere": ours.sign("other", host="DNS:db"),
    }  # fmt: skip
    with Server(folder / "server") as server:
        fronts = {name: TlsFront(certificate, server.port) for name, certificate in certificates.items()}
        yield {name: front.port for name, front in fronts.items()}
        for front in fronts.values():
            front.close()


@pytest.fixture
def folder(ports: dict[str, int], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ARGUS_STORE_PASSWORD", PASSWORD)
    found = next(tmp_path_factory.getbasetemp().glob("tls*"))
    (found / "junk.pem").write_text("no certificate")
    return found


def url(port: int, options: str, folder: Path) -> str:
    return f"clickhouse://argus@127.0.0.1:{port}/argus?{options.replace('FOLDER', str(folder))}"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("options", ["secure=true&ca_cert=FOLDER/ours.pem", "secure=true&verify=false"])
def test_rows_go_through_tls(ports: dict[str, int], folder: Path, options: str) -> None:
    with open_store(url(ports["tls"], options, folder)) as store:
        init_schema(store)
        with store.lease() as client:
            client.command("TRUNCATE TABLE iterations")
        with Writer(store, source="test") as writer:
            writer.append("iterations", iterations(5000))
            assert writer.flush(), writer.last_error
        assert query_columns(store, "SELECT count() AS n FROM iterations")["n"].tolist() == [5000]


@pytest.mark.parametrize(
    ("port", "options", "line", "hint"),
    [
        ("tls", "secure=true", "of an authority that is not trusted here", "ca_cert=/path/ca.pem"),
        ("tls", "secure=true&ca_cert=FOLDER/theirs.pem", "not of the authority in FOLDER/theirs.pem", "ca_cert="),
        ("expired", "secure=true&ca_cert=FOLDER/ours.pem", "certificate has expired", "Renew it"),
        ("elsewhere", "secure=true&ca_cert=FOLDER/ours.pem", "certificate is for another name", "as the certificate"),
        ("plain", "secure=true&ca_cert=FOLDER/ours.pem", "a port that serves plain HTTP; secure=false", "See whether"),
        ("tls", "secure=false", "it ended the connection without an answer", "secure=true"),
        ("tls", "secure=true&ca_cert=/none.pem", "cannot read ca_cert '/none.pem': No such file", "store URL"),
        ("tls", "secure=true&ca_cert=FOLDER/junk.pem", "holds no certificate in PEM form", "store URL"),
        ("tls", "secure=true&ca_cert=FOLDER", "ca_cert 'FOLDER': Is a directory", "store URL"),
    ],
)
def test_what_is_wrong_is_one_clear_line(
    ports: dict[str, int],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    port: str,
    options: str,
    line: str,
    hint: str,
) -> None:
    assert main(["sql", "SELECT 1", "--store", url(ports[port], options, folder)]) == EXIT_UNAVAILABLE
    err = capsys.readouterr().err
    assert line.replace("FOLDER", str(folder)) in err
    assert hint in err
    assert len(err.strip().splitlines()) <= 2
    assert "Traceback" not in err
