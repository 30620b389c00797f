// The verdict, in words, before all pictures.

import type { Finding, Page } from "./contract.ts";
import { folded, h, query, type Child } from "./dom.ts";
import type { State } from "./state.ts";
import { counted, format, ranksText } from "./units.ts";

const SIGNS: Record<string, string> = { healthy: "✓", degraded: "▲", hung: "■", inconclusive: "?" };
const MOST_BUTTONS = 16;
/** A lower slowdown costs no time: texts have two decimals. As argus.diagnose.verdict has it. */
const NOTABLE = 1.005;

/** Status, summary, findings, coverage. */
export function verdict(page: Page, state: State): HTMLElement {
  const found = page.verdict ?? {};
  const status = String(found.status ?? "unknown");
  const known = Object.hasOwn(SIGNS, status);
  const steps = found.steps ?? [];
  const extent = [
    found.ranks ? counted(found.ranks, "rank") : "no rank with steps",
    steps.length === 2 && `steps ${steps[0].toLocaleString("en-US")} to ${steps[1].toLocaleString("en-US")}`,
    status === "degraded" && found.slowdown && (found.slowdown < NOTABLE ? "costs no time yet" : `${format(found.slowdown, "ratio")} slower than it could be`),
    status === "hung" && steps.length === 2 && `no step since step ${steps[1]}`,
  ].filter(Boolean).join(" · ");
  const findings = found.findings ?? [];
  return h("section", { class: "verdict", "aria-labelledby": "verdict-title", "data-status": known ? status : "unknown" },
    h("div", { class: "headline" },
      h("h2", { id: "verdict-title", class: "status" }, h("span", { class: "sign", "aria-hidden": true }, SIGNS[known ? status : "inconclusive"]), status),
      h("div", {}, h("p", { class: "summary" }, page.summary), h("p", { class: "extent" }, extent))),
    found.reason && !page.summary.includes(found.reason.slice(1)) ? h("p", { class: "reason" }, found.reason) : null,
    findings.length > 0 && h("ol", { class: "findings" }, findings.map((one, i) => finding(one, i, status, steps[0], state))),
    found.breakdown && breakdown(found.breakdown),
    coverage(found.coverage));
}

function finding(one: Finding, number: number, status: string, first: number | undefined, state: State): HTMLElement {
  const key = `finding-${one.id ?? number}`;
  const free = (one.slowdown ?? 1) < NOTABLE;
  const begin = one.steps?.[0];
  const since = begin === undefined ? "" : first !== undefined && begin <= first ? "all steps seen" : `step ${begin.toLocaleString("en-US")}`;
  const ranks = one.ranks ?? [];
  const who: Child[] = ranks.length
    ? ranks.length <= MOST_BUTTONS
      ? ranks.map((rank) => h("button", { type: "button", class: "rank", "data-rank": rank, onclick: () => state.selectRank(rank) }, `rank ${rank}`))
      : [`ranks ${ranksText(ranks)} (${counted(ranks.length, "rank")})`]
    : ["the whole job"];
  const hosts = (one.hosts ?? []).slice(0, 4).join(", ") + ((one.hosts ?? []).length > 4 ? ` and ${one.hosts.length - 4} more` : "");
  const pairs: [string, Child[]][] = [
    ["Who", [...who, hosts && h("span", { class: "name" }, ` on ${hosts}`)]],
    ["Since", [since]],
    ["Slowdown", [status === "hung" || free ? "" : format(one.slowdown, "ratio")]],
    ["Cost", [status === "hung" ? "" : free ? "no time yet" : `${format(one.share, "share")} of the lost time`]],
    ["Confidence", [format(one.confidence, "share")]],
    ["Owner", [one.owner]],
    ["Where", [[one.phase, ...(one.kernels ?? []).slice(0, 3)].filter(Boolean).join(", ")]],
  ];
  const evidence = one.evidence ?? [];
  return h("li", {},
    h("h3", {}, String(one.kind ?? "finding").replaceAll("_", " ")),
    h("dl", { class: "about" }, pairs.filter(([, value]) => value.some((part) => part !== "" && part !== false)).map(([name, value]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("p", { class: "action" }, h("b", {}, "What to do: "), one.action),
    h("div", { class: "evidence" }, h("h4", {}, "Evidence"), h("ul", {}, evidence.map((each, i) =>
      h("li", {}, each.text, each.sql && folded("SQL", `${key}-${i}`, query(each.sql)))))));
}

function breakdown(one: NonNullable<Page["verdict"]["breakdown"]>): HTMLElement {
  return h("div", { class: "breakdown" }, h("h3", {}, "Where the time goes"),
    h("dl", { class: "facts" }, (one.parts ?? []).map(({ part, text, sql }, i) =>
      h("div", {}, h("dt", {}, part.replaceAll("_", " ")), h("dd", {}, text, sql && folded("SQL", `breakdown-${i}`, query(sql)))))),
    one.advice?.length > 0 && [h("h4", {}, "Worth trying first"), h("ol", {}, one.advice.map((text) => h("li", {}, text)))]);
}

function coverage(one: Page["verdict"]["coverage"]): HTMLElement | null {
  if (!one) return null;
  if (one.complete)
    return h("p", { class: "coverage" }, `Coverage: complete${one.ended === false ? " so far (the trace goes on, or was cut off)" : ""}`);
  const lost = Object.entries(one.dropped ?? {}).slice(0, 12).map(([name, count]) => `${name.replaceAll("_", " ")} ${format(count, "count")}`);
  return h("p", { class: "coverage incomplete" }, h("b", {}, "Coverage: incomplete. "), `Argus did not see all of it: ${lost.join(", ")}.`);
}
