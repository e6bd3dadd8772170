// Sentences about a verdict: those of its file; for older files only what is certain.

import type { GroupVerdict, Phase, RunInfo, Verdict } from "./types.ts";

const LEFT = ["rich", "mixed"]; // labels of networks that left the lazy regime

/** The step by which the network had left the lazy regime; null where the verdict does not say that it did. */
export function leftLazy(verdict: Verdict | null | undefined): number | null {
  const step = verdict?.when?.network;
  return verdict && LEFT.includes(verdict.label) && typeof step === "number" ? step : null;
}

/** When it happened, in the verdict's own words. */
export function whenText(verdict: Verdict): string {
  if (verdict.words) return verdict.words.when ?? "";
  const left = leftLazy(verdict);
  return left === null ? "" : `It left the lazy regime by step ${left}.`;
}

/** A sentence in parts: those that name a step can be links to it. */
export function withSteps(text: string): { text: string; step: number | null }[] {
  return text
    .split(/(step \d+)/)
    .filter(Boolean)
    .map((part) => ({ text: part, step: /^step \d+$/.test(part) ? Number(part.slice(5)) : null }));
}

const MOVES: Record<string, string> = { gains: "grew", starved: "shrank", keeps: "" };

/** How a group changed, in the words of the verdict's sentence. */
export const groupWords = (group: GroupVerdict): string =>
  [MOVES[group.verdict ?? ""] ?? "", group.behind ? "left behind" : ""].filter(Boolean).join(", ");

/** How many groups grew, shrank and were left behind, in a few words. */
export function groupsInShort(groups: GroupVerdict[]): string {
  const counted = (text: string, is: (group: GroupVerdict) => boolean | undefined): string => {
    const count = groups.filter(is).length;
    return count ? `${count} ${text}` : "";
  };
  return [
    counted("grew", (g) => g.verdict === "gains"),
    counted("shrank", (g) => g.verdict === "starved"),
    counted("left behind", (g) => g.behind),
  ]
    .filter(Boolean)
    .join(", ");
}

/** The colour of a word of a verdict; the style sheet has the same under [data-word]. */
export const wordColour = (word: string, theme: Record<"cool" | "mixed" | "warm" | "unit", string>): string =>
  ({ lazy: theme.cool, mixed: theme.mixed, rich: theme.warm })[word] ?? theme.unit;

export interface Stretch {
  word: string;
  from: number;
  to: number;
}

/** The phases as stretches of training without holes: each begins where the one before ended. */
export function stretchesOf(phases: Phase[] | null | undefined): Stretch[] {
  return (phases ?? []).map((phase, i) => ({
    word: phase.word,
    from: i ? (phases![i - 1].until ?? phase.first) : phase.first,
    to: phase.until ?? phase.last,
  }));
}

export interface GapCurve {
  isGap: boolean; // of the trained twin
  measure: string; // what is drawn: that gap, else the measure that it is estimated from
  steps: number[];
  values: (number | null)[];
}

/** How far the network is from its linear model, by step: the twin's gap where it was followed, else the estimate's measure. */
export function gapCurve(verdict: Verdict, run: Pick<RunInfo, "scalars">): GapCurve | null {
  const measured = Object.entries(verdict.twin?.gap ?? {}).map(([step, gap]) => [Number(step), gap] as const);
  measured.sort((a, b) => a[0] - b[0]);
  if (measured.length > 2)
    return {
      isGap: true,
      measure: "twin_gap",
      steps: measured.map(([step]) => step),
      values: measured.map(([, gap]) => gap),
    };
  const restsOn = verdict.evidence?.[0]?.measure ?? "twin_gap";
  const measure = restsOn === "twin_gap" ? "linearisation_error" : restsOn; // a twin trained afterwards has one point only
  const series = run.scalars[measure];
  return series?.steps.length
    ? { isGap: false, measure, steps: series.steps, values: series.values.map((row) => row[0] ?? null) }
    : null;
}

/** The sentences of the advice, without their heading. */
export const adviceOf = (verdict: Verdict): string[] =>
  (verdict.words?.advice ?? "")
    .split("\n")
    .map((text) => text.trim())
    .filter((text) => text && text !== "What to do:")
    .map((text) => (verdict.advice?.length ? text.replace(/ verdict\.advice says .*$/, "") : text));
