"""Which processes are offered to be traced, and which are meant by a name."""

from __future__ import annotations

from dataclasses import replace

import click
import pytest

from argus.capture.process.candidates import BUSY_CPU, MAX_OTHERS, Candidate, ranked
from argus.capture.process.targets import Identity, Match, choose_matches, is_argus, script_name
from argus.cli import pick
from argus.model.errors import EXIT_USAGE, ArgusError

TRAIN = ("python", "train.py")


def candidate(pid: int, parent: int = 1, words: tuple[str, ...] = TRAIN, rank: int = -1, **more: object) -> Candidate:
    identity = Identity(rank, 2 if rank >= 0 else 0, rank, "ddp", "torchrun" if rank >= 0 else "unknown", "line")
    made = Candidate(pid, parent, identity, "ana", words, False, False, True, 0.5, 90.0)
    return replace(made, **more)  # type: ignore[arg-type]


def pids(candidates: list[Candidate]) -> list[int]:
    return [one.pid for one in candidates]


def test_training_comes_first_by_job_and_rank_and_other_python_by_its_cpu() -> None:
    found = [
        candidate(5, words=("python", "etl.py"), cpu=0.4),
        candidate(6, words=("python", "busy.py"), cpu=0.9),
        candidate(7, words=("python", "idle.py"), cpu=BUSY_CPU / 2),
        candidate(12, rank=1, on_gpu=True),
        candidate(11, rank=0, on_gpu=True),
        candidate(3, words=("python", "notebook.py"), torch=True, cpu=0.0),
    ]
    assert pids(ranked(found)) == [3, 11, 12, 6, 5]


def test_jobs_of_one_name_are_not_mixed() -> None:
    """Two launchers ran the same script. Ranks may have shells of their own above them."""
    found = [candidate(20 + n, 50 - n, rank=n % 2, on_gpu=True) for n in range(4)]
    found = [replace(one, identity=replace(one.identity, lineage=f"port {one.pid // 22}")) for one in found]
    listed = ranked(found)
    assert pids(listed) == [20, 21, 22, 23]
    table = pick.candidate_lines(listed, 0, numbered=True)
    assert [line.split()[3] for line in table[1:]] == ["ddp", "ddp", "ddp#2", "ddp#2"]
    assert pick._default(listed) == "1-2"


def test_launchers_shells_and_workers_are_left_out() -> None:
    launcher = candidate(10, words=("python", "-m", "torch.distributed.run", "train.py"), torch=True)
    ranks = [candidate(11, 10, rank=0, torch=True), candidate(12, 10, rank=1, torch=True)]
    worker = candidate(13, 11, rank=0, torch=True)
    spawned = candidate(14, 11, ("python", "-c", "from multiprocessing.spawn import spawn_main"), 0, torch=True)
    assert pids(ranked([launcher, *ranks, worker, spawned])) == [11, 12]
    # srun sh -c "python train.py": the shell has the rank's environment.
    shell = candidate(20, words=("sh", "-c", "python train.py"), rank=0, python=False)
    assert pids(ranked([shell, candidate(21, 20, rank=0, on_gpu=True)])) == [21]
    # A process that starts the ranks by fork is on no GPU itself.
    assert pids(ranked([candidate(30), candidate(31, 30, on_gpu=True), candidate(32, 30, on_gpu=True)])) == [31, 32]


def test_few_of_the_others_are_listed() -> None:
    many = [candidate(100 + n, words=("python", f"{n}.py"), cpu=1.0 + n) for n in range(MAX_OTHERS + 5)]
    assert pids(ranked(many)) == list(range(100 + MAX_OTHERS + 4, 104, -1))


def match(pid: int, parent: int, *words: str, on_gpu: bool = False, python: bool = True) -> Match:
    return Match(pid, parent, words, on_gpu, python)


