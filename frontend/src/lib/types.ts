// What the server answers, word for word (the Python side: unlazy/studio/api.py and run_facts.py).

export interface RunCard {
  key: string;
  id: string;
  kind: string;
  study: string | null;
  scale: string | null;
  state: string;
  step: number | null;
  error: string | null;
  started: string | null;
  members: number;
  model: string;
  data: string;
  last: Record<string, number | null>;
  verdict: string | null;
  config?: Record<string, Setting> | null; // absent from older servers, as all that follows
  tags?: string[] | null;
  notes?: string | null;
  reason?: string | null; // why there is no word
  gap?: number | null;
  phases?: Phase[] | null;
  broke_down?: boolean | null;
  git?: unknown;
  seed?: number | null;
}

export type Setting = string | number | boolean | null;

/** A stretch of training with one word; `until`: about when it ended, null where it lasts. */
export interface Phase {
  word: string;
  first: number;
  last: number;
  until: number | null;
}

export interface RunList {
  root: string;
  runs: RunCard[];
  broken: { folder: string; error: string }[];
}

export interface Series {
  steps: number[];
  values: (number | null)[][]; // [T][members]
}

export interface ArrayInfo {
  steps: number[];
  shape: number[]; // [members, ...]
  dtype: string;
  own?: Record<string, number[]>; // steps of a member that was stored more often
}

export interface Probe {
  kind: "circle" | "points2d" | "image" | "tokens" | "vectors" | "unknown";
  n?: number | null;
  image_shape?: number[] | null;
  groups?: Record<string, number[]> | null;
  labels?: (number | string)[] | null;
  frequencies?: Record<string, number> | null;
  picked?: number[] | null; // samples that the rows of the kernels stand for
  rows?: Record<string, number[]> | null; // the same for a kernel that saw a choice of its own
  texts?: string[] | null; // the samples as people read them
}

export interface Evidence {
  measure: string;
  value: number | null;
  interval?: [number | null, number | null] | null;
  lazy_below?: number | null;
  rich_above?: number | null;
  says?: string | null;
  source?: string | null;
}

type GroupNumber = "share" | "mass_first" | "mass_last" | "mass_gain" | "loss_first" | "loss_last";
export type GroupVerdict = Partial<
  Record<GroupNumber | "alignment_first" | "alignment_last", number | null> & { verdict: string; behind: boolean }
>;
/** Whole sentences, empty where there is nothing to say. */
export type VerdictWords = Partial<
  Record<"meaning" | "gap" | "when" | "groups" | "layers" | "samples" | "advice", string>
>;

export interface LayerLine {
  name: string;
  word: string; // "" where nothing supports one
  rank: number;
  frozen_cost?: number | null;
  linear_cost?: number | null;
  trained?: boolean;
  measures?: Record<string, number | null>;
  says?: string;
}
export interface LayerTable {
  lines: LayerLine[];
  fall?: number | null;
  source?: string;
}
export interface SampleValue {
  sample: number;
  value: number;
}
export type SampleKind = "hardest" | "easiest" | "moved" | "influential";
export type StandoutSamples = Partial<Record<SampleKind, SampleValue[]>> & {
  pairs?: { first: number; second: number; value: number }[];
};

export interface Verdict {
  label: string;
  when?: Record<string, number | null>; // the first measured step beyond the lazy border: the network, and each measure
  when_after?: Record<string, number | null>; // the last measured step before that
  words?: VerdictWords; // absent in older runs
  advice?: string[]; // every sentence; of a rich network `words.advice` is a hint alone
  gap?: number | null;
  phases?: Phase[];
  twin?: { gap?: Record<string, number | null> } | null;
  layers?: LayerTable | null;
  samples?: StandoutSamples | null;
  evidence?: Evidence[];
  groups?: Record<string, GroupVerdict>;
  reasons?: string[];
  notes?: string[];
}

export interface RunInfo {
  key: string;
  title?: string;
  live?: boolean;
  version?: string;
  steps_per_epoch?: number | null;
  default_member?: number;
  maps?: string[];
  embeddings?: string[];
  header: Record<string, any>;
  status: { state: string; step: number | null; error: string | null };
  steps: number[];
  scalars: Record<string, Series>;
  arrays: Record<string, ArrayInfo>;
  verdict: Verdict | null;
  probe: Probe;
  problems: string[];
  config?: Record<string, Setting> | null;
  tags?: string[] | null;
  notes?: string | null;
  broke_down?: boolean | null;
  phases?: Phase[] | null;
  notice?: string | null; // what a static site leaves out
}

/** A block of numbers with its shape: float32 values, or bytes of a heat map with their scale. */
export interface Block {
  values: Float32Array;
  shape: number[];
}

export interface Levels {
  bytes: Uint8Array;
  rows: number;
  columns: number;
  top: number;
  signed: boolean;
  clipped: boolean;
  stride: number;
  unit: number; // value = unit * top * level^2
  bad: number; // entries that are not finite
}

export interface Embedding {
  steps: number[];
  units: number;
  shown: number[];
  points: Float32Array; // [T, shown, 2]
}

export interface Spectrum {
  steps: number[];
  values: (number | null)[][];
  alignment?: (number | null)[] | null;
}

/** Whether two kernels are over the same samples, row by row; null: the runs do not tell. */
export interface KernelSamples {
  same: boolean | null;
  why: string;
}

/** Whether two runs hold the same samples; `order[i]`: which of the second is sample i of the first, null for i itself. */
export interface SampleMatch {
  same: boolean | null;
  order: number[] | null;
  why: string;
}

export interface ClaimPart {
  name: string;
  verdict?: string;
  value?: number | null;
  interval?: [number | null, number | null] | null;
  unit?: string;
  seeds?: number;
  agree?: number;
  missing?: number;
  rule?: string;
  note?: string;
}

/** How a claim stands: all parts hold, some do, none is decided, or it fails. */
export type ClaimOutcome = "holds" | "part" | "undecided" | "fails" | "no control";

export interface ClaimRow extends ClaimPart {
  id: string;
  paper: string;
  where: string | null;
  statement: string;
  paper_value: string | number | null;
  study: string | null;
  scale: string | null;
  verdict: string;
  outcome: ClaimOutcome;
  survives: string;
  survives_outcome: ClaimOutcome;
  identity?: boolean;
  settings?: Record<string, unknown> | null;
  parts?: ClaimPart[] | null;
  controls?: ClaimPart[] | null;
  shows?: ClaimPart[] | null;
  why?: string | null;
  stale?: boolean;
  rule_record?: { after_data: boolean; recorded: string; first_measured: string | null } | null;
  run?: string | null;
  figure?: string | null;
  command?: string | null;
  figure_url?: string | null;
  run_keys?: string[];
  provenance?: Record<string, unknown> | null;
}

export interface Report {
  entry?: string;
  title?: string;
  lead?: string;
  story?: [string, string][];
  figures?: { id: string; title: string; caption: string; png: string }[];
  claims?: ClaimRow[];
  provenance?: Record<string, unknown>;
  scenes?: { key: string; title: string; note: string; meaning?: string; member: number }[];
  notice?: string | null;
  responses: Record<string, unknown>;
  site?: { runs: Record<string, string>; samples: Record<string, [string, string]> }; // folder of every run, and two runs over its samples
}
