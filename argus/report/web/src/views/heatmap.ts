// Ranks by steps: cells on canvas, named ranks on top, zoom in both directions, hover, keys.

import { Arrays } from "../arrays.ts";
import { css, cividis, lookUp, theme } from "../colors.ts";
import type { Heatmap, HeatRow, Measure } from "../contract.ts";
import { add, clear, h, newId, onceAFrame } from "../dom.ts";
import { fitted, font, hideTip, keepDrawn, outline, showTip, sized, type Box, type Context } from "../plot.ts";
import { columnOf, columnRanges, extreme, pool, UNKNOWN_CELL, type Ranges } from "../pool.ts";
import { counted, format, ticks, UNKNOWN } from "../units.ts";
import { markList, MARKS } from "./marks.ts";

/** Asks for the columns of some steps in full resolution; null: they are nowhere to be had. */
export type Finer = ((measure: string, first: number, last: number) => Promise<{ heatmap: Heatmap; arrays: Arrays }>) | null;

const TOP = 18, BOTTOM = 22, LABELLED = 11, TITLE = 15, MOST_PINNED = 12;

interface Block { title: string; from: number; to: number; top: number; height: number; titled: boolean }

/** Which rows are where: of each line of pixels (of `grain` px) the rows under it. */
export interface Layout {
  rows: Ranges; height: number; grain: number; blocks: Block[]; pinned: { row: number; top: number; height: number }[];
  mainTop: number;
}

/** Places the rows `first` to `last` (exclusive), and those that are pinned above them, in at most `most` pixels. */
export function layOut(all: HeatRow[], first: number, last: number, most: number): Layout {
  const pinnedRows = all.flatMap((row, i) => (row.pinned ? [i] : [])).slice(0, MOST_PINNED);
  const pin = all.some(({ pinned }) => !pinned) ? pinnedRows : [];
  const pinHeight = 16;
  const count = last - first;
  const groups: { title: string; from: number; to: number }[] = [];
  for (let i = first; i < last; i++) {
    const open = groups.at(-1);
    if (open && open.title === all[i].group) open.to = i + 1;
    else groups.push({ title: all[i].group, from: i, to: i + 1 });
  }
  const several = groups.length > 1 || Boolean(groups[0]?.title);
  // Rows with labels of their own and titles over groups where there is room; else thin rows, and a gap between groups.
  const each = Math.min(26, Math.floor((most - (several ? groups.length * TITLE : 0)) / Math.max(1, count)));
  const roomy = each >= LABELLED;
  const thinnest = Math.min(...groups.map(({ from, to }) => ((to - from) * most) / count));
  const between = !roomy && several && thinnest >= 6 && groups.length * 8 <= most ? 2 : 0;
  const body = roomy ? each * count : Math.max(40, most - between * (groups.length - 1));
  const grain = !roomy && body / count < 2 ? 2 : 1;
  const mainTop = pin.length ? pin.length * pinHeight + 10 : 0;
  const blocks: Block[] = [];
  let y = mainTop;
  for (const { title, from, to } of groups) {
    const titled = roomy && several;
    if (titled) y += TITLE;
    const height = roomy ? each * (to - from) : (body * (to - from)) / count;
    blocks.push({ title, from, to, top: y, height, titled });
    y += height + between;
  }
  const height = Math.ceil((y - between) / grain) * grain;
  const lines = Math.max(1, height / grain);
  const rows: Ranges = { from: new Int32Array(lines).fill(-1), to: new Int32Array(lines) };
  const place = (top: number, bottom: number, from: number, to: number) => {
    const begin = Math.round(top / grain), end = Math.min(lines, Math.max(begin + 1, Math.round(bottom / grain)));
    const scale = (to - from) / (end - begin);
    for (let line = begin; line < end; line++) {
      rows.from[line] = Math.min(to - 1, Math.floor(from + (line - begin) * scale + 1e-9));
      // Thick rows: a line belongs to the one in which it begins, so that rows keep sharp sides.
      const next = from + (line + 1 - begin) * scale;
      rows.to[line] = Math.min(to, Math.max(rows.from[line] + 1, scale >= 1 ? Math.ceil(next - 1e-9) : 0));
    }
  };
  if (between || roomy) for (const block of blocks) place(block.top, block.top + block.height, block.from, block.to);
  else place(mainTop, mainTop + body, first, last);
  if (roomy) for (const block of blocks) for (let r = block.from; r < block.to; r++) gap(rows, block.top + (r - block.from + 1) * each - 1);
  const pinned = pin.map((row, i) => ({ row, top: i * pinHeight, height: pinHeight - 2 }));
  for (const one of pinned) place(one.top, one.top + one.height, one.row, one.row + 1);
  return { rows, height, grain, blocks, pinned, mainTop };
}

