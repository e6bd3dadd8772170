// The explorer. One state, pure functions that draw (ctx, box, scene, state, colours), and a little wiring.
// A scene holds every array of one network; a frame is one measured moment of its training.

const TAU = 2 * Math.PI;
const FACING = Math.cos(Math.PI / 6); // a unit faces a half when its normal is within 30 degrees of its axis
const byId = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// ---------------------------------------------------------------------------------------------- data

const stored = JSON.parse(byId("data").textContent).scenes;
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const decoded = new Map();

function sceneAt(index) {
  if (!decoded.has(index)) decoded.set(index, decode(stored[index]));
  return decoded.get(index);
}

function decode(raw) {
  const camel = (name) => name.replace(/_(.)/g, (_, letter) => letter.toUpperCase()); // loss_top -> lossTop
  const floats = Object.entries(raw.floats).map(([name, text]) => [camel(name), new Float32Array(bytes(text).buffer)]);
  const scene = { ...raw, ...Object.fromEntries(floats), frames: raw.epochs.length };
  scene.n = scene.angles.length;
  scene.k = scene.picked.length;
  scene.kernelAngles = scene.picked.map((i) => scene.angles[i]);
  for (const name of ["overlap", "tangent"]) scene[name] = { ...raw[name], bytes: bytes(raw[name].bytes) };
  const top = [...scene.angles].map((angle) => angle < Math.PI);
  const mean = (row, side) => {
    const kept = row.filter((_, i) => top[i] === side);
    return kept.reduce((sum, value) => sum + value, 0) / Math.max(kept.length, 1);
  };
  const frames = [...Array(scene.frames).keys()];
  scene.maxPaths = scene.paths.reduce((a, b) => Math.max(a, b), 1);
  scene.minPaths = scene.paths.reduce((a, b) => Math.min(a, b), scene.maxPaths);
  scene.ratio = frames.map((f) => mean(points(scene, "paths", f), true) / mean(points(scene, "paths", f), false));
  scene.facing = Array.from({ length: scene.layers }, (_, layer) => frames.map((f) =>
    units(scene, f, layer).filter((unit) => unit.y >= FACING).length));
  scene.moments = moments(scene);
  return scene;
}

const points = (scene, name, frame) => scene[name].subarray(frame * scene.n, (frame + 1) * scene.n);

/** Half-spaces of one layer: unit normal (x, y), its direction, and the signed distance d of the border. */
function units(scene, frame, layer) {
  const start = (frame * scene.layers + layer) * scene.width;
  return Array.from({ length: scene.width }, (_, i) => {
    const [vx, vy] = scene.normals.subarray(2 * (start + i), 2 * (start + i) + 2);
    const length = Math.hypot(vx, vy) || 1e-12;
    return { x: vx / length, y: vy / length, direction: Math.atan2(vy, vx), d: -scene.offsets[start + i] / length };
  });
}

function kernelByte(scene, name, frame, i, j) {
  const [row, column] = i <= j ? [i, j] : [j, i];
  const k = scene.k;
  return scene[name].bytes[(frame * k * (k + 1)) / 2 + row * k - (row * (row - 1)) / 2 + column - row];
}

function kernelValue(kernel, byte) {
  const level = kernel.signed ? (byte - 128) / 127 : byte / 255;
  return Math.sign(level) * kernel.top * level ** 2;
}

/** Moments worth a jump, read off the curves: a half counts as learned at a tenth of its first loss. */
function moments(scene) {
  const first = (test, from = 0) => scene.epochs.findIndex((_, f) => f >= from && test(f));
  const peak = scene.share.indexOf(Math.max(...scene.share));
  const found = [
    ["easy half learned", "easy", first((f) => scene.lossTop[f] <= scene.lossTop[0] / 10)],
    ["tangent kernel flips", "", scene.share[peak] > 0.6 ? first((f) => scene.share[f] < 0.5, peak) : -1],
    ["hard half learned", "hard", first((f) => scene.lossBottom[f] <= scene.lossBottom[0] / 10)],
  ];
  return found.filter(([, , frame]) => frame > 0).sort((a, b) => a[2] - b[2]);
}

// ------------------------------------------------------------------------------------------- colours

const NIGHT = ["#0d1b2e", "#143a5c", "#1c5f7c", "#3a8588", "#74ab8a", "#bdca8c", "#fbeaa0"]; // rising lightness
const ROSE = ["#0d1b2e", "#4a2450", "#96406e", "#e07a92", "#ffc9cf"]; // below zero
const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

function mix(stops, level) {
  const at = clamp(level, 0, 1) * (stops.length - 1);
  const i = Math.min(Math.floor(at), stops.length - 2);
  const [a, b] = [rgb(stops[i]), rgb(stops[i + 1])];
  return a.map((value, c) => Math.round(value + (at - i) * (b[c] - value)));
}
const css = (colour) => `rgb(${colour.join(" ")})`;
const packed = (lut) => Uint32Array.from(lut, ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0);
const table = (level) => Array.from({ length: 256 }, (_, q) => mix(...level(q)));
const UNSIGNED = table((q) => [NIGHT, q / 255]);
const SIGNED = table((q) => (q >= 128 ? [NIGHT, (q - 128) / 127] : [ROSE, (128 - q) / 127]));

const PACKED = new Map([UNSIGNED, SIGNED].map((lut) => [lut, packed(lut)])); // pixels of an image, little-endian

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["card", "ink", "quiet", "grid", "easy", "hard", "easy-tint", "hard-tint", "unit", "sans"];
  const value = (name) => style.getPropertyValue(`--${name}`).trim();
  return Object.fromEntries(names.map((name) => [name.replace("-t", "T"), value(name)]));
}

