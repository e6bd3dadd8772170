// The order of samples in heat maps: as stored, by class, by group; and which sample a row stands for.

import type { Probe } from "./types.ts";

export interface Band {
  name: string;
  from: number; // on screen, end exclusive
  to: number;
  rank: number; // of its class or group: which colour
}

export interface Ordering {
  order: Int32Array; // row on screen -> stored row
  bands: Band[];
  moved: boolean; // false: as stored
}

/** Sample of each row of the kernel `name`, shown with `rows` rows, each the first of `block` stored ones. */
export function samplesOf(rows: number, probe: Probe, name = "", block = 1): number[] {
  for (const some of [probe.rows?.[name], probe.picked])
    if (some && Math.ceil(some.length / block) === rows)
      return Array.from({ length: rows }, (_, row) => some[row * block]);
  const stride = Math.max(1, Math.floor((probe.n ?? rows) / rows));
  return Array.from({ length: rows }, (_, row) => row * stride);
}

/** Stored row that stands for a sample: itself, or the nearest one that the kernel sees. */
export function rowOf(sample: number, samples: number[]): number {
  let best = 0;
  for (let row = 1; row < samples.length; row++)
    if (Math.abs(samples[row] - sample) < Math.abs(samples[best] - sample)) best = row;
  return best;
}

/** Class name of a sample, if classes are known. */
export function labelOf(sample: number, probe: Probe): string | null {
  const label = probe.labels?.[sample];
  if (label === undefined || label === null) return null;
  return String(label);
}

/** First group that holds the sample. */
export function groupOf(sample: number, probe: Probe): string | null {
  for (const [name, members] of Object.entries(probe.groups ?? {})) if (memberSet(members).has(sample)) return name;
  return null;
}

/** Whether groups are something else than the classes, so that sorting by them shows something else. */
export function groupsSayMore(probe: Probe): boolean {
  const { labels } = probe;
  const groups = Object.values(probe.groups ?? {});
  if (!labels) return groups.length > 0;
  const classes = groups.map((members) => new Set(members.map((sample) => labels[sample])));
  const pure = classes.every((found) => found.size === 1);
  const samples = groups.reduce((sum, members) => sum + members.length, 0);
  return groups.length > 0 && !(pure && samples === labels.length && groups.length === new Set(labels).size);
}

/** How samples are sorted unless the reader chose: by class where classes are known. */
export const usualOrder = (probe: Probe): string => (probe.labels ? "class" : "stored");

const sets = new WeakMap<number[], Set<number>>();
const memberSet = (members: number[]): Set<number> => {
  const known = sets.get(members) ?? new Set(members);
  sets.set(members, known);
  return known;
};

/** Rows by class or by group, each in stored order; as stored, bands are named only where they lie together anyway. */
export function ordering(kind: string, samples: number[], probe: Probe): Ordering {
  const moved = kind === "class" || kind === "group";
  const grouped = kind === "group" || (!moved && Object.keys(probe.groups ?? {}).length > 0);
  const name = grouped ? groupOf : labelOf;
  const rows = samples.map((sample, row) => ({ row, band: name(sample, probe) ?? NONE }));
  const named = grouped ? Object.keys(probe.groups ?? {}) : [...new Set(rows.map((r) => r.band))].sort(natural);
  const rank = new Map([...named.filter((band) => band !== NONE), NONE].map((band, i) => [band, i]));
  if (moved) rows.sort((a, b) => rank.get(a.band)! - rank.get(b.band)! || a.row - b.row);
  const bands: Band[] = [];
  for (const [place, { band }] of rows.entries()) {
    const last = bands.at(-1);
    if (last?.name === band) last.to = place + 1;
    else bands.push({ name: band, from: place, to: place + 1, rank: rank.get(band)! });
  }
  const together = new Set(bands.map((band) => band.name)).size === bands.length;
  const order = Int32Array.from(rows, (r) => r.row);
  return { order, bands: together ? bands.filter((band) => band.name !== NONE) : [], moved };
}

const NONE = "none";
const natural = (a: string, b: string): number => a.localeCompare(b, "en", { numeric: true });
