"""Each panel: its numbers are those that its SQL answers, and what a finding names stands out."""

from __future__ import annotations

import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import gaussian_kde

from argus.diagnose.stored import examine_store
from argus.report.arrays import UNKNOWN, Arrays
from argus.report.build import build_page
from argus.report.look import Look
from argus.report.panels import environment, heatmap, mesh
from argus.report.panels.kernels import density
from argus.report.panels.order import PANELS
from argus.simulate.mesh import Mesh
from argus.store.open import Store
from argus.store.reader import latest_run, query_columns
from tests.builders.report_jobs import SLOW, simulate
from tests.unit.report.conftest import Made, Pages, near

JOBS = ("slow", "hung", "well", "one", "extreme")


@pytest.mark.thorough(first=2)
@pytest.mark.parametrize("job", JOBS)
def test_every_query_of_every_panel_runs(pages: Pages, job: str) -> None:
    made = pages(job)
    ran = 0
    for panel in made.page["panels"]:
        for number, sql in enumerate(panel["sql"]):
            assert sql["title"]
            made.rows(panel["id"], number)
            ran += 1
    assert ran >= 8


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize("job", JOBS)
def test_every_panel_is_there_or_says_why_not(pages: Pages, job: str) -> None:
    panels = pages(job).page["panels"]
    assert [panel["id"] for panel in panels] == [module.ID for module in PANELS]
    for panel in panels:
        assert bool(panel["absent"]) != bool(panel["views"]), panel["id"]
        assert all(view.get("bars", True) for view in panel["views"]), panel["id"]
        assert "could not be" not in panel["absent"], panel
        assert "\n" not in panel["absent"]
        assert panel["table"] is None or len(panel["table"]["rows"]) <= 50
        for row in panel["table"]["rows"] if panel["table"] else []:
            assert len(row) == len(panel["table"]["columns"])  # type: ignore[index]


def test_what_a_job_lacks_is_named_with_what_to_do(pages: Pages) -> None:
    absent = {panel["id"]: panel["absent"] for panel in pages("extreme").page["panels"]}
    assert "argus run" in absent["kernels"]
    assert "argus health" in absent["health"]
    assert "argus run" in absent["phases"]
    assert absent["links"]
    assert not absent["heatmap"]
    assert not absent["steps"]


def test_cells_of_the_heat_map_are_what_the_query_answers(slow: Made) -> None:
    view = slow.view("heatmap")
    assert view["full"]
    rows = [row["rank"] for row in view["rows"]]
    for measure, (number, column) in {
        "step": (0, "step_ns"),
        "computing": (3, "compute_ns"),
        "idle": (3, "idle_ns"),
    }.items():
        shown = next(one for one in view["measures"] if one["key"] == measure)
        cells = slow.array(shown["cells"])
        assert cells.shape == (8, len(view["edges"]) - 1)
        answer = slow.rows("heatmap", number)
        part = (answer[column].astype(float) - shown["low"]) / (shown["high"] - shown["low"])
        expected = np.rint(np.clip(part, 0, 1) * 254)
        got = cells[[rows.index(rank) for rank in answer["rank"].tolist()], answer["place"]]
        assert np.abs(got - expected).max() <= 1
        assert len(answer["rank"]) == (cells != UNKNOWN).sum()


def test_the_named_rank_is_pinned_and_bright(slow: Made) -> None:
    view = slow.view("heatmap")
    assert [row["rank"] for row in view["rows"] if row["pinned"]] == [SLOW]
    assert {row["group"] for row in view["rows"]} == {"stage 0", "stage 1"}
    computing = next(one for one in view["measures"] if one["key"] == "computing")
    cells = slow.array(computing["cells"])
    brightest = cells[:, 45:].mean(axis=1)
    assert view["rows"][int(np.argmax(brightest))]["rank"] == SLOW
    assert [mark["step"] for mark in view["marks"]] == [slow.page["verdict"]["findings"][0]["steps"][0]]


@pytest.mark.thorough
def test_the_measure_in_which_the_named_rank_stands_out_comes_first(slow: Made, pages: Pages) -> None:
    # All ranks of a step wait for the slow one: by step times it is like the others.
    assert slow.view("heatmap")["measures"][0]["key"] == "computing"
    assert pages("well").view("heatmap")["measures"][0]["key"] == "step", "nobody is named"