// ---------------------------------------------------------------------------------------- small tools

const degrees = (angle) => `${Math.round((angle * 180) / Math.PI)}°`;
const minus = (string) => string.replace(/^-/, "−");
const short = (value) => {
  if (Number.isNaN(value)) return "–";
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
};
const epochName = (epoch) => String(+epoch.toFixed(2));
const fixed = (value) => (value >= 0.001 || value === 0 ? value.toFixed(3) : value.toExponential(0));
const atEpoch = (scene, epoch) => Math.log1p(epoch) / (Math.log1p(scene.epochs.at(-1)) || 1);
const nearest = (list, value) => {
  let best = 0;
  for (let i = 1; i < list.length; i++) if (Math.abs(list[i] - value) < Math.abs(list[best] - value)) best = i;
  return best;
};
const epochTicks = (scene) => {
  const last = scene.epochs.at(-1);
  const round = [0, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000].filter((e) => e <= last);
  return atEpoch(scene, last) - atEpoch(scene, round.at(-1)) > 0.045 ? [...round, last] : round;
};

function line(ctx, count, x, y) {
  ctx.beginPath();
  for (let i = 0; i < count; i++) ctx.lineTo(x(i), y(i));
  ctx.stroke();
}

function text(ctx, string, x, y, { colour, align = "center", base = "alphabetic", size = 11, weight = "" }) {
  ctx.font = `${weight} ${size}px ${ctx.sans}`;
  ctx.fillStyle = colour;
  ctx.textAlign = align;
  ctx.textBaseline = base;
  ctx.fillText(string, x, y);
}

/** Axes of a plot. `x` and `y` map data to pixels; ticks are [value, label]. Returns the inner box. */
function axes(ctx, box, colours, { x, y, xTicks, yTicks }) {
  ctx.lineWidth = 1;
  for (const [value, label] of yTicks) {
    ctx.strokeStyle = colours.grid;
    line(ctx, 2, (i) => (i ? box.right : box.left), () => Math.round(y(value)) + 0.5);
    text(ctx, label, box.left - 7, y(value), { colour: colours.quiet, align: "right", base: "middle" });
  }
  for (const [i, [value, label]] of xTicks.entries()) {
    const next = xTicks[i + 1];
    if (next && x(next[0]) - x(value) < 26) continue; // no room for both
    const align = x(value) > box.right - 12 ? "right" : "center";
    text(ctx, label, align === "right" ? box.right : x(value), box.bottom + 15, { colour: colours.quiet, align });
  }
}

const plotBox = (width, height) => ({ left: 42, right: width - 8, top: 8, bottom: height - 20 });
const ANGLE_TICKS = [0, 0.25, 0.5, 0.75, 1].map((part) => [part * TAU, degrees(part * TAU)]);

function halves(ctx, box, x, colours) {
  ctx.fillStyle = colours.easyTint;
  ctx.fillRect(box.left, box.top, x(Math.PI) - box.left, box.bottom - box.top);
  ctx.fillStyle = colours.hardTint;
  ctx.fillRect(x(Math.PI), box.top, box.right - x(Math.PI), box.bottom - box.top);
}

function marks(ctx, box, x, hover, colours) {
  ctx.strokeStyle = colours.ink;
  ctx.lineWidth = 1;
  ctx.setLineDash([2, 3]);
  for (const angle of hover ?? []) line(ctx, 2, () => x(angle), (i) => (i ? box.bottom : box.top));
  ctx.setLineDash([]);
}

// --------------------------------------------------------------------------------------------- panels
// Each panel: draw(ctx, width, height, scene, state, colours); where useful also pick(px, py, width, height, scene,
// state) -> change of state under the pointer, and tell(scene, state) -> the line of text beside it.

const angleX = (box) => (angle) => box.left + (angle / TAU) * (box.right - box.left);
const pickAngle = (px, py, width, height) => {
  const box = plotBox(width, height);
  const angle = ((px - box.left) / (box.right - box.left)) * TAU;
  return { hover: angle < 0 || angle >= TAU ? null : [angle] };
};

const fit = {
  draw(ctx, width, height, scene, state, colours) {
    const box = plotBox(width, height), x = angleX(box);
    const y = (value) => box.top + ((1.35 - clamp(value, -1.35, 1.35)) / 2.7) * (box.bottom - box.top);
    const output = points(scene, "output", state.frame);
    halves(ctx, box, x, colours);
    axes(ctx, box, colours, { x, y, xTicks: ANGLE_TICKS, yTicks: [[-1, "−1"], [0, "0"], [1, "1"]] });
    ctx.lineJoin = "round";
    ctx.strokeStyle = colours.unit; ctx.globalAlpha = 0.45; ctx.lineWidth = 4;
    line(ctx, scene.n, (i) => x(scene.angles[i]), (i) => y(scene.target[i]));
    ctx.strokeStyle = colours.ink; ctx.globalAlpha = 1; ctx.lineWidth = 1.6;
    line(ctx, scene.n, (i) => x(scene.angles[i]), (i) => y(output[i]));
    text(ctx, "easy half", box.left + 6, box.bottom - 6, { colour: colours.easy, align: "left" });
    text(ctx, "hard half", box.right - 6, box.bottom - 6, { colour: colours.hard, align: "right" });
    marks(ctx, box, x, state.hover, colours);
  },
  pick: pickAngle,
  tell(scene, state) {
    if (!state.hover) return "broad: target · thin: network";
    const i = nearest(scene.angles, state.hover[0]);
    const [target, output] = [scene.target[i], points(scene, "output", state.frame)[i]].map((v) => minus(v.toFixed(2)));
    return `${degrees(scene.angles[i])}: target ${target}, network ${output}`;
  },
};

