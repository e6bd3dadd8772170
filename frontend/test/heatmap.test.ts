import assert from "node:assert/strict";
import { test } from "node:test";
import {
  colours,
  difference,
  fill,
  halfToEven,
  onOneScale,
  packedTable,
  quantise,
  valueOf,
} from "../src/panels/heatmap.ts";

test("every colour map has 256 opaque colours, and zero is the same dark in both kernel maps", () => {
  for (const map of ["unsigned", "signed", "difference"] as const) {
    assert.equal(colours(map).length, 256);
    assert.ok([...packedTable(map)].every((pixel) => pixel >>> 24 === 255));
  }
  assert.deepEqual(colours("unsigned")[0], colours("signed")[128]);
});

test("the unsigned map grows lighter with its level, so it reads without colour", () => {
  const light = colours("unsigned").map(([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b);
  for (let i = 1; i < 256; i++) assert.ok(light[i] >= light[i - 1] - 0.51, `level ${i}`);
});

test("quantise follows the rule of the server", () => {
  // Python: np.rint(255 * sqrt([0, .25, 1, 4] / 4)) and np.rint(128 + 127 * sign * sqrt(|v| / 4))
  const unsigned = quantise([0, 0.25, 1, 4], 2, 2, false);
  assert.deepEqual([...unsigned.bytes], [0, 64, 128, 255]);
  const signed = quantise([0, -1, 1, -4], 2, 2, true);
  assert.deepEqual([...signed.bytes], [128, 64, 192, 1]);
  assert.equal(signed.top, 4);
});

test("rounding is NumPy's: halves go to the even number", () => {
  assert.deepEqual([0.5, 1.5, 2.5, 127.5, 2.4999, -0.5].map(halfToEven), [0, 2, 2, 128, 2, 0]);
});

test("a clipped value is shown as the top and says so", () => {
  const levels = quantise([0, 9], 1, 2, false, 4);
  assert.equal(levels.bytes[1], 255);
  assert.equal(levels.clipped, true);
});

test("a byte gives its value back within half a level", () => {
  const values = Array.from({ length: 101 }, (_, i) => (i - 50) / 10);
  const levels = quantise(values, 1, 101, true);
  for (const [i, value] of values.entries()) {
    const width = Math.abs(valueOf(levels, levels.bytes[i] + 1) - valueOf(levels, levels.bytes[i] - 1)) / 2;
    assert.ok(Math.abs(valueOf(levels, levels.bytes[i]) - value) <= width, `${value}`);
  }
});

test("an order moves rows and columns together", () => {
  const levels = { ...quantise([0, 1, 2, 3], 2, 2, false), bytes: Uint8Array.of(10, 20, 30, 40) };
  const [plain, turned] = [new Uint32Array(4), new Uint32Array(4)];
  fill(plain, levels, null);
  fill(turned, levels, Int32Array.of(1, 0));
  const table = packedTable("unsigned");
  assert.deepEqual(
    [...plain],
    [10, 20, 30, 40].map((byte) => table[byte]),
  );
  assert.deepEqual(
    [...turned],
    [40, 30, 20, 10].map((byte) => table[byte]),
  );
});

test("the difference of a kernel and a multiple of itself is nothing", () => {
  const kernel = Float32Array.of(2, 1, 1, 4);
  assert.ok(
    [
      ...difference(
        kernel,
        kernel.map((v) => 7 * v),
        2,
      ),
    ].every((v) => Math.abs(v) < 1e-6),
  );
  assert.ok(difference(kernel, Float32Array.of(3, 0, 0, 3), 2)[1] > 0);
});

test("two maps on one scale have one byte for one value", () => {
  const a = quantise([0, 0.5, 1, 2], 2, 2, false, 2);
  const b = quantise([0, 0.5, 1, 8], 2, 2, false, 8);
  const [p, q] = onOneScale(a, b);
  assert.equal(p.top, 8);
  for (let i = 0; i < 3; i++) assert.ok(Math.abs(p.bytes[i] - q.bytes[i]) <= 1, `${p.bytes} and ${q.bytes}`);
  assert.equal(onOneScale(a, a)[0], a);
  const signed = quantise([-8, 0, 1, 8], 2, 2, true, 8);
  const [unsignedTwin] = onOneScale(a, signed);
  assert.ok(unsignedTwin.signed);
  for (const i of [0, 1, 2, 3]) {
    const value = valueOf(unsignedTwin, unsignedTwin.bytes[i]);
    assert.ok(Math.abs(value - [0, 0.5, 1, 2][i]) < 0.1, String(value));
  }
});
