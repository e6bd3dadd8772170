// The plane of inputs: output as an image, borders of half-spaces, points.

import { clamp, hue, line, TAU, type Theme, type Pen } from "./draw.ts";
import { unitColour, type Unit } from "./halfspaces.ts";
import { packedTable } from "./heatmap.ts";

export interface PlaneView {
  extent: number; // the square [-extent, extent]^2
  image: CanvasImageSource | null; // output on a grid, already coloured
  points: number[][];
  colourOf: (i: number) => string;
  units: Unit[];
  facing: boolean;
  chosen: number | null;
  marks: number[]; // samples
}

const planeBox = (width: number, height: number) => {
  const side = Math.min(width, height);
  return { left: (width - side) / 2, top: (height - side) / 2, side };
};

export function drawPlane(pen: Pen, width: number, height: number, view: PlaneView, theme: Theme): void {
  const { left, top, side } = planeBox(width, height);
  const x = (value: number): number => left + ((value / view.extent + 1) / 2) * side;
  const y = (value: number): number => top + ((1 - value / view.extent) / 2) * side;
  pen.save();
  pen.beginPath();
  pen.rect(left, top, side, side);
  pen.clip();
  if (view.image) {
    pen.imageSmoothingEnabled = true;
    pen.drawImage(view.image, left, top, side, side);
  }
  const reach = 1.5 * view.extent;
  const tip = 0.06 * view.extent; // a short tick to the open side
  view.units.forEach((unit, i) => {
    const chosen = view.chosen === i;
    const border = (): void => {
      line(
        pen,
        2,
        (k) => x(unit.d * unit.x + (k ? reach : -reach) * -unit.y),
        (k) => y(unit.d * unit.y + (k ? reach : -reach) * unit.x),
      );
      line(
        pen,
        2,
        (k) => x((unit.d + k * tip) * unit.x),
        (k) => y((unit.d + k * tip) * unit.y),
      );
    };
    if (view.image) {
      // a pale halo keeps the line readable on every colour
      pen.globalAlpha = view.chosen === null || chosen ? 0.55 : 0.1;
      pen.strokeStyle = "#ffffff";
      pen.lineWidth = chosen ? 6 : 3.2;
      border();
    }
    pen.globalAlpha = view.chosen === null ? 0.8 : chosen ? 1 : 0.15;
    pen.strokeStyle = view.image ? "#1d2329" : unitColour(unit, view.facing, theme);
    pen.lineWidth = chosen ? 3 : 1.2;
    border();
  });
  pen.globalAlpha = 1;
  const radius = clamp(60 / Math.sqrt(view.points.length || 1), 1.8, 4.5);
  view.points.forEach(([px, py], i) => {
    pen.beginPath();
    pen.arc(x(px), y(py), radius, 0, TAU);
    pen.fillStyle = view.colourOf(i);
    pen.fill();
    pen.lineWidth = 0.8;
    pen.strokeStyle = view.image ? "#ffffffcc" : theme.card;
    pen.stroke();
  });
  for (const i of view.marks) {
    const point = view.points[i];
    if (!point) continue;
    pen.beginPath();
    pen.arc(x(point[0]), y(point[1]), 8, 0, TAU);
    pen.strokeStyle = view.image ? "#fff" : theme.ink;
    pen.lineWidth = 2.5;
    pen.stroke();
  }
  pen.restore();
}

export function pickPlane(
  px: number,
  py: number,
  width: number,
  height: number,
  extent: number,
  points: number[][],
): number | null {
  const { left, top, side } = planeBox(width, height);
  const [x, y] = [((2 * (px - left)) / side - 1) * extent, (1 - (2 * (py - top)) / side) * extent];
  let best: number | null = null;
  let gap = (0.05 * extent) ** 2;
  points.forEach((point, i) => {
    const away = (point[0] - x) ** 2 + (point[1] - y) ** 2;
    if (away < gap) [best, gap] = [i, away];
  });
  return best;
}

/** Half the side of a square that holds all points, with some air. */
export function extentOf(points: number[][]): number {
  let most = 0;
  for (const [x, y] of points) most = Math.max(most, Math.abs(x), Math.abs(y));
  return 1.15 * (most || 1);
}

export const classColour = (rank: number | null | undefined, theme: Theme): string =>
  rank === null || rank === undefined ? theme.unit : hue(rank, theme);

/** Output on a grid (first row: lowest y) as pixels (first row: top). `sign` +1: positive is orange, -1: blue. */
export function gridPixels(values: ArrayLike<number>, sign: 1 | -1): { pixels: Uint32Array; side: number } {
  const side = Math.round(Math.sqrt(values.length));
  const table = packedTable("difference");
  const pixels = new Uint32Array(side * side);
  for (let i = 0; i < side; i++)
    for (let j = 0; j < side; j++) {
      const level = Math.tanh(1.2 * values[(side - 1 - i) * side + j]) || 0;
      pixels[i * side + j] = table[Math.round(128 + sign * 127 * level)];
    }
  return { pixels, side };
}
