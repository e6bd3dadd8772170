"""The width check: a user's model at several widths, trained for a few steps, and how everything in it scales."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from unlazy import plots
from unlazy.runtime import InputError, require
from unlazy.scope.probe_set import Loss, parse_probe_set
from unlazy.scope.user_model import OutputChoice, preserve_random_streams
from unlazy.widths.measure import (
    NETWORK,
    MakeModel,
    MakeOptimiser,
    Sizes,
    Task,
    gradient_powers,
    measure_network,
)
from unlazy.widths.reading import BORDER, Deviation, Exponent, Multiplier, Reader, as_row, fit_exponents

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTHS = (64, 128, 256, 512)
EXPLANATIONS = {
    "NTK-like": "the function learns at every width, but its features move less and less: wide networks are lazy",
    "maximal-update-like": "function and features move by the same amount at every width: wide networks learn as narrow ones",
    "mean-field": "function and features move by the same amount at every width, from outputs of layers that vanish at the start",
    "blowing up": "something grows with the width: a learning rate that suits a narrow network is too large for a wide one",
    "dying": "the function moves less and less as the width grows",
    "cannot tell": "nothing moved, or no layer grows with the width",
}
PANELS = (
    ("activation", "start", "rms output at the start"),
    ("update", "end", "rms change of the output"),
    ("own_update", "first", "its change by the layer's own parameters, one step"),
    ("kernel_change", "end", "relative change of the tangent kernel"),
)


@dataclass(frozen=True)
class WidthCheck:
    """What a width check found; ``print(check)`` shows it.

    ``reading``: one word for the network. ``exponents``: by (quantity, layer, updates done). ``deviations``: layers that scale
    otherwise than the reading says. ``multipliers``: factors on rates and starts that would make it maximal-update.
    """

    widths: tuple[int, ...]
    seeds: int
    steps: int
    sizes: dict[int, list[Sizes]]
    powers: dict[str, float]

    @cached_property
    def exponents(self) -> dict[tuple[str, str, int], Exponent]:
        """Every exponent, by (quantity, layer, updates done)."""
        return fit_exponents(self.widths, self.sizes)

    @cached_property
    def reader(self) -> Reader:
        """What turns exponents into words."""
        narrow, wide = self.sizes[self.widths[0]][0], self.sizes[self.widths[-1]][0]
        return Reader(self.exponents, narrow, wide, self.steps)

    @property
    def reading(self) -> str:
        """NTK-like, maximal-update-like, mean-field, blowing up, dying or cannot tell."""
        return self.reader.reading()

    @property
    def layers(self) -> list[str]:
        """The layers that were called, in the order of their calls."""
        return self.sizes[self.widths[0]][0].layers

    @property
    def deviations(self) -> list[Deviation]:
        """The layers that scale otherwise than the reading says."""
        return self.reader.deviations()

    @property
    def multipliers(self) -> list[Multiplier]:
        """Factors on starts and rates that would make the network maximal-update."""
        return self.reader.multipliers(self.powers)[0]

    @cached_property
    def notes(self) -> list[str]:
        """What a reader of the numbers should know."""
        own = [note for column in self.sizes.values() for one in column for note in one.notes]
        found = [*dict.fromkeys(own), *self.reader.near_border(), *self.reader.multipliers(self.powers)[1]]
        if self.reading in ("maximal-update-like", "mean-field") and len(self.reader.features) == 1:
            found.append("With one hidden layer, maximal update and mean field are the same.")
        return found

    def rate_multipliers(self, width: int) -> dict[str, float]:
        """By parameter: what to multiply its learning rate with at this width, counted from the smallest width checked."""
        return self._factors("rate", width)

    def start_multipliers(self, width: int) -> dict[str, float]:
        """By parameter: what to multiply its starting values with at this width, counted from the smallest width checked."""
        return self._factors("start", width)

    def _factors(self, what: str, width: int) -> dict[str, float]:
        factors = dict.fromkeys(self.sizes[self.widths[0]][0].shapes, 1.0)
        for one in self.multipliers:
            if one.what == what:
                factors[one.parameter] = (width / self.widths[0]) ** one.exponent
        return factors

    def measured(self, quantity: str, layer: str, after: int) -> NDArray[np.float64]:
        """The measured sizes ``[widths, seeds]``; NaN where a network has none."""
        key = quantity, layer, after
        return np.array([[one.values.get(key, math.nan) for one in self.sizes[width]] for width in self.widths])

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {
            "reading": self.reading,
            "widths": list(self.widths),
            "seeds": self.seeds,
            "steps": self.steps,
            "border": BORDER,
            "roles": self.reader.roles,
            "deviations": [
                {**as_row(one.exponent), "what": one.what, "expected": one.expected} for one in self.deviations
            ],
            "multipliers": [
                {"parameter": one.parameter, "what": one.what, "exponent": one.exponent} for one in self.multipliers
            ],
            "exponents": [as_row(one) for one in self.exponents.values()],
            "notes": self.notes,
        }

    def __str__(self) -> str:
        last = self.steps
        lines = [f"{self.reading}: {EXPLANATIONS[self.reading]}.", ""]
        columns = {
            "start": ("activation", 0),
            "change, 1": ("update", 1),
            f"change, {last}": ("update", last),
            "own, 1": ("own_update", 1),
            f"own, {last}": ("own_update", last),
            "kernel": ("kernel", 0),
            f"K change, {last}": ("kernel_change", last),
        }
        wide = max(len(name) for name in (*self.layers, NETWORK)) + 2
        titles = "".join(f"{title:>14}" for title in columns)
        lines.append(f"exponents against width {', '.join(map(str, self.widths))} (median of {self.seeds} seeds)")
        lines.append(f"{'layer':{wide}}{'role':8}{titles}")
        for layer in self.layers:
            cells = "".join(f"{self._cell(quantity, layer, after):>14}" for quantity, after in columns.values())
            lines.append(f"{layer:{wide}}{self.reader.roles[layer]:8}{cells}")
        network = {"activation": "output", "update": "output_update"}
        cells = "".join(f"{self._cell(network.get(q, q), NETWORK, after):>14}" for q, after in columns.values())
        lines += [f"{NETWORK:{wide}}{'':8}{cells}", ""]
        lines += ["Layers that deviate:", *(f"  {one}" for one in self.deviations), ""] if self.deviations else []
        if self.multipliers:
            lines.append(f"For maximal updates, multiply by powers of width / {self.widths[0]}:")
            words = {"rate": "learning rate", "start": "starting values"}
            for one in self.multipliers:
                lines.append(f"  {words[one.what]} of {one.parameter}: width^{one.exponent:+.1f}")
            lines.append("")
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)]).rstrip()

    def _cell(self, quantity: str, layer: str, after: int) -> str:
        found = self.exponents.get((quantity, layer, after))
        return "-" if found is None or math.isnan(found.value) else f"{found.value:+.2f}"

    def draw(self, quantity: str = "update", after: int | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw the sizes of one quantity against the width, a line a layer, with exponents; returns the axes.

        ``after``: how many updates had been done; default all of them, and 0 for what is only measured at the start.
        """
        axes: Axes = plots.grid(1, 1, (4.6, 3.6))[1][0, 0] if ax is None else ax
        after = self.steps if after is None else after
        chosen = [layer for layer in (*self.layers, NETWORK) if (quantity, layer, after) in self.exponents]
        measured = ", ".join(sorted({f"{key[0]} after {key[2]}" for key in self.exponents}))
        require(bool(chosen), f"{quantity} after {after} updates is not measured; there are {measured}.")
        names = [name for name in plots.COLOURS if name != "black"]
        for place, layer in enumerate(chosen):
            values = self.measured(quantity, layer, after)
            values = np.where(np.isfinite(values) & (values > 0), values, np.nan)
            if np.isnan(values).all(axis=1).any():
                continue  # nothing to draw on a logarithmic axis
            label = f"{layer} {self.exponents[quantity, layer, after].value:+.2f}"
            colour = "black" if layer == NETWORK else names[place % len(names)]
            plots.draw_band(axes, np.array(self.widths), values, label, colour, marker="o", markersize=3)
        axes.set(xscale="log", yscale="log", xlabel="width")
        axes.set_xticks(self.widths, [str(width) for width in self.widths])
        axes.minorticks_off()
        plots.legend_below(axes)
        return axes

    def figure(self) -> plots.Figure:
        """A figure of four panels: outputs at the start, their changes, changes by own parameters, and kernel changes."""
        moments = {"start": 0, "first": 1, "end": self.steps}
        panels = [
            (quantity, moments[when], title)
            for quantity, when, title in PANELS
            if any(key[0] == quantity and key[2] == moments[when] for key in self.exponents)
        ]
        with plots.style():
            figure, axes = plots.grid(1, len(panels), (3.6, 3.8))
            for panel, (quantity, after, title) in zip(axes[0], panels, strict=True):
                self.draw(quantity, after, ax=panel)
                panel.set_title(title, fontsize=8)
            figure.suptitle(f"{self.reading}: exponents against width, {self.steps} steps, {self.seeds} seeds")
        return figure


