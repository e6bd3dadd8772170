import assert from "node:assert/strict";
import { test } from "node:test";
import { countTicks, drawAngles, levelOf, pickStrip } from "../src/panels/curves.ts";
import { fitting, line, niceTicks, range, type Theme, type Pen } from "../src/panels/draw.ts";
import { discsHeight, pickDisc } from "../src/panels/discs.ts";
import { openShare, pickCircle, unitsOf, unitsOfNeurons } from "../src/panels/halfspaces.ts";
import { extentOf, gridPixels, pickPlane } from "../src/panels/plane.ts";
import { packedTable } from "../src/panels/heatmap.ts";
import { greyTile, tile } from "../src/panels/images.ts";
import { mapExtent, pickMap } from "../src/panels/map.ts";
import { angleBetween, extremes, moments, openOn, spreadSteps } from "../src/lib/unitHistory.ts";

const near = (a: number, b: number, within = 1e-6): void => assert.ok(Math.abs(a - b) <= within, `${a} is not ${b}`);

test("a half-space keeps its border whatever the length of its normal", () => {
  const [unit] = unitsOf(Float32Array.of(0, 5), Float32Array.of(-2.5), 0, 1); // 5 y >= 2.5
  near(unit.d, 0.5);
  near(unit.y, 1);
  near(openShare(unit), 1 / 3); // y >= 1/2 on the circle: 120 of 360 degrees
});

test("units that are always or never open, and without offsets", () => {
  const units = unitsOf(Float32Array.of(1, 0, 1, 0, 1, 0), Float32Array.of(2, -2, 0), 0, 3);
  assert.deepEqual(units.map(openShare), [1, 0, 0.5]);
  near(openShare(unitsOf(Float32Array.of(3, 4), null, 0, 1)[0]), 0.5);
});

test("neurons kept as directions, norms and biases have the borders of their weights", () => {
  const [weights, biases] = [Float32Array.of(3, 4, 0, -0.5, -2, 1), Float32Array.of(-2, 0.25, 7)];
  const norms = Float32Array.from({ length: 3 }, (_, i) => Math.hypot(weights[2 * i], weights[2 * i + 1]));
  const directions = weights.map((value, i) => value / norms[i >> 1]);
  const wanted = unitsOf(weights, biases, 0, 3);
  unitsOfNeurons(directions, norms, biases).forEach((unit, i) => {
    for (const part of ["x", "y", "d", "direction"] as const) near(unit[part], wanted[i][part], 1e-6);
  });
  const nothing = unitsOfNeurons(Float32Array.of(0, 0, 0, 0), Float32Array.of(0, 0), Float32Array.of(0.1, -0.1));
  assert.deepEqual(nothing.map(openShare), [1, 0]); // without weights a neuron is open everywhere or nowhere
});

test("layers are read one after the other", () => {
  const normals = Float32Array.of(1, 0, 0, 1, -1, 0, 0, -1); // two layers of two
  assert.deepEqual(
    unitsOf(normals, null, 1, 2).map((u) => [u.x, u.y]),
    [
      [-1, 0],
      [0, -1],
    ],
  );
});

test("pointing at the circle finds the angle, pointing at a triangle finds the unit", () => {
  const units = unitsOf(Float32Array.of(0, 1), null, 0, 1);
  const r = 304 / 3.04;
  assert.deepEqual(pickCircle(152, 152 - 1.15 * r, 304, 304, units), { unit: 0 });
  const found = pickCircle(152 - r, 152, 304, 304, units);
  assert.ok("angle" in found);
  near((found as { angle: number }).angle, Math.PI);
});

test("every disc can be picked, also when layers wrap", () => {
  for (const [layers, width, canvas] of [
    [3, 5, 200],
    [2, 64, 300],
  ]) {
    const found = new Set<string>();
    const tall = discsHeight(canvas, layers, width);
    for (let y = 0; y < tall; y += 2)
      for (let x = 0; x < canvas; x += 2) {
        const unit = pickDisc(x, y, canvas, layers, width);
        if (unit) found.add(`${unit.layer} ${unit.unit}`);
      }
    assert.equal(found.size, layers * width);
  }
});

