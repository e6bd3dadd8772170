// Curves over the angle of a circle, and strips of dots per class: output and path counts.

import { degrees, short } from "../lib/format.ts";
import {
  axes,
  clamp,
  hue,
  line,
  niceTicks,
  plotBox,
  range,
  TAU,
  text,
  type Box,
  type Look,
  type Pen,
  type Tick,
} from "./draw.ts";

export interface Curve {
  values: ArrayLike<number>;
  colour: string;
  width?: number;
  dash?: number[];
  alpha?: number;
}

export interface AngleView {
  angles: number[];
  curves: Curve[];
  low: number;
  high: number;
  log?: boolean; // values are counts: log(1 + count)
  halves?: boolean; // tint the two halves of the circle
  marks: number[]; // angles to mark
}

const ANGLE_TICKS: Tick[] = [0, 0.25, 0.5, 0.75, 1].map((part) => [part * TAU, degrees(part * TAU)]);
const angleX =
  (box: Box) =>
  (angle: number): number =>
    box.left + (angle / TAU) * (box.right - box.left);

/** Where a value lies between the lowest and the highest shown, 0 to 1; counts by log(1 + count). */
export function levelOf(value: number, low: number, high: number, log: boolean): number {
  const [v, a, b] = log ? [value, low, high].map((n) => Math.log1p(Math.max(n, 0))) : [value, low, high];
  return clamp((v - a) / (b - a || 1), 0, 1);
}

export function countTicks(low: number, high: number): Tick[] {
  const found: Tick[] = low < 1 ? [[0, "0"]] : [];
  for (let power = 0; 10 ** power <= high; power++)
    if (10 ** power >= low && (low >= 1 || levelOf(10 ** power, low, high, true) > 0.1))
      found.push([10 ** power, tenTo(power)]);
  return found.length > 1
    ? found
    : [
        [low, short(low)],
        [high, short(high)],
      ];
}
const tenTo = (power: number): string =>
  power < 4
    ? String(10 ** power)
    : `10${[...String(power)].map((digit) => "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"[Number(digit)]).join("")}`;

export function drawAngles(pen: Pen, width: number, height: number, view: AngleView, look: Look): void {
  const box = plotBox(width, height);
  const x = angleX(box);
  const room = view.log ? 6 : 0;
  const y = (value: number): number =>
    box.bottom - levelOf(value, view.low, view.high, !!view.log) * (box.bottom - box.top - room);
  if (view.halves) tintHalves(pen, box, x, look);
  const yTicks: Tick[] = view.log
    ? countTicks(view.low, view.high)
    : niceTicks(view.low, view.high).map((v) => [v, short(v)]);
  axes(pen, box, look, x, y, ANGLE_TICKS, yTicks);
  pen.lineJoin = "round";
  for (const curve of view.curves) {
    pen.strokeStyle = curve.colour;
    pen.lineWidth = curve.width ?? 1.6;
    pen.globalAlpha = curve.alpha ?? 1;
    pen.setLineDash(curve.dash ?? []);
    line(
      pen,
      Math.min(view.angles.length, curve.values.length),
      (i) => x(view.angles[i]),
      (i) => y(curve.values[i]),
    );
  }
  pen.globalAlpha = 1;
  pen.strokeStyle = look.ink;
  pen.lineWidth = 1;
  pen.setLineDash([2, 3]);
  for (const angle of view.marks)
    line(
      pen,
      2,
      () => x(angle),
      (i) => (i ? box.bottom : box.top),
    );
  pen.setLineDash([]);
}

function tintHalves(pen: Pen, box: Box, x: (angle: number) => number, look: Look): void {
  pen.fillStyle = look.coolTint;
  pen.fillRect(box.left, box.top, x(Math.PI) - box.left, box.bottom - box.top);
  pen.fillStyle = look.warmTint;
  pen.fillRect(x(Math.PI), box.top, box.right - x(Math.PI), box.bottom - box.top);
}

/** The angle under the pointer, or null outside the plot. */
export function pickAngle(px: number, width: number, height: number): number | null {
  const box = plotBox(width, height);
  const angle = ((px - box.left) / (box.right - box.left)) * TAU;
  return angle < 0 || angle >= TAU ? null : angle;
}

