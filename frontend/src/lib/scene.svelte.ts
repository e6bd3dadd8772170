// What several panels derive from the same arrays: points, targets, output, path counts, half-spaces.

import { range } from "../panels/draw.ts";
import { unitsOf, unitsOfNeurons, type Unit } from "../panels/halfspaces.ts";
import { columnsOf, countsOf, ranksOf, type Column } from "./samples.ts";
import type { RunView, Shown } from "./run.svelte.ts";
import { studio } from "./studio.svelte.ts";
import type { Block } from "./types.ts";

const TAU = 2 * Math.PI;

export class Scene {
  readonly view: RunView;
  constructor(view: RunView) {
    this.view = view;
  }

  readonly kind = $derived.by(() => this.view.info?.probe.kind ?? "unknown");
  readonly points = $derived.by((): number[][] => {
    const shape = this.view.shape("probe_x");
    if (shape.length < 3 || shape.slice(2).reduce((a, b) => a * b, 1) !== 2) return [];
    const { value } = this.view.array("probe_x", 0);
    return value
      ? Array.from({ length: value.values.length / 2 }, (_, i) => [value.values[2 * i], value.values[2 * i + 1]])
      : [];
  });
  readonly angles = $derived.by((): number[] =>
    this.kind === "circle" ? this.points.map(([x, y]) => (Math.atan2(y, x) + TAU) % TAU) : [],
  );
  readonly target = $derived.by((): Float32Array | null => {
    if (!this.view.has("probe_y")) return null;
    const { value } = this.view.array("probe_y", 0);
    return value && value.values.length === this.points.length ? value.values : null;
  });
  readonly n = $derived.by(() => this.view.info?.probe.n ?? this.points.length);
  /** Two halves of the circle with their own frequencies: blue and orange. */
  readonly halves = $derived.by(() => this.kind === "circle" && !!this.view.info?.probe.frequencies);

  /** Least and largest path count over all frames; null while frames are missing. */
  readonly pathRange = $derived.by((): [number, number] | null => {
    const ends = this.view.frames("paths").map((block) => range(countsOf(block, this.view.info!)));
    return ends.length ? [Math.min(...ends.map(([low]) => low)), Math.max(...ends.map(([, high]) => high))] : null;
  });

  /** Whose half-spaces there are: gates with normals of their own (linear gating, batch-norm folded in), or first neurons. */
  readonly spaces = $derived.by((): "normals" | "neurons" | null =>
    this.view.has("normals") ? "normals" : this.view.has("neuron_biases") ? "neurons" : null,
  );
  /** The arrays that hold them. */
  readonly parts = $derived.by((): string[] =>
    this.spaces === "neurons" ? ["neurons", "neuron_norms", "neuron_biases"] : ["normals", "offsets"],
  );
  /** The array that says of which step they are. */
  readonly borders = $derived.by((): Shown<Block> | null =>
    this.spaces ? this.view.array(this.spaces === "normals" ? "normals" : "neuron_biases") : null,
  );
  /** [layers, width, inputs]. */
  readonly #sizes = $derived.by((): number[] => {
    const shape = this.spaces ? this.view.shape(this.spaces).slice(1) : [];
    return this.spaces === "neurons" ? [1, ...shape] : shape;
  });
  readonly layers = $derived.by(() => this.#sizes[0] ?? 0);
  readonly width = $derived.by(() => this.#sizes[1] ?? 0);
  readonly inputs = $derived.by(() => this.#sizes[2] ?? 0);
  readonly layer = $derived.by(() => {
    const asked = studio.place.query.layer;
    return asked === undefined
      ? Math.max(this.layers - 1, 0)
      : Math.min(Math.max(Math.trunc(Number(asked)) || 0, 0), Math.max(this.layers - 1, 0));
  });
  readonly chosen = $derived.by((): number | null => {
    if (studio.hoverUnit) return studio.hoverUnit.layer === this.layer ? studio.hoverUnit.unit : null;
    const asked = studio.place.query.unit;
    return asked === undefined ? null : Math.trunc(Number(asked)) || 0;
  });
  /** Every layer's units, for inputs in the plane; all their parts of the same step, else those shown last. */
  readonly units = $derived.by((): Unit[][] => {
    if (this.inputs !== 2) return [];
    if (this.spaces === "neurons") {
      const { value: biases, step } = this.borders!;
      const [neurons, norms] = ["neurons", "neuron_norms"].map((name) => this.view.array(name, step));
      const whole = biases && neurons.value && norms.value && neurons.step === step && norms.step === step;
      if (whole) this.#units = [unitsOfNeurons(neurons.value!.values, norms.value!.values, biases.values)];
      return this.#units;
    }
    const normals = this.view.array("normals");
    const offsets = this.view.has("offsets") ? this.view.array("offsets") : null;
    if (!normals.value || (offsets && (!offsets.value || offsets.step !== normals.step))) return this.#units;
    const [u, b] = [normals.value.values, offsets?.value?.values ?? null];
    this.#units = Array.from({ length: this.layers }, (_, layer) => unitsOf(u, b, layer, this.width));
    return this.#units;
  });
  #units: Unit[][] = [];

  /** Columns for panels that show one number per sample. */
  readonly bands = $derived.by((): Column[] => {
    const { probe } = this.view.info!;
    return columnsOf(probe, this.n || probe.labels?.length || 0);
  });
  /** Which colour the class of a sample has; null without classes. */
  readonly ranks = $derived.by((): number[] | null => {
    const labels = this.view.info?.probe.labels;
    if (!labels) return null;
    const rank = ranksOf(labels);
    return labels.map((label) => rank.get(label)!);
  });
}
