// The page: reads its data, draws it, follows the address and the server.

import { redrawAll } from "./plot.ts";
import { themeChanged } from "./colors.ts";
import { add, clear, folded, h } from "./dom.ts";
import { jump, panel, panelId, signature } from "./panel.ts";
import { runList } from "./runs.ts";
import type { Page } from "./contract.ts";
import { Embedded, Served, Unavailable, type Loaded, type Source } from "./source.ts";
import { fromAddress, State, toAddress } from "./state.ts";
import { counted, harmless, wallTime } from "./units.ts";
import { verdict } from "./verdict.ts";
import "../page.css";

const root = document.getElementById("argus")!;
const state = new State();
const bar = h("header", { class: "top" });
const notice = h("p", { class: "notice", role: "alert", hidden: true });
const main = h("main", { id: "main" });
let open: { job: string | null; run: number | null } = { job: null, run: null };

function notify(text: string): void {
  notice.textContent = harmless(text);
  notice.hidden = !text;
}

// --- colours

type Choice = "auto" | "light" | "dark";
const CHOICES: Choice[] = ["auto", "light", "dark"];
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const printing = matchMedia("print");
let choice: Choice = "auto";

function paint(): void {
  const dark = !printing.matches && !printingNow && (choice === "dark" || (choice === "auto" && systemDark.matches));
  document.documentElement.toggleAttribute("data-dark", dark);
  document.documentElement.style.colorScheme = dark ? "dark" : "light";
  themeChanged();
  redrawAll();
}

let printingNow = false;
let openedForPrint: HTMLDetailsElement[] = [];

function beforePrint(): void {
  if (printingNow) return;
  printingNow = true;
  openedForPrint = [...document.querySelectorAll<HTMLDetailsElement>("details:has(table):not([open])")];
  for (const each of openedForPrint) each.open = true;
  paint();
}

function afterPrint(): void {
  if (!printingNow) return;
  printingNow = false;
  for (const each of openedForPrint) each.open = false;
  paint();
}

function themeSwitch(): HTMLElement {
  const button = h("button", { type: "button", class: "theme" });
  const name = () => {
    button.textContent = `Colours: ${choice}`;
    button.setAttribute("aria-label", `Colours: ${choice}. Switch.`);
  };
  button.addEventListener("click", () => {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    try {
      localStorage.setItem("argus-colours", choice);
    } catch {
      // Kept for this page only.
    }
    name();
    paint();
  });
  name();
  return button;
}

// --- what is selected

function markRank(): void {
  for (const each of document.querySelectorAll<HTMLElement>("[data-rank]")) {
    const is = state.rank !== null && each.dataset.rank === String(state.rank);
    each.classList.toggle("selected", is);
    if (each.tagName === "BUTTON") each.setAttribute("aria-pressed", String(is));
  }
  const chip = bar.querySelector<HTMLElement>(".chip");
  if (!chip) return;
  chip.hidden = state.rank === null;
  chip.textContent = chip.hidden ? "" : `rank ${state.rank} ✕`;
  chip.setAttribute("aria-label", chip.hidden ? "No rank is selected." : `Rank ${state.rank} is selected. Clear.`);
}

let written = location.hash;

function writeAddress(): void {
  written = toAddress(state, open.job, open.run);
  try {
    history.replaceState(null, "", written || location.pathname + location.search);
  } catch {
    // Some browsers refuse it for files.
  }
}

// --- the page of a run

interface Shown { element: HTMLElement; sign: string; end: AbortController }
const shown = new Map<string, Shown>();
let verdictShown = "";

function forget(): void {
  for (const { end } of shown.values()) end.abort();
  shown.clear();
  verdictShown = "";
}

function topBar(source: Source, page: Page | null): void {
  clear(bar,
    source.live && page ? h("a", { href: "#", class: "brand" }, "◂ Runs") : h("span", { class: "brand" }, "Argus"),
    page && h("h1", {}, h("span", { class: "name" }, page.job), h("span", { class: "run" }, `run ${page.run}`)),
    !page && h("h1", {}, "Runs"),
    h("span", { class: "space" }),
    page && h("button", { type: "button", class: "chip", hidden: true, onclick: () => state.selectRank(null) }),
    source.live && h("span", { class: "link", role: "status" }),
    themeSwitch());
}

