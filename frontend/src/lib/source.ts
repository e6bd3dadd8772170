// Where answers come from: the server that sent the page, or the page itself (a one-file report).

import type { Report } from "./types.ts";

export interface Answer {
  bytes: ArrayBuffer;
  header: (name: string) => string | null;
}

export type Listener = (kind: string, data: Record<string, unknown>) => void;

export interface Source {
  readonly live: boolean; // can it announce changes, and start a playground?
  readonly report: Report | null;
  json<T>(path: string): Promise<T>;
  bytes(path: string, version?: string): Promise<Answer>; // a version lets the browser keep the answer for ever
  has(path: string): boolean; // worth offering as a link?
  link(path: string): string | null; // an address for <a> and <img>
  post<T>(path: string, body: unknown): Promise<T>;
  events(listener: Listener): () => void;
}

/** The server's own words for what went wrong, else its status. */
async function complaint(response: Response): Promise<string> {
  const text = (await response.text().catch(() => "")).trim();
  try {
    const parsed = JSON.parse(text);
    return String(parsed.error ?? parsed.detail ?? text);
  } catch {
    return text && text.length < 400 && !text.startsWith("<") ? text : `${response.status} ${response.statusText}`;
  }
}

async function ask(path: string, options?: RequestInit): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(path.replace(/^\//, ""), options);
  } catch {
    throw new Error("the server does not answer; is `unlazy studio` still running?");
  }
  if (!response.ok) throw new Error(await complaint(response));
  return response;
}

export class ServerSource implements Source {
  readonly live = true;
  readonly report = null;
  readonly #listeners = new Set<Listener>();
  #stream: EventSource | null = null;

  async json<T>(path: string): Promise<T> {
    return (await ask(path)).json() as Promise<T>;
  }
  async bytes(path: string, version?: string): Promise<Answer> {
    const response = await ask(
      version ? `${path}${path.includes("?") ? "&" : "?"}v=${encodeURIComponent(version)}` : path,
    );
    return { bytes: await response.arrayBuffer(), header: (name) => response.headers.get(name) };
  }
  has(): boolean {
    return true;
  }
  link(path: string): string {
    return path.replace(/^\//, "");
  }
  async post<T>(path: string, body: unknown): Promise<T> {
    const headers = { "Content-Type": "application/json", "X-Unlazy": "1" };
    return (await ask(path, { method: "POST", headers, body: JSON.stringify(body) })).json() as Promise<T>;
  }
  /** One stream for the whole page, however many listen. */
  events(listener: Listener): () => void {
    this.#listeners.add(listener);
    this.#stream ??= this.#open();
    return () => {
      this.#listeners.delete(listener);
      if (this.#listeners.size) return;
      this.#stream?.close();
      this.#stream = null;
    };
  }
  #open(): EventSource {
    const stream = new EventSource("api/events");
    const tell = (kind: string) => (event: Event) => {
      const data = parsed((event as MessageEvent).data);
      for (const listener of this.#listeners) listener(kind, data);
    };
    for (const kind of ["run", "runs"]) stream.addEventListener(kind, tell(kind));
    return stream;
  }
}

const parsed = (text: string): Record<string, unknown> => {
  try {
    return JSON.parse(text) ?? {};
  } catch {
    return {};
  }
};

export function fromBase64(text: string): ArrayBuffer {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes.buffer;
}

interface Packed {
  base64: string;
  headers?: Record<string, string>;
}

/** Finds answers by the path that the page would ask the server for. */
export class InlineSource implements Source {
  readonly live = false;
  readonly report: Report;

  constructor(report: Report) {
    this.report = report;
  }
  #find(path: string): unknown {
    const found = this.report.responses[path];
    if (found === undefined) throw new Error("this part is not in the report; open the run in the studio to see it");
    return found;
  }
  async json<T>(path: string): Promise<T> {
    const found = this.#find(path);
    const packed = found as Partial<Packed>;
    if (typeof packed?.base64 === "string") return JSON.parse(new TextDecoder().decode(fromBase64(packed.base64))) as T;
    return found as T;
  }
  async bytes(path: string): Promise<Answer> {
    const packed = this.#find(path) as Packed;
    const headers = new Map(Object.entries(packed.headers ?? {}).map(([name, value]) => [name.toLowerCase(), value]));
    return { bytes: fromBase64(packed.base64), header: (name) => headers.get(name.toLowerCase()) ?? null };
  }
  has(path: string): boolean {
    return path in this.report.responses;
  }
  link(path: string): string | null {
    const packed = this.report.responses[path] as Partial<Packed> | undefined;
    if (!packed?.base64) return null;
    return `data:${packed.headers?.["Content-Type"] ?? "application/octet-stream"};base64,${packed.base64}`;
  }
  async post<T>(): Promise<T> {
    throw new Error("a report cannot train; start `unlazy studio` for the playground");
  }
  events(): () => void {
    return () => undefined;
  }
}

/** The report inside the page, if there is one. */
export function makeSource(page: Document): Source {
  const inline = page.getElementById("unlazy-inline")?.textContent?.trim();
  return inline ? new InlineSource(JSON.parse(inline) as Report) : new ServerSource();
}
