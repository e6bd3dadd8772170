// The axes of curves: limits that a divergence does not stretch, smoothing, zoom.

import { position, type Axis } from "./timeline.ts";

/** Ticks of a logarithmic axis: powers of ten, with 2 and 5 between them where there are few. */
export function decades(low: number, high: number): number[] {
  const from = Math.floor(Math.log10(low));
  const count = Math.ceil(Math.log10(high)) - from + 1;
  const powers = Array.from({ length: count }, (_, i) => from + i);
  const inside = (steps: number[]): number[] =>
    powers.flatMap((power) => steps.map((s) => Number(`${s}e${power}`))).filter((v) => v >= low && v <= high);
  const plain = inside([1]);
  return plain.length >= 3 ? plain.filter((_, i) => i % Math.ceil(plain.length / 6) === 0) : inside([1, 2, 5]);
}

export type Values = (number | null)[];

const FAR = 1000; // times the usual size of a curve: beyond lies a divergence
const isNumber = (value: number | null | undefined): value is number =>
  value !== null && value !== undefined && Number.isFinite(value);

function median(sorted: number[]): number {
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** Lowest and highest value to show, and the largest value beyond them, null where all are in sight.
 *
 * The usual size of a curve is its first value or the median of its absolute values, whichever is larger; what exceeds 1,000
 * times that is left out of the limits. A logarithmic axis shows every positive number.
 */
export function axisLimits(curves: Values[], log = false): { low: number; high: number; beyond: number | null } | null {
  const finite = curves.map((values) => values.filter(isNumber)).filter((values) => values.length);
  const usual = Math.max(
    0,
    ...finite.map((values) =>
      Math.max(Math.abs(values[0]), median(values.map((value) => Math.abs(value)).sort((a, b) => a - b))),
    ),
  );
  let [low, high, far] = [Infinity, -Infinity, 0];
  for (const values of finite)
    for (const value of values) {
      if (log && value <= 0) continue;
      if (!log && usual > 0 && Math.abs(value) > FAR * usual) {
        if (Math.abs(value) > Math.abs(far)) far = value;
        continue;
      }
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  return low <= high ? { low, high, beyond: far || null } : null;
}

/** Running mean that forgets: weight 0 keeps the values, 0.9 averages over about ten; gaps stay gaps. */
export function smoothed(values: Values, weight: number): Values {
  if (!(weight > 0)) return values;
  let [sum, mass] = [0, 0];
  return values.map((value) => {
    if (!isNumber(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

/** The zoom in the address ("12,400": from step 12 to step 400) as parts of the timeline; the whole one without it. */
export function zoomOf(text: string | undefined, steps: number[], axis: Axis): [number, number] {
  const ends = (text ?? "").split(",").map(Number);
  if (ends.length !== 2 || !ends.every(Number.isFinite)) return [0, 1];
  const [from, to] = ends.map((step) => position(step, steps, axis));
  return to - from > 1e-6 ? [from, to] : [0, 1];
}

/** Address of the stretch between two places on the timeline; null where it holds fewer than two stored steps. */
export function zoomText(a: number, b: number, steps: number[], axis: Axis): string | null {
  const [from, to] = a < b ? [a, b] : [b, a];
  const inside = steps.filter((step) => {
    const at = position(step, steps, axis);
    return at >= from && at <= to;
  });
  return inside.length > 1 ? `${inside[0]},${inside.at(-1)}` : null;
}

export interface Band {
  steps: number[];
  low: Values;
  middle: Values;
  high: Values;
}

/** Mean of several curves by step, with the lowest and the highest; a curve counts from its first to its last measurement,
 * with straight lines in between. */
export function meanBand(curves: { steps: number[]; values: Values }[]): Band {
  const steps = [...new Set(curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
  const known = curves.map((curve) =>
    curve.steps.map((step, i) => [step, curve.values[i]] as const).filter(([, value]) => isNumber(value)),
  );
  const rows = steps.map((step) => known.map((points) => between(points, step)).filter(isNumber));
  const pick = (act: (row: number[]) => number): Values => rows.map((row) => (row.length ? act(row) : null));
  return {
    steps,
    low: pick((row) => Math.min(...row)),
    middle: pick((row) => row.reduce((a, b) => a + b, 0) / row.length),
    high: pick((row) => Math.max(...row)),
  };
}

function between(points: (readonly [number, number | null])[], step: number): number | null {
  const after = points.findIndex(([at]) => at >= step);
  if (after < 0) return null;
  const [right, high] = points[after];
  if (right === step) return high;
  if (after === 0) return null;
  const [left, low] = points[after - 1];
  return low! + ((high! - low!) * (step - left)) / (right - left);
}
