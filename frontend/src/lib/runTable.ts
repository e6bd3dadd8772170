// The table of runs: its columns, the language of its filter, and groups of runs that share a value.

import type { RunCard, Setting } from "./types.ts";

export type Cell = string | number | null;

const names = new Intl.Collator("en", { numeric: true });
const plain = (value: Setting | undefined): Cell =>
  value === undefined || value === null ? null : typeof value === "boolean" ? String(value) : value;

/** Columns that every run has; configuration and measured numbers come on top. */
const FIXED: Record<string, (card: RunCard) => Cell> = {
  name: (card) => card.key,
  state: (card) => card.state,
  step: (card) => card.step,
  loss: (card) => card.last.loss ?? null,
  gap: (card) => card.gap ?? null,
  verdict: (card) => wordOf(card),
  model: (card) => card.model,
  data: (card) => card.data,
  study: (card) => card.study,
  scale: (card) => card.scale,
  kind: (card) => card.kind,
  id: (card) => card.id,
  seed: (card) => card.seed ?? plain(card.config?.seed),
  members: (card) => card.members,
  tag: (card) => (card.tags ?? []).join(" ") || null,
  notes: (card) => card.notes || null,
  started: (card) => (card.started ? Date.parse(card.started) : null),
};
const ALIASES: Record<string, string> = { run: "name", tags: "tag", note: "notes" };

/** The word of a run: that of its verdict; "broke down" where the loss is no number any more. */
export const wordOf = (card: RunCard): string | null => (card.broke_down ? "broke down" : card.verdict);

/** What a run has in a column: of its configuration first, so that a setting may be called "scale"; null where nothing. */
export function cellOf(card: RunCard, column: string): Cell {
  const own = card.config?.[column];
  if (own !== undefined) return plain(own);
  const fixed = FIXED[ALIASES[column] ?? column];
  return fixed ? fixed(card) : (card.last[column] ?? null);
}

/** Whether any run may have this column. */
export const isColumn = (column: string, runs: RunCard[]): boolean =>
  (ALIASES[column] ?? column) in FIXED ||
  runs.some((card) => card.config?.[column] !== undefined || column in card.last);

/** Names of settings in the runs, those with more than one value first. */
export function configColumns(runs: RunCard[]): { name: string; varies: boolean }[] {
  const values = new Map<string, Set<unknown>>();
  const having = new Map<string, number>();
  for (const card of runs)
    for (const [name, value] of Object.entries(card.config ?? {})) {
      values.set(name, (values.get(name) ?? new Set()).add(value));
      having.set(name, (having.get(name) ?? 0) + 1);
    }
  return [...values]
    .map(([name, found]) => ({ name, varies: found.size > 1 }))
    .sort(
      (a, b) =>
        Number(b.varies) - Number(a.varies) ||
        having.get(b.name)! - having.get(a.name)! ||
        names.compare(a.name, b.name),
    );
}

/** Numbers by size, words by name, what is missing last. */
export function compareCells(a: Cell, b: Cell): number {
  if (a === null || b === null) return Number(a === null) - Number(b === null);
  return typeof a === "number" && typeof b === "number" ? a - b : names.compare(String(a), String(b));
}

/** Sorted by a column, downwards with a minus; what is missing stays last, equal ones by name. */
export function sortRuns(runs: RunCard[], sort: string): RunCard[] {
  const down = sort.startsWith("-");
  const column = sort.replace(/^-/, "");
  const valued = runs.map((card) => ({ card, value: cellOf(card, column) }));
  valued.sort((p, q) => {
    const missing = p.value === null || q.value === null;
    const by = compareCells(p.value, q.value);
    return (down && !missing ? -by : by) || names.compare(p.card.key, q.card.key);
  });
  return valued.map(({ card }) => card);
}

export interface Filter {
  keeps: (card: RunCard) => boolean;
  unknown: string[]; // columns that no run has
}

const PART = /^(-?)([\w./@-]+?)(>=|<=|!=|:|=|>|<)(.*)$/;

