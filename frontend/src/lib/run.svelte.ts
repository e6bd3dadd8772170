// One run as the panels see it: its facts, and its arrays at the step of the scrubber.

import { inBatches, paths } from "./library.ts";
import { ownNumbers, pageNumbers, SHARED, type Numbering } from "./marks.ts";
import { indexBefore, outward } from "./timeline.ts";
import { shownStep, stepsOf } from "./roles.ts";
import { studio } from "./studio.svelte.ts";
import type { Block, Embedding, Levels, RunInfo, Spectrum } from "./types.ts";

const PREFETCH_LIMIT = 192 * 2 ** 20;
const RELOAD_EVERY = 1000;
const COSTLY_EVERY = 10000; // milliseconds between maps and spectra of a run that trains on

export interface Shown<T> {
  value: T | undefined; // absent while it loads
  step: number; // the stored step it belongs to
  error: string | null;
  late?: boolean; // an older value stands in while the right one loads
}

/** The same run as it was at a step: what was stored later is left out. */
function upTo(info: RunInfo, last: number): RunInfo {
  const kept = (steps: number[]): number[] => steps.filter((step) => step <= last);
  const arrays = Object.entries(info.arrays).map(([name, array]) => [name, { ...array, steps: kept(array.steps) }]);
  return { ...info, steps: kept(info.steps), arrays: Object.fromEntries(arrays) };
}

export class RunView {
  readonly key: string;
  readonly memberName: string;
  info = $state.raw<RunInfo | null>(null);
  error = $state<string | null>(null);
  numbering = $state.raw<Numbering>(SHARED);
  done = $state(0);
  total = $state(0);
  #tick = $state(0);
  readonly #failed = new Map<string, string>();
  #prefetching = 0;
  #closed = false;
  #stop: () => void = () => undefined;
  #reload = 0;
  #asked = 0;
  #loading = 0;
  #flying = 0;
  #later = 0;
  #costly = performance.now();
  partial = false; // memory does not hold every frame: bring neighbours as the step moves
  readonly #held = new Map<string, { value: unknown; step: number }>(); // what each panel showed last

