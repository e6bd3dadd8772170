// Vectors as pictures: weights around zero in two colours, inputs in grey.

import { packedTable } from "./heatmap.ts";

export interface Tile {
  pixels: Uint32Array;
  width: number;
  height: number;
}

/** The vector [c, h, w] with its channels averaged. */
function average(vector: ArrayLike<number>, shape: number[]): { values: Float32Array; width: number; height: number } {
  const [channels, height, width] = shape.length === 3 ? shape : [1, ...shape];
  const size = height * width;
  const values = new Float32Array(size);
  for (let c = 0; c < channels; c++) for (let i = 0; i < size; i++) values[i] += vector[c * size + i] / channels;
  return { values, width, height };
}

/** Weights: zero in the middle of the map, the own largest value at its ends. */
export function tile(vector: ArrayLike<number>, shape: number[]): Tile {
  const { values, width, height } = average(vector, shape);
  let most = 0;
  for (const value of values) most = Math.max(most, Math.abs(value));
  const table = packedTable("difference");
  const pixels = Uint32Array.from(values, (value) => table[Math.round(128 + 127 * (value / (most || 1)))]);
  return { pixels, width, height };
}

/** An input: grey from its own least to its own largest value. */
export function greyTile(vector: ArrayLike<number>, shape: number[]): Tile {
  const { values, width, height } = average(vector, shape);
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  const pixels = Uint32Array.from(values, (value) => {
    const level = Math.round((255 * (value - low)) / (high - low || 1));
    return ((255 << 24) | (level << 16) | (level << 8) | level) >>> 0;
  });
  return { pixels, width, height };
}
