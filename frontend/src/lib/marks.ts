// Which sample a mark stands for where two runs share a page: numbers mean the same sample only where their samples do.

import type { SampleMatch } from "./types.ts";

export type MarkKey = "mark" | "mark2"; // where the address keeps marks: of the first run, of the second alone

/** How a run numbers its samples: `own[i]` is its number of the page's sample i; null where the numbers are the same. */
export interface Numbering {
  key: MarkKey;
  own: number[] | null;
}

export const SHARED: Numbering = { key: "mark", own: null };
export const ALONE: Numbering = { key: "mark2", own: null };

/** How the second of two runs numbers its samples, from the match that the server found. */
export const numberingOf = (match: SampleMatch): Numbering =>
  match.same === false ? ALONE : { key: "mark", own: match.order };

export const ownNumbers = (numbering: Numbering, marks: number[]): number[] => {
  const { own } = numbering;
  return own ? marks.map((mark) => own[mark]).filter((sample) => sample !== undefined) : marks;
};

export const pageNumbers = (numbering: Numbering, samples: number[]): number[] => {
  const { own } = numbering;
  return own ? samples.map((sample) => own.indexOf(sample)).filter((mark) => mark >= 0) : samples;
};
