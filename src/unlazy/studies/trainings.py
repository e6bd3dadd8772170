"""What studies share: trainings of stacks, run folders of other loops, image data, classifiers and their accuracies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from unlazy import runtime
from unlazy.data.dataset import Dataset
from unlazy.data.images import Images, load_images
from unlazy.models.gates import HardGate, SoftGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec, relu_spec
from unlazy.runtime import require, short_hash
from unlazy.store import Run, Writer
from unlazy.studies.study import Work
from unlazy.studies.table import Rows
from unlazy.training.ensemble import Member
from unlazy.training.fit import Recipe, fit
from unlazy.training.recorder import FixedSteps, Measure

Numbers = Mapping[str, NDArray[Any]]
AS_TRAINED, HARD = "as trained", "hard"
"""Values of the column ``gates``."""
EXPERTS = {"dlgn": "linear", "quadratic": "linear", "pwc": "constant", "pwc-hard": "constant"}
"""The kind of expert of each gated network."""


@dataclass(frozen=True)
class Training:
    """A stack to train, with its data and measures.

    ``key``: the first part of the name of its run folder. ``start``: the numbers it begins with, if it goes on from another run,
    and ``after``: the id of that run.
    """

    key: str
    recipe: Recipe
    data: Dataset
    measures: tuple[Measure, ...]
    start: Numbers | None = field(default=None, repr=False)
    after: str | None = None

    def __post_init__(self) -> None:
        require((self.start is None) == (self.after is None), "a start needs the id of the run it was taken from.")

    def folder(self, root: Path) -> Path:
        """The run folder ``KEY-ID``. The id is a hash of everything that decides the numbers, so other settings never collide."""
        settings = self.recipe.to_dict(self.data, self.measures)
        if self.after is not None:
            settings["after"] = self.after
        return root / f"{self.key}-{short_hash(settings)}"

    def run(self, work: Work) -> Run:
        """The finished run; an interrupted training is resumed."""
        about = {"study": work.study, "scale": work.scale, "progress": work.progress}
        return fit(self.recipe, self.data, self.measures, self.folder(work.runs), start=self.start, **about)  # type: ignore[arg-type]


def is_finished(folder: Path) -> bool:
    """Whether a run folder holds a finished training."""
    return (folder / "status.json").exists() and Run(folder).status()["state"] == "finished"


def stack_targets(sets: Sequence[Dataset]) -> Dataset:
    """One data set from several with the same inputs: member s of a stack learns the targets ``y[s]`` of ``y [S, n, o]``."""
    first = sets[0]
    require(all(torch.equal(one.x, first.x) for one in sets), "only data sets with the same inputs go side by side.")
    options = {"members": [dict(one.options) for one in sets]}
    return replace(first, y=torch.stack([one.y for one in sets]), options=options)


def final_values(run: Run, name: str) -> NDArray[np.float64]:
    """A scalar at the end of training, one number a member."""
    return run.scalars(name)[1][-1]


def seeds_in_recipe(seeds: Sequence[int]) -> int | list[int]:
    """How seeds are written in the recipe of a stack: as their number if they are 0, 1, 2, ..., as in earlier run folders."""
    return len(seeds) if list(seeds) == list(range(len(seeds))) else list(seeds)


def open_run(
    folder: Path, work: Work, members: Sequence[Member], *, recipe: Mapping[str, Any], **about: Mapping[str, Any]
) -> Writer:
    """Open the run folder of a training whose loop is the study's own. ``about``: the header's ``model`` and ``data``."""
    cuda = torch.device(work.device).type == "cuda"
    header = {
        "kind": "train",
        "study": work.study,
        "scale": work.scale,
        "recipe": recipe,
        "members": [member.to_dict() for member in members],
        **about,
        "provenance": runtime.provenance("float32", torch.cuda.get_device_name() if cuda else work.device),
    }
    return Writer(folder, header)


# --- data --------------------------------------------------------------------------------------------------


def centred_units(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Every row minus its mean, then divided by its length."""
    centred = x - x.mean(1, keepdim=True)
    return centred / centred.norm(dim=1, keepdim=True)


def twos_and_threes(
    name: str, count: int, dtype: torch.dtype = torch.float32, folder: Path | None = None
) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
    """The first digits 2 (-1) and 3 (+1) of a data set, each image minus its mean and of length 1."""
    images = load_images(name, folder=folder)
    images = images.take((images.labels == 2) | (images.labels == 3))
    require(1 <= count <= len(images), f"{name} has {len(images)} twos and threes, not {count}.")
    signs = 2.0 * (images.labels[:count] == 3).to(dtype) - 1
    return centred_units(images.flat()[:count].to(dtype)), signs


# --- classifiers ---------------------------------------------------------------------------------------------


def flat_dataset(images: Images, name: str) -> Dataset:
    """Images as standardised rows with one-hot classes."""
    return Dataset(name, images.flat(standardise=True), images.one_hot(), {}, {"split": images.split})


def classifier(network: str, data: Dataset, beta: float, **sizes: Any) -> NetSpec:
    """The ``relu`` network, or one of ``EXPERTS``, for these inputs and classes; with biases, PyTorch's default start."""
    inputs, classes = data.x.shape[-1], data.y.shape[-1]
    if network == "relu":
        return relu_spec(inputs, classes, **sizes)
    return NetSpec(
        inputs,
        classes,
        gating="quadratic" if network == "quadratic" else "linear",
        experts=EXPERTS[network],
        gate=HardGate(beta) if network == "pwc-hard" else SoftGate(beta),
        constant_input="one",
        **sizes,
    )


def classification(
    key: str,
    model: NetSpec,
    members: Iterable[Member],
    epochs: int,
    batch: int,
    data: Sequence[Dataset],
    at: Iterable[int],
) -> Training:
    """A training with cross-entropy; accuracies on ``data`` (training set, test set) are measured after the epochs ``at``."""
    train, test = data
    recipe = Recipe(model, tuple(members), epochs, batch, "cross-entropy", checkpoint_epochs=epochs)
    unit = recipe.steps_per_epoch(len(train))
    moments = FixedSteps.at(epoch * unit for epoch in at)
    measures = (Measure(accuracy_on_training_data, moments), Measure(accuracy_on_test_data, moments, test))
    return Training(key, recipe, train, measures)


def accuracy_on_training_data(model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
    """Share of right classes on the samples that are trained on, as trained and with hard gates."""
    return _accuracies("train", model, batch)


def accuracy_on_test_data(model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
    """Share of right classes on test samples, as trained and with hard gates."""
    return _accuracies("test", model, batch)


def _accuracies(split: str, model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
    with torch.no_grad():
        gates, wanted = model.gates(batch.x), batch.y.argmax(-1)
        outputs = {"as_trained": model.value(batch.x, gates), "hard_gates": model.value(batch.x, gates.hard())}
    return {f"{split}_{name}": (out.argmax(-1) == wanted).double().mean(-1) for name, out in outputs.items()}


def add_accuracies(rows: Rows, run: Run, **columns: Any) -> None:
    """Add ``accuracy`` at the end of training: columns ``split`` (train, test) and ``gates`` (as trained, hard)."""
    for split in ("train", "test"):
        for name, gates in (("as_trained", AS_TRAINED), ("hard_gates", HARD)):
            rows.add("accuracy", final_values(run, f"{split}_{name}"), split=split, gates=gates, at="end", **columns)
