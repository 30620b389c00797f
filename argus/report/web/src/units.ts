// Numbers as people read them, and the ticks of axes.

import type { Unit } from "./contract.ts";

export const UNKNOWN = "–";
/** A unit, how much it is, and from how much on it is used, if that is more. Those of ns: as argus/model/units.py has them. */
type Scale = [string, number, number?];
const SCALES: Partial<Record<Unit, Scale[]>> = {
  ns: [["ns", 1], ["µs", 1e3], ["ms", 1e6], ["s", 1e9, 1e10]],
  bytes: [["B", 1], ["KB", 1e3], ["MB", 1e6], ["GB", 1e9], ["TB", 1e12], ["PB", 1e15]],
  bytes_per_s: [["B/s", 1], ["KB/s", 1e3], ["MB/s", 1e6], ["GB/s", 1e9], ["TB/s", 1e12]],
};

function grouped(value: number, decimals: number): string {
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

function threeDigits(value: number): string {
  const size = Math.abs(value);
  return grouped(value, size >= 99.95 || size === 0 ? 0 : size >= 9.995 ? 1 : 2);
}

/** A number with its unit, three digits. Not known: a dash. */
export function format(value: number | null | undefined, unit: Unit): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  if (unit === "ratio") return `${grouped(value, 2)}x`;
  if (unit === "share") {
    const percent = value * 100;
    return `${grouped(percent, Math.abs(percent) >= 9.95 || Math.abs(percent) < 0.005 ? 0 : 1)} %`;
  }
  const scales = SCALES[unit];
  if (!scales) {
    if (Number.isInteger(value)) return grouped(value, 0);
    const size = Math.abs(value);
    return size >= 1e6 ? grouped(value, 0) : size < 0.01 ? value.toPrecision(2) : threeDigits(value);
  }
  const [name, factor] = scaleOf(Math.abs(value), scales);
  return factor === 1 && Number.isInteger(value) ? `${value} ${name}` : `${threeDigits(value / factor)} ${name}`;
}

function scaleOf(size: number, scales: Scale[]): Scale {
  let found = scales[0];
  // 999.6 µs would be printed as 1,000 µs.
  for (const scale of scales) if (size >= (scale[2] ?? scale[1]) * 0.9995) found = scale;
  return found;
}

/** Round numbers from low to high, about `most` of them at most. */
export function ticks(low: number, high: number, most: number, unit: Unit = ""): number[] {
  if (!(high > low) || !Number.isFinite(high - low)) return Number.isFinite(low) ? [low] : [];
  const factor = unit === "ns" ? scaleOf(Math.max(Math.abs(low), Math.abs(high)), SCALES.ns!)[1] : 1;
  const rough = (high - low) / factor / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = ([1, 2, 5, 10].find((n) => n * power >= rough * 0.9999) ?? 10) * power * factor;
  const found: number[] = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step + 0); // never -0
  return found;
}

/** Labels of ticks: all in one unit, with as many decimals as they need. */
export function tickLabels(values: number[], unit: Unit): string[] {
  const scales = SCALES[unit];
  let [name, factor]: Scale = ["", 1];
  if (scales) [name, factor] = scaleOf(Math.max(0, ...values.map(Math.abs)), scales);
  if (unit === "share") [name, factor] = ["%", 0.01];
  const gap = values.length > 1 ? Math.abs(values[1] - values[0]) / factor : 1;
  const decimals = Math.min(6, Math.max(0, -Math.floor(Math.log10(gap || 1) + 1e-9)));
  return values.map((value) => {
    const text = grouped(value / factor, decimals);
    return unit === "ratio" ? `${text}x` : name ? `${text} ${name}` : text;
  });
}

/** Ranks as ranges: 0–7, 12. */
export function ranksText(ranks: number[]): string {
  const sorted = [...ranks].sort((a, b) => a - b);
  const parts: string[] = [];
  for (let i = 0; i < sorted.length; ) {
    let j = i;
    while (j + 1 < sorted.length && sorted[j + 1] === sorted[j] + 1) j++;
    parts.push(i === j ? `${sorted[i]}` : j === i + 1 ? `${sorted[i]}, ${sorted[j]}` : `${sorted[i]}–${sorted[j]}`);
    i = j + 1;
  }
  return parts.length > 12 ? `${parts.slice(0, 12).join(", ")} and more` : parts.join(", ");
}

/**
 * The rank that a title names, if it is exactly one: "rank 12 on node-3", "GPU: rank 12". A "data-parallel rank 2" is
 * another thing.
 */
export function rankIn(title: string): number | null {
  const found = [...title.matchAll(/(?:^|[^\w\s-]\s*)ranks? (\d+)(?![\d.,–-]*\d)/gi)];
  const named = [...title.matchAll(/\branks? \d/gi)];
  return found.length === 1 && named.length === 1 ? Number(found[0][1]) : null;
}

/** A wall time in ns, as text: in UTC, since those who read the page sit elsewhere. */
export function wallTime(ns: string | null): string {
  if (!ns || !/^\d{1,20}$/.test(ns) || /^0+$/.test(ns)) return UNKNOWN;
  const date = new Date(Number(BigInt(ns) / 1000000n));
  return Number.isNaN(date.getTime()) ? UNKNOWN : `${date.toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

export function counted(number: number, word: string): string {
  return `${grouped(number, 0)} ${word}${number === 1 ? "" : "s"}`;
}

/** Text in which characters that turn or hide text are written as escapes. */
export function harmless(text: unknown): string {
  return String(text ?? "").replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g,
    (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}
