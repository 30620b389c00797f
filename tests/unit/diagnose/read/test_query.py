"""SQL with its parameters put in, for people to run again."""

from __future__ import annotations

import re
import subprocess

import numpy as np
import pytest

from argus.diagnose.read.query import runnable_sql
from argus.store.open import Store
from argus.store.reader import query_columns


def test_numbers_keep_their_fractions() -> None:
    assert runnable_sql("SELECT {a:Float64}, {b:UInt32}", {"a": np.float64(0.02), "b": np.int64(3)}) == "SELECT 0.02, 3"


@pytest.mark.thorough(first=3)
@pytest.mark.parametrize(
    "name",
    [
        "plain", "a'b\\'c\\", "\\x41", "line\nrm -rf ~\n",
        "\x1b[201~\rrm -rf ~\r\x1b]0;x\x07\x9b2J\x00", "\u202etxt.exe\u2028",
        '"; touch owned; "', "$(touch owned)`touch owned`", "{job:String}", "=cmd|' /C calc'!A0", "ünï–",
    ],
)  # fmt: skip
def test_a_name_may_be_pasted_wherever_queries_are(bare: Store, name: str) -> None:
    sql = runnable_sql("SELECT {name:String} AS name", {"name": name})
    assert not re.search('["$`\x00-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2029]', sql)
    assert query_columns(bare, sql)["name"].tolist() == [name]
    if "\\" not in name:
        pasted = subprocess.run(["bash", "-c", f'printf %s "{sql}"'], capture_output=True, text=True, check=True)
        assert (pasted.stdout, pasted.stderr) == (sql, "")
