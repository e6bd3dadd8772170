// Everything fetched passes here: one request per thing, a bounded memory, a polite number at a time.

import { Cache } from "./cache.ts";
import { fromBase64, type Answer, type Source } from "./source.ts";
import type {
  KernelSamples,
  Block,
  ClaimRow,
  Embedding,
  Levels,
  SampleMatch,
  RunInfo,
  RunList,
  Spectrum,
} from "./types.ts";

declare global {
  var unlazyEarly: Promise<Response> | null | undefined;
}

const MEMORY = 256 * 2 ** 20;
const AT_ONCE = 6;
const BATCH = 2 * 2 ** 20; // bytes of frames to ask for at once
const MOST_FRAMES = 60;

/** What a panel needs besides step and member: a layer, a unit, another run. */
export type More = Record<string, string | number>;
const also = (more: More): string =>
  Object.entries(more)
    .map(([name, value]) => `&${name}=${encodeURIComponent(value)}`)
    .join("");

/** A key or name as part of a path: its slashes stay, everything else is quoted, as the report's addresses are. */
const at = (name: string): string => name.split("/").map(encodeURIComponent).join("/");

export const paths = {
  run: (key: string): string => `/api/run/${at(key)}`,
  array: (key: string, quantity: string, step: number, member: number): string =>
    `/api/array/${at(key)}/${at(quantity)}/${step}?member=${member}`,
  levels: (key: string, quantity: string, step: number, member: number, scale: string): string =>
    `/api/levels/${at(key)}/${at(quantity)}/${step}?member=${member}&scale=${scale}`,
  embedding: (key: string, quantity: string, member: number): string =>
    `/api/embedding/${at(key)}/${at(quantity)}?member=${member}`,
  spectrum: (key: string, quantity: string, member: number): string =>
    `/api/spectrum/${at(key)}/${at(quantity)}?member=${member}`,
  figure: (key: string, panel: string, ending: string, step: number, member: number, more: More = {}): string =>
    `/api/figure/${at(key)}/${encodeURIComponent(panel)}.${ending}?member=${member}&step=${step}${also(more)}`,
  code: (key: string, panel: string, step: number, member: number, more: More = {}): string =>
    `/api/code/${at(key)}/${encodeURIComponent(panel)}?member=${member}&step=${step}${also(more)}`,
  sampleMatch: (key: string, other: string): string =>
    `/api/sample-match/${at(key)}?other=${encodeURIComponent(other)}`,
  kernelSamples: (key: string, quantity: string, other: string): string =>
    `/api/kernel-samples/${at(key)}/${at(quantity)}?other=${encodeURIComponent(other)}`,
  difference: (key: string, quantity: string, step: number, member: number, more: More): string =>
    `/api/difference/${at(key)}/${at(quantity)}/${step}?member=${member}${also(more)}`,
  frames: (key: string, quantity: string, steps: number[], member: number, kind: string, scale: string): string =>
    `/api/frames/${at(key)}/${at(quantity)}?kind=${kind}&member=${member}&scale=${scale}&steps=${steps.join(",")}`,
  claimFigure: (study: string, scale: string, name: string): string =>
    `/api/claim-figure/${at(study)}/${at(scale)}/${at(name)}`,
};

const shapeOf = (answer: Answer, fallback: number): number[] =>
  (answer.header("X-Shape") ?? String(fallback)).split(",").filter(Boolean).map(Number);

function readBlock(answer: Answer): Block {
  const values = new Float32Array(answer.bytes);
  return { values, shape: shapeOf(answer, values.length) };
}

export function readLevels(answer: Answer): Levels {
  const bytes = new Uint8Array(answer.bytes);
  const side = Math.round(Math.sqrt(bytes.length));
  const shape = shapeOf(answer, 0);
  const [rows, columns] = shape.length >= 2 ? shape.slice(-2) : [side, side];
  const fits = rows * columns === bytes.length;
  return {
    bytes,
    rows: fits ? rows : side,
    columns: fits ? columns : side,
    top: Number(answer.header("X-Top") ?? 1),
    signed: answer.header("X-Signed") === "1",
    clipped: answer.header("X-Clipped") === "1",
    stride: Number(answer.header("X-Stride") ?? 1),
    unit: Number(answer.header("X-Unit") ?? 1),
    bad: Number(answer.header("X-Bad") ?? 0),
  };
}

/** Runs of steps that fit into one answer each; the first are short, so that what is near comes soon. */
export function inBatches(steps: number[], each: number): number[][] {
  const most = Math.max(1, Math.min(MOST_FRAMES, Math.floor(BATCH / Math.max(each, 1))));
  const batches: number[][] = [];
  for (let at = 0, size = Math.min(4, most); at < steps.length; size = Math.min(2 * size, most)) {
    batches.push(steps.slice(at, at + size));
    at += size;
  }
  return batches;
}

interface FrameHead {
  step: number;
  error?: string;
}

