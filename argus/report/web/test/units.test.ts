// Numbers and texts as people read them.

import assert from "node:assert/strict";
import { test } from "node:test";
import { fromAddress, toAddress } from "../src/state.ts";
import { format, harmless, rankIn, ranksText, tickLabels, ticks, wallTime } from "../src/units.ts";

test("durations have three digits, and the unit that fits after rounding", () => {
  const cases: [number, string][] = [
    [0, "0 ns"], [950, "950 ns"], [1e3, "1.00 µs"], [12_345, "12.3 µs"], [999_600, "1.00 ms"], [1.5e9, "1,500 ms"],
    [9.994e9, "9,994 ms"], [9.996e9, "10.0 s"], [59.9e9, "59.9 s"], [90e9, "90.0 s"], [7200e9, "7,200 s"],
    [-2.5e6, "-2.50 ms"],
  ];
  for (const [ns, text] of cases) assert.equal(format(ns, "ns"), text);
});

test("every unit is printed as the contract says", () => {
  assert.equal(format(1.84, "ratio"), "1.84x");
  assert.equal(format(0.31, "share"), "31 %");
  assert.equal(format(0.0123, "share"), "1.2 %");
  assert.equal(format(1234567, "count"), "1,234,567");
  assert.equal(format(41e9, "bytes_per_s"), "41.0 GB/s");
  assert.equal(format(1500, "bytes"), "1.50 KB");
  assert.equal(format(5, ""), "5");
});

test("what is not known is a dash", () => {
  for (const value of [null, undefined, NaN, Infinity]) assert.equal(format(value, "ns"), "–");
});

test("ticks are round, within bounds, and labelled in one unit", () => {
  assert.deepEqual(ticks(0, 100, 5), [0, 20, 40, 60, 80, 100]);
  assert.deepEqual(tickLabels(ticks(0, 1.2e9, 4, "ns"), "ns"), ["0 ms", "500 ms", "1,000 ms"]);
  assert.deepEqual(tickLabels([0.5e9, 0.6e9], "ns"), ["500 ms", "600 ms"]);
  assert.ok(Object.is(ticks(-0.5, 10, 5)[0], 0), "no -0");
  assert.deepEqual(ticks(5, 5, 4), [5]);
  assert.deepEqual(ticks(NaN, NaN, 4), []);
  for (let i = 0; i < 200; i++) {
    const low = Math.sin(i) * 10 ** (i % 12), high = low + 10 ** ((i * 7) % 11);
    const found = ticks(low, high, 6, i % 2 ? "ns" : "");
    assert.ok(found.length >= 1 && found.length <= 9, `${low} ${high}: ${found.length}`);
    assert.ok(found.every((tick) => tick >= low - (high - low) * 1e-6 && tick <= high + (high - low) * 1e-6));
  }
});

test("ranks are ranges, and a title names a rank or none", () => {
  assert.equal(ranksText([3, 0, 1, 2, 7, 9, 8]), "0–3, 7–9");
  assert.equal(ranksText([4, 5]), "4, 5");
  assert.equal(rankIn("rank 12 on node-3"), 12);
  assert.equal(rankIn("95 % of ranks"), null);
  assert.equal(rankIn("rank 1 waits for rank 2"), null);
  assert.equal(rankIn("ranks 0–7"), null);
  assert.equal(rankIn("GPU: rank 2 on vm"), 2);
  assert.equal(rankIn("data-parallel rank 2"), null);
  assert.equal(rankIn("dp AllReduce, ranks 0-3"), null);
});

test("characters that turn or hide text are written as escapes", () => {
  assert.equal(harmless("a\u202eb\u0000\u001b[1m\u2028\ud800"), "a\\u202eb\\u0000\\u001b[1m\\u2028\\ud800");
  assert.equal(harmless("שלום 漢字 😀\n\t<b>"), "שלום 漢字 😀\n\t<b>");
});

test("wall times in ns beyond what a number holds", () => {
  assert.equal(wallTime("1795513925000000000"), "2026-11-24 09:52:05 UTC");
  for (const none of ["0", "", "abc", null]) assert.equal(wallTime(none), "–");
});

test("an address gives back what was looked at, and nothing of what it should not hold", () => {
  const looking = { rank: 5, steps: [10, 20] as [number, number], measure: "late" };
  const { job, run, token, ...back } = fromAddress(toAddress(looking, "a/b #&=", 3));
  assert.deepEqual([job, run, token, back], ["a/b #&=", 3, null, looking]);
  assert.deepEqual(fromAddress("#rank=-1&steps=9-3&run=x&measure="), { job: null, run: null, token: null, rank: null, steps: null, measure: "" });
  assert.equal(toAddress({ rank: null, steps: null, measure: null }, null, null), "");
});
