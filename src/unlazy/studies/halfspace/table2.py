"""ResNet-34 and ResNet-110 on CIFAR with soft and hard gates (Table 2; C24).

The gated networks of the paper have soft gates, so these are judged. The same networks with hard gates, and networks trained with
hard gates, are shown besides. Networks are compared if they share data, layout, recipe, epochs, rate and seed, and if both fit at
least 90 % of their training images: the paper's fit all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown, Vector
from unlazy.claims.functions import difference
from unlazy.models.folding import half_space_normals
from unlazy.models.image_net import GatedImageNet
from unlazy.runtime import StoreError
from unlazy.store import Run
from unlazy.studies.halfspace.image_networks import MAIN, MODELS, PLAIN, Network, load_network, measure, network_from
from unlazy.studies.halfspace.image_tables import (
    COLUMNS,
    accuracy_quantity,
    draw_accuracies,
    shown_accuracies,
    training_columns,
)
from unlazy.studies.study import Figure, Results, Settings, Study
from unlazy.studies.trainings import AS_TRAINED, HARD, is_finished

# --- what varies ---------------------------------------------------------------------------------------------

ALL_MODELS = ("relu", "dlgn-hard", "dlgn", "pwc-hard")
RELU_AND_HARD = ("relu", "dlgn-hard")
DATA_AND_LAYOUTS = tuple((data, layout) for data in ("cifar-10", "cifar-100") for layout in ("resnet-34", "resnet-110"))


@dataclass(frozen=True)
class Training:
    """Models that are trained in the same way on one data set and layout."""

    data: str
    layout: str
    epochs: int
    lr: float = 0.3
    models: tuple[str, ...] = ALL_MODELS
    recipe: str = MAIN


PAPER_TRAININGS = (
    # all four models, for the table
    Training("cifar-10", "resnet-34", 20),
    Training("cifar-100", "resnet-34", 20),
    Training("cifar-10", "resnet-110", 25),
    Training("cifar-100", "resnet-110", 25),
    # ReLU and hard gates: longer, shorter, at twice the rate
    Training("cifar-10", "resnet-34", 40, models=RELU_AND_HARD),
    Training("cifar-100", "resnet-34", 30, models=RELU_AND_HARD),
    Training("cifar-10", "resnet-110", 10, models=RELU_AND_HARD),
    Training("cifar-10", "resnet-110", 30, lr=0.6, models=RELU_AND_HARD),
    Training("cifar-10", "resnet-34", 15, models=("relu",)),
    *(Training(*place, 12, models=RELU_AND_HARD, recipe=PLAIN) for place in DATA_AND_LAYOUTS),
)
PAPER_SCALE: dict[str, Any] = {  # the paper's data and layouts
    "trainings": PAPER_TRAININGS,
    "lr": 0.3,  # the usual rate; figures name other rates
    "images": 50_000,
    "test_images": 10_000,
    "batch": 512,
    "width": 1.0,
    "augment": True,
    "hard_beta": 1.0,
    "normalised_gates": True,
}
TINY = PAPER_SCALE | {"augment": False, "hard_beta": 4.0, "normalised_gates": False}
DIGITS = {"trainings": (Training("digits", "tiny", 2, lr=0.05),), "lr": 0.05}
FEW_IMAGES = {"trainings": (Training("cifar-10", "tiny", 3, lr=0.1),), "lr": 0.1}
SCALES = {
    # seconds, on digits: shows that the study runs; no claim is judged
    "smoke": TINY | DIGITS | {"images": 300, "test_images": 100, "batch": 50},
    # minutes on two cores: too few images and epochs to judge anything
    "desk": TINY | FEW_IMAGES | {"images": 1500, "test_images": 1000, "batch": 64, "width": 2.0},
    "paper": PAPER_SCALE,
}


def cases(settings: Settings, seeds: Sequence[int]) -> list[Network]:
    """Every model of every training, seed by seed."""
    return [
        network_from(settings, one, model=model, seed=seed)
        for seed in seeds
        for one in settings.trainings
        for model in one.models
    ]


# --- what is claimed -----------------------------------------------------------------------------------------

LEAST_GAP, LARGEST_GAP = 3.5, 7.5  # C24: "about five to six points", read as one and a half more or less
FITTED = 90.0  # % of the training images that both networks of a pair fit when their training is done; in the paper 100


def longest_training(data: str, layout: str, models: Sequence[str], recipe: str = MAIN) -> dict[str, Any]:
    """The columns of the longest declared training that all these models share on a data set and layout."""
    shared = [
        (one.epochs, one.lr)
        for one in PAPER_TRAININGS
        if (one.data, one.layout, one.recipe) == (data, layout, recipe) and set(models) <= set(one.models)
    ]
    return {"data": data, "layout": layout, "recipe": recipe, **training_columns(max(shared))}


def relu_and_other(model: str, data: str, layout: str, gates: str = AS_TRAINED) -> tuple[Quantity, Quantity]:
    """Test accuracies of the ReLU network and of another model that was trained in the same way."""
    where = longest_training(data, layout, ("relu", model))
    return accuracy_quantity("relu", gates=gates, **where), accuracy_quantity(model, gates=gates, **where)


def points_outside(relu: Vector, dlgn: Vector, relu_train: Vector, dlgn_train: Vector) -> Vector:
    """How far the gap of two test accuracies lies outside the range; negative inside. NaN unless both trainings are done."""
    gap = relu - dlgn
    outside = np.maximum(LEAST_GAP - gap, gap - LARGEST_GAP)
    return np.where(np.minimum(relu_train, dlgn_train) >= FITTED, outside, np.nan)


def gap_part(data: str, layout: str) -> Part:
    """One part for a cell of the table: the gap between ReLU and soft gates lies in the range, once training is done."""
    where = longest_training(data, layout, ("relu", "dlgn"))
    fits = tuple(accuracy_quantity(model, "train", **where) for model in ("relu", "dlgn"))
    words = f"{data}, {layout}: how far ReLU less DLGN in test accuracy lies outside {LEAST_GAP:g} to {LARGEST_GAP:g} points"
    return Part(words, (*relu_and_other("dlgn", data, layout), *fits), by=points_outside, below=0, unit="points")


def shown_beside(data: str, layout: str) -> list[Shown]:
    """Gaps of hard gates, and every accuracy on one data set and layout."""
    gaps = {"DLGN": relu_and_other("dlgn", data, layout)}
    gaps |= {"soft DLGN made hard after training": relu_and_other("dlgn", data, layout, HARD)}
    gaps |= {MODELS[model]: relu_and_other(model, data, layout) for model in ("dlgn-hard", "pwc-hard")}
    found = [
        Shown(f"{data}, {layout}: ReLU above {words}", pair, by=difference, unit="points")
        for words, pair in gaps.items()
    ]
    for recipe, models in ((MAIN, ("relu", "dlgn", "dlgn-hard", "pwc-hard")), (PLAIN, RELU_AND_HARD)):
        where = {model: longest_training(data, layout, (model,), recipe) for model in models}
        found += shown_accuracies(models, f", {data}, {layout}, {recipe}", where)
    return found


CLAIMS = (
    Claim(
        "C24",
        says=(
            "Linearly gated versions of ResNet-34 and ResNet-110 lie about five to six points below the ReLU "
            "versions in test accuracy on CIFAR-10 and CIFAR-100."
        ),
        where="Table 2",
        paper="CIFAR-10 / CIFAR-100: 5.0 / 5.1 points (ResNet-34), 5.0 / 6.0 points (ResNet-110)",
        figure="table2_accuracies",
        parts=[gap_part(*place) for place in DATA_AND_LAYOUTS],
        shows=[shown for place in DATA_AND_LAYOUTS for shown in shown_beside(*place)],
    ),
)


# --- what is drawn -------------------------------------------------------------------------------------------

DRAWN_LAYERS = (0, 8, 20, 36, 56, 84, 108)


def draw_normals(results: Results) -> plots.Figure:
    """Normals of gates of a hard-gated ResNet-110 as pictures, one row a layer."""
    file = results.folder / "normals.npz"
    if file.exists():
        with np.load(file) as pictures:
            return draw_normal_images(dict(pictures))
    for folder in sorted(results.work.runs.glob("cifar-10-resnet-110-dlgn-hard-*")):
        run = Run(folder)
        if is_finished(folder) and run.header["recipe"]["training"]["epochs"] == 10:
            return draw_normal_images(gate_normals(load_network(run), DRAWN_LAYERS))
    raise StoreError(f"there are no normals in {file}, and no finished run of that network in {results.work.runs}.")


def gate_normals(net: GatedImageNet, layers: Sequence[int], count: int = 8, size: int = 32) -> dict[str, Any]:
    """Normals of the gates of the first channels at the middle position, by ``layer_N``; the largest entry of each is 1."""
    with torch.no_grad():
        signals = net.eval().pre_activations(torch.zeros(1, net.settings.channels, size, size))
    found = {}
    for layer in layers:
        height, width = signals[layer].shape[2:]
        units = [(channel, height // 2, width // 2) for channel in range(count)]
        pictures, _ = half_space_normals(net, layer, units, (size, size))
        scale = pictures.abs().amax((1, 2, 3), keepdim=True).clamp_min(1e-12)
        found[f"layer_{layer}"] = (pictures / scale).half().numpy()
    return found


def draw_normal_images(pictures: Mapping[str, Any]) -> plots.Figure:
    """Normals as images: one row per layer, one column per channel, grey for zero."""
    layers = sorted(int(name.removeprefix("layer_")) for name in pictures)
    figure, axes = plots.grid(len(layers), len(pictures[f"layer_{layers[0]}"]), (1.0, 1.0))
    for layer, line in zip(layers, axes, strict=True):
        for axis, normal in zip(line, pictures[f"layer_{layer}"].astype(np.float64), strict=True):
            axis.imshow(0.5 + 0.5 * normal.transpose(1, 2, 0) / (np.abs(normal).max() or 1), interpolation="nearest")
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(f"layer {layer + 1}", fontsize=8)
    return figure


STUDY = Study(
    name="table2",
    paper="half-space",
    scales=SCALES,
    seeds={"smoke": 1, "desk": 1, "paper": 3},
    cases=cases,
    measure=measure,
    columns=COLUMNS,
    claims=CLAIMS,
    figures=(
        Figure("table2_accuracies", "Accuracies of residual networks (Table 2)", draw_accuracies),
        Figure("table2_normals", "Half-spaces of a residual network", draw_normals, from_runs=True),
    ),
    needs_gpu=("paper",),
)