/** Where a path count lies between the fewest and the most of the scene, log(1 + count), from 0 to 1. */
function pathLevel(scene) {
  const decade = Math.floor(Math.log10(Math.max(scene.minPaths, 1)));
  const from = scene.minPaths < 1 ? 0 : Math.log10(1 + 10 ** decade);
  const range = Math.log10(1 + scene.maxPaths) - from || 1;
  return (count) => clamp((Math.log10(1 + count) - from) / range, 0, 1);
}

const paths = {
  draw(ctx, width, height, scene, state, colours) {
    const box = plotBox(width, height), x = angleX(box), level = pathLevel(scene);
    const y = (value) => box.bottom - level(value) * (box.bottom - box.top - 6);
    const room = scene.minPaths < 1 ? 0.1 : 0; // a zero at the foot of the axis needs some
    const powers = [...Array(16).keys()].filter((p) => 10 ** p <= scene.maxPaths && 10 * 10 ** p > scene.minPaths
      && level(10 ** p) >= room);
    const label = (p) => (p < 4 ? String(10 ** p) : `10${[..."⁰¹²³⁴⁵⁶⁷⁸⁹"][p] ?? `^${p}`}`);
    halves(ctx, box, x, colours);
    const yTicks = [...(room ? [[0, "0"]] : []), ...powers.map((p) => [10 ** p, label(p)])];
    axes(ctx, box, colours, { x, y, xTicks: ANGLE_TICKS, yTicks });
    const step = (row) => line(ctx, scene.n, (i) => x(scene.angles[i]), (i) => y(row[i]));
    ctx.lineWidth = 1; ctx.strokeStyle = colours.unit; ctx.setLineDash([3, 3]);
    step(points(scene, "paths", 0));
    ctx.setLineDash([]); ctx.lineWidth = 1.8; ctx.strokeStyle = colours.ink;
    step(points(scene, "paths", state.frame));
    marks(ctx, box, x, state.hover, colours);
  },
  pick: pickAngle,
  tell(scene, state) {
    if (!state.hover) return "log scale · dashed: before training";
    const i = nearest(scene.angles, state.hover[0]);
    return `${degrees(scene.angles[i])}: ${short(points(scene, "paths", state.frame)[i])} active paths`;
  },
};

const lossX = (box, scene) => (epoch) => box.left + atEpoch(scene, epoch) * (box.right - 8 - box.left);
const loss = {
  draw(ctx, width, height, scene, state, colours) {
    const box = plotBox(width, height), x = lossX(box, scene);
    const top = Math.max(...scene.lossTop, ...scene.lossBottom, 0.1) * 1.05;
    const y = (value) => box.bottom - (value / top) * (box.bottom - box.top);
    const unit = [0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10].find((u) => top / u <= 4.5) ?? top / 2;
    const yTicks = [...Array(Math.floor(top / unit) + 1).keys()].map((i) => [i * unit, String(+(i * unit).toFixed(2))]);
    axes(ctx, box, colours, { x, y, xTicks: epochTicks(scene).map((e) => [e, epochName(e)]), yTicks });
    ctx.strokeStyle = colours.unit; ctx.lineWidth = 1;
    line(ctx, 2, () => x(scene.epochs[state.frame]), (i) => (i ? box.bottom : box.top));
    ctx.lineWidth = 1.8;
    for (const [row, colour] of [["lossBottom", colours.hard], ["lossTop", colours.easy], ["loss", colours.ink]]) {
      ctx.strokeStyle = ctx.fillStyle = colour;
      line(ctx, scene.frames, (f) => x(scene.epochs[f]), (f) => y(scene[row][f]));
      ctx.beginPath(); ctx.arc(x(scene.epochs[state.frame]), y(scene[row][state.frame]), 3.5, 0, TAU); ctx.fill();
    }
    const key = [["all", colours.ink], ["easy half", colours.easy], ["hard half", colours.hard]];
    for (const [i, [name, colour]] of key.entries())
      text(ctx, name, box.right - 4, box.top + 12 + 14 * i, { colour, align: "right" });
  },
  pick(px, py, width, height, scene) {
    const box = plotBox(width, height), x = lossX(box, scene);
    return { peek: nearest(scene.epochs.map(x), px) };
  },
  tell(scene, state) {
    const f = state.peek ?? state.frame;
    const [all, easy, hard] = [scene.loss[f], scene.lossTop[f], scene.lossBottom[f]].map(fixed);
    return `epoch ${epochName(scene.epochs[f])}: ${all} · easy ${easy} · hard ${hard}`;
  },
};

/** The part of a disc where a half-space is open, as a path; nothing when it is closed everywhere. */
function openPart(ctx, cx, cy, r, unit) {
  ctx.beginPath();
  const spread = Math.acos(clamp(unit.d, -1, 1));
  if (spread > 0) ctx.arc(cx, cy, r, -unit.direction - spread, -unit.direction + spread);
  ctx.closePath();
}
const unitColour = (unit, colours) => {
  if (Math.abs(unit.y) < FACING) return colours.unit;
  return unit.y > 0 ? colours.easy : colours.hard;
};
const circleBox = (width, height) => ({ cx: width / 2, cy: height / 2, r: Math.min(width, height) / 2 / 1.5 });

