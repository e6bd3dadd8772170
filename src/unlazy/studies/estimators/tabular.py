"""Half-space estimators on tables of numbers, against scikit-learn's: accuracy, rules, time (claims E1 to E4).

Every case is one data set and one seed. The seed draws the data (where they are drawn), the split into two thirds for training
and one third for testing, and the random numbers of every model. All models have default settings. Neural networks get
standardised columns and targets, as ours scale them inside. Times are processor times of one thread.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.estimators.half_space import HalfSpaceClassifier, HalfSpaceRegressor
from unlazy.runtime import threads
from unlazy.studies.study import Case, Figure, Results, Study, Work
from unlazy.studies.table import Rows

Vector = NDArray[np.float64]
OURS, NETWORK = "half-space", "mlp"
RANKED = (OURS, NETWORK, "boosting", "forest", "linear", "tree")  # tree: as many rules as our distilled ones
CLASSES = (
    "iris",
    "wine",
    "breast_cancer",
    "digits",
    "moons",
    "circles",
    "classification_easy",
    "classification_hard",
    "gaussian_quantiles",
    "hastie",
    "oblique_tree",
)
TARGETS = ("diabetes", "friedman1", "friedman2", "friedman3")
DATA = (*CLASSES, *TARGETS)
LARGE = (  # at least 1,000 rows for training at desk scale
    "digits",
    "moons",
    "circles",
    "classification_easy",
    "classification_hard",
    "gaussian_quantiles",
    "hastie",
    "oblique_tree",
    "friedman1",
    "friedman2",
    "friedman3",
)
KEPT = (0.95, 0.99)  # shares of the training score that distilled rules keep
PREDICTIONS = 5  # predictions whose shortest time counts


@dataclass(frozen=True)
class Settings:
    """``samples``: rows of every drawn data set, before the split. ``data``: the data sets."""

    samples: int = 1600
    data: tuple[str, ...] = DATA


# --- data ----------------------------------------------------------------------------------------------


def load_data(name: str, samples: int, seed: int) -> tuple[Vector, NDArray[Any]]:
    """Rows and targets of a data set; ``samples`` and ``seed`` matter for those that are drawn."""
    from sklearn import datasets

    drawn: dict[str, Callable[[], Any]] = {
        "moons": lambda: datasets.make_moons(samples, noise=0.25, random_state=seed),
        "circles": lambda: datasets.make_circles(samples, noise=0.1, factor=0.5, random_state=seed),
        "classification_easy": lambda: datasets.make_classification(samples, class_sep=2.0, random_state=seed),
        "classification_hard": lambda: datasets.make_classification(
            samples, n_informative=10, n_clusters_per_class=4, class_sep=0.7, flip_y=0.05, random_state=seed
        ),
        "gaussian_quantiles": lambda: datasets.make_gaussian_quantiles(
            n_samples=samples, n_features=5, n_classes=3, random_state=seed
        ),
        "hastie": lambda: datasets.make_hastie_10_2(samples, random_state=seed),
        "oblique_tree": lambda: draw_oblique_tree(samples, seed),
        "friedman1": lambda: datasets.make_friedman1(samples, noise=1.0, random_state=seed),
        "friedman2": lambda: datasets.make_friedman2(samples, noise=50.0, random_state=seed),
        "friedman3": lambda: datasets.make_friedman3(samples, noise=0.1, random_state=seed),
    }
    if name in drawn:
        x, y = drawn[name]()
    else:
        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return np.asarray(x, dtype=np.float64), np.asarray(y)


def draw_oblique_tree(
    samples: int, seed: int, size: int = 8, depth: int = 4, noise: float = 0.05
) -> tuple[Vector, NDArray[Any]]:
    """Gaussian rows labelled by a random tree whose questions are half-spaces; a share ``noise`` of the labels is turned."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(samples, size))
    normals = generator.normal(size=(2**depth - 1, size))
    node = np.zeros(samples, dtype=int)
    for _ in range(depth):
        node = 2 * node + 1 + ((x * normals[node]).sum(1) >= 0)
    y = (node - 2**depth + 1) % 2  # sisters differ, so that every question matters
    return x, np.where(generator.uniform(size=samples) < noise, 1 - y, y)


# --- measuring -----------------------------------------------------------------------------------------


