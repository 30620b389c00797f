"""The name of a node, and what makes common ones differ."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from argus.system import host


def a_machine(folder: Path, *cards: str, machine: str = "", boot: str = "b") -> Path:
    """A root with these network cards; ``lo`` has no device."""
    for place, text in (("etc/machine-id", machine), ("proc/sys/kernel/random/boot_id", boot)):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(f"{text}\n")
    for at, address in enumerate(("00:00:00:00:00:00", *cards)):
        card = folder / f"sys/class/net/c{at}"
        card.mkdir(parents=True)
        (card / "address").write_text(f"{address}\n")
        if at:
            (card / "device").mkdir()
    return folder


@pytest.mark.parametrize(
    ("own", "given", "variable", "named"),
    [
        ("node7", "", "", "node7"),
        ("node7", "other", "third", "other"),
        ("node7", "", "third", "third"),
        ("localhost", "", "third", "third"),
        ("localhost", "", "a\nb", "a?b"),
        ("localhost.localdomain", "", "", "localhost.localdomain-123456"),
        ("(none)", "", "", "none-123456"),
        ("", "", "", "node-123456"),
    ],
)
def test_common_names_get_digits(
    own: str, given: str, variable: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    monkeypatch.setattr(host, "machine_digits", lambda: "123456")
    monkeypatch.setenv(host.VARIABLE, variable)
    assert host.host_name(given) == named


def test_machines_differ_by_their_cards_although_images_are_one(tmp_path: Path) -> None:
    one = a_machine(tmp_path / "1", "02:00:00:00:00:01", machine="same")
    two = a_machine(tmp_path / "2", "02:00:00:00:00:02", machine="same")
    assert host.machine_digits(one) != host.machine_digits(two)


def test_digits_stay_over_a_reboot_and_are_the_boot_s_where_nothing_else_is(tmp_path: Path) -> None:
    before = host.machine_digits(a_machine(tmp_path / "1", "02:00:00:00:00:01", boot="first"))
    assert host.machine_digits(a_machine(tmp_path / "2", "02:00:00:00:00:01", boot="second")) == before
    bare = [host.machine_digits(a_machine(tmp_path / f"{boot}", boot=boot)) for boot in ("first", "second")]
    assert bare[0] != bare[1]


def test_containers_of_one_image_differ_by_the_boot_of_their_node(tmp_path: Path) -> None:
    one, two = (host.machine_digits(a_machine(tmp_path / boot, machine="image", boot=boot)) for boot in ("a", "b"))
    assert one != two
