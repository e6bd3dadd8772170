// A memory of what was fetched, bounded in bytes: what was used longest ago goes first.

interface Held {
  value: unknown;
  bytes: number;
}

export class Cache {
  readonly #held = new Map<string, Held>(); // a Map keeps insertion order: the first is the oldest
  #bytes = 0;
  readonly limit: number;

  constructor(limit: number) {
    this.limit = limit;
  }

  get bytes(): number {
    return this.#bytes;
  }

  has(name: string): boolean {
    return this.#held.has(name);
  }

  get(name: string): unknown {
    const held = this.#held.get(name);
    if (!held) return undefined;
    this.#held.delete(name);
    this.#held.set(name, held);
    return held.value;
  }

  set(name: string, value: unknown, bytes: number): void {
    this.delete(name);
    this.#held.set(name, { value, bytes });
    this.#bytes += bytes;
    for (const oldest of this.#held.keys()) {
      if (this.#bytes <= this.limit || oldest === name) break;
      this.delete(oldest);
    }
  }

  delete(name: string): void {
    this.#bytes -= this.#held.get(name)?.bytes ?? 0;
    this.#held.delete(name);
  }

  /** Forget everything whose name begins so (a run that trains on has new answers). */
  forget(prefix: string): void {
    for (const name of [...this.#held.keys()]) if (name.startsWith(prefix)) this.delete(name);
  }
}
