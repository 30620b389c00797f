// The start page of `argus serve`: runs, newest verdicts first.

import type { Runs } from "./contract.ts";
import { h } from "./dom.ts";
import { toAddress } from "./state.ts";
import { counted, wallTime } from "./units.ts";

const NONE = { rank: null, steps: null, measure: null };

export function runList({ runs, left_out }: Runs): HTMLElement {
  if (!runs.length) return h("section", { class: "runs" }, h("h2", {}, "Runs"), h("p", { class: "nothing" }, "There are no runs yet. They appear here as argus run or argus trace store them."));
  return h("section", { class: "runs" }, h("h2", {}, `${counted(runs.length, "run")}`), h("ul", {}, runs.map((one) =>
    h("li", { "data-status": ["healthy", "degraded", "hung", "inconclusive"].includes(one.status) ? one.status : "unknown" },
      h("a", { href: toAddress(NONE, one.job, one.run) },
        h("span", { class: "status" }, one.status || "no verdict"),
        h("span", { class: "name" }, one.job), h("span", { class: "number" }, `run ${one.run}`)),
      h("p", { class: "summary" }, one.summary),
      h("p", { class: "extent" }, [counted(one.ranks, "rank"), counted(one.hosts, "host"), `began ${wallTime(one.began_ns)}`,
        one.ended_ns === null ? "running" : `ended ${wallTime(one.ended_ns)}`].join(" · "))))),
    left_out > 0 && h("p", { class: "nothing" }, `${counted(left_out, "run")} more: argus jobs lists them, and argus report shows one.`));
}
