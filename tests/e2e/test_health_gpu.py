"""Checks of GPUs against a fake libnvidia-ml.so.1, loaded as the real one is, and against a kernel log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from argus.health.check import Absent, Look
from argus.health.checks import kernel_log, xid
from tests.e2e.health_node import Node

HERE = Path(__file__).parent
GPU_CHECKS = ["gpu", "gpu_clocks", "gpu_heat", "gpu_power", "gpu_ecc", "gpu_pages", "gpu_nvlink", "gpu_pcie"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *options, "-o", folder / "libnvidia-ml.so.1", HERE / "fake_nvml.c"], check=True)
    return folder


class Gpus(Node):
    """A node with two GPUs that say what ``say`` has been given."""

    def say(self, *lines: str) -> None:
        (self.folder / "nvml").write_text("\n".join(lines) + "\n")


@pytest.fixture
def node(tmp_path: Path, library: Path) -> Gpus:
    gpus = Gpus(tmp_path)
    gpus.environment = {"LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(tmp_path / "nvml")}
    gpus.file("proc/stat", "")
    gpus.say()
    return gpus


def test_healthy_gpus(node: Gpus) -> None:
    code, output, _ = node.health("--format", "json", *(word for name in GPU_CHECKS for word in ("--only", name)))
    assert (code, {r["name"]: r["status"] for r in json.loads(output)["results"]}) == (
        0, dict.fromkeys(GPU_CHECKS, "ok"))  # fmt: skip
    assert json.loads(output)["kind"].startswith("2 x NVIDIA H100, ")


BAD = [
    ("gpu", ["gpu1.Handle error 15"], "critical", "gpu1 does not answer: GPU is lost"),
    ("gpu", ["gpu1.Name 200"], "warning", "different GPUs: NVIDIA H100, NVIDIA H200"),
    ("gpu", ["gpu0.PersistenceMode 0"], "warning", "gpu0: persistence mode is off"),
    ("gpu", ["Init error 9"], "absent", "no NVIDIA GPU"),
    ("gpu", ["gpu0.PersistenceMode error 3"], "ok", "2 x NVIDIA H100, driver 570.1"),
    ("gpu_clocks", ["gpu1.ClockInfo 900"], "warning", "gpu1: busy at 900 MHz of 1980"),
    ("gpu_clocks", ["gpu1.ClockInfo 345", "gpu1.Utilization 0"], "ok", "2 GPUs"),
    ("gpu_clocks", ["gpu0.Reasons 64"], "critical", "gpu0: the hardware slows it down for heat"),
    ("gpu_clocks", ["gpu0.Reasons 128"], "critical", "gpu0: the power brake is on"),
    ("gpu_clocks", ["gpu0.Reasons 32"], "warning", "gpu0: software slows it down for heat"),
    ("gpu_heat", ["gpu0.Temperature 85"], "warning", "gpu0: 85 C, close to the 87"),
    ("gpu_heat", ["gpu0.Temperature 88"], "critical", "gpu0: 88 C, and it slows down at 87"),
    ("gpu_heat", ["gpu1.MemoryTemperature 97"], "warning", "gpu1: memory at 97 C"),
    ("gpu_heat", ["gpu1.MemoryTemperature error 3"], "ok", "hottest 70 C"),
    ("gpu_power", ["gpu1.EnforcedPowerLimit 400000"], "warning", "gpu1: limited to 400 W of 700"),
    ("gpu_ecc", ["gpu1.Ecc.uncorrected.volatile 2"], "critical", "gpu1: 2 uncorrected memory errors"),
    ("gpu_ecc", ["gpu1.Ecc.uncorrected.life 12"], "warning", "gpu1: 12 uncorrected memory errors in its life"),
    ("gpu_ecc", ["gpu0.EccMode 0"], "warning", "gpu0: ECC is off"),
    ("gpu_pages", ["gpu0.RemapFailure 1"], "critical", "gpu0: a row could not be remapped"),
    ("gpu_pages", ["gpu0.RemapPending 1"], "critical", "gpu0: a remapping waits for a reset"),
    ("gpu_pages", ["gpu0.NoSpare 1"], "critical", "gpu0: 1 memory banks have no spare rows"),
    ("gpu_pages", ["gpu0.Remapped 9"], "warning", "gpu0: 9 rows remapped"),
    ("gpu_pages", ["gpu0.Remapped error 3", "gpu0.RetiredPending 1"], "critical", "gpu0: page retirement waits"),
    ("gpu_nvlink", ["gpu1.NvLinkState.7 0"], "critical", "gpu1: 17 of 18 NVLinks are up"),
    ("gpu_pcie", ["gpu0.CurrPcieLinkWidth 8"], "critical", "gpu0: PCIe x8 of x16"),
    ("gpu_pcie", ["gpu0.CurrPcieLinkGeneration 3"], "warning", "gpu0: PCIe generation 3 of 5 while busy"),
    ("gpu_pcie", ["gpu0.CurrPcieLinkGeneration 1", "gpu0.Utilization 0"], "ok", "2 GPUs at x16"),
    ("gpu_heat", ["gpu1.Temperature error 15"], "unknown", "gpu1: nvmlDeviceGetTemperature: GPU is lost"),
    # A GPU that is lost keeps nobody from its neighbours.
    ("gpu_clocks", ["gpu0.ClockInfo error 15", "gpu1.Reasons 64"], "critical", "heat; gpu0: nvmlDeviceGetClockInfo"),
    ("gpu_heat", ["gpu0.Temperature error 15", "gpu1.Temperature 88"], "critical", "gpu1: 88 C"),
    ("gpu_power", ["gpu0.PowerUsage error 15", "gpu1.EnforcedPowerLimit 400000"], "warning", "gpu1: limited to 400 W"),
    ("gpu_ecc", ["gpu0.EccMode error 15", "gpu1.Ecc.uncorrected.volatile 2"], "critical",
     "gpu1: 2 uncorrected memory errors; gpu0: nvmlDeviceGetEccMode: GPU is lost"),
    ("gpu_pages", ["gpu0.Remapped error 15", "gpu1.RemapFailure 1"], "critical", "gpu1: a row could not be remapped"),
    ("gpu_pages", ["gpu0.Remapped error 15", "gpu1.Remapped error 15"], "unknown", "gpu1: nvmlDeviceGetRemappedRows"),
    ("gpu_nvlink", ["gpu0.NvLinkState.0 error 15"], "unknown", "gpu0: nvmlDeviceGetNvLinkState: GPU is lost"),
    ("gpu_pcie", ["gpu0.CurrPcieLinkWidth error 15", "gpu1.CurrPcieLinkWidth 8"], "critical", "gpu1: PCIe x8 of x16"),
]  # fmt: skip


SCRIPT = """
import json, sys
from pathlib import Path
from argus.health import config
from argus.health.run import run
file, settings, cases = json.load(sys.stdin)
checks = {check.name: check for check in config.builtin()}
for name, lines in cases:
    Path(file).write_text("".join(f"{line}\\n" for line in lines))
    result = run(config.Settings(**settings), [checks[name]]).results[0]
    print(json.dumps([result.status, result.text]))
