// Every unit of a network as a small disc: one row per layer, wrapped where a layer is wide.

import { TAU, text, type Theme, type Pen } from "./draw.ts";
import { openPart, unitColour, type Unit } from "./halfspaces.ts";

const LEFT = 22;
const CELL = 28;
export const MOST_UNITS = 2000; // discs drawn at once; more would be dust
const perRow = (canvas: number, width: number): number =>
  Math.max(1, Math.min(width, Math.floor((canvas - LEFT) / Math.min(CELL, Math.max(14, (canvas - LEFT) / width)))));
const cellOf = (canvas: number, width: number): number => Math.min(CELL, (canvas - LEFT) / perRow(canvas, width));
const linesOf = (canvas: number, width: number): number => Math.ceil(width / perRow(canvas, width));

export const discsHeight = (canvas: number, layers: number, width: number): number =>
  layers * (linesOf(canvas, width) * cellOf(canvas, width) + 4) + 4;

export function drawDiscs(
  pen: Pen,
  canvas: number,
  layers: Unit[][],
  chosenLayer: number,
  chosen: number | null,
  facing: boolean,
  theme: Theme,
): void {
  const width = layers[0]?.length ?? 0;
  const [cell, count, lines] = [cellOf(canvas, width), perRow(canvas, width), linesOf(canvas, width)];
  layers.forEach((units, layer) => {
    const top = layer * (lines * cell + 4) + 2;
    const here = layer === chosenLayer;
    if (here) {
      pen.fillStyle = theme.grid;
      pen.fillRect(0, top, LEFT + cell * count, lines * cell);
    }
    text(pen, theme, String(layer + 1), 10, top + cell / 2, {
      colour: here ? theme.ink : theme.quiet,
      base: "middle",
      weight: here ? 700 : "",
    });
    units.forEach((unit, i) => {
      const [cx, cy] = [LEFT + ((i % count) + 0.5) * cell, top + (Math.floor(i / count) + 0.5) * cell];
      pen.fillStyle = pen.strokeStyle = unitColour(unit, facing, theme);
      openPart(pen, cx, cy, cell * 0.39, unit);
      pen.fill();
      pen.lineWidth = here && chosen === i ? 2.5 : 0.8;
      pen.beginPath();
      pen.arc(cx, cy, cell * 0.39, 0, TAU);
      pen.stroke();
    });
  });
}

export function pickDisc(
  px: number,
  py: number,
  canvas: number,
  layers: number,
  width: number,
): { layer: number; unit: number } | null {
  const [cell, count, lines] = [cellOf(canvas, width), perRow(canvas, width), linesOf(canvas, width)];
  const block = lines * cell + 4;
  const layer = Math.floor((py - 2) / block);
  const [column, row] = [Math.floor((px - LEFT) / cell), Math.floor((py - 2 - layer * block) / cell)];
  const unit = row * count + column;
  const inside = layer >= 0 && layer < layers && column >= 0 && column < count && row < lines && unit < width;
  return inside ? { layer, unit } : null;
}
