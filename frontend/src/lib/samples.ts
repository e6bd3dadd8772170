// One number per sample from what a run stored: margins of classes, columns of classes or groups.

import { groupOf, labelOf } from "./order.ts";
import type { Block, Probe, RunInfo } from "./types.ts";

export interface Column {
  name: string;
  samples: number[];
}

export const MOST_COLUMNS = 24; // more nobody can read

export const outputsOf = (block: Block): number => (block.shape.length > 1 ? block.shape.at(-1)! : 1);

/** Scopes keep path counts as ln(1 + count): some networks have more paths than a float can count. */
export const keepsLogs = (run: RunInfo, name: string): boolean =>
  run.header.kind === "scope" && /^paths(_|$)/.test(name);

/** Active paths at each sample, as counts. */
export const countsOf = (block: Block, run: RunInfo): Float32Array =>
  keepsLogs(run, "paths") ? block.values.map((value) => Math.expm1(Math.min(value, 80))) : block.values;

/** How far the right output of each sample is ahead of the best other; null where the classes are not known. */
export function margins(block: Block, labels: (number | string)[] | null | undefined): Float32Array | null {
  const count = outputsOf(block);
  const samples = block.values.length / count;
  if (count < 2 || labels?.length !== samples) return null;
  const right = labels.map(Number);
  if (right.some((label) => !Number.isInteger(label) || label < 0 || label >= count)) return null;
  return Float32Array.from({ length: samples }, (_, i) => {
    const row = block.values.subarray(i * count, (i + 1) * count);
    let best = -Infinity;
    row.forEach((value, k) => {
      if (k !== right[i]) best = Math.max(best, value);
    });
    return row[right[i]] - best;
  });
}

/** Columns of panels that show one number per sample: groups, else classes, else one for all. */
export function columnsOf(probe: Probe, count: number): Column[] {
  const groups = Object.entries(probe.groups ?? {});
  if (groups.length && groups.length <= MOST_COLUMNS) return groups.map(([name, samples]) => ({ name, samples }));
  const name = probe.labels ? labelOf : groupOf;
  const found = new Map<string, number[]>();
  for (let sample = 0; sample < count; sample++) {
    const column = name(sample, probe) ?? "all";
    const list = found.get(column);
    if (list) list.push(sample);
    else found.set(column, [sample]);
  }
  if (found.size > MOST_COLUMNS) return [{ name: "all", samples: Array.from({ length: count }, (_, i) => i) }];
  return [...found]
    .sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }))
    .map(([column, samples]) => ({ name: column, samples }));
}

/** Which colour each class has: its place among the classes there are, as in legends and columns. */
export function ranksOf(labels: (number | string)[]): Map<number | string, number> {
  const named = [...new Set(labels)].sort((a, b) => Number(a) - Number(b));
  return new Map(named.map((label, i) => [label, i]));
}
