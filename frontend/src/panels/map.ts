// The map of neurons: points in the plane, one frame per step, the same square for all frames.

import { clamp, TAU, type Theme, type Pen } from "./draw.ts";

export interface MapView {
  points: Float32Array; // [T, count, 2]
  count: number;
  frame: number;
  extent: number;
  chosen: number | null; // index along count
  colourOf: (i: number) => string;
}

/** Half the side of a square that holds all frames. */
export function mapExtent(points: Float32Array): number {
  let most = 0;
  for (const value of points) if (Number.isFinite(value)) most = Math.max(most, Math.abs(value));
  return 1.08 * (most || 1);
}

const project = (value: number, extent: number, side: number): number => ((value / extent + 1) / 2) * side;

export function drawMap(pen: Pen, width: number, height: number, view: MapView, theme: Theme): void {
  const side = Math.min(width, height);
  const [left, top] = [(width - side) / 2, (height - side) / 2];
  const at = (frame: number, i: number): [number, number] => {
    const k = 2 * (frame * view.count + i);
    return [
      left + project(view.points[k], view.extent, side),
      top + side - project(view.points[k + 1], view.extent, side),
    ];
  };
  pen.strokeStyle = theme.grid;
  pen.lineWidth = 1;
  pen.strokeRect(left + 0.5, top + 0.5, side - 1, side - 1);
  const radius = clamp(70 / Math.sqrt(view.count || 1), 1.3, 4.5);
  pen.globalAlpha = view.chosen === null ? 0.85 : 0.3;
  for (let i = 0; i < view.count; i++) {
    pen.fillStyle = view.colourOf(i);
    pen.beginPath();
    pen.arc(...at(view.frame, i), radius, 0, TAU);
    pen.fill();
  }
  pen.globalAlpha = 1;
  if (view.chosen === null) return;
  pen.strokeStyle = pen.fillStyle = theme.ink;
  pen.lineWidth = 1.5;
  pen.beginPath();
  for (let frame = 0; frame <= view.frame; frame++) pen.lineTo(...at(frame, view.chosen));
  pen.stroke();
  pen.beginPath();
  pen.arc(...at(view.frame, view.chosen), radius + 2.5, 0, TAU);
  pen.fill();
}

export function pickMap(
  px: number,
  py: number,
  width: number,
  height: number,
  view: Omit<MapView, "colourOf" | "chosen">,
): number | null {
  const side = Math.min(width, height);
  const [left, top] = [(width - side) / 2, (height - side) / 2];
  let best: number | null = null;
  let gap = 144;
  for (let i = 0; i < view.count; i++) {
    const k = 2 * (view.frame * view.count + i);
    const dx = px - left - project(view.points[k], view.extent, side);
    const dy = py - top - side + project(view.points[k + 1], view.extent, side);
    if (dx * dx + dy * dy < gap) [best, gap] = [i, dx * dx + dy * dy];
  }
  return best;
}
