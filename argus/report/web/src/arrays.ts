// The arrays beside the document: unpacking, and reading one of them.

import type { ArrayRef } from "./contract.ts";

export type Numbers = Uint8Array | Uint16Array | Uint32Array | Int32Array | Float32Array | Float64Array;

/** Data that is cut off or no data at all; the message is for the reader of the page. */
export class Damaged extends Error {}

const TYPES = {
  u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array, f4: Float32Array, f8: Float64Array,
} as const;

/** All arrays of a page, one after another, or why there are none. */
export class Arrays {
  constructor(private readonly bytes: Uint8Array<ArrayBuffer>, readonly damage = "") {}

  /** The numbers of an array. Throws {@link Damaged} where they are not all there. */
  read(ref: ArrayRef): Numbers {
    const type = TYPES[ref?.dtype];
    if (this.damage) throw new Damaged(this.damage);
    if (!type) throw new Damaged("its numbers are of an unknown type");
    const count = ref.shape.reduce((all, side) => all * side, 1);
    const whole = Number.isSafeInteger(count) && count >= 0 && ref.length === count * type.BYTES_PER_ELEMENT;
    if (!whole || !(ref.offset >= 0) || ref.offset + ref.length > this.bytes.length)
      throw new Damaged("its numbers are cut off");
    if (type === Uint8Array) return this.bytes.subarray(ref.offset, ref.offset + ref.length);
    return new type(this.bytes.slice(ref.offset, ref.offset + ref.length).buffer);
  }

  bytesOf(ref: ArrayRef): Uint8Array {
    const numbers = this.read(ref);
    if (!(numbers instanceof Uint8Array)) throw new Damaged("its cells are not bytes");
    return numbers;
  }
}

/** Base64 of zlib, as in the file and in answers of the server. */
export async function unpack(base64: string): Promise<Arrays> {
  const none = new Uint8Array(0);
  if (!base64.trim()) return new Arrays(none);
  try {
    const text = atob(base64.trim());
    const packed = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Arrays(new Uint8Array(await new Response(stream).arrayBuffer()));
  } catch {
    return new Arrays(none, "the file's numbers are cut off or damaged");
  }
}
