"""The adaptive study (claims L1, L2, L3, L5, L7): both theorems against direct minimisation, and on networks and digits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unlazy import plots, runtime
from unlazy.claims.verdict import Part, Row, summary
from unlazy.kernels.regression import kernel_regression
from unlazy.models.build import build
from unlazy.models.spec import Init, relu_spec
from unlazy.runtime import require, stream
from unlazy.studies.registry import settings_of
from unlazy.studies.results import Progress, conclude, judged_row, table_of
from unlazy.studies.tangent.direct import least_over_factors, least_over_transformations
from unlazy.studies.tangent.images import twos_and_threes
from unlazy.theory.adaptive import Alternating, refactor, solve_structured, solve_unstructured
from unlazy.theory.penalties import Power
from unlazy.theory.tangent_layers import gram_of, tangent_layers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STUDY = "adaptive"
SQUARE = Power(2)
EQUAL, UNCHANGED, LOWER, NEVER_FALLS = 1e-6, 1e-6, 1.0, -1e-12
FLIPPED = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # shares of random labels: ever harder targets


@dataclass(frozen=True)
class Settings:
    """Seeds; ``images`` digits (2 against 3) of which half are fitted; width of the two hidden layers; rounds at most;
    ``starts`` of the search where nothing is convex."""

    seeds: int
    images: int
    width: int
    rounds: int
    starts: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require(isinstance(value, int) and value >= 1, f"{name} must be a whole number >= 1, got {value!r}.")


SCALES = {
    "smoke": Settings(seeds=2, images=24, width=8, rounds=10, starts=2),
    "desk": Settings(seeds=10, images=120, width=32, rounds=60, starts=4),
    "paper": Settings(seeds=20, images=250, width=64, rounds=200, starts=4),
}


def reproduce(
    scale: str, *, runs: Path, results: Path, seeds: int | None = None, workers: int = 1, progress: Progress
) -> dict[str, Any]:
    """Write ``results/adaptive/SCALE.json`` and its figures; nothing is trained by gradient descent."""
    settings = settings_of(SCALES, scale, seeds)
    table = table_of(STUDY, scale, asdict(settings), runtime.provenance("float64"))
    measured = []
    for seed in range(settings.seeds):
        measured.append(theorems(seed) | on_digits(settings, seed))
        progress("seeds", seed + 1, settings.seeds)
    table["values"] = {name: [one[name] for one in measured] for name in measured[0]}
    return conclude(table, claims, draw, results, progress)


def theorems(seed: int) -> dict[str, Any]:
    """Small random problems: the formula's value against a direct search, relative."""
    features, y = _normal(seed, "features", 4, 9), 2 * _normal(seed, "targets", 4)
    update = 1.5 * _normal(seed, "update", 3, 4)
    first = solve_unstructured(features @ features.T, y, SQUARE).value
    second = refactor(update, SQUARE, SQUARE).cost
    direct = least_over_transformations(features, y, seed), least_over_factors(update, seed)
    return {"theorem_1": abs(direct[0] / first - 1), "theorem_2": abs(direct[1] / second - 1)}


def on_digits(settings: Settings, seed: int) -> dict[str, Any]:
    """A network's tangent features on digits 2 (-1) and 3 (+1); half of the images are fitted, the others looked at."""
    x, y = twos_and_threes("digits", settings.images, torch.float64)
    half = len(x) // 2
    net = build(
        relu_spec(x.shape[1], 1, width=settings.width, depth=2, init=Init("he")), seed=seed, dtype=torch.float64
    )
    with torch.no_grad():
        rest = y - net(x)[:, 0]
    layers = tangent_layers(net, x)
    kernel = gram_of(layers)
    fitted, cross = kernel[:half, :half], kernel[half:, :half]
    free = solve_unstructured(fitted, rest[:half], SQUARE)
    adapted = free.kernel(fitted, free.fitted)
    new = kernel_regression(adapted, rest[:half, None], free.kernel(cross, free.predict(cross), free.fitted))[:, 0]
    plain = free.predict(cross)
    shown = tangent_layers(net, x[:half])
    fixed = solve_structured(shown, rest[:half])
    search = Alternating(rounds=settings.rounds, tolerance=1e-9)
    several = replace(search, starts=settings.starts, seed=seed)
    both = solve_structured(shown, rest[:half], left=SQUARE, right=SQUARE, search=several)
    ends = [series[-1] for series in both.objectives]
    one = solve_structured(shown, rest[:half], left=SQUARE, search=search)
    before, after = ([layer.effective_rank() for layer in found.layers[:-1]] for found in (fixed, both))
    return {
        "function_change": float((new - plain).norm() / plain.norm()),
        "rank_fixed": before,
        "rank_adapted": after,
        "rank_one_sided": [layer.effective_rank() for layer in one.layers[:-1]],
        "gap": float(one.gap or 0.0) / one.objective,
        "stationarity": both.stationarity,
        "starts_apart": max(ends) / min(ends) - 1,
        "rises": max(float(np.diff(series).max(initial=0.0)) for found in (one, both) for series in found.objectives),
        "error_fixed": _errors(fixed.predict(layers)[half:], net, x[half:], y[half:]),
        "error_adapted": _errors(both.predict(layers)[half:], net, x[half:], y[half:]),
    } | _harder(fitted, rest[:half], y[:half], seed)