test("the nearest point of the plane, and nothing far away", () => {
  const points = [
    [0, 0],
    [0.5, 0.5],
  ];
  assert.equal(pickPlane(76, 24, 100, 100, 1, points), 1);
  assert.equal(pickPlane(5, 95, 100, 100, 1, points), null);
  near(extentOf([[-2, 1]]), 2.3);
});

test("the grid stands upright, and its two signs have the two colours", () => {
  const { pixels, side } = gridPixels([9, 9, -9, -9], 1); // the lower row is positive
  assert.equal(side, 2);
  assert.deepEqual([pixels[2], pixels[0]], [packedTable("difference")[255], packedTable("difference")[1]]);
  assert.equal(gridPixels([9, 9, -9, -9], -1).pixels[2], pixels[0]);
});

test("a map of neurons finds the point of the shown frame", () => {
  const points = Float32Array.of(0, 0, 0.5, 0.5, -0.5, -0.5, 0.5, -0.5); // two frames of two
  assert.equal(pickMap(75, 25, 100, 100, { points, count: 2, frame: 0, extent: 1 }), 1);
  assert.equal(pickMap(75, 75, 100, 100, { points, count: 2, frame: 1, extent: 1 }), 1);
  assert.ok(mapExtent(points) > 0.5);
});

test("counts are placed by log(1 + count), between the ends", () => {
  assert.equal(levelOf(0, 0, 99, true), 0);
  near(levelOf(9, 0, 99, true), 0.5);
  assert.equal(levelOf(500, 0, 99, true), 1);
  assert.ok(countTicks(0, 2e5).some(([, label]) => label === "10⁵"));
});

test("strips find the sample under the pointer", () => {
  const view = {
    values: [0, 1, 0.5],
    bands: [
      { name: "a", samples: [0, 1] },
      { name: "b", samples: [2] },
    ],
    low: 0,
    high: 1,
    marks: [],
  };
  const found = new Set<number>();
  for (let y = 0; y < 200; y += 3)
    for (let x = 0; x < 300; x += 3) {
      const sample = pickStrip(x, y, 300, 200, view);
      if (sample !== null) found.add(sample);
    }
  assert.deepEqual([...found].sort(), [0, 1, 2]);
});

test("a curve breaks where a number is missing", () => {
  const seen: string[] = [];
  const pen = {
    beginPath() {},
    stroke() {},
    moveTo: () => seen.push("move"),
    lineTo: () => seen.push("line"),
  } as unknown as Pen;
  const values = [1, 2, NaN, 3, 4];
  line(
    pen,
    5,
    (i) => i,
    (i) => values[i],
  );
  assert.deepEqual(seen, ["move", "line", "move", "line"]);
});

test("nice ticks are round, inside, and few", () => {
  assert.deepEqual(niceTicks(0, 1), [0, 0.25, 0.5, 0.75, 1]);
  assert.deepEqual(niceTicks(-1.4, 1.4), [-1, 0, 1]);
  assert.deepEqual(range([NaN, 3, null, -2]), [-2, 3]);
  assert.deepEqual(range([]), [0, 1]);
});

test("a picture has zero in the middle of its map and its own largest value at the end", () => {
  const { pixels, width, height } = tile([0, 2, -2, 1], [1, 2, 2]);
  assert.deepEqual([width, height, new Set(pixels).size], [2, 2, 4]);
  const colour = tile([2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0], [3, 2, 2]); // channels are averaged
  assert.equal(colour.pixels[0], pixels[1]);
});

test("an input is grey from its least to its largest value", () => {
  const { pixels } = greyTile([3, 5, 4, 5], [2, 2]);
  assert.deepEqual(
    [...pixels].map((pixel) => pixel & 255),
    [0, 255, 128, 255],
  );
  assert.ok(greyTile([1, 1, 1, 1], [1, 2, 2]).pixels.every((pixel) => (pixel & 255) === 0));
});

