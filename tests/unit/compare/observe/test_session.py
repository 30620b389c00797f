"""An observation from its first run to its files, with runs that are made up: nothing is lost, and nothing hidden."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml

from argus.cli.main import main
from argus.compare.observe.evaluate import differences, metrics_of, summary_of
from argus.compare.observe.plan import Arm, Plan, Readings, schedule
from argus.compare.observe.records import CONFIG, META, METRICS, REPORT, Records, read, schemas
from argus.compare.observe.report import report_of, shown
from argus.compare.observe.rule import Decision
from argus.model.errors import EXIT_FAILURE, EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.system import files
from tests.builders.observed import session, took

PLAN = Plan(("./bench", "--size", "4"), repeat=10, warmup=2, seed=3)


def times(n: int, cv: float = 0.01, seed: int = 4) -> list[float]:
    return [float(one) for one in np.exp(cv * np.random.default_rng(seed).standard_normal(n))]


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """metrics.json, run_meta.json and report.md; all documents agree with their schemas."""
    contracts = schemas()
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in (METRICS, META, CONFIG)}
    for name, text in texts.items():
        document = yaml.safe_load(text) if name == CONFIG else json.loads(text)
        jsonschema.Draft202012Validator(contracts[name]).validate(document)
    report = (folder / REPORT).read_text(encoding="utf-8") if (folder / REPORT).exists() else ""
    return json.loads(texts[METRICS]), json.loads(texts[META]), report


def test_warm_up_is_run_and_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    slow_start = [9.0, 5.0, *times(10)]
    metrics = session(tmp_path / "o", PLAN, [took(one) for one in slow_start], say=said.append).carry_out()
    assert metrics["decision"]["status"] == "stable"
    assert metrics["decision"]["runs"] == 10
    stored, meta, report = load(tmp_path / "o")
    assert stored["runs"] == metrics["runs"]
    assert [run["warmup"] for run in stored["runs"]] == [True] * 2 + [False] * 10
    (wall,) = [row for row in stored["summary"] if row["figure"] == "wall_ns"]
    assert wall["max"] < 1.1e9
    assert (meta["status"], meta["runs"], meta["ended_s"] > meta["started_s"]) == ("finished", 12, True)
    assert report.startswith("# Does it behave the same when it is repeated?\n\n**STABLE**: ")
    assert "block_io_ns" not in {row["figure"] for row in stored["summary"]}, "not measured is not 0"
    assert said[0] == "run 1 of 12  9,000 ms  warm-up"
    assert len(said) == 12


def test_runs_that_fail_are_recorded_one_by_one(tmp_path: Path) -> None:
    outcomes = [took(one) for one in times(12)]
    outcomes[3] = took(0.5, status="failed", exit_code=3)
    outcomes[5] = took(0.5, status="failed", exit_code=None, signal=11)
    outcomes[7] = took(9.0, status="timeout", exit_code=None, signal=15)
    session(tmp_path / "o", PLAN, outcomes).carry_out()
    metrics, _, report = load(tmp_path / "o")
    assert (metrics["partial_failure"], metrics["failed"]) == (True, 3)
    assert metrics["decision"]["status"] == "unstable"
    assert metrics["decision"]["signs"][0]["kind"] == "failures"
    assert "**Partial failure**: 3 of 12 runs did not succeed." in report
    for text in ("| 4 |  | exit code 3 |", "| 6 |  | signal 11 |", "| 8 |  | timeout |"):
        assert text in report
    (wall,) = [row for row in metrics["summary"] if row["figure"] == "wall_ns"]
    assert wall["runs"] == 7


def test_a_warm_up_run_that_fails_is_no_sign_but_a_partial_failure(tmp_path: Path) -> None:
    outcomes = [took(1.0, status="failed", exit_code=1), *(took(one) for one in times(11))]
    metrics = session(tmp_path / "o", PLAN, outcomes).carry_out()
    assert (metrics["partial_failure"], metrics["failed"], metrics["decision"]["status"]) == (True, 0, "stable")


def test_all_runs_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = session(tmp_path / "o", PLAN, [took(1.0, status="failed", exit_code=1)] * 12).carry_out()
    assert metrics["decision"]["status"] == "inconclusive"
    assert metrics["decision"]["reason"] == "none of 10 runs succeeded"
    assert metrics["partial_failure"]
    assert "\n**Failure**: none of 12 runs succeeded.\n" in load(tmp_path / "o")[2]
    assert main(["observe", "report", str(tmp_path / "o")]) == 12
    assert "  failure: none of 12 runs succeeded" in capsys.readouterr().out.splitlines()


def test_after_each_run_the_files_have_it(tmp_path: Path) -> None:
    seen = []

    def look(_line: str) -> None:
        metrics, meta, _ = load(tmp_path / "o")
        seen.append((len(metrics["runs"]), meta["status"], metrics["decision"]))

    session(tmp_path / "o", PLAN, [took(one) for one in times(12)], say=look).carry_out()
    assert seen == [(number, "running", None) for number in range(1, 13)]


def test_an_interrupted_observation_keeps_what_was_done(tmp_path: Path) -> None:
    outcomes = [*(took(one) for one in times(8)), KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        session(tmp_path / "o", PLAN, outcomes).carry_out()
    metrics, meta, report = load(tmp_path / "o")
    assert meta["status"] == "interrupted"
    assert [run["status"] for run in metrics["runs"]] == ["ok"] * 8 + ["interrupted"]
    assert "**interrupted**: 8 of 12 runs were made, and one was cut short; nothing is decided." in report
    assert not metrics["partial_failure"], "what was interrupted did not fail"
    assert "failure" not in report
    again = metrics_of(metrics["runs"], read(tmp_path / "o").plan, decided=True)
    assert again["decision"]["runs"] == 6, "two were for warm-up"
    assert again["failed"] == 0, "what was interrupted did not fail"


def test_a_command_that_vanishes_ends_it_with_one_line(tmp_path: Path) -> None:
    outcomes = [*(took(one) for one in times(4)), took(0.0, status="not_started", error="No such file", figures={})]
    with pytest.raises(ArgusError) as wrong:
        session(tmp_path / "o", PLAN, outcomes).carry_out()
    assert wrong.value.message == "'./bench' did not start: No such file"
    assert wrong.value.exit_code == EXIT_UNAVAILABLE
    metrics, meta, report = load(tmp_path / "o")
    assert (meta["status"], len(metrics["runs"])) == ("stopped", 5)
    assert "not started: No such file" in report


def test_a_full_disk_ends_it_with_one_line_and_keeps_the_last_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from argus.compare.observe import records

    write, calls = records.files.write_at, []

    def full(*arguments: Any, **more: Any) -> None:
        calls.append(arguments)
        if len(calls) > 6:
            raise OSError(28, "No space left on device")
        write(*arguments, **more)

    monkeypatch.setattr(records.files, "write_at", full)
    with pytest.raises(ArgusError) as wrong:
        session(tmp_path / "o", PLAN, [took(one) for one in times(12)]).carry_out()
    assert wrong.value.message == f"{tmp_path / 'o'} cannot be written: No space left on device"
    assert wrong.value.hint.startswith(f"Free some space there, then: argus observe report {tmp_path / 'o'}")
    metrics, _, _ = load(tmp_path / "o")
    assert len(metrics["runs"]) == 3


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "mine").touch()
    with pytest.raises(ArgusError) as wrong:
        Records(tmp_path / "o")
    assert (wrong.value.message, wrong.value.exit_code) == (f"{tmp_path / 'o'} is not empty", EXIT_USAGE)
    with pytest.raises(ArgusError, match=r"is not a folder|cannot be made|is not used"):
        Records(tmp_path / "o" / "mine")
    assert [path.name for path in (tmp_path / "o").iterdir()] == ["mine"]


def test_two_observations_do_not_share_a_folder(tmp_path: Path) -> None:
    """The second finds it empty, and the first begins before it does; or it is there from before."""
    first, second = (session(tmp_path / "o", PLAN, [took(one) for one in times(12)]) for _ in range(2))
    first.carry_out()
    before = {path.name: path.read_bytes() for path in (tmp_path / "o").iterdir() if path.is_file()}
    for again in (second.carry_out, lambda: Records(tmp_path / "o")):
        with pytest.raises(ArgusError) as wrong:
            again()
        assert wrong.value.message == f"{tmp_path / 'o'} is the folder of another argus observe"
        assert "Give --out a new one" in wrong.value.hint
        assert wrong.value.exit_code == EXIT_USAGE
    assert {path.name: path.read_bytes() for path in (tmp_path / "o").iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    ("number", "hint"), [(errno.ENOSPC, "Free some space there"), (errno.EROFS, "Its records are unchanged: copy")]
)
def test_a_report_that_cannot_be_written_is_not_advised_again(
    tmp_path: Path, number: int, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session(tmp_path / "o", PLAN, [took(one) for one in times(12)]).carry_out()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "write_at", fail)
    assert main(["observe", "report", str(tmp_path / "o")]) == EXIT_FAILURE
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"argus: {tmp_path / 'o'} cannot be written: {os.strerror(number)}"
    assert lines[1].strip().startswith(hint)


def test_arms_get_their_variables_and_are_compared(tmp_path: Path) -> None:
    arms = (Arm("workers=1", (("workers", "1"),)), Arm("workers=4", (("workers", "4"),)))
    plan = Plan(("x",), repeat=6, arms=arms, seed=5)
    slow = [1.5 if slot.arm is arms[1] else 1.0 for slot in schedule(plan)]
    metrics = session(tmp_path / "o", plan, [took(a * b) for a, b in zip(slow, times(12), strict=True)]).carry_out()
    assert [sign["kind"] for sign in metrics["decision"]["signs"]] == ["worse_with_more"]
    load(tmp_path / "o")
    assert {(row["arm"], row["runs"]) for row in metrics["summary"]} == {("workers=1", 6), ("workers=4", 6)}


def test_a_sign_names_the_figure_in_which_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Arms that differ in three figures are three lines, each of another one."""
    arms = (Arm("off", (("CACHE", "0"),)), Arm("on", (("CACHE", "1"),)))
    plan = Plan(("x",), repeat=6, arms=arms, seed=5, readings=Readings("t=([0-9.]+) (ms)", errors="error"))
    slow = [slot.arm is arms[1] for slot in schedule(plan)]
    outcomes = [took((2.0 if late else 1.0) * one) for late, one in zip(slow, times(12), strict=True)]

    def output(number: int) -> str:
        late = 2.0 if slow[number - 1] else 1.0
        return "".join(f"t={late * one:.4f} ms\n" for one in times(50, seed=number)) + "error\n"

    session(tmp_path / "o", plan, outcomes, output=output).carry_out()
    assert main(["observe", "report", str(tmp_path / "o")]) == 10
    lines = capsys.readouterr().out.splitlines()
    kinds = [line.split(":")[0].strip() for line in lines if "arm on is" in line and line.startswith("  ")]
    assert sorted(kinds) == [
        "arms differ, latency p50", "arms differ, latency p99", "arms differ, time per request",
    ]  # fmt: skip
    assert any(line.startswith("  errors: 12 errors in ") for line in lines)


