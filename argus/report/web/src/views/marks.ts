// Marks at steps or runs: their signs, and the list under a picture.

import type { Mark } from "../contract.ts";
import { h } from "../dom.ts";

export const MARKS: Record<Mark["kind"], { sign: string; title: string }> = {
  change: { sign: "▼", title: "change" },
  more_work: { sign: "+", title: "more work" },
  note: { sign: "•", title: "note" },
};

const MOST = 8;

/** The marks in words, the first of them; `of`: what they are at. */
export function markList(marks: Mark[], of = "step"): HTMLElement | null {
  if (!marks.length) return null;
  const more = marks.length - MOST;
  return h("ul", { class: "marks" }, marks.slice(0, MOST).map(({ step, kind, text }) =>
    h("li", { class: kind }, h("span", { class: "sign", "aria-hidden": true }, MARKS[kind]?.sign ?? "•"),
      ` ${of} ${step.toLocaleString("en-US")}, ${MARKS[kind]?.title ?? "note"}: ${text}`)),
  more > 0 && h("li", {}, `and ${more.toLocaleString("en-US")} more`));
}
