"""Every query of README, docs and help, in a store with two jobs of two runs: none mixes them or counts a row twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argus.cli.main import main
from argus.store.open import Store, open_store
from argus.store.reader import latest_run, query
from argus.store.schema_files import table_columns
from tests.unit.store.test_sql import url  # noqa: F401 - a store with one run of one job, llama's 1

ROOT = Path(__file__).parents[3]
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "cli").glob("*.py"))]
WITHOUT_LATEST = {
    "iteration_rollup", "iteration_rollup_feed", "kernel_summaries", "kernel_escapes", "kernel_templates",
    "raw_requests",
}  # fmt: skip
"""Tables that other views are made from, or that are written for Argus itself."""


def examples() -> Iterator[tuple[str, str, dict[str, str]]]:
    """(where, query, parameters) of each ```sql block and each ``argus sql "…"``."""
    for file in TEXTS:
        text = file.read_text()
        for number, sql in enumerate(re.findall(r"```sql\n(.*?)```", text, re.DOTALL)):
            if sql.startswith(("SELECT", "WITH")):
                yield f"{file.name}-{number}", sql, {}
        for number, (options, sql) in enumerate(re.findall(r'argus sql ((?:--\w+ \S+ )*)\\?"([^"]+)"', text)):
            if "SELECT " in sql and "…" not in sql and "{quoted" not in sql:
                values = dict(re.findall(r"--param (\w+)=(\S+)", options))
                yield f"{file.name}-line-{number}", sql.rstrip("\\").replace("\n", " "), values


EXAMPLES = list(examples())
Rows = list[dict[str, Any]]


def rows_of(store: Store, sql: str, values: dict[str, str]) -> Rows:
    return query(store, sql, values).to_pylist()


def add_other_runs(store: Store) -> None:
    """Llama's run 0 and both runs of another job, a day before, with three times the durations and mostly other ranks;
    and another version of each row that newer ones replace."""
    columns = {
        (row["table"], row["name"]): row["type"]
        for row in query(
            store, "SELECT table, name, type FROM system.columns WHERE database = currentDatabase()"
        ).to_pylist()
    }
    replacing = set(
        query(store, "SELECT name FROM system.tables WHERE engine = 'ReplacingMergeTree'").column("name").to_pylist()
    )
    with store.lease() as client:
        for table in table_columns():
            own = {name: kind for (of, name), kind in columns.items() if of == table}
            if not {"job", "run"} <= own.keys():
                continue
            client.command(f"SYSTEM STOP MERGES {table}")
            changed = []
            for name, kind in own.items():
                if name.endswith("_ns") and re.fullmatch(r"U?Int64", kind) and name not in ("mono_offset_ns",):
                    changed.append(f"{name} * 3 AS {name}")
                elif "DateTime64" in kind and "Array" not in kind:
                    changed.append(f"subtractDays({name}, 1) AS {name}")
            for job, run in (("llama", 0), ("other", 0), ("other", 1)):
                parts = [f"'{job}' AS job", f"toUInt32({run}) AS run", *changed]
                if "rank" in own and (job, run) != ("other", 1):
                    parts.append("toUInt32(rank + 10) AS rank")
                client.command(
                    # Within a subquery: a condition would mean the new names otherwise.
                    f"INSERT INTO {table} SELECT * REPLACE ({', '.join(parts)}) FROM"
                    f" (SELECT * FROM {table} WHERE job = 'llama' AND run = 1)"
                )
            if table in replacing:
                newer = " REPLACE (version + 1 AS version)" if "version" in own else ""
                client.command(
                    f"INSERT INTO {table} SELECT *{newer} FROM {table} WHERE job = 'llama' AND run = 1 "
                    "SETTINGS insert_deduplicate = 0"
                )


@pytest.fixture(scope="module")
def answers(url: str) -> Iterator[tuple[Store, dict[str, Rows]]]:  # noqa: F811
    """The store with all four runs, and what each example answered while there was one."""
    with open_store(url) as store:
        alone = {where: rows_of(store, sql, values) for where, sql, values in EXAMPLES}
        add_other_runs(store)
        yield store, alone


def comparable(rows: Rows) -> list[str]:
    return sorted(repr(sorted(row.items())) for row in rows)


def test_there_are_examples_everywhere() -> None:
    files = {where.split("-")[0] for where, *_ in EXAMPLES}
    assert files >= {"README.md", "sql.md", "stacks.md", "clocks.md", "import.md", "sql.py", "flag.py"}
    assert len(EXAMPLES) > 60


@pytest.mark.parametrize(("where", "sql", "values"), EXAMPLES, ids=[where for where, *_ in EXAMPLES])
def test_no_example_mixes_runs(
    answers: tuple[Store, dict[str, Rows]], where: str, sql: str, values: dict[str, str]
) -> None:
    store, alone = answers
    assert alone[where], "it found nothing"
    now = rows_of(store, sql, values)
    if comparable(now) == comparable(alone[where]):
        return
    assert {"job", "run"} <= now[0].keys(), "other runs have changed what it finds"
    of_the_run = [row for row in now if (row["job"], row["run"]) == ("llama", 1)]
    assert comparable(of_the_run) == comparable(alone[where]), "other runs have changed what it finds of one"


def test_the_same_queries_of_the_tables_themselves_would_mix_runs(answers: tuple[Store, dict[str, Rows]]) -> None:
    """That the examples are right is not for lack of rows that could be mixed."""
    store, alone = answers
    naive = {where: sql.replace("latest_", "") for where, sql, _ in EXAMPLES if "latest_" in sql}
    same = [where for where, sql in naive.items() if comparable(rows_of(store, sql, {})) == comparable(alone[where])]
    assert len(naive) > 50
    assert len(same) <= 1, "of shares alone, which equal jobs have alike"


def test_every_table_of_runs_has_a_view_of_the_newest(answers: tuple[Store, dict[str, Rows]]) -> None:
    store, _ = answers
    found = query(
        store,
        "SELECT table, groupArray(name) AS names FROM (SELECT * FROM system.columns WHERE database = currentDatabase()"
        " ORDER BY table, position) GROUP BY table",
    ).to_pylist()
    columns = {row["table"]: row["names"] for row in found}
    of_runs = {
        name
        for name, names in columns.items()
        if {"job", "run"} <= set(names) and not name.startswith("latest_") and name != "newest_runs"
    }
    missing = (
        of_runs - WITHOUT_LATEST - {name.removeprefix("latest_") for name in columns if name.startswith("latest_")}
    )
    assert missing == set(), "schemas/latest.sql: a table of runs needs a view latest_NAME"
    for name in of_runs - WITHOUT_LATEST:
        assert columns[f"latest_{name}"] == columns[name], f"latest_{name} lacks columns"


def test_the_run_is_the_one_that_every_verb_means(answers: tuple[Store, dict[str, Rows]]) -> None:
    store, _ = answers
    assert query(store, "SELECT job, run FROM latest_run").to_pylist() == [{"job": "llama", "run": 1}]
    assert latest_run(store) == ("llama", 1)
    newest = query(store, "SELECT job, run FROM newest_runs ORDER BY job").to_pylist()
    assert [(row["job"], row["run"]) for row in newest] == [("llama", 1), ("other", 1)]
    for row in newest:
        assert latest_run(store, row["job"]) == (row["job"], row["run"])


def test_rows_of_older_versions_are_not_counted(
    answers: tuple[Store, dict[str, Rows]], capsys: pytest.CaptureFixture[str]
) -> None:
    store, _ = answers
    sql = "SELECT count(), uniqExact(rank) FROM {} WHERE job = 'llama' AND run = 1 AND feature = 'gpu_times'"
    plain = query(store, sql.format("features")).to_pylist()[0]
    assert list(plain.values()) == [8, 4], "the table has two versions of each"
    assert list(query(store, sql.format("latest_features")).to_pylist()[0].values()) == [4, 4]
    # argus sql leaves them out by itself.
    assert main(["sql", "--store", store.url, "--format", "csv", sql.format("features")]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "4,4"


def test_what_is_read_is_chosen_by_the_run(answers: tuple[Store, dict[str, Rows]]) -> None:
    """Job and run reach the sorting key, also through views: a store of many runs is not read through."""
    store, _ = answers
    for view in ("latest_iterations", "latest_collectives_aligned", "latest_hot_lines"):
        plan = "\n".join(query(store, f"EXPLAIN indexes = 1 SELECT sum(rank) FROM {view}").column(0).to_pylist())
        assert "Condition: and((run in [1, 1]), (job in ['llama', 'llama']))" in plan, plan
