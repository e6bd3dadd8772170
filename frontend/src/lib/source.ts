// Where answers come from: the server that sent the page, the page itself (a one-file report), or files beside it (a static site).

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
    throw new Error("the server does not answer; is it still running (`unlazy studio`)?");
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
  base64?: string;
  file?: string; // or where the bytes are: so many of a file, from a place on
  at?: number;
  bytes?: number;
  headers?: Record<string, string>;
}

const MOST_FILES = 48; // of a site that stay in memory; the library keeps what was read from them

/** The address that stands for one about the samples of two runs: every pair over the same samples has the same answer. */
export function pairAddress(path: string, samples: Record<string, [string, string]>): string {
  const [place, other] = path.split("?other=");
  const [, api, kind, ...rest] = place.split("/").map(decodeURIComponent);
  if (other === undefined || !(kind === "sample-match" || kind === "kernel-samples")) return path;
  const name = kind === "kernel-samples" ? rest.splice(-1) : [];
  const [first, second] = [samples[rest.join("/")], samples[decodeURIComponent(other)]];
  if (!first || !second) return path;
  const pair = first[0] === second[0] ? first : [first[0], second[0]];
  const quoted = [api, kind, ...pair[0].split("/"), ...name].map(encodeURIComponent).join("/");
  return `/${quoted}?other=${encodeURIComponent(pair[1])}`;
}

/** Finds answers by the path that the page would ask the server for: inside the page, or in files of a site beside it. */
export class InlineSource implements Source {
  readonly live = false;
  readonly report: Report | null; // none for a site: it is the studio without its server
  readonly #content: Report;
  readonly #files = new Map<string, Promise<unknown>>();
  readonly #opened = new Set<string>(); // folders whose answers are known

  constructor(content: Report) {
    this.#content = content;
    this.report = content.site ? null : content;
  }
  /** The folder of the run that an address is about; a key may have slashes. */
  #folder(path: string): string | undefined {
    const parts = path.split("?")[0].split("/").slice(3).map(decodeURIComponent);
    for (let length = parts.length; length > 0; length--) {
      const found = this.#content.site?.runs[parts.slice(0, length).join("/")];
      if (found) return found;
    }
    return undefined;
  }
  /** A file of the site, asked for once while it is in memory. */
  #file<T>(name: string, read: (response: Response) => Promise<T>): Promise<T> {
    const known = (this.#files.get(name) as Promise<T> | undefined) ?? ask(name).then(read);
    this.#files.delete(name);
    this.#files.set(name, known);
    known.catch(() => this.#files.delete(name));
    if (this.#files.size > MOST_FILES) this.#files.delete(this.#files.keys().next().value!);
    return known;
  }
  #known(path: string): unknown {
    const { responses, site } = this.#content;
    return responses[site ? pairAddress(path, site.samples) : path];
  }
  async #find(path: string): Promise<unknown> {
    const folder = this.#known(path) === undefined ? this.#folder(path) : undefined;
    if (folder && path.startsWith("/api/run/")) return this.#file(`${folder}/facts.json`, (file) => file.json());
    if (folder && !this.#opened.has(folder)) {
      const answers = await this.#file<Record<string, unknown>>(`${folder}/answers.json`, (file) => file.json());
      Object.assign(this.#content.responses, answers);
      this.#opened.add(folder);
    }
    const found = this.#known(path);
    if (found === undefined)
      throw new Error("this part is not in this page; open the run with `unlazy studio` to see it");
    return found;
  }
  async #body(packed: Packed): Promise<ArrayBuffer> {
    if (packed.base64 !== undefined) return fromBase64(packed.base64);
    const { file = "", at = 0, bytes } = packed;
    const whole = await this.#file(file, (response) => response.arrayBuffer());
    return whole.slice(at, bytes === undefined ? undefined : at + bytes);
  }
  async json<T>(path: string): Promise<T> {
    const found = await this.#find(path);
    const packed = found as Partial<Packed>;
    if (typeof packed?.base64 === "string") return JSON.parse(new TextDecoder().decode(fromBase64(packed.base64))) as T;
    return found as T;
  }
  async bytes(path: string): Promise<Answer> {
    const packed = (await this.#find(path)) as Packed;
    const headers = new Map(Object.entries(packed.headers ?? {}).map(([name, value]) => [name.toLowerCase(), value]));
    return { bytes: await this.#body(packed), header: (name) => headers.get(name.toLowerCase()) ?? null };
  }
  has(path: string): boolean {
    return this.#known(path) !== undefined;
  }
  link(path: string): string | null {
    const packed = this.#known(path) as Partial<Packed> | undefined;
    if (!packed?.base64) return null;
    return `data:${packed.headers?.["Content-Type"] ?? "application/octet-stream"};base64,${packed.base64}`;
  }
  async post<T>(): Promise<T> {
    throw new Error("a page without a server cannot train; start `unlazy studio` for the playground");
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