def width_check(
    make_model: MakeModel,
    widths: Sequence[int] = WIDTHS,
    probe: Any = None,
    *,
    optimiser: Callable[..., torch.optim.Optimizer] | None = None,
    loss: Loss | None = None,
    output: OutputChoice | None = None,
    steps: int = 10,
    seeds: int = 3,
    kernels: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> WidthCheck:
    """How activations, their changes, the tangent kernel and the output scale with the width of a network.

    ``make_model(width)`` returns a new ``nn.Module`` each time; layers are matched by name. ``probe``: a pair ``(x, y)``; all
    networks are trained on it for ``steps`` full-batch updates. ``optimiser``: a function of the trainable parameters, or of
    (model, width) for rates that depend on the width; default ``torch.optim.SGD(parameters, 0.1)``. ``loss(out, y)``: by default
    cross-entropy for class numbers and squared error for real targets. ``output``: picks the tensor that counts of what the model
    returns. ``seeds``: networks of each width, started with seeds 0, 1, ... ``kernels=False`` leaves the tangent kernels out.

    >>> def make_model(width):
    ...     return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
    >>> x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    >>> check = width_check(make_model, (16, 64), (x, x[:, :1]), steps=2, seeds=1)
    >>> check.reading
    'blowing up'
    """
    require(probe is not None, "probe= is missing: a pair (x, y) of tensors, such as one batch of the training data.")
    sizes = tuple(sorted(widths))
    whole = all(isinstance(width, int) and width >= 1 for width in sizes)
    require(
        whole and len(set(sizes)) == len(sizes) >= 2,
        f"widths must be at least two different whole numbers, got {tuple(widths)}.",
    )
    require(steps >= 1 and seeds >= 1, f"steps and seeds must be at least 1, got {steps} and {seeds}.")
    task = Task(parse_probe_set(probe, loss=loss), _with_two_arguments(optimiser), steps, output, kernels)
    found: dict[int, list[Sizes]] = {width: [] for width in sizes}
    with preserve_random_streams():
        for done, (width, seed) in enumerate((width, seed) for width in sizes for seed in range(seeds)):
            found[width].append(measure_network(make_model, width, seed, task))
            if progress is not None:
                progress(done + 1, len(sizes) * seeds)
        powers = gradient_powers(make_model, sizes[0], task)
    names: list[set[str]] = [set(column[0].shapes) for column in found.values()]
    differ = sorted(name for name in set[str]().union(*names) if not all(name in known for known in names))
    require(
        not differ,
        f"layers are matched by name, but not every width has {', '.join(differ[:3])}; widen, do not deepen.",
    )
    narrow, wide = found[sizes[0]][0], found[sizes[-1]][0]
    grows = narrow.shapes != wide.shapes
    require(
        grows, f"make_model({sizes[0]}) and make_model({sizes[-1]}) have parameters of equal shapes; use the width."
    )
    return WidthCheck(sizes, seeds, steps, found, powers)


def _with_two_arguments(optimiser: Callable[..., torch.optim.Optimizer] | None) -> MakeOptimiser:
    """The optimiser as a function of model and width."""
    if optimiser is None:
        return lambda model, width: torch.optim.SGD(_trainable(model), 0.1)
    given = inspect.signature(optimiser).parameters.values()
    plain = [one for one in given if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one for one in plain if one.default is one.empty]
    if len(needed) == 2:
        return optimiser
    if len(plain) >= 1 and len(needed) <= 1:
        return lambda model, width: optimiser(_trainable(model))
    raise InputError(
        "optimiser is a function of the parameters, such as lambda parameters: torch.optim.Adam(parameters, 1e-3), or of "
        f"(model, width); got one of {len(needed)} arguments."
    )


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
