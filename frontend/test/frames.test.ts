import assert from "node:assert/strict";
import { test } from "node:test";
import { inBatches, Library, splitFrames } from "../src/lib/library.ts";
import type { Source } from "../src/lib/source.ts";
import type { Block } from "../src/lib/types.ts";

/** Packed as the server packs: heads and bodies in multiples of four bytes. */
function packed(heads: object[], bodies: Uint8Array[]): ArrayBuffer {
  const text = new TextEncoder().encode(JSON.stringify(heads));
  const up = (size: number): number => Math.ceil(size / 4) * 4;
  const whole = new Uint8Array(4 + up(text.length) + bodies.reduce((sum, body) => sum + up(body.length), 0)).fill(32);
  new DataView(whole.buffer).setUint32(0, up(text.length), true);
  whole.set(text, 4);
  let at = 4 + up(text.length);
  for (const body of bodies) {
    whole.set(body, at);
    at += up(body.length);
  }
  return whole.buffer;
}
const heads = [
  { step: 0, bytes: 5, headers: { "X-Shape": "5" } },
  { step: 3, error: "it is truncated" },
  { step: 4, bytes: 8, headers: { "X-Shape": "2" } },
];
const second = new Uint8Array(Float32Array.of(1.5, -2).buffer);

test("a batch is taken apart into single answers", () => {
  const found = splitFrames(packed(heads, [Uint8Array.of(1, 2, 3, 4, 5), second]));
  assert.deepEqual(
    found.map(({ step, error }) => [step, error]),
    [
      [0, undefined],
      [3, "it is truncated"],
      [4, undefined],
    ],
  );
  assert.deepEqual([...new Uint8Array(found[0].answer!.bytes)], [1, 2, 3, 4, 5]);
  assert.equal(found[2].answer!.header("X-Shape"), "2");
  assert.equal(found[1].answer, undefined);
});

test("frames of a batch are kept under their own addresses", async () => {
  const answer = { bytes: packed(heads.slice(1), [second]), header: () => null };
  const library = new Library({ bytes: async () => answer } as unknown as Source);
  const told = await library.frames("batch", (step) => `one ${step}`, false);
  assert.deepEqual(told, [
    { step: 3, error: "it is truncated" },
    { step: 4, error: undefined },
  ]);
  assert.deepEqual([...library.peek<Block>("one 4")!.values], [1.5, -2]);
  assert.equal(library.has("one 3"), false);
});

test("batches grow, keep the order and stay below their limit", () => {
  const steps = Array.from({ length: 131 }, (_, i) => i * 10);
  const small = inBatches(steps, 100);
  assert.deepEqual(small.flat(), steps);
  assert.deepEqual(
    small.map((batch) => batch.length),
    [4, 8, 16, 32, 60, 11],
  );
  assert.ok(inBatches(steps, 250000).every((batch) => batch.length * 250000 <= 2 * 2 ** 20));
  assert.ok(inBatches(steps, Infinity).every((batch) => batch.length === 1));
  assert.deepEqual(inBatches([], 1), []);
});