"""


@pytest.fixture(scope="module")
def found(library: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Status and text for each of ``BAD``: by one program, since to start thirty takes a minute."""
    folder = tmp_path_factory.mktemp("bad")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(folder / "nvml")}
    settings = {"state_dir": str(folder / "state"), "root": str(folder)}
    given = json.dumps([str(folder / "nvml"), settings, [case[:2] for case in BAD]])
    words = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(words, input=given, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(BAD)), ids=[f"{bad[0]} {bad[1][0]}" for bad in BAD])
def test_a_bad_gpu_is_named(found: list[list[str]], number: int) -> None:
    check, _, status, text = BAD[number]
    assert found[number][0] == status, (check, found[number])
    assert text in found[number][1]


def test_counters_of_gpus_that_move(node: Gpus) -> None:
    """What they had at the first look is history."""
    rising = ["gpu0.NvLinkError.3.1", "gpu0.PcieReplayCounter", "gpu0.Ecc.corrected.volatile", "gpu0.Violation"]
    node.say(*(f"{name} 5000" for name in rising))
    checks = ["gpu_nvlink", "gpu_pcie", "gpu_ecc", "gpu_clocks"]
    words = [word for name in checks for word in ("--only", name)]
    assert node.health(*words)[0] == 0
    assert node.health(*words)[0] == 0
    node.say(*(f"{name} 9000000000" for name in rising))
    code, output, _ = node.health(*words)
    assert code == 1
    slow = "slowed down for heat for 9.0 s"
    for text in ("NVLink errors", "PCIe packets repeated", "corrected memory errors", slow):
        assert f"{text}" in output, text