function place(source: Source, { page, arrays }: Loaded, fresh: boolean): void {
  if (fresh || !main.querySelector(".panels")) {
    forget();
    topBar(source, page);
    clear(main, h("div", { class: "lead-in" }), h("nav", { "aria-label": "Panels" }), h("div", { class: "panels" }), h("div", { class: "rest" }));
  }
  const panels = page.panels ?? [];
  const present = panels.filter(({ absent }) => !absent), absent = panels.filter((one) => one.absent);
  const sign = JSON.stringify([page.summary, page.verdict]);
  if (sign !== verdictShown) {
    verdictShown = sign;
    keepFolds(main.querySelector<HTMLElement>(".lead-in")!, (into) => into.replaceChildren(verdict(page, state)));
  }
  const nav = main.querySelector("nav")!;
  const links = h("ul", {}, present.map((one) => h("li", {}, h("a", { href: `#${panelId(one.id)}`, onclick: (event) => jump(event, panelId(one.id)) }, one.title))));
  const contents = folded(`${counted(present.length, "panel")}`, "contents", links);
  contents.open = matchMedia("(min-width: 1200px)").matches;
  nav.replaceChildren(contents);
  nav.hidden = present.length < 2;
  const into = main.querySelector<HTMLElement>(".panels")!;
  const before = new Set(shown.keys());
  // The name in the address: the page has it shortened, and without control characters.
  const finer = source.live
    ? (measure: string, first: number, last: number) => source.heatmap(open.job ?? page.job, open.run ?? page.run, measure, first, last) : null;
  into.style.minHeight = `${into.offsetHeight}px`; // No jump while pictures are drawn anew.
  present.forEach((one, i) => {
    before.delete(one.id);
    const old = shown.get(one.id), now = signature(one, arrays);
    if (old?.sign !== now) {
      const end = new AbortController();
      const element = panel(one, arrays, { state, signal: end.signal }, finer);
      if (old) {
        copyFolds(old.element, element);
        old.element.replaceWith(element);
        old.end.abort();
      }
      shown.set(one.id, { element, sign: now, end });
    }
    const { element } = shown.get(one.id)!;
    if (into.children[i] !== element) into.insertBefore(element, into.children[i] ?? null);
  });
  for (const id of before) {
    shown.get(id)!.end.abort();
    shown.get(id)!.element.remove();
    shown.delete(id);
  }
  requestAnimationFrame(() => requestAnimationFrame(() => (into.style.minHeight = "")));
  clear(main.querySelector(".rest")!,
    absent.length > 0 && h("section", { class: "absent", "aria-labelledby": "absent-title" },
      h("h2", { id: "absent-title" }, "Not on this page"),
      h("dl", {}, absent.map(({ title, absent: why }) => h("div", {}, h("dt", {}, title), h("dd", {}, why))))),
    footer(source, page));
  notify(arrays.damage ? `Pictures are missing: ${arrays.damage}. Make the page anew with argus report.` : "");
  document.title = harmless(`${page.job} run ${page.run}: ${page.verdict?.status ?? ""} · Argus`).slice(0, 200);
  markRank();
}

function footer(source: Source, page: Loaded["page"]): HTMLElement {
  const { first_step: first, last_step: last, begin_ns: begin, end_ns: end } = page.window ?? {};
  const steps = first === null || first === undefined ? "no steps" : `steps ${first.toLocaleString("en-US")} to ${last?.toLocaleString("en-US")}`;
  return h("footer", {}, `${source.live ? "Shown" : "Made"} by Argus ${page.argus}, ${wallTime(page.made_ns)}. ` +
    `It covers ${steps}, ${wallTime(begin)} to ${wallTime(end)}.`);
}

function copyFolds(from: HTMLElement, to: HTMLElement): void {
  const opened = new Set([...from.querySelectorAll<HTMLDetailsElement>("details[open]")].map((each) => each.dataset.key));
  for (const each of to.querySelectorAll<HTMLDetailsElement>("details")) each.open = opened.has(each.dataset.key);
}

function keepFolds(element: HTMLElement, change: (into: HTMLElement) => void): void {
  const before = element.cloneNode(true) as HTMLElement;
  change(element);
  copyFolds(before, element);
}

// --- which page

let ending = new AbortController();

