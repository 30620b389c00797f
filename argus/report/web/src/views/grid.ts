// A small matrix: the mesh, who waits for whom.

import type { Arrays } from "../arrays.ts";
import { cividis, css, diverging, inkOn, type Rgb, type Theme } from "../colors.ts";
import type { Grid } from "../contract.ts";
import { add, h } from "../dom.ts";
import { fitted, font, plot, type Context, type Item } from "../plot.ts";
import { counted, format, rankIn } from "../units.ts";

const HEAD = 20;

/** Cells with their values where there is room, and a scale beneath. */
export function grid(view: Grid, arrays: Arrays, context: Context): HTMLElement {
  const cells = arrays.read(view.cells), rows = view.rows.length, columns = view.columns.length;
  if (!rows || !columns || cells.length !== rows * columns) return h("p", { class: "nothing" }, "There are no cells.");
  const known = Array.from(cells).filter(Number.isFinite);
  const low = known.length ? known.reduce((a, b) => Math.min(a, b)) : 0, high = known.length ? known.reduce((a, b) => Math.max(a, b)) : 0;
  const span = Math.max(view.least || 0,
    view.middle === null ? high - low : Math.max(Math.abs(high - view.middle), Math.abs(low - view.middle)));
  const color = (value: number, theme: Theme): Rgb =>
    !Number.isFinite(value) ? theme.unknown
      : view.middle === null ? cividis(span > 0 ? (value - low) / span : 0)
        : diverging(span > 0 ? (value - view.middle) / span : 0, theme.dark);
  const { element: host } = plot({
    label: `${view.row_title} by ${view.column_title}: ${counted(rows, "row")}, ${counted(columns, "column")}`,
    height: (width) => HEAD + 16 + rows * side(width, rows, columns) + 4,
    draw(c, width, _, theme) {
      const left = gutter(width), each = side(width, rows, columns), wide = (width - left - 2) / columns;
      const boxWidth = Math.min(wide, Math.max(each * 2.4, 12)), items: Item[] = [];
      c.font = font(11);
      c.textBaseline = "middle";
      c.fillStyle = theme.muted;
      c.fillText(fitted(c, view.column_title, width - left), left, 8);
      c.fillText(fitted(c, view.row_title, left - 8), 2, HEAD + 8);
      let free = -Infinity;
      view.columns.forEach((name, i) => {
        const x = left + i * boxWidth, text = fitted(c, name, Math.max(boxWidth - 4, 60));
        if (x < free || !text) return;
        c.fillText(text, x, HEAD + 8);
        free = x + Math.max(c.measureText(text).width + 10, boxWidth - 1);
      });
      let below = -Infinity;
      view.rows.forEach((name, r) => {
        const y = HEAD + 16 + r * each;
        c.fillStyle = theme.text;
        c.font = font(11);
        if (y >= below && each >= 1) {
          c.fillText(fitted(c, name, left - 8), 2, y + each / 2);
          below = y + Math.max(each - 0.5, 13);
        }
        for (let i = 0; i < columns; i++) {
          const value = cells[r * columns + i], fill = color(value, theme), x = left + i * boxWidth;
          const gap = each > 8 && boxWidth > 8 ? 1 : 0;
          c.fillStyle = css(fill);
          c.fillRect(x, y, boxWidth - gap, each - gap);
          const text = format(value, view.unit);
          if (each >= 15 && c.measureText(text).width < boxWidth - 6) {
            c.fillStyle = inkOn(fill);
            c.fillText(text, x + (boxWidth - c.measureText(text).width) / 2, y + each / 2);
          }
          const detail = view.details[r]?.[i] ?? "";
          items.push({
            box: { x, y, w: boxWidth, h: each }, rank: rankIn(detail),
            lines: [`${view.row_title} ${name}, ${view.column_title} ${view.columns[i]}`, text, detail].filter(Boolean),
          });
        }
      });
      return items;
    },
  }, context);
  const element = h("div", { class: "grid" });
  const key = (value: number) => {
    const swatch = h("span", { class: "swatch block", "aria-hidden": true });
    swatch.style.background = css(color(value, { unknown: [128, 128, 128], dark: matchDark() } as Theme));
    return h("li", {}, swatch, format(value, view.unit));
  };
  const shown = [...new Set(view.middle === null ? [low, high] : [low, view.middle, high])].sort((a, b) => a - b);
  add(element, host, known.length > 0 && h("ul", { class: "legend" }, shown.map(key)));
  return element;
}

function matchDark(): boolean {
  return getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() === "1";
}

function gutter(width: number): number {
  return width < 480 ? 72 : 120;
}

function side(width: number, rows: number, columns: number): number {
  const wide = (width - gutter(width)) / columns;
  return Math.max(rows > 200 ? 400 / rows : 2, Math.min(24, 480 / rows, Math.max(wide, rows <= 24 ? 16 : 0)));
}