const PAINTS = { paths: "paths", target: "target", output: "output" };
function ringColour(scene, state) {
  if (state.paint === "paths") {
    const row = points(scene, "paths", state.frame), level = pathLevel(scene);
    return (i) => css(UNSIGNED[Math.round(255 * level(row[i]))]);
  }
  const row = state.paint === "target" ? scene.target : points(scene, "output", state.frame);
  return (i) => css(SIGNED[Math.round(128 + 127 * clamp(row[i], -1, 1))]);
}

const circle = {
  draw(ctx, width, height, scene, state, colours) {
    const { cx, cy, r } = circleBox(width, height);
    const at = (angle, radius) => [cx + radius * r * Math.cos(angle), cy - radius * r * Math.sin(angle)];
    halfTints(ctx, width, height, cy, colours);
    wave(ctx, scene, state, at, colours);
    if (scene.layers) halfSpaces(ctx, cx, cy, r, scene, state, colours);
    const colour = ringColour(scene, state);
    ctx.lineWidth = 0.075 * r;
    for (let i = 0; i < scene.n; i++) {
      const angle = scene.angles[i], half = TAU / scene.n / 2 + 0.002;
      ctx.strokeStyle = colour(i);
      ctx.beginPath(); ctx.arc(cx, cy, 1.04 * r, -angle - half, -angle + half); ctx.stroke();
    }
    if (scene.layers) triangles(ctx, at, r, scene, state, colours);
    ringKey(ctx, width, height, scene, state, colours);
    for (const angle of state.hover ?? []) {
      ctx.beginPath(); ctx.arc(...at(angle, 1.04), 6, 0, TAU);
      ctx.fillStyle = colours.card; ctx.fill(); ctx.strokeStyle = colours.ink; ctx.lineWidth = 2; ctx.stroke();
    }
  },
  pick(px, py, width, height, scene, state) {
    const { cx, cy, r } = circleBox(width, height);
    const [dx, dy] = [px - cx, cy - py];
    if (scene.layers && Math.abs(Math.hypot(dx, dy) / r - 1.15) < 0.07) {
      const away = units(scene, state.frame, state.layer)
        .map((unit) => Math.hypot(dx - 1.15 * r * unit.x, dy - 1.15 * r * unit.y));
      const unit = nearest(away, 0);
      if (away[unit] < 9) return { unit };
    }
    return { hover: [(Math.atan2(dy, dx) + TAU) % TAU] };
  },
  tell(scene, state) {
    if (scene.layers && state.unit !== null) return tellUnit(scene, state);
    const layer = scene.layers ? units(scene, state.frame, state.layer) : [];
    if (state.hover) {
      const [x, y] = [Math.cos(state.hover[0]), Math.sin(state.hover[0])];
      const open = layer.filter((unit) => unit.x * x + unit.y * y >= unit.d).length;
      const count = short(points(scene, "paths", state.frame)[nearest(scene.angles, state.hover[0])]);
      const here = scene.layers ? `${open} of ${scene.width} units of this layer open, ` : "";
      return `${degrees(state.hover[0])}: ${here}${count} active paths`;
    }
    if (!scene.layers) return "";
    const missing = layer.filter((unit) => Math.abs(unit.d) >= 1);
    const always = missing.filter((unit) => unit.d <= -1).length;
    const never = missing.length - always;
    return missing.length ? `Hollow triangles: borders off the circle (${always} always open, ${never} never).` : "";
  },
};

function halfTints(ctx, width, height, cy, colours) {
  ctx.fillStyle = colours.easyTint; ctx.fillRect(0, 0, width, cy);
  ctx.fillStyle = colours.hardTint; ctx.fillRect(0, cy, width, height - cy);
  text(ctx, "easy half", 12, 22, { colour: colours.easy, align: "left", size: 13, weight: 600 });
  text(ctx, "hard half", 12, height - 13, { colour: colours.hard, align: "left", size: 13, weight: 600 });
}

function ringKey(ctx, width, height, scene, state, colours) {
  const counted = state.paint === "paths", lut = counted ? UNSIGNED : SIGNED;
  const [left, top] = [width - 104, height - 30];
  for (let x = 0; x < 92; x++) {
    ctx.fillStyle = css(lut[Math.round(counted ? (255 * x) / 91 : 1 + (254 * x) / 91)]);
    ctx.fillRect(left + x, top, 1.5, 6);
  }
  const ends = counted ? ["few", "many paths"] : ["−1", "1"];
  text(ctx, ends[0], left, top + 18, { colour: colours.quiet, align: "left", size: 10.5 });
  text(ctx, ends[1], left + 92, top + 18, { colour: colours.quiet, align: "right", size: 10.5 });
}

function wave(ctx, scene, state, at, colours) {
  const output = points(scene, "output", state.frame);
  const radius = (value) => 1.34 + 0.1 * clamp(value, -1.3, 1.3);
  const trace = (row) => {
    for (let i = 0; i <= scene.n; i++) ctx.lineTo(...at(scene.angles[i % scene.n], radius(row[i % scene.n])));
  };
  ctx.beginPath(); trace(scene.target);
  for (let i = scene.n; i >= 0; i--) ctx.lineTo(...at(scene.angles[i % scene.n], 1.34));
  ctx.fillStyle = colours.unit; ctx.globalAlpha = 0.3; ctx.fill(); ctx.globalAlpha = 1;
  ctx.beginPath(); trace(output);
  ctx.strokeStyle = colours.ink; ctx.lineWidth = 1.3; ctx.lineJoin = "round"; ctx.stroke();
}

