import assert from "node:assert/strict";
import { test } from "node:test";
import { format, nowhere, parse, withQuery, type Place } from "../src/lib/address.ts";

const places: Partial<Place>[] = [
  {},
  { page: "claims", query: { paper: "half-space", open: "C1,C2" } },
  { page: "play", query: { width: "16", data: "xor" } },
  { page: "run", key: "circle/author-pwc-1946", query: { step: "48", mark: "17,203" } },
  { page: "run", key: "odd name/100% & more?" },
  { page: "compare", key: "a/b", other: "c/d/e", query: { step: "3" } },
  { page: "halfspace", key: "a/b", layer: 4, unit: 11 },
  { page: "neuron", key: "a", unit: 9999 },
];

test("every place comes back from its address", () => {
  for (const place of places) {
    const whole: Place = { ...nowhere(), ...place };
    assert.deepEqual(parse(format(whole)), whole);
  }
});

test("plain slashes in a key are understood", () => {
  assert.equal(parse("#/run/circle/author-pwc-1946?step=3").key, "circle/author-pwc-1946");
  assert.equal(parse("#/run/a/b/halfspace/2/7").unit, 7);
  const pair = parse("#/compare/a/b/c/d");
  assert.deepEqual([pair.key, pair.other], ["a/b", "c/d"]);
});

test("nonsense leads to the list of runs, not to an error", () => {
  for (const hash of ["", "#", "#/", "#/nowhere/at/all", "#/run", "#/compare/one", "#%E0%A4%A"])
    assert.equal(parse(hash).page, "runs");
  assert.equal(parse("#/run/a/neuron/-3").unit, 0);
});

test("an emptied name leaves the address", () => {
  const place = withQuery({ ...nowhere(), query: { step: "3", mark: "5" } }, { mark: null, step: 4, layer: undefined });
  assert.deepEqual(place.query, { step: "4" });
});
