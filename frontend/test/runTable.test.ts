import assert from "node:assert/strict";
import { test } from "node:test";
import { cellOf, configColumns, countWords, groupRuns, meanOf, parseFilter, sortRuns } from "../src/lib/runTable.ts";
import type { RunCard } from "../src/lib/types.ts";

const run = (key: string, more: Partial<RunCard> = {}): RunCard => ({
  key,
  id: `id-${key}`,
  kind: "scope",
  study: null,
  scale: null,
  state: "finished",
  step: 10,
  error: null,
  started: null,
  members: 1,
  model: "Sequential",
  data: "probe",
  last: { loss: 1 },
  verdict: null,
  ...more,
});
const RUNS = [
  run("a", {
    config: { lr: 0.1, width: 64 },
    verdict: "rich",
    tags: ["baseline", "paper one"],
    last: { loss: 0.2 },
    gap: 0.8,
  }),
  run("b", { config: { lr: 0.001, width: 64 }, verdict: "lazy", last: { loss: 0.4 }, gap: 0.1, state: "interrupted" }),
  run("c", { config: { lr: 0.01, width: 128, sched: "cosine", amp: true }, verdict: "rich", last: { loss: null } }),
  run("old-run"), // of a server without configuration
  run("e", { broke_down: true, verdict: "cannot tell", notes: "exploded again" }),
];
const kept = (text: string): string =>
  RUNS.filter(parseFilter(text, RUNS).keeps)
    .map((card) => card.key)
    .join(" ");

test("numbers are compared by size, also in scientific notation", () => {
  assert.equal(kept("lr>1e-3"), "a c");
  assert.equal(kept("lr>=1e-3 lr<=0.01"), "b c");
  assert.equal(kept("loss<0.3"), "a");
  assert.equal(kept("lr=.001"), "b");
  assert.equal(kept("lr>abc"), "");
});

test("words are found in their column, and combine", () => {
  assert.equal(kept("verdict:rich"), "a c");
  assert.equal(kept("lr>1e-3 verdict:rich width=64"), "a");
  assert.equal(kept("tag:baseline"), "a");
  assert.equal(kept('tags:"paper one"'), "a");
  assert.equal(kept("state:interrupted"), "b");
  assert.equal(kept("state!=finished"), "b");
  assert.equal(kept("sched:cos"), "c");
  assert.equal(kept("amp:true"), "c");
  assert.equal(kept('verdict:"broke down"'), "e");
});

test("plain words match as before, a minus turns a part round", () => {
  assert.equal(kept(""), "a b c old-run e");
  assert.equal(kept("old"), "old-run");
  assert.equal(kept("old-run"), "old-run");
  assert.equal(kept("SEQUENTIAL lazy"), "b");
  assert.equal(kept("exploded"), "e");
  assert.equal(kept("-verdict:rich -old"), "b e");
  assert.equal(kept("width=64 -rich"), "b");
});

test("an unfinished part keeps every run, an unknown column is named", () => {
  assert.equal(kept("lr>"), "a b c old-run e");
  assert.deepEqual(parseFilter("momentum>0.9 lr>0", RUNS).unknown, ["momentum"]);
  assert.equal(kept("momentum>0.9"), "");
  assert.deepEqual(parseFilter("loss<1 gap>0", RUNS).unknown, []);
});

test("what is missing comes last in both directions", () => {
  assert.deepEqual(
    sortRuns(RUNS, "lr").map((card) => card.key),
    ["b", "c", "a", "e", "old-run"],
  );
  assert.deepEqual(
    sortRuns(RUNS, "-lr").map((card) => card.key),
    ["a", "c", "b", "e", "old-run"],
  );
  assert.deepEqual(
    sortRuns(RUNS, "-loss").map((card) => card.key),
    ["e", "old-run", "b", "a", "c"],
  );
});

test("settings that vary are the first columns", () => {
  assert.deepEqual(
    configColumns(RUNS).map(({ name, varies }) => `${name} ${varies}`),
    ["lr true", "width true", "amp false", "sched false"],
  );
  assert.deepEqual(configColumns([run("x")]), []);
});

test("groups hold every run once, in the order of their value", () => {
  const groups = groupRuns(RUNS, "width");
  assert.deepEqual(
    groups.map(({ value, runs }) => [value, runs.length]),
    [
      [64, 2],
      [128, 1],
      [null, 2],
    ],
  );
  assert.equal(groups.flatMap(({ runs }) => runs).length, RUNS.length);
  const losses = meanOf(groups[0].runs, "loss")!;
  assert.ok(Math.abs(losses.mean - 0.3) < 1e-12);
  assert.deepEqual([losses.low, losses.high], [0.2, 0.4]);
  assert.equal(meanOf(groups[1].runs, "loss"), null);
  assert.deepEqual(countWords(RUNS), [
    ["rich", 2],
    ["lazy", 1],
    ["broke down", 1],
  ]);
});

test("a setting goes before a column of the same name", () => {
  assert.equal(cellOf(run("x", { config: { scale: 2 }, scale: "desk" }), "scale"), 2);
});
