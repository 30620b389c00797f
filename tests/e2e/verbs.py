"""Every command of ``argus``, and how ``test_core.py`` runs it: on a job that runs, and on what is stored of it."""

from __future__ import annotations

from dataclasses import dataclass

import click


@dataclass(frozen=True)
class Case:
    """A command line without ``argus``; ``{names}`` are filled in by the test.

    Attributes:
        words: As in a shell.
        prints: A regular expression that its output matches somewhere.
        codes: Exit codes that are right.
        stores: Whether ``--store`` is added.
    """

    words: str
    prints: str
    codes: tuple[int, ...] = (0,)
    stores: bool = True


CASES = {
    # Of these three the fixture of test_core.py says how: they overlap.
    "trace": Case("trace {pids} --steps 60", r"2 ranks, [\d,]+ launches"),
    "flag": Case("flag --last 1s --why core", r"flagged 1 s of job"),
    "dump": Case("dump {pids}", r"^main: 2 threads", stores=False),
    "run": Case("run --job started -- {fakegpu}/fake_train --steps 20", r"next: argus diagnose"),
    "check": Case("check", r"\bBTF\b|bcc", stores=False),
    "arm": Case("arm", r"CUDA_INJECTION64_PATH=", stores=False),
    "diagnose": Case("diagnose --job fake_train", r"fake_train +2 ranks", codes=(0, 10, 11)),
    "serve": Case(
        "serve --listen 127.0.0.1:0", r"^serving chdb:.* at http://127\.0\.0\.1:\d+/#token=", codes=(143, -15)
    ),
    "report": Case("report --job fake_train -o {folder}/page.html", r"page\.html: .* job fake_train"),
    "stacks": Case("stacks --job fake_train", r"main"),
    "export": Case("export perfetto --job fake_train --last 60s -o {folder}/timeline.json.gz", r"events"),
    "sql": Case("""sql --format csv "SELECT uniqExact(rank) AS n FROM iterations WHERE job = 'fake_train'" """, r"^2$"),
    "simulate": Case("simulate --ranks 2 --steps 30 --job simulated", r"simulated"),
    "demo": Case("demo --seed 1", r"the first finding is right"),
    "import kineto": Case("import kineto {folder}/kineto --job kineto", r"kineto"),
    "import nsys": Case("import nsys {folder}/report.sqlite --job nsys", r"nsys"),
    "import whatif": Case("import whatif {folder}/made.parquet --meta {folder}/made.yaml", r"operations of \d+ ranks"),
    "import iterations": Case(
        "import iterations {folder}/times.csv --rank-column rank --step-column step --duration-column ms "
        "--phase data_loading=data --job times",
        r"times",
    ),
    "import flight-recorder": Case("import flight-recorder {folder}/dumps --job dumped", r"calls of \d+ rank"),
    "import ras": Case("import ras {folder}/ras.json --job ras", r"communicators? of \d+ ranks"),
    "import inspector": Case("import inspector {folder}/inspector --job inspected", r"collectives of \d+ comm"),
    "jobs": Case("jobs", r"^fake_train"),
    "compare": Case("compare simulated --against fake_train", r"^(CHANGED|SAME|INCONCLUSIVE).*"),
    "baseline set": Case("baseline set simulated", r"^simulated@\d+ is a baseline"),
    "baseline list": Case("baseline list", r"^simulated  2 ranks"),
    "baseline show": Case("baseline show simulated", r"^simulated@\d+: 2 ranks"),
    "baseline rm": Case("baseline rm simulated", r"is no longer a baseline"),
    "observe run": Case(
        "observe run --repeat 5 --out {folder}/observed -- true", r"report\.md$", codes=(0, 10, 12, 13), stores=False
    ),
    "observe report": Case("observe report {folder}/observed", r"report\.md$", codes=(0, 10, 12, 13), stores=False),
    "observe export": Case("observe export {folder}/observed --sanitize", r"sanitized\.zip: 4 files", stores=False),
    "observe doctor": Case("observe doctor", r"quiet", codes=(0, 13), stores=False),
    "explain": Case("explain hang", r"No rank makes progress", stores=False),
    "completion": Case("completion bash", r"_argus_completion", stores=False),
    "man": Case("man --out {folder}/man", r"", stores=False),
    "store init": Case("store init", r"schema"),
    "store load": Case("store load {folder}/spool", r"files loaded into"),
    "store status": Case("store status", r"jobs +\d+ jobs?, \d+ runs?"),
    "store rm": Case("store rm simulated --yes", r"simulated"),
    "health": Case("health --only memory --config {folder}/health.toml", r"memory|all is well", codes=(0, 1, 2, 3)),
    "health install-cron": Case("health install-cron --cron-file {folder}/argus-health", r"argus-health"),
    "health report": Case("health report --all --config {folder}/health.toml", r"nodes?:", codes=(0, 1, 2)),
}
"""By the words that name the command. A new verb gets a line here, or ``tests/unit/test_core.py`` fails."""


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[str]:
    """Every command that can be run, by the words that name it."""
    found = []
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group):
            found += [" ".join((*path, name))] * command.invoke_without_command
            found += commands(command, (*path, name))
        else:
            found.append(" ".join((*path, name)))
    return found
