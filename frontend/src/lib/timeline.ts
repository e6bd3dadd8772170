// Where a step lies on the scrubber, and which stored step a quantity shows there.

export type Axis = "log" | "linear";

/** 0 at the first step, 1 at the last; logarithmic in 1 + steps since the first. */
export function position(step: number, steps: number[], axis: Axis): number {
  const first = steps[0] ?? 0;
  const span = (steps.at(-1) ?? 0) - first;
  if (span <= 0) return 0;
  const done = Math.min(Math.max(step - first, 0), span);
  return axis === "log" ? Math.log1p(done) / Math.log1p(span) : done / span;
}

/** Index of the stored step nearest to a place on the timeline. */
export function indexAt(part: number, steps: number[], axis: Axis): number {
  let best = 0;
  let gap = Infinity;
  for (let i = 0; i < steps.length; i++) {
    const away = Math.abs(position(steps[i], steps, axis) - part);
    if (away < gap) [best, gap] = [i, away];
  }
  return best;
}

/** Index of the last stored step at or before this one (the first, when all come later); -1 without steps. */
export function indexBefore(step: number, steps: number[]): number {
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle - 1;
  }
  return steps.length ? low : -1;
}

/** Steps worth a label: round in `unit` steps (an epoch, say), first and last always, none closer than `gap` of the timeline. */
export function ticks(steps: number[], axis: Axis, gap = 0.06, unit = 1): number[] {
  if (!steps.length) return [];
  const [first, last] = [steps[0], steps.at(-1)!];
  const span = last - first;
  const round: number[] = [];
  if (axis === "log") for (let size = unit; size <= span; size *= 10) round.push(first + size, first + 3 * size);
  else {
    const raw = span / unit / 6;
    const power = 10 ** Math.floor(Math.log10(Math.max(raw, 1)));
    const size = unit * ([1, 2, 5, 10].map((m) => m * power).find((u) => u >= raw) ?? raw);
    for (let value = Math.ceil(first / size) * size; value < last; value += size) round.push(value);
  }
  const kept = [first];
  for (const step of round.filter((value) => value > first && value < last)) {
    const here = position(step, steps, axis);
    if (here - position(kept.at(-1)!, steps, axis) >= gap && 1 - here >= gap) kept.push(step);
  }
  return last > first ? [...kept, last] : kept;
}

/** Milliseconds until the next frame so that the thumb travels evenly: `total` from end to end. */
export function pause(index: number, steps: number[], axis: Axis, total = 10000): number {
  const next = steps[index + 1];
  if (next === undefined) return total;
  const part = position(next, steps, axis) - position(steps[index], steps, axis);
  return Math.min(700, Math.max(40, total * part));
}

/** The order in which to load frames: here, then ever farther neighbours, the one ahead first. */
export function outward(index: number, count: number): number[] {
  const order = index >= 0 && index < count ? [index] : [];
  for (let away = 1; order.length < count && away <= count; away++)
    for (const next of [index + away, index - away]) if (next >= 0 && next < count) order.push(next);
  return order;
}

/** Middles of labels as near as possible to where they belong, in order, without overlap, within the timeline. */
export function spreadLabels(middles: number[], halves: number[], width: number, gap = 10): number[] {
  const placed = [...middles];
  for (let i = 0, edge = 0; i < placed.length; i++) {
    placed[i] = Math.max(placed[i], edge + halves[i]);
    edge = placed[i] + halves[i] + gap;
  }
  for (let i = placed.length - 1, edge = width; i >= 0; i--) {
    placed[i] = Math.min(placed[i], edge - halves[i]);
    edge = placed[i] - halves[i] - gap;
  }
  return placed;
}
