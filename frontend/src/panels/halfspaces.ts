// Half-spaces { x : <u, x> + b >= 0 } of the plane, drawn on the unit circle.

import { clamp, css, TAU, type Theme, type Pen, type Rgb } from "./draw.ts";

export interface Unit {
  x: number; // unit normal
  y: number;
  direction: number;
  d: number; // signed distance of the border from the origin, along the normal
}

const FACING = Math.cos(Math.PI / 6); // within 30 degrees of straight up or down

/** The units of one layer; `normals` is [layers, width, 2], `offsets` [layers, width]. */
export function unitsOf(normals: Float32Array, offsets: Float32Array | null, layer: number, width: number): Unit[] {
  return Array.from({ length: width }, (_, i) => {
    const at = layer * width + i;
    const [x, y] = [normals[2 * at], normals[2 * at + 1]];
    const length = Math.hypot(x, y) || 1e-12;
    return { x: x / length, y: y / length, direction: Math.atan2(y, x), d: -(offsets?.[at] ?? 0) / length };
  });
}

/** The same of neurons, kept as directions [units, 2] with norms and biases beside them. */
export function unitsOfNeurons(directions: Float32Array, norms: Float32Array, biases: Float32Array): Unit[] {
  const offsets = biases.map((bias, i) => bias / (norms[i] || 1)); // of a neuron without weights only the sign counts
  return unitsOf(directions, offsets, 0, biases.length);
}

/** Share of the unit circle on which a unit is open. */
export const openShare = (unit: Unit): number => Math.acos(clamp(unit.d, -1, 1)) / Math.PI;

export function unitColour(unit: Unit, facing: boolean, theme: Theme): string {
  if (!facing) return theme.accent;
  if (Math.abs(unit.y) < FACING) return theme.unit;
  return unit.y > 0 ? theme.cool : theme.warm;
}

export interface CircleView {
  angles: number[];
  target: ArrayLike<number> | null;
  output: ArrayLike<number> | null;
  ring: ((i: number) => Rgb) | null; // colour of sample i on the ring
  units: Unit[];
  facing: boolean; // colour units by the half they face
  chosen: number | null;
  marks: number[]; // angles
}

const circleBox = (width: number, height: number) => ({
  cx: width / 2,
  cy: height / 2,
  r: Math.min(width, height) / 3.04,
});

export function drawCircle(pen: Pen, width: number, height: number, view: CircleView, theme: Theme): void {
  const { cx, cy, r } = circleBox(width, height);
  const at = (angle: number, radius: number): [number, number] => [
    cx + radius * r * Math.cos(angle),
    cy - radius * r * Math.sin(angle),
  ];
  if (view.facing) {
    pen.fillStyle = theme.coolTint;
    pen.fillRect(0, 0, width, cy);
    pen.fillStyle = theme.warmTint;
    pen.fillRect(0, cy, width, height - cy);
  }
  wave(pen, view, at, theme);
  halfSpaces(pen, cx, cy, r, view, theme);
  ring(pen, cx, cy, r, view, theme);
  triangles(pen, at, view, theme);
  for (const angle of view.marks) {
    pen.beginPath();
    pen.arc(...at(angle, 1.04), 6, 0, TAU);
    pen.fillStyle = theme.card;
    pen.fill();
    pen.strokeStyle = theme.ink;
    pen.lineWidth = 2;
    pen.stroke();
  }
}

function wave(pen: Pen, view: CircleView, at: (angle: number, radius: number) => [number, number], theme: Theme): void {
  const n = view.angles.length;
  const radius = (value: number): number => 1.34 + 0.1 * clamp(value, -1.3, 1.3);
  const trace = (row: ArrayLike<number>): void => {
    for (let i = 0; i <= n; i++) pen.lineTo(...at(view.angles[i % n], radius(row[i % n])));
  };
  if (view.target) {
    pen.beginPath();
    trace(view.target);
    for (let i = n; i >= 0; i--) pen.lineTo(...at(view.angles[i % n], 1.34));
    pen.fillStyle = theme.unit;
    pen.globalAlpha = 0.3;
    pen.fill();
    pen.globalAlpha = 1;
  }
  if (view.output) {
    pen.beginPath();
    trace(view.output);
    pen.strokeStyle = theme.ink;
    pen.lineWidth = 1.3;
    pen.lineJoin = "round";
    pen.stroke();
  }
}

