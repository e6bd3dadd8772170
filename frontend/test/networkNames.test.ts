import assert from "node:assert/strict";
import { test } from "node:test";
import { meaningOf, plainName } from "../src/lib/networkNames.ts";

const TITLES = [
  "author: DLGN, constant experts, beta 4",
  "author: ReLU net",
  "author: frozen gates, soft, beta 4",
  "pilot: DLGN, constant experts, beta 30",
  "pilot: ReLU net",
  "pilot: frozen gates, soft, beta 30",
];

test("names of the circle study are plain words, each its own, with a meaning", () => {
  const names = TITLES.map(plainName);
  assert.equal(new Set(names).size, TITLES.length);
  for (const name of names) assert.ok(!/author|pilot|expert|DLGN|beta/.test(name), name);
  for (const title of TITLES) assert.ok(meaningOf(title).length > 40, title);
});

test("other names stay", () => {
  assert.equal(plainName("my run"), "my run");
  assert.equal(meaningOf("my ReLU run"), "");
});