def test_a_driver_that_hangs_is_left_alone(node: Gpus) -> None:
    node.settings["check_s"] = 4.0  # in which a check has to start, on a busy machine too
    node.say("gpu1.PowerUsage hang")
    assert node.check("gpu_power") == ("unknown", "did not answer within 4 s, at: gpu1: nvmlDeviceGetPowerUsage")
    node.say("gpu0.Ecc.uncorrected.volatile 2", "gpu1.EccMode hang")
    output = "gpu0: 2 uncorrected memory errors; did not answer within 4 s, at: gpu1: nvmlDeviceGetEccMode"
    assert node.check("gpu_ecc") == ("critical", output)
    node.say("Init hang")
    assert node.check("gpu_ecc") == ("unknown", "did not answer within 4 s, at: nvmlInit")


def test_gpus_that_are_missing(node: Gpus) -> None:
    node.limits["gpu"] = {"count": 8}
    assert node.check("gpu") == ("critical", "2 of 8 GPUs are there")
    node.limits = {}
    for number in range(3):
        node.file(f"sys/bus/pci/devices/0000:0{number}:00.0/vendor", "0x10de\n")
        node.file(f"sys/bus/pci/devices/0000:0{number}:00.0/class", "0x030200\n")
    assert node.check("gpu") == ("critical", "2 of 3 GPUs are there")
    node.say("Init error 9")
    assert node.check("gpu")[0] == "critical"
    status, text = node.check("gpu_ecc")
    assert (status, "3 NVIDIA GPUs on the PCI bus, but NVML says" in text) == ("unknown", True)
    node.environment["LD_LIBRARY_PATH"] = "/nowhere"
    assert "3 GPUs expected" in node.check("gpu")[1]


# ---- kernel log -----------------------------------------------------------------------------------------------------


def record(text: str, age_s: float = 60.0, number: int = 1) -> str:
    """As /dev/kmsg has it."""
    return f"6,{number},{int((time.clock_gettime(time.CLOCK_MONOTONIC) - age_s) * 1e6)},-;{text}\n SUBSYSTEM=pci\n"


XIDS = [
    ("NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.", "critical", "Xid 79, the GPU has"),
    ("NVRM: Xid (PCI:0000:3b:00): 48, pid=123, name=python, An uncorrectable", "critical", "Xid 48, uncorrected"),
    ("NVRM: Xid (PCI:0000:3b:00): 31, pid=123, name=python, MMU Fault", "warning", "Xid 31, page fault"),
    ("NVRM: Xid (PCI:0000:3b:00): 999, something", "warning", "Xid 999, see docs"),
    ("NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
     "critical", "GPU Reset Required"),
    ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress", "warning", "SXid 12028"),
    ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", "critical", "SXid 20034"),
    ("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.1", "ok", "none in the last 24 h"),
]  # fmt: skip


def look(tmp_path: Path, log: str, limits: dict[str, object]) -> Look:
    (tmp_path / "kmsg").write_text(log)
    return Look(limits, tmp_path, tmp_path / "kmsg")


@pytest.mark.parametrize(("message", "status", "text"), XIDS)
def test_xids(tmp_path: Path, message: str, status: str, text: str) -> None:
    result = xid.check(look(tmp_path, record(message), {"hours": 24.0, "ignore": []}))
    assert (result.status, text in result.text) == (status, True), result
    assert (status == "ok") != bool(result.hint)


