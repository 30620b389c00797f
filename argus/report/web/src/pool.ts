// Many cells under one pixel: the extreme one stays.

export const UNKNOWN_CELL = 255;

/** Ranges of rows or columns under each pixel; `from` -1: none (a gap). */
export interface Ranges { from: Int32Array; to: Int32Array }

/**
 * Pools cells (row-major, `columns` wide) to one byte a pixel. `highest`: the highest of the cells under a pixel, else
 * the lowest. Unknown cells count only where all are unknown.
 */
export function pool(cells: Uint8Array, columns: number, rows: Ranges, cols: Ranges, highest: boolean): Uint8Array {
  const height = rows.from.length, width = cols.from.length;
  const out = new Uint8Array(width * height).fill(UNKNOWN_CELL);
  let first = columns, last = 0;
  for (let x = 0; x < width; x++) {
    if (cols.from[x] < 0) continue;
    first = Math.min(first, cols.from[x]);
    last = Math.max(last, cols.to[x]);
  }
  // Shifted so that unknown is lowest (0) where the highest is kept, and highest (255) where the lowest is.
  const shift = highest ? 1 : 0;
  const line = new Uint8Array(columns);
  for (let y = 0; y < height; y++) {
    const from = rows.from[y], to = rows.to[y];
    if (from < 0) continue;
    if (y > 0 && rows.from[y - 1] === from && rows.to[y - 1] === to) {
      out.copyWithin(y * width, (y - 1) * width, y * width);
      continue;
    }
    line.fill(highest ? 0 : UNKNOWN_CELL);
    for (let row = from; row < to; row++) {
      const base = row * columns;
      if (highest) {
        for (let c = first; c < last; c++) {
          const v = (cells[base + c] + 1) & 255;
          if (v > line[c]) line[c] = v;
        }
      } else {
        for (let c = first; c < last; c++) {
          const v = cells[base + c];
          if (v < line[c]) line[c] = v;
        }
      }
    }
    for (let x = 0; x < width; x++) {
      const begin = cols.from[x], end = cols.to[x];
      if (begin < 0) continue;
      let best = line[begin];
      for (let c = begin + 1; c < end; c++) if (highest ? line[c] > best : line[c] < best) best = line[c];
      out[y * width + x] = (best - shift) & 255;
    }
  }
  return out;
}

/** Where the extreme cell under a pixel is; null: all are unknown. */
export function extreme(
  cells: Uint8Array, columns: number, rows: [number, number], cols: [number, number], highest: boolean,
): { row: number; column: number; value: number } | null {
  let best: { row: number; column: number; value: number } | null = null;
  for (let row = rows[0]; row < rows[1]; row++)
    for (let column = cols[0]; column < cols[1]; column++) {
      const value = cells[row * columns + column];
      if (value === UNKNOWN_CELL) continue;
      if (!best || (highest ? value > best.value : value < best.value)) best = { row, column, value };
    }
  return best;
}

/** The column of a step: the last whose edge is not above it. */
export function columnOf(edges: number[], step: number): number {
  let low = 0, high = edges.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (edges[middle] <= step) low = middle;
    else high = middle;
  }
  return low;
}

/** Columns under each of `width` pixels that share the steps from `begin` to `end` (exclusive). */
export function columnRanges(edges: number[], begin: number, end: number, width: number): Ranges {
  const from = new Int32Array(width).fill(-1), to = new Int32Array(width);
  const columns = edges.length - 1;
  if (columns < 1 || !(end > begin)) return { from, to };
  const scale = (end - begin) / width;
  for (let x = 0; x < width; x++) {
    const a = begin + x * scale, b = begin + (x + 1) * scale;
    if (b <= edges[0] || a >= edges[columns]) continue;
    from[x] = columnOf(edges, Math.max(a, edges[0]));
    // Wide columns: a pixel belongs to the one in which it begins, so that columns keep sharp sides.
    to[x] = Math.max(from[x] + 1, columnOf(edges, Math.min(b, edges[columns]) - 1e-9 * scale) + (scale >= 1 ? 1 : 0));
  }
  return { from, to };
}
