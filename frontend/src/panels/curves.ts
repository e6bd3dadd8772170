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
  type Theme,
  type Pen,
  type Tick,
} from "./draw.ts";

export interface Curve {
  values: ArrayLike<number>;
  angles?: number[]; // of another run: its own samples
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

export function drawAngles(pen: Pen, width: number, height: number, view: AngleView, theme: Theme): void {
  const box = plotBox(width, height);
  const x = angleX(box);
  const room = view.log ? 6 : 0;
  const y = (value: number): number =>
    box.bottom - levelOf(value, view.low, view.high, !!view.log) * (box.bottom - box.top - room);
  if (view.halves) tintHalves(pen, box, x, theme);
  const yTicks: Tick[] = view.log
    ? countTicks(view.low, view.high)
    : niceTicks(view.low, view.high).map((v) => [v, short(v)]);
  axes(pen, box, theme, x, y, ANGLE_TICKS, yTicks);
  pen.lineJoin = "round";
  for (const curve of view.curves) {
    pen.strokeStyle = curve.colour;
    pen.lineWidth = curve.width ?? 1.6;
    pen.globalAlpha = curve.alpha ?? 1;
    pen.setLineDash(curve.dash ?? []);
    const angles = curve.angles ?? view.angles;
    line(
      pen,
      Math.min(angles.length, curve.values.length),
      (i) => x(angles[i]),
      (i) => y(curve.values[i]),
    );
  }
  pen.globalAlpha = 1;
  pen.strokeStyle = theme.ink;
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

function tintHalves(pen: Pen, box: Box, x: (angle: number) => number, theme: Theme): void {
  pen.fillStyle = theme.coolTint;
  pen.fillRect(box.left, box.top, x(Math.PI) - box.left, box.bottom - box.top);
  pen.fillStyle = theme.warmTint;
  pen.fillRect(x(Math.PI), box.top, box.right - x(Math.PI), box.bottom - box.top);
}

/** The angle under the pointer, or null outside the plot. */
export function pickAngle(px: number, width: number, height: number): number | null {
  const box = plotBox(width, height);
  const angle = ((px - box.left) / (box.right - box.left)) * TAU;
  return angle < 0 || angle >= TAU ? null : angle;
}

export interface Strip {
  values: ArrayLike<number>; // one number per sample
  bands: { name: string; samples: number[] }[];
  marks: number[]; // samples
}
export interface StripView extends Strip {
  second?: Strip | null; // of another run: beside the first in every column, blue and orange
  low: number;
  high: number;
  log?: boolean;
}

const spread = (i: number): number => ((i * 0.6180339887) % 1) - 0.5; // even and the same every time
const column = (box: Box, names: string[]): number => (box.right - box.left) / Math.max(names.length, 1);
/** The columns of one run, or those of both. */
export const stripNames = (view: StripView): string[] => [
  ...new Set([view, ...(view.second ? [view.second] : [])].flatMap(({ bands }) => bands.map(({ name }) => name))),
];
const stripY =
  (box: Box, view: StripView) =>
  (value: number): number =>
    box.bottom - levelOf(value, view.low, view.high, !!view.log) * (box.bottom - box.top - 6) - 3;

interface Spot {
  sample: number;
  x: number;
  y: number;
}
/** Where the dots of one column lie; with two runs each has half of it. */
function spots(box: Box, view: StripView, own: Strip, name: string): { middle: number; half: number; dots: Spot[] } {
  const names = stripNames(view);
  const wide = column(box, names);
  const aside = view.second ? (own === view ? -0.22 : 0.22) * Math.min(wide, 130) : 0;
  const middle = box.left + (names.indexOf(name) + 0.5) * wide + aside;
  const half = view.second ? Math.min(wide * 0.18, 26) : Math.min(wide * 0.35, 45);
  const y = stripY(box, view);
  const samples = own.bands.find((band) => band.name === name)?.samples ?? [];
  const dots = samples.map((sample, i) => ({ sample, x: middle + 2 * half * spread(i), y: y(own.values[sample]) }));
  return { middle, half, dots };
}

/** One column per class or group: a dot per sample, a bar at the median. */
export function drawStrips(pen: Pen, width: number, height: number, view: StripView, theme: Theme): void {
  const box = plotBox(width, height);
  const names = stripNames(view);
  const wide = column(box, names);
  const y = stripY(box, view);
  const yTicks: Tick[] = view.log
    ? countTicks(view.low, view.high)
    : niceTicks(view.low, view.high).map((v) => [v, short(v)]);
  const label = (name: string): string =>
    name.length * 6.2 > wide ? `${name.slice(0, Math.max(1, Math.floor(wide / 6.2) - 1))}\u2026` : name;
  axes(pen, box, theme, (v) => v, y, [], yTicks);
  names.forEach((name, b) => {
    text(pen, theme, label(name), box.left + (b + 0.5) * wide, box.bottom + 15, { colour: theme.quiet });
    for (const own of view.second ? [view, view.second] : [view]) {
      const { middle, half, dots } = spots(box, view, own, name);
      pen.fillStyle = view.second ? (own === view ? theme.cool : theme.warm) : hue(b, theme);
      pen.globalAlpha = clamp(40 / dots.length, 0.15, 0.6);
      for (const at of dots) dot(pen, at.x, at.y, 2.2);
      pen.globalAlpha = 1;
      const sorted = dots
        .map(({ sample }) => own.values[sample])
        .filter(Number.isFinite)
        .sort((p, q) => p - q);
      if (sorted.length)
        pen.fillRect(middle - 1.1 * half, Math.round(y(sorted[sorted.length >> 1])) - 1, 2.2 * half, 2.5);
      for (const at of dots) if (own.marks.includes(at.sample)) ring(pen, at, theme.ink);
    }
  });
}

const nearestSpot = (px: number, py: number, dots: Spot[]): number | null => {
  let best: number | null = null;
  let gap = 144;
  for (const { sample, x, y } of dots) {
    const away = (px - x) ** 2 + (py - y) ** 2;
    if (away < gap) [best, gap] = [sample, away];
  }
  return best;
};

/** The sample of the (first) run whose dot is nearest to the pointer, within reach. */
export function pickStrip(px: number, py: number, width: number, height: number, view: StripView): number | null {
  const box = plotBox(width, height);
  const names = stripNames(view);
  const name = names[Math.floor((px - box.left) / column(box, names))];
  return name === undefined ? null : nearestSpot(px, py, spots(box, view, view, name).dots);
}

export interface AgainstView {
  targets: ArrayLike<number>; // [n * outputs], as the output
  values: ArrayLike<number>;
  second?: { targets: ArrayLike<number>; values: ArrayLike<number>; marks: number[] } | null;
  outputs: number;
  low: number; // of the output
  high: number;
  marks: number[];
}

function againstScale(width: number, height: number, view: AgainstView) {
  const box = plotBox(width, height);
  const [first, last] = range(Array.from(view.targets).concat(Array.from(view.second?.targets ?? [])));
  const x = (v: number): number => box.left + 6 + ((v - first) / (last - first || 1)) * (box.right - box.left - 12);
  const y = (v: number): number =>
    box.bottom - 3 - clamp((v - view.low) / (view.high - view.low || 1), 0, 1) * (box.bottom - box.top - 6);
  return { box, x, y, first, last };
}
const againstSpots = (view: AgainstView, x: (v: number) => number, y: (v: number) => number): Spot[] =>
  Array.from(view.values, (value, i) => ({
    sample: Math.floor(i / view.outputs),
    x: x(view.targets[i]),
    y: y(value),
  }));

/** The output over the target: on the line the network is right. */
export function drawAgainst(pen: Pen, width: number, height: number, view: AgainstView, theme: Theme): void {
  const { box, x, y, first, last } = againstScale(width, height, view);
  const named = (low: number, high: number): Tick[] => niceTicks(low, high).map((v) => [v, short(v)]);
  axes(pen, box, theme, x, y, named(first, last), named(view.low, view.high));
  const [from, to] = [Math.max(first, view.low), Math.min(last, view.high)];
  pen.strokeStyle = theme.unit;
  pen.lineWidth = 3;
  if (to > from)
    line(
      pen,
      2,
      (i) => x(i ? to : from),
      (i) => y(i ? to : from),
    );
  pen.globalAlpha = clamp(120 / view.values.length, 0.2, 0.7);
  pen.fillStyle = view.second ? theme.cool : theme.ink;
  const spots = againstSpots(view, x, y);
  for (const at of spots) dot(pen, at.x, at.y, 2.4);
  const second = view.second ? againstSpots({ ...view, ...view.second }, x, y) : [];
  pen.fillStyle = theme.warm;
  for (const at of second) dot(pen, at.x, at.y, 2.4);
  pen.globalAlpha = 1;
  for (const at of spots) if (view.marks.includes(at.sample)) ring(pen, at, theme.ink);
  for (const at of second) if (view.second!.marks.includes(at.sample)) ring(pen, at, theme.ink);
}

export function pickAgainst(px: number, py: number, width: number, height: number, view: AgainstView): number | null {
  const { x, y } = againstScale(width, height, view);
  return nearestSpot(px, py, againstSpots(view, x, y));
}

function dot(pen: Pen, x: number, y: number, radius: number): void {
  pen.beginPath();
  pen.arc(x, y, radius, 0, TAU);
  pen.fill();
}

/** Around a marked sample. */
function ring(pen: Pen, at: { x: number; y: number }, ink: string): void {
  pen.strokeStyle = ink;
  pen.lineWidth = 2;
  pen.beginPath();
  pen.arc(at.x, at.y, 5, 0, TAU);
  pen.stroke();
}

/** A small curve without axes, with a dot at one index. */
export function drawSpark(
  pen: Pen,
  width: number,
  height: number,
  places: number[],
  values: (number | null)[],
  at: number,
  theme: Theme,
): void {
  const [low, high] = range(values);
  const x = (i: number): number => 3 + places[i] * (width - 6);
  const y = (i: number): number =>
    values[i] === null ? NaN : height - 4 - ((values[i]! - low) / (high - low || 1)) * (height - 8);
  pen.strokeStyle = theme.quiet;
  pen.lineWidth = 1.3;
  pen.lineJoin = "round";
  line(pen, values.length, x, y);
  if (at < 0 || !Number.isFinite(y(at))) return;
  pen.fillStyle = theme.accent;
  dot(pen, x(at), y(at), 3.2);
}
