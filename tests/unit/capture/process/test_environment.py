"""What is read of a process's environment: versions, limits, settings without secrets, the commit of its program."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from argus.capture.process import environment, mapped
from argus.capture.process.environment import process_facts
from argus.model import environment as model
from argus.system import proc as system_proc

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PID = 7


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes /proc/7 of a process that works in /repo of a root of its own; returns that root."""

    def make(maps: str = "", environ: bytes = b"", cgroup: str = "0::/\n", command: str = "python\0train.py\0") -> Path:
        proc, root = tmp_path / "proc" / str(PID), tmp_path / "root"
        for folder in (proc, root / "repo"):
            folder.mkdir(parents=True)
        users = "".join(
            f"{name}:\t" + f"{own}\t" * 4 + "\n" for name, own in (("Uid", os.getuid()), ("Gid", os.getgid()))
        )
        for name, text in (("status", f"Name:\tpython\n{users}Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0\n"),
                           ("maps", maps), ("cgroup", cgroup), ("cmdline", command), ("mountinfo", "")):  # fmt: skip
            (proc / name).write_text(text)
        (proc / "environ").write_bytes(environ)
        (proc / "cwd").symlink_to("/repo")
        (proc / "exe").symlink_to("/usr/bin/python3.11")
        for module in (environment, system_proc):
            monkeypatch.setattr(module, "PROC", tmp_path / "proc")
        (tmp_path / "cgroups").mkdir()
        monkeypatch.setattr(environment, "CGROUPS", tmp_path / "cgroups")
        monkeypatch.setattr(mapped.FileTree, "_leads_to", lambda *_: True)  # what /proc has are links of this host
        monkeypatch.setattr(mapped, "open_root", lambda pid: os.open(root, os.O_PATH | os.O_DIRECTORY))
        return root

    return make


