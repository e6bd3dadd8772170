// What each panel shows, in one sentence, with the equation of the paper that defines it.

import { keepsLogs } from "./samples.ts";
import type { RunInfo } from "./types.ts";

export interface Definition {
  title: string;
  text: string;
  equation?: string;
}

export const DEFINITIONS: Record<string, Definition> = {
  loss: { title: "Loss", text: "The quantity that training minimises, overall and per group." },
  overlap: {
    title: "Overlap kernel",
    text: "How many paths are active on both samples.",
    equation: "\u039b(x, x\u2032) = \u220f\u2097 \u27e8g\u2097(x), g\u2097(x\u2032)\u27e9",
  },
  tangent: {
    title: "Tangent kernel",
    text: "How a gradient step on one sample moves the other.",
    equation: "K(x, x\u2032) = \u27e8\u2207\u03b8 f(x), \u2207\u03b8 f(x\u2032)\u27e9",
  },
  spectrum: {
    title: "Spectra",
    text: "Eigenvalues: where few are large, few directions are learned fast.",
    equation: "\u03bb\u1d62 / tr K",
  },
  alignment: {
    title: "Alignment",
    text: "Cosine between the kernel and the kernel of the targets, both centred.",
    equation: "A = \u27e8HKH, yy\u1d40\u27e9 / (\u2016HKH\u2016 \u2016yy\u1d40\u2016)",
  },
  halfspaces: {
    title: "Half-spaces",
    text: "Each gate opens on one side of a border in input space.",
    equation: "g(x) = 1[\u27e8u, x\u27e9 + b \u2265 0]",
  },
  units: { title: "All units", text: "One row per layer, one disc per unit, filled where its gate is open." },
  neurons: {
    title: "Neurons",
    text: "Weight directions as points: near points have similar directions. Each step is aligned with the one before.",
    equation: "d(u, v) = 1 \u2212 \u27e8u, v\u27e9 / (\u2016u\u2016 \u2016v\u2016)",
  },
  output: { title: "Target and output", text: "The output of the network and its target." },
  paths: {
    title: "Active paths",
    text: "Paths from input to output with all gates open.",
    equation: "paths(x) = \u220f\u2097 \u2016g\u2097(x)\u2016\u2081",
  },
  flips: {
    title: "Gate flips per sample",
    text: "For each sample, the share of gates that opened or closed since the start.",
  },
  linear: {
    title: "Linearised network",
    text: "Output of the network linearised at its start, for each sample, at the present parameters.",
  },
  agop_correlation: {
    title: "Weights and gradients",
    text: "Correlation between W\u1d40W of a layer and the average outer product of the gradients by its inputs (AGOP).",
  },
  plane: {
    title: "Output over the plane",
    text: "The network\u2019s output everywhere, with the borders of its half-spaces.",
  },
};

/** Curves that differ from the panel of the same name. */
const CURVES: Record<string, Definition> = {
  alignment: {
    title: "Alignment by group",
    text: "How well the tangent kernel separates each group from the rest: centred alignment.",
  },
  "alignment@": {
    title: "Alignment by layer",
    text: "Centred alignment of each layer\u2019s share of the tangent kernel with the targets.",
  },
};

/** The name of a panel as a heading. */
export const titleOf = (name: string): string => definitionOf(name).title.replace(/^./, (c) => c.toUpperCase());

export const definitionOf = (name: string): Definition =>
  DEFINITIONS[name] ?? { title: name.replace(/_/g, " "), text: "As the run stored it." };

/** Title and text of a curve; path counts of a scope are means of logarithms. */
export function curveOf(name: string, run: RunInfo): Definition {
  if (keepsLogs(run, name))
    return { title: `${titleOf(name)}, log`, text: "Mean over the samples of ln(1 + active paths)." };
  if (CURVES[name]) return CURVES[name];
  if (name.endsWith("@")) return { title: `${titleOf(name.slice(0, -1))} by layer`, text: "" };
  return { ...definitionOf(name), title: titleOf(name), text: DEFINITIONS[name]?.text ?? "" };
}
