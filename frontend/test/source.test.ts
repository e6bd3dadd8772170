import assert from "node:assert/strict";
import { test } from "node:test";
import { Library, paths, readLevels } from "../src/lib/library.ts";
import { fromBase64, InlineSource, type Answer, pairAddress } from "../src/lib/source.ts";
import { ago, short, stepName } from "../src/lib/format.ts";

const base64 = (bytes: Uint8Array): string => Buffer.from(bytes).toString("base64");

test("a report answers the paths the server would be asked for", async () => {
  const floats = new Uint8Array(Float32Array.of(1.5, -2, 3, 4).buffer);
  const source = new InlineSource({
    responses: {
      "/api/run/a/b": { key: "a/b" },
      [paths.array("a/b", "overlap", 4, 0)]: { base64: base64(floats), headers: { "x-shape": "2,2" } },
      [paths.levels("a/b", "overlap", 4, 0, "all")]: {
        base64: base64(Uint8Array.of(1, 2, 3, 4, 5, 6)),
        headers: { "X-Shape": "2,3", "X-Top": "2.5", "X-Signed": "1", "X-Clipped": "0" },
      },
    },
  });
  const library = new Library(source);
  assert.equal((await library.run("a/b")).key, "a/b");
  const block = await library.array(paths.array("a/b", "overlap", 4, 0));
  assert.deepEqual(
    [[...block.values], block.shape],
    [
      [1.5, -2, 3, 4],
      [2, 2],
    ],
  );
  const levels = await library.levels(paths.levels("a/b", "overlap", 4, 0, "all"));
  assert.deepEqual([levels.rows, levels.columns, levels.top, levels.signed, levels.clipped], [2, 3, 2.5, true, false]);
  await assert.rejects(library.array(paths.array("a/b", "overlap", 5, 0)), /not in this page/);
});

test("two panels that want the same bytes make one request", async () => {
  let asked = 0;
  const source = new InlineSource({ responses: {} });
  source.bytes = async (): Promise<Answer> => {
    asked++;
    return { bytes: new Float32Array(4).buffer, header: () => null };
  };
  const library = new Library(source);
  await Promise.all([library.array("/x"), library.array("/x"), library.array("/y")]);
  await library.array("/x");
  assert.equal(asked, 2);
});

test("never more than six requests at a time, and a failure frees its place", async () => {
  let [now, most] = [0, 0];
  const source = new InlineSource({ responses: {} });
  source.bytes = async (path): Promise<Answer> => {
    most = Math.max(most, ++now);
    await new Promise((go) => setTimeout(go, 1));
    now--;
    if (path.endsWith("3")) throw new Error("gone");
    return { bytes: new ArrayBuffer(4), header: () => null };
  };
  const library = new Library(source);
  const all = await Promise.allSettled(Array.from({ length: 40 }, (_, i) => library.array(`/${i}`)));
  assert.equal(most, 6);
  assert.equal(all.filter((one) => one.status === "rejected").length, 4);
});

test("levels without headers are a square", () => {
  const levels = readLevels({ bytes: new ArrayBuffer(9), header: () => null });
  assert.deepEqual([levels.rows, levels.columns, levels.stride, levels.unit], [3, 3, 1, 1]);
});

test("base64 comes back byte for byte", () => {
  const bytes = Uint8Array.from({ length: 256 }, (_, i) => i);
  assert.deepEqual(new Uint8Array(fromBase64(base64(bytes))), bytes);
});

test("numbers as people read them", () => {
  assert.deepEqual(
    [0.1234, -2, 12345.6, null, NaN, 1e-7, Infinity].map((v) => short(v)),
    ["0.123", "−2", "12,346", "–", "–", "1.0e−7", "∞"],
  );
  assert.deepEqual([0, 9999, 12400, 2.5e6].map(stepName), ["0", "9999", "12.4k", "2.5M"]);
  assert.equal(ago("2026-01-01T00:00:00Z", Date.parse("2026-01-01T02:10:00Z")), "2 h ago");
});

test("keys are quoted as the addresses of a report are", () => {
  // tests/studio/test_studio_report.py holds address() of unlazy.studio.answers to the same
  assert.equal(paths.run("deep/my run (1)"), "/api/run/deep/my%20run%20(1)");
  assert.equal(paths.run("50% of what?#1"), "/api/run/50%25%20of%20what%3F%231");
  assert.equal(paths.sampleMatch("a b/c", "d e/f'&"), "/api/sample-match/a%20b/c?other=d%20e%2Ff'%26");
  assert.equal(paths.array("ä~!*", "tangent", 4, 0), "/api/array/%C3%A4~!*/tangent/4?member=0");
});

test("a pair of runs of a site finds the answer of the pair that stands for it", () => {
  const samples: Record<string, [string, string]> = { "a/b": ["a/b", "c"], c: ["a/b", "c"], "d e": ["d e", "d e"] };
  assert.equal(pairAddress("/api/sample-match/c?other=a%2Fb", samples), "/api/sample-match/a/b?other=c");
  assert.equal(
    pairAddress("/api/kernel-samples/c/overlap?other=d%20e", samples),
    "/api/kernel-samples/a/b/overlap?other=d%20e",
  );
  assert.equal(pairAddress("/api/array/c/x/0?member=0", samples), "/api/array/c/x/0?member=0");
  assert.equal(pairAddress("/api/sample-match/new?other=c", samples), "/api/sample-match/new?other=c");
});