def test_a_kernel_log_file(tmp_path: Path) -> None:
    """Through the program, with the exit codes."""
    node = Node(tmp_path)
    node.settings["kmsg"] = str(tmp_path / "kmsg")
    node.file("proc/driver/nvidia/version", "570")
    (tmp_path / "kmsg").write_text(record(XIDS[0][0]) + record(LOG[4][0]))
    status, text = node.check("xid")
    assert (status, text) == ("critical", "GPU 0000:3b:00: Xid 79, the GPU has fallen off the bus, 1 min ago")
    assert node.check("kernel_log") == ("critical", LOG[4][0])
    (tmp_path / "kmsg").write_text(record(XIDS[2][0]) + record(LOG[2][0]))
    assert [node.check(name)[0] for name in ("xid", "kernel_log")] == ["warning", "warning"]
    (tmp_path / "kmsg").write_text(record("all fine"))
    assert [node.check(name)[0] for name in ("xid", "kernel_log")] == ["ok", "ok"]


OF_OTHERS = [
    "BTRFS error[77]: segfault at 0 ip 0000000000401136 sp 00007ffd5 error 6 in a[401000+1000]",
    "mce: Machine Ch[77]: segfault at 0 ip 0000000000401136 sp 00007ffd5 error 6 in Machine Check[401000+1000]",
    "python[77]: segfault at 0 ip 00007f3 sp 00007ffd error 4 in NVRM: Xid (PCI:0000:3b:00): 79, GPU fell[0,1000]",
    "python[77]: segfault at 0 ip 00007f3 error 4 in EXT4-fs error (device sda1): x[7f3000+1000] likely on CPU 1",
    "EXT4-fs error ([77]: segfault at 0 ip 0000000000401136 sp 00007ffd5 error 6 in a[401000+1000]",
    "NVRM: Xid (PCI:[77]: segfault at 0 ip 0000000000401136 sp 00007ffd5 error 6 in a[401000+1000]",
    "traps: NVRM: Xid (PCI:[77] general protection fault ip:401136 sp:7ffd5 error:0 in Buffer I/O error on dev sda[1]",
    "Out of memory: Killed process 77 (EXT4-fs error ) total-vm:1kB, UID:1000 pgtables:64kB oom_score_adj:0",
    "process 'NVRM: Xid (PCI:0000:3b:00): 79, x' launched '/bin/x' with NULL argv: empty string added",
    'audit: type=1701 audit(1.1:2): auid=1 comm="x" exe="NVRM: Xid (PCI:0000:3b:00): 79, GPU" sig=11 res=1',
]
AFTER_A_NAME = [
    " invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    ": page allocation failure: order:10, mode:0x40dc0(GFP_KERNEL|__GFP_COMP|__GFP_ZERO), nodemask=(null)",
    ": vmalloc error: size 4096, page order 0, failed to allocate pages, mode:0xdc0(GFP_KERNEL), nodemask=(null)",
    "[77]: segfault at 0 ip 0000000000401136 sp 00007ffd5 error 6 in Buffer I/O error on dev sda[401000+1000]",
    " (77): /proc/77/oom_adj is deprecated, please use /proc/77/oom_score_adj instead.",
    "(77): Attempt to set a LOCK_MAND lock via flock(2). This support has been removed and the request ignored.",
    " (77) used greatest stack depth: 10000 bytes left",
    "/77: potentially unexpected fatal signal 11.",
    " uses obsolete (PF_INET,SOCK_PACKET)",
    ": packet size is too short (4 <= 14)",
    ": attempt to access beyond end of device",
    ": sending ioctl 5331 to a partition!",
]
"""What the kernel writes behind the name of a process (mm, net, block, fs, arch/x86 of Linux)."""
OF_ANYBODY = [
    "BTRFS: renamed from error0",  # network interfaces of a user's own namespace
    "clocksource: renamed from unstable",
    "LustreError: entered promiscuous mode",
    "bnxt_en 0000:19:00.2 reset0: renamed from firmware_reset",
    "BTRFS error: unrecognized rescue option 'x'",  # options of a mount that is refused
    "ceph: Unknown parameter 'mds0 hung'",
    "libceph: bad option at 'mds0 hung'",
    "tmpfs: Unknown parameter 'BTRFS error (device sda1)'",
    "overlayfs: failed to resolve 'Buffer I/O error on dev sda1': -2",
    "BTRFS: device label corrupt devid 1 transid 8 /dev/sdb (8:16) scanned by mount (77)",  # volumes and USB
    "BTRFS info (device sdb): bdev /dev/sdb errs: wr 0, rd 0, flush 0, corrupt 1, gen 0",
    "usb 1-1: Product: AER: Uncorrected (Fatal) error received: 0000:3b:00.0",
    "input: NVRM: Xid (PCI:0000:3b:00): 79 as /devices/virtual/input/input5",
    "BTRFS error (device sda1) IN=lo OUT= MAC=00:00 SRC=127.0.0.1 DST=127.0.0.1 LEN=60 TTL=64",  # a filter's prefix
    "warning: `BTRFS: error' uses 32-bit capabilities (legacy support in use)",
    "process `BTRFS: error' is using obsolete setsockopt SO_BSDCOMPAT",
    "netlink: 12 bytes leftover after parsing attributes in process `BTRFS: error'.",
    'ptrace attach of "BTRFS: error"[77] was attempted by "XFS (Corruption"[78]',
    "Task in /BTRFS: error/mce: Machine Check killed as a result of limit of /Buffer I/O error on dev sda",
    "Memory cgroup stats for /EXT4-fs error (device sda1): anon 4096",
    "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/BTRFS: error,task=XFS (Corruption,pid=77,uid=1000",
    "cgroup: fork rejected by pids controller in /BTRFS: error (device sda1)",
    "Lockdown: BTRFS: error: /dev/mem,kmem,port is restricted; see man kernel_lockdown.7",
    "x86/split lock detection: #AC: BTRFS: error/77 took a split_lock trap at address: 0x401136",
    "program BTRFS: error is using a deprecated SCSI ioctl, please convert it to SG_IO",
]