def test_the_critical_path_is_one_thing_after_the_other(slow: Made) -> None:
    view = slow.view("critical_path")
    spans = sorted(span for track in view["tracks"] for span in track["spans"])
    assert 0 <= spans[0][0] < spans[-1][1] / 500, "what is too short to be drawn is left out"
    for before, after in pairwise(spans):
        assert before[1] <= after[0] + 1
    table = slow.panel("critical_path")["table"]
    assert table is not None
    by_rank: dict[int, float] = {}
    for row in table["rows"]:
        by_rank[int(row[0])] = by_rank.get(int(row[0]), 0.0) + float(row[4])  # type: ignore[arg-type]
    assert max(by_rank, key=lambda rank: by_rank[rank]) == SLOW
    assert sum(float(row[5]) for row in table["rows"]) == pytest.approx(1.0, abs=0.02)  # type: ignore[arg-type]
    assert sum(by_rank.values()) == pytest.approx(spans[-1][1], rel=0.02)
    assert [track["title"] for track in view["tracks"] if any(span[3] for span in track["spans"])] == [
        title for title in (track["title"] for track in view["tracks"]) if title.startswith(f"rank {SLOW} ")
    ]


def test_lateness_is_the_most_of_a_step(slow: Made) -> None:
    view = slow.view("heatmap")
    late = next(one for one in view["measures"] if one["key"] == "lateness")
    cells = slow.array(late["cells"])
    answer = slow.rows("heatmap", 2)
    rows = [row["rank"] for row in view["rows"]]
    most = np.full(cells.shape, np.nan)
    for rank, step, peak in zip(*(answer[name].tolist() for name in ("rank", "step", "peak_ns")), strict=True):
        row = rows.index(rank)
        most[row, step] = np.fmax(most[row, step], max(peak, 0.0))
    assert np.array_equal(np.isnan(most), cells == UNKNOWN)
    part = np.rint(np.clip((most - late["low"]) / (late["high"] - late["low"]), 0, 1) * 254)
    assert np.nanmax(np.abs(np.where(np.isnan(most), np.nan, cells) - part)) <= 1
    assert np.nanmax(part) > 20


