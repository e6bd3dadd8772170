import assert from "node:assert/strict";
import { test } from "node:test";
import { ALONE, numberingOf, ownNumbers, pageNumbers, SHARED } from "../src/lib/marks.ts";

test("the same samples in the same order have one number", () => {
  const numbering = numberingOf({ same: true, order: null, why: "" });
  assert.deepEqual(numbering, SHARED);
  assert.deepEqual(ownNumbers(numbering, [3, 1]), [3, 1]);
});

test("in another order a mark is the number of its sample in each run, there and back", () => {
  const order = [2, 0, 3, 1]; // sample 0 of the first run is sample 2 of the second
  const second = numberingOf({ same: true, order, why: "" });
  assert.equal(second.key, "mark");
  assert.deepEqual(ownNumbers(second, [0, 3]), [2, 1]);
  for (const sample of [0, 1, 2, 3]) assert.deepEqual(ownNumbers(second, pageNumbers(second, [sample])), [sample]);
  assert.deepEqual(ownNumbers(second, [9]), []); // a mark that neither run has
  assert.deepEqual(pageNumbers(second, [9]), []);
});

test("other samples have marks of their own; where nobody knows, numbers are taken as they are", () => {
  assert.deepEqual(numberingOf({ same: false, order: null, why: "" }), ALONE);
  assert.notEqual(ALONE.key, SHARED.key);
  assert.deepEqual(numberingOf({ same: null, order: null, why: "" }), SHARED);
});