@pytest.mark.parametrize("message", OF_OTHERS + OF_ANYBODY)
def test_what_processes_and_files_are_called_is_no_error_of_the_node(tmp_path: Path, message: str) -> None:
    """The kernel logs both when a process crashes, and anybody may choose them."""
    log = record("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.1") + record(message)
    for check, limits in ((xid.check, {"hours": 24.0, "ignore": []}), (kernel_log.check, {"hours": 6.0, "ignore": []})):
        result = check(look(tmp_path, log, limits))  # type: ignore[arg-type]
        assert result.status == "ok", result


@pytest.mark.parametrize("behind", AFTER_A_NAME)
def test_no_name_of_a_process_begins_an_error_of_the_node(tmp_path: Path, behind: str) -> None:
    """A name has 15 bytes, any but 0: the begin of each error that there is, also with bytes that the log escapes."""
    names = {text[:length] for text, *_ in (*LOG, *XIDS, *SHORT) for length in range(1, 16)}
    names |= {
        "BTRFS: error",
        "XFS (Corruption",
        "AER: Corrected",
        "LustreError: ",
        "nvme controller",
        "NVRM: Xid (0): ",
    }
    names |= {name[:-1] + odd for name in names for odd in (r"\xff", r"\x0a", r"\x5c", " ")}
    log = record("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.1") + "".join(
        record(name + behind) for name in sorted(names)
    )
    for check, limits in ((xid.check, {"hours": 24.0, "ignore": []}), (kernel_log.check, {"hours": 6.0, "ignore": []})):
        result = check(look(tmp_path, log, limits))  # type: ignore[arg-type]
        assert result.status == "ok", result


