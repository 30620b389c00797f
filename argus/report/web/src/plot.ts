// A picture on canvas with things in it: hover, click, arrow keys, a mark on what is selected, dark and light, print.

import { theme, type Theme } from "./colors.ts";
import { h, newId, onceAFrame } from "./dom.ts";
import type { State } from "./state.ts";
import { harmless } from "./units.ts";

export interface Box { x: number; y: number; w: number; h: number }

/** Something in a picture. */
export interface Item {
  box: Box;
  lines: string[];
  rank?: number | null;
  /** On click and Enter; else the item's rank is selected. */
  act?: () => void;
}

export interface Context { state: State; signal: AbortSignal }

export interface Drawing {
  /** Says what the picture shows, to those who do not see it. */
  label: string;
  height(width: number): number;
  /** Draws, and returns what is in the picture, in the order of reading. */
  draw(c: CanvasRenderingContext2D, width: number, height: number, theme: Theme): Item[];
  /** What is at a point, where boxes overlap or are not enough. */
  hit?(x: number, y: number): Item | null;
  key?(event: KeyboardEvent): boolean;
}

const redraws = new Set<() => void>();

/** Draws all pictures anew: other colours. */
export function redrawAll(): void {
  for (const redraw of [...redraws]) redraw();
}

/** Draws now and after each change of size or colours, until the signal. */
export function keepDrawn(host: HTMLElement, draw: () => void, signal: AbortSignal): void {
  let width = 0;
  const observer = new ResizeObserver(() => {
    const now = host.clientWidth;
    if (now > 0 && now !== width) {
      width = now;
      draw();
    }
  });
  observer.observe(host);
  redraws.add(draw);
  signal.addEventListener("abort", () => {
    observer.disconnect();
    redraws.delete(draw);
  });
}

let tip: HTMLElement | null = null;

/** Shows lines beside the pointer. */
export function showTip(x: number, y: number, lines: string[]): void {
  if (!tip) {
    tip = h("div", { class: "tip", role: "tooltip" });
    document.body.append(tip);
  }
  tip.replaceChildren(...lines.map((line, i) => h(i ? "div" : "b", {}, shortened(line))));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > innerWidth ? Math.max(4, x - 14 - width) : x + 14;
  const top = y + 14 + height > innerHeight ? Math.max(4, y - 14 - height) : y + 14;
  tip.style.transform = `translate(${left}px, ${top}px)`;
}

export function hideTip(): void {
  if (tip) tip.hidden = true;
}

function shortened(text: string): string {
  return text.length > 300 ? `${text.slice(0, 200)}…${text.slice(-99)}` : text;
}

/** A canvas as sharp as the screen. */
export function sized(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = Math.min(3, window.devicePixelRatio || 1);
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d")!;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif';

export function font(size: number, bold = false): string {
  return `${bold ? "600 " : ""}${size}px ${FONT}`;
}

/** Text of at most a width, its middle left out; empty where not even three letters have room. */
export function fitted(c: CanvasRenderingContext2D, raw: string, width: number): string {
  const text = harmless(raw.length > 400 ? `${raw.slice(0, 250)}…${raw.slice(-149)}` : raw);
  if (c.measureText(text).width <= width) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (c.measureText(cut(text, middle)).width <= width) low = middle;
    else high = middle - 1;
  }
  return low < 3 ? "" : cut(text, low);
}

function cut(text: string, letters: number): string {
  const tail = Math.floor((letters - 1) / 3);
  return `${text.slice(0, letters - 1 - tail)}…${tail ? text.slice(-tail) : ""}`;
}

/** Outlines a box, readable on any colour. */
export function outline(c: CanvasRenderingContext2D, box: Box, colors: Theme, strong: boolean): void {
  c.lineWidth = strong ? 4 : 3;
  c.strokeStyle = colors.surface;
  c.strokeRect(box.x, box.y, box.w, box.h);
  c.lineWidth = strong ? 2 : 1.5;
  c.strokeStyle = colors.text;
  c.strokeRect(box.x, box.y, box.w, box.h);
}

