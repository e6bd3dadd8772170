// Curves as a table that other programs read.

export interface Column {
  name: string;
  steps: number[];
  values: (number | null)[];
}

const quoted = (text: string): string => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

/** One row per step that any curve has; an empty cell where a curve has none. */
export function toCsv(columns: Column[]): string {
  const steps = [...new Set(columns.flatMap((column) => column.steps))].sort((a, b) => a - b);
  const found = columns.map((column) => new Map(column.steps.map((step, i) => [step, column.values[i]])));
  const rows = steps.map((step) => [step, ...found.map((values) => values.get(step) ?? "")].join(","));
  return [["step", ...columns.map((column) => quoted(column.name))].join(","), ...rows, ""].join("\n");
}

/** Hand a text to the reader as a file. */
export function download(name: string, text: string): void {
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
