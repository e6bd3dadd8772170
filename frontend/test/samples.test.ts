import assert from "node:assert/strict";
import { test } from "node:test";
import { curveOf } from "../src/lib/definitions.ts";
import { general, momentWords, percent, settingsText, short, tickNames } from "../src/lib/format.ts";
import { samplesOf } from "../src/lib/order.ts";
import { leftOutSpaces, momentsOf, noHalfSpaces } from "../src/lib/roles.ts";
import { columnsOf, countsOf, keepsLogs, margins, MOST_COLUMNS, ranksOf } from "../src/lib/samples.ts";
import { groupsInShort, groupWords, leftLazy, whenText, withSteps } from "../src/lib/verdict.ts";
import type { Probe, RunInfo, Verdict } from "../src/lib/types.ts";
import { pickAgainst, pickStrip, stripNames } from "../src/panels/curves.ts";
import { hue, HUES_DARK, HUES_LIGHT, niceTicks } from "../src/panels/draw.ts";

const block = (rows: number[][]) => ({ values: Float32Array.from(rows.flat()), shape: [rows.length, rows[0].length] });

test("the share of positive margins is the accuracy, whichever classes there are", () => {
  const labels = Array.from({ length: 60 }, (_, i) => [3, 5, 8][i % 3]);
  const rows = labels.map((label, i) =>
    Array.from({ length: 10 }, (_, k) => Math.sin(1 + 7 * i + 3 * k) + (k === label ? 1 : 0)),
  );
  const right = rows.filter((row, i) => row.indexOf(Math.max(...row)) === labels[i]).length;
  const ahead = margins(block(rows), labels)!;
  assert.ok(right > 10 && right < 60);
  assert.equal(ahead.filter((value) => value > 0).length, right);
});

test("no classes, no margin", () => {
  const rows = [
    [1, 2],
    [3, 4],
  ];
  assert.equal(margins(block(rows), null), null);
  assert.equal(margins(block(rows), [0]), null); // of other samples
  assert.equal(margins(block(rows), [0, 2]), null); // there is no output 2
  assert.equal(margins(block([[1], [2]]), [0, 1]), null);
});

test("columns are groups, else classes, and never a part of the samples only", () => {
  const probe = (labels: number[]): Probe => ({ kind: "vectors", labels });
  assert.deepEqual(columnsOf(probe([8, 3, 8]), 3), [
    { name: "3", samples: [1] },
    { name: "8", samples: [0, 2] },
  ]);
  const many = Array.from({ length: MOST_COLUMNS + 1 }, (_, i) => i);
  assert.deepEqual(columnsOf(probe(many), many.length), [{ name: "all", samples: many }]);
  assert.equal(columnsOf(probe(many.slice(1)), MOST_COLUMNS).flatMap((c) => c.samples).length, MOST_COLUMNS);
  assert.equal(ranksOf([8, 3, 8]).get(8), 1);
});

test("rows of a kernel are the samples that it saw", () => {
  const probe: Probe = { kind: "vectors", n: 9, picked: [0, 3, 6], rows: { tangent: [1, 2, 5, 7, 8] } };
  assert.deepEqual(samplesOf(5, probe, "tangent"), [1, 2, 5, 7, 8]);
  assert.deepEqual(samplesOf(3, probe, "tangent", 2), [1, 5, 8]); // in blocks of two
  assert.deepEqual(samplesOf(3, probe, "overlap"), [0, 3, 6]);
  assert.deepEqual(samplesOf(9, probe, "overlap").length, 9);
});

test("only all is 100 %, only nothing is 0 %", () => {
  assert.deepEqual([0.995, 1, 0, 0.9, 0.004, 0.99996].map(percent), [
    "99.5 %",
    "100 %",
    "0 %",
    "90 %",
    "0.4 %",
    "99.996 %",
  ]);
  for (let i = 1; i < 3000; i++) {
    const part = i / 3000;
    assert.ok(!["100 %", "0 %"].includes(percent(part)), `${part}`);
    assert.ok(Math.abs(parseFloat(percent(part)) - 100 * part) <= 0.5);
  }
  assert.equal(percent(1 - 1e-9), "> 99.999 %");
  assert.equal(percent(1e-9), "< 0.001 %");
});

const judged = (label: string, more: Partial<Verdict> = {}): Verdict => ({ label, when: { network: 15 }, ...more });