@pytest.mark.parametrize(
    ("figure", "value", "text"),
    [
        ("throughput_s", 12_900.4, "12,900/s"),
        ("throughput_s", 3.14159, "3.142/s"),
        ("voluntary_switches", 123_456.0, "123,456"),
        ("load_before", 0.25, "0.25"),
        ("step_ns", 1.2e9, "1,200 ms"),
        ("errors", None, "-"),
    ],
)
def test_figures_have_their_unit(figure: str, value: float | None, text: str) -> None:
    assert shown(figure, value) == text


def test_each_run_is_named_when_it_begins(tmp_path: Path) -> None:
    said: list[str] = []
    plan = Plan(("x",), repeat=1, arms=(Arm("a"), Arm("b")), seed=1)
    made = session(tmp_path / "o", plan, [took(1.0)] * 2, say=said.append)
    made.begun = said.append
    made.carry_out()
    names = [f"run {slot.number} of 2  {slot.arm.name}" for slot in schedule(plan)]
    assert said == [line for name in names for line in (name, f"{name}  1,000 ms")]


def test_latencies_are_read_from_what_a_run_prints(tmp_path: Path) -> None:
    random = np.random.default_rng(6)

    def output(number: int) -> str:
        took_ms = random.lognormal(1, 0.2, 400)
        if number in (3, 7):
            took_ms[::40] *= 30
        return "".join(f"latency={one:.4f} ms\n" for one in took_ms) + "error: x\n" * (number == 5)

    plan = Plan(("x",), repeat=8, readings=Readings(r"latency=([0-9.]+) (ms)", errors="^error"))
    metrics = session(tmp_path / "o", plan, [took(1.0)] * 8, output=output).carry_out()
    load(tmp_path / "o")
    assert metrics["decision"]["signs"][0]["kind"] == "tail"
    assert metrics["decision"]["signs"][0]["runs"] == [3, 7]
    figures = {row["figure"]: row["mean"] for row in metrics["summary"]}
    assert figures["latency_p50_ns"] == pytest.approx(2.72e6, rel=0.05)
    assert (figures["throughput_s"], figures["errors"]) == (400, 0.125)
    assert "retries" not in figures, "nobody counted them"


