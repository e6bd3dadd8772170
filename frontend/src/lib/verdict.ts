// Sentences about a verdict: those of its file; for older files only what is certain.

import type { GroupVerdict, Verdict } from "./types.ts";

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
