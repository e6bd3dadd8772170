"""How much each training point bends the tangent kernel: a measure of how far features must change to fit it.

Bending is the adapted kernel's diagonal over its value at the start, point by point (adaptive tangent paper, Figure 3). For a
network before training, the adapted kernel is that of the structured solution for the given labels. For a trained network, it
is that of its tangent features, averaged along its way from the start.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from unlazy.kernels.averaged_tangents import ParameterPath, averaged_diagonal
from unlazy.kernels.capture import Inputs, call_model, evaluation_mode, sample_count, take_samples
from unlazy.kernels.tangent import tangent_diagonal
from unlazy.runtime import require
from unlazy.theory.adaptive_model import AdaptiveTangents
from unlazy.theory.adaptive_solutions import AlternatingSearch
from unlazy.theory.penalties import Penalty, Power

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 10
BLUE, ORANGE = "#0072b2", "#e69f00"


@dataclass(frozen=True)
class Difficulty:
    """One row a training point: its kernel value at the ``start``, the ``adapted`` one, and its label in words."""

    start: Float[Tensor, "n"]
    adapted: Float[Tensor, "n"]
    labels: tuple[str, ...]

    @property
    def bending(self) -> Float[Tensor, "n"]:
        """adapted / start: 1 where features did not change, large at difficult points."""
        return self.adapted / self.start

    def hardest(self, count: int | None = None) -> Int64[Tensor, "k"]:
        """Numbers of the points with the largest bending, largest first."""
        return self.bending.argsort(descending=True, stable=True)[:count]

    def rows(self, count: int | None = None) -> list[dict[str, Any]]:
        """The table as plain rows, hardest first."""
        return [
            {
                "point": int(point),
                "label": self.labels[int(point)],
                "bending": float(self.bending[point]),
                "start": float(self.start[point]),
                "adapted": float(self.adapted[point]),
            }
            for point in self.hardest(count)
        ]

    def __str__(self) -> str:
        lines = [f"{'point':>8}  {'label':>8}  {'bending':>8}  {'start':>10}  {'adapted':>10}"]
        lines += [
            f"{row['point']:8d}  {row['label']:>8}  {row['bending']:8.3f}  {row['start']:10.4g}  {row['adapted']:10.4g}"
            for row in self.rows(SHOWN)
        ]
        low, middle, high = self.bending.double().quantile(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)).tolist()
        return "\n".join([*lines, f"{len(self.start)} points: least {low:.3f}, median {middle:.3f}, most {high:.3f}"])

    def draw(self, axes: Axes, marked: Sequence[int] = ()) -> None:
        """Plot the bending of all points, hardest first; ``marked`` points get a dot."""
        order = self.hardest()
        values = self.bending[order].tolist()
        axes.plot(range(1, len(values) + 1), values, color=BLUE)
        places = [place for place, point in enumerate(order.tolist()) if point in set(marked)]
        axes.plot([place + 1 for place in places], [values[place] for place in places], "o", markersize=4, color=ORANGE)
        axes.set(xscale="log", xlabel="points, hardest first", ylabel="adapted over original kernel value")

    def figure(self, marked: Sequence[int] = ()) -> Figure:
        """``draw`` on a figure of its own."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.4, 3.0), layout="constrained")
        self.draw(figure.subplots(), marked)
        return figure


def difficulty(
    model: nn.Module,
    x: Inputs,
    labels: Tensor,
    *,
    start: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
    parameters: str | Sequence[str] = "trainable",
    points: int = 20,
    left: Penalty | None = Power(2),  # noqa: B008  (frozen)
    right: Penalty | None = Power(2),  # noqa: B008
    ridge: float = 0.0,
    search: AlternatingSearch | None = None,
) -> Difficulty:
    """How much each training point bends the tangent kernel of ``model``: a table, hardest first, with a figure.

    ``labels``: a class a point ``[n]`` (whole numbers), or targets ``[n, outputs]``. Without ``start`` the model is taken as not
    yet trained, and the structured adaptive problem is solved for the labels (``left``, ``right``, ``ridge``, ``search`` as in
    ``AdaptiveTangents``; outputs times points rows). With ``start``, a state dict or the states of several checkpoints in order,
    the model has been trained from there: ``points`` tangent features on each straight piece of the way are averaged.

    >>> line = nn.Linear(1, 1)
    >>> line.load_state_dict({"weight": torch.zeros(1, 1), "bias": torch.zeros(1)})
    <All keys matched successfully>
    >>> table = difficulty(line, torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[2.0], [4.0], [6.1]]), ridge=0.1)
    >>> table.hardest(1).tolist()
    [2]
    """
    with evaluation_mode(model), torch.no_grad():
        outputs = call_model(model, take_samples(x, slice(0, 1))).shape[1]
    targets, words = _targets_and_words(labels, sample_count(x), outputs)
    if start is None:
        fitted = AdaptiveTangents(model, left=left, right=right, ridge=ridge, parameters=parameters, search=search)
        before, after = fitted.fit(x, targets).diagonals(x)
    else:
        states = [start] if isinstance(start, Mapping) else list(start)
        last = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        after = averaged_diagonal(model, ParameterPath([*states, last], points, "gauss"), x, parameters=parameters)
        before = _start_diagonal(model, states[0], x, parameters)
    still = bool((before > 0).all())
    require(still, "a point has no tangent feature at the start (its kernel value is 0): nothing can be compared.")
    return Difficulty(before, after, words)


def _start_diagonal(
    model: nn.Module, state: Mapping[str, Tensor], x: Inputs, parameters: str | Sequence[str]
) -> Float[Tensor, "n"]:
    first = copy.deepcopy(model)
    first.load_state_dict(dict(state), strict=False)
    return tangent_diagonal(first, x, parameters=parameters).double()


def _targets_and_words(labels: Tensor, n: int, outputs: int) -> tuple[Float[Tensor, "n o"], tuple[str, ...]]:
    """Targets and labels as words: one-hot rows minus their mean for classes (-1 and 1 for one output), or targets as given."""
    count = len(labels) if labels.ndim else 0
    require(count == n, f"{count} labels for {n} points.")
    if labels.is_floating_point():
        targets = labels.double().reshape(n, -1)
        require(targets.shape[1] == outputs, f"targets of {targets.shape[1]} columns for {outputs} outputs.")
        return targets, tuple(" ".join(f"{value:.3g}" for value in row) for row in targets[:, :3].tolist())
    require(labels.ndim == 1, f"classes must be one whole number a point, got shape {tuple(labels.shape)}.")
    classes = 2 if outputs == 1 else outputs
    inside = int(labels.min()) >= 0 and int(labels.max()) < classes
    require(inside, f"classes from {int(labels.min())} to {int(labels.max())}, but the model tells {classes} apart.")
    words = tuple(str(label) for label in labels.tolist())
    if outputs == 1:
        return 2.0 * labels.double()[:, None] - 1, words
    return nn.functional.one_hot(labels.long(), outputs).double() - 1 / outputs, words