function halfSpaces(ctx, cx, cy, r, scene, state, colours) {
  const layer = units(scene, state.frame, state.layer);
  for (const [i, unit] of layer.entries()) {
    openPart(ctx, cx, cy, r, unit);
    ctx.fillStyle = colours.easy;
    ctx.globalAlpha = state.unit === null ? 0.9 / scene.width : state.unit === i ? 0.35 : 0;
    ctx.fill();
  }
  for (const [i, unit] of layer.entries()) {
    if (Math.abs(unit.d) >= 1) continue;
    const chosen = state.unit === i, reach = Math.sqrt(1 - unit.d * unit.d);
    const end = (sign) => [
      cx + r * (unit.d * unit.x - sign * reach * unit.y), cy - r * (unit.d * unit.y + sign * reach * unit.x)];
    ctx.globalAlpha = state.unit === null ? 0.75 : chosen ? 1 : 0.15;
    ctx.strokeStyle = unitColour(unit, colours); ctx.lineWidth = chosen ? 2.5 : 1.3;
    ctx.beginPath(); ctx.moveTo(...end(1)); ctx.lineTo(...end(-1)); ctx.stroke();
  }
  ctx.globalAlpha = 1;
}

function triangles(ctx, at, r, scene, state, colours) {
  for (const [i, unit] of units(scene, state.frame, state.layer).entries()) {
    const off = Math.abs(unit.d) >= 1;
    ctx.beginPath();
    for (const [turn, radius] of [[-0.045, 1.1], [0, 1.2], [0.045, 1.1]])
      ctx.lineTo(...at(unit.direction + turn, radius));
    ctx.closePath();
    ctx.globalAlpha = state.unit === null || state.unit === i ? 0.8 : 0.2;
    ctx.fillStyle = ctx.strokeStyle = unitColour(unit, colours); ctx.lineWidth = 1.2;
    off ? ctx.stroke() : ctx.fill();
  }
  ctx.globalAlpha = 1;
}

function tellUnit(scene, state) {
  const unit = units(scene, state.frame, state.layer)[state.unit];
  const open = Math.round((Math.acos(clamp(unit.d, -1, 1)) / Math.PI) * 100);
  const name = `layer ${state.layer + 1}, unit ${state.unit + 1}`;
  return `${name}: points to ${degrees((unit.direction + TAU) % TAU)}, open on ${open} % of the circle`;
}

const UNITS_LEFT = 22;
const unitsCell = (width, scene) => Math.min(28, (width - UNITS_LEFT) / scene.width);
const allUnits = {
  height: (width, scene) => unitsCell(width, scene) * scene.layers + 4,
  draw(ctx, width, height, scene, state, colours) {
    const cell = unitsCell(width, scene), radius = cell * 0.39;
    for (let layer = 0; layer < scene.layers; layer++) {
      const chosen = layer === state.layer, cy = (layer + 0.5) * cell + 2;
      ctx.fillStyle = colours.grid;
      if (chosen) ctx.fillRect(0, cy - cell / 2, UNITS_LEFT + cell * scene.width, cell);
      const style = chosen ? { colour: colours.ink, weight: 700 } : { colour: colours.quiet };
      text(ctx, layer + 1, 10, cy, { base: "middle", ...style });
      for (const [i, unit] of units(scene, state.frame, layer).entries()) {
        const cx = UNITS_LEFT + (i + 0.5) * cell;
        ctx.fillStyle = ctx.strokeStyle = unitColour(unit, colours);
        openPart(ctx, cx, cy, radius, unit); ctx.fill();
        ctx.lineWidth = chosen && state.unit === i ? 2.5 : 0.8;
        ctx.beginPath(); ctx.arc(cx, cy, radius, 0, TAU); ctx.stroke();
      }
    }
  },
  pick(px, py, width, height, scene, state) {
    const cell = unitsCell(width, scene);
    const layer = Math.floor((py - 2) / cell), unit = Math.floor((px - UNITS_LEFT) / cell);
    return layer === state.layer && unit >= 0 && unit < scene.width ? { unit } : {};
  },
  click(px, py, width, height, scene) {
    return { layer: clamp(Math.floor((py - 2) / unitsCell(width, scene)), 0, scene.layers - 1) };
  },
};

const kernelBox = (width, height) => ({ left: 38, top: 4, side: Math.min(width - 40, height - 56) });

function heatMap(name) {
  const image = Object.assign(document.createElement("canvas"), { width: 0, height: 0 });
  return {
    draw(ctx, width, height, scene, state, colours) {
      const { left, top, side } = kernelBox(width, height);
      const kernel = scene[name], lut = kernel.signed ? SIGNED : UNSIGNED;
      fillImage(image, scene, name, state.frame, lut);
      ctx.imageSmoothingEnabled = false;
      ctx.drawImage(image, left, top, side, side);
      kernelAxes(ctx, left, top, side, scene, colours);
      colourBar(ctx, left, top + side + 30, side, kernel, lut, colours);
      if (!state.hover) return;
      const place = (angle) => ((nearest(scene.kernelAngles, angle) + 0.5) / scene.k) * side;
      const [row, column] = [place(state.hover[0]), place(state.hover.at(-1))];
      ctx.strokeStyle = "#ffffffb0"; ctx.lineWidth = 1;
      line(ctx, 2, (i) => left + i * side, () => top + row);
      line(ctx, 2, () => left + column, (i) => top + i * side);
      ctx.strokeStyle = "#fff"; ctx.lineWidth = 1.5;
      ctx.strokeRect(left + column - 4, top + row - 4, 8, 8);
    },
    pick(px, py, width, height, scene) {
      const { left, top, side } = kernelBox(width, height);
      const [column, row] = [(px - left) / side, (py - top) / side].map((part) => Math.floor(part * scene.k));
      const inside = Math.min(row, column) >= 0 && Math.max(row, column) < scene.k;
      return { hover: inside ? [scene.kernelAngles[row], scene.kernelAngles[column]] : null };
    },
    tell(scene, state) {
      if (!state.hover) return "square-root colours · mean diagonal 1";
      const [i, j] = [state.hover[0], state.hover.at(-1)].map((angle) => nearest(scene.kernelAngles, angle));
      const kernel = scene[name], value = kernelValue(kernel, kernelByte(scene, name, state.frame, i, j));
      const sign = kernel.clipped && Math.abs(value) > 0.999 * kernel.top ? (value > 0 ? "≥" : "≤") : "≈";
      const [row, column] = [i, j].map((place) => degrees(scene.kernelAngles[place]));
      return `${row} and ${column}: ${sign} ${minus(String(+value.toPrecision(2)))}`;
    },
  };
}

