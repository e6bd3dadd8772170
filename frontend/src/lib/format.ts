// Numbers and names as people read them.

const DASH = "\u2013";
const minus = (text: string): string => text.replace(/^-/, "\u2212").replace("e-", "e\u2212");

/** Three significant digits, thousands grouped, a dash for what is missing. */
export function short(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || Number.isNaN(value)) return DASH;
  if (!Number.isFinite(value)) return value > 0 ? "\u221e" : "\u2212\u221e";
  const size = Math.abs(value);
  if (size < 1e-12) return "0"; // nothing we measure is so small: it is rounding
  if (size >= 1e7 || (size > 0 && size < 1e-4)) return minus(value.toExponential(Math.max(digits - 2, 0)));
  if (size >= 1000) return minus(Math.round(value).toLocaleString("en"));
  return minus(String(Number(value.toPrecision(digits))));
}

/** A step of training in few letters: 950, 12.4k, 1.2M. */
export function stepName(step: number): string {
  if (step < 10000) return String(step);
  if (step < 1e6) return `${Number((step / 1e3).toPrecision(3))}k`;
  return `${Number((step / 1e6).toPrecision(3))}M`;
}

export const percent = (part: number): string => `${Math.round(100 * part)} %`;
export const degrees = (angle: number): string => `${Math.round((angle * 180) / Math.PI)}\u00b0`;
/** A group named by a bare number is a class. */
export const groupName = (name: string): string => (/^\d+$/.test(name) ? `class ${name}` : words(name));
/** `loss_top` -> `loss top`; the name stays recognisable. */
export const words = (name: string): string => name.replace(/_/g, " ");

export function bytesName(bytes: number): string {
  if (bytes < 1e3) return `${bytes} B`;
  return bytes < 1e6 ? `${Math.round(bytes / 1e3)} kB` : `${Math.round(bytes / 1e6)} MB`;
}

/** How long ago, roughly; the exact time belongs into a title. */
export function ago(started: string | null, now: number): string {
  const seconds = started ? (now - Date.parse(started)) / 1000 : NaN;
  if (Number.isNaN(seconds)) return DASH;
  const steps: [number, string][] = [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
  ];
  for (const [size, unit] of steps) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
  return "just now";
}
