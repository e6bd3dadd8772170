import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

const read = (name: string): string => readFileSync(`../src/unlazy/studio/static/studio/${name}`, "utf8");

test("the bundle can be pasted into one page", () => {
  const script = read("studio.js");
  assert.ok(!/<\/script/i.test(script) && !script.includes("<!--"));
  assert.ok(!/^\s*(import|export)\s/m.test(script) && !/\bimport\s*\(/.test(script));
  assert.ok(!/\beval\s*\(/.test(script) && !/new Function\s*\(/.test(script));
  assert.ok(!/<\/style/i.test(read("studio.css")));
});

test("the page asks nobody else for anything", () => {
  for (const name of ["studio.css", "index.html"]) assert.ok(!/https?:\/\/(?!www\.w3\.org)/.test(read(name)), name);
  assert.ok(!/url\((?!["']?data:)/.test(read("studio.css")));
});

test("the marks that the one-file report replaces are there, once each", () => {
  const page = read("index.html");
  for (const mark of [
    "<!--unlazy:policy-->",
    '<link rel="stylesheet" href="./studio.css">',
    '<script defer src="./studio.js"></script>',
  ])
    assert.equal(page.split(mark).length, 2, mark);
});

test("the colour maps beside the page are those inside it", () => {
  assert.equal(read("colormaps.json"), readFileSync("src/colormaps.json", "utf8"));
});
