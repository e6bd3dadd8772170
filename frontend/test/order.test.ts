import assert from "node:assert/strict";
import { test } from "node:test";
import { groupsSayMore, ordering, rowOf, samplesOf, type Band } from "../src/lib/order.ts";
import { families, momentsOf, stepsOf, valueAt } from "../src/lib/roles.ts";
import type { Probe, RunInfo } from "../src/lib/types.ts";

const probe: Probe = { kind: "vectors", n: 6, labels: [1, 0, 10, 0, 2, 1], groups: { hard: [4, 0], easy: [1, 2] } };

const brief = ({ name, from, to, rank }: Band) => `${name} ${from}-${to} ${rank}`;

test("by class: classes in natural order, stored order within a class", () => {
  const { order, bands } = ordering("class", [0, 1, 2, 3, 4, 5], probe);
  assert.deepEqual([...order], [1, 3, 0, 5, 4, 2]);
  assert.deepEqual(bands.map(brief), ["0 0-2 0", "1 2-4 1", "2 4-5 2", "10 5-6 3"]);
});

test("by group: groups as the run names them, the rest last and unnamed", () => {
  const { order, bands } = ordering("group", [0, 1, 2, 3, 4, 5], probe);
  assert.deepEqual([...order], [0, 4, 1, 2, 3, 5]);
  assert.deepEqual(bands.map(brief), ["hard 0-2 0", "easy 2-4 1"]);
});

test("groups that are the classes under other names are not offered twice", () => {
  const probe = (groups: Record<string, number[]>): Probe => ({ kind: "unknown", labels: [0, 1, 0, 1], groups });
  assert.equal(groupsSayMore(probe({ "class 0": [0, 2], "class 1": [1, 3] })), false);
  assert.equal(groupsSayMore(probe({ early: [0, 1], late: [3, 2] })), true); // each holds both classes
  assert.equal(groupsSayMore(probe({ "class 0": [0, 2] })), true); // a part of the samples
  assert.equal(groupsSayMore(probe({ a: [0], b: [2], c: [1, 3] })), true); // finer than the classes
  assert.equal(groupsSayMore(probe({})), false);
  assert.equal(groupsSayMore({ kind: "unknown", labels: null, groups: { all: [0] } }), true);
});

test("as stored, bands are named only where each group lies together", () => {
  const halves = { ...probe, groups: { top: [0, 1, 2], bottom: [3, 4, 5] } };
  assert.deepEqual(ordering("stored", [0, 2, 4], halves).bands.map(brief), ["top 0-2 0", "bottom 2-3 1"]);
  assert.deepEqual(ordering("stored", [0, 1, 2, 3, 4, 5], probe).bands, []);
  assert.equal(ordering("stored", [0, 1], halves).moved, false);
});

test("an order is always a permutation, and the stored order is the identity", () => {
  for (const kind of ["stored", "class", "group"])
    assert.deepEqual([...ordering(kind, [0, 1, 2, 3, 4, 5], probe).order].sort(), [0, 1, 2, 3, 4, 5]);
  assert.deepEqual([...ordering("stored", [0, 1, 2], probe).order], [0, 1, 2]);
});

test("rows of a smaller kernel stand for spread samples", () => {
  assert.deepEqual(samplesOf(3, probe), [0, 2, 4]);
  assert.deepEqual(samplesOf(2, { ...probe, picked: [1, 5] }), [1, 5]);
  assert.equal(rowOf(5, [0, 2, 4]), 2);
});

test("curves that share a quantity share an axis", () => {
  const series = { steps: [0], values: [[0]] };
  const names = [
    "loss",
    "loss_hard",
    "loss_easy",
    "loss_hard_gates",
    "alignment@a",
    "alignment@b",
    "alignment_hard",
    "alignment_easy",
    "tangent_mass_hard",
    "tangent_rank",
  ];
  const found = families(Object.fromEntries(names.map((name) => [name, series])), ["hard", "easy"]);
  assert.deepEqual(found.find((f) => f.name === "loss")?.members.sort(), ["loss", "loss_easy", "loss_hard"]);
  assert.deepEqual(found.find((f) => f.name === "alignment@")?.members, ["alignment@a", "alignment@b"]);
  assert.deepEqual(found.find((f) => f.name === "alignment")?.members, ["alignment_easy", "alignment_hard"]);
  assert.deepEqual(
    found.map((f) => f.members.length).reduce((a, b) => a + b),
    names.length,
  );
});

test("a scalar is unknown before its first step and constant between steps", () => {
  const series = {
    steps: [4, 8],
    values: [
      [1, 2],
      [3, null],
    ],
  };
  assert.deepEqual(
    [valueAt(series, 3, 0), valueAt(series, 5, 1), valueAt(series, 9, 0), valueAt(series, 9, 1)],
    [null, 2, 3, null],
  );
});

test("a member stored more often has its own steps", () => {
  const info = { steps: [0, 9], shape: [3, 2], dtype: "float32", own: { "2": [0, 3, 9] } };
  assert.deepEqual(
    [stepsOf(info, 0), stepsOf(info, 2)],
    [
      [0, 9],
      [0, 3, 9],
    ],
  );
});

test("a group is learned at a tenth of its first loss, and never by default", () => {
  const series = (values: number[]) => ({ steps: [0, 5, 9], values: values.map((value) => [value]) });
  const scalars = { loss_hard: series([1, 0.5, 0.2]), loss_easy: series([2, 0.2, 0.1]) };
  const run = { probe, scalars, verdict: { label: "rich", when: { network: 4 } } } as unknown as RunInfo;
  assert.deepEqual(momentsOf(run, 0), [
    { step: 4, words: "no longer lazy", group: -1 },
    { step: 5, words: "easy learned", group: 1 },
  ]);
});
