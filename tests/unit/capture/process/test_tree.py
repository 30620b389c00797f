"""What is below processes is read once for all that are opened, and not at all where nobody asks."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from argus.capture.process import targets
from argus.capture.process.targets import Identity, Libraries, Target, Tree
from argus.live import choose
from argus.live.options import Options
from argus.model.errors import ArgusError
from argus.model.units import listed

ON_GPU: Any = SimpleNamespace(on_gpu=True, roles=("libcuda",))
TORCH: Any = SimpleNamespace(on_gpu=False, roles=("libtorch_cpu",))


class Node:
    """Processes of a node, and how often each was asked for what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, parents: dict[int, int]) -> None:
        self.parents = parents
        self.ranks = dict.fromkeys(parents, -1)
        self.cuda: set[int] = set()
        self.libraries: dict[int, list[Any]] = {}
        self.asked: Counter[tuple[str, int]] = Counter()
        monkeypatch.setattr(targets, "processes", lambda: iter(self.parents))
        monkeypatch.setattr(targets, "parent_of", lambda pid: self.ask("parent", pid, self.parents[pid]))
        monkeypatch.setattr(targets, "maps_cuda", lambda pid: self.ask("cuda", pid, pid in self.cuda))
        monkeypatch.setattr(targets, "identity_of", lambda pid: self.ask("rank", pid, Identity(self.ranks[pid])))
        monkeypatch.setattr(targets, "inspect", self.inspect)
        monkeypatch.setattr(targets, "find_libraries", lambda pid: Libraries(self.libraries.get(pid, [])))

    def ask(self, what: str, pid: int, answer: Any) -> Any:
        self.asked[what, pid] += 1
        return answer

    def inspect(self, pid: int) -> Target:
        return Target(pid, 0, "/bin/x", "x", Identity(self.ranks[pid]))


def outcome(pid: int, **options: Any) -> str:
    try:
        return f"taken: {len(targets.open_target(pid, **options).libraries)}"
    except ArgusError as refusal:
        return str(refusal)


def plainly(node: Node, pid: int, any_program: bool) -> str:
    """What became of each when all was read for each."""
    libraries, rank = node.libraries.get(pid, []), node.ranks[pid]
    if any(library.on_gpu for library in libraries):
        return f"taken: {len(libraries)}"
    below = []
    for one in sorted(node.parents):
        above = one
        while (above := node.parents.get(above, 0)) and above != pid:
            pass
        below += [one] * bool(above)
    helpers = [one for one in below if one in node.cuda]
    ranks = [one for one in below if rank < 0 <= node.ranks[one]]
    if not helpers and not ranks and (any_program or (libraries and rank >= 0)):
        return f"taken: {len(libraries)}"
    if any_program and not helpers:
        text = f"process {pid} (x) is a launcher: the ranks are its children ({listed(ranks)})"
        return f"{text}. Add --children"
    hint = "Trace a process that uses the GPU: `argus trace --all-gpu` finds them"
    if helpers:
        hint = f"Its children do ({listed(helpers)}): add --children"
    return f"process {pid} (x) maps none of libcuda, libcudart and libnccl. {hint}"


def test_as_when_all_is_read_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    for _ in range(60):
        pids = rng.sample(range(2, 1000), 30)
        node = Node(monkeypatch, {pid: rng.choice([0, *pids[:place]]) for place, pid in enumerate(pids)})
        node.ranks |= {pid: rng.randrange(8) for pid in rng.sample(pids, rng.choice([0, 3, 15]))}
        node.cuda = set(rng.sample(pids, rng.choice([0, 1, 10, 25])))
        node.libraries = {pid: rng.choice([[], [TORCH], [TORCH, ON_GPU]]) for pid in pids}
        for any_program in (False, True):
            tree = Tree()
            for pid in pids:
                expected = plainly(node, pid, any_program)
                assert outcome(pid, any_program=any_program, tree=tree) == expected
                assert outcome(pid, any_program=any_program) == expected
                bare = outcome(pid, any_program=any_program, tree=tree, hints=False)
                assert bare.partition(". ")[0] == expected.partition(". ")[0]


def test_who_maps_what_is_called_libcuda_is_skipped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = range(10, 310)
    node = Node(monkeypatch, {pid: pid - 1 for pid in pids})
    node.cuda = set(pids)
    node.libraries = {309: [ON_GPU]}
    monkeypatch.setattr(choose, "_choose", lambda options: list(pids))
    assert [target.pid for target in choose.find_targets(Options(all_gpu=True))] == [309]
    assert not node.asked


@pytest.mark.parametrize("options", [Options(all_gpu=True), Options(name="x", children=False)])
def test_each_process_is_read_once_for_all(monkeypatch: pytest.MonkeyPatch, options: Options) -> None:
    """Ranks that map PyTorch alone are taken, unless one below them uses a GPU."""
    pids = range(10, 310)
    node = Node(monkeypatch, {pid: pid - 1 for pid in pids})
    node.ranks = dict.fromkeys(pids, 0)
    node.libraries = {pid: [TORCH] for pid in pids}
    monkeypatch.setattr(choose, "_choose", lambda options: list(pids))
    assert len(choose.find_targets(options)) == 300
    assert set(node.asked.values()) == {1}


def test_a_long_line_of_processes_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is below each of 30,000 nested ones, one by one, would take minutes."""
    pids = range(10, 30_010)
    node = Node(monkeypatch, {pid: pid - 1 for pid in pids})
    node.cuda = set(pids)
    tree = Tree()
    assert all(tree.helpers(pid).number == 30_009 - pid for pid in pids)
    assert str(tree.helpers(29_999)) == "30000, 30001, 30002, 30003, 30004, 30005, 30006, 30007 and 2 more"


def test_a_circle_of_parents_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Node(monkeypatch, {5: 7, 6: 5, 7: 6}).cuda = {6}
    assert Tree().helpers(5).number == 1


def test_a_process_whose_files_were_not_read_is_not_said_to_map_none(monkeypatch: pytest.MonkeyPatch) -> None:
    Node(monkeypatch, {10: 0, 11: 10})
    libraries = Libraries()
    monkeypatch.setattr(targets, "find_libraries", lambda pid: libraries)
    assert "maps none of" in outcome(11)
    libraries.unread = 30
    assert outcome(11).startswith("process 11 (x) cannot be traced: not all files that it maps were read")