test("the samples deepest on either side, deepest first", () => {
  const inputs = Float32Array.of(1, 0, -1, 0, 3, 0, -5, 0);
  assert.deepEqual(extremes(Float32Array.of(1, 0), 0, inputs, 3), [
    [2, 0],
    [3, 1],
  ]);
  assert.deepEqual(extremes(Float32Array.of(1, 0), 9, inputs, 2), [[2, 0], []]);
  assert.deepEqual(extremes(Float32Array.of(1, 0), null, Float32Array.of(1, 0, 2, 0, 3, 0), 2), [
    [2, 1],
    [0, 1],
  ]); // no border is known: both ends, whatever their sign
});

test("the story of a unit begins with its first direction", () => {
  const story = moments([0, 5], [Float32Array.of(1, 0), Float32Array.of(0, 3)], [null, null]);
  assert.deepEqual(
    story.map((m) => [m.norm, Math.round(m.turned)]),
    [
      [1, 0],
      [3, 90],
    ],
  );
  near(angleBetween([1, 0], [-1, 0]), 180);
  assert.equal(angleBetween([0, 0], [1, 0]), 0);
});

test("open on the samples of its side, border included", () => {
  const inputs = Float32Array.of(1, 0, -1, 0, 0, 1, 2, 2);
  assert.equal(openOn(Float32Array.of(1, 0), 0, inputs, [0, 1, 2, 3]), 0.75);
  assert.equal(openOn(Float32Array.of(1, 0), -1.5, inputs, [0, 1, 2, 3]), 0.25);
});

test("a long history is shown in few steps, first and last among them", () => {
  const steps = Array.from({ length: 100 }, (_, i) => i * i);
  const kept = spreadSteps(steps, 7);
  assert.deepEqual([kept.length, kept[0], kept.at(-1)], [7, 0, 9801]);
  assert.deepEqual(spreadSteps([1, 2], 7), [1, 2]);
});

test("a number too wide for its axis gets fewer letters, never other digits", () => {
  const pen = { font: "", measureText: (words: string) => ({ width: 6 * words.length }) } as unknown as Pen;
  const theme = { sans: "x" } as Theme;
  assert.deepEqual(fitting(pen, theme, 250, "250", 35), { words: "250", size: 11 });
  assert.deepEqual(fitting(pen, theme, 1.5e6, "1,500,000", 35), { words: "1.5e6", size: 11 });
  assert.equal(fitting(pen, theme, 2e11, "2.0e+11", 35).words, "2e11");
  assert.equal(fitting(pen, theme, 1.25e12, "1.3e+12", 35).words, "1.25e12");
  const { words, size } = fitting(pen, theme, -1.5e38, "\u22121.5e+38", 35);
  assert.equal(words, "\u22121.5e38");
  near(size, (11 * 35) / 42);
});

test("a second run is drawn at the angles of its own samples", () => {
  const drawn: Record<string, number[]> = {};
  const state: Record<string | symbol, unknown> = {};
  const at = (x: number): void => void (drawn[String(state.strokeStyle)] ??= []).push(x);
  const pen = new Proxy(state, {
    get: (_, name) => (name === "moveTo" || name === "lineTo" ? at : (state[name] ?? ((): object => ({ width: 0 })))),
    set: (_, name, value) => ((state[name] = value), true),
  }) as unknown as Pen;
  const theme = new Proxy({}, { get: (_, name) => `theme ${String(name)}` }) as Theme;
  const quarter = Math.PI / 2;
  const curves = [
    { values: [1, 2, 3, 4], colour: "first" },
    { values: [1, 2], angles: [quarter, 3 * quarter], colour: "second" },
  ];
  const angles = [0, quarter, 2 * quarter, 3 * quarter];
  drawAngles(pen, 400, 200, { angles, curves, low: 0, high: 5, marks: [] }, theme);
  assert.equal(drawn.first.length, 4);
  assert.deepEqual(drawn.second, [drawn.first[1], drawn.first[3]]);
});