def test_what_programs_write_to_the_kernel_s_log_is_not_the_kernel_s(tmp_path: Path) -> None:
    fine = record("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.1")
    written = record(XIDS[0][0]).replace("6,1,", "14,1,", 1)  # facility 1: user
    assert xid.check(look(tmp_path, fine + written, {"hours": 24.0, "ignore": []})).status == "ok"


def test_xids_are_reported_once_while_they_are_new(tmp_path: Path) -> None:
    message = "NVRM: Xid (PCI:0000:3b:00): 13, pid=1, Graphics Exception"
    log = record(message, 90000) + record(message, 7300) + record(message, 600)
    result = xid.check(look(tmp_path, log, {"hours": 24.0, "ignore": []}))
    assert result.text == "GPU 0000:3b:00: Xid 13, exception in a program's kernel (2 times), 10 min ago"
    assert result.figures["xids"] == 2
    assert xid.check(look(tmp_path, log, {"hours": 24.0, "ignore": ["13"]})).status == "ok"
    with pytest.raises(Absent):
        xid.check(look(tmp_path, log, {"hours": 0.1, "ignore": []}))


def test_every_code_has_a_remedy() -> None:
    assert len(xid.CODES) > 40
    assert all(meaning and hint for meaning, _, hint in xid.CODES.values())