def build_models(name: str, seed: int) -> dict[str, Any]:
    """The models that are compared, all but the tree, by name."""
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.ensemble import (
        HistGradientBoostingClassifier,
        HistGradientBoostingRegressor,
        RandomForestClassifier,
        RandomForestRegressor,
    )
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if name in CLASSES:
        return {
            OURS: HalfSpaceClassifier(random_state=seed),
            NETWORK: make_pipeline(StandardScaler(), MLPClassifier(random_state=seed)),
            "boosting": HistGradientBoostingClassifier(random_state=seed),
            "forest": RandomForestClassifier(random_state=seed),
            "linear": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
        }
    scaled = make_pipeline(StandardScaler(), MLPRegressor(random_state=seed))
    return {
        OURS: HalfSpaceRegressor(random_state=seed),
        NETWORK: TransformedTargetRegressor(scaled, transformer=StandardScaler()),
        "boosting": HistGradientBoostingRegressor(random_state=seed),
        "forest": RandomForestRegressor(random_state=seed),
        "linear": make_pipeline(StandardScaler(), Ridge()),
    }


def measure(case: Case, work: Work) -> Rows:
    """Score, log-loss, and times of every model on one split; rules of the distilled model and of trees with as many."""
    from sklearn.model_selection import train_test_split
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor
    from threadpoolctl import threadpool_limits

    rows, classes = Rows(), case.data in CLASSES
    x, y = load_data(case.data, case.samples, case.seed)
    parts = train_test_split(x, y, test_size=1 / 3, random_state=case.seed, stratify=y if classes else None)
    x_train, x_test, y_train, y_test = parts
    rows.add("training_rows", len(x_train))
    with threads(1), threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # networks that have not converged after their default number of epochs
        models = build_models(case.data, case.seed)
        for number, (name, model) in enumerate(models.items()):
            work.progress(number, len(models) + 1)
            _measure_model(rows, name, model, parts)
        for keep in KEPT:
            rules = models[OURS].distill(x_train, y_train, keep=keep)
            columns = {"model": "rules", "keep": keep}
            rows.add("score", rules.score(x_test, y_test), **columns)
            rows.add_all({"rules": len(rules), "literals": rules.literals, "reached": rules.reached}, **columns)
            kind = DecisionTreeClassifier if classes else DecisionTreeRegressor
            tree = kind(max_leaf_nodes=max(2, len(rules) + 1), random_state=case.seed)
            equal = {"model": "tree of equal rules", "keep": keep}
            if keep == KEPT[-1]:
                _measure_model(rows, "tree", tree, parts)
            else:
                tree.fit(x_train, y_train)
            rows.add("score", tree.score(x_test, y_test), **equal)
            rows.add_all({"rules": tree.get_n_leaves(), "literals": count_tree_literals(tree)}, **equal)
    return rows


def _measure_model(rows: Rows, name: str, model: Any, parts: list[Any]) -> None:
    """Fit, predict and score one model."""
    from sklearn.metrics import log_loss

    x_train, x_test, y_train, y_test = parts
    start = time.process_time()
    model.fit(x_train, y_train)
    rows.add("fit_seconds", time.process_time() - start, model=name)
    took = []
    for _ in range(PREDICTIONS):
        start = time.process_time()
        model.predict(x_test)
        took.append(time.process_time() - start)
    rows.add("predict_seconds", min(took), model=name)
    rows.add("score", model.score(x_test, y_test), model=name)
    if hasattr(model, "predict_proba"):
        rows.add("log_loss", log_loss(y_test, model.predict_proba(x_test), labels=model.classes_), model=name)


def count_tree_literals(tree: Any) -> int:
    """Conditions of all rules of a tree: the sum over its leaves of their depth."""
    inner = tree.tree_
    depths, total = [(0, 0)], 0
    while depths:
        node, depth = depths.pop()
        if inner.children_left[node] < 0:
            total += depth
        else:
            depths += [(int(inner.children_left[node]), depth + 1), (int(inner.children_right[node]), depth + 1)]
    return total


# --- claims --------------------------------------------------------------------------------------------

EQUAL = 1e-9  # "no worse" allows a tie


def _scores(data: tuple[str, ...]) -> tuple[Quantity, ...]:
    """The score of every ranked model on these data sets, data set by data set."""
    return tuple(Quantity("score", data=name, model=model) for name in data for model in RANKED)


def mean_ranks(*scores: Vector) -> Vector:
    """The mean rank of every model over the data sets, ``[models, seeds]``; the best model has rank 1, ties share."""
    table = np.array(scores).reshape(-1, 6, len(scores[0]))  # six models
    above = (table[:, None] > table[:, :, None]).sum(2)
    ties = (table[:, None] == table[:, :, None]).sum(2)
    return np.asarray((above + (ties + 1) / 2).mean(0))