def test_errors_alone_are_a_sign(tmp_path: Path) -> None:
    plan = Plan(("x",), repeat=6, readings=Readings("t=([0-9.]+)", errors="error"))
    outcomes = [took(one) for one in times(6)]
    metrics = session(tmp_path / "o", plan, outcomes, output=lambda _: "t=1\n" * 50 + "error\n").carry_out()
    assert [sign["text"] for sign in metrics["decision"]["signs"]] == ["6 errors in 306 requests (1.96%)"]


def test_a_noisy_neighbour_is_named(tmp_path: Path) -> None:
    others = [3.0 if number in (2, 3, 7, 11, 12, 16) else 0.0 for number in range(20)]
    outcomes = [took(one * (1.4 if busy else 1.0)) for one, busy in zip(times(20), others, strict=True)]
    metrics = session(tmp_path / "o", Plan(("x",), repeat=20), outcomes, others=others).carry_out()
    _, _, report = load(tmp_path / "o")
    assert metrics["decision"]["status"] == "noise-dominated"
    assert metrics["decision"]["disturbance"]["name"] == "others_cpu_share"
    assert "correlates with CPU time of other processes and guests" in report
    assert metrics["decision"]["differences"][0]["name"] == "others_cpu_share"


def test_runs_too_short_to_know_what_others_did_say_so(tmp_path: Path) -> None:
    """A neighbour makes them vary, and nobody can tell."""
    note = "runs shorter than 100 ms do not show how much of the CPUs other processes used: they may be why these vary"
    for name, scale, noted in (("short", 0.05, True), ("long", 5.0, False)):
        walls = [took(scale * wall) for wall in times(12, cv=0.3)]
        session(tmp_path / name, Plan(command=("x",), repeat=12), walls).carry_out()
        metrics, _, report = load(tmp_path / name)
        assert metrics["decision"]["status"] == "unstable"
        assert any(one.startswith(note) for one in metrics["decision"]["notes"]) == noted
        assert (note in report) == noted
    session(tmp_path / "alike", Plan(command=("x",), repeat=12), [took(0.05 * wall) for wall in times(12)]).carry_out()
    assert load(tmp_path / "alike")[0]["decision"]["notes"] == []


