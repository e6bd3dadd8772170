// Heat maps: bytes of levels in, one pixel per entry out.

import tables from "../colormaps.json" with { type: "json" };
import type { Levels } from "../lib/types.ts";
import type { Rgb } from "./draw.ts";

export type MapName = "unsigned" | "signed" | "difference";
export const colours = (map: MapName): Rgb[] => tables[map];

const packed = new Map<MapName, Uint32Array>();
/** The table as pixels of an image, alpha 255, in the byte order of ImageData on little-endian machines. */
export function packedTable(map: MapName): Uint32Array {
  const known =
    packed.get(map) ?? Uint32Array.from(tables[map], ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0);
  packed.set(map, known);
  return known;
}

export const mapOf = (levels: Levels): MapName => (levels.signed ? "signed" : "unsigned");

/** Pixel (i, j) shows entry (order[i], order[j]); without an order, entry (i, j). */
export function fill(
  pixels: Uint32Array,
  levels: Levels,
  order: Int32Array | null,
  map: MapName = mapOf(levels),
): void {
  const { bytes, rows, columns } = levels;
  const table = packedTable(map);
  if (!order) {
    for (let at = 0; at < rows * columns; at++) pixels[at] = table[bytes[at]];
    return;
  }
  for (let i = 0, at = 0; i < rows; i++) {
    const row = order[i] * columns;
    for (let j = 0; j < columns; j++) pixels[at++] = table[bytes[row + order[j]]];
  }
}

/** The number a byte stands for, as far as a byte can tell. */
export function valueOf(levels: Pick<Levels, "signed" | "top" | "unit">, byte: number): number {
  const level = levels.signed ? (byte - 128) / 127 : byte / 255;
  return Math.sign(level) * levels.unit * levels.top * level * level;
}

/** The same map on another scale, so that two maps have one colour for one value (each over its mean diagonal). */
export function rescaled(levels: Levels, top: number, signed: boolean): Levels {
  if (levels.top === top && levels.signed === signed) return levels;
  const factor = Math.sqrt(levels.top / top);
  const table = Uint8Array.from({ length: 256 }, (_, byte) => {
    const level = Math.max(-1, Math.min(1, factor * (levels.signed ? (byte - 128) / 127 : byte / 255)));
    return halfToEven(signed ? 128 + 127 * level : 255 * level);
  });
  return {
    ...levels,
    bytes: levels.bytes.map((byte) => table[byte]),
    top,
    signed,
    clipped: levels.clipped || factor > 1,
  };
}

/** Two maps on one scale: that of the larger top, signed if one is. */
export function onOneScale(a: Levels, b: Levels): [Levels, Levels] {
  const [top, signed] = [Math.max(a.top, b.top), a.signed || b.signed];
  return [rescaled(a, top, signed), rescaled(b, top, signed)];
}

/** Numbers as levels: sqrt(min(|v| / top, 1)), the rule of the server; `top` defaults to the largest. */
export function quantise(
  values: ArrayLike<number>,
  rows: number,
  columns: number,
  signed: boolean,
  top?: number,
): Levels {
  let largest = 0;
  for (let i = 0; i < values.length; i++) largest = Math.max(largest, Math.abs(values[i]) || 0);
  const scale = top || largest || 1;
  const bytes = new Uint8Array(rows * columns);
  for (let i = 0; i < bytes.length; i++) {
    const level = Math.sqrt(Math.min(Math.abs(values[i]) / scale, 1)) || 0;
    bytes[i] = halfToEven(signed ? 128 + 127 * Math.sign(values[i]) * level : 255 * level);
  }
  return { bytes, rows, columns, top: scale, signed, clipped: largest > scale, stride: 1, unit: 1, bad: 0 };
}

/** Like NumPy's rint, so that both sides give the same byte. */
export function halfToEven(value: number): number {
  const floor = Math.floor(value);
  if (value - floor !== 0.5) return Math.round(value);
  return floor % 2 === 0 ? floor : floor + 1;
}

/** a - b entry by entry, both divided by their mean diagonal first, so that only the shape is compared. */
export function difference(a: Float32Array, b: Float32Array, side: number): Float32Array {
  const scale = (values: Float32Array): number => {
    let trace = 0;
    for (let i = 0; i < side; i++) trace += values[i * (side + 1)];
    return trace ? side / trace : 1;
  };
  const [sa, sb] = [scale(a), scale(b)];
  return Float32Array.from(a, (value, i) => value * sa - b[i] * sb);
}
