"""A verdict in lines: short unless all of it is asked for, folded on a terminal and whole in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from argus.cli.verdict_text import bar, has_more, plain_evidence, show, verdict_lines
from argus.diagnose.verdict import Verdict
from argus.report.summary import summary_of
from tests.builders.live_views import a_finding


def a_verdict(**more: object) -> Verdict:
    fields = {
        "schema": "argus.verdict/1", "job": "llama", "run": 7, "ranks": 16, "steps": [0, 640], "status": "degraded",
        "slowdown": 1.35, "findings": [a_finding(11)], "reason": "",
        "coverage": {"complete": True, "dropped": {}, "ended": True},
    } | more  # fmt: skip
    return Verdict(**fields)  # type: ignore[typeddict-item]


@pytest.mark.parametrize(("slowdown", "free"), [(1.0, True), (1.004, True), (1.006, False)])
def test_what_costs_nothing_yet_is_not_called_slower(slowdown: float, free: bool) -> None:
    verdict = a_verdict(slowdown=slowdown, findings=[a_finding(11, slowdown=slowdown, share=0.0)])
    for text in ("\n".join(line.plain for line, _ in verdict_lines(verdict, detail=False)), summary_of(verdict)):
        assert ("costs no time yet" in text) is free
        assert ("slower than it could be" in text, "of the lost time" in text) == (not free, not free)


def test_three_plain_sentences_and_all_of_it_on_request() -> None:
    verdict = a_verdict()
    short = "\n".join(text.plain for text, _ in verdict_lines(verdict, detail=False))
    assert short.startswith("DEGRADED  llama  16 ranks, steps 0 to 640, 1.35x slower than it could be")
    assert "since step 320 · 1.35x · 98% of the lost time · confidence 93% · owner: infrastructure" in short
    assert short.count("· rank 11") + short.count("· the GPU") + short.count("→ Check") == 3
    assert "W1" not in short
    assert "beta" not in short
    assert "1.37x as long as those with the same work" in short
    whole = "\n".join(text.plain for text, _ in verdict_lines(verdict, detail=True))
    assert "(W1 0.63 of the mean, 0.01 expected by chance)" in whole
    assert "beta 0.31" in whole
    assert "SELECT 1" not in whole
    assert "SELECT 1" in "\n".join(text.plain for text, _ in verdict_lines(verdict, detail=True, with_sql=True))
    assert has_more(verdict)
    few = a_finding(1, evidence=[{"text": "it is slow", "sql": ""}])
    assert not has_more(a_verdict(findings=[few]))


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (
            "it takes longer (W1 0.63 of the mean, 0.01 expected by chance), and it lasts",
            "it takes longer, and it lasts",
        ),
        ("rank 3 is (1.4 times) as slow", "rank 3 is (1.4 times) as slow"),
        ("of rank 3: beta 0.2 against 0.1", None),
    ],
)
def test_statistics_are_left_out(text: str, plain: str | None) -> None:
    finding = a_finding(3, evidence=[{"text": text, "sql": ""}])
    assert plain_evidence(finding) == ([] if plain is None else [plain])


def test_the_sentence_with_a_line_of_code_is_always_shown() -> None:
    code = "its stacks differ most from the others' in Samples.read_slowly (train.py:52): 30% of its time"
    texts = ["it came last", "it spends 20 ms in data loading", "a third", code]
    finding = a_finding(1, evidence=[{"text": text, "sql": ""} for text in texts])
    assert plain_evidence(finding) == [*texts[:2], code]
    finding["evidence"] = finding["evidence"][2:]
    assert plain_evidence(finding) == [texts[2], code]


def test_states_without_findings() -> None:
    healthy = a_verdict(status="healthy", findings=[])
    assert [text.plain for text, _ in verdict_lines(healthy, detail=False)] == [
        "HEALTHY  llama  16 ranks, steps 0 to 640"
    ]
    short = a_verdict(status="inconclusive", findings=[], steps=[], ranks=1, reason="no steps")
    assert [text.plain for text, _ in verdict_lines(short, detail=False)] == ["INCONCLUSIVE  llama  1 rank", "no steps"]
    hung = a_verdict(status="hung", findings=[a_finding(1, kind="hang")])
    assert "no step since step 640" in next(verdict_lines(hung, detail=False))[0].plain


def test_folded_below_the_text_on_a_terminal_and_whole_in_a_pipe() -> None:
    line = [(Text("· " + "word " * 20), 3), (Text(), 0), (Text("end"), 0)]
    terminal = Console(file=io.StringIO(), force_terminal=True, width=40, color_system=None)
    show(terminal, line)
    lines = terminal.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].startswith("   · word")
    assert all(each.startswith("     word") for each in lines[1:-2])
    assert [each.rstrip() for each in lines[-2:]] == ["", "end"]
    assert all(len(each.rstrip()) <= 40 for each in lines)
    pipe = Console(file=io.StringIO(), width=40)
    show(pipe, line)
    assert pipe.file.getvalue().count("\n") == 3  # type: ignore[attr-defined]


def test_a_job_without_steps_has_no_0_ranks() -> None:
    verdict = a_verdict(ranks=0, steps=[], status="inconclusive", findings=[], reason="no step was seen")
    first = next(iter(verdict_lines(verdict, detail=False)))[0].plain
    assert first == "INCONCLUSIVE  llama  no rank with steps"


def test_a_share_is_drawn_where_there_are_several() -> None:
    assert bar(0.65) == "██████▌░░░"
    assert bar(0.0) == "░" * 10
    assert bar(1e-9) == "▌" + "░" * 9
    assert bar(7.0) == "█" * 10
    two = a_verdict(findings=[a_finding(11, share=0.8), a_finding(12, share=0.2)])
    drawn = "\n".join(text.plain for text, _ in verdict_lines(two, detail=False, bars=True))
    assert "████████░░ 80% of the lost time" in drawn
    assert "██░░░░░░░░ 20% of the lost time" in drawn
    assert "█" not in "\n".join(text.plain for text, _ in verdict_lines(two, detail=False))