function fillImage(image, scene, name, frame, lut) {
  const k = scene.k;
  if (image.width !== k) image.width = image.height = k;
  const ctx = image.getContext("2d"), pixels = ctx.createImageData(k, k);
  const cells = new Uint32Array(pixels.data.buffer), colour = PACKED.get(lut);
  for (let i = 0; i < k; i++) for (let j = 0; j < k; j++)
    cells[i * k + j] = colour[kernelByte(scene, name, frame, i, j)];
  ctx.putImageData(pixels, 0, 0);
}

function kernelAxes(ctx, left, top, side, scene, colours) {
  const split = scene.kernelAngles.filter((angle) => angle < Math.PI).length / scene.k;
  for (const [from, to, colour] of [[0, split, colours.easy], [split, 1, colours.hard]]) {
    ctx.fillStyle = colour;
    ctx.fillRect(left - 6, top + from * side, 3, (to - from) * side);
    ctx.fillRect(left + from * side, top + side + 3, (to - from) * side, 3);
  }
  for (const [part, label] of [[0, "0°"], [split, "180°"], [1, "360°"]]) {
    const align = part === 0 ? "left" : part === 1 ? "right" : "center";
    const base = part === 0 ? "top" : part === 1 ? "bottom" : "middle";
    text(ctx, label, left - 10, top + part * side, { colour: colours.quiet, align: "right", base, size: 10.5 });
    text(ctx, label, left + part * side, top + side + 18, { colour: colours.quiet, align, size: 10.5 });
  }
}

function colourBar(ctx, left, top, side, kernel, lut, colours) {
  for (let x = 0; x < side; x++) {
    ctx.fillStyle = css(lut[Math.round(((kernel.signed ? 254 * x + side : 255 * x) / side))] ?? lut[255]);
    ctx.fillRect(left + x, top, 1.5, 7);
  }
  const levels = kernel.signed ? [-1, 0, 1] : [0, 0.5, 1];
  levels.forEach((level, i) => {
    const value = minus(String(+(Math.sign(level) * kernel.top * level ** 2).toPrecision(2)));
    const sign = kernel.clipped && Math.abs(level) === 1 ? (level > 0 ? "≥ " : "≤ ") : "";
    const align = ["left", "center", "right"][i];
    text(ctx, sign + value, left + (i / 2) * side, top + 20, { colour: colours.quiet, align, size: 10.5 });
  });
}

function spark(row) {
  return {
    draw(ctx, width, height, scene, state, colours) {
      const { values, log, colour } = row(scene, state);
      if (!values) return;
      const shown = Array.from(values, (value) => (log ? Math.log10(clamp(value, 1e-4, 1e4)) : value));
      const low = Math.min(...shown, 0), high = Math.max(...shown, low + 1e-6);
      const x = (f) => 3 + atEpoch(scene, scene.epochs[f]) * (width - 6);
      const y = (f) => height - 4 - ((shown[f] - low) / (high - low)) * (height - 8);
      ctx.strokeStyle = colours.quiet; ctx.lineWidth = 1.3; ctx.lineJoin = "round";
      line(ctx, scene.frames, x, y);
      ctx.fillStyle = colours[colour];
      ctx.beginPath(); ctx.arc(x(state.frame), y(state.frame), 3.2, 0, TAU); ctx.fill();
    },
  };
}

const TILES = [
  ["Loss", (s, { frame: f }) => ({ values: s.loss, colour: "ink", big: fixed(s.loss[f]),
    small: `easy half ${fixed(s.lossTop[f])} · hard half ${fixed(s.lossBottom[f])}` })],
  ["Half-spaces that face the easy half", (s, { frame: f, layer }) => (s.layers
    ? { values: s.facing[layer], colour: "easy", big: `${s.facing[layer][f]} of ${s.width}`,
      small: `layer ${layer + 1}, within 30° · by chance ${(s.width / 6).toFixed(1)}` }
    : { big: "–", small: "a ReLU unit is no half-space" })],
  ["Active paths, easy against hard", (s, { frame: f }) => ({ values: s.ratio, log: true, colour: "easy",
    big: `${short(+s.ratio[f].toPrecision(2))} ×`, small: "mean count, easy half / hard half" })],
  ["Tangent kernel on the easy half", (s, { frame: f }) => ({ values: s.share,
    colour: s.share[f] >= 0.5 ? "easy" : "hard",
    big: `${Math.round(100 * s.share[f])} %`, small: "of its trace; half would be even" })],
];

