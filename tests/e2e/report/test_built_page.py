"""The page of a real store in a real browser: every panel that is built for it is drawn."""

from __future__ import annotations

from pathlib import Path

from argus.report.build import build_page
from argus.report.panels.order import PANELS
from argus.store.open import open_store
from argus.store.reader import latest_run
from tests.builders.report_jobs import SLOW, write_slow
from tests.stores import new_store

from .conftest import Open, Write


def test_every_panel_that_is_built_is_drawn(visit: Open, write: Write, tmp_path: Path) -> None:
    with open_store(new_store(tmp_path)) as store, store.lease():
        write_slow(store)
        made, arrays = build_page(store, *latest_run(store, "slow"), keep=False)
    assert [panel["id"] for panel in made["panels"]] == [module.ID for module in PANELS]
    shown = [panel["id"] for panel in made["panels"] if not panel["absent"]]
    assert len(shown) >= 12
    page = visit().open(write((made, arrays)))
    assert page.eval_on_selector_all(".panel", "all => all.map(one => one.dataset.panel)") == shown
    assert page.locator(".absent dt").count() == len(made["panels"]) - len(shown)
    assert page.locator(".damaged, .nothing").count() == 0
    assert page.locator(".panel summary:has-text('SQL behind it')").count() == len(shown)
    assert page.locator(".verdict button.rank").first.inner_text() == f"rank {SLOW}"
    views = [view["view"] for panel in made["panels"] for view in panel["views"]]
    for view in set(views):
        assert page.locator(f".view-{view}").count() == views.count(view), view