def test_what_differed_in_the_runs_that_stand_out(tmp_path: Path) -> None:
    outcomes = [took(one) for one in times(12)]
    far = took(8.0)
    outcomes[6] = took(8.0, figures={**far.figures, "involuntary_switches": 900.0, "user_ns": 8e8})
    metrics = session(tmp_path / "o", PLAN, outcomes).carry_out()
    assert metrics["decision"]["signs"][0]["runs"] == [7]
    rows = {row["name"]: row for row in metrics["decision"]["differences"]}
    assert rows["involuntary_switches"] == {"name": "involuntary_switches", "in_these_runs": 900, "in_others": 1}
    assert "peak_memory_bytes" not in rows
    assert differences(Decision("stable", ""), metrics["runs"]) == []


def test_a_report_shows_text_of_others_as_text(tmp_path: Path) -> None:
    plan = Plan(("x", "`rm`", "a|b\x1b[31m"), repeat=5)
    meta = {"facts": {"os.name": "<script>|\x1b[31m", "k": "[a](http://b)"}}
    metrics = session(tmp_path / "o", plan, [took(1.0)] * 5, meta=meta).carry_out()
    text = report_of(metrics, {**meta, "started_s": 0, "status": "finished", "runs": 5}, plan)
    assert "\x1b" not in text
    assert "<script>" not in text.replace("\\<", "")
    assert "](http" not in text.replace("\\]", "")
    assert text.count("`") == 2


