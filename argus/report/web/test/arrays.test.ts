// Unpacking, and what is cut off.

import assert from "node:assert/strict";
import { test } from "node:test";
import { deflateSync } from "node:zlib";
import { Arrays, Damaged, unpack } from "../src/arrays.ts";
import { eventsOf } from "../src/source.ts";

const content = new Uint8Array([1, 2, 3, ...new Uint8Array(new Float32Array([1.5, NaN]).buffer)]);
const packed = deflateSync(content).toString("base64");

test("arrays are read at any offset", async () => {
  const arrays = await unpack(`\n${packed}\n`);
  assert.deepEqual([...arrays.read({ dtype: "u1", shape: [3], offset: 0, length: 3 })], [1, 2, 3]);
  assert.deepEqual([...arrays.read({ dtype: "f4", shape: [2], offset: 3, length: 8 })], [1.5, NaN]);
});

test("what is cut off says so, and gives no numbers", async () => {
  for (const text of [packed.slice(0, 8), packed.slice(0, -4), `${packed.slice(0, 7)}!`, "AAAA"]) {
    const arrays = await unpack(text);
    assert.notEqual(arrays.damage, "", text);
    assert.throws(() => arrays.read({ dtype: "u1", shape: [1], offset: 0, length: 1 }), Damaged);
  }
});

test("a reference that does not fit is refused", () => {
  const arrays = new Arrays(new Uint8Array(8));
  const wrong = [
    { dtype: "u1", shape: [9], offset: 0, length: 9 }, { dtype: "f4", shape: [2], offset: 1, length: 8 },
    { dtype: "f4", shape: [1], offset: 0, length: 8 }, { dtype: "u1", shape: [4], offset: -1, length: 4 },
    { dtype: "__proto__", shape: [1], offset: 0, length: 1 }, { dtype: "u1", shape: [2 ** 40, 2 ** 40], offset: 0, length: 8 },
  ];
  for (const ref of wrong) assert.throws(() => arrays.read(ref as never), Damaged);
});

test("server-sent events, however they are cut", async () => {
  const text = ": hello\n\nevent: changed\ndata: 1\n\nevent:other\r\n\r\nevent: changed\ndata\n\n";
  for (const size of [1, 3, 7, 200]) {
    const pieces = (text.match(new RegExp(`[^]{1,${size}}`, "g")) ?? []).map((piece) => new TextEncoder().encode(piece));
    const found: string[] = [];
    for await (const { event, data } of eventsOf(new Blob(pieces).stream() as ReadableStream<Uint8Array>)) found.push(`${event}:${data}`);
    assert.deepEqual(found, ["changed:1", "other:", "changed:"], `pieces of ${size}`);
  }
});
