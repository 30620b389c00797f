// Nodes in a circle with links: the ring of a communicator. And the spans of a step.

import type { Graph, Timeline } from "../contract.ts";
import { cividis, css, inkOn } from "../colors.ts";
import { add, h } from "../dom.ts";
import { fitted, font, plot, type Context, type Item } from "../plot.ts";
import { counted, format, rankIn, tickLabels, ticks } from "../units.ts";

/** A ring: thick links carry more; named ones are in the colour of findings and have their value beside them. */
export function graph(view: Graph, context: Context): HTMLElement {
  const count = view.nodes.length;
  if (!count) return h("p", { class: "nothing" }, "There are no links.");
  const edges = view.edges.filter(({ source, target }) => source >= 0 && target >= 0 && source < count && target < count);
  const both = new Set(edges.map(({ source, target }) => source * count + target));
  const most = edges.reduce((all, { value }) => Math.max(all, value ?? 0), 0);
  const { element: host } = plot({
    label: `${view.title}: ${counted(count, "node")}, ${counted(edges.length, "link")}`,
    height: (width) => (count <= 2 ? 150 : Math.min(width, 440)),
    draw(c, width, height, theme) {
      const wide = Math.max(40, width / 2 - (width < 480 ? 62 : 110)), high = Math.max(40, height / 2 - 34);
      const ring = { x: Math.min(wide, high * 1.8), y: high };
      const at = (i: number) => {
        const angle = (i / count) * 2 * Math.PI - Math.PI / 2;
        return { x: width / 2 + ring.x * Math.cos(angle), y: height / 2 + ring.y * Math.sin(angle), angle };
      };
      const items: Item[] = [], words: [string, number, number][] = [];
      c.font = font(11);
      for (const edge of [...edges].sort((a, b) => Number(a.named) - Number(b.named))) {
        const from = at(edge.source), to = at(edge.target);
        const length = Math.hypot(to.x - from.x, to.y - from.y) || 1, ux = (to.x - from.x) / length, uy = (to.y - from.y) / length;
        // Links both ways lie beside one another.
        const aside = both.has(edge.target * count + edge.source) ? 7 : 0;
        for (const end of [from, to]) [end.x, end.y] = [end.x - uy * aside, end.y + ux * aside];
        c.strokeStyle = c.fillStyle = edge.named ? theme.named : theme.muted;
        c.lineWidth = edge.value === null ? 1 : 1 + 4 * Math.max(0, edge.value / (most || 1));
        c.setLineDash(edge.value === null ? [3, 3] : []);
        c.beginPath();
        c.moveTo(from.x, from.y);
        c.lineTo(to.x, to.y);
        c.stroke();
        c.setLineDash([]);
        if (count <= 64) {
          const tip = { x: to.x - ux * 8, y: to.y - uy * 8 };
          c.beginPath();
          c.moveTo(tip.x, tip.y);
          c.lineTo(tip.x - ux * 9 - uy * 5, tip.y - uy * 9 + ux * 5);
          c.lineTo(tip.x - ux * 9 + uy * 5, tip.y - uy * 9 - ux * 5);
          c.fill();
        }
        const middle = { x: (from.x + to.x) / 2, y: (from.y + to.y) / 2 };
        const text = format(edge.value, view.unit);
        // Beside links that are close to others: of a large ring inside it.
        const inside = count > 12 ? 34 / (Math.hypot(width / 2 - middle.x, height / 2 - middle.y) || 1) : 0;
        if (edge.named || count <= 12)
          words.push([text, middle.x - uy * aside * 5 + (width / 2 - middle.x) * inside, middle.y + ux * aside * 3 + (height / 2 - middle.y) * inside]);
        items.push({
          box: { x: middle.x - 12, y: middle.y - 9, w: 24, h: 18 },
          lines: [`${view.nodes[edge.source]} → ${view.nodes[edge.target]}`, text, edge.detail].filter(Boolean),
        });
      }
      const taken: { x: number; y: number; w: number }[] = [];
      const room = (x: number, y: number, w: number) =>
        x >= 0 && x + w <= width && y >= 8 && y <= height - 6 && !taken.some((one) => Math.abs(one.y - y) < 14 && x < one.x + one.w + 4 && one.x < x + w + 4);
      c.textBaseline = "middle";
      view.nodes.forEach((name, i) => {
        const { x, y, angle } = at(i), rank = rankIn(name), size = count <= 64 ? 5 : 3;
        c.fillStyle = theme.accent;
        c.beginPath();
        c.arc(x, y, size, 0, 2 * Math.PI);
        c.fill();
        items.push({ box: { x: x - 8, y: y - 8, w: 16, h: 16 }, lines: [name], rank });
        const most = width < 480 ? 54 : 104;
        const whole = c.measureText(name.slice(0, 60)).width <= most;
        const text = fitted(c, whole || rank === null ? name : `rank ${rank}`, most), w = c.measureText(text).width;
        const left = Math.cos(angle) < -0.2 ? x - w - 9 : Math.cos(angle) > 0.2 ? x + 9 : x - w / 2;
        const line = y + Math.sin(angle) * 15;
        if (!room(left, line, w)) return;
        taken.push({ x: left, y: line, w });
        c.fillStyle = theme.text;
        c.fillText(text, left, line);
      });
      for (const [text, x, y] of words) {
        const w = c.measureText(text).width;
        if (!room(x - w / 2, y, w)) continue;
        taken.push({ x: x - w / 2, y, w });
        c.fillStyle = theme.surface;
        c.fillRect(x - w / 2 - 3, y - 8, w + 6, 16);
        c.fillStyle = theme.text;
        c.fillText(text, x - w / 2, y);
      }
      return items;
    },
  }, context);
  const element = h("div", { class: "graph" });
  add(element, h("h4", {}, view.title), host);
  return element;
}

