// The one state of the page: where we are (the address), the theme, what the pointer marks.

import type { Theme } from "../panels/draw.ts";
import { format, parse, withQuery, type Place } from "./address.ts";
import { Library } from "./library.ts";
import type { MarkKey } from "./marks.ts";
import { makeSource } from "./source.ts";

const THEME = "unlazy-theme";
const WRITE_EVERY = 150; // milliseconds; browsers refuse a flood of addresses

function storedTheme(): string | null {
  try {
    return localStorage.getItem(THEME);
  } catch {
    return null; // storage may be closed to local files
  }
}

function readTheme(dark: boolean): Theme {
  const style = getComputedStyle(document.documentElement);
  const value = (name: string): string => style.getPropertyValue(`--${name}`).trim();
  return {
    card: value("card"),
    ink: value("ink"),
    quiet: value("quiet"),
    grid: value("grid"),
    unit: value("unit"),
    accent: value("accent"),
    cool: value("cool"),
    warm: value("warm"),
    mixed: value("mixed"),
    coolTint: value("cool-tint"),
    warmTint: value("warm-tint"),
    sans: value("sans"),
    dark,
  };
}

class Studio {
  readonly library = new Library(makeSource(document));
  place = $state.raw<Place>(parse(location.hash));
  dark = $state(false);
  theme = $state.raw<Theme>({} as Theme);
  hover = $state.raw<{ key: MarkKey; samples: number[] } | null>(null); // samples under the pointer
  hoverUnit = $state.raw<{ layer: number; unit: number } | null>(null);
  helping = $state(false);
  timelineStep = $state<number | null>(null); // the step that the timeline shows
  #timer = 0;
  #written = 0;
  #seen = location.hash; // the address as last written or read

  constructor() {
    const system = matchMedia("(prefers-color-scheme: dark)");
    this.#wear(storedTheme() ? storedTheme() === "dark" : system.matches);
    system.addEventListener("change", () => storedTheme() ?? this.#wear(system.matches));
    addEventListener("hashchange", () => {
      this.#seen = location.hash;
      if (location.hash !== format(this.place)) this.place = parse(location.hash);
    });
    const { entry } = this.library.source.report ?? {};
    if (entry && !location.hash) this.place = parse(entry);
  }

  get report() {
    return this.library.source.report;
  }

  /** Samples to mark in every panel: what the pointer is on, else what the address keeps. */
  marksOf(key: MarkKey): number[] {
    if (this.hover?.key === key) return this.hover.samples;
    return (this.place.query[key] ?? "").split(",").filter(Boolean).map(Number);
  }

  #wear(dark: boolean): void {
    this.dark = dark;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    this.theme = readTheme(dark);
  }

  switchTheme(): void {
    this.#wear(!this.dark);
    try {
      localStorage.setItem(THEME, this.dark ? "dark" : "light");
    } catch {
      // the choice lasts as long as the page
    }
  }

  /** Another page: a new entry in the history. */
  go(place: Place): void {
    this.#flush();
    this.place = place;
    this.hover = this.hoverUnit = null;
    history.pushState(null, "", format(place));
    this.#seen = location.hash;
    scrollTo(0, 0);
  }

  /** The same page in another state: the entry is rewritten, at most a few times a second. */
  set(change: Record<string, string | number | null | undefined>): void {
    this.place = withQuery(this.place, change);
    clearTimeout(this.#timer);
    const wait = Math.max(0, WRITE_EVERY - (performance.now() - this.#written));
    if (wait) this.#timer = window.setTimeout(() => this.#flush(), wait);
    else this.#flush();
  }

  #flush(): void {
    clearTimeout(this.#timer);
    this.#written = performance.now();
    if (location.hash !== this.#seen) return; // a link was followed meanwhile; its address goes first
    const address = format(this.place);
    if (location.hash !== address) history.replaceState(null, "", address);
    this.#seen = location.hash;
  }

  /** A link that keeps nothing of the present state but what is named. */
  link(place: Partial<Place>): string {
    return format({ page: "runs", key: "", other: "", layer: 0, unit: 0, query: {}, ...place });
  }
}

export const studio = new Studio();
