// Numbers and names as people read them.

const DASH = "\u2013";
const minus = (text: string): string => text.replace(/^-/, "\u2212").replace("e-", "e\u2212");

/** Three significant digits, thousands grouped, a dash for what is missing. */
export function short(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || Number.isNaN(value)) return DASH;
  if (!Number.isFinite(value)) return value > 0 ? "\u221e" : "\u2212\u221e";
  const size = Math.abs(value);
  if (size < 1e-12) return "0"; // rounding error: no measure is so small
  if (size >= 1e7 || (size > 0 && size < 1e-4)) return minus(value.toExponential(Math.max(digits - 2, 0)));
  if (size >= 1000) return minus(Math.round(value).toLocaleString("en"));
  return minus(String(Number(value.toPrecision(digits))));
}

/** 1.5e6 for 1,500,000: few letters, whatever the size. */
export const powerOfTen = (value: number): string =>
  minus(
    value
      .toExponential(2)
      .replace(/\.?0+e/, "e")
      .replace("e+", "e"),
  );

/** Names of round numbers along an axis, with enough digits to tell neighbours apart. */
export function tickNames(values: (number | null)[]): (tick: number) => string {
  const [low, high, size] = values.reduce(
    ([least, most, largest], value) =>
      value === null || !Number.isFinite(value)
        ? [least, most, largest]
        : [Math.min(least, value), Math.max(most, value), Math.max(largest, Math.abs(value))],
    [Infinity, -Infinity, 0],
  );
  const digits = high > low ? Math.min(12, Math.max(3, 3 + Math.ceil(Math.log10(size / (high - low))))) : 3;
  return (tick) => short(tick, digits).replace(/\.?0+(?=e)/, "");
}

/** As the command line writes numbers: three digits, an exponent for small and for large ones. */
export function general(value: number): string {
  const [digits, power] = value.toExponential(2).split("e");
  const exponent = Number(power);
  if (value && (exponent < -4 || exponent >= 3))
    return minus(`${Number(digits)}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`);
  return minus(String(Number(value.toPrecision(3))));
}

/** A step of training in few letters: 950, 12.4k, 1.2M. */
export function stepName(step: number): string {
  if (step < 10000) return String(step);
  if (step < 1e6) return `${Number((step / 1e3).toPrecision(3))}k`;
  return `${Number((step / 1e6).toPrecision(3))}M`;
}

/** 0.995 is 99.5 %; only all is 100 %, only nothing is 0 %. */
export function percent(part: number): string {
  const rounded = (places: number): number => Number((100 * part).toFixed(places));
  const isExact = (places: number): boolean =>
    (rounded(places) < 100 || part >= 1) && (rounded(places) > 0 || part <= 0);
  for (const places of [0, 1, 2, 3]) {
    const close = places > 0 || (part > 0.01 && part < 0.99) || part <= 0 || part >= 1;
    if (close && isExact(places)) return minus(`${rounded(places)} %`);
  }
  return part > 0.5 ? "> 99.999 %" : "< 0.001 %";
}
export const degrees = (angle: number): string => `${Math.round((angle * 180) / Math.PI)}\u00b0`;
/** A group named by a bare number is a class. */
export const groupName = (name: string): string => (/^\d+$/.test(name) ? `class ${name}` : words(name));
/** A step as the timeline writes it: in epochs where their length is known. */
export const momentName = (step: number, perEpoch: number | null | undefined): string =>
  perEpoch ? String(Number((step / perEpoch).toFixed(step / perEpoch < 10 ? 2 : 0))) : stepName(step);

/** The same with its unit. */
export const momentWords = (step: number, perEpoch: number | null | undefined): string =>
  `${perEpoch ? "epoch" : "step"} ${momentName(step, perEpoch)}`;

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

const MOST_NUMBERS = 24;

/** Settings to read: indented, but a list of numbers on one line, and of a long one the beginning. */
export function settingsText(settings: unknown): string {
  return JSON.stringify(settings, null, 1).replace(/\[\s*-?[\d.][-+\d.e,\s]*\]/g, (list) => {
    const numbers = list
      .slice(1, -1)
      .split(",")
      .map((part) => part.trim());
    const shown = numbers.slice(0, MOST_NUMBERS).join(", ");
    return numbers.length > MOST_NUMBERS ? `[${shown}, \u2026 ${numbers.length} numbers]` : `[${shown}]`;
  });
}