  constructor(key: string, memberName = "member") {
    this.key = key;
    this.memberName = memberName;
    void this.load();
    if (studio.library.source.live)
      this.#stop = studio.library.source.events((kind, data) => {
        if (kind !== "run" || data.key !== this.key) return;
        if (this.#playing && typeof data.step === "number") this.#extend(data.step);
        this.#soon();
      });
  }

  close(): void {
    this.#closed = true;
    this.#prefetching++;
    clearTimeout(this.#reload);
    this.#stop();
  }

  #soon(): void {
    if (this.#reload || this.#closed) return;
    const wait = Math.max(0, RELOAD_EVERY - (performance.now() - this.#asked));
    this.#reload = window.setTimeout(() => {
      this.#reload = 0;
      void this.load();
    }, wait);
  }

  get #playing(): boolean {
    return this.key.startsWith("~play/");
  }

  /** A playground announces steps faster than its facts are asked for again. */
  #extend(step: number): void {
    const info = this.info;
    const last = info?.steps.at(-1);
    if (!info || last === undefined || step <= last) return;
    if (this.#flying) {
      this.#later = step; // what is on its way comes first, steps in between are left out
      return;
    }
    const grown = (steps: number[]): number[] => (steps.at(-1) === last ? [...steps, step] : steps);
    const arrays = Object.fromEntries(
      Object.entries(info.arrays).map(([name, array]) => [name, { ...array, steps: grown(array.steps) }]),
    );
    this.info = { ...info, arrays, steps: [...info.steps, step] };
  }

  async load(): Promise<void> {
    this.#asked = performance.now();
    const turn = ++this.#loading;
    try {
      let info = await studio.library.run(this.key);
      if (this.#closed || turn !== this.#loading) return; // a later question will have a newer answer
      const before = this.info;
      const last = before?.steps.at(-1);
      if (this.#playing && this.#flying && last !== undefined) {
        this.#later = info.steps.at(-1) ?? 0; // the frame on its way is drawn before a newer one is asked for
        info = upTo(info, last);
      }
      const changed = before && (before.version !== info.version || before.steps.length !== info.steps.length);
      if (changed) {
        const costly = !info.live || performance.now() - this.#costly > COSTLY_EVERY;
        studio.library.refresh(this.key, costly);
        if (costly) this.#costly = performance.now();
      }
      this.error = null;
      this.info = info;
    } catch (error) {
      this.error = error instanceof Error ? error.message : String(error);
    }
  }

  // derived: readers update only when these change, not at every change of the address
  readonly live = $derived.by(() => this.info?.live ?? this.info?.status.state === "running");
  readonly members = $derived.by((): number => this.info?.header.members?.length || 1);
  readonly member = $derived.by((): number => {
    const asked = studio.place.query[this.memberName];
    const chosen = asked === undefined ? (this.info?.default_member ?? 0) : Math.trunc(Number(asked)) || 0;
    return Math.min(Math.max(chosen, 0), this.members - 1);
  });
  readonly steps = $derived.by((): number[] => this.info?.steps ?? []);
  /** The stored step nearest before the one in the address; without one the last, which a live run follows. */
  readonly step = $derived.by((): number => {
    const asked = studio.place.query.step;
    if (asked === undefined) return this.steps.at(-1) ?? 0;
    return this.steps[indexBefore(Number(asked) || 0, this.steps)] ?? 0;
  });

  /** Samples of this run that are marked. */
  readonly marks = $derived.by((): number[] => ownNumbers(this.numbering, studio.marksOf(this.numbering.key)));
  /** The pointer is on these samples, or on none. */
  point(samples: number[] | null): void {
    const { key } = this.numbering;
    studio.hover = samples && { key, samples: pageNumbers(this.numbering, samples) };
  }
  /** What the pointer is on stays marked. */
  keepMarks(): void {
    const { hover } = studio;
    if (hover?.key === this.numbering.key) studio.set({ [hover.key]: [...new Set(hover.samples)].join(",") });
  }

  /** Every frame that was asked for has arrived. */
  readonly complete = $derived.by((): boolean => !this.live && this.total > 0 && this.done >= this.total);

  /** All frames of an array once everything has arrived, for scales that stay put; before that none. */
  frames(name: string): Block[] {
    if (!this.complete) return [];
    const found = this.stepsOf(name).map((step) =>
      studio.library.peek<Block>(paths.array(this.key, name, step, this.member)),
    );
    return found.every((block) => block !== undefined) ? found : [];
  }

  has(name: string): boolean {
    return !!this.info?.arrays[name];
  }
  stepsOf(name: string): number[] {
    const info = this.info?.arrays[name];
    return info ? stepsOf(info, this.member) : [];
  }
  shape(name: string): number[] {
    return this.info?.arrays[name]?.shape ?? [];
  }

  #show<T>(path: string, step: number, fetch: () => Promise<T>, holder?: string): Shown<T> {
    const value = studio.library.peek<T>(path);
    const error = this.#failed.get(path) ?? null;
    if (value !== undefined && holder) this.#held.set(holder, { value, step });
    if (value !== undefined || error !== null) return { value, step, error };
    void this.#tick; // only views that still wait update when something arrives
    if (!this.#closed) void this.#bring(path, fetch);
    const held = holder ? this.#held.get(holder) : undefined;
    return held ? { value: held.value as T, step: held.step, error, late: true } : { value, step, error };
  }

  async #bring(path: string, fetch: () => Promise<unknown>): Promise<void> {
    this.#flying++;
    try {
      await fetch();
    } catch (error) {
      this.#failed.set(path, error instanceof Error ? error.message : String(error));
    }
    this.#flying--;
    this.#tick++;
    if (!this.#flying && this.#later && !this.#closed) this.#extend(this.#later);
  }

  #absent<T>(name: string): Shown<T> {
    return { value: undefined, step: 0, error: `this run holds no ${name}` };
  }

  array(name: string, at = this.step): Shown<Block> {
    const step = shownStep(this.stepsOf(name), at);
    if (step === undefined) return this.#absent(name);
    const path = paths.array(this.key, name, step, this.member);
    return this.#show(
      path,
      step,
      () => studio.library.array(path, this.info?.version),
      at === this.step ? `array ${name} ${this.member}` : undefined,
    );
  }

  levels(name: string, at = this.step): Shown<Levels> {
    const step = shownStep(this.stepsOf(name), at);
    if (step === undefined) return this.#absent(name);
    const path = paths.levels(this.key, name, step, this.member, studio.place.query.scale === "step" ? "step" : "all");
    return this.#show(
      path,
      step,
      () => studio.library.levels(path, this.info?.version),
      `levels ${name} ${this.member}`,
    );
  }

  spectrum(name: string): Shown<Spectrum> {
    const path = paths.spectrum(this.key, name, this.member);
    return this.#show(path, 0, () => studio.library.spectrum(path), `spectrum ${name} ${this.member}`);
  }

  embedding(name: string): Shown<Embedding> {
    const path = paths.embedding(this.key, name, this.member);
    return this.#show(path, 0, () => studio.library.embedding(path), `embedding ${name} ${this.member}`);
  }

  /** Bring every frame of these arrays, nearest first; stops when called again or when memory would not hold them. */
  async prefetch(levels: string[], arrays: string[]): Promise<void> {
    const turn = ++this.#prefetching;
    const { info } = this;
    if (!info) return;
    const scale = studio.place.query.scale === "step" ? "step" : "all";
    const named = [...levels.map((name) => [name, true] as const), ...arrays.map((name) => [name, false] as const)];
    const courses = named.map(([name, isLevels]) => this.#course(info, name, isLevels, scale));
    const bytes = courses.reduce((sum, course) => sum + course.each * course.steps.length, 0);
    const share = Math.min(1, PREFETCH_LIMIT / Math.max(bytes, 1));
    this.partial = share < 1;
    for (const course of courses) course.steps = course.steps.slice(0, Math.ceil(course.steps.length * share));
    this.total = courses.reduce((sum, course) => sum + course.steps.length, 0);
    this.done = 0;
    const batches = courses.flatMap((course) =>
      inBatches(course.steps, studio.library.source.live ? course.each : Infinity).map((steps, away) => ({
        course,
        steps,
        away,
      })),
    );
    batches.sort((p, q) => p.away - q.away);
    const queue = batches[Symbol.iterator]();
    const worker = async (): Promise<void> => {
      for (const { course, steps } of queue) {
        if (turn !== this.#prefetching) return;
        const missing = steps.filter(
          (step) => !studio.library.has(course.path(step)) && !this.#lost(course.path(step)),
        );
        if (missing.length > 1) await this.#bringMany(course, missing, info.version);
        for (const step of missing)
          if (turn === this.#prefetching && !studio.library.has(course.path(step)) && !this.#lost(course.path(step)))
            await this.#bring(course.path(step), () => course.fetch(step));
        if (turn === this.#prefetching) this.done += steps.length;
      }
    };
    await Promise.all([worker(), worker(), worker()]);
  }

  #lost(path: string): boolean {
    return this.#failed.has(path);
  }

  /** All steps of one quantity, nearest to the shown one first. */
  #course(info: RunInfo, name: string, isLevels: boolean, scale: string): Course {
    const { member, key } = this;
    const stored = stepsOf(info.arrays[name], member);
    const size = info.arrays[name].shape.slice(1).reduce((a, b) => a * b, 1);
    const path = (step: number): string =>
      isLevels ? paths.levels(key, name, step, member, scale) : paths.array(key, name, step, member);
    return {
      isLevels,
      steps: outward(indexBefore(this.step, stored), stored.length).map((at) => stored[at]),
      each: isLevels ? Math.min(size, 1e6) : 4 * size,
      path,
      batch: (steps) => paths.frames(key, name, steps, member, isLevels ? "levels" : "array", scale),
      fetch: (step) =>
        isLevels ? studio.library.levels(path(step), info.version) : studio.library.array(path(step), info.version),
    };
  }

  async #bringMany(course: Course, steps: number[], version?: string): Promise<void> {
    try {
      const frames = await studio.library.frames(course.batch(steps), course.path, course.isLevels, version);
      for (const { step, error } of frames) if (error) this.#failed.set(course.path(step), error);
    } catch {
      return; // what is missing is asked for one by one
    }
    this.#tick++;
  }
}

interface Course {
  isLevels: boolean;
  steps: number[];
  each: number; // bytes of one step
  path: (step: number) => string;
  batch: (steps: number[]) => string;
  fetch: (step: number) => Promise<unknown>;
}