def mapping(path: str, root: Path | None = None) -> str:
    """A line of /proc/PID/maps. ``root``: below which the file is made."""
    device, inode = "fd:00", 42
    if root is not None:
        (file := root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        device, inode = mapped.device_of(file.stat().st_dev), file.stat().st_ino
    return f"7f0000000000-7f0000001000 r-xp 00000000 {device} {inode}          {path}\n"


SITE = "/venv/lib/python3.11/site-packages"


def maps_of(root: Path) -> str:
    names = ("nvidia/nccl/lib/libnccl.so.2", "nvidia/cuda_runtime/lib/libcudart.so.12", "torch/lib/libtorch_cpu.so")
    return mapping("/usr/lib/libcuda.so.550.54.15") + "".join(mapping(f"{SITE}/{name}", root) for name in names)


def test_versions_are_those_of_names_packages_and_pytorch_s_own_file(
    process: Callable[..., Path], tmp_path: Path
) -> None:
    root, site = process(maps_of(tmp_path / "root")), SITE
    packages = root / site[1:]
    for name in ("nvidia_nccl_cu12-2.21.5.dist-info", "nvidia_cuda_runtime_cu12-12.4.127.dist-info", "torch"):
        (packages / name).mkdir(exist_ok=True)
    (packages / "torch" / "version.py").write_text("from typing import Optional\n__version__ = '2.13.0+cu124'\n")
    facts = process_facts(PID)
    assert {name: facts[name] for name in facts if name.endswith(("version", "driver", "cuda"))} == {
        "gpu.driver": "550.54.15", "gpu.cuda": "12.4.127", "nccl.version": "2.21.5", "torch.version": "2.13.0+cu124",
        "python.version": "3.11",
    }  # fmt: skip
    assert (facts["numa.cpus"], facts["numa.memory"]) == ("0-3", "0")
    assert environment.UNREADABLE not in facts


def test_settings_are_stored_and_secrets_are_not(process: Callable[..., Path]) -> None:
    process(
        environ=b"NCCL_ALGO=Ring\0OMP_NUM_THREADS=4\0AWS_SECRET_ACCESS_KEY=hunter2\0TORCH_API_TOKEN=hunter2\0HOME=/root\0"
        b"NCCL_PROXY=http://user:hunter2@proxy:1\0CUDA_X=a\nb\0NCCL_COMM_ID=10.0.0.1:29500\0"
        + b"NCCL_" + b"A" * 9000 + b"=1\0no equals\0CONTAINER_IMAGE=reg/train:24.10\0"
    )  # fmt: skip
    facts = process_facts(PID)
    assert facts["env.NCCL_ALGO"] == "Ring"
    assert facts["env.OMP_NUM_THREADS"] == "4"
    assert facts["container.image"] == "reg/train:24.10"
    assert "hunter2" not in str(facts)
    assert "10.0.0.1" not in str(facts)
    assert {name for name in facts if name.startswith("env.")} == {
        "env.NCCL_ALGO", "env.OMP_NUM_THREADS", "env.TORCH_API_TOKEN", "env.NCCL_PROXY",
    }  # fmt: skip


@pytest.mark.parametrize(("program", "is_known"), [("/repo/build/train", True), ("/repo/.venv/bin/python3.13t", False)])
def test_the_commit_of_a_compiled_program(
    process: Callable[..., Path], tmp_path: Path, program: str, is_known: bool
) -> None:
    """Wherever it was started; an interpreter's own folder is not the program's."""
    git = process(command="train\0--steps\0" + "9\0") / "repo" / ".git"
    for name, target in (("cwd", "/tmp"), ("exe", program)):
        link = tmp_path / "proc" / str(PID) / name
        link.unlink()
        link.symlink_to(target)
    git.mkdir(parents=True)
    for name in ("build", ".venv/bin"):
        (git.parent / name).mkdir(parents=True)
    (git.parents[1] / program[1:]).touch()
    (git / "HEAD").write_text(f"{COMMIT}\n")
    assert ("git.commit" in process_facts(PID)) is is_known


@pytest.mark.parametrize("how", ["detached", "loose", "packed"])
def test_the_commit_of_the_program_s_folder(process: Callable[..., Path], how: str) -> None:
    root = process(command="python\0/repo/src/deep/train.py\0")
    git = root / "repo" / ".git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text(f"{COMMIT}\n" if how == "detached" else "ref: refs/heads/main\n")
    if how == "loose":
        (git / "refs/heads/main").write_text(f"{COMMIT}\n")
    if how == "packed":
        (git / "packed-refs").write_text(
            f"# pack-refs with: peeled\n{'f' * 40} refs/heads/other\n{COMMIT} refs/heads/main\n"
        )
    assert process_facts(PID)["git.commit"] == COMMIT


def test_a_submodule_has_a_commit_of_its_own(process: Callable[..., Path]) -> None:
    root = process(command="python\0/repo/sub/train.py\0")
    outer = root / "repo" / ".git"
    (outer / "modules/sub").mkdir(parents=True)
    (outer / "HEAD").write_text(f"{'e' * 40}\n")
    (root / "repo/sub").mkdir()
    (root / "repo/sub/.git").write_text("gitdir: ../.git/modules/sub\n")
    assert "git.commit" not in process_facts(PID), "not the outer one's, if its own is not there"
    (outer / "modules/sub/HEAD").write_text(f"{COMMIT}\n")
    assert process_facts(PID)["git.commit"] == COMMIT


def test_a_further_work_tree_has_the_refs_of_the_first(process: Callable[..., Path]) -> None:
    root = process()
    own, common = root / "repository/.git/repotrees/w", root / "repository/.git"
    own.mkdir(parents=True)
    (root / "repo/.git").write_text("gitdir: /repository/.git/repotrees/w\n")
    (own / "HEAD").write_text("ref: refs/heads/w\n")
    (own / "commondir").write_text("../..\n")
    (common / "packed-refs").write_text(f"{COMMIT} refs/heads/w\n")
    assert process_facts(PID)["git.commit"] == COMMIT


@pytest.mark.parametrize("named", ["../../../outside", "a\0b", "x" * 9000, ""])
def test_a_git_file_leads_nowhere_outside_the_root(process: Callable[..., Path], tmp_path: Path, named: str) -> None:
    root = process()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/HEAD").write_text(f"{COMMIT}\n")
    (root / "repo/.git").write_text(f"gitdir: {named}\n")
    assert "git.commit" not in process_facts(PID)


def test_a_huge_environment_is_cut(process: Callable[..., Path]) -> None:
    filler = b"".join(b"NCCL_%d=%s\0" % (n, b"x" * 2000) for n in range(2000))
    process(environ=b"OMP_NUM_THREADS=4\0" + filler + b"\0\0=\0NCCL_LAST=1\0")
    facts = process_facts(PID)
    assert len(facts) <= model.MOST
    assert max(map(len, facts.values())) <= model.LONGEST
    assert "env.NCCL_LAST" not in facts
    assert facts["python.version"] == "3.11"
    assert facts[environment.UNREADABLE].split(",")[0] == "settings"


def test_what_lies_behind_the_cut_is_not_taken_for_not_set(process: Callable[..., Path]) -> None:
    process(environ=b"HOME=" + b"x" * (3 << 20) + b"\0NCCL_ALGO=Ring\0")
    facts = process_facts(PID)
    assert "env.NCCL_ALGO" not in facts
    assert facts[environment.UNREADABLE] == "settings"


@pytest.mark.parametrize(
    "head", ["ref: refs/../../etc/passwd", "ref: /etc/passwd", "x" * 100_000, "", "ref: refs/heads/none"]
)
def test_a_repository_that_says_nothing_sensible_has_no_commit(process: Callable[..., Path], head: str) -> None:
    root = process()
    (root / "repo" / ".git").mkdir()
    (root / "repo" / ".git" / "HEAD").write_text(head)
    assert "git.commit" not in process_facts(PID)


def test_a_pipe_or_a_link_out_of_the_root_is_not_read(process: Callable[..., Path], tmp_path: Path) -> None:
    root = process()
    (tmp_path / "outside").write_text(f"{COMMIT}\n")
    (root / "repo" / ".git").mkdir()
    (root / "repo" / ".git" / "HEAD").symlink_to("/../outside")
    assert "git.commit" not in process_facts(PID)
    (root / "repo" / ".git" / "HEAD").unlink()
    os.mkfifo(root / "repo" / ".git" / "HEAD")
    assert "git.commit" not in process_facts(PID)


def test_limits_are_the_nearest_group_s(process: Callable[..., Path], tmp_path: Path) -> None:
    process(cgroup="0::/kube/pod\n")
    groups = tmp_path / "cgroups" / "kube"
    (groups / "pod").mkdir(parents=True)
    (groups / "pod" / "cpu.max").write_text("max 100000\n")
    (groups / "cpu.max").write_text("800000 100000\n")
    (groups / "pod" / "memory.max").write_text("1073741824\n")
    facts = process_facts(PID)
    assert (facts["cgroup.cpu_max"], facts["cgroup.memory_max"]) == ("800000 100000", "1073741824")


LIMITS = ("cgroup.cpu_max", "cgroup.memory_max")


@pytest.mark.parametrize("cgroup", ["0::/kube/pod\n", "0::/../other\n", "4:cpu,cpuacct:/x\n3:memory:/x\n"])
def test_a_limit_of_a_group_that_is_not_shown_is_not_known(
    process: Callable[..., Path], tmp_path: Path, cgroup: str
) -> None:
    """As of a process whose groups lie above those of Argus's container. A value above is not its own."""
    process(cgroup=cgroup)
    for name in ("cpu.max", "memory.max"):
        (tmp_path / "cgroups" / name).write_text("7\n")
    facts = process_facts(PID)
    assert [(fact in facts, model.is_unread(fact, facts)) for fact in LIMITS] == [(False, True)] * 2
    assert not model.is_unread("container.id", facts)


def test_where_version_1_has_a_limit_version_2_is_not_asked(process: Callable[..., Path], tmp_path: Path) -> None:
    process(cgroup="4:cpu,cpuacct:/x\n3:memory:/x\n0::/elsewhere\n")
    for kind, name, value in (("cpu", "cpu.cfs_quota_us", "-1"), ("memory", "memory.limit_in_bytes", "4096")):
        (tmp_path / "cgroups" / kind / "x").mkdir(parents=True)
        (tmp_path / "cgroups" / kind / "x" / name).write_text(f"{value}\n")
    facts = process_facts(PID)
    assert facts["cgroup.memory_max"] == "4096"
    assert "cgroup.cpu_max" not in facts
    assert not [fact for fact in LIMITS if model.is_unread(fact, facts)]


def test_what_cannot_be_read_is_named(process: Callable[..., Path], tmp_path: Path) -> None:
    process()
    (tmp_path / "proc" / str(PID) / "maps").unlink()
    (tmp_path / "proc" / str(PID) / "cgroup").unlink()
    assert process_facts(PID)[environment.UNREADABLE] == "cgroup,versions"


def test_a_process_that_has_ended_raises(process: Callable[..., Path], tmp_path: Path) -> None:
    process()
    (tmp_path / "proc" / str(PID) / "environ").unlink()
    with pytest.raises(OSError, match="environ"):
        process_facts(PID)


def test_a_ref_leads_to_no_file_above_the_refs(process: Callable[..., Path]) -> None:
    git = process() / "repo" / ".git"
    (git / "refs").mkdir(parents=True)
    (git / "elsewhere").write_text(f"{COMMIT}\n")
    (git / "HEAD").write_text("ref: refs/../elsewhere\n")
    assert "git.commit" not in process_facts(PID)


@pytest.mark.parametrize(("whose", "is_known"), [(lambda: os.getuid(), True), (lambda: 65534, False)])
def test_nothing_is_looked_for_on_a_file_system_of_another_user(
    process: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whose: Callable[[], int],
    is_known: bool,
) -> None:
    """It may not answer."""
    monkeypatch.setattr(mapped, "mount_of", lambda fd: 30 + 10 * ("/repo" in os.readlink(f"/proc/self/fd/{fd}")))
    git = process() / "repo" / ".git"
    mount = f"40 30 0:50 / /repo rw,nosuid - fuse x rw,user_id={whose()},group_id=0\n"
    (tmp_path / "proc" / str(PID) / "mountinfo").write_text(mount)
    git.mkdir()
    (git / "HEAD").write_text(f"{COMMIT}\n")
    assert ("git.commit" in process_facts(PID)) is is_known
