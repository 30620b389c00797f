// Colours of phases.

import assert from "node:assert/strict";
import { test } from "node:test";
import { placesOf } from "../src/colors.ts";

test("a phase has one colour, whatever else there is", () => {
  const gpu = placesOf(["forward", "backward", "optimizer", "all reduce", "memcpy", "idle"], 10);
  const cpu = placesOf(["data loading", "forward", "backward", "checkpoint", "other"], 10);
  assert.deepEqual([gpu[0], gpu[1]], [cpu[1], cpu[2]]);
  for (const places of [gpu, cpu]) assert.equal(new Set(places).size, places.length);
});

test("more parts than colours have one each all the same", () => {
  const many = Array.from({ length: 24 }, (_, i) => `part ${i}`);
  assert.ok(placesOf(many, 10).every((place) => place >= 0 && place < 10));
});