def rank_less_network(*scores: Vector) -> Vector:
    """Our mean rank less that of the multi-layer perceptron."""
    found = mean_ranks(*scores)
    return np.asarray(found[0] - found[1])


def own_rank(*scores: Vector) -> Vector:
    """Our mean rank."""
    return np.asarray(mean_ranks(*scores)[0])


def network_rank(*scores: Vector) -> Vector:
    """The mean rank of the multi-layer perceptron."""
    return np.asarray(mean_ranks(*scores)[1])


def boosting_rank(*scores: Vector) -> Vector:
    """The mean rank of gradient boosting."""
    return np.asarray(mean_ranks(*scores)[2])


def forest_rank(*scores: Vector) -> Vector:
    """The mean rank of the random forest."""
    return np.asarray(mean_ranks(*scores)[3])


def linear_rank(*scores: Vector) -> Vector:
    """The mean rank of logistic or ridge regression."""
    return np.asarray(mean_ranks(*scores)[4])


def tree_rank(*scores: Vector) -> Vector:
    """The mean rank of the tree with as many rules as ours."""
    return np.asarray(mean_ranks(*scores)[5])


def _times(quantity: str) -> tuple[Quantity, ...]:
    """Our time and that of the multi-layer perceptron on the large data sets, one after the other."""
    return tuple(Quantity(quantity, data=name, model=model) for name in LARGE for model in (OURS, NETWORK))


def mean_ratio(*seconds: Vector) -> Vector:
    """Geometric mean over the data sets of our time over the perceptron's."""
    table = np.array(seconds).reshape(-1, 2, len(seconds[0]))
    return np.asarray(np.exp(np.log(table[:, 0] / table[:, 1]).mean(0)))


def largest_ratio(*seconds: Vector) -> Vector:
    """The largest ratio over the data sets of our time to the perceptron's."""
    table = np.array(seconds).reshape(-1, 2, len(seconds[0]))
    return np.asarray((table[:, 0] / table[:, 1]).max(0))


def _pairs(keep: float, data: tuple[str, ...]) -> tuple[Quantity, ...]:
    """Scores of the distilled rules and of the tree with as many, on these data sets."""
    models = ("rules", "tree of equal rules")
    return tuple(Quantity("score", data=name, model=model, keep=keep) for name in data for model in models)


def mean_gain(*scores: Vector) -> Vector:
    """Mean over the data sets of the rules' score less the tree's."""
    table = np.array(scores).reshape(-1, 2, len(scores[0]))
    return np.asarray((table[:, 0] - table[:, 1]).mean(0))


RANKS = (own_rank, network_rank, boosting_rank, forest_rank, linear_rank, tree_rank)
CLAIMS = (
    Claim(
        "E1",
        says="On tables of numbers the mean rank of half-space estimators is no worse than that of multi-layer perceptrons.",
        where="ours",
        paper="no number",
        figure="scores",
        parts=[
            Part("our mean rank less the perceptron's, all data", _scores(DATA), by=rank_less_network, below=EQUAL),
        ],
        shows=[
            *(
                Shown(f"mean rank of six: {name}", _scores(DATA), by=rank)
                for name, rank in zip(RANKED, RANKS, strict=True)
            ),
            Shown("our mean rank less the perceptron's, classes", _scores(CLASSES), by=rank_less_network),
            Shown("our mean rank less the perceptron's, targets", _scores(TARGETS), by=rank_less_network),
        ],
    ),
    Claim(
        "E2",
        says="With 1,000 or more training rows a half-space estimator is fitted in at most twice the perceptron's time.",
        where="ours",
        paper="no number",
        figure="times",
        parts=[
            Part("largest ratio of fit times", _times("fit_seconds"), by=largest_ratio, below=2.0),
            Part("geometric mean of the ratios of fit times", _times("fit_seconds"), by=mean_ratio, below=2.0),
        ],
    ),
    Claim(
        "E3",
        says="A half-space estimator predicts at least as fast as a multi-layer perceptron.",
        where="ours",
        paper="no number",
        figure="times",
        parts=[
            Part("largest ratio of predict times", _times("predict_seconds"), by=largest_ratio, below=1.0 + EQUAL),
            Part(
                "geometric mean of the ratios of predict times",
                _times("predict_seconds"),
                by=mean_ratio,
                below=1.0 + EQUAL,
            ),
        ],
    ),
    Claim(
        "E4",
        says="Rules distilled from a half-space classifier are at least as accurate as a tree with as many rules.",
        where="ours",
        paper="no number",
        figure="rules",
        parts=[
            Part("mean accuracy of rules less trees, 99 % kept", _pairs(0.99, CLASSES), by=mean_gain, above=-EQUAL),
            Part("mean accuracy of rules less trees, 95 % kept", _pairs(0.95, CLASSES), by=mean_gain, above=-EQUAL),
        ],
        shows=[Shown("mean R2 of rules less trees, 99 % kept", _pairs(0.99, TARGETS), by=mean_gain)],
    ),
)