const HEIGHT = 24, TITLE = 16, AXIS = 24;

/** Tracks with spans; those on the critical path are in the colour of findings. Drag or plus and minus zoom. */
export function timeline(view: Timeline, context: Context): HTMLElement {
  const spans = view.tracks.flatMap((track) => track.spans).filter(([begin, end]) => Number.isFinite(begin) && end >= begin);
  if (!spans.length) return h("p", { class: "nothing" }, "There are no spans.");
  const whole = spans.reduce(([a, b], [begin, end]) => [Math.min(a, begin), Math.max(b, end)], [Infinity, -Infinity]);
  let [from, to] = whole;
  const show = (a: number, b: number) => {
    [from, to] = [Math.max(whole[0], a), Math.min(whole[1], b)];
    all.hidden = from <= whole[0] && to >= whole[1];
    picture.redraw();
  };
  const scale = (factor: number, at = (from + to) / 2) => show(at - (at - from) * factor, at + (to - at) * factor);
  const picture = plot({
    label: `${view.title}: ${counted(view.tracks.length, "track")}, ${counted(spans.length, "span")}. Plus and minus zoom.`,
    height: () => view.tracks.length * (HEIGHT + TITLE) + AXIS,
    draw(c, width, height, theme) {
      const items: Item[] = [], size = Math.max(1e-9, to - from);
      const at = (ns: number) => 2 + ((ns - from) / size) * (width - 4);
      c.font = font(11);
      const some = ticks(from, to, Math.max(2, width / 100), "ns"), names = tickLabels(some, "ns");
      some.forEach((ns, i) => {
        c.fillStyle = theme.line;
        c.fillRect(at(ns), 0, 1, height - AXIS + 4);
        c.fillStyle = theme.muted;
        c.textBaseline = "top";
        const w = c.measureText(names[i]).width;
        c.fillText(names[i], Math.max(0, Math.min(width - w, at(ns) - w / 2)), height - AXIS + 8);
      });
      c.textBaseline = "middle";
      view.tracks.forEach((track, t) => {
        const y = t * (HEIGHT + TITLE) + TITLE, rank = rankIn(track.title);
        c.fillStyle = theme.muted;
        c.fillText(fitted(c, track.title, width), 2, y - TITLE / 2 + 1);
        // Those on the path last: of many spans under one pixel they are seen.
        for (const [begin, end, name, named] of [...track.spans].sort((a, b) => a[3] - b[3])) {
          if (!(end >= begin) || end < from || begin > to) continue;
          const x = Math.max(2, at(begin)), w = Math.max(1, Math.min(width - 2, at(end)) - x);
          const fill = theme.dark ? cividis(0.3) : cividis(0.62);
          c.fillStyle = named ? theme.named : css(fill);
          c.fillRect(x, y, Math.max(1, w - (w > 3 ? 1 : 0)), HEIGHT - 4);
          if (w > 26) {
            c.fillStyle = named ? theme.surface : inkOn(fill);
            c.fillText(fitted(c, name, w - 8), x + 4, y + (HEIGHT - 4) / 2);
          }
          items.push({
            box: { x, y, w, h: HEIGHT - 4 }, rank,
            lines: [name, track.title, `${format(end - begin, "ns")}, from ${format(begin, "ns")}`, named ? "on the critical path" : ""].filter(Boolean),
          });
        }
      });
      return items;
    },
    key: (event) => {
      if (event.key === "+" || event.key === "=") scale(0.5);
      else if (event.key === "-") scale(2);
      else if (event.key === "Escape" && !all.hidden) show(whole[0], whole[1]);
      else return false;
      return true;
    },
  }, context);
  picture.element.addEventListener("wheel", (event) => {
    if (document.activeElement !== picture.element && !event.ctrlKey) return;
    event.preventDefault();
    const box = picture.element.getBoundingClientRect();
    scale(event.deltaY > 0 ? 1.5 : 1 / 1.5, from + ((event.clientX - box.left) / box.width) * (to - from));
  }, { passive: false });
  const all = h("button", { type: "button", hidden: true, onclick: () => show(whole[0], whole[1]) }, "Show all");
  const element = h("div", { class: "timeline" });
  add(element, h("h4", {}, view.title), h("div", { class: "tools" }, all), picture.element);
  return element;
}