function gap(rows: Ranges, line: number): void {
  if (line >= 0 && line < rows.from.length) rows.from[line] = -1;
}

interface Cell { row: number; column: number; value: number | null; rows: number; columns: number }

/** The heat map with its switch of measures, scale and hints. */
export function heatmap(view: Heatmap, arrays: Arrays, context: Context, finer: Finer = null): HTMLElement {
  if (!view.rows.length || view.edges.length < 2 || !view.measures.length)
    return h("p", { class: "nothing" }, "No rank has steps here.");
  return new HeatmapView(view, arrays, context, finer).element;
}

class HeatmapView {
  readonly element = h("div", { class: "heatmap" });
  private readonly host: HTMLElement;
  private readonly base = h("canvas", { "aria-hidden": true });
  private readonly over = h("canvas", { class: "over", "aria-hidden": true });
  private readonly live = h("div", { class: "hidden", "aria-live": "polite" });
  private readonly scale = h("div", { class: "scale" });
  private readonly shown = h("p", { class: "shown" });
  private readonly buttons: HTMLButtonElement[] = [];
  private readonly whole: [number, number];
  private readonly finest: Map<string, { edges: number[]; cells: Uint8Array; measure: Measure }> = new Map();
  private readonly unpinned: number;
  private layout!: Layout;
  private columns!: Ranges;
  private left = 0;
  private grain = 1;
  private width = 0;
  private height = 0;
  private cursor: { row: number; column: number } | null = null;
  private brush: { x: number; y: number; toX: number; toY: number } | null = null;
  private asking: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly view: Heatmap, private readonly arrays: Arrays, private readonly context: Context,
    private readonly finer: Finer,
  ) {
    this.whole = [view.edges[0], view.edges.at(-1)!];
    this.unpinned = Math.max(0, view.rows.filter(({ pinned }) => pinned).length - MOST_PINNED);
    if (this.unpinned + MOST_PINNED >= view.rows.length) this.unpinned = 0; // All are named: none is on top.
    const help = newId("help");
    this.host = h("div", {
      class: "plot", role: "application", tabindex: 0, "aria-describedby": help, "data-part": "cells",
      "aria-label": `Heat map of ${counted(view.rows.length, "rank")} by steps ${this.whole[0]} to ${this.whole[1] - 1}`,
    }, this.base, this.over, this.live, h("span", { id: help, class: "hidden" },
      "Arrow keys move a cell, Enter selects its rank, plus and minus zoom, Escape shows all."));
    const group = h("div", { class: "switch", role: "group", "aria-label": "Measure" });
    for (const measure of view.measures) {
      const button = h("button", { type: "button", "data-measure": measure.key }, measure.title);
      button.addEventListener("click", () => this.context.state.showMeasure(measure.key));
      this.buttons.push(button);
      group.append(button);
    }
    const reset = h("button", { type: "button", class: "reset" }, "Show all");
    reset.addEventListener("click", () => this.reset());
    this.shown.append(reset);
    add(this.element, h("div", { class: "tools" }, group, this.scale), this.host, this.shown,
      h("p", { class: "hint" }, "Drag to zoom, wheel after a click on the map; double click or Escape shows all; " +
        "arrow keys and Enter select a rank."), markList(view.marks));
    this.listen();
    context.state.follow((changed) => (changed === "rank" ? this.mark() : this.draw()), context.signal);
    keepDrawn(this.host, () => this.draw(), context.signal);
  }

  private get measure(): Measure {
    return this.view.measures.find(({ key }) => key === this.context.state.measure) ?? this.view.measures[0];
  }

  private get rowsFrom(): number {
    return this.zoomedRows[0];
  }

  private get rowsTo(): number {
    return this.zoomedRows[1];
  }

  private get zoomedRows(): [number, number] {
    const { rows } = this.context.state, all = this.view.rows.length;
    return rows && rows[0] < rows[1] && rows[1] <= all ? rows : [0, all];
  }

  private get steps(): [number, number] {
    const chosen = this.context.state.steps;
    if (!chosen) return this.whole;
    const from = Math.max(this.whole[0], chosen[0]), to = Math.min(this.whole[1], chosen[1] + 1);
    return to > from ? [from, to] : this.whole;
  }

  /** The cells to draw: in full resolution where the server sent them. */
  private cells(): { edges: number[]; cells: Uint8Array; measure: Measure } {
    const measure = this.measure, [from, to] = this.steps;
    const fine = this.finest.get(measure.key);
    if (fine && fine.edges[0] <= from && fine.edges.at(-1)! >= to) return fine;
    return { edges: this.view.edges, cells: this.arrays.bytesOf(measure.cells), measure };
  }

  private draw(): void {
    this.width = this.host.clientWidth;
    if (!this.width) return;
    const { rows } = this.view, colors = theme();
    this.left = this.width < 480 ? 64 : 112;
    const plotWidth = this.width - this.left - 1;
    const most = rows.length > 200 ? Math.min(900, Math.max(360, Math.round(innerHeight * 0.55))) : 420;
    this.layout = layOut(rows, this.rowsFrom, this.rowsTo, most);
    this.height = TOP + this.layout.height + BOTTOM;
    const c = sized(this.base, this.width, this.height);
    sized(this.over, this.width, this.height);
    const { edges, cells, measure } = this.cells();
    const [from, to] = this.steps;
    const columnsShown = columnOf(edges, to - 1) - columnOf(edges, from) + 1;
    const grain = columnsShown * 2 > plotWidth ? 2 : 1;
    this.grain = grain;
    const across = Math.max(1, Math.ceil(plotWidth / grain));
    this.columns = columnRanges(edges, from, from + ((to - from) * across * grain) / plotWidth, across);
    if (edges.length - 1 > 0 && cells.length !== rows.length * (edges.length - 1))
      throw new Error("the cells do not fit the ranks and steps");
    const pooled = pool(cells, edges.length - 1, this.layout.rows, this.columns, measure.high_is_bad);
    const lines = this.layout.rows.from.length;
    const image = new ImageData(across, lines);
    const words = new Uint32Array(image.data.buffer);
    const table = lookUp(measure.high_is_bad, colors.unknown);
    for (let y = 0; y < lines; y++) {
      if (this.layout.rows.from[y] < 0) continue;
      for (let x = 0, i = y * across; x < across; x++, i++) if (this.columns.from[x] >= 0) words[i] = table[pooled[i]];
    }
    const small = document.createElement("canvas");
    small.width = across;
    small.height = lines;
    small.getContext("2d")!.putImageData(image, 0, 0);
    c.imageSmoothingEnabled = false;
    c.save();
    c.beginPath();
    c.rect(this.left, 0, plotWidth, this.height);
    c.clip();
    c.drawImage(small, this.left, TOP, across * grain, lines * this.layout.grain);
    c.restore();
    this.drawLabels(c);
    this.drawSteps(c, plotWidth);
    this.describe(measure, colors.unknown);
    this.mark();
    this.askFiner();
  }

  private drawLabels(c: CanvasRenderingContext2D): void {
    const { rows } = this.view, { blocks, pinned, mainTop } = this.layout, colors = theme();
    c.textBaseline = "middle";
    const small = this.left < 100;
    c.font = font(11);
    for (const { row, top, height } of pinned) {
      c.fillStyle = colors.named;
      c.fillText(fitted(c, small ? `▸ ${rows[row].rank}` : `▸ rank ${rows[row].rank}`, this.left - 8), 2, TOP + top + height / 2);
    }
    if (pinned.length) {
      c.fillStyle = colors.line;
      c.fillRect(0, TOP + mainTop - 5, this.width, 1);
    }
    let free = -Infinity;
    for (const block of blocks) {
      const y = TOP + block.top;
      if (block.titled) {
        c.fillStyle = colors.muted;
        c.font = font(11, true);
        c.fillText(fitted(c, block.title, this.width - 8), 2, y - TITLE / 2);
        c.font = font(11);
        c.fillStyle = colors.text;
      }
      const each = block.height / (block.to - block.from);
      if (each >= LABELLED) {
        c.fillStyle = colors.text;
        for (let r = block.from; r < block.to; r++)
          c.fillText(fitted(c, small ? String(rows[r].rank) : `rank ${rows[r].rank}`, this.left - 14), 8, y + (r - block.from + 0.5) * each);
      } else {
        const middle = y + block.height / 2;
        const title = block.title || `ranks ${rows[block.from].rank}–${rows[block.to - 1].rank}`;
        if (middle - 7 < free) continue;
        c.fillStyle = colors.muted;
        c.fillText(fitted(c, title, this.left - 10), 2, middle);
        c.fillStyle = colors.line;
        c.fillRect(this.left - 5, y, 2, block.height);
        free = middle + 7;
      }
    }
  }

  private drawSteps(c: CanvasRenderingContext2D, plotWidth: number): void {
    const colors = theme(), bottom = TOP + this.layout.height, [from, to] = this.steps;
    c.font = font(11);
    c.textBaseline = "top";
    c.fillStyle = colors.muted;
    const last = Math.max(from, to - 1);
    const some = ticks(from, last, Math.max(2, plotWidth / 90)).filter(Number.isInteger);
    let free = -Infinity;
    for (const step of some) {
      const x = this.left + ((step + 0.5 - from) / (to - from)) * plotWidth;
      const text = step.toLocaleString("en-US");
      const half = c.measureText(text).width / 2;
      const at = Math.min(this.width - half - 1, Math.max(this.left + half, x));
      if (at - half < free) continue;
      c.fillRect(x, bottom, 1, 4);
      c.fillText(text, at - half, bottom + 7);
      free = at + half + 12;
    }
    c.fillText("step", 2, bottom + 7);
    c.save();
    c.beginPath();
    c.rect(this.left - 6, 0, plotWidth + 12, this.height);
    c.clip();
    for (const mark of this.view.marks) {
      if (mark.step < from || mark.step >= to) continue;
      const x = this.left + ((mark.step - from) / (to - from)) * plotWidth;
      c.fillStyle = mark.kind === "change" ? colors.named : colors.muted;
      c.textBaseline = "top";
      c.font = font(11, true);
      c.textAlign = "center";
      c.fillText(MARKS[mark.kind]?.sign ?? "•", x, 2);
      c.textAlign = "left";
      c.strokeStyle = mark.kind === "change" ? colors.named : "#ffffffaa";
      c.setLineDash(mark.kind === "change" ? [] : [2, 3]);
      c.beginPath();
      c.moveTo(x, TOP - 4);
      c.lineTo(x, bottom);
      c.stroke();
      c.setLineDash([]);
    }
    c.restore();
  }

  private describe(measure: Measure, unknown: [number, number, number]): void {
    for (const button of this.buttons)
      button.setAttribute("aria-pressed", String(button.dataset.measure === measure.key));
    const bar = h("span", { class: "bar", "aria-hidden": true });
    const stops = Array.from({ length: 11 }, (_, i) => css(cividis(measure.high_is_bad ? i / 10 : 1 - i / 10)));
    bar.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
    const none = h("span", { class: "unknown", "aria-hidden": true });
    none.style.background = css(unknown);
    clear(this.scale, format(measure.low, measure.unit), bar, format(measure.high, measure.unit), none, "not known");
    const [from, to] = this.steps, rows = this.rowsTo - this.rowsFrom;
    const zoomed = rows < this.view.rows.length || to - from < this.whole[1] - this.whole[0];
    const reset = this.shown.querySelector("button")!;
    reset.hidden = !zoomed;
    const text = `Steps ${from.toLocaleString("en-US")} to ${(to - 1).toLocaleString("en-US")}, ` +
      (zoomed ? `${rows.toLocaleString("en-US")} of ` : "") + counted(this.view.rows.length, "rank") +
      (this.unpinned ? `; ${counted(this.unpinned, "more named rank")} not drawn on top` : "");
    this.shown.replaceChildren(`${text} `, reset);
    this.host.dataset.steps = `${from}-${to - 1}`;
    this.host.dataset.rows = `${this.rowsFrom}-${this.rowsTo - 1}`;
  }

  /** What is under a point of the picture. */
  private cellAt(x: number, y: number): Cell | null {
    const { edges, cells, measure } = this.cells();
    const line = Math.floor((y - TOP) / this.layout.grain), across = Math.floor((x - this.left) / this.grain);
    const { rows } = this.layout;
    if (x < this.left || line < 0 || line >= rows.from.length || across < 0 || across >= this.columns.from.length) return null;
    if (rows.from[line] < 0 || this.columns.from[across] < 0) return null;
    const of: [number, number] = [rows.from[line], rows.to[line]];
    const wide: [number, number] = [this.columns.from[across], this.columns.to[across]];
    const best = extreme(cells, edges.length - 1, of, wide, measure.high_is_bad);
    const size = { rows: of[1] - of[0], columns: wide[1] - wide[0] };
    return best ? { ...best, ...size } : { row: of[0], column: wide[0], value: null, ...size };
  }

  private linesOf(cell: Cell): string[] {
    const { edges, measure } = this.cells(), row = this.view.rows[cell.row];
    const value = cell.value === null || cell.value === UNKNOWN_CELL ? null
      : measure.low + (cell.value / 254) * (measure.high - measure.low);
    const first = edges[cell.column], last = edges[cell.column + 1] - 1;
    const where = [row.host, row.gpu].filter(Boolean).join(", ");
    const lines = [
      `rank ${row.rank}${where ? ` on ${where}` : ""}`,
      first === last ? `step ${first}` : `steps ${first} to ${last}`,
      `${measure.title}: ${value === null ? `${UNKNOWN} (not known)` : format(value, measure.unit)}`,
    ];
    if (row.group && row.group !== row.host) lines.push(row.group);
    if (cell.rows > 1 || cell.columns > 1)
      lines.push(`${measure.high_is_bad ? "highest" : "lowest"} of ${counted(cell.rows, "rank")} and ` +
        `${counted(cell.columns, "column")} under this pixel`);
    for (const mark of this.view.marks)
      if (mark.step >= first && mark.step <= last) lines.push(`${MARKS[mark.kind]?.title ?? "note"}: ${mark.text}`);
    return lines;
  }

  /** Where a row is drawn: in the map, or null where it is not shown. */
  private lineOf(row: number): { y: number; height: number } | null {
    const block = this.layout.blocks.find(({ from, to }) => row >= from && row < to);
    if (!block) return null;
    const each = block.height / (block.to - block.from);
    return { y: TOP + block.top + (row - block.from) * each, height: Math.max(2, each - (each >= LABELLED ? 1 : 0)) };
  }

  private boxOf(row: number, column: number): Box | null {
    const line = this.lineOf(row), { edges } = this.cells(), [from, to] = this.steps;
    if (!line) return null;
    const scale = (this.width - this.left - 1) / (to - from);
    const x = this.left + (edges[column] - from) * scale;
    const begin = Math.max(this.left, x), end = Math.min(this.width - 1, x + (edges[column + 1] - edges[column]) * scale);
    return { x: begin, y: line.y, w: Math.max(3, end - begin), h: Math.max(3, line.height) };
  }

  private mark(): void {
    const c = this.over.getContext("2d")!, colors = theme(), { state } = this.context;
    if (!this.layout) return;
    c.clearRect(0, 0, this.width, this.height);
    if (state.rank !== null) {
      const row = this.view.rows.findIndex(({ rank }) => rank === state.rank);
      const places = this.layout.pinned.filter((one) => one.row === row).map(({ top, height }) => ({ y: TOP + top, height }));
      const line = row < 0 ? null : this.lineOf(row);
      for (const place of line ? [...places, line] : places) {
        // Around it: a row may be thinner than the line.
        outline(c, { x: this.left, y: place.y - 2, w: this.width - this.left - 2, h: place.height + 4 }, colors, false);
        c.fillStyle = colors.text;
        c.beginPath();
        c.moveTo(this.left - 1, place.y + place.height / 2);
        c.lineTo(this.left - 8, place.y + place.height / 2 - 5);
        c.lineTo(this.left - 8, place.y + place.height / 2 + 5);
        c.fill();
      }
    }
    if (this.cursor) {
      const box = this.boxOf(this.cursor.row, this.cursor.column);
      if (box) outline(c, box, colors, true);
    }
    if (this.brush) {
      const box = this.brushed();
      c.fillStyle = "#ffffff44";
      c.fillRect(box.x, box.y, box.w, box.h);
      outline(c, box, colors, false);
    }
  }

  /** The box that is being dragged: over all ranks or all steps where it is a narrow band. */
  private brushed(): Box {
    const { x, y, toX, toY } = this.brush!;
    const top = TOP + this.layout.mainTop, bottom = TOP + this.layout.height;
    const clampX = (value: number) => Math.min(this.width - 1, Math.max(this.left, value));
    const clampY = (value: number) => Math.min(bottom, Math.max(top, value));
    const box = { x: clampX(Math.min(x, toX)), y: clampY(Math.min(y, toY)), w: 0, h: 0 };
    box.w = clampX(Math.max(x, toX)) - box.x;
    box.h = clampY(Math.max(y, toY)) - box.y;
    if (box.h < 8) [box.y, box.h] = [top, bottom - top];
    if (box.w < 8) [box.x, box.w] = [this.left, this.width - 1 - this.left];
    return box;
  }

  private zoomTo(box: Box): void {
    const [from, to] = this.steps, scale = (to - from) / (this.width - this.left - 1);
    const first = Math.floor(from + (box.x - this.left) * scale + 1e-6);
    const last = Math.max(first, Math.ceil(from + (box.x + box.w - this.left) * scale - 1e-6) - 1);
    const grain = this.layout.grain, { rows } = this.layout;
    let a = Infinity, b = -1;
    for (let y = Math.floor((box.y - TOP) / grain); y < Math.ceil((box.y + box.h - TOP) / grain); y++) {
      if (y * grain < this.layout.mainTop || y >= rows.from.length || rows.from[y] < 0) continue;
      a = Math.min(a, rows.from[y]);
      b = Math.max(b, rows.to[y]);
    }
    if (b > a) this.context.state.rows = [a, b];
    this.show(first, Math.min(last, to - 1));
  }

  /** Steps first to last: all of them is no choice. */
  private show(first: number, last: number): void {
    const all = first <= this.whole[0] && last >= this.whole[1] - 1;
    const next: [number, number] | null = all ? null : [Math.max(first, this.whole[0]), Math.min(last, this.whole[1] - 1)];
    const before = this.context.state.steps;
    this.context.state.showSteps(next);
    if (before?.[0] === next?.[0] && before?.[1] === next?.[1]) this.draw();
  }

  private reset(): void {
    this.context.state.rows = null;
    this.cursor = null;
    this.show(this.whole[0], this.whole[1] - 1);
    hideTip();
  }

  /** Zooms by a factor and keeps the step and the row of a point where they are. */
  private zoomBy(factor: number, step: number, row: number): void {
    const [from, to] = this.steps, total = this.view.rows.length;
    const span = Math.max(2, Math.min(this.whole[1] - this.whole[0], Math.round((to - from) * factor)));
    const first = Math.round(step - ((step - from) / (to - from)) * span);
    const begin = Math.max(this.whole[0], Math.min(first, this.whole[1] - span));
    const count = this.rowsTo - this.rowsFrom;
    if (total > 24) {
      const next = Math.max(8, Math.min(total, Math.round(count * factor)));
      const top = Math.round(row - ((row - this.rowsFrom) / count) * next);
      const begin = Math.max(0, Math.min(top, total - next));
      this.context.state.rows = next < total ? [begin, begin + next] : null;
    }
    this.show(begin, begin + span - 1);
  }

  private listen(): void {
    const { host } = this;
    const moved = onceAFrame(() => this.mark());
    const at = (event: MouseEvent): [number, number] => {
      const box = host.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    host.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.pointerType === "touch") return;
      const [x, y] = at(event);
      this.brush = { x, y, toX: x, toY: y };
      host.setPointerCapture(event.pointerId);
    });
    host.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (this.brush) {
        [this.brush.toX, this.brush.toY] = [x, y];
        moved();
        return;
      }
      const cell = this.cellAt(x, y);
      if (cell) showTip(event.clientX, event.clientY, this.linesOf(cell));
      else hideTip();
    });
    host.addEventListener("pointerup", (event) => {
      const brush = this.brush;
      if (event.pointerType === "touch") {
        const cell = this.cellAt(...at(event));
        if (cell) this.context.state.selectRank(this.view.rows[cell.row].rank);
      }
      if (!brush) return;
      if (Math.abs(brush.toX - brush.x) > 5 || Math.abs(brush.toY - brush.y) > 5) {
        const box = this.brushed();
        this.brush = null;
        this.zoomTo(box);
      } else {
        this.brush = null;
        const cell = this.cellAt(brush.x, brush.y);
        if (cell) this.context.state.selectRank(this.view.rows[cell.row].rank);
      }
      this.mark();
    });
    host.addEventListener("pointercancel", () => {
      this.brush = null;
      this.mark();
    });
    host.addEventListener("pointerleave", () => hideTip());
    host.addEventListener("dblclick", () => this.reset());
    host.addEventListener("wheel", (event) => {
      // Else the page could not be scrolled past the map.
      if (document.activeElement !== host && !event.ctrlKey && !event.metaKey) return;
      const [x, y] = at(event), cell = this.cellAt(x, y);
      event.preventDefault();
      if (!cell) return;
      const [from, to] = this.steps;
      this.zoomBy(event.deltaY > 0 ? 1.5 : 1 / 1.5, from + ((x - this.left) / (this.width - this.left - 1)) * (to - from), cell.row);
    }, { passive: false });
    host.addEventListener("keydown", (event) => this.pressed(event));
    host.addEventListener("blur", () => {
      this.cursor = null;
      hideTip();
      this.mark();
    });
  }

  private pressed(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { edges } = this.cells(), [from, to] = this.steps;
    const first = columnOf(edges, from), last = columnOf(edges, to - 1);
    const many = event.shiftKey ? 10 : 1;
    const move = { ArrowLeft: [0, -many], ArrowRight: [0, many], ArrowUp: [-many, 0], ArrowDown: [many, 0],
      PageUp: [-50, 0], PageDown: [50, 0], Home: [0, -1e9], End: [0, 1e9] }[event.key];
    if (move) {
      const clamp = (value: number, low: number, high: number) => Math.max(low, Math.min(high, value));
      this.cursor = this.cursor
        ? { row: clamp(this.cursor.row + move[0], this.rowsFrom, this.rowsTo - 1), column: clamp(this.cursor.column + move[1], first, last) }
        : { row: this.rowsFrom, column: first };
      this.say();
    } else if (event.key === "Enter" || event.key === " ") {
      if (this.cursor) this.context.state.selectRank(this.view.rows[this.cursor.row].rank);
    } else if (event.key === "Escape") this.reset();
    else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const cursor = this.cursor ?? { row: this.rowsFrom, column: first };
      this.zoomBy(event.key === "-" ? 1.5 : 1 / 1.5, edges[cursor.column], cursor.row);
      this.cursor = null;
    } else return;
    event.preventDefault();
    this.mark();
  }

  private say(): void {
    const { row, column } = this.cursor!, { edges, cells } = this.cells();
    const value = cells[row * (edges.length - 1) + column];
    const lines = this.linesOf({ row, column, value: value === UNKNOWN_CELL ? null : value, rows: 1, columns: 1 });
    this.live.textContent = lines.join(", ");
    const box = this.boxOf(row, column), at = this.host.getBoundingClientRect();
    if (box) showTip(at.left + box.x + box.w, at.top + box.y + box.h, lines);
  }

  /** In full resolution, where the page is live and zoomed in. */
  private askFiner(): void {
    clearTimeout(this.asking);
    const { finer, context } = this, [from, to] = this.steps, { key } = this.measure;
    if (!finer || this.view.full || !context.state.steps) return;
    const have = this.finest.get(key);
    if (have && have.edges[0] <= from && have.edges.at(-1)! >= to) return;
    this.asking = setTimeout(async () => {
      try {
        const { heatmap: fine, arrays } = await finer(key, from, to - 1);
        const measure = fine.measures.find((one) => one.key === key);
        if (context.signal.aborted || !measure || fine.rows.length !== this.view.rows.length) return;
        this.finest.set(key, { edges: fine.edges, cells: arrays.bytesOf(measure.cells), measure });
        this.host.dataset.fine = `${fine.edges[0]}-${fine.edges.at(-1)! - 1}`;
        this.cursor = null;
        this.draw();
      } catch {
        this.host.dataset.fine = "failed"; // What is drawn stays true, only coarser.
      }
    }, 150);
  }
}