LOG = [
    ("mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: uncorrected", "critical"),
    ("[Hardware Error]: Corrected error, no action required.", "warning"),
    ("INFO: task python:4711 blocked for more than 120 seconds.", "warning"),
    ("watchdog: BUG: soft lockup - CPU#3 stuck for 23s! [python:4711]", "critical"),
    ("EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm ls: reading directory", "critical"),
    ("I/O error, dev nvme0n1, sector 2048 op 0x0:(READ) flags 0x0 phys_seg 1", "critical"),
    ("nfs: server filer not responding, still trying", "warning"),
    ("clocksource: timekeeping watchdog on CPU3: Marking clocksource 'tsc' as unstable", "warning"),
    ("mlx5_core 0000:5e:00.0: poll_health:801: device's health compromised - reached miss count", "critical"),
    ("NETDEV WATCHDOG: eth0 (igb): transmit queue 3 timed out", "warning"),
    ("pcieport 0000:00:1c.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0", "critical"),
    ("pcieport 0000:00:1c.0: AER: Corrected error received: 0000:3b:00.0", "warning"),
    ("XFS (nvme0n1p1): Metadata I/O Error (0x1) in xfs_trans_read_buf_map", "critical"),
    ("nvme nvme0: I/O 21 QID 3 timeout, aborting", "warning"),
    ("pcieport 0000:00:1c.0: AER: Multiple Uncorrectable (Fatal) error message received from 0000:3b:00.0", "critical"),
    ("pcieport 0000:00:1c.0: AER: Correctable error message received from 0000:3b:00.0", "warning"),
    ('XFS (dm-0): metadata I/O error in "xfs_buf_ioend" at daddr 0x1 len 8 error 5', "critical"),
    ("XFS (dm-0): Corruption of in-memory data detected.  Shutting down filesystem", "critical"),
    ("watchdog: CPU3: Watchdog detected hard LOCKUP on cpu 3", "critical"),
    ("NMI watchdog: Watchdog detected hard LOCKUP on cpu 3", "critical"),
    ("rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:", "critical"),
    ("rcu: INFO: rcu_sched self-detected stall on CPU", "critical"),
    ("usb 1-1: new high-speed USB device", "ok"),
    ("BTRFS error (device sda1): bdev /dev/sda1 errs: wr 0, rd 1, flush 0, corrupt 0, gen 0", "critical"),
    ("BTRFS: error (device sda1) in btrfs_commit_transaction:2234: errno=-5 IO failure", "critical"),
    ("BTRFS critical (device sda1): corrupt leaf: root=2 block=1 slot=0, unexpected item end", "critical"),
    ("EXT4-fs (nvme0n1p1): Remounting filesystem read-only", "critical"),
    ("blk_update_request: critical medium error, dev sda, sector 2048 op 0x0:(READ) flags 0x0", "critical"),
    ("Buffer I/O error on dev sda1, logical block 0, async page read", "critical"),
    ("nvme nvme0: I/O tag 21 (1015) opcode 0x2 (I/O Cmd) QID 3 timeout, aborting req_op:READ(0) size:4096", "warning"),
    ("nvme nvme0: controller is down; will reset: CSTS=0x3, PCI_STATUS=0x10", "warning"),
    ("LustreError: 4711:0:(client.c:2289:ptlrpc_expire_one_request()) @@@ timed out", "warning"),
    ("LustreError: 11-0: fs-MDT0000-mdc: operation mds_statfs to node 10.0.0.1@tcp failed: rc = -107", "warning"),
    ("clocksource: Clocksource tsc unstable (delta = 1000000000 ns)", "warning"),
    ("ceph: [8f6b 4711]: mds0 hung", "warning"),
]
LOG += [
    ("EXT4-fs error (device loop0): ext4_lookup:1855: inode #2: comm python: iget: bad extra_isize", "warning"),
    ("EXT4-fs (loop0p1): Remounting filesystem read-only", "warning"),
    ("EXT4-fs error (device loopy1): ext4_lookup:1855: inode #2: comm python: iget: bad extra_isize", "critical"),
    ("XFS (loop3): Metadata corruption detected at xfs_agf_read_verify", "warning"),
    ('XFS (nbd0): metadata I/O error in "xfs_buf_ioend" at daddr 0x1 len 8 error 5', "warning"),
    ("BTRFS error (device loop0): bdev /dev/loop0 errs: wr 0, rd 1, flush 0, corrupt 0, gen 0", "warning"),
    ("BTRFS: error (device loop1 state EA) in btrfs_commit_transaction:2234: errno=-5 IO failure", "warning"),
    ("BTRFS error (device loop0: state EA): bdev /dev/loop0 errs: wr 0, rd 1, flush 0, corrupt 0, gen 0", "warning"),
    ("BTRFS: error (device loop0: state A) in btrfs_run_delayed_refs:2149: errno=-5 IO failure", "warning"),
    ("BTRFS critical (device loop3: state A): unable to find logical 4096 length 4096", "warning"),
    ("BTRFS critical (device zram0): corrupt leaf: root=2 block=1 slot=0, unexpected item end", "warning"),
    ("I/O error, dev loop0, sector 8 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2", "warning"),
    ("blk_update_request: I/O error, dev nbd0, sector 0 op 0x0:(READ) flags 0x0", "warning"),
    ("blk_update_request: critical medium error, dev sr0, sector 2048 op 0x0:(READ) flags 0x0", "warning"),
    ("print_req_error: I/O error, dev fd0, sector 0", "warning"),
    ("Buffer I/O error on dev loop0p1, logical block 1, async page read", "warning"),
    ("Buffer I/O error on device sr0, logical block 1", "warning"),
    ("I/O error, dev ublkb0, sector 8 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2", "warning"),
    ("Buffer I/O error on dev ublkb12p1, logical block 1, async page read", "warning"),
    ("I/O error, dev ublkc0, sector 8 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2", "critical"),
    ("Buffer I/O error on dev ram1, logical block 0, async page read", "warning"),
    ("Buffer I/O error on device sda, logical block 1", "critical"),
]
SHORT = [("ceph: mds0 hung", "warning"), ("I/O error, dev sda, sector 1", "critical")]
"""Some that little more than a process's name would do for."""


@pytest.mark.parametrize(("message", "status"), LOG + SHORT)
def test_the_kernel_log(tmp_path: Path, message: str, status: str) -> None:
    limits: dict[str, object] = {"hours": 6.0, "ignore": []}
    result = kernel_log.check(look(tmp_path, record("all fine") + record(message), limits))
    assert (result.status, message[:60] in result.text) == (status, status != "ok"), result
    assert kernel_log.check(look(tmp_path, record(message, 30000), limits)).status == "ok"
    assert kernel_log.check(look(tmp_path, record(message), {**limits, "ignore": ["."]})).status == "ok"