// ---------------------------------------------------------------------------------------------- state

const state = { scene: 0, frame: 0, layer: 0, paint: "paths", hover: null, unit: null, peek: null, playing: false };
const panels = { circle, units: allUnits, fit, paths, loss, overlap: heatMap("overlap"), tangent: heatMap("tangent") };
let colours = readColours();
let waiting = false;

function change(next) {
  Object.assign(state, next);
  const scene = sceneAt(state.scene);
  state.frame = clamp(Math.round(state.frame) || 0, 0, scene.frames - 1);
  state.layer = clamp(Math.round(state.layer) || 0, 0, Math.max(scene.layers - 1, 0));
  if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; render(); }); }
}

function render() {
  const scene = sceneAt(state.scene);
  for (const [id, panel] of Object.entries(panels)) {
    paintCanvas(byId(id), panel, scene);
    if (panel.tell) byId(`r-${id}`).textContent = panel.tell(scene, state);
  }
  TILES.forEach(([, read], i) => {
    const tile = byId("numbers").children[i], { big, small } = read(scene, state);
    tile.querySelector(".big").textContent = big;
    tile.querySelector(".small").textContent = small;
    paintCanvas(tile.querySelector("canvas"), spark(read), scene);
  });
  renderTransport(scene);
  remember();
}

function paintCanvas(canvas, panel, scene) {
  const width = canvas.clientWidth;
  if (!width) return; // hidden
  if (panel.height) canvas.style.height = `${panel.height(width, scene)}px`;
  const height = canvas.clientHeight, ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, width, height);
  ctx.sans = colours.sans;
  panel.draw(ctx, width, height, scene, state, colours);
}

function renderTransport(scene) {
  const epoch = scene.epochs[state.frame], part = `${100 * atEpoch(scene, epoch)}%`;
  byId("epoch").textContent = epochName(epoch);
  byId("thumb").style.left = byId("done").style.width = part;
  const slider = byId("slider");
  slider.setAttribute("aria-valuemax", scene.frames - 1);
  slider.setAttribute("aria-valuenow", state.frame);
  slider.setAttribute("aria-valuetext", `epoch ${epochName(epoch)}, loss ${fixed(scene.loss[state.frame])}`);
  byId("play").setAttribute("aria-label", state.playing ? "Pause" : "Play");
  byId("play-shape").setAttribute("d", state.playing ? "M7 5h3.6v14H7zM13.4 5H17v14h-3.6z" : "M8 4.5v15l12-7.5z");
  for (const id of ["scenes", "layers", "paint"]) for (const button of byId(id).querySelectorAll("button"))
    button.setAttribute("aria-pressed", button.dataset.value === String(state[button.dataset.key]));
}

/** Everything that depends on the scene but not on the frame. */
function enterScene() {
  const scene = sceneAt(state.scene);
  byId("note").textContent = scene.note;
  byId("origin").textContent = `preset ${scene.preset} · seed ${scene.seed} · ${scene.frames} measured moments`;
  byId("panels").classList.toggle("relu", !scene.layers);
  choices("layers", "layer", Array.from({ length: scene.layers }, (_, i) => [i, String(i + 1)]), "layer");
  const spot = (tag, frameEpoch, words = "") => {
    const node = document.createElement(tag);
    node.textContent = words;
    node.style.left = `${100 * atEpoch(scene, frameEpoch)}%`;
    return node;
  };
  byId("frames").replaceChildren(...scene.epochs.map((epoch) => spot("i", epoch)));
  byId("ticks").replaceChildren(...epochTicks(scene).map((epoch) => spot("span", epoch, epochName(epoch))));
  byId("moments").replaceChildren(...scene.moments.map(([words, kind, frame]) => {
    const button = Object.assign(spot("button", scene.epochs[frame], words), { type: "button", className: kind });
    button.addEventListener("click", () => change({ frame, playing: false }));
    return button;
  }));
  spreadLabels();
}

/** Push moment labels apart (their ticks stay where the moments are) and hide epochs without room. */
function spreadLabels() {
  let edge = 0, next = Infinity;
  const rail = byId("ticks").clientWidth;
  for (const tick of [...byId("ticks").children].reverse()) {
    const place = (parseFloat(tick.style.left) / 100) * rail;
    tick.hidden = next - place < 28;
    if (!tick.hidden) next = place;
  }
  for (const button of byId("moments").children) {
    const half = button.offsetWidth / 2, centre = (parseFloat(button.style.left) / 100) * rail;
    const placed = Math.min(Math.max(centre, edge + half), rail + 12 - half);
    button.style.setProperty("--shift", `${placed - centre}px`);
    edge = placed + half + 12;
  }
}

function choices(id, key, options, label) {
  const buttons = options.map(([value, words]) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: words });
    Object.assign(button.dataset, { key, value });
    const choose = key === "scene" ? goTo : change;
    button.addEventListener("click", () => choose({ [key]: value, unit: null }));
    return button;
  });
  const before = Object.assign(document.createElement("span"), { className: "label", textContent: label });
  byId(id).replaceChildren(...(label ? [before] : []), ...buttons);
}

/** Move to another scene at the moment nearest in epochs, or to what an address says. */
function goTo({ scene = state.scene, frame = null, layer = null }) {
  const epoch = sceneAt(state.scene).epochs[state.frame] ?? 0;
  const index = clamp(Math.round(scene) || 0, 0, stored.length - 1), next = sceneAt(index);
  const entered = index !== state.scene || !byId("ticks").childElementCount;
  Object.assign(state, { scene: index, unit: null, hover: null });
  if (entered) enterScene();
  change({ frame: frame ?? nearest(next.epochs, epoch), layer: layer ?? (entered ? next.layers - 1 : state.layer) });
}