async function show(source: Source): Promise<void> {
  const { token: _, ...wanted } = fromAddress(location.hash);
  const same = main.querySelector(".panels, .runs") !== null && (!source.live || (wanted.job === open.job && wanted.run === open.run));
  open = { job: wanted.job, run: wanted.run };
  state.rank = wanted.rank;
  state.measure = wanted.measure;
  if (same) {
    state.showSteps(wanted.steps);
    markRank();
    redrawAll();
    return;
  }
  state.steps = wanted.steps;
  state.rows = null;
  ending.abort();
  ending = new AbortController();
  const { signal } = ending;
  try {
    if (source.live && (wanted.job === null || wanted.run === null)) await showRuns(source, signal);
    else await showRun(source, wanted.job ?? "", wanted.run ?? 0, signal);
  } catch (failure) {
    if (signal.aborted) return;
    forget();
    topBar(source, null);
    clear(main);
    notify(failure instanceof Unavailable ? failure.message : `The page cannot be drawn: ${String((failure as Error)?.message ?? failure).slice(0, 200)}`);
    if (source.live) add(main, h("p", { class: "retry" }, h("button", { type: "button", onclick: () => void show(source) }, "Try again")));
  }
  main.setAttribute("aria-busy", "false");
}

async function showRuns(source: Source, signal: AbortSignal): Promise<void> {
  let before = "";
  const list = async () => {
    const runs = await source.runs();
    const now = JSON.stringify(runs);
    if (signal.aborted || now === before) return;
    before = now;
    forget();
    topBar(source, null);
    clear(main, runList(runs));
  };
  await list();
  notify("");
  document.title = "Runs · Argus";
  const again = setInterval(() => {
    if (!document.hidden) list().then(() => notify(""), (failure: Error) => signal.aborted || notify(failure.message));
  }, 10_000);
  signal.addEventListener("abort", () => clearInterval(again));
}

async function showRun(source: Source, job: string, run: number, signal: AbortSignal): Promise<void> {
  const loaded = await source.page(job, run);
  if (signal.aborted) return;
  place(source, loaded, true);
  let version = loaded.version;
  let busy = false, again = false;
  const refresh = async () => {
    again = true;
    if (busy) return;
    busy = true;
    while (again && !signal.aborted) {
      again = false;
      try {
        const next = await source.page(job, run);
        version = next.version;
        if (!signal.aborted) place(source, next, false);
        main.dataset.refreshed = String(Number(main.dataset.refreshed ?? 0) + 1);
      } catch (failure) {
        if (!signal.aborted) notify((failure as Error).message);
      }
    }
    busy = false;
  };
  source.follow(job, run, () => version, () => void refresh(), (is, why) => {
    const link = bar.querySelector(".link");
    if (link) link.textContent = is ? "live" : harmless(why ? `not connected: ${why}` : "not connected");
  }, signal);
}

async function start(): Promise<void> {
  try {
    const kept = localStorage.getItem("argus-colours") as Choice | null;
    if (kept && CHOICES.includes(kept)) choice = kept;
  } catch {
    // Then it is the system's.
  }
  paint();
  systemDark.addEventListener("change", paint);
  printing.addEventListener("change", ({ matches }) => (matches ? beforePrint() : afterPrint()));
  addEventListener("beforeprint", beforePrint);
  addEventListener("afterprint", afterPrint);
  const { token } = fromAddress(location.hash);
  if (token !== null) history.replaceState(null, "", location.hash.replace(/([#&])token=[^&]*&?/, "$1").replace(/[#&]$/, "") || location.pathname);
  const source: Source = document.documentElement.dataset.source === "served" ? new Served(token) : new Embedded();
  const first = root.querySelector(".first"); // The verdict as text, until it is drawn.
  if (first) add(main, first as HTMLElement);
  clear(root, h("a", { class: "skip", href: "#main", onclick: (event) => jump(event, "main") }, "To the content"), bar, notice, main);
  const forever = new AbortController().signal;
  state.follow((changed) => {
    if (changed === "rank") markRank();
    writeAddress();
  }, forever);
  addEventListener("hashchange", () => {
    if (location.hash !== written) {
      written = location.hash;
      void show(source);
    }
  });
  await show(source);
  document.documentElement.dataset.ready = "1";
}

void start();
