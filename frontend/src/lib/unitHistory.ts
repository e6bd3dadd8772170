// One unit over training: how long its normal is, where it points, where it is open.

export interface Moment {
  step: number;
  vector: Float32Array;
  offset: number | null;
  norm: number;
  turned: number; // degrees away from its first direction
}

export const norm = (vector: ArrayLike<number>): number => {
  let sum = 0;
  for (let i = 0; i < vector.length; i++) sum += vector[i] * vector[i];
  return Math.sqrt(sum);
};

/** Degrees between two vectors; 0 when one of them vanishes. */
export function angleBetween(a: ArrayLike<number>, b: ArrayLike<number>): number {
  let dot = 0;
  for (let i = 0; i < a.length; i++) dot += a[i] * b[i];
  const size = norm(a) * norm(b);
  return size ? (Math.acos(Math.min(1, Math.max(-1, dot / size))) * 180) / Math.PI : 0;
}

/** `vectors[t]` is the unit at `steps[t]`; every moment is compared with the first. */
export function moments(steps: number[], vectors: Float32Array[], offsets: (number | null)[]): Moment[] {
  return steps.map((step, t) => ({
    step,
    vector: vectors[t],
    offset: offsets[t],
    norm: norm(vectors[t]),
    turned: angleBetween(vectors[t], vectors[0]),
  }));
}

/** Share of the given samples on the open side: <u, x> + b >= 0. */
export function openOn(vector: Float32Array, offset: number, inputs: Float32Array, samples: number[]): number {
  const d = vector.length;
  let open = 0;
  for (const sample of samples) {
    let sum = offset;
    for (let i = 0; i < d; i++) sum += vector[i] * inputs[sample * d + i];
    if (sum >= 0) open++;
  }
  return samples.length ? open / samples.length : NaN;
}

/** At most `count` steps, evenly spread, first and last kept. */
export function spreadSteps(steps: number[], count: number): number[] {
  if (steps.length <= count) return steps;
  const picked = new Set(
    Array.from({ length: Math.max(count, 2) }, (_, i) =>
      Math.round((i * (steps.length - 1)) / (Math.max(count, 2) - 1)),
    ),
  );
  return steps.filter((_, i) => picked.has(i));
}

/** The samples deepest on the open side and those deepest on the closed side, at most `count` each; without an offset there is no border, only the two ends. */
export function extremes(
  vector: Float32Array,
  offset: number | null,
  inputs: Float32Array,
  count: number,
): [number[], number[]] {
  const d = vector.length;
  const depth = Array.from({ length: Math.floor(inputs.length / d) }, (_, sample) => {
    let sum = offset ?? 0;
    for (let i = 0; i < d; i++) sum += vector[i] * inputs[sample * d + i];
    return { sample, sum };
  });
  depth.sort((a, b) => b.sum - a.sum);
  const open = depth.filter(({ sum }) => offset === null || sum >= 0).slice(0, count);
  const closed = depth
    .filter(({ sum }) => offset === null || sum < 0)
    .reverse()
    .slice(0, count);
  return [open.map(({ sample }) => sample), closed.map(({ sample }) => sample)];
}
