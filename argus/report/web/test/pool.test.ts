// Pooling keeps the extreme cell, whatever the size of the picture.

import assert from "node:assert/strict";
import { test } from "node:test";
import { cividis, diverging, lookUp } from "../src/colors.ts";
import type { HeatRow } from "../src/contract.ts";
import { columnOf, columnRanges, extreme, pool, type Ranges } from "../src/pool.ts";
import { place } from "../src/views/flame.ts";
import { layOut } from "../src/views/heatmap.ts";

function even(count: number, pixels: number): Ranges {
  const from = new Int32Array(pixels), to = new Int32Array(pixels);
  for (let i = 0; i < pixels; i++) {
    from[i] = Math.floor((i * count) / pixels);
    to[i] = Math.max(from[i] + 1, Math.ceil(((i + 1) * count) / pixels));
  }
  return { from, to };
}

test("of ten million cells one extreme survives, in its place", () => {
  const rows = 10_240, columns = 1000, cells = new Uint8Array(rows * columns).fill(40);
  cells[7777 * columns + 333] = 254;
  const out = pool(cells, columns, even(rows, 250), even(columns, 400), true);
  const found = [...out.keys()].filter((i) => out[i] !== 40);
  assert.deepEqual(found.map((i) => [Math.floor(i / 400), i % 400, out[i]]), [[Math.floor((7777 / rows) * 250), Math.floor(0.333 * 400), 254]]);
});

test("where low is bad the lowest survives, and unknown cells hide nothing", () => {
  const cells = new Uint8Array([255, 200, 255, 255, 90, 255, 255, 255]);
  const one = even(2, 1);
  assert.deepEqual([...pool(cells, 4, one, even(4, 2), false)], [90, 255]);
  assert.deepEqual([...pool(cells, 4, one, even(4, 2), true)], [200, 255]);
});

test("a gap stays unknown, and a zoomed cell fills its pixels", () => {
  const rows = { from: new Int32Array([0, 0, -1, 1]), to: new Int32Array([1, 1, 0, 2]) };
  assert.deepEqual([...pool(new Uint8Array([7, 8]), 1, rows, even(1, 2), true)], [7, 7, 7, 7, 255, 255, 8, 8]);
});

test("the extreme cell under a pixel is found again", () => {
  const cells = new Uint8Array([1, 255, 9, 3]);
  assert.deepEqual(extreme(cells, 2, [0, 2], [0, 2], true), { row: 1, column: 0, value: 9 });
  assert.deepEqual(extreme(cells, 2, [0, 2], [0, 2], false), { row: 0, column: 0, value: 1 });
  assert.equal(extreme(cells, 2, [0, 1], [1, 2], true), null);
});

test("every column that is shown is under some pixel, at any zoom and with columns of any width", () => {
  let seed = 7;
  const random = (n: number) => (seed = (seed * 1103515245 + 12345) % 2 ** 31) % n;
  for (let round = 0; round < 300; round++) {
    const edges = [random(1000)];
    for (let i = 0, n = 1 + random(400); i < n; i++) edges.push(edges.at(-1)! + 1 + random(9));
    const whole = edges.at(-1)! - edges[0];
    const begin = edges[0] + random(whole), end = Math.min(edges.at(-1)!, begin + 1 + random(whole));
    const { from, to } = columnRanges(edges, begin, end, 1 + random(500));
    const seen = new Set<number>();
    for (let x = 0; x < from.length; x++) {
      assert.ok(from[x] >= 0 && to[x] > from[x] && to[x] < edges.length, `${round}`);
      for (let c = from[x]; c < to[x]; c++) seen.add(c);
    }
    for (let c = columnOf(edges, begin); c <= columnOf(edges, end - 1); c++) assert.ok(seen.has(c), `round ${round}, column ${c}`);
  }
  assert.deepEqual([...columnRanges([5], 5, 6, 3).from], [-1, -1, -1]);
});

function rowsOf(sizes: number[], pinned: number[] = []): HeatRow[] {
  return sizes.flatMap((size, g) => Array.from({ length: size }, () => g))
    .map((g, rank) => ({ rank, host: "h", gpu: "g", group: `group ${g}`, pinned: pinned.includes(rank) }));
}

test("every row is on some line, whatever the groups", () => {
  const shapes = [[8], [1], [8, 8], Array(1280).fill(8), [10_000, 1, 1, 1, 237], Array(300).fill(1), [640, ...Array(15).fill(640)], [3000, 1, 3000]];
  for (const sizes of shapes)
    for (const most of [420, 500, 900]) {
      const rows = rowsOf(sizes, [0, 5]), layout = layOut(rows, 0, rows.length, most);
      const seen = new Set<number>();
      layout.rows.from.forEach((from, i) => {
        if (i * layout.grain < layout.mainTop || from < 0) return;
        for (let r = from; r < layout.rows.to[i]; r++) seen.add(r);
      });
      assert.equal(seen.size, rows.length, `${sizes.length} groups in ${most}`);
      assert.ok(layout.height < most + 450, `${layout.height}`);
    }
});

test("pinned rows are on top, groups in order below, and a zoom shows its rows alone", () => {
  const rows = rowsOf([4, 4], [6]), layout = layOut(rows, 0, 8, 420);
  assert.deepEqual(layout.pinned.map(({ row }) => row), [6]);
  assert.equal(layout.rows.from[2], 6);
  assert.deepEqual(layout.blocks.map(({ title, from, to }) => [title, from, to]), [["group 0", 0, 4], ["group 1", 4, 8]]);
  assert.deepEqual(layOut(rows, 2, 5, 420).blocks.map(({ from, to }) => [from, to]), [[2, 4], [4, 5]]);
});

test("colours get brighter with the value, and with the fault", () => {
  const grey = (t: number) => { const [r, g, b] = cividis(t); return 0.299 * r + 0.587 * g + 0.114 * b; };
  for (let i = 1; i <= 50; i++) assert.ok(grey(i / 50) > grey((i - 1) / 50));
  assert.equal(lookUp(true, [0, 0, 0])[254], lookUp(false, [0, 0, 0])[0]);
  assert.notDeepEqual(diverging(1, false), diverging(-1, false));
  for (const dark of [true, false]) for (const t of [-1, 1]) assert.ok(Math.abs(diverging(t, dark)[0] - diverging(t, dark)[2]) > 60, "blue against orange");
});

test("frames lie within their parents, also where their times do not add up", () => {
  const frame = (parent: number, total: number) => ({ name: "f", parent, total_ns: total, self_ns: 0, change_ns: null, language: "" as const });
  const { placed, total } = place([frame(-1, 10), frame(0, 6), frame(0, 8), frame(1, NaN), frame(9, 3), frame(-1, 5)]);
  assert.equal(total, 18);
  assert.deepEqual(placed.map(({ x, total: size }) => [x, size]), [[0, 10], [0, 6], [6, 4], [0, 0], [10, 3], [13, 5]]);
});
