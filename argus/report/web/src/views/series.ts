// Lines over steps or over something else that ascends: uPlot, with marks, a band, and zoom that all views share.

import uPlot from "uplot";
import type { Arrays } from "../arrays.ts";
import { theme } from "../colors.ts";
import type { Line, Series } from "../contract.ts";
import { add, h } from "../dom.ts";
import { keepDrawn, type Context } from "../plot.ts";
import { counted, format, rankIn, tickLabels, ticks } from "../units.ts";
import { markList, MARKS } from "./marks.ts";

/** Runs whose points are drawn. */
const FEW = 80;

/** Lines with a legend that tells their values under the pointer. */
export function series(view: Series, arrays: Arrays, { state, signal }: Context): HTMLElement {
  const x = Array.from(arrays.read(view.x));
  const ys = view.lines.map((line) =>
    Array.from(arrays.read(line.y), (value) => (Number.isFinite(value) ? value : null)));
  if (!x.length || !view.lines.length) return h("p", { class: "nothing" }, "There are no values.");
  const ofSteps = view.x_title === "step";
  const host = h("div", {
    class: "plot lines", role: "application", tabindex: 0,
    "aria-label": `${view.y_title} by ${view.x_title}: ${counted(view.lines.length, "line")}. Arrow keys read values.`,
  });
  const live = h("div", { class: "hidden", "aria-live": "polite" });
  const legend = h("ul", { class: "legend" });
  const at = h("span", { class: "at" });
  const values = view.lines.map((line, i) => {
    const value = h("span", { class: "value" });
    const swatch = h("span", { class: `swatch ${line.role}`, "aria-hidden": true });
    swatch.style.setProperty("--line-color", colorOf(view.lines, i));
    const rank = rankIn(line.title);
    const name = rank === null ? h("span", {}, line.title)
      : h("button", { type: "button", class: "rank", "data-rank": rank, onclick: () => state.selectRank(rank) }, line.title);
    legend.append(h("li", {}, swatch, name, value));
    return value;
  });
  const showValues = (index: number | null | undefined) => {
    const shown = index ?? null;
    at.textContent = shown === null ? "" : `${view.x_title} ${xText(view, x[shown])}`;
    values.forEach((value, i) => (value.textContent = shown === null ? "" : format(ys[i][shown], view.y_unit)));
    host.dataset.at = shown === null ? "" : String(x[shown]);
  };
  let picture: uPlot | null = null;
  let readAt: number | null = null;
  const draw = () => {
    if (!host.clientWidth) return;
    picture?.destroy();
    picture = new uPlot(optionsOf(view, ys, host.clientWidth, state.rank, (index) => showValues(index),
      (first, last) => ofSteps && state.showSteps([first, last]), !ofSteps), [x, ...ys] as uPlot.AlignedData, host);
    scaleX();
    picture.over.addEventListener("dblclick", () => (ofSteps ? state.showSteps(null) : scaleX()));
  };
  const scaleX = () => {
    const whole: [number, number] = [x[0], x[x.length - 1]];
    const chosen = ofSteps && state.steps ? state.steps : whole;
    let [min, max] = [Math.max(chosen[0], whole[0]), Math.min(chosen[1], whole[1])];
    if (!(max >= min)) [min, max] = whole;
    picture?.setScale("x", max > min ? { min, max } : { min: min - 0.5, max: max + 0.5 });
    host.dataset.shown = `${min}-${max}`;
  };
  host.addEventListener("keydown", (event) => {
    if (event.key === "Escape") state.showSteps(null);
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || event.ctrlKey || event.altKey || event.metaKey || !picture) return;
    event.preventDefault();
    readAt = Math.max(0, Math.min(x.length - 1, readAt === null ? 0 : readAt + move * (event.shiftKey ? 10 : 1)));
    picture.setCursor({ left: picture.valToPos(x[readAt], "x"), top: 10 });
    showValues(readAt);
    live.textContent = `${at.textContent}: ` + view.lines.map((line, i) => `${line.title} ${values[i].textContent}`).join(", ");
  });
  state.follow((changed) => {
    if (changed === "steps" && ofSteps) scaleX();
    if (changed === "rank" && view.lines.some((line) => rankIn(line.title) !== null)) draw();
  }, signal);
  keepDrawn(host, draw, signal);
  signal.addEventListener("abort", () => picture?.destroy());
  const element = h("div", { class: "series" });
  add(element, h("div", { class: "y-title" }, view.y_title, at), host, live, legend, markList(view.marks, view.x_title));
  return element;
}

function xText(view: Series, value: number): string {
  return view.x_unit ? format(value, view.x_unit) : value.toLocaleString("en-US");
}