@pytest.mark.parametrize(
    ("matches", "chosen", "roots"),
    [
        # torchrun and its ranks; a rank and its data-loader workers
        (
            [
                match(1, 0, "torchrun", "t.py"),
                match(2, 1, "python", "t.py", on_gpu=True),
                match(3, 1, "python", "t.py"),
            ],
            [2, 3],
            [1],
        ),
        ([match(2, 1, "python", "t.py", on_gpu=True), match(3, 2, "python", "t.py", on_gpu=True)], [2], [2]),
        ([match(2, 1, "python", "t.py"), match(3, 2, "python", "t.py")], [2], [2]),
        # forked ranks are on GPUs, who forked them is not
        ([match(2, 1, "python", "t.py"), match(3, 2, "python", "t.py", on_gpu=True)], [3], [2]),
        # a shell, an editor, a pager
        ([match(2, 1, "sh", "-c", "python t.py", python=False), match(3, 2, "python", "t.py")], [3], [2]),
        ([match(2, 1, "vim", "t.py", python=False), match(3, 1, "python", "t.py")], [3], [2, 3]),
        ([match(2, 1, "./solver", "t.py", python=False), match(3, 1, "vim", "t.py", python=False)], [2, 3], [2, 3]),
        ([], [], []),
    ],
)
def test_whom_a_name_means(matches: list[Match], chosen: list[int], roots: list[int]) -> None:
    assert choose_matches(matches) == chosen
    assert choose_matches(matches, roots=True) == roots


def test_argus_itself_is_no_target() -> None:
    for line in ("/usr/bin/python3 /srv/.venv/bin/argus trace --name t.py", "argus run -- t.py",
                 "python -m argus.cli.main trace", "python -u -m argus.store.engine /x"):  # fmt: skip
        assert is_argus(line.split()), line
    for line in ("python train.py --log argus", "python /srv/argus/train.py", "python argus_train.py"):
        assert not is_argus(line.split()), line


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("python -u /srv/ddp.py --lr 1", "ddp"),
        ("/opt/conda/bin/python3.11 -X dev -W ignore train.py", "train"),
        ("python -m pkg.train --config conf.py", "train"),
        ("python -m pkg.__main__", "pkg"),
        ("python -m cProfile -o out ddp.py", "ddp"),
        ("python -m torch.distributed.run --nproc-per-node 2 ddp.py", "ddp"),
        ("python ./train --lr 1", "train"),
        ("python -c print(1)", "python"),
        ("./solver --input mesh.h5", "solver"),
        ("wrapper ddp.py", "ddp"),
        ("", ""),
    ],
)
def test_what_a_command_line_runs(line: str, name: str) -> None:
    assert script_name(line.split()) == name


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1", (1,)), ("1,3", (1, 3)), ("2-4", (2, 3, 4)), ("1 3", (1, 3)), ("all", (1, 2, 3, 4)), ("3-3,1", (1, 3)),
        ("", ()), ("0", ()), ("5", ()), ("3-1", ()), ("1-", ()), ("x", ()), ("1,x", ()), ("²", ()),
    ],
)  # fmt: skip
def test_choices(answer: str, expected: tuple[int, ...]) -> None:
    assert pick.parse_choice(answer, 4) == expected


FOUND = [candidate(11, rank=0, on_gpu=True), candidate(12, rank=1, on_gpu=True), candidate(5, cpu=-1.0)]


def test_where_nobody_can_be_asked_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArgusError, match="nothing to trace was named") as failure:
        pick.pick_pids("trace", lambda: FOUND)
    assert failure.value.exit_code == EXIT_USAGE
    assert "argus trace PID" in failure.value.hint
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["pid", "rank", "job", "user", "CPU", "age", "command"]
    assert lines[1].split() == ["11", "0", "ddp", "ana", "50%", "1m30s", "python", "train.py"]
    assert lines[3].split()[:5] == ["5", "-", "ddp", "ana", "-"]
    with pytest.raises(ArgusError, match="no training process was found"):
        pick.pick_pids("dump", list)


def test_on_a_terminal_one_chooses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    asked: list[str] = []

    def answers(*words: str) -> None:
        left = iter(words)

        def prompt(_text: str, *, default: str) -> str:
            asked.append(default)
            return next(left) or default

        monkeypatch.setattr(click, "prompt", prompt)

    answers("")
    assert pick.pick_pids("trace", lambda: FOUND) == (11, 12)
    assert asked == ["1-2"], "all ranks of the first job are offered"
    answers("9", "3")
    assert pick.pick_pids("trace", lambda: FOUND) == (5,)
    assert "'9' is none of them" in capsys.readouterr().err
    answers("q")
    with pytest.raises(click.Abort):
        pick.pick_pids("trace", lambda: FOUND)


def test_lines_fit_a_terminal() -> None:
    long = candidate(1, words=("python", "x" * 300, "\x1b[31m"))
    assert max(map(len, pick.candidate_lines([long], 80, numbered=True))) <= 80
    assert "\x1b" not in pick.candidate_lines([long], 0, numbered=False)[1]