/** Words and quoted phrases of a filter: `name:"two words"` is one. */
const split = (text: string): string[] => text.match(/(?:[^\s"]|"[^"]*"?)+/g) ?? [];
const unquoted = (text: string): string => text.replaceAll('"', "");

/** All parts must hold: `lr>1e-3`, `verdict:rich` (contains), `width=64` (equals), `state!=failed`; a plain word is in any text,
 * a minus before a part turns it round. */
export function parseFilter(text: string, runs: RunCard[]): Filter {
  const unknown: string[] = [];
  const tests = split(text.trim()).map((part): ((card: RunCard) => boolean) => {
    const found = PART.exec(part);
    if (!found || (!isColumn(found[2], runs) && !/^[A-Za-z_]\w*$/.test(found[2]))) {
      const turned = part.startsWith("-") && part.length > 1;
      const word = unquoted(turned ? part.slice(1) : part).toLowerCase();
      return (card) => hay(card).includes(word) !== turned;
    }
    const [, minus, column, operator, raw] = found;
    if (!isColumn(column, runs)) unknown.push(column);
    const test = tester(operator, unquoted(raw));
    return (card) => test(cellOf(card, column)) !== (minus === "-");
  });
  return { keeps: (card) => tests.every((test) => test(card)), unknown: [...new Set(unknown)] };
}

function tester(operator: string, wanted: string): (value: Cell) => boolean {
  const number = wanted.trim() === "" ? NaN : Number(wanted);
  const word = wanted.toLowerCase();
  const equals = (value: Cell): boolean =>
    value !== null && (typeof value === "number" ? value === number : value.toLowerCase() === word);
  if (!word) return () => true; // still being typed
  if (operator === "=") return equals;
  if (operator === "!=") return (value) => !equals(value);
  if (operator === ":")
    return (value) =>
      value !== null && (typeof value === "number" ? value === number : value.toLowerCase().includes(word));
  return (value) => {
    if (typeof value !== "number" || Number.isNaN(number)) return false;
    return { ">": value > number, ">=": value >= number, "<": value < number, "<=": value <= number }[operator]!;
  };
}

const hays = new WeakMap<RunCard, string>();
/** Everything that a plain word may be found in. */
function hay(card: RunCard): string {
  const known = hays.get(card);
  if (known !== undefined) return known;
  const settings = Object.entries(card.config ?? {}).map(([name, value]) => `${name}=${value}`);
  const parts = [card.key, card.id, card.kind, card.study, card.scale, card.state, card.model, card.data, wordOf(card)];
  const text = [...parts, ...(card.tags ?? []), card.notes, ...settings].join(" ").toLowerCase();
  hays.set(card, text);
  return text;
}

export interface RunGroup {
  value: Cell;
  runs: RunCard[];
}

/** Runs with the same value of a column together, groups by their value, runs in the order they came in. */
export function groupRuns(runs: RunCard[], column: string): RunGroup[] {
  const groups = new Map<Cell, RunCard[]>();
  for (const card of runs) {
    const value = cellOf(card, column);
    groups.set(value, [...(groups.get(value) ?? []), card]);
  }
  return [...groups].map(([value, found]) => ({ value, runs: found })).sort((a, b) => compareCells(a.value, b.value));
}

/** Mean, lowest and highest of the numbers in a column; null without numbers. */
export function meanOf(runs: RunCard[], column: string): { mean: number; low: number; high: number } | null {
  const found = runs.map((card) => cellOf(card, column)).filter((value) => typeof value === "number");
  if (!found.length) return null;
  return {
    mean: found.reduce((a, b) => a + b, 0) / found.length,
    low: Math.min(...found),
    high: Math.max(...found),
  };
}

/** How many runs have each word, most first. */
export function countWords(runs: RunCard[]): [word: string, count: number][] {
  const counts = new Map<string, number>();
  for (const card of runs) {
    const word = wordOf(card);
    if (word) counts.set(word, (counts.get(word) ?? 0) + 1);
  }
  return [...counts].sort((a, b) => b[1] - a[1]);
}
