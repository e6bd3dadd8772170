import assert from "node:assert/strict";
import { test } from "node:test";
import { decades, axisLimits, meanBand, smoothed, zoomOf, zoomText } from "../src/lib/axis.ts";

test("limits hold every value of a curve that falls", () => {
  const falling = [2.3, 1, 0.1, 0.001, 0.0001, 0.00005, 0.00001];
  assert.deepEqual(axisLimits([falling]), { low: 0.00001, high: 2.3, beyond: null });
});

test("a divergence does not stretch the axis and is named", () => {
  const found = axisLimits([[0, 0.1, 0.2, 0.15, 3e17, null, NaN]]);
  assert.deepEqual(found, { low: 0, high: 0.2, beyond: 3e17 });
  assert.equal(axisLimits([[1, 2, -5e9, 4]])!.beyond, -5e9);
  assert.deepEqual(axisLimits([[0.1, 3e17]], true), { low: 0.1, high: 3e17, beyond: null });
});

test("curves of different sizes share an axis that shows both", () => {
  const limits = axisLimits([
    [1e-6, 2e-6],
    [50, 60],
  ]);
  assert.deepEqual(limits, { low: 1e-6, high: 60, beyond: null });
});

test("no numbers, no axis; a logarithmic one takes positive numbers", () => {
  assert.equal(axisLimits([[null, NaN]]), null);
  assert.equal(axisLimits([[0, -1]], true), null);
  assert.deepEqual(axisLimits([[0, 0, 0]]), { low: 0, high: 0, beyond: null });
});

test("smoothing keeps constants, keeps gaps, and stays between the extremes", () => {
  assert.deepEqual(smoothed([3, 3, null, 3], 0.5), [3, 3, null, 3]);
  assert.deepEqual(smoothed([1, 5, 2], 0), [1, 5, 2]);
  const found = smoothed([0, 10, 0, 10], 0.5) as number[];
  assert.equal(found[0], 0);
  assert.ok(found.slice(1).every((value) => value > 0 && value < 10));
});

test("a zoom is read back from its address", () => {
  const steps = [0, 1, 2, 4, 8, 16, 32, 64];
  for (const axis of ["log", "linear"] as const) {
    const text = zoomText(0.95, 0.2, steps, axis)!;
    const [from, to] = zoomOf(text, steps, axis);
    assert.ok(from >= 0.2 && to <= 0.95 && to > from);
    assert.equal(zoomText(from, to, steps, axis), text);
  }
  assert.equal(zoomText(0.5, 0.501, steps, "linear"), null);
  assert.deepEqual(zoomOf("nonsense", steps, "log"), [0, 1]);
  assert.deepEqual(zoomOf(undefined, steps, "log"), [0, 1]);
});

test("mean and band are those of the curves at the same step, in between by straight lines", () => {
  const band = meanBand([
    { steps: [0, 10, 20], values: [1, 3, 5] },
    { steps: [0, 20], values: [3, 7] },
  ]);
  assert.deepEqual(band.steps, [0, 10, 20]);
  assert.deepEqual(band.middle, [2, 4, 6]);
  assert.deepEqual(band.low, [1, 3, 5]);
  assert.deepEqual(band.high, [3, 5, 7]);
});

test("a curve that ended counts no longer; one that is not a number neither", () => {
  const band = meanBand([
    { steps: [0, 10], values: [1, null] },
    { steps: [0, 10, 20], values: [3, 4, 5] },
  ]);
  assert.deepEqual(band.middle, [2, 4, 5]);
});

test("a logarithmic axis has few round ticks inside the data", () => {
  assert.deepEqual(decades(0.003, 3), [0.01, 0.1, 1]);
  assert.deepEqual(decades(0.07, 2.3), [0.1, 0.2, 0.5, 1, 2]);
  assert.ok(decades(1e-12, 1).length <= 6);
});