test("the page says of a verdict what its file says", () => {
  const when = "The estimate passed the lazy border between step 3 and step 15.";
  assert.equal(whenText(judged("cannot tell", { words: { when } })), when);
  assert.equal(whenText(judged("rich", { words: { when: "" } })), "");
  assert.deepEqual(
    withSteps(when).map(({ step }) => step),
    [null, 3, null, 15, null],
  );
  assert.equal(
    withSteps(when)
      .map(({ text }) => text)
      .join(""),
    when,
  );
});

test("of an older verdict only what is sure is said, and the timeline follows", () => {
  assert.equal(whenText(judged("cannot tell")), "");
  assert.equal(whenText(judged("lazy")), "");
  assert.equal(whenText(judged("mixed")), "It left the lazy regime by step 15.");
  assert.equal(leftLazy(judged("cannot tell")), null);
  const run = (verdict: Verdict) => ({ scalars: {}, probe: { kind: "vectors" }, verdict }) as unknown as RunInfo;
  assert.deepEqual(momentsOf(run(judged("cannot tell")), 0), []);
  assert.deepEqual(
    momentsOf(run(judged("rich")), 0).map(({ words }) => words),
    ["no longer lazy"],
  );
});

test("groups shrink, grow and stay behind in the verdict's words", () => {
  assert.equal(groupWords({ verdict: "starved" }), "shrank");
  assert.equal(groupWords({ verdict: "gains", behind: true }), "grew, left behind");
  assert.equal(groupWords({ verdict: "keeps", behind: true }), "left behind");
  assert.equal(groupsInShort([{ verdict: "keeps", behind: true }, { verdict: "starved" }]), "1 shrank, 1 left behind");
});

test("two runs share columns, and the pointer finds samples of the first", () => {
  const view = {
    values: [1, 2],
    bands: [{ name: "a", samples: [0, 1] }],
    second: { values: [3], bands: [{ name: "b", samples: [0] }], marks: [] },
    low: 0,
    high: 4,
    marks: [],
  };
  assert.deepEqual(stripNames(view), ["a", "b"]);
  const found = new Set<number | null>();
  for (let x = 44; x < 300; x += 2) for (let y = 0; y < 200; y += 2) found.add(pickStrip(x, y, 300, 200, view));
  assert.deepEqual([...found].sort(), [0, 1, null]);
});

test("a dot of output over target stands for its sample", () => {
  const view = { targets: [0, 0, 1, 1], values: [0, 1, 0, 1], outputs: 2, low: 0, high: 1, marks: [] };
  assert.equal(pickAgainst(51, 10, 300, 200, view), 0);
  assert.equal(pickAgainst(285, 176, 300, 200, view), 1);
  assert.equal(pickAgainst(150, 100, 300, 200, view), null);
});