function ring(pen: Pen, cx: number, cy: number, r: number, view: CircleView, theme: Theme): void {
  const n = view.angles.length;
  if (!view.ring) {
    pen.strokeStyle = theme.grid;
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.arc(cx, cy, r, 0, TAU);
    pen.stroke();
    return;
  }
  pen.lineWidth = 0.075 * r;
  const half = TAU / n / 2 + 0.002;
  for (let i = 0; i < n; i++) {
    pen.strokeStyle = css(view.ring(i));
    pen.beginPath();
    pen.arc(cx, cy, 1.04 * r, -view.angles[i] - half, -view.angles[i] + half);
    pen.stroke();
  }
}

/** The part of a disc where a unit is open, as a path; nothing when it is closed everywhere. */
export function openPart(pen: Pen, cx: number, cy: number, r: number, unit: Unit): void {
  pen.beginPath();
  const spread = Math.acos(clamp(unit.d, -1, 1));
  if (spread > 0) pen.arc(cx, cy, r, -unit.direction - spread, -unit.direction + spread);
  pen.closePath();
}

function halfSpaces(pen: Pen, cx: number, cy: number, r: number, view: CircleView, theme: Theme): void {
  const alone = view.chosen !== null;
  view.units.forEach((unit, i) => {
    openPart(pen, cx, cy, r, unit);
    pen.fillStyle = theme.cool;
    pen.globalAlpha = alone ? (view.chosen === i ? 0.35 : 0) : 0.9 / view.units.length;
    pen.fill();
  });
  view.units.forEach((unit, i) => {
    if (Math.abs(unit.d) >= 1) return;
    const chosen = view.chosen === i;
    const reach = Math.sqrt(1 - unit.d * unit.d);
    pen.globalAlpha = alone ? (chosen ? 1 : 0.15) : 0.75;
    pen.strokeStyle = unitColour(unit, view.facing, theme);
    pen.lineWidth = chosen ? 2.5 : 1.3;
    const end = (sign: number): [number, number] => [
      cx + r * (unit.d * unit.x - sign * reach * unit.y),
      cy - r * (unit.d * unit.y + sign * reach * unit.x),
    ];
    pen.beginPath();
    pen.moveTo(...end(1));
    pen.lineTo(...end(-1));
    pen.stroke();
  });
  pen.globalAlpha = 1;
}

function triangles(
  pen: Pen,
  at: (angle: number, radius: number) => [number, number],
  view: CircleView,
  theme: Theme,
): void {
  view.units.forEach((unit, i) => {
    pen.beginPath();
    for (const [turn, radius] of [
      [-0.045, 1.1],
      [0, 1.2],
      [0.045, 1.1],
    ])
      pen.lineTo(...at(unit.direction + turn, radius));
    pen.closePath();
    pen.globalAlpha = view.chosen === null || view.chosen === i ? 0.8 : 0.2;
    pen.fillStyle = pen.strokeStyle = unitColour(unit, view.facing, theme);
    pen.lineWidth = 1.2;
    if (Math.abs(unit.d) >= 1) pen.stroke();
    else pen.fill();
  });
  pen.globalAlpha = 1;
}

/** A unit when the pointer is on its triangle, else the angle. */
export function pickCircle(
  px: number,
  py: number,
  width: number,
  height: number,
  units: Unit[],
): { unit: number } | { angle: number } {
  const { cx, cy, r } = circleBox(width, height);
  const [dx, dy] = [px - cx, cy - py];
  if (Math.abs(Math.hypot(dx, dy) / r - 1.15) < 0.07) {
    let best = -1;
    let gap = 9;
    units.forEach((unit, i) => {
      const away = Math.hypot(dx - 1.15 * r * unit.x, dy - 1.15 * r * unit.y);
      if (away < gap) [best, gap] = [i, away];
    });
    if (best >= 0) return { unit: best };
  }
  return { angle: (Math.atan2(dy, dx) + TAU) % TAU };
}
