// Bars beside one another, bars of parts that add up, and facts: plain elements, so that they print and wrap as text.

import type { Bars, Facts, Stacked, Unit } from "../contract.ts";
import { placesOf, theme } from "../colors.ts";
import { h } from "../dom.ts";
import { hideTip, showTip, type Context } from "../plot.ts";
import { format, rankIn } from "../units.ts";

function finite(values: (number | null)[]): number[] {
  return values.filter((value): value is number => value !== null && Number.isFinite(value));
}

/** A title: a button that selects the rank that it names, if it names one. */
export function titled(title: string, { state }: Context): HTMLElement {
  const rank = rankIn(title);
  if (rank === null) return h("span", { class: "name" }, title);
  return h("button", { type: "button", class: "name rank", "data-rank": rank, onclick: () => state.selectRank(rank) }, title);
}

function tipped(element: HTMLElement, lines: string[]): HTMLElement {
  element.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, lines));
  element.addEventListener("pointerleave", () => hideTip());
  return element;
}

/** Bars from their origin, both ways. */
export function bars(view: Bars, context: Context): HTMLElement {
  if (!view.bars.length) return h("p", { class: "nothing" }, "There is nothing to compare.");
  const values = finite(view.bars.map(({ value }) => value));
  const low = Math.min(view.origin, ...values), high = Math.max(view.origin, ...values, low + (view.least || 0));
  const share = (value: number) => (high > low ? ((value - low) / (high - low)) * 100 : 0);
  return h("ul", { class: "bars" }, view.bars.map((bar) => {
    const known = bar.value !== null && Number.isFinite(bar.value);
    const fill = h("span", { class: "fill" });
    if (known) {
      const begin = share(Math.min(view.origin, bar.value!)), end = share(Math.max(view.origin, bar.value!));
      fill.style.left = `${begin}%`;
      fill.style.width = `${end - begin}%`;
    }
    const origin = h("span", { class: "origin" });
    origin.style.left = `${share(view.origin)}%`;
    const value = format(bar.value, view.unit);
    const item = h("li", { class: bar.named ? "named" : "" }, titled(bar.title, context),
      h("span", { class: "track", "aria-hidden": true }, fill, origin), h("span", { class: "value" }, value),
      bar.detail && h("span", { class: "hidden" }, bar.detail));
    return tipped(item, [bar.title, value, bar.detail].filter(Boolean));
  }));
}

/** Bars of parts, all on one scale, with a legend. */
export function stacked(view: Stacked, context: Context): HTMLElement {
  if (!view.rows.length || !view.parts.length) return h("p", { class: "nothing" }, "There is nothing to add up.");
  const totals = view.rows.map((row) => finite(row.values).reduce((all, value) => all + Math.max(0, value), 0));
  const most = Math.max(...totals, Number.MIN_VALUE);
  const places = placesOf(view.parts, theme().parts.length);
  const color = (i: number) => `var(--part-${places[i]})`;
  const swatch = (i: number) => {
    const element = h("span", { class: "swatch block", "aria-hidden": true });
    element.style.background = color(i);
    return element;
  };
  const rows = view.rows.map((row, r) => {
    const track = h("span", { class: "track" });
    view.parts.forEach((part, i) => {
      const value = row.values[i];
      if (value === null || value === undefined || !(value > 0)) return;
      const width = (value / most) * 100;
      const segment = h("span", { class: "part" }, h("span", { class: "inside", "aria-hidden": true }, width > 9 ? format(value, view.unit) : ""));
      segment.style.width = `${width}%`;
      segment.style.background = color(i);
      segment.style.color = `var(--part-ink-${places[i]})`;
      track.append(tipped(segment, [row.title, `${part}: ${format(value, view.unit)}`, `${((value / totals[r]) * 100).toFixed(1)} % of ${format(totals[r], view.unit)}`]));
    });
    const words = view.parts.map((part, i) => `${part} ${format(row.values[i], view.unit)}`).join(", ");
    return h("li", { class: row.named ? "named" : "" }, titled(row.title, context), track,
      h("span", { class: "value" }, format(finite(row.values).length ? totals[r] : null, view.unit)), h("span", { class: "hidden" }, words));
  });
  return h("div", { class: "stacked" },
    h("ul", { class: "legend" }, view.parts.map((part, i) => h("li", {}, swatch(i), h("span", {}, part)))),
    h("ul", { class: "bars" }, rows));
}

const STATES = { good: "✓ good", bad: "✗ bad", unknown: "? not known", "": "" };

/** Names and texts; the state is a word and a sign, not only a colour. */
export function facts(view: Facts): HTMLElement {
  if (!view.facts.length) return h("p", { class: "nothing" }, "Nothing is known.");
  return h("dl", { class: "facts" }, view.facts.map(({ name, text, state }) =>
    h("div", { class: state }, h("dt", {}, name),
      h("dd", {}, state && h("span", { class: "state" }, STATES[state] ?? ""), state && " ", text))));
}

export function cellText(value: string | number | null, unit: Unit): string {
  return typeof value === "string" ? value : format(value, unit);
}