/** Puts a drawing on the page. */
export function plot(drawing: Drawing, { state, signal }: Context): { element: HTMLElement; redraw: () => void } {
  const live = h("div", { class: "hidden", "aria-live": "polite" });
  const base = h("canvas", { "aria-hidden": true });
  const over = h("canvas", { class: "over", "aria-hidden": true });
  const help = newId("help");
  const host = h(
    "div",
    { class: "plot", role: "application", tabindex: 0, "aria-label": drawing.label, "aria-describedby": help },
    base, over, live, h("span", { id: help, class: "hidden" }, "Arrow keys move, Enter selects."),
  );
  let items: Item[] = [], at = -1, width = 0, height = 0, hovered: Item | null = null;
  const mark = () => {
    const c = over.getContext("2d")!;
    const colors = theme();
    c.clearRect(0, 0, width, height);
    for (const item of items)
      if (state.rank !== null && item.rank === state.rank) outline(c, item.box, colors, false);
    if (hovered) outline(c, hovered.box, colors, false);
    if (at >= 0 && items[at]) outline(c, items[at].box, colors, true);
  };
  const redraw = () => {
    width = host.clientWidth;
    if (!width) return;
    height = drawing.height(width);
    sized(over, width, height);
    items = drawing.draw(sized(base, width, height), width, height, theme());
    at = Math.min(at, items.length - 1);
    hovered = null;
    mark();
  };
  const marked = onceAFrame(mark);
  const find = (x: number, y: number): Item | null =>
    drawing.hit
      ? drawing.hit(x, y)
      : (items.findLast(({ box }) => x >= box.x && x < box.x + box.w && y >= box.y && y < box.y + box.h) ?? null);
  const use = (item: Item) => (item.act ? item.act() : item.rank != null && state.selectRank(item.rank));
  host.addEventListener("pointermove", (event) => {
    const box = host.getBoundingClientRect();
    const item = find(event.clientX - box.left, event.clientY - box.top);
    if (item) showTip(event.clientX, event.clientY, item.lines);
    else hideTip();
    host.style.cursor = item && (item.act || item.rank != null) ? "pointer" : "";
    if (item !== hovered) {
      hovered = item;
      marked();
    }
  });
  host.addEventListener("pointerleave", () => {
    hovered = null;
    hideTip();
    marked();
  });
  host.addEventListener("click", (event) => {
    const box = host.getBoundingClientRect();
    const item = find(event.clientX - box.left, event.clientY - box.top);
    if (item) use(item);
  });
  const say = () => {
    const item = items[at];
    live.textContent = item ? item.lines.join(", ") : "";
    const box = host.getBoundingClientRect();
    if (item) showTip(box.left + item.box.x + Math.min(item.box.w, 40), box.top + item.box.y + item.box.h, item.lines);
    mark();
  };
  host.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (drawing.key?.(event)) return event.preventDefault();
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (move && items.length) at = at < 0 ? 0 : nearest(items, at, move[0], move[1]);
    else if (event.key === "Home" && items.length) at = 0;
    else if (event.key === "End" && items.length) at = items.length - 1;
    else if ((event.key === "Enter" || event.key === " ") && items[at]) use(items[at]);
    else if (event.key === "Escape") {
      at = -1;
      hideTip();
    } else return;
    event.preventDefault();
    say();
  });
  host.addEventListener("blur", () => {
    at = -1;
    hideTip();
    mark();
  });
  state.follow((changed) => changed === "rank" && mark(), signal);
  keepDrawn(host, redraw, signal);
  return { element: host, redraw };
}

/** The item next to another in a direction, by the middles of their boxes. */
export function nearest(items: Item[], from: number, dx: number, dy: number): number {
  const { x, y, w, h: height } = items[from].box;
  let best = from, least = Infinity;
  items.forEach(({ box }, i) => {
    const across = box.x + box.w / 2 - (x + w / 2), down = box.y + box.h / 2 - (y + height / 2);
    const ahead = across * dx + down * dy;
    const aside = Math.abs(across * dy) + Math.abs(down * dx);
    if (i === from || ahead < 0.5) return;
    const cost = ahead + 3 * aside;
    if (cost < least) [best, least] = [i, cost];
  });
  return best;
}
