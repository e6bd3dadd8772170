// What a run holds, sorted by what the page can draw from it.

import { groupName } from "./format.ts";
import { indexBefore } from "./timeline.ts";
import type { ArrayInfo, RunInfo, Series } from "./types.ts";
import { leftLazy } from "./verdict.ts";

/** Steps at which a member has this array: some members are stored more often than others. */
export const stepsOf = (info: ArrayInfo, member: number): number[] => info.own?.[String(member)] ?? info.steps;

/** The stored step that the page shows at `step`; undefined without any. */
export const shownStep = (steps: number[], step: number): number | undefined => steps[indexBefore(step, steps)];

const DRAWN = [
  "overlap",
  "tangent",
  "output",
  "paths",
  "normals",
  "offsets",
  "neurons",
  "neuron_norms",
  "neuron_biases",
  "probe_x",
  "probe_y",
  "probe_text",
  "grid_output",
];
const isKernel = (info: ArrayInfo): boolean =>
  info.shape.length === 3 && info.shape[1] === info.shape[2] && info.shape[1] > 1;

/** Arrays no panel knows by name: square ones are heat maps, the rest is listed and drawn as curves. */
export function others(run: RunInfo): { kernels: string[]; rest: string[] } {
  const names = Object.keys(run.arrays)
    .filter((name) => !DRAWN.includes(name))
    .sort();
  return {
    kernels: names.filter((name) => isKernel(run.arrays[name])),
    rest: names.filter((name) => !isKernel(run.arrays[name])),
  };
}

/** Curves that share an axis: `loss`, `loss_top` and `loss_bottom`; all `alignment@LAYER`; all `tangent_mass_GROUP`. */
export function families(scalars: Record<string, Series>, groups: string[]): { name: string; members: string[] }[] {
  const names = Object.keys(scalars).sort();
  const rootOf = (name: string): string => {
    if (name.includes("@")) return name.slice(0, name.indexOf("@") + 1); // layers are not groups: an axis of their own
    if (!groups.length) return names.find((other) => name.startsWith(`${other}_`)) ?? name;
    const group = groups.find((g) => name.endsWith(`_${g}`));
    return group ? name.slice(0, -group.length - 1) : name;
  };
  const grouped = new Map<string, string[]>();
  for (const name of names) grouped.set(rootOf(name), [...(grouped.get(rootOf(name)) ?? []), name]);
  return [...grouped].map(([name, members]) => ({ name, members }));
}

/** Value of a scalar at (or last before) a step. */
export function valueAt(series: Series | undefined, step: number, member: number): number | null {
  if (!series?.steps.length) return null;
  const index = indexBefore(step, series.steps);
  return series.steps[index] <= step ? (series.values[index][member] ?? null) : null;
}

/** Why a scope left the half-spaces of a network out; null where it did not, or no scope wrote the run. */
export function leftOutSpaces(header: RunInfo["header"] | undefined): string | null {
  const left = header?.recipe?.scope?.left_out;
  const why: unknown = left?.half_spaces ?? left?.neurons;
  return typeof why === "string" ? `no half-spaces: ${why}` : null;
}

/** Why a run shows no half-spaces: its units have none in input space, or they were not stored. */
export function noHalfSpaces(header: RunInfo["header"] | undefined): string {
  const [left, model] = [leftOutSpaces(header), header?.model];
  if (left) return left;
  if (model?.gating === "own") return "no half-spaces: the gate of a ReLU unit depends on the layers before it";
  return model?.gating === "linear" ? "this run did not store its half-spaces" : "no half-spaces in this run";
}

export interface Moment {
  step: number;
  words: string;
  group: number; // which colour; -1 for none
}

/** Steps that the scrubber links to, from the curves: a group counts as learned at a tenth of its first loss. */
export function momentsOf(run: RunInfo, member: number): Moment[] {
  const groups = Object.keys(run.probe.groups ?? {});
  const found = (groups.length > 4 ? [] : groups).map((name, group): Moment | null => {
    const series = run.scalars[`loss_${name}`];
    const first = series?.values[0]?.[member];
    if (!first) return null;
    const at = series.values.findIndex((row) => row[member] !== null && row[member]! <= first / 10);
    return at > 0 ? { step: series.steps[at], words: `${groupName(name)} learned`, group } : null;
  });
  const left = leftLazy(run.verdict);
  const rich = left === null ? null : { step: left, words: "no longer lazy", group: -1 };
  const sorted = [...found, rich].filter((moment) => moment !== null).sort((a, b) => a.step - b.step);
  const merged: Moment[] = [];
  for (const moment of sorted) {
    const last = merged.at(-1);
    if (last?.step === moment.step) Object.assign(last, { words: `${last.words}, ${moment.words}`, group: -1 });
    else merged.push(moment);
  }
  return merged;
}
