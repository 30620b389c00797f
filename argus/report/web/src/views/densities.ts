// Distributions drawn over one another.

import type { Arrays } from "../arrays.ts";
import type { Densities } from "../contract.ts";
import type { Theme } from "../colors.ts";
import { add, h } from "../dom.ts";
import { font, plot, type Context } from "../plot.ts";
import { counted, format, rankIn, tickLabels, ticks } from "../units.ts";
import { titled } from "./bars.ts";

const BOTTOM = 24;

/** Curves: those that are named in colour and filled, the peers thin and grey. */
export function densities(view: Densities, arrays: Arrays, context: Context): HTMLElement {
  const curves = view.curves.map((curve) => ({ ...curve, xs: arrays.read(curve.x), ys: arrays.read(curve.y) }));
  let left = Infinity, right = -Infinity, top = 0;
  for (const { xs, ys } of curves)
    for (let i = 0; i < xs.length; i++) {
      if (!Number.isFinite(xs[i]) || !Number.isFinite(ys[i])) continue;
      [left, right, top] = [Math.min(left, xs[i]), Math.max(right, xs[i]), Math.max(top, ys[i])];
    }
  if (!(right >= left) || !(top > 0)) return h("p", { class: "nothing" }, "There is no distribution to draw.");
  if (right === left) [left, right] = [left - Math.abs(left || 1) * 0.05, right + Math.abs(right || 1) * 0.05];
  const named = curves.map((_, i) => curves.slice(0, i).filter((curve) => curve.named).length);
  const color = (i: number, theme: Theme) =>
    !curves[i].named ? theme.muted : named[i] === 0 ? theme.named : theme.parts[(named[i] + 1) % theme.parts.length];
  const { element: host, redraw } = plot({
    label: `Distributions of ${view.title}: ${counted(curves.length, "curve")}`,
    height: (width) => (width < 480 ? 150 : 190),
    draw(c, width, height, theme) {
      const bottom = height - BOTTOM;
      const atX = (value: number) => 8 + ((value - left) / (right - left)) * (width - 20);
      const atY = (value: number) => bottom - (value / top) * (bottom - 8);
      c.font = font(11);
      c.textBaseline = "top";
      const some = ticks(left, right, Math.max(2, width / 90), view.x_unit), names = tickLabels(some, view.x_unit);
      some.forEach((value, i) => {
        c.fillStyle = theme.line;
        c.fillRect(atX(value), 8, 1, bottom - 8);
        c.fillStyle = theme.muted;
        const size = c.measureText(names[i]).width;
        c.fillText(names[i], Math.max(2, Math.min(width - size - 2, atX(value) - size / 2)), bottom + 6);
      });
      c.fillStyle = theme.muted;
      c.fillRect(8, bottom, width - 20, 1);
      const order = curves.map((_, i) => i).sort((a, b) => Number(curves[a].named) - Number(curves[b].named));
      for (const i of order) {
        const { xs, ys, title } = curves[i];
        const selected = context.state.rank !== null && rankIn(title) === context.state.rank;
        c.beginPath();
        if (xs.length === 1) c.moveTo(atX(xs[0]), bottom); // one duration: a line
        xs.forEach((x: number, k: number) => (Number.isFinite(x) && Number.isFinite(ys[k]) ? c.lineTo(atX(x), atY(ys[k])) : null));
        c.strokeStyle = color(i, theme);
        c.lineWidth = selected ? 3.5 : curves[i].named ? 2 : 1;
        c.globalAlpha = curves[i].named || selected || curves.length < 4 ? 1 : 0.6;
        c.stroke();
        c.lineTo(atX(xs[xs.length - 1]), bottom);
        c.lineTo(atX(xs[0]), bottom);
        c.globalAlpha = curves[i].named ? 0.18 : 0.05;
        c.fillStyle = color(i, theme);
        c.fill();
        c.globalAlpha = 1;
      }
      return curves.map(({ title, xs, ys }) => {
        let peak = 0;
        for (let i = 0; i < ys.length; i++) if (ys[i] > ys[peak]) peak = i;
        const text = `most often ${format(xs[peak], view.x_unit)}`;
        return { box: { x: atX(xs[peak]) - 5, y: atY(ys[peak]) - 5, w: 10, h: 10 }, lines: [title, text], rank: rankIn(title) };
      });
    },
  }, context);
  context.state.follow((changed) => changed === "rank" && redraw(), context.signal);
  const element = h("div", { class: "densities" });
  const legend = curves.map(({ title, named: isNamed }, i) => {
    const swatch = h("span", { class: `swatch ${isNamed ? "named" : ""}`, "aria-hidden": true });
    swatch.style.setProperty("--line-color", isNamed ? (named[i] === 0 ? "var(--named)" : `var(--part-${(named[i] + 1) % 10})`) : "var(--muted)");
    return h("li", {}, swatch, titled(title, context));
  });
  add(element, h("h4", {}, view.title), host, h("ul", { class: "legend" }, legend.slice(0, 12),
    legend.length > 12 && h("li", {}, `and ${legend.length - 12} more`)));
  return element;
}