/** A line's colour, as the style sheet has it: of named lines each its own. */
function colorOf(lines: Line[], index: number): string {
  const colors = theme(), { role } = lines[index];
  if (role === "named") {
    const nth = lines.slice(0, index).filter((line) => line.role === "named").length;
    return nth === 0 ? colors.named : colors.parts[(nth + 1) % colors.parts.length];
  }
  return role === "typical" ? colors.accent : colors.muted;
}

function optionsOf(
  view: Series, ys: (number | null)[][], width: number, rank: number | null, showValues: (index: number | null | undefined) => void,
  zoomed: (first: number, last: number) => void, zoomSelf: boolean,
): uPlot.Options {
  const colors = theme();
  const axis = (unit: Series["x_unit"], room: number): Partial<uPlot.Axis> => ({
    stroke: colors.muted, grid: { stroke: colors.line, width: 1 }, ticks: { stroke: colors.line, width: 1, size: 4 },
    font: "11px system-ui, sans-serif", gap: 4,
    splits: (u, i, low, high) => {
      const length = i === 0 ? u.bbox.width : u.bbox.height;
      const found = ticks(low, high, Math.max(2, length / devicePixelRatio / room), unit);
      return i === 0 && whole ? found.filter(Number.isInteger) : found;
    },
    values: (_, found) => tickLabels(found, unit),
  });
  const whole = view.x_title === "step" || view.x_title === "run";
  const named = view.lines.some(({ role }) => role === "named");
  const high = view.lines.findIndex(({ role }) => role === "high"), low = view.lines.findIndex(({ role }) => role === "low");
  const found = ys.flat().filter((value): value is number => value !== null);
  const [least, most] = found.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  const room = (most - least || Math.abs(most) || 1) * 0.06;
  return {
    width, height: width < 480 ? 170 : 220, legend: { show: false }, pxAlign: 1, ms: 1,
    padding: [14, 12, 0, 0],
    scales: {
      x: { time: false },
      // From zero where that does not flatten what differs.
      y: { range: () => (Number.isFinite(least) ? [least >= 0 && least < most * 0.6 ? 0 : least - room, most + room] : [0, 1]) },
    },
    axes: [{ ...axis(view.x_unit, 90), size: 28 }, { ...axis(view.y_unit, 42), size: 62 }],
    bands: high >= 0 && low >= 0 ? [{ series: [high + 1, low + 1], fill: `${colors.accent}26` }] : [],
    cursor: {
      points: { size: 6 }, drag: { x: true, y: false, setScale: zoomSelf }, y: false,
      bind: { dblclick: () => null },
    },
    series: [{}, ...view.lines.map((line, i): uPlot.Series => {
      const strong = line.role === "named" || (line.role === "typical" && !named);
      const selected = rank !== null && rankIn(line.title) === rank;
      return {
        label: line.title, stroke: colorOf(view.lines, i), width: selected ? 3.5 : strong ? 2 : line.role === "typical" ? 1.5 : 1,
        dash: line.role === "baseline" ? [6, 4] : undefined, points: { show: ys[i].length < (view.x_title === "run" && line.role === "typical" ? FEW : 3), size: 6 }, spanGaps: false,
      };
    })],
    hooks: {
      setCursor: [(u) => showValues(u.cursor.idx)],
      setSelect: [(u) => {
        if (u.select.width > 4) zoomed(Math.ceil(u.posToVal(u.select.left, "x")), Math.floor(u.posToVal(u.select.left + u.select.width, "x")));
        if (!zoomSelf) u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      }],
      draw: [(u) => drawMarks(u, view)],
    },
  };
}

function drawMarks(u: uPlot, view: Series): void {
  const colors = theme(), { ctx: c } = u, ratio = devicePixelRatio;
  c.save();
  for (const mark of view.marks) {
    const x = u.valToPos(mark.step, "x", true);
    if (!(x >= u.bbox.left && x <= u.bbox.left + u.bbox.width)) continue;
    c.strokeStyle = c.fillStyle = mark.kind === "change" ? colors.named : colors.muted;
    c.lineWidth = ratio;
    c.setLineDash(mark.kind === "change" ? [] : [2 * ratio, 3 * ratio]);
    c.beginPath();
    c.moveTo(x, u.bbox.top);
    c.lineTo(x, u.bbox.top + u.bbox.height);
    c.stroke();
    c.font = `600 ${11 * ratio}px system-ui, sans-serif`;
    c.textAlign = "center";
    c.textBaseline = "bottom";
    c.fillText(MARKS[mark.kind]?.sign ?? "•", x, u.bbox.top - ratio);
  }
  c.restore();
}