/** A batch as the server packs it: length of the heads, heads as JSON, then the bodies, all in multiples of four bytes. */
export function splitFrames(packed: ArrayBuffer): (FrameHead & { answer?: Answer })[] {
  const length = new DataView(packed).getUint32(0, true);
  const heads = JSON.parse(new TextDecoder().decode(new Uint8Array(packed, 4, length))) as (FrameHead & {
    bytes?: number;
    headers?: Record<string, string>;
  })[];
  let at = 4 + length;
  return heads.map(({ step, error, bytes, headers }) => {
    if (bytes === undefined || !headers) return { step, error: error ?? "it could not be read" };
    const body = packed.slice(at, at + bytes); // a copy, so that memory is freed frame by frame
    at += bytes + ((4 - (bytes % 4)) % 4);
    return { step, answer: { bytes: body, header: (name) => headers[name] ?? null } };
  });
}

export class Library {
  readonly source: Source;
  readonly memory: Cache;
  readonly #under = new Map<string, Promise<unknown>>();
  readonly #waiting: (() => void)[] = [];
  #running = 0;

  constructor(source: Source, limit = MEMORY) {
    this.source = source;
    this.memory = new Cache(limit);
  }

  /** What is there already, without asking. */
  peek<T>(path: string): T | undefined {
    return this.memory.get(path) as T | undefined;
  }

  has(path: string): boolean {
    return this.memory.has(path);
  }

  async #get<T>(path: string, fetch: () => Promise<T>, bytes: (value: T) => number): Promise<T> {
    const known = this.memory.get(path) as T | undefined;
    if (known !== undefined) return known;
    const under = this.#under.get(path) as Promise<T> | undefined;
    if (under) return under;
    const asked = this.#inTurn(fetch).then((value) => {
      this.memory.set(path, value, bytes(value));
      return value;
    });
    this.#under.set(path, asked);
    return asked.finally(() => this.#under.delete(path));
  }

  async #inTurn<T>(fetch: () => Promise<T>): Promise<T> {
    if (this.#running >= AT_ONCE) await new Promise<void>((go) => this.#waiting.push(go));
    this.#running++;
    try {
      return await fetch();
    } finally {
      this.#running--;
      this.#waiting.shift()?.();
    }
  }

  /** The first answer may be on its way already: see EARLY in vite.config.ts. */
  async runs(): Promise<RunList> {
    const early = globalThis.unlazyEarly;
    globalThis.unlazyEarly = null;
    const answer = await early?.catch(() => null);
    return answer?.ok ? ((await answer.json()) as RunList) : this.source.json<RunList>("/api/runs");
  }
  run(key: string): Promise<RunInfo> {
    return this.source.json<RunInfo>(paths.run(key));
  }
  claims(): Promise<ClaimRow[]> {
    return this.#get(
      "/api/claims",
      () => this.source.json<ClaimRow[]>("/api/claims"),
      () => 0,
    );
  }
  text(path: string): Promise<string> {
    return this.source.bytes(path).then((answer) => new TextDecoder().decode(answer.bytes));
  }
  array(path: string, version?: string): Promise<Block> {
    return this.#get(
      path,
      async () => readBlock(await this.source.bytes(path, version)),
      (block) => block.values.byteLength,
    );
  }
  levels(path: string, version?: string): Promise<Levels> {
    return this.#get(
      path,
      async () => readLevels(await this.source.bytes(path, version)),
      (found) => found.bytes.byteLength,
    );
  }
  /** Several steps of a quantity in one answer; each is kept under the address that would have brought it alone. */
  async frames(
    path: string,
    single: (step: number) => string,
    isLevels: boolean,
    version?: string,
  ): Promise<FrameHead[]> {
    const { bytes } = await this.#inTurn(() => this.source.bytes(path, version));
    return splitFrames(bytes).map(({ step, error, answer }) => {
      if (answer && isLevels) {
        const value = readLevels(answer);
        this.memory.set(single(step), value, value.bytes.byteLength);
      } else if (answer) {
        const value = readBlock(answer);
        this.memory.set(single(step), value, value.values.byteLength);
      }
      return { step, error };
    });
  }
  sampleMatch(path: string): Promise<SampleMatch> {
    return this.#get(
      path,
      () => this.source.json<SampleMatch>(path),
      () => 0,
    );
  }
  kernelSamples(path: string): Promise<KernelSamples> {
    return this.#get(
      path,
      () => this.source.json<KernelSamples>(path),
      () => 0,
    );
  }
  spectrum(path: string): Promise<Spectrum> {
    return this.#get(
      path,
      () => this.source.json<Spectrum>(path),
      (found) => 8 * 50 * found.values.length,
    );
  }
  embedding(path: string): Promise<Embedding> {
    const fetch = async (): Promise<Embedding> => {
      const raw = await this.source.json<Omit<Embedding, "points"> & { points: string }>(path);
      return { ...raw, points: new Float32Array(fromBase64(raw.points)) };
    };
    return this.#get(path, fetch, (found) => found.points.byteLength);
  }
  /** A run that began anew under its old key. */
  anew(key: string): void {
    this.memory.forget(`/api/array/${at(key)}/`);
  }
  /** A run that trains on: answers over all its steps are out of date; the costly ones only when asked. */
  refresh(key: string, costly: boolean): void {
    for (const kind of costly ? ["levels", "embedding", "spectrum"] : ["levels"])
      this.memory.forget(`/api/${kind}/${at(key)}/`);
  }
}