// -------------------------------------------------------------------------------------------- address

let addressTimer = 0;
function remember() {
  clearTimeout(addressTimer);
  addressTimer = setTimeout(() => {
    const scene = sceneAt(state.scene), layer = scene.layers ? `&layer=${state.layer + 1}` : "";
    history.replaceState(null, "", `#scene=${state.scene + 1}&frame=${state.frame}${layer}`);
    byId("spoken").textContent = state.playing ? "" : `Epoch ${epochName(scene.epochs[state.frame])}`;
  }, 250);
}

function readAddress() {
  const address = new URLSearchParams(location.hash.slice(1));
  const number = (key, shift) => (address.has(key) ? Number(address.get(key)) - shift : null);
  if (address.has("scene")) goTo({ scene: number("scene", 1), frame: number("frame", 0), layer: number("layer", 1) });
}

// ------------------------------------------------------------------------------------------------ wiring

function wirePanel(id, panel) {
  const canvas = byId(id);
  const ask = (event, act) => {
    const edge = canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - edge.left, event.clientY - edge.top];
    return act(px, py, edge.width, edge.height, sceneAt(state.scene), state);
  };
  const blank = { hover: null, unit: null, peek: null };
  canvas.addEventListener("pointermove", (event) => {
    const found = ask(event, panel.pick);
    change({ ...blank, ...found, ...(id === "loss" && event.buttons ? { frame: found.peek, playing: false } : {}) });
  });
  canvas.addEventListener("pointerleave", () => change(blank));
  canvas.addEventListener("pointerdown", (event) => {
    if (id === "loss") {
      canvas.setPointerCapture(event.pointerId);
      change({ frame: ask(event, panel.pick).peek, playing: false });
    }
    if (panel.click) change({ ...blank, ...ask(event, panel.click) });
  });
}

function wireSlider() {
  const slider = byId("slider");
  const drag = (event) => {
    const edge = slider.getBoundingClientRect(), scene = sceneAt(state.scene);
    const places = scene.epochs.map((epoch) => atEpoch(scene, epoch));
    change({ frame: nearest(places, (event.clientX - edge.left) / edge.width), playing: false });
  };
  slider.addEventListener("pointerdown", (event) => { slider.setPointerCapture(event.pointerId); drag(event); });
  slider.addEventListener("pointermove", (event) => { if (slider.hasPointerCapture(event.pointerId)) drag(event); });
}

let player = 0;
function play(on) {
  clearTimeout(player);
  const scene = sceneAt(state.scene), last = scene.frames - 1;
  change({ playing: on, ...(on && state.frame >= last ? { frame: 0 } : {}) });
  if (on) player = setTimeout(advance, pause(scene, state.frame));
}
function advance() {
  const scene = sceneAt(state.scene);
  if (!state.playing || state.frame >= scene.frames - 1) return play(false);
  change({ frame: state.frame + 1 });
  player = setTimeout(advance, pause(scene, state.frame));
}
/** Wait so long that the thumb travels evenly along its logarithmic rail: ten seconds in all. */
function pause(scene, frame) {
  const step = atEpoch(scene, scene.epochs[frame + 1] ?? Infinity) - atEpoch(scene, scene.epochs[frame]);
  return clamp(10000 * step, 60, 700);
}

const inView = () => {
  const edge = byId("explorer").getBoundingClientRect();
  return edge.top < window.innerHeight / 2 && edge.bottom > window.innerHeight / 3;
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("zoom").open || !inView()) return;
  const last = sceneAt(state.scene).frames - 1, step = event.shiftKey ? 5 : 1;
  const onButton = event.target.closest?.("button, a, summary");
  const frame = { ArrowRight: state.frame + step, ArrowLeft: state.frame - step, Home: 0, End: last }[event.key];
  if (frame !== undefined) change({ frame, playing: false });
  else if (event.key === " " && !onButton) play(!state.playing);
  else return;
  event.preventDefault();
}

function wireZoom() {
  const dialog = byId("zoom");
  for (const button of document.querySelectorAll(".gallery button")) button.addEventListener("click", () => {
    const image = button.querySelector("img");
    Object.assign(dialog.querySelector("img"), { src: image.src, alt: image.alt });
    dialog.showModal();
  });
  dialog.addEventListener("click", () => dialog.close());
}

function switchTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("unlazy-theme", theme); } catch { /* storage may be closed to local files */ }
  colours = readColours();
  if (stored.length) change({});
}

function start() {
  byId("theme").addEventListener("click", switchTheme);
  wireZoom();
  if (!stored.length) { byId("explorer").hidden = true; return; }
  byId("numbers").innerHTML = TILES.map(([name]) => `<div class="tile"><span class="what">${name}</span>`
    + '<span class="big"></span><canvas aria-hidden="true"></canvas><span class="small"></span></div>').join("");
  choices("scenes", "scene", stored.map((scene, i) => [i, scene.name]));
  choices("paint", "paint", Object.entries(PAINTS), "ring");
  for (const [id, panel] of Object.entries(panels)) wirePanel(id, panel);
  wireSlider();
  byId("play").addEventListener("click", () => play(!state.playing));
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", readAddress);
  new ResizeObserver(() => { spreadLabels(); change({}); }).observe(byId("panels"));
  goTo({ scene: 0, frame: 0 });
  readAddress();
}

start();
