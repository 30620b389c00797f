"""What the live view draws, from views that a tracer would fill."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from argus.cli.drawing import bar, plain_ascii, sparkline, wrapped
from argus.cli.live import PAGES, Scene, Standings, by_lateness, frame, plain_line
from argus.cli.screen import parse_keys
from argus.cli.verdict_text import news_lines
from argus.diagnose.follow.standing import News, Standing
from argus.live.display.stack_view import NO_STACKS
from argus.model.units import elapsed
from tests.builders.live_views import JOB, a_finding, a_rank, a_view, degraded

SIZES = [(60, 20), (80, 24), (120, 40), (200, 60)]


def rows(
    scene: Scene | None = None, width: int = 80, height: int = 24, standings: Standings | None = None, **view: Any
) -> list[str]:
    drawn = frame(a_view(**view), standings or {}, scene or Scene(), width, height)
    return [line.plain.rstrip() for line in drawn]


def ranks_in(lines: list[str]) -> list[int]:
    return [int(found[1]) for line in lines if (found := re.match(r" {0,3}(\d+) +\d+\.\d+ ms", line))]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_what_matters_is_first_and_fits(width: int, height: int) -> None:
    lines = rows(None, width, height, degraded(11), ranks=16, slow=11)
    assert len(lines) == height
    assert lines[0].startswith(" DEGRADED  llama")
    assert len(lines[0]) <= width
    assert "16 ranks of 64  step 640  3 min 12 s" in lines[0]
    assert lines[1].startswith("step 54.")
    assert re.search("▁+.*[▅▆▇█]+.*was 40", lines[1]), "the growth can be seen"
    text = "\n".join(lines)
    assert (
        text.index("compute straggler  rank 11") < text.index("  · rank 11 came last") < text.index("  → Check the GPU")
    )
    assert "W1" not in text
    assert "beta" not in text
    assert ranks_in(lines)[0] == 11
    assert len(ranks_in(lines)) < 6
    assert re.search(r"1[234] others alike", text)
    assert "__getitem__ (train.py:10)  sleep  rank 11" in text
    assert text.index("alike") < text.index("hottest lines on the CPU") < text.index("main threads off the CPU")
    assert lines[-1].startswith("Argus: overhead 0.31%, CPU 3.1%, ring 1%, nothing lost")


def test_the_legend_keeps_what_the_bars_show() -> None:
    parts = {"computing": 0.9, "waiting": 0.0, "data loading": 0.08, "other": 0.02}
    ranks = [a_rank(0, late_ms=None, by="phases", parts=parts)]
    for width in (60, 80):
        drawn = frame(replace(a_view(1, gpu=False), ranks=ranks), {}, Scene(), width, 20)
        (heading,) = [line.plain for line in drawn if line.plain.startswith("rank ")]
        assert len(heading) <= width
        assert "▓ data loading" in heading
        assert ("▒ communication" in heading) == (width == 80)


def test_the_rank_that_a_finding_names_is_first_then_the_late_ones() -> None:
    ranks = [a_rank(0), a_rank(1, late_ms=20.0), a_rank(2), a_rank(3, own_ms=54.0), a_rank(4)]
    assert [rank.rank for rank in by_lateness(ranks, [])[0]] == [1, 3, 0, 2, 4]
    chosen, differ = by_lateness(ranks, [2])
    assert ([rank.rank for rank in chosen], differ) == ([2, 1, 3, 0, 4], 3)
    dead = [*ranks[:4], replace(ranks[4], state="exited")]
    assert by_lateness(dead, [])[0][0].rank == 4, "who has ended is the oddest"


def test_all_ranks_on_request() -> None:
    scene = Scene()
    for key, first, last in (("down", 11, None), ("end", None, 15), ("home", 11, None), ("escape", 11, None)):
        scene.press(key, 24)
        shown = ranks_in(rows(scene, 80, 24, degraded(11), ranks=16, slow=11))
        assert first is None or shown[0] == first
        assert last is None or shown[-1] == last
    assert not scene.all_ranks
    scene.press("down", 24)
    lines = rows(scene, 80, 40, degraded(11), ranks=16, slow=11)
    assert sorted(ranks_in(lines)) == list(range(16))
    scene.press("up", 24)
    assert len(ranks_in(rows(scene, 80, 40, degraded(11), ranks=16, slow=11))) < 6


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("page", PAGES)
def test_pages(page: str, width: int) -> None:
    scene = Scene()
    scene.press(page, 24)
    lines = rows(scene, width, 24, degraded(11), ranks=16, slow=11)
    assert len(lines) == 24
    text = "\n".join(lines)
    assert {
        "?": "end the trace and sum up", "d": "W1 0.63", "s": "<module> (train.py:90)", "l": "threads that wait",
        "g": "only NCCL",
    }[page] in text  # fmt: skip
    scene.press(page, 24)
    assert scene.page == ""
    scene.press(page, 24)
    scene.press("escape", 24)
    assert scene.page == ""


def test_a_long_page_is_scrolled_to_its_end_and_no_further() -> None:
    scene = Scene(page="g")
    assert rows(scene, ranks=40)[-1].endswith("more: PgDn")
    for _ in range(30):
        scene.press("pagedown", 24)
        last = rows(scene, ranks=40)
    assert "AllReduce" in "\n".join(last)
    assert last[-1] == ""
    scene.press("home", 24)
    assert "only NCCL" in "\n".join(rows(scene, ranks=40))


@pytest.mark.parametrize(("page", "nothing"), [("d", "no verdict yet"), ("s", "no stacks: off"), ("l", "none seen")])
def test_pages_without_anything(page: str, nothing: str) -> None:
    assert nothing in "\n".join(rows(Scene(page=page), stacks=NO_STACKS))


def test_a_job_on_cpus_has_no_columns_of_gpus() -> None:
    ranks = [a_rank(0, late_ms=None, own_ms=3.1, step_ms=3.2, by="phases")]
    (job,) = a_view(1).jobs
    view = {"gpu": False, "kernels": [], "launches": 0, "collective_calls": 0, "ranks": 1}
    drawn = frame(replace(a_view(**view), ranks=ranks, jobs=[replace(job, ranks=1, world=0)]), {}, Scene(), 80, 24)
    text = "\n".join(line.plain for line in drawn)
    assert "late by" not in text
    assert "NCCL" not in text
    assert "kernels" not in text
    assert "launch" not in text
    assert "1 rank  step 640" in text
    assert "data loading" in text
    assert re.search(r"^ +0 +3\.10 ms", text, re.M)
    idle = [replace(rank, launch_rate=0.0, collective_rate=0.0) for rank in ranks]
    page = frame(replace(a_view(**view), ranks=idle), {}, Scene(page="g"), 80, 24)
    assert "rank       pid      steps" in "\n".join(line.plain for line in page)


STATES = [
    (Standing("healthy"), {}, "HEALTHY"),
    (Standing("healthy", provisional=True), {}, "HEALTHY so far"),
    (Standing("hung", [a_finding(1, kind="hang")]), {}, "HUNG"),
    (Standing("inconclusive", [], "2 whole steps were seen, 10 are needed"), {}, "WATCHING"),
    (None, {}, "WATCHING"),
    (None, {"step": -1, "step_ms": ()}, "FINDING STEPS"),
    (None, {"step": -1, "step_ms": (), "calls": 0}, "NO STEPS YET"),
]


@pytest.mark.parametrize(("standing", "changes", "word"), STATES)
def test_the_first_word_is_how_the_job_fares(standing: Standing | None, changes: dict[str, object], word: str) -> None:
    view = a_view(4)
    view = replace(view, jobs=[replace(view.jobs[0], **changes)])  # type: ignore[arg-type]
    text = "\n".join(line.plain for line in frame(view, {(JOB, 7): standing} if standing else {}, Scene(), 80, 24))
    assert text.startswith(f" {word} ")
    assert ("10 are needed" in text) == (standing is not None and bool(standing.reason))
    without = "\n".join(line.plain for line in frame(view, {}, Scene(), 80, 24, diagnosis="off: why not"))
    assert "verdict" not in without
    assert ("diagnosis off: why not" in without) == without.startswith(" TRACING ") == (view.jobs[0].step >= 0)


@pytest.mark.parametrize(("width", "words"), [(60, " DEGRADED  llama"), (80, " DEGRADED so far  llama")])
def test_that_a_verdict_is_provisional_is_shown_where_there_is_room(width: int, words: str) -> None:
    early = {(JOB, 7): replace(degraded(11)[JOB, 7], provisional=True)}
    first, *_ = rows(None, width, 24, early, ranks=16, slow=11)
    assert first.startswith(words)
    assert len(first) <= width
    assert "3 min 12 s" in first
    line = plain_line(a_view(2), early)
    assert "  degraded so far  2 ranks" in line


def test_silence_is_reported() -> None:
    view = a_view(4)
    at = view.monotonic_ns - 23 * 10**9
    silent = replace(view, jobs=[replace(view.jobs[0], newest_ns=at)])
    assert frame(silent, {}, Scene(), 80, 24)[1].plain.endswith("no step seen for 23 s")
    slow = replace(silent, jobs=[replace(silent.jobs[0], step_ms=[30_000.0] * 40)])
    assert "no step seen" not in frame(slow, {}, Scene(), 80, 24)[1].plain, "such steps take longer"


def test_the_job_that_fares_worst_is_shown_and_tab_shows_the_next() -> None:
    view = a_view(2)
    (job,) = view.jobs
    view = replace(view, jobs=[job, replace(job, name="other"), replace(job, name="over", live=False)])
    scene, standings = Scene(), {(JOB, 7): Standing("degraded", [a_finding(1)]), ("other", 7): Standing("healthy")}
    seen = []
    for _ in range(4):
        seen.append(frame(view, standings, scene, 80, 24)[0].plain.split()[1])
        scene.press("tab")
    assert seen == [JOB, "other", "over", JOB]
    assert frame(view, {}, Scene(), 80, 24)[0].plain.split()[1] == "other", "the newest that runs"


def test_argus_own_health_is_the_last_line() -> None:
    assert "ring 1%, 1 CUDA call lost: their ring was full" in rows(lost={"launches_dropped": 1})[-1]
    away = rows(None, 120, waiting_bytes=3_000_000, store_error="refused")[-1]
    assert away.startswith("Argus: store away, 3.0 MB waiting: refused")


def test_nothing_there_yet() -> None:
    lines = rows(ranks=0, jobs=[], kernels=[], stacks=NO_STACKS, steps_go=[], gpu=False)
    assert lines[0].startswith(" NO STEPS YET   3 min 12 s")
    assert "no process is a rank yet" in lines[1]


def test_a_plain_line() -> None:
    line = plain_line(a_view(1, gpu=False, launches=0, collective_calls=0), degraded(0))
    assert line.startswith(
        "  192.0 s  degraded  1 rank  step 640, 54.2 ms  hottest forward (model.py:212) 61%  nothing lost"
    )
    assert "collective" not in line
    assert "2 ranks  1,000,000 launches  4,000 collectives" in plain_line(a_view(2), {})
    assert "  1 CUDA call lost" in plain_line(a_view(2, lost={"launches_dropped": 1}), {}).replace("lost: ", "", 1)


def test_news_have_evidence_and_action() -> None:
    lines = list(
        news_lines([News("found", a_finding(2)), News("over", a_finding(3)), News("off", text="diagnosis off")])
    )
    assert lines[0] == "found: compute straggler: rank 2 on gpu-node-17 since step 320, 1.35x"
    assert [line[:4] for line in lines[1:4]] == ["  · ", "  · ", "  → "]
    assert lines[4] == "over: compute straggler: rank 3 on gpu-node-17 since step 320, 1.35x"
    assert lines[5:] == ["diagnosis off"]


# ---- drawing


def test_a_sparkline_shows_growth_and_no_noise() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([5.0], 0) == ""
    assert set(sparkline([50.0 + n % 2 for n in range(40)], 40)) == {"▁"}
    assert sparkline([1.0, 2.0], 10) == "▁█"
    assert len(sparkline([1.0] * 119, 50)) <= 50
    assert sparkline([1.0] * 8 + [1e6], 9)[-1] == "█"
    assert sparkline([0.0, 0.0], 2) == "▁▁"


def test_bars_add_up() -> None:
    assert bar({"computing": 0.5, "waiting": 0.5}, 10).plain == "█████▒▒▒▒▒"
    assert bar({"computing": 1 / 3, "waiting": 1 / 3, "other": 1 / 3}, 10).cell_len == 10
    assert bar({"computing": 0.2}, 10).plain == "██"
    assert bar({"computing": 3.0}, 10).cell_len == 10


def test_wrapping() -> None:
    assert wrapped("one two three", 8, first="· ", rest="  ") == ["· one", "  two", "  three"]
    assert wrapped("one two three", 8, first="· ", rest="  ", most=2) == ["· one", "  two…"]
    assert wrapped("", 20) == [""]


def test_a_terminal_without_unicode() -> None:
    assert plain_ascii("step 54 ms ▁▂█ → rank·é\x1b[0m") == "step 54 ms _.# > rank.?\x1b[0m"


@pytest.mark.parametrize(("seconds", "text"), [(42.9, "42 s"), (192, "3 min 12 s"), (7505, "2 h 05 min")])
def test_elapsed(seconds: float, text: str) -> None:
    assert elapsed(seconds) == text


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("q", ["q"]), ("\x1b[A\x1b[B", ["up", "down"]), ("\x1bOA", ["up"]), ("\x1b[5~d", ["pageup", "d"]),
        ("\x1b", ["escape"]), ("\t?", ["tab", "?"]), ("\x1b[1;5Cq", ["q"]), ("\x1b[200~", []), ("\x01", []),
    ],
)  # fmt: skip
def test_keys(sent: str, keys: list[str]) -> None:
    assert parse_keys(sent) == keys
