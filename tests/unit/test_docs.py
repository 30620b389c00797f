"""Documentation that a program can check: every counter is explained."""

from __future__ import annotations

import re
from pathlib import Path

from argus.health import config
from argus.live.cost.governor import LADDERS, PROBE_RUNGS, Rung
from argus.model import records

ROOT = Path(__file__).resolve().parents[2]
STACKS = (
    "argus/capture/python/code.py",
    "argus/capture/process/symbols.py",
    "argus/capture/process/threads.py",
)


def explained() -> set[str]:
    table = (ROOT / "docs" / "trace.md").read_text().split("## Counters")[1].split("## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    return {name.strip() for cell in cells for name in cell.split(",")}


def test_every_counter_of_the_kernel_side_is_explained() -> None:
    names = {counter.name.lower() for counter in records.Counter}
    names |= {f"stack_{counter.name.lower()}" for counter in records.StackCounter}
    assert names - explained() == set()


def test_every_counter_named_in_the_pipeline_is_explained() -> None:
    """Their names are literals in the code that counts."""
    named: set[str] = set()
    live = sorted((ROOT / "argus" / "live").rglob("*.py"))
    reading = ("argus/capture/reader/reader.py", "argus/capture/process/targets.py")
    more = (*reading, "argus/semantics/steps/by_calls.py", "argus/diagnose/run.py", *STACKS)
    for file in (*live, *(ROOT / each for each in more)):
        named |= set(re.findall(r'(?:losses|counters|dropped)\["(\w+)"\]', file.read_text()))
        named |= set(
            re.findall(r'(?:\.count|count_losses|on_loss|left_out\.count(?:_once)?)\("(\w+)"', file.read_text())
        )
    for file in live:
        for text in re.findall(r"def counters\(.*?(?=\n    def |\Z)", file.read_text(), re.DOTALL):
            named |= set(re.findall(r'found\["(\w+)"\]', text)) | set(re.findall(r'"(\w+)": \(', text))
    named |= {rung.counter for rung in Rung if rung.counter}
    assert {"calls_in_progress", "loop_stalls", "waits_not_followed", "files_released", "gpu_ops_late"} <= named
    named |= {f"{ring}_ring_discarded" for ring in ("launches", "collectives", "control")}
    assert len(named) > 12
    assert named - explained() == set()


def test_losses_are_marked_as_such() -> None:
    table = (ROOT / "docs" / "trace.md").read_text().split("## Counters")[1].split("## ")[0]
    losses: set[str] = set()
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 3 and cells[2] == "yes":
            losses |= {name.strip() for name in cells[1].split(",")}
    for counter in records.Counter:
        assert (counter.name.lower() in losses) == (counter in records.LOSS_COUNTERS), counter
    for one in records.StackCounter:
        assert (f"stack_{one.name.lower()}" in losses) == (one in records.STACK_LOSS_COUNTERS), one


def test_every_rung_of_the_governor_is_explained() -> None:
    """In the order in which they are taken; those of stacks and GPU times by what is given up, at the row's begin."""
    text = (ROOT / "docs" / "trace.md").read_text().split("## Overhead")[1].split("\n## ")[0]
    tables = {part.split(" |")[0]: part.split("\n\n")[0].splitlines()[2:] for part in re.split(r"\n\n\| ", text)}
    assert [row.split("|")[1].strip() for row in tables["rung"]] == [rung.feature for rung in PROBE_RUNGS]
    for row, rung in zip(tables["rung"], PROBE_RUNGS, strict=True):
        assert row.split("|")[3].strip() == ("yes" if rung.back else "no"), rung
        assert not rung.counter or f"`{rung.counter}`" in row, rung
    assert len(tables["what costs most besides"]) == sum(len(ladder) for ladder in LADDERS.values())


def test_every_check_of_a_node_is_explained() -> None:
    text = (ROOT / "docs" / "health.md").read_text()
    for check in config.builtin():
        part = text.split(f"**`{check.name}`**")[1].split("\n**`")[0]
        for name, limit in check.limits.items():
            row = next(line for line in part.splitlines() if line.startswith(f"| `{name}` |"))
            default = str(limit.default).lower().replace("'", '"')
            assert default in row.lower(), (check.name, name)
            assert limit.meaning in row, (check.name, name)
