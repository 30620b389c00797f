"""What a sanitized archive must not hold, wherever it stands: in words, keys, paths, errors and facts."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path

import jsonschema
import pytest
import yaml

from argus.compare.observe.plan import Arm, Plan, Readings, Server, schedule
from argus.compare.observe.records import CONFIG, META, METRICS, REPORT, read, schemas
from argus.compare.observe.sanitize import Sanitizer, sanitized, write_zip
from tests.builders.observed import session, took

SANITIZER = Sanitizer(["alice", "bob"], ["node7.example.org", "head"], ["/home/alice", "/data/homes/al"])


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("/home/alice/x.py", "~/x.py"),
        ("/home/carol/x.py", "~/x.py"),
        ("open('/Users/carol/x')", "open('~/x')"),
        ("/data/homes/al/run", "~/run"),
        ("/data/homes/alfred", "/data/homes/alfred"),
        ("/root/.cache and /rooted", "~/.cache and /rooted"),
        ("cd ~carol/x", "cd ~/x"),
        ("alice ran it; ALICE, alice_bench, alice-2", "user ran it; user, user_bench, user-2"),
        ("malice, alicean", "malice, alicean"),
        ("node7.example.org:80 node7 NODE7-ib0", "host:80 host host-ib0"),
        ("node77 ahead headless head", "node77 ahead headless host"),
        ("10.0.0.1:8080, (192.168.1.255) a10.1.2.3b x_10.1.2.3", "address:8080, (address) aaddressb x_address"),
        ("tcp://10.0.0.1/ and 10.0.0.1.", "tcp://address/ and address."),
        ("999.1.1.1 and 1.2.3 and 1.2.3.4.5", "999.1.1.1 and 1.2.3 and 1.2.3.4.5"),
        ("ip-10-0-0-1.ec2.internal", "address.ec2.internal"),
        ("fe80::1%eth0 [2001:db8::1]:80 ::1 ::ffff:10.0.0.1", "address [address]:80 address address"),
        ("2001:db8:0:0:0:0:0:1", "address"),
        ("12:30:45 x::y std::vector ::", "12:30:45 x::y std::vector ::"),
        ("02:42:ac:11:00:02 and 02-42-AC-11-00-02", "card and card"),
        ("FOO=bar foo='a b' x.py", "FOO=*** foo=*** x.py"),
        ('A="b c" --size=4 -x=3', "A=*** --size=4 -x=3"),
        ("--password hunter2 --api-key=abc", "--password *** --api-key=***"),
        ("https://u:pw@host.example/x?token=abc", "https://u:***@host.example/x?token=***"),
        ("key hf_abcdefghijklmnopqrstuvwx", "key ***"),
        ('{"password": "two words", "n": 3}', '{"password": "***", "n": 3}'),
        ("x --set=auth.password=abc --opts=token:abc", "x --set=auth.password=*** --opts=token:***"),
        ("--header=X-Api-Key: abc", "--header=X-Api-Key: ***"),
        ("x --pw abc -u carl:abc  git+https://abc@h/x", "x --pw *** -u carl:***  git+https://***@h/x"),
        ("", ""),
    ],
)
def test_texts(text: str, clean: str) -> None:
    assert SANITIZER.text(text) == clean


def test_short_names_are_replaced_only_where_they_are_all() -> None:
    short = Sanitizer(["a"], [], ["/"])
    assert short.text("a banana / a") == "a banana / a"
    assert short.text("a") == "user"


def test_names_in_keys_and_at_any_depth() -> None:
    clean = SANITIZER.value({"alice": [{"x": "node7"}, ("bob", 7, None, True)]})
    assert clean == {"user": [{"x": "host"}, ["user", 7, None, True]]}


SECRETS = ("alice", "node7", "10.1.2.3", "fe80", "hunter2", "s3cret", "0b5c1f6e", "carol", "private", "/home/", "/root")


def archive(folder: Path, *, sanitize: bool) -> tuple[dict[str, str], bytes]:
    stored = read(folder)
    outputs = {f"output/{path.name}": path for path in sorted((folder / "output").iterdir())}
    if sanitize:
        stored, outputs = sanitized(stored, SANITIZER), {}
    file = io.BytesIO()
    write_zip(file, stored, outputs)
    with zipfile.ZipFile(file) as found:
        assert found.testzip() is None
        return {name: found.read(name).decode() for name in found.namelist()}, file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    arms = (
        Arm("MODE=private", (("MODE", "private"),)),
        Arm("MODE=open", (("MODE", "s3cret"),)),
        Arm("alice's".replace("'", "-"), (("HOME", "/home/carol"),)),
    )
    plan = Plan(
        ("/home/alice/bench", "--host", "10.1.2.3", "--password", "hunter2", "X=s3cret", "--out=/root/x"),
        repeat=6, arms=arms, seed=1, readings=Readings(r"latency=([0-9.]+)\s*(ms)", errors="node7 failed"),
        server=Server(("/home/carol/serve", "fe80::1", "TOKEN=s3cret"), "node7 ready"),
    )  # fmt: skip
    made = session(
        tmp_path / "o", plan,
        [took(1.5 if slot.arm is arms[0] else 1.0, error="on node7 of alice") for slot in schedule(plan)],
        output=lambda _: "latency=3 ms\nprivate of alice\n",
        meta={"facts": {"host.boot": "0b5c1f6e", "os.name": "Alice's Linux on node7", "cpu.count": "4"}},
    )  # fmt: skip
    object.__setattr__(made.plan, "server", None)
    made.carry_out()
    text = (tmp_path / "o" / CONFIG).read_text(encoding="utf-8")
    assert "server: null" in text
    server = (
        "server:\n  command: [/home/carol/serve, 'fe80::1', TOKEN=s3cret]\n  ready: node7 ready\n  ready_timeout: 3"
    )
    (tmp_path / "o" / CONFIG).write_text(text.replace("server: null", server), encoding="utf-8")
    return tmp_path / "o"


def test_a_sanitized_archive_names_nobody(folder: Path) -> None:
    whole, _ = archive(folder, sanitize=False)
    everything = " ".join(whole.values()).lower()
    assert all(secret in everything for secret in SECRETS if secret != "hunter2"), "the test would find them"
    assert "hunter2" not in everything, "secrets are not even recorded"
    clean, data = archive(folder, sanitize=True)
    assert set(clean) == {METRICS, META, CONFIG, REPORT}
    for name, text in clean.items():
        for secret in SECRETS:
            assert secret not in text.lower(), (name, secret)
    assert b"alice" not in data


def test_a_sanitized_archive_still_says_what_was_found(folder: Path) -> None:
    clean, _ = archive(folder, sanitize=True)
    contracts = schemas()
    for name, text in clean.items():
        if name != REPORT:
            jsonschema.validate(yaml.safe_load(text) if name == CONFIG else json.loads(text), contracts[name])
    metrics, before = json.loads(clean[METRICS]), read(folder).metrics
    assert metrics["decision"]["status"] == before["decision"]["status"] == "unstable"
    arms = {run["arm"] for run in metrics["runs"]}
    assert arms == {"MODE=***", "MODE=***+", "user-s"}, "arms stay apart"
    assert [run["figures"] for run in metrics["runs"]] == [run["figures"] for run in before["runs"]]
    assert re.search(r"latency=\(\[0-9.\]\+\)", clean[CONFIG]), "a pattern assigns nothing"
    assert "arm MODE=\\*\\*\\*+ is 33.3% faster than arm MODE=" in clean[REPORT]


def test_numbers_in_which_arms_differ_stay(tmp_path: Path) -> None:
    plan = Plan(("x",), repeat=5, arms=(Arm("workers=1", (("workers", "1"),)), Arm("workers=8", (("workers", "8"),))))
    session(tmp_path / "o", plan, [took(1.0)] * 10).carry_out()
    clean, _ = archive(tmp_path / "o", sanitize=True)
    assert yaml.safe_load(clean[CONFIG])["arms"] == {"workers=1": {"workers": "***"}, "workers=8": {"workers": "***"}}


def test_the_same_records_make_the_same_archive(folder: Path) -> None:
    assert archive(folder, sanitize=True)[1] == archive(folder, sanitize=True)[1]


def test_all_files_are_in_an_archive_that_is_not_sanitized(folder: Path) -> None:
    whole, _ = archive(folder, sanitize=False)
    assert whole["output/00001.out"] == "latency=3 ms\nprivate of alice\n"
    assert len(whole) == 4 + 2 * 18
