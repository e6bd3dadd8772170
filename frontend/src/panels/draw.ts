// Small tools every panel shares: the theme of the page, lines, text, axes.

import { powerOfTen } from "../lib/format.ts";

export interface Theme {
  card: string;
  ink: string;
  quiet: string;
  grid: string;
  unit: string;
  accent: string;
  cool: string;
  warm: string;
  mixed: string;
  coolTint: string;
  warmTint: string;
  sans: string;
  dark: boolean;
}

const SIZE = 11; // of letters, in pixels
export type Pen = CanvasRenderingContext2D;
export interface Box {
  left: number;
  right: number;
  top: number;
  bottom: number;
}
export type Rgb = readonly number[];
export type Tick = readonly [number, string];

export const TAU = 2 * Math.PI;
export const clamp = (value: number, low: number, high: number): number => Math.min(high, Math.max(low, value));
export const css = (colour: Rgb): string => `rgb(${colour[0]} ${colour[1]} ${colour[2]})`;

/** Ten colours that stay apart for colour-blind readers, for classes and groups, on light and on dark paper. */
export const HUES_LIGHT = [
  ...["#2166a8", "#bf5b17", "#145214", "#aa0959", "#a3a329"],
  ...["#993df5", "#55a6f6", "#f76eb3", "#5c0679", "#0a0ac2"],
];
export const HUES_DARK = [
  ...["#6fb1ee", "#f0984f", "#598f24", "#f6557e", "#dada0b"],
  ...["#906ef7", "#0bdaa6", "#a32985", "#78593a", "#0a66c2"],
];
/** The tenth class is followed by the same colours paler, then darker. */
export function hue(index: number, theme: Pick<Theme, "dark">): string {
  const hues = theme.dark ? HUES_DARK : HUES_LIGHT;
  const place = Math.max(0, Math.trunc(index) || 0);
  const turn = Math.floor(place / hues.length) % 3;
  return turn ? mixed(hues[place % hues.length], turn === 1 ? 255 : 0) : hues[place % hues.length];
}
const mixed = (colour: string, towards: number): string =>
  `#${[1, 3, 5]
    .map((at) =>
      Math.round(0.55 * parseInt(colour.slice(at, at + 2), 16) + 0.45 * towards)
        .toString(16)
        .padStart(2, "0"),
    )
    .join("")}`;

export function line(pen: Pen, count: number, x: (i: number) => number, y: (i: number) => number): void {
  pen.beginPath();
  let drawing = false;
  for (let i = 0; i < count; i++) {
    const [px, py] = [x(i), y(i)];
    if (!Number.isFinite(px) || !Number.isFinite(py)) drawing = false;
    else if (drawing) pen.lineTo(px, py);
    else {
      pen.moveTo(px, py);
      drawing = true;
    }
  }
  pen.stroke();
}

export interface TextStyle {
  colour: string;
  align?: CanvasTextAlign;
  base?: CanvasTextBaseline;
  size?: number;
  weight?: number | "";
}

export function text(pen: Pen, theme: Theme, words: string, x: number, y: number, style: TextStyle): void {
  pen.font = `${style.weight ?? ""} ${style.size ?? SIZE}px ${theme.sans}`;
  pen.fillStyle = style.colour;
  pen.textAlign = style.align ?? "center";
  pen.textBaseline = style.base ?? "alphabetic";
  pen.fillText(words, x, y);
}

export const plotBox = (width: number, height: number): Box => ({
  left: 44,
  right: width - 8,
  top: 8,
  bottom: height - 20,
});

/** A label, or where it has no room its number in fewer and smaller letters: a cut one would read as another number. */
export function fitting(
  pen: Pen,
  theme: Theme,
  value: number,
  label: string,
  room: number,
): { words: string; size: number } {
  pen.font = ` ${SIZE}px ${theme.sans}`;
  if (pen.measureText(label).width <= room) return { words: label, size: SIZE };
  const words = powerOfTen(value);
  return { words, size: Math.min(SIZE, (SIZE * room) / pen.measureText(words).width) };
}

/** Grid lines and labels; a label without room is left out. */
export function axes(
  pen: Pen,
  box: Box,
  theme: Theme,
  x: (v: number) => number,
  y: (v: number) => number,
  xTicks: Tick[],
  yTicks: Tick[],
): void {
  pen.lineWidth = 1;
  for (const [value, label] of yTicks) {
    pen.strokeStyle = theme.grid;
    const at = Math.round(y(value)) + 0.5;
    line(
      pen,
      2,
      (i) => (i ? box.right : box.left),
      () => at,
    );
    const { words, size } = fitting(pen, theme, value, label, box.left - 9);
    text(pen, theme, words, box.left - 7, y(value), { colour: theme.quiet, align: "right", base: "middle", size });
  }
  xTicks.forEach(([value, label], i) => {
    const next = xTicks[i + 1];
    if (next && x(next[0]) - x(value) < 26) return;
    const end = x(value) > box.right - 12;
    const at = end ? box.right : x(value);
    text(pen, theme, label, at, box.bottom + 15, { colour: theme.quiet, align: end ? "right" : "center" });
  });
}

/** Round numbers that divide a range into a handful of parts. */
export function niceTicks(low: number, high: number, count = 4): number[] {
  const raw = (high - low) / count;
  if (!(raw > 0) || !Number.isFinite(raw)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 2.5, 5, 10].map((m) => m * power).find((u) => u >= raw * 0.999) ?? raw;
  const found: number[] = [];
  for (let i = Math.ceil(low / unit - 1e-9); i * unit <= high + 1e-9 * unit; i++)
    found.push(Number((i * unit).toPrecision(12)));
  return found;
}

export function nearest(list: ArrayLike<number>, value: number): number {
  let best = 0;
  for (let i = 1; i < list.length; i++) if (Math.abs(list[i] - value) < Math.abs(list[best] - value)) best = i;
  return best;
}

/** Smallest and largest finite number; [0, 1] when there is none. */
export function range(values: ArrayLike<number | null>): [number, number] {
  let [low, high] = [Infinity, -Infinity];
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (value === null || !Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 1];
}