def test_many_runs_are_shown_in_part() -> None:
    run = {
        "number": 1, "block": 0, "arm": "", "warmup": False, "status": "ok", "exit_code": 0, "signal": None,
        "error": "", "started_s": 0.0, "figures": {"wall_ns": 1e9}, "latency": None, "noise": {}, "output": {},
    }  # fmt: skip
    runs = [{**run, "number": number, "figures": {"wall_ns": 1e9 * one}} for number, one in enumerate(times(100), 1)]
    runs[40]["figures"]["wall_ns"] = 2e10
    metrics = metrics_of(runs, Plan(("x",), repeat=100), decided=True)
    text = report_of(metrics, {"started_s": 0, "status": "finished", "runs": 100}, Plan(("x",), repeat=100))
    assert "| 41 |  | ok | 20.0 s |" in text
    assert "99 more are in metrics.json" in text
    assert summary_of(runs, Plan(("x",)))[0]["runs"] == 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / METRICS).write_text("{"), "damaged"),
        (lambda folder: (folder / METRICS).write_text("[]"), "damaged"),
        (lambda folder: (folder / METRICS).write_text('{"schema": "argus.observe.metrics/9"}'), "of schema"),
        (lambda folder: (folder / META).unlink(), "has no run_meta.json"),
        (lambda folder: (folder / CONFIG).write_bytes(b"\xff"), "not UTF-8"),
        (lambda folder: [(folder / META).unlink(), (folder / META).symlink_to("/etc/passwd")], "symbolic link"),
    ],
)
def test_damaged_records_are_one_line(tmp_path: Path, change: Any, message: str) -> None:
    session(tmp_path / "o", Plan(("x",), repeat=5), [took(1.0)] * 5).carry_out()
    change(tmp_path / "o")
    with pytest.raises(ArgusError, match=message):
        read(tmp_path / "o")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run["figures"].update(wall_ns="x"), 'runs[3].figures.wall_ns is "x", not number or null'),
        (lambda run: run["figures"].update(wall_ns=0), "runs[3] succeeded, and has no figures.wall_ns above 0"),
        (lambda run: run["figures"].pop("wall_ns"), "runs[3] succeeded, and has no figures.wall_ns above 0"),
        (lambda run: run.update(arm="b\n"), "runs[3].arm is 'b\\n', of which resolved_config.yaml knows nothing"),
        (lambda run: run.update(number=9), "runs[3].number is 9, not 4"),
        (lambda run: run["latency"].update(p99_ns=None), "runs[3].latency has a count, and no p99_ns above 0"),
        (lambda run: run["latency"].update(histogram=[[9, 10**9]]), "histogram has more than 2,000,000 latencies"),
        (lambda run: run.update(started_s=1e300), "runs[3].started_s is not a number that can be used"),
    ],
)
@pytest.mark.parametrize("words", [("report",), ("export",), ("export", "--sanitize")])
def test_records_that_somebody_changed_are_one_line_of_every_verb(
    tmp_path: Path, change: Any, message: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(("x",), repeat=6, readings=Readings("t=([0-9.]+)"))
    session(tmp_path / "o", plan, [took(1.0)] * 6, output=lambda _: "t=1\n" * 9).carry_out()
    path = tmp_path / "o" / METRICS
    metrics = json.loads(path.read_text())
    change(metrics["runs"][3])
    path.write_text(json.dumps(metrics))
    assert main(["observe", *words, str(tmp_path / "o")]) == EXIT_FAILURE
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"argus: {path} is damaged: ")
    assert message in lines[0]
    assert lines[1:] == ["       Nothing was changed"]
    assert not list(tmp_path.glob("*.zip"))


def test_settings_that_somebody_changed_are_one_line(tmp_path: Path) -> None:
    session(tmp_path / "o", Plan(("x",), repeat=5), [took(1.0)] * 5).carry_out()
    path = tmp_path / "o" / CONFIG
    path.write_text(path.read_text().replace("seed: 0", "seed: -1e99"))
    with pytest.raises(ArgusError, match=r"resolved_config.yaml: seed is '-1e99'") as wrong:
        read(tmp_path / "o")
    assert wrong.value.exit_code == EXIT_FAILURE


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ArgusError, match=r"there is no .*/none"):
        read(tmp_path / "none")
