"""What scripts/kernels boots from, and what it calls right. The machines themselves are not run here: each takes
minutes."""

from __future__ import annotations

import importlib
import json
import lzma
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("kernels")
    sys.modules.pop("kernels", None)


def entries(archive: bytes) -> dict[str, tuple[int, bytes, tuple[int, int]]]:
    """Of a cpio archive: path -> mode, content, device."""
    found, at = {}, 0
    while True:
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name = archive[at + 110 : at + 110 + fields[11] - 1].decode()
        content_at = at + -(-(110 + fields[11]) // 4) * 4
        if name == "TRAILER!!!":
            return found
        found[name] = fields[1], archive[content_at : content_at + fields[6]], (fields[9], fields[10])
        at = content_at + -(-fields[6] // 4) * 4


def test_an_initramfs_holds_what_is_booted(kernels: ModuleType) -> None:
    image = kernels.initramfs(b"shell", {"first": b"1" * 5, "second": b"22"}, "/python /guest.py")
    found = entries(image)
    assert found["bin/busybox"] == (stat.S_IFREG | 0o755, b"shell", (0, 0))
    assert found["dev/console"] == (stat.S_IFCHR | 0o600, b"", (5, 1))
    assert found["order"][1] == b"first\nsecond"
    assert found["modules/second"][1] == b"22"
    assert found["init"][1].endswith(b"exec switch_root /root /python /guest.py\n")


def test_modules_come_after_what_they_need(kernels: ModuleType, tmp_path: Path) -> None:
    depends = {"virtio-ring": "", "virtio": "virtio_ring", "virtio_pci": "virtio,virtio_ring,crc", "other": "virtio"}
    for name, others in depends.items():
        text = f'const char info[] __attribute__((section(".modinfo"))) = "license=GPL\\0depends={others}";'
        object_file = tmp_path / f"{name}.ko"
        subprocess.run(["gcc", "-c", "-x", "c", "-o", object_file, "-"], input=text.encode(), check=True)
    packed = tmp_path / "virtio.ko.xz"
    packed.write_bytes(lzma.compress((tmp_path / "virtio.ko").read_bytes()))
    (tmp_path / "virtio.ko").rename(tmp_path / "virtio.o")
    (tmp_path / "modules.builtin").write_text("kernel/lib/crc.ko\n")
    images = kernels.modules(tmp_path, ["virtio_pci", "crc"])
    assert list(images) == ["virtio_ring", "virtio", "virtio_pci"]
    assert images["virtio"] == (tmp_path / "virtio.o").read_bytes()
    with pytest.raises(kernels.Failure, match="the kernel has no module 9p"):
        kernels.modules(tmp_path, ["9p"])


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"suite": "bookworm", "package": "6.1.0-1-amd64", "seconds": 300, "words": [], "rows": list(rows)}


def program(name: str, backend: str = "", *, loaded: bool = True, verified: int = 100) -> dict[str, Any]:
    outcome = {"verified": verified, "seconds": 0.1} if loaded else {"output": "program x: Permission denied"}
    return {"step": "program", "program": name, "backend": backend, "loaded": loaded, **outcome}


WORKS = {"step": "sampler", "on": True, "detail": "this process's own stack was read"}
TRUE = {"step": "truth", "samples": 200, "right": 0.995, "wrong": 0, "output": ""}
TRACED = {
    "step": "trace", "code": 0, "output": "…\ncoverage: complete\n", "functions": {"inner": 3}, "reasons": {"sleep": 2},
    "rows": {"launches": 10, "collectives": 4, "stack_samples": 7},
}  # fmt: skip


def test_a_kernel_is_right_if_all_programs_load_and_rows_come(
    kernels: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = [program("on_sample"), program("walk_sampled", verified=1234), program("cuda_enter", "perf")]
    assert kernels.show([result(*programs, WORKS, TRUE, TRACED)])
    shown = capsys.readouterr().out
    assert "99.50% of 200 right, 0 wrong" in shown
    assert "2 of 2 load, most 1,234" in shown
    assert "10 launches, 4 collectives, 7 stack_samples, 3 stacks in inner(), 2 sleeps" in shown
    assert "coverage: complete" in shown


@pytest.mark.parametrize(
    "bad",
    [
        [program("on_sample", loaded=False), WORKS, TRUE, TRACED],
        [program("on_sample"), {**WORKS, "on": False}, TRUE, TRACED],
        [program("on_sample"), WORKS, TRUE, {**TRACED, "rows": {**TRACED["rows"], "launches": 0}}],  # type: ignore[dict-item]
        [program("on_sample"), WORKS, TRUE, {**TRACED, "functions": {"": 3}}],
        [program("on_sample"), WORKS, TRUE, {**TRACED, "reasons": {"futex": 3}}],
        [program("on_sample"), WORKS, TRUE, {**TRACED, "code": 1}],
        [program("on_sample"), WORKS, {**TRUE, "wrong": 1}, TRACED],
        [program("on_sample"), WORKS, {**TRUE, "right": 0.98}, TRACED],
        [program("on_sample"), WORKS, {**TRUE, "samples": 99}, TRACED],
        [program("on_sample"), WORKS, TRACED],
        [program("on_sample"), WORKS, TRUE, TRACED, {"step": "failed", "what": "Traceback\nOSError: no"}],
        [program("on_sample"), {"step": "refusal", "code": 1, "output": "Traceback"}],
        [WORKS, TRUE, TRACED],
        [program("on_sample")],
    ],
    ids=[
        "refused",
        "no stack",
        "no launches",
        "no Python",
        "no sleep",
        "trace fails",
        "wrong",
        "rejected",
        "few",
        "no truth",
        "failure",
        "no words",
        "no program",
        "cut",
    ],
)
def test_anything_else_is_wrong(kernels: ModuleType, bad: list[dict[str, Any]]) -> None:
    assert not kernels.show([result(*bad)])


def test_programs_may_be_all_that_was_asked_for(kernels: ModuleType) -> None:
    assert not kernels.show([result(program("on_sample"), WORKS)])
    assert kernels.show([{**result(program("on_sample"), WORKS), "words": ["--programs"]}])


def test_a_kernel_that_is_too_old_is_right_if_the_user_reads_why(kernels: ModuleType) -> None:
    refusal = {"step": "refusal", "code": 3, "output": "argus: Linux 5.10 is too old: uprobes with cookies need 5.15\n"}
    # With stand-ins for what the kernel lacks the programs are loaded, and cannot work.
    assert kernels.show([result(program("on_sample"), {**WORKS, "on": False}, refusal)])


def test_a_line_that_is_being_written_is_read_later(kernels: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "output.jsonl"
    assert kernels.rows_of(file) == []
    file.write_text(json.dumps({"step": "begin"}) + '\n{"step": "pro')
    assert kernels.rows_of(file) == [{"step": "begin"}]


def test_the_mirror_is_the_one_that_apt_uses(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = "Debian\tDebian-Security\thttp://security\nOther\tOther\thttp://other\nDebian\tDebian\thttp://mirror\n"
    monkeypatch.setattr(kernels.debian.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, reported))
    assert kernels.debian.mirror() == "http://mirror"
    monkeypatch.setattr(kernels.debian.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, ""))
    with pytest.raises(kernels.Failure, match="--mirror"):
        kernels.debian.mirror()


def test_the_packages_of_a_kernel_are_known_by_their_names(kernels: ModuleType) -> None:
    # Dependencies of linux-image-RELEASE in trixie and in sid.
    reported = [
        "linux-base",
        "kmod",
        "linux-base-7.2.13+deb14-amd64",
        "linux-binary-7.2.13+deb14-amd64",
        "linux-headers-7",
    ]
    assert list(filter(kernels.KERNEL_PACKAGES.fullmatch, reported)) == reported[2:4]