/** Oklab of a colour as seen by normal, red-blind and green-blind eyes (matrices of Machado, Oliveira and Fernandes). */
const EYES = [
  [1, 0, 0, 0, 1, 0, 0, 0, 1],
  [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
  [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.01182, 0.04294, 0.968881],
];
const times = (m: number[], v: number[]): number[] =>
  [0, 3, 6].map((at) => m[at] * v[0] + m[at + 1] * v[1] + m[at + 2] * v[2]);
function seen(colour: string, eye: number[]): number[] {
  const light = [1, 3, 5].map((at) => {
    const part = parseInt(colour.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const cones = times(
    [
      0.4122214708, 0.5363325363, 0.0514459929, 0.2119034982, 0.6806995451, 0.1073969566, 0.0883024619, 0.2817188376,
    ].concat(0.6299787005),
    times(eye, light).map((part) => Math.min(1, Math.max(0, part))),
  ).map(Math.cbrt);
  return times(
    [
      0.2104542553, 0.793617785, -0.0040720468, 1.9779984951, -2.428592205, 0.4505937099, 0.0259040371, 0.7827717662,
    ].concat(-0.808675766),
    cones,
  );
}

test("ten classes have ten colours, for colour-blind readers too", () => {
  for (const [hues, ink] of [
    [HUES_LIGHT, "#1d2329"],
    [HUES_DARK, "#e6e8ea"],
  ] as const) {
    assert.equal(new Set(hues).size, 10);
    const all = [...hues, ink]; // the curve of all samples stands among those of the classes
    for (const eye of EYES)
      for (const [i, a] of all.entries())
        for (const b of all.slice(i + 1)) {
          const apart = Math.hypot(...seen(a, eye).map((part, k) => part - seen(b, eye)[k]));
          assert.ok(apart > (eye === EYES[0] ? 0.16 : 0.09), `${a} and ${b}: ${apart}`);
        }
  }
  for (const dark of [false, true])
    assert.equal(new Set(Array.from({ length: 30 }, (_, i) => hue(i, { dark }))).size, 30);
});

test("ticks of an axis can be told apart", () => {
  const names = (low: number, high: number) => niceTicks(low, high).map(tickNames([low, high, null]));
  for (const [low, high] of [
    [2.297, 2.305],
    [0, 2.5],
    [1e-6, 3e-6],
    [-0.02, 0.3],
    [99.9, 100.2],
  ]) {
    const found = names(low, high);
    assert.equal(new Set(found).size, found.length, found.join(" "));
  }
  assert.deepEqual(names(0, 2), ["0", "0.5", "1", "1.5", "2"]);
  assert.equal(tickNames([1, 1])(1), "1");
  assert.equal(short(0.00123456), "0.00123");
});

test("claims have the numbers of the command line", () => {
  const told = [1.65e-16, 0, 1234, 0.0347, 12.345, -3.2e-7, 999.9].map(general);
  assert.deepEqual(told, ["1.65e\u221216", "0", "1.23e+03", "0.0347", "12.3", "\u22123.2e\u221207", "1e+03"]);
});

test("settings show a list of numbers on one line", () => {
  const long = Array.from({ length: 30 }, (_, i) => i);
  const text = settingsText({ groups: { a: [1, 2.5, -3], b: long }, names: ["x", "y"] });
  assert.ok(text.includes('"a": [1, 2.5, -3]'));
  assert.ok(text.includes("22, 23, \u2026 30 numbers]"));
  assert.equal(text.split("\n").length, 10);
});

test("a run says why it shows no half-spaces", () => {
  assert.match(noHalfSpaces({ model: { gating: "own" } }), /ReLU/);
  assert.match(noHalfSpaces({ model: { gating: "linear" } }), /did not store/);
  for (const model of [null, undefined, {}]) assert.doesNotMatch(noHalfSpaces({ model }), /ReLU/);
  assert.doesNotMatch(noHalfSpaces(undefined), /ReLU/);
  const scoped = (left_out: Record<string, string>) => ({ model: null, recipe: { scope: { left_out } } });
  assert.equal(leftOutSpaces(scoped({ half_spaces: "tanh" })), "no half-spaces: tanh");
  assert.equal(noHalfSpaces(scoped({ neurons: "it reads tokens" })), "no half-spaces: it reads tokens");
  for (const header of [undefined, scoped({}), scoped({ paths: "gelu" }), { recipe: null }])
    assert.equal(leftOutSpaces(header), null);
});

test("a scope's path counts are logarithms, and the page says so or turns them into counts", () => {
  const run = (kind: string) => ({ header: { kind } }) as unknown as RunInfo;
  const logs = { values: Float32Array.of(0, Math.log(2), Math.log(101)), shape: [3] };
  assert.deepEqual(Array.from(countsOf(logs, run("scope")), Math.round), [0, 1, 100]);
  assert.equal(countsOf(logs, run("train")), logs.values);
  assert.ok(Number.isFinite(countsOf({ values: Float32Array.of(1e4), shape: [1] }, run("scope"))[0]));
  assert.ok(keepsLogs(run("scope"), "paths_top") && !keepsLogs(run("scope"), "loss"));
  assert.equal(curveOf("paths", run("scope")).title, "Active paths, log");
  assert.match(curveOf("paths", run("scope")).text, /ln\(1 \+ active paths\)/);
  assert.equal(curveOf("paths", run("train")).title, "Active paths");
  assert.equal(curveOf("alignment@", run("scope")).title, "Alignment by layer");
  assert.equal(curveOf("rank@", run("scope")).title, "Rank by layer");
  assert.equal(curveOf("gate_flips", run("scope")).title, "Gate flips");
});

test("a step is named in epochs where their length is known", () => {
  assert.equal(momentWords(42, 16), "epoch 2.63");
  assert.equal(momentWords(448, 16), "epoch 28");
  assert.equal(momentWords(34, null), "step 34");
});
