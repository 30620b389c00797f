"""Which record generation each CUPTI version writes, and what Argus asks CUPTI for."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argus.cupti import declared, layouts, shared
from argus.model.errors import ArgusError
from argus.system import child

cupti = pytest.importorskip("cupti.cupti")


# Sizes in bytes as the wheels' own structures have them: kernel, memcpy, memset, synchronization.
@pytest.mark.parametrize(
    ("version", "sizes"),
    [
        (22, (208, 88, 88, 40)),
        (24, (208, 88, 88, 40)),
        (26, (208, 96, 88, 56)),
        (28, (208, 96, 88, 56)),
        (130000, (216, 96, 88, 56)),
        (130001, (216, 96, 88, 56)),
        (130101, (224, 96, 88, 56)),
        (130200, (224, 96, 88, 56)),
        (130300, (232, 96, 88, 56)),
        (130401, (248, 112, 104, 56)),
        (130500, (248, 112, 104, 56)),
    ],
)
def test_sizes_are_those_of_the_version(version: int, sizes: tuple[int, ...]) -> None:
    known = layouts.for_version(version)
    table = known.table()
    names = ("CONCURRENT_KERNEL", "MEMCPY", "MEMSET", "SYNCHRONIZATION")
    assert tuple(table[known.kind(name)]["size"] for name in names) == sizes
    # The same in all of them.
    common = {"RUNTIME": 40, "DRIVER": 40, "MEMCPY2": 96, "OVERHEAD": 56, "JIT": 72, "MODULE": 24, "MARKER": 56}
    assert {name: int(table[known.kind(name)]["size"]) for name in common} == common


def test_names_are_where_the_record_points_at_text() -> None:
    known = layouts.for_version(130200)
    table = known.table()
    kernel = known.dtype(known.kind("CONCURRENT_KERNEL"))
    assert kernel.fields is not None
    assert table[known.kind("CONCURRENT_KERNEL")]["name"].tolist() == [kernel.fields["name"][1], 0]
    assert np.count_nonzero(table[known.kind("MARKER")]["name"]) == 2
    assert np.count_nonzero(table[known.kind("MEMCPY")]["name"]) == 0
    assert table.dtype == shared.LAYOUT
    assert len(table) == shared.MAX_KINDS


@pytest.mark.parametrize(
    ("version", "words"),
    [(140100, "CUPTI 14.1 is newer than this Argus knows"), (21, "is older"), (25, "no release"), (29, "no release")],
)
def test_an_unknown_version_is_refused_in_words(version: int, words: str) -> None:
    with pytest.raises(ArgusError, match=words):
        layouts.for_version(version)


def test_a_cupti_python_that_is_too_old_says_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    known = layouts.load()
    left = {name: dtype for name, dtype in known.dtypes.items() if name not in ("kernel9", "kernel13")}
    old = dataclasses.replace(known, dtypes=left)
    monkeypatch.setattr(layouts, "load", lambda: old)
    layouts._for_version.cache_clear()
    try:
        with pytest.raises(ArgusError, match=r"cupti-python>=13\.4\.0"):
            layouts.for_version(130400)
        with pytest.raises(ArgusError, match=r"cupti-python>=13\.3\.1"):
            layouts.for_version(26)
        assert layouts.for_version(130200).generations["CONCURRENT_KERNEL"] == "kernel11"
    finally:
        layouts._for_version.cache_clear()


@pytest.fixture
def asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own."""
    monkeypatch.setenv("ARGUS_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(0o700)
    layouts._asked.cache_clear()
    yield tmp_path
    layouts._asked.cache_clear()


def test_without_cupti_python_there_is_a_hint(asked_anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (asked_anew / "cupti.py").write_text("raise ImportError('no CUPTI here')")
    monkeypatch.setenv("PYTHONPATH", str(asked_anew))
    with pytest.raises(ArgusError, match="no CUPTI here") as refused:
        layouts.load()
    assert "pip install" in refused.value.hint
    monkeypatch.setattr(child, "ask", lambda *_: pytest.fail("the loop asks for each process"))
    with pytest.raises(ArgusError, match="no CUPTI here"):
        layouts.load()


def test_records_are_those_that_cupti_python_declares(asked_anew: Path) -> None:
    """Two ways: through JSON from another process, and from its own dtypes."""
    known = layouts.load()
    assert known.kinds == {one.name: int(one) for one in cupti.ActivityKind}
    for generation, dtype in known.dtypes.items():
        own = np.dtype(getattr(cupti, f"activity_{generation}_dtype"))
        assert dtype == own
        assert dtype.itemsize == own.itemsize
        assert {name: field[1] for name, field in dtype.fields.items()} == {
            name: field[1] for name, field in own.fields.items()
        }


def test_cupti_python_is_asked_once(asked_anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = layouts.load()
    monkeypatch.setattr(child, "ask", lambda *_: pytest.fail("it was asked again"))
    layouts._asked.cache_clear()
    assert layouts.load() == first
    (kept,) = (asked_anew / "cache").rglob("*.json")
    kept.write_bytes(kept.read_bytes()[:-1])
    layouts._asked.cache_clear()
    with pytest.raises(pytest.fail.Exception, match="again"):
        layouts.load()


def test_a_failure_is_asked_about_again_beside_the_loop(asked_anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a node that was too busy, or a package that is being replaced."""
    answers: list[Any] = [PermissionError("cupti is being replaced"), {"kinds": 1}]
    asked: list[str] = []

    def ask(*_: object) -> Any:
        asked.append(threading.current_thread().name)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def done() -> bool:
        layouts.load_ahead()
        assert layouts._loader is not None
        layouts._loader.join()
        return layouts.load_ahead()

    monkeypatch.setattr(declared, "ask", ask)
    monkeypatch.setattr(declared, "Declared", dict)
    monkeypatch.setattr(layouts, "Declared", dict)
    assert done()
    with pytest.raises(ArgusError, match="is being replaced"):
        layouts.load()
    assert done(), "not again at once"
    monkeypatch.setattr(layouts, "_AGAIN_S", 0.0)
    assert not layouts.load_ahead()
    assert done()
    assert layouts.load() == {"kinds": 1}
    assert asked == ["argus-cupti-python"] * 2


def test_a_tracer_does_not_import_cupti_python() -> None:
    code = "import sys; from argus.cupti import layouts; layouts.for_version(130200); print('cupti' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_kernels_come_first_and_markers_only_when_asked() -> None:
    known = layouts.for_version(130200)
    assert known.kinds()[0] == known.kind("CONCURRENT_KERNEL")
    assert known.kind("MARKER") not in known.kinds()
    assert known.kind("MODULE") not in known.kinds()
    assert {known.kind("MARKER"), known.kind("MODULE")} <= set(known.kinds(markers=True, modules=True))
    # Single calls are chosen; where that cannot be, all of them are.
    assert known.kind("RUNTIME") not in known.kinds()
    assert known.kind("RUNTIME") in layouts.for_version(22).kinds()
    assert known.kind("RUNTIME") not in layouts.for_version(22).kinds(api=False)


def test_the_calls_that_launch_are_found_by_name() -> None:
    known = layouts.for_version(130200)
    runtime = {one.name for one in cupti.runtime_api_trace_cbid if int(one) in known.runtime_calls()}
    driver = {one.name for one in cupti.driver_api_trace_cbid if int(one) in known.driver_calls()}
    assert {"cudaLaunchKernel_v7000", "cudaLaunchKernel_ptsz_v7000", "cudaLaunchKernelExC_v11060"} <= runtime
    assert {"cudaGraphLaunch_v10000", "cudaMemcpyAsync_v3020", "cudaMemsetAsync_ptsz_v7000"} <= runtime
    assert {"cudaMemcpy_v3020", "cudaMemset_v3020", "cudaLaunchCooperativeKernel_v9000"} <= runtime
    assert not any("Graph" in name and "Launch" not in name for name in runtime)
    assert not any("HostFunc" in name for name in runtime | driver)
    assert driver == {
        f"cu{call}{suffix}"
        for call in ("LaunchKernel", "LaunchKernelEx", "LaunchCooperativeKernel", "GraphLaunch")
        for suffix in ("", "_ptsz")
    }
    assert len(known.runtime_calls()) < shared.MAX_CALLBACKS


def test_buffers_are_handed_out_zeroed() -> None:
    attributes = layouts.for_version(130200).attributes()
    assert attributes.dtype == shared.ATTRIBUTE
    assert attributes.tolist() == [(int(cupti.ActivityAttribute.ATTR_ZEROED_OUT_BUFFER), 1, 1)]