export interface StripView {
  values: ArrayLike<number>; // one number per sample
  bands: { name: string; samples: number[] }[];
  low: number;
  high: number;
  log?: boolean;
  marks: number[]; // samples
}

const spread = (i: number): number => ((i * 0.6180339887) % 1) - 0.5; // even and the same every time

/** One column per class or group: a dot per sample, a bar at the median. */
export function drawStrips(pen: Pen, width: number, height: number, view: StripView, look: Look): void {
  const box = plotBox(width, height);
  const column = (box.right - box.left) / Math.max(view.bands.length, 1);
  const middle = (band: number): number => box.left + (band + 0.5) * column;
  const y = (value: number): number =>
    box.bottom - levelOf(value, view.low, view.high, !!view.log) * (box.bottom - box.top - 6) - 3;
  const yTicks: Tick[] = view.log
    ? countTicks(view.low, view.high)
    : niceTicks(view.low, view.high).map((v) => [v, short(v)]);
  const label = (name: string): string =>
    name.length * 6.2 > column ? `${name.slice(0, Math.max(1, Math.floor(column / 6.2) - 1))}\u2026` : name;
  axes(pen, box, look, (v) => v, y, [], yTicks);
  const marked = new Set(view.marks);
  view.bands.forEach((band, b) => {
    text(pen, look, label(band.name), middle(b), box.bottom + 15, { colour: look.quiet });
    pen.fillStyle = hue(b, look);
    pen.globalAlpha = clamp(40 / band.samples.length, 0.15, 0.6);
    for (const [i, sample] of band.samples.entries())
      dot(pen, middle(b) + spread(i) * Math.min(column * 0.7, 90), y(view.values[sample]), 2.2);
    pen.globalAlpha = 1;
    const sorted = band.samples
      .map((sample) => view.values[sample])
      .filter(Number.isFinite)
      .sort((p, q) => p - q);
    if (sorted.length) {
      const at = Math.round(y(sorted[sorted.length >> 1]));
      pen.fillRect(middle(b) - Math.min(column * 0.38, 50), at - 1, Math.min(column * 0.76, 100), 2.5);
    }
    for (const [i, sample] of band.samples.entries()) {
      if (!marked.has(sample)) continue;
      pen.strokeStyle = look.ink;
      pen.lineWidth = 2;
      pen.beginPath();
      pen.arc(middle(b) + spread(i) * Math.min(column * 0.7, 90), y(view.values[sample]), 5, 0, TAU);
      pen.stroke();
    }
  });
}

/** The sample whose dot is nearest to the pointer, within reach. */
export function pickStrip(px: number, py: number, width: number, height: number, view: StripView): number | null {
  const box = plotBox(width, height);
  const column = (box.right - box.left) / Math.max(view.bands.length, 1);
  const b = Math.floor((px - box.left) / column);
  let best: number | null = null;
  let gap = 144;
  for (const [i, sample] of (view.bands[b]?.samples ?? []).entries()) {
    const x = box.left + (b + 0.5) * column + spread(i) * Math.min(column * 0.7, 90);
    const y =
      box.bottom - levelOf(view.values[sample], view.low, view.high, !!view.log) * (box.bottom - box.top - 6) - 3;
    const away = (px - x) ** 2 + (py - y) ** 2;
    if (away < gap) [best, gap] = [sample, away];
  }
  return best;
}

function dot(pen: Pen, x: number, y: number, radius: number): void {
  pen.beginPath();
  pen.arc(x, y, radius, 0, TAU);
  pen.fill();
}

/** A small curve without axes, with a dot at one index. */
export function drawSpark(
  pen: Pen,
  width: number,
  height: number,
  places: number[],
  values: (number | null)[],
  at: number,
  look: Look,
): void {
  const [low, high] = range(values);
  const x = (i: number): number => 3 + places[i] * (width - 6);
  const y = (i: number): number =>
    values[i] === null ? NaN : height - 4 - ((values[i]! - low) / (high - low || 1)) * (height - 8);
  pen.strokeStyle = look.quiet;
  pen.lineWidth = 1.3;
  pen.lineJoin = "round";
  line(pen, values.length, x, y);
  if (at < 0 || !Number.isFinite(y(at))) return;
  pen.fillStyle = look.accent;
  dot(pen, x(at), y(at), 3.2);
}