# --- drawing -------------------------------------------------------------------------------------------

COLOURS = dict(zip(RANKED, ("blue", "orange", "green", "sky", "purple", "grey"), strict=True))


def scores_figure(results: Results) -> plots.Figure:
    """Test accuracy (R2 of the four regressions below the line) of every model on every data set: median over seeds."""
    figure, axes = plots.grid(1, 1, (7, 5))
    axis = axes[0, 0]
    shown = [name for name in DATA if name in results.settings.data]
    for model in RANKED:
        medians = [np.nanmedian(results.table.select("score", data=name, model=model)) for name in shown]
        large = 60 if model in (OURS, NETWORK) else 25
        axis.scatter(medians, range(len(shown)), color=plots.COLOURS[COLOURS[model]], s=large, label=model, alpha=0.8)
    axis.set_yticks(range(len(shown)), shown)
    axis.invert_yaxis()
    if set(shown) & set(TARGETS) and set(shown) & set(CLASSES):
        axis.axhline(len(set(shown) & set(CLASSES)) - 0.5, color=plots.COLOURS["grey"], linewidth=0.6)
    axis.set_xlabel("test accuracy or R2")
    plots.shared_legend(figure, 6)
    return figure


def times_figure(results: Results) -> plots.Figure:
    """Processor time of fit and predict over that of the perceptron: median over seeds; the line is 1."""
    figure, axes = plots.grid(1, 2, (4.2, 4), sharey=True)
    shown = [name for name in DATA if name in results.settings.data]
    for axis, quantity in zip(axes[0], ("fit_seconds", "predict_seconds"), strict=True):
        for model in RANKED:
            if model == NETWORK:
                continue
            ratios = [
                np.nanmedian(
                    results.table.select(quantity, data=name, model=model)
                    / results.table.select(quantity, data=name, model=NETWORK)
                )
                for name in shown
            ]
            axis.scatter(ratios, range(len(shown)), color=plots.COLOURS[COLOURS[model]], s=25, label=model)
        axis.set(xscale="log", xlabel=quantity.replace("_", " ") + " over the perceptron's")
        axis.axvline(1, color=plots.COLOURS["grey"], linewidth=0.6)
        axis.set_yticks(range(len(shown)), shown)
    axes[0, 0].invert_yaxis()
    plots.shared_legend(figure, 5)
    return figure


def rules_figure(results: Results) -> plots.Figure:
    """Test score against the number of conditions: distilled rules (95 % and 99 % kept) and trees with as many rules.

    Medians over seeds; the dotted line is the whole half-space model. A condition of ours weighs all columns, one of a tree one.
    """
    shown = [name for name in DATA if name in results.settings.data]
    columns = min(5, len(shown))
    figure, axes = plots.grid(-(-len(shown) // columns), columns, (2.1, 1.8))
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, shown, strict=False):
        for model, colour in (("rules", "blue"), ("tree of equal rules", "grey")):
            found = [
                [np.nanmedian(results.table.select(what, data=name, model=model, keep=keep)) for keep in KEPT]
                for what in ("literals", "score")
            ]
            axis.plot(*found, marker="o", markersize=4, color=plots.COLOURS[colour], label=model)
        whole = float(np.nanmedian(results.table.select("score", data=name, model=OURS)))
        axis.axhline(whole, color=plots.COLOURS["blue"], linestyle=":", linewidth=0.8, label=OURS)
        axis.set(xscale="log", xlim=(1, 5000), title=name)
        axis.minorticks_off()
    plots.shared_legend(figure, 3)
    return figure


STUDY = Study(
    name="tabular",
    paper="estimators",
    scales={"smoke": Settings(200, ("iris", "moons", "diabetes")), "desk": Settings()},
    seeds={"smoke": 2, "desk": 5},
    varies={"data": DATA},
    measure=measure,
    claims=CLAIMS,
    figures=(
        Figure("scores", "Scores on every data set", scores_figure),
        Figure("times", "Time to fit and to predict", times_figure),
        Figure("rules", "Score against the number of conditions", rules_figure),
    ),
)
