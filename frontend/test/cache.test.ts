import assert from "node:assert/strict";
import { test } from "node:test";
import { Cache } from "../src/lib/cache.ts";

test("memory stays below its limit and the least used goes first", () => {
  const cache = new Cache(100);
  cache.set("a", 1, 40);
  cache.set("b", 2, 40);
  assert.equal(cache.get("a"), 1); // now b is the oldest
  cache.set("c", 3, 40);
  assert.deepEqual(
    ["a", "b", "c"].map((name) => cache.has(name)),
    [true, false, true],
  );
  assert.equal(cache.bytes, 80);
});

test("one thing larger than the limit is kept alone: it is on the screen", () => {
  const cache = new Cache(100);
  cache.set("a", 1, 50);
  cache.set("huge", 2, 500);
  assert.deepEqual([cache.has("a"), cache.has("huge")], [false, true]);
  cache.set("b", 3, 10);
  assert.equal(cache.bytes, 10);
});

test("setting again does not count twice, forgetting frees", () => {
  const cache = new Cache(100);
  cache.set("/run/a/1", 1, 30);
  cache.set("/run/a/1", 1, 30);
  cache.set("/run/b/1", 1, 30);
  assert.equal(cache.bytes, 60);
  cache.forget("/run/a/");
  assert.deepEqual([cache.bytes, cache.has("/run/b/1")], [30, true]);
});