def _harder(kernel: Tensor, rest: Tensor, y: Tensor, seed: int) -> dict[str, Any]:
    """Sizes ||beta|| and stretches s as ever more labels are turned round."""
    order = torch.randperm(len(y), generator=stream(seed, "flipped"))
    found = []
    for share in FLIPPED:
        turned = torch.zeros_like(y)
        chosen = order[: int(share * len(y))]
        turned[chosen] = -2 * y[chosen]
        found.append(solve_unstructured(kernel, rest + turned, SQUARE))
    return {"sizes": [one.size for one in found], "stretches": [one.stretch for one in found]}


def _errors(change: Tensor, net: torch.nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(((change + net(x)[:, 0]).sign() != y).double().mean())


def _normal(seed: int, name: str, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=stream(seed, "adaptive", name), dtype=torch.float64)


# --- judging ---------------------------------------------------------------------------------------


def claims(table: Mapping[str, Any]) -> list[Row]:
    """L1, L2, L3, L5, L7, from the table alone."""
    values = table["values"]
    before, after, one = (
        np.array(values[f"rank_{kind}"]) for kind in ("fixed", "adapted", "one_sided")
    )  # [seeds, layers]
    rises = np.array([_least_rise(*pair) for pair in zip(values["sizes"], values["stretches"], strict=True)])
    parts = {
        "L1": Part("formula against direct minimisation, relative", "<", EQUAL, "", np.array(values["theorem_1"])),
        "L2": Part(
            "change of the function on new digits, relative", "<", UNCHANGED, "", np.array(values["function_change"])
        ),
        "L3": Part("formula against direct minimisation, relative", "<", EQUAL, "", np.array(values["theorem_2"])),
        "L5": Part("effective rank, adapted over min-norm, worst layer", "<", LOWER, "", (after / before).max(1)),
        "L7": Part(
            "least rise of s as ||beta|| grows",
            ">",
            NEVER_FALLS,
            "",
            rises,
        ),
    }
    controls = {
        "L3": [
            summary("relative duality gap, one square factor a layer, digits", values["gap"]),
            summary("unexplained share of the gradient, two factors, digits", values["stationarity"]),
            summary("worst over best of several starts, minus 1, two factors, digits", values["starts_apart"]),
            summary("largest rise of the objective in the search", values["rises"]),
        ],
        "L5": [
            summary("with one square factor a layer instead of two, worst layer", (one / before).max(1)),
            summary("effective rank, min-norm, mean over hidden layers", before.mean(1)),
            summary("effective rank, adapted, mean over hidden layers", after.mean(1)),
            summary("error on new digits, min-norm", values["error_fixed"]),
            summary("error on new digits, adapted", values["error_adapted"]),
        ],
        "L7": [summary(f"stretch with {share:.0%} of the labels turned", column) for share, column in
               zip(FLIPPED, np.array(values["stretches"]).T, strict=True)],
    }  # fmt: skip
    whys = {
        "L1": "A quasi-Newton search over all transformations ends at the formula's value.",
        "L2": "The stretched direction is the fit itself, so the min-norm fit with adapted features is the old one.",
        "L3": "A quasi-Newton search over both factors of a given update ends at the effective penalty of its singular values.",
        "L5": "The effective penalty grows more slowly than the square: few large singular values cost less than many small.",
        "L7": "The larger the min-norm solution, the more a stretch of its direction saves.",
    }
    figures = {"L5": "ranks", "L7": "difficulty"}
    return [
        judged_row(
            table,
            name,
            [part],
            why=whys[name],
            controls=controls.get(name, ()),
            figure=figures.get(name),
        )
        for name, part in parts.items()
    ]


def _least_rise(sizes: list[float], stretches: list[float]) -> float:
    return float(np.diff(np.array(stretches)[np.argsort(sizes)]).min())


# --- drawing ---------------------------------------------------------------------------------------


def draw(table: Mapping[str, Any]) -> dict[str, Figure]:
    """Both figures by file name."""
    return {"ranks": ranks(table), "difficulty": difficulty(table)}


def ranks(table: Mapping[str, Any]) -> Figure:
    """Effective rank of every hidden layer's update, min-norm and adapted, a line a seed."""
    figure, axes = plots.grid(1, 1, (3.6, 2.8))
    axis, values = axes[0, 0], table["values"]
    kinds = (("fixed", "grey"), ("one_sided", "sky"), ("adapted", "blue"))
    places = np.arange(len(kinds))
    for layer, style in enumerate(("-", "--")):
        lines = np.array([np.array(values[f"rank_{kind}"])[:, layer] for kind, _ in kinds])
        axis.plot(places, lines, style, color=plots.COLOURS["grey"], linewidth=0.6, alpha=0.6)
        axis.plot(
            places,
            np.median(lines, 1),
            style,
            marker="o",
            color=plots.COLOURS["blue"],
            label=f"hidden layer {layer + 1}",
        )
    axis.set_xticks(places, ["min-norm\n(fixed features)", "one factor\na layer", "two factors\na layer"])
    axis.set(title="adaptation makes updates low rank", ylabel="effective rank of the update", ylim=(0, None))
    axis.legend()
    return figure


def difficulty(table: Mapping[str, Any]) -> Figure:
    """Stretch against size of the min-norm solution while labels are turned round."""
    figure, axes = plots.grid(1, 1, (3.6, 2.8))
    for sizes, stretches in zip(table["values"]["sizes"], table["values"]["stretches"], strict=True):
        axes[0, 0].plot(sizes, stretches, "o-", markersize=3, linewidth=0.8, color=plots.COLOURS["orange"], alpha=0.7)
    axes[0, 0].set(
        title="stretch while 0 to 50 % of labels are turned",
        xlabel="norm of the min-norm solution",
        ylabel="stretch s of the fitted direction",
    )
    return figure
