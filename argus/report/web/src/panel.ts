// A panel: title, lead, its views, the table beneath, the SQL behind it.

import { Damaged, type Arrays } from "./arrays.ts";
import type { Panel, Table, View } from "./contract.ts";
import { folded, h, query } from "./dom.ts";
import type { Context } from "./plot.ts";
import { counted } from "./units.ts";
import { bars, cellText, facts, stacked } from "./views/bars.ts";
import { densities } from "./views/densities.ts";
import { flame } from "./views/flame.ts";
import { graph, timeline } from "./views/graph.ts";
import { grid } from "./views/grid.ts";
import { heatmap, type Finer } from "./views/heatmap.ts";
import { series } from "./views/series.ts";

const WIDE = new Set(["heatmap", "flame", "timeline"]);

export function panelId(id: string): string {
  return `panel-${id.replace(/[^\w-]/g, "-").slice(0, 60)}`;
}

export function panel(one: Panel, arrays: Arrays, context: Context, finer: Finer): HTMLElement {
  const views = one.views ?? [], id = panelId(one.id), title = `${id}-title`;
  const wide = views.some(({ view }) => WIDE.has(view));
  return h("section", { class: wide ? "panel wide" : "panel", id, "data-panel": one.id, "aria-labelledby": title },
    h("h2", { id: title }, h("a", { href: `#${id}`, class: "plain", onclick: (event) => jump(event, id) }, one.title)),
    one.lead && h("p", { class: "lead" }, one.lead),
    views.map((each) => h("div", { class: `view view-${each.view}` }, drawn(each, arrays, context, finer))),
    one.table && table(one, one.table, context),
    (one.sql ?? []).length > 0 && folded("SQL behind it", `${id}-sql`, one.sql.map(({ title: name, text }) => [h("h4", {}, name), query(text)]).flat()));
}

/** To a part of the page, without the address losing what is looked at. */
export function jump(event: Event, id: string): void {
  event.preventDefault();
  const target = document.getElementById(id);
  target?.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  target?.querySelector<HTMLElement>("h2 a")?.focus({ preventScroll: true });
}

/** A view; one that cannot be drawn says why in one line, and the others stay. */
function drawn(view: View, arrays: Arrays, context: Context, finer: Finer): HTMLElement {
  try {
    return draw(view, arrays, context, finer);
  } catch (failure) {
    const why = failure instanceof Damaged ? failure.message : `what the page says of it cannot be drawn (${String((failure as Error).message).slice(0, 100)})`;
    return h("p", { class: "nothing damaged" }, `This picture is missing: ${why}.`);
  }
}

function draw(view: View, arrays: Arrays, context: Context, finer: Finer): HTMLElement {
  switch (view.view) {
    case "heatmap": {
      for (const measure of view.measures) {
        const cells = arrays.bytesOf(measure.cells);
        if (cells.length !== view.rows.length * Math.max(0, view.edges.length - 1)) throw new Damaged("its cells do not fit its ranks and steps");
      }
      return heatmap(view, arrays, context, finer);
    }
    case "series": return series(view, arrays, context);
    case "stacked": return stacked(view, context);
    case "bars": return bars(view, context);
    case "grid": return grid(view, arrays, context);
    case "densities": return densities(view, arrays, context);
    case "flame": return flame(view, context);
    case "graph": return graph(view, context);
    case "timeline": return timeline(view, context);
    case "facts": return facts(view);
    default: return h("p", { class: "nothing" }, `This picture is missing: this page knows no view "${String((view as { view: unknown }).view).slice(0, 40)}".`);
  }
}

function table(one: Panel, { columns, rows, of }: Table, { state }: Context): HTMLElement | null {
  if (!columns.length) return null;
  const ranks = columns.findIndex(({ title }) => title.toLowerCase() === "rank");
  const body = rows.map((row) => {
    const rank = ranks >= 0 && Number.isInteger(row[ranks]) ? (row[ranks] as number) : null;
    return h("tr", { "data-rank": rank }, row.map((value, i) => {
      const { unit } = columns[i] ?? { unit: "" }, number = typeof value === "number" || value === null;
      // A rank is a name, though it is written in digits.
      const text = i === ranks && rank !== null ? String(rank) : cellText(value, unit);
      const content = i === ranks && rank !== null
        ? h("button", { type: "button", class: "rank", "data-rank": rank, onclick: () => state.selectRank(rank) }, text) : text;
      return i === 0 ? h("th", { scope: "row", class: number ? "number" : "" }, content) : h("td", { class: number ? "number" : "" }, content);
    }));
  });
  const numeric = (i: number) => rows.length > 0 && rows.every((row) => typeof row[i] === "number" || row[i] === null);
  return folded("Table", `${panelId(one.id)}-table`, h("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": `Table: ${one.title}` },
    h("table", {}, h("caption", {}, one.title, of > rows.length ? `: ${rows.length} of ${counted(of, "row")}` : ""), h("thead", {}, h("tr", {}, columns.map(({ title }, i) => h("th", { scope: "col", class: numeric(i) ? "number" : "" }, title)))),
      h("tbody", {}, body))));
}

/** What a panel shows, as one number text: two that are equal need not be drawn anew. */
export function signature(one: Panel, arrays: Arrays): string {
  return JSON.stringify(one, (_, value: unknown) => {
    const ref = value as { dtype?: unknown; offset?: unknown; length?: unknown } | null;
    if (!ref || typeof ref !== "object" || !("dtype" in ref && "offset" in ref)) return value;
    try {
      const numbers = arrays.read(value as never), bytes = new Uint8Array(numbers.buffer, numbers.byteOffset, numbers.byteLength);
      let sum = 2166136261;
      for (let i = 0; i < bytes.length; i++) sum = Math.imul(sum ^ bytes[i], 16777619);
      return [ref.dtype, bytes.length, sum];
    } catch (failure) {
      return (failure as Error).message;
    }
  });
}
