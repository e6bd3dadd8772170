import assert from "node:assert/strict";
import { test } from "node:test";
import { indexAt, indexBefore, outward, pause, position, spreadLabels, ticks } from "../src/lib/timeline.ts";

const steps = [0, 1, 2, 4, 8, 16, 100, 1000];

test("the timeline goes from 0 to 1 and never back", () => {
  for (const axis of ["log", "linear"] as const) {
    const places = steps.map((step) => position(step, steps, axis));
    assert.equal(places[0], 0);
    assert.equal(places.at(-1), 1);
    for (let i = 1; i < places.length; i++) assert.ok(places[i] > places[i - 1]);
  }
  assert.ok(Math.abs(position(1000, [0, 1000 ** 2 - 1], "log") - Math.log(1001) / Math.log(1000 ** 2)) < 1e-12);
});

test("every stored step can be reached by dragging", () => {
  for (const axis of ["log", "linear"] as const)
    for (const [i, step] of steps.entries()) assert.equal(indexAt(position(step, steps, axis), steps, axis), i);
});

test("between two stored steps the earlier one is shown", () => {
  assert.deepEqual(
    [-5, 0, 3, 4, 99, 5000].map((step) => indexBefore(step, steps)),
    [0, 0, 2, 3, 5, 7],
  );
  assert.equal(indexBefore(3, []), -1);
});

test("loading begins here and goes outward, everything once", () => {
  assert.deepEqual(outward(2, 5), [2, 3, 1, 4, 0]);
  assert.deepEqual(
    [...outward(0, 57)].sort((a, b) => a - b),
    Array.from({ length: 57 }, (_, i) => i),
  );
});

test("labels keep their distance, first and last stay", () => {
  for (const axis of ["log", "linear"] as const) {
    const labels = ticks(steps, axis, 0.1, 16);
    assert.equal(labels[0], 0);
    assert.equal(labels.at(-1), 1000);
    for (let i = 1; i < labels.length; i++)
      assert.ok(position(labels[i], steps, axis) - position(labels[i - 1], steps, axis) >= 0.1 - 1e-12);
    assert.ok(labels.slice(1, -1).every((label) => label % 16 === 0));
  }
  assert.deepEqual(ticks([5], "log"), [5]);
});

test("playing takes about its ten seconds on an even timeline", () => {
  const even = Array.from({ length: 101 }, (_, i) => i);
  const whole = even.slice(0, -1).reduce((sum, _, i) => sum + pause(i, even, "linear"), 0);
  assert.ok(Math.abs(whole - 10000) < 1);
});

test("labels make room for each other and stay on the timeline", () => {
  assert.deepEqual(spreadLabels([50, 60, 100], [10, 10, 10], 100), [30, 60, 90]);
  assert.deepEqual(spreadLabels([0, 200], [20, 20], 400), [20, 200]);
});
