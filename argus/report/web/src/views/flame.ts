// A flame graph, root on top: click to zoom, search, colours of language or of the change against the peers.

import { css, diverging, inkOn, type Rgb, type Theme } from "../colors.ts";
import type { Flame } from "../contract.ts";
import { add, h } from "../dom.ts";
import { fitted, font, plot, type Context, type Item } from "../plot.ts";
import { counted, format } from "../units.ts";

const LINE = 18, MOST_DEEP = 60, THINNEST = 0.6;
const LIGHT: Record<string, Rgb> = { python: [150, 190, 225], native: [226, 205, 150], kernel: [200, 178, 214], "": [210, 212, 214] };
const DARK: Record<string, Rgb> = { python: [58, 100, 140], native: [120, 98, 40], kernel: [98, 76, 116], "": [78, 82, 88] };
const LANGUAGES: [string, string][] = [["python", "Python"], ["native", "native code"], ["kernel", "kernel"]];

interface Placed { x: number; depth: number; total: number; children: number[] }

/** Where each frame begins, in ns from the left; children in their order, never wider than their parent. */
export function place(frames: Flame["frames"]): { placed: Placed[]; total: number } {
  const placed: Placed[] = [];
  let total = 0;
  frames.forEach((frame, i) => {
    const size = Number.isFinite(frame.total_ns) && frame.total_ns > 0 ? frame.total_ns : 0;
    const parent = frame.parent >= 0 && frame.parent < i ? placed[frame.parent] : null;
    if (!parent) {
      placed.push({ x: total, depth: 0, total: size, children: [] });
      total += size;
      return;
    }
    const before = parent.children.at(-1);
    const x = before === undefined ? parent.x : placed[before].x + placed[before].total;
    placed.push({ x, depth: parent.depth + 1, total: Math.min(size, parent.x + parent.total - x), children: [] });
    parent.children.push(i);
  });
  return { placed, total };
}

export function flame(view: Flame, context: Context): HTMLElement {
  const { placed, total } = place(view.frames);
  if (!(total > 0)) return h("p", { class: "nothing" }, "No stacks were taken.");
  const compared = Boolean(view.compared);
  const most = view.frames.reduce((all, { change_ns: change }) => Math.max(all, Math.abs(change ?? 0)), 0) || 1;
  let focus = -1, sought = "";
  const ancestors = (of: number): Set<number> => {
    const found = new Set<number>();
    for (let i = of; i >= 0; i = view.frames[i].parent) found.add(i);
    return found;
  };
  const colorOf = (i: number, theme: Theme): Rgb => {
    const { change_ns: change, language } = view.frames[i];
    if (compared) return change === null ? theme.unknown : diverging(Math.sign(change) * Math.sqrt(Math.abs(change) / most), theme.dark);
    return (theme.dark ? DARK : LIGHT)[language] ?? (theme.dark ? DARK : LIGHT)[""];
  };
  const matches = (name: string) => sought !== "" && name.toLowerCase().includes(sought);
  const note = h("span", { class: "found", role: "status" });
  const zoom = (i: number) => {
    focus = i === focus || i < 0 ? -1 : i;
    back.hidden = focus < 0;
    picture.redraw();
  };
  const deepest = placed.reduce((all, { depth }) => Math.max(all, depth), 0);
  const picture = plot({
    label: `Flame graph: ${view.title}, ${counted(view.frames.length, "frame")}`,
    height: () => Math.min(MOST_DEEP, deepest + 1) * LINE + 2,
    draw(c, width, _, theme) {
      const window = focus < 0 ? { x: 0, total } : placed[focus];
      const above = focus < 0 ? new Set<number>() : ancestors(focus);
      const items: Item[] = [];
      c.font = font(11);
      c.textBaseline = "middle";
      placed.forEach(({ x, depth, total: size }, i) => {
        if (depth >= MOST_DEEP) return;
        const begin = above.has(i) ? 0 : Math.max(0, ((x - window.x) / window.total) * width);
        const end = above.has(i) ? width : Math.min(width, ((x + size - window.x) / window.total) * width);
        if (end - begin < THINNEST) return;
        const frame = view.frames[i], fill = colorOf(i, theme), box = { x: begin, y: depth * LINE + 1, w: end - begin, h: LINE - 1 };
        c.globalAlpha = (above.has(i) && i !== focus) || (sought && !matches(frame.name)) ? 0.45 : 1;
        c.fillStyle = css(fill);
        c.fillRect(box.x, box.y, Math.max(THINNEST, box.w - 1), box.h);
        c.globalAlpha = 1;
        if (matches(frame.name)) {
          c.strokeStyle = theme.text;
          c.lineWidth = 2;
          c.strokeRect(box.x + 1, box.y + 1, Math.max(1, box.w - 3), box.h - 2);
        }
        if (box.w > 26) {
          c.fillStyle = inkOn(fill);
          c.fillText(fitted(c, frame.name, box.w - 8), box.x + 4, box.y + box.h / 2);
        }
        const change = frame.change_ns;
        items.push({
          box, act: () => zoom(i),
          lines: [frame.name, `${format(frame.total_ns, "ns")} in all (${((frame.total_ns / total) * 100).toFixed(1)} %), ${format(frame.self_ns, "ns")} itself`,
            ...(compared ? [change === null ? "not compared" : `${format(Math.abs(change), "ns")} ${change < 0 ? "less" : "more"} than ${view.compared}`] : [])],
        });
      });
      return items;
    },
    key: (event) => {
      if (event.key !== "Escape" || focus < 0) return false;
      zoom(-1);
      return true;
    },
  }, context);
  const field = h("input", { type: "search", placeholder: "Search frames", "aria-label": "Search frames" });
  field.addEventListener("input", () => {
    sought = field.value.trim().toLowerCase();
    const found = sought ? view.frames.filter(({ name }) => matches(name)).length : 0;
    note.textContent = sought ? (found ? counted(found, "frame") : "no frame") : "";
    picture.redraw();
  });
  const back = h("button", { type: "button", hidden: true, onclick: () => zoom(-1) }, "Show all");
  const element = h("div", { class: "flame" });
  add(element, h("h4", {}, view.title), h("div", { class: "tools" }, field, note, back, legend(view, compared)), picture.element);
  return element;
}

function legend(view: Flame, compared: boolean): HTMLElement {
  const key = (name: string, title: string) =>
    h("li", {}, h("span", { class: `swatch block ${name}`, "aria-hidden": true }), title);
  if (compared)
    return h("ul", { class: "legend" }, key("less", `less than ${view.compared}`), key("more", `more than ${view.compared}`));
  return h("ul", { class: "legend" }, LANGUAGES.filter(([name]) => view.frames.some(({ language }) => language === name))
    .map(([name, title]) => key(`language-${name}`, title)));
}
