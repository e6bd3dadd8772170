"""F2: the exclusive-or of several inputs, learned by DLGNs and, as controls, by ReLU nets, quadratic gates and a forest."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.data.dataset import Dataset
from unlazy.data.interactions import Interaction
from unlazy.runtime import Unsupported
from unlazy.scope.schedule import Fixed
from unlazy.scope.scope import Measure
from unlazy.store import Run
from unlazy.studies.halfspace.failures.settings import FOREST, Interactions, classifier
from unlazy.studies.results import plain
from unlazy.studies.trainings import (
    ACCURACIES,
    Training,
    accuracy_on_test_data,
    accuracy_on_training_data,
    last,
    side_by_side,
)
from unlazy.training.ensemble import Member
from unlazy.training.fit import Recipe


def trainings(settings: Interactions) -> list[Training]:
    """One stack per problem and kind of network: all orders and seeds train together on the same inputs."""
    return [_training(settings, *problem, kind) for problem in settings.problems for kind in settings.kinds]


def key(law: str, n: int, kind: str) -> str:
    return f"xor-{law}-{n}-{kind.replace(' ', '-')}"


def _training(settings: Interactions, law: str, n: int, kind: str) -> Training:
    spec = classifier(kind, settings.inputs, 2, settings.width, settings.depth, settings.beta)
    members = tuple(Member(seed, settings.lr) for _ in settings.orders for seed in range(settings.seeds))
    unit = -(-n // settings.batch)
    epochs = -(-settings.updates // unit)
    recipe = Recipe(spec, members, epochs, settings.batch, "cross-entropy", checkpoint_epochs=epochs)
    moments = Fixed.at({0, epochs // 2 * unit, epochs * unit})
    measures = (
        Measure(accuracy_on_training_data, moments),
        Measure(accuracy_on_test_data, moments, side_by_side(data_sets(settings, law, n, "test"))),
    )
    return Training(key(law, n, kind), recipe, side_by_side(data_sets(settings, law, n, "train")), measures)


def data_sets(settings: Interactions, law: str, n: int, split: str) -> list[Dataset]:
    """Every order and seed; a seed also draws which coordinates are relevant."""
    return [
        Interaction(n if split == "train" else settings.tests, settings.inputs, order, law, choice=seed).dataset(split)
        for order in settings.orders
        for seed in range(settings.seeds)
    ]


def measure(settings: Interactions, run: Run) -> dict[str, Any]:
    """``values[name][order][seed]``."""
    values = {name: last(run, name) for name in ACCURACIES}
    values["test_half_time"] = run.scalars("test_as_trained")[1][-2]
    shape = (len(settings.orders), settings.seeds)
    return {"run": run.id, "values": {name: plain(value.reshape(shape)) for name, value in values.items()}}


def forest(settings: Interactions, law: str, n: int) -> dict[str, Any]:
    """The same of a random forest: greedy splits, no gradient, no half-spaces that are not along an axis."""
    splits = [data_sets(settings, law, n, split) for split in ("train", "test")]
    found = [_forest(settings.trees, train, test) for train, test in zip(*splits, strict=True)]
    values = np.array(found).reshape(len(settings.orders), settings.seeds, 2)
    return {"values": {"train_as_trained": plain(values[..., 0]), "test_as_trained": plain(values[..., 1])}}


def _forest(trees: int, train: Dataset, test: Dataset) -> tuple[float, float]:
    try:
        from sklearn.ensemble import RandomForestClassifier
    except ImportError:
        raise Unsupported(FOREST, "scikit-learn is not installed", "pip install scikit-learn.") from None
    model = RandomForestClassifier(trees, random_state=int(train.options["choice"]), n_jobs=1)
    model.fit(train.x.numpy(), _classes(train))
    scores = [float(np.mean(model.predict(data.x.numpy()) == _classes(data))) for data in (train, test)]
    return scores[0], scores[1]


def _classes(data: Dataset) -> NDArray[np.int64]:
    return data.y.argmax(-1).numpy()
