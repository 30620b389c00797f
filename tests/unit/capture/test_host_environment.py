"""Facts of a node: what the kernel says, and nothing where it says nothing."""

from __future__ import annotations

from pathlib import Path

from argus.capture.host_environment import host_facts


def a_node(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


NODE = {
    "proc/sys/kernel/osrelease": "6.8.0-45\n",
    "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04"\n',
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9654\n",
    "proc/meminfo": "MemTotal:       25165824 kB\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave\n",
    "sys/devices/system/cpu/cpu2/cpufreq/scaling_governor": "performance\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\n",
    "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H100\nIRQ: 1\n",
    "proc/driver/nvidia/gpus/0000:02:00.0/information": "Model: \t\t NVIDIA H100\nIRQ: 2\n",
    "sys/bus/pci/devices/0000:01:00.0/numa_node": "0\n",
    "sys/class/net/eth0/speed": "100000\n",
    "sys/class/net/eth0/device/vendor": "x\n",
    "sys/class/net/lo/mtu": "65536\n",
}


LIMITS = {
    "gpu.clock_max": ["1980 MHz", "1980 MHz"], "gpu.clock_application": ["1980 MHz", "1410 MHz"],
    "gpu.power_limit": ["700 W", "700 W"],
}  # fmt: skip


def test_what_a_node_says(tmp_path: Path) -> None:
    facts = host_facts(a_node(tmp_path, NODE), lambda: LIMITS)
    digests = {facts.pop("nic.digest"), facts.pop("topology.digest")}
    assert len(digests) == 2
    assert facts == {
        "kernel.release": "6.8.0-45", "os.name": "Ubuntu 24.04", "cpu.model": "AMD EPYC 9654", "memory.gib": "24",
        "cpu.governor": "2 x performance, 1 x powersave", "memory.huge_pages": "madvise", "gpu.driver": "550.54.15",
        "gpu.model": "NVIDIA H100", "gpu.count": "2", "gpu.clock_max": "1980 MHz", "gpu.power_limit": "700 W",
        "gpu.clock_application": "1 x 1980 MHz, 1 x 1410 MHz",
    }  # fmt: skip


def test_a_library_that_does_not_answer_is_asked_once(tmp_path: Path) -> None:
    asked = []

    def limits() -> dict[str, list[str]]:
        asked.append(True)
        raise OSError("no answer")

    facts = host_facts(a_node(tmp_path / "1", NODE), limits)
    assert facts["unreadable"] == "gpu.clock_max,gpu.clock_application,gpu.power_limit"
    assert "gpu.model" in facts
    assert len(asked) == 1
    host_facts(a_node(tmp_path / "2", {"proc/meminfo": "MemTotal: 1 kB\n"}), limits)
    assert len(asked) == 1, "a node without GPUs asks nobody"


def test_cards_and_places_make_digests(tmp_path: Path) -> None:
    before, slower, moved = (
        host_facts(a_node(tmp_path / str(number), {**NODE, **more}), lambda: LIMITS)
        for number, more in enumerate((
            {}, {"sys/class/net/eth0/speed": "25000\n"}, {"sys/bus/pci/devices/0000:01:00.0/numa_node": "1\n"},
        ))
    )  # fmt: skip
    assert slower["nic.digest"] != before["nic.digest"] == moved["nic.digest"]
    assert moved["topology.digest"] != before["topology.digest"] == slower["topology.digest"]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    """It is there, and does not answer: that is not the same as not to have it."""
    root = a_node(tmp_path, {})
    (root / "proc/sys/kernel/osrelease").mkdir(parents=True)  # reading answers EISDIR
    (root / "sys/class/net/eth0/speed").mkdir(parents=True)
    (root / "sys/class/net/eth0/device").mkdir()
    facts = host_facts(root)
    assert facts.pop("nic.digest"), "a card that is down has no speed"
    assert facts == {"unreadable": "kernel.release"}


def test_cpus_are_counted(tmp_path: Path) -> None:
    assert host_facts(a_node(tmp_path, {"sys/devices/system/cpu/online": "0-3,8,10-11\n"}))["cpu.count"] == "7"


def test_a_node_that_says_nothing(tmp_path: Path) -> None:
    assert host_facts(tmp_path) == {}
