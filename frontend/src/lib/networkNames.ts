// Names of networks in the circle study, for readers who know none of its words.

const NAMES: [RegExp, string][] = [
  [/^author: /, ""],
  [/^pilot: (.*)$/, "$1, second setting"],
  [/DLGN, constant experts/, "Gated network"],
  [/frozen gates, (soft|hard)/, "Gates never trained"],
  [/ReLU net/, "ReLU network"],
  [/, beta [\d.e+-]+/, ""],
];

const MEANINGS: [RegExp, string][] = [
  [/ReLU/, "The usual network: whether a unit is on depends on the layers before it."],
  [
    /frozen/,
    "The same network as the gated one, but its gates stay as they were drawn at random; only what the paths add up is trained.",
  ],
  [
    /DLGN, constant experts/,
    "Every unit has a gate that is open on one side of a line through the inputs. What a path adds to the output is one trained number: a constant.",
  ],
];

/** A plain name: "author: DLGN, constant experts, beta 4" is "Gated network"; names of other studies stay. */
export const plainName = (title: string): string =>
  NAMES.reduce((text, [part, words]) => text.replace(part, words), title);

/** What such a network is, in a sentence or two; "" for a name that is not of the circle study. */
export function meaningOf(title: string): string {
  const found = MEANINGS.find(([part]) => part.test(title));
  if (!found || !/^(author|pilot): /.test(title)) return "";
  const whose = title.startsWith("author")
    ? "Trained with the settings of the paper’s authors."
    : "Trained with settings of our own, as a check (smaller learning rate, no biases).";
  return `${found[1]} ${whose}`;
}