@pytest.mark.parametrize("columns", [16, 7])
def test_a_single_extreme_cell_survives(pages: Pages, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    made = pages("extreme")
    monkeypatch.setattr(heatmap, "MOST_COLUMNS", columns)
    look = Look(made.store, "extreme", 1, 0, examine_store(made.store, "extreme", 1))
    arrays = Arrays()
    panel = heatmap.build(look, arrays)
    view = panel["views"][0]
    assert view["view"] == "heatmap"
    assert not view["full"]
    cells = Made(made.store, made.page, arrays.packed()).array(view["measures"][0]["cells"])
    column = next(c for c in range(columns) if view["edges"][c] <= 237 < view["edges"][c + 1])
    assert cells.shape == (6, len(view["edges"]) - 1)
    assert view["edges"][-1] == 400
    assert cells[3, column] == 254
    others = np.delete(cells.ravel(), 3 * cells.shape[1] + column)
    assert others.max() < 100
    assert panel["table"] is not None
    assert panel["table"]["rows"][0][1] == 3
    assert panel["table"]["rows"][0][5] == pytest.approx(95e6)


def test_two_columns_become_one_and_keep_the_highest() -> None:
    values = np.array([[1.0, 9.0, 3.0], [np.nan, 4.0, np.nan]], np.float32)
    assert np.array_equal(heatmap.pooled(values), [[9.0, 3.0], [4.0, np.nan]], equal_nan=True)


def test_cells_that_compress_badly_get_fewer_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).random((64, 128), np.float32)
    values[7, 99] = 30.0
    monkeypatch.setattr(heatmap, "MOST_BYTES", 3_000)
    width, cells, packed = heatmap._fitted([heatmap.Cells("step", values)], 1, 0.0)
    assert width > 1
    assert cells[0].values.shape[1] == -(-128 // width)
    assert packed[0][2][7, 99 // width] == 254


@pytest.mark.parametrize("slow", ["steps", "ranks"])
def test_the_scale_ends_with_the_slower_of_two_regimes(slow: str) -> None:
    """Half of the steps, or of the ranks, take half as long again: that is no noise to leave room above."""
    values = np.random.default_rng(5).normal(100.0, 1.0, (32, 120)).astype(np.float32)
    half = values[:, 60:] if slow == "steps" else values[16:]
    half *= 1.5
    scale = heatmap.scale_of(values)
    assert scale.high == pytest.approx(values.max())
    assert scale.low == pytest.approx(values.min())


def test_the_scale_shows_outliers_and_the_usual_spread() -> None:
    usual = np.random.default_rng(5).normal(100.0, 1.0, 10_000).astype(np.float32)
    one = heatmap.scale_of(np.append(usual, np.float32(120.0)))
    assert one.high == pytest.approx(120.0)
    assert not one.above
    levels = one.levels(usual, 254)
    assert 10 < levels.std() < 60
    far = heatmap.scale_of(np.append(usual, np.float32(10_000.0)))
    assert far.high < 200
    assert far.above == 1
    assert (
        heatmap.scale_of(np.full(5, np.nan, np.float32)).levels(np.full(5, np.nan, np.float32), 254).tolist()
        == [255] * 5
    )


@pytest.mark.parametrize("stages", [True, False])
def test_a_mesh_that_is_mostly_empty_is_drawn_rank_after_rank(stages: bool) -> None:
    """Rows say whatever their writer chose: a stage of its own for each data-parallel rank, or a node for each rank but
    one node's."""
    ranks = np.arange(20_000)
    own = ranks if stages else np.zeros_like(ranks)
    hosts = {rank: "" if rank < 10_000 else str(rank) for rank in ranks.tolist()}
    look: Any = SimpleNamespace(stages=stages, place=SimpleNamespace(host=hosts))
    row, column, rows, columns, _ = mesh._grid(look, ranks, own, ranks)
    assert len(rows) * len(columns) < 20_000 + mesh.MOST_LANES
    assert len({*zip(row.tolist(), column.tolist(), strict=True)}) == len(ranks)
    assert rows[1] == f"from rank {mesh.MOST_LANES}"


def test_the_mesh_has_the_slowest_of_each_worker(slow: Made) -> None:
    view = slow.view("mesh")
    cells = slow.array(view["cells"])
    assert cells.shape == (2, 2)
    answer = slow.rows("mesh")
    own, computing = (
        dict(zip(answer["rank"].tolist(), answer[name].tolist(), strict=True)) for name in ("own_ns", "computing_ns")
    )
    stages = [[0, 1, 2, 3], [4, 5, 6, 7]]
    for stage, ranks in enumerate(stages):
        usual, whole = (sorted(times[rank] for rank in ranks)[1] for times in (computing, own))
        slower = {rank: 1 + max(computing[rank] - usual, own[rank] - whole) / usual for rank in ranks}
        assert near(cells[stage], [max(slower[ranks[at]], slower[ranks[at + 1]]) for at in (0, 2)])
    assert cells[1, 0] == cells.max() > 1.1
    assert f"rank {SLOW} " in view["details"][1][0]
    assert slow.panel("mesh")["table"]["rows"][0][0] == SLOW  # type: ignore[index]


def test_step_times_are_what_the_query_answers(slow: Made) -> None:
    view, answer = slow.view("steps"), slow.rows("steps")
    by_role = {line["role"]: slow.array(line["y"]) for line in view["lines"]}
    assert near(by_role["typical"], answer["median_ns"])
    raw = query_columns(
        slow.store, f"SELECT step, groupArray(duration_ns) AS took FROM iterations WHERE job = 'slow' AND run = "
        f"{slow.page['run']} GROUP BY step ORDER BY step"
    )  # fmt: skip
    for role, part in (("low", 0.05), ("typical", 0.5), ("high", 0.95)):
        assert near(by_role[role], [np.quantile(took, part) for took in raw["took"].tolist()])
    assert near(by_role["low"], answer["low_ns"])
    assert near(by_role["high"], answer["high_ns"])
    assert slow.array(view["x"]).tolist() == answer["from_step"].tolist()
    named = slow.rows("steps", 1)
    assert near(by_role["named"], named["longest_ns"][np.argsort(named["place"])])
    since = slow.page["verdict"]["findings"][0]["steps"][0]
    assert near(by_role["baseline"], np.median(answer["median_ns"][:since]))


def test_phases_add_up_to_a_step(slow: Made) -> None:
    view, answer = slow.view("phases"), slow.rows("phases")
    named = next(row for row in view["rows"] if row["named"])
    assert named["title"].startswith(f"GPU: rank {SLOW} ")
    own = answer["rank"] == SLOW
    assert sum(named["values"]) == pytest.approx(answer["mean_ns"][own].sum())
    backward = {row["title"]: row["values"][view["parts"].index("backward")] for row in view["rows"]}
    assert backward[named["title"]] > 1.05 * backward["GPU: median of all ranks"]
    table = slow.panel("phases")["table"]
    assert table is not None
    times = answer["mean_ns"][answer["phase"] == "backward"]
    (row,) = [row for row in table["rows"] if row[:2] == ["GPU", "backward"]]
    assert row[2:6] == pytest.approx([*np.quantile(times, (0.05, 0.5, 0.95)), times.max()])
    assert row[6] == SLOW


def test_kernels_compare_the_named_rank_with_its_peers(slow: Made) -> None:
    panel = slow.panel("kernels")
    answer = slow.rows("kernels")
    assert panel["table"] is not None
    name, rank, _, mean, usual, ratio, *_ = panel["table"]["rows"][0]
    assert rank == SLOW
    chosen = (answer["kernel"] == name) & (answer["rank"] == SLOW)
    by_rank = answer["spent_ns"][chosen].sum() / answer["launches"][chosen].sum()
    same = {row[0] for row in panel["table"]["rows"] if row[0] == name}
    assert same
    assert mean == pytest.approx(by_rank, rel=0.2)
    assert ratio == pytest.approx(mean / usual)  # type: ignore[operator]
    assert ratio > 1.1  # type: ignore[operator]
    # The store decodes the same durations.
    decoded = slow.rows("kernels", 1)
    assert decoded["kernel"].tolist()[0] == name
    assert decoded["rank"][0] == SLOW
    for curve in slow.view("kernels")["curves"]:
        x, y = slow.array(curve["x"]).astype(float), slow.array(curve["y"]).astype(float)
        assert np.trapezoid(y, np.log(x)) == pytest.approx(1.0, abs=0.05)
    named = next(curve for curve in slow.view("kernels")["curves"] if curve["named"])
    peer = next(curve for curve in slow.view("kernels")["curves"] if not curve["named"])
    at = [slow.array(one["x"])[int(np.argmax(slow.array(one["y"])))] for one in (named, peer)]
    assert at[0] > 1.1 * at[1]


def test_a_density_of_equal_durations_has_a_width() -> None:
    grid = np.linspace(float(np.log(900)), float(np.log(1100)), 2001, dtype=np.float64)
    for spread_ns in (0.0, 1e-3):
        curve = density(np.asarray([1000.0 + one * spread_ns for one in range(64)]), grid)
        assert np.trapezoid(curve, grid) == pytest.approx(1.0, abs=0.01)
        assert grid[int(np.argmax(curve))] == pytest.approx(np.log(1000), abs=1e-3)


def test_a_density_is_scipys() -> None:
    durations = np.exp(np.random.default_rng(11).normal(10.0, 0.3, 64))
    grid = np.linspace(8.5, 11.5, 200)
    assert near(density(durations, grid), gaussian_kde(np.log(durations))(grid))


def test_bandwidth_is_what_nccls_tests_define(slow: Made) -> None:
    panel, answer = slow.panel("communicators"), slow.rows("communicators")
    assert panel["table"] is not None
    checked = 0
    for dimension, op, _, calls, sent, took, bandwidth, group in panel["table"]["rows"]:
        own = (answer["comm_group"].astype(str) == group) & (answer["op"] == op) & (answer["bytes"] == sent)
        assert took in answer["took_ns"][own].tolist()
        assert calls in answer["calls"][own].tolist()
        if op == "AllReduce" and dimension in ("tp", "dp"):
            assert bandwidth == pytest.approx(sent * 2 * (2 - 1) / 2 / took * 1e9)  # type: ignore[operator]
            checked += 1
    assert checked
    assert slow.view("communicators")["bars"]


def test_others_wait_for_the_named_rank(slow: Made) -> None:
    view, answer = slow.view("waits"), slow.rows("waits")
    cells = slow.array(view["cells"])
    assert near(cells.sum(), answer["waited_ns"].sum() / answer["steps"][0])
    assert view["columns"][int(np.argmax(cells.sum(axis=0)))] == str(SLOW)
    row, column = view["rows"].index("4"), view["columns"].index(str(SLOW))
    pair = (answer["rank"] == 4) & (answer["waited_for"] == SLOW)
    assert near(cells[row, column], answer["waited_ns"][pair].sum() / answer["steps"][0])


def test_the_flame_graph_shows_what_the_rank_does_more(slow: Made) -> None:
    view = slow.view("flame")
    frames = view["frames"]
    assert all(frame["parent"] < at for at, frame in enumerate(frames))
    assert [frame["parent"] for frame in frames].count(-1) == 1
    answer = slow.rows("flame")
    tokenize = next(frame for frame in frames if frame["name"].startswith("tokenize"))
    matmul = next(frame for frame in frames if frame["name"].startswith("matmul"))
    assert tokenize["change_ns"] == tokenize["total_ns"] > 0
    assert abs(matmul["change_ns"]) < 0.2 * matmul["total_ns"]
    assert tokenize["language"] == "python"
    assert matmul["language"] == "native"
    share = {"tokenize": 0, "matmul": 0}
    for text, total in zip(answer["stack"].tolist(), answer["total_ns"].tolist(), strict=True):
        share["tokenize" if "tokenize" in text else "matmul"] += int(total)
    assert tokenize["total_ns"] / matmul["total_ns"] == pytest.approx(share["tokenize"] / share["matmul"])
    assert sum(frame["self_ns"] for frame in frames) == pytest.approx(frames[0]["total_ns"])


def test_what_if_bars_are_the_verdicts(slow: Made) -> None:
    bars = {bar["title"]: bar for bar in slow.view("whatif")["bars"]}
    whatif = slow.page["verdict"]["whatif"]
    assert bars["the whole job"]["value"] == whatif["S"]
    assert bars[f"rank {SLOW}"]["value"] == whatif["S_rank"][str(SLOW)]
    assert bars[f"rank {SLOW}"]["named"]
    assert slow.view("whatif")["least"] == 0.1, "a job without anything slow has no long bars"


@pytest.mark.thorough
def test_kernels_of_a_rank_that_others_do_not_wait_for_are_no_reason(slow: Made, report_store: Store) -> None:
    """A rank that loads data for longer has some kernel that takes a trifle longer than on its peers."""
    assert f"in which rank {SLOW} on" in slow.panel("kernels")["lead"]
    simulate(report_store, "loading", Mesh(dp=4), "data_loading:ranks=2", kernels=4)
    page, _ = build_page(report_store, *latest_run(report_store, "loading"), keep=False)
    assert page["verdict"]["findings"][0]["ranks"] == [2]
    lead = next(one["lead"] for one in page["panels"] if one["id"] == "kernels")
    assert "kernels of rank 2 on node0000 are as fast as those of its peers" in lead
    assert "loses most" not in lead


def test_one_loss_has_one_figure_and_others_say_what_they_are_of(slow: Made) -> None:
    """The verdict's; the mesh has a rank's own time, waits what computing hides, what-if another ideal."""
    slowdown = float(slow.page["verdict"]["slowdown"])
    lead = slow.panel("steps")["lead"]
    found = re.search(r"takes ([0-9.]+) ms, of which ([0-9.]+) ms are lost: the ([0-9.]+)x of the verdict", lead)
    assert found is not None, lead
    takes, lost, shown = map(float, found.groups())
    assert shown == pytest.approx(slowdown, abs=0.005)
    assert lost == pytest.approx(takes * (1 - 1 / slowdown), rel=0.01)
    for ident in ("mesh", "waits", "whatif"):
        assert f"{shown:.2f}x" in slow.panel(ident)["lead"], ident
    assert "computing hides" in slow.panel("waits")["lead"]
    assert "mean of all with the same work" in slow.panel("whatif")["lead"]


def test_a_page_without_a_loss_speaks_of_none(pages: Pages) -> None:
    well = pages("well")
    assert well.page["verdict"]["status"] == "healthy"
    assert not [one["id"] for one in well.page["panels"] if "of the verdict" in one["lead"]]


def test_bandwidths_say_what_they_are_compared_with(slow: Made, pages: Pages) -> None:
    assert "the only one of its kind" in pages("well").panel("communicators")["lead"]
    lead, bars = slow.panel("communicators")["lead"], slow.view("communicators")["bars"]
    assert "median of its kind" in lead
    assert "what the links could do is not known" in lead
    several = [bar["detail"] for bar in bars if bar["title"].startswith("tp ")]
    assert several
    assert all("median of 4 such communicators" in text for text in several)
    assert "compared with nothing" in next(bar["detail"] for bar in bars if bar["title"].startswith("world "))


def test_nodes_that_are_not_well_come_first(slow: Made) -> None:
    facts = slow.view("health")["facts"]
    assert facts[0]["state"] == "bad"
    assert "97 C" in facts[0]["text"]
    assert "clean the fans" in facts[0]["text"]
    assert "gpu_heat" in facts[0]["name"]
    assert any(fact["name"] == "well" and "1 check" in fact["text"] for fact in facts)
    table = slow.panel("health")["table"]
    assert table is not None
    assert [row[-1] for row in table["rows"]] == [61.0, 97.0]


def test_the_environment_has_what_is_stored(slow: Made) -> None:
    facts = {fact["name"]: fact["text"] for fact in slow.view("environment")["facts"]}
    assert facts["ranks"].startswith("8 ranks on 1 host")
    assert "tp: 4 of 2 ranks each" in facts["communicators"]
    assert "world: 1 of 8 ranks each" in facts["communicators"]
    table = slow.panel("environment")["table"]
    assert table is not None
    assert table["rows"] == [
        ["cpu.governor", "performance", "7 processes", "rank 0-4,6,7"],
        ["cpu.governor", "powersave", "1 process", f"rank {SLOW}"],
        ["torch.version", "2.10", "8 processes", "rank 0-7"],
        ["driver", "570.1", "1 node", table["rows"][3][3]],
    ]
    changed = [fact["text"] for fact in slow.view("environment")["facts"] if fact["name"] == "changed"]
    before = slow.page["run"] - 1
    assert changed == [
        f"cpu.governor: performance | powersave, in run {before}: not set",
        f"env.NCCL_ALGO: not set, in run {before}: Ring",
        f"torch.version: 2.10, in run {before}: 2.9",
    ]
    states = {fact["state"] for fact in slow.view("environment")["facts"] if fact["name"] in ("changed", "libraries")}
    assert states == {""}, "the page would say that it is not known"


def test_settings_are_no_more_than_other_tables_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are not alike are among them."""
    every = {
        "fact": np.array([f"env.NCCL_{number:02}" for number in range(80)] + ["env.NCCL_99"] * 2, object),
        "value": np.array(["0"] * 80 + ["0", "1"], object),
        "processes": np.array([8] * 80 + [7, 1]),
        "some_ranks": np.array([list(range(8))] * 80 + [list(range(7)), [7]], object),
    }
    none = {name: np.array([], object) for name in ("key", "value", "hosts", "some_hosts")}
    look: Any = SimpleNamespace(read=lambda text: every if "environment_facts" in text else none)
    table = environment._settings(look)
    assert table is not None
    assert (len(table["rows"]), table["of"]) == (50, 82)
    assert [row[:2] for row in table["rows"][:2]] == [["env.NCCL_99", "0"], ["env.NCCL_99", "1"]]


def test_every_table_says_how_many_rows_there_are(pages: Pages) -> None:
    found = [panel["table"] for panel in pages("slow").page["panels"] if panel["table"] is not None]
    assert len(found) > 5
    assert all(len(table["rows"]) <= min(table["of"], 50) for table in found)
    assert any(len(table["rows"]) < table["of"] for table in found)


def test_losses_are_in_the_terminals_words(slow: Made) -> None:
    facts = slow.view("coverage")["facts"]
    lost = next(fact for fact in facts if fact["name"] == "launches_dropped")
    assert lost["state"] == "bad"
    assert lost["text"].startswith("3 CUDA calls lost")
    assert next(fact for fact in facts if fact["name"] == "overhead")["text"].startswith("0.80% of the job's time")


def test_a_hang_has_its_rank_and_last_step(pages: Pages) -> None:
    made = pages("hung")
    hung = made.page["verdict"]["findings"][0]["ranks"]
    assert made.page["verdict"]["status"] == "hung"
    assert [row["rank"] for row in made.view("heatmap")["rows"] if row["pinned"]] == hung
    facts = {fact["name"]: fact["text"] for fact in made.view("hang")["facts"]}
    (missing,) = hung
    assert facts["did not come"] == f"rank {missing}"
    assert str(missing) not in facts["came"]
    bars = made.view("hang", 1)["bars"]
    assert [bar["named"] for bar in bars] == [True, False, False, False]
    assert bars[0]["title"].startswith(f"rank {missing} ")
    assert bars[0]["value"] >= 1 > bars[1]["value"]
    seq = dict(zip(made.rows("hang")["rank"].tolist(), made.rows("hang")["seq"].tolist(), strict=True))
    assert bars[0]["detail"] == f"its last call is number {seq[missing]}"
    assert made.page["summary"].startswith("Hung: no step since step")
