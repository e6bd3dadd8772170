"""A valid call of every public function, and wrong values for each of its arguments; for tests of what users are told."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import unlazy as ul

WRITTEN_BY_US = {  # results, bases and errors: users read them, and do not call them
    *(
        "InputError",
        "StoreError",
        "UnlazyError",
        "Unsupported",
        "Verdict",
        "Figure",
        "Study",
        "Claim",
        "Part",
        "Quantity",
    ),
    *(
        "Shown",
        "Rows",
        "adaptive.Ansatz",
        "adaptive.Difficulty",
        "adaptive.FeatureMachine",
        "adaptive.FeaturesFinished",
    ),
    *("adaptive.GradientFlow", "adaptive.Linearised", "estimators.ActivePath", "estimators.CellsDisplay"),
    *("estimators.DistilledRules", "estimators.EstimatorHalfSpaces", "estimators.Explanation", "estimators.Flip"),
    *("estimators.PathSum", "estimators.Regions", "images.GatedImageNet", "kernels.ChangeShares", "kernels.Plan"),
    *("kernels.Projected", "models.GatedNet", "models.Gates", "scope.Evidence", "scope.History", "scope.MLflowSink"),
    *("scope.TensorBoardSink", "scope.WandbSink", "theory.Polyhedron", "probes.HalfSpaces", "load_images"),
}


@dataclass(frozen=True)
class Call:
    """A function, arguments that it accepts, and which of them are to be replaced."""

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    def with_wrong(self, argument: str, value: Any) -> Any:
        """The answer with one argument replaced, iterators read to their end."""
        answer = self.function(**{**self.arguments, argument: value})
        return list(answer) if isinstance(answer, Iterator) else answer


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def plain_network(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, outputs))


def _fit(estimator: type, **options: Any) -> Callable[..., Any]:
    def fit(X: Any, y: Any, **choices: Any) -> Any:  # noqa: N803
        return estimator(**{**options, **choices}).fit(X, y).predict(X)

    return fit


def _scope(**options: Any) -> Any:
    scope = ul.Scope(**options)
    scope.step(1)
    scope.finish()
    return scope.verdict()


def _kernel(n: int = 6) -> Tensor:
    rows = numbers(n, n, dtype=torch.float64)
    return rows @ rows.T


def public_calls(folder: Path) -> list[Call]:
    """A valid call of every public name that users call."""
    Power, tangent_layers = ul.adaptive.Power, ul.adaptive.tangent_layers
    x, y, one = numbers(8, 3), numbers(8, 2, seed=1), numbers(8, 1, seed=2)
    net, gated = plain_network(), ul.DLGN(3, 2, width=4, depth=2)
    flat, circle_net = ul.DLGN(2, width=3, depth=2), ul.DLGN(2, width=3, depth=2, gate=ul.HardGate())
    biasless = ul.DLGN(3, width=4, depth=2, value_bias=False)
    kernel, columns = _kernel(), numbers(6, 1, seed=3, dtype=torch.float64)
    unit = nn.functional.normalize(x.double())
    table, labels = numbers(40, 4).double().numpy(), np.arange(40) % 2
    patterns = ul.emergence.Patterns(20, 20, 3)
    sample = patterns.draw(50)
    variances = ul.theory.Variances((2.0, 2.0, 1.0), (0.0, 0.0, 0.0))
    images = ul.images.Images(
        "made",
        "train",
        torch.randint(0, 255, (12, 3, 8, 8), dtype=torch.uint8),
        torch.arange(12) % 3,
        ("a", "b", "c"),
        mean=(0.5,) * 3,
        deviation=(0.2,) * 3,
    )
    small = ul.build(ul.images.conv_spec(3, 2, dense=None, classes=3))
    gates = list(gated.gates(x).hard())
    recipe = ul.Recipe(ul.NetSpec(2, width=3, depth=2), (ul.Member(0, 1e-3),), epochs=1, batch=10)
    circle = ul.Circle(n=20).dataset()
    zipped = {name: value.detach().clone() for name, value in net.named_parameters()}
    moved = {name: value + 0.1 for name, value in zipped.items()}
    path = ul.adaptive.ParameterPath([zipped, moved], points=2)
    layers = tangent_layers(plain_network(1).double(), x.double())
    model = {"model": net, "x": x}
    found: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "Scope": (
            _scope,
            {"model": net, "probe": (x, y), "budget": 0.05, "steps": 10, "views": ("tangents",), "seed": 0},
        ),
        "judge": (ul.judge, {"measured": ul.scope.History()}),
        "width_check": (
            ul.width_check,
            {
                "make_model": lambda width: nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2)),
                "widths": (4, 8, 16),
                "probe": (x, y),
                "steps": 2,
                "seeds": 1,
            },
        ),
        "tangent_kernel": (
            ul.tangent_kernel,
            {**model, "x2": x[:3], "outputs": "trace", "memory": "100MB", "method": "auto"},
        ),
        "layer_kernels": (ul.layer_kernels, {**model, "outputs": "trace"}),
        "plan_tangent": (ul.plan_tangent, {**model, "memory": "100MB"}),
        "tangent_operator": (ul.tangent_operator, {"model": net, "data": x, "outputs": "trace", "memory": "100MB"}),
        "overlap_kernel": (ul.overlap_kernel, {**model, "x2": x[:3], "output": 0}),
        "path_count": (ul.path_count, {**model, "output": 0}),
        "record": (ul.record, dict(model)),
        "gram_file": (
            lambda name, **rest: ul.gram_file(Path(tempfile.mkdtemp(dir=folder)) / name, **rest),
            {"name": "a.zarr", "model": net, "x": x, "kernel": "tangent", "tile": 4, "shard": (0, 1)},
        ),
        "GramFile": (ul.GramFile, {"path": ul.gram_file(folder / "kept.zarr", net, x).path}),
        "alignment": (ul.alignment, {"kernel": kernel, "targets": columns}),
        "kernel_distance": (ul.kernel_distance, {"kernel": kernel, "other": kernel + torch.eye(6)}),
        "relative_change": (ul.relative_change, {"kernel": kernel, "start": kernel + torch.eye(6)}),
        "effective_rank": (ul.effective_rank, {"kernel": kernel, "kind": "entropy"}),
        "DLGN": (ul.DLGN, {"inputs": 3, "outputs": 2, "width": 4, "depth": 2, "seed": 0}),
        "ReLUNet": (ul.ReLUNet, {"inputs": 3, "outputs": 2, "width": 4, "depth": 2}),
        "DeepLinearNet": (ul.DeepLinearNet, {"inputs": 3, "outputs": 2, "width": 4, "depth": 2}),
        "build": (ul.build, {"spec": ul.NetSpec(3, width=4, depth=2), "seed": 0, "dtype": torch.float32}),
        "NetSpec": (
            ul.NetSpec,
            {"inputs": 3, "outputs": 2, "width": 4, "depth": 2, "gating": "linear", "experts": "linear"},
        ),
        "HardGate": (ul.HardGate, {"beta": 4.0}),
        "SoftGate": (ul.SoftGate, {"beta": 4.0}),
        "half_spaces": (ul.half_spaces, {"net": gated}),
        "HalfSpaceClassifier": (
            _fit(ul.HalfSpaceClassifier, epochs=1),
            {"X": table, "y": labels, "width": 4, "depth": 2, "members": 2, "beta": 4.0, "learning_rate": 0.01},
        ),
        "HalfSpaceRegressor": (
            _fit(ul.HalfSpaceRegressor, epochs=1),
            {"X": table, "y": table[:, 0], "members": 2, "batch_size": 16, "gate": "hard"},
        ),
        "TangentKernelRidge": (_fit(ul.TangentKernelRidge), {"X": table, "y": table[:, 0], "ridge": 0.01}),
        "TangentKernelClassifier": (_fit(ul.TangentKernelClassifier), {"X": table, "y": labels, "ridge": 0.01}),
        "Dataset": (ul.Dataset, {"name": "mine", "x": x, "y": y}),
        "Circle": (lambda **o: ul.Circle(**o).dataset(), {"n": 20, "top": 1.0, "bottom": 9.0, "offset": 0.0}),
        "fit": (
            lambda **o: ul.fit(folder=tempfile.mkdtemp(dir=folder) + "/run", **o),
            {"recipe": recipe, "data": circle, "measures": []},
        ),
        "Recipe": (
            ul.Recipe,
            {
                "model": recipe.model,
                "members": recipe.members,
                "epochs": 1,
                "batch": 10,
                "loss": "squared",
                "dtype": "float32",
            },
        ),
        "Member": (ul.Member, {"seed": 0, "lr": 1e-3, "beta": 4.0}),
        "linearise": (ul.linearise, {"model": net, "parameters": "trainable"}),
        "linearised_twin": (
            ul.linearised_twin,
            {
                "model": net,
                "optimiser": torch.optim.SGD(net.parameters(), 0.1),
                "loss": nn.functional.mse_loss,
                "held": (x, y),
            },
        ),
        "Run": (ul.Run, {"folder": ul.fit(recipe, circle, [], folder / "run").folder}),
        "find_runs": (ul.find_runs, {"root": folder}),
        "adaptive.AdaptiveTangents": (
            lambda x, y, **o: ul.adaptive.AdaptiveTangents(**o).fit(x, y),
            {"model": net, "x": x, "y": y, "structure": "layers", "ridge": 0.1},
        ),
        "adaptive.Retraining": (ul.adaptive.Retraining, {"epochs": 3, "lr": 0.001, "batch": 4, "gates": "as trained"}),
        "adaptive.agop": (ul.adaptive.agop, dict(model)),
        "adaptive.averaged_diagonal": (ul.adaptive.averaged_diagonal, {**model, "path": path}),
        "adaptive.averaged_tangents": (ul.adaptive.averaged_tangents, {**model, "path": path}),
        "adaptive.circled_plus": (lambda first: ul.adaptive.circled_plus(first, Power(2)), {"first": Power(2)}),
        "adaptive.difficulty": (
            ul.adaptive.difficulty,
            {**model, "labels": torch.arange(8) % 2, "start": moved, "points": 2, "ridge": 0.1},
        ),
        "adaptive.effective_penalty": (ul.adaptive.effective_penalty, {"penalty": Power(2), "v": columns[:, 0].abs()}),
        "adaptive.feature_ansatz": (ul.adaptive.feature_ansatz, {**model, "power": 1.0}),
        "adaptive.ParameterPath": (
            ul.adaptive.ParameterPath,
            {"states": [zipped, moved], "points": 2, "rule": "uniform"},
        ),
        "adaptive.features_finished": (
            ul.adaptive.features_finished,
            {
                "copies": {0.0: net, 1.0: plain_network()},
                "data": (x, y),
                "settings": ul.adaptive.Retraining(epochs=1, kernel_samples=4),
            },
        ),
        "adaptive.laplace_kernel": (ul.adaptive.laplace_kernel, {"x": x, "z": x, "metric": torch.eye(3), "width": 1.0}),
        "adaptive.layer_agops": (ul.adaptive.layer_agops, dict(model)),
        "adaptive.linearisation_quality": (ul.adaptive.linearisation_quality, {**model, "path": path}),
        "adaptive.recursive_features": (
            ul.adaptive.recursive_features,
            {"x": x, "y": y, "rounds": 1, "width": 1.0, "ridge": 0.1},
        ),
        "adaptive.solve_structured": (
            ul.adaptive.solve_structured,
            {"layers": layers, "y": one[:, 0].double(), "ridge": 0.1, "left": Power(2), "right": Power(2)},
        ),
        "adaptive.solve_unstructured": (
            ul.adaptive.solve_unstructured,
            {"kernel": kernel, "y": columns[:, 0], "penalty": Power(2), "ridge": 0.1},
        ),
        "adaptive.Power": (Power, {"exponent": 2}),
        "adaptive.tangent_layers": (tangent_layers, {**model, "parameters": "trainable"}),
        "adaptive.top_directions": (ul.adaptive.top_directions, {"metric": torch.eye(3), "count": 2}),
        "emergence.AdversarialOracle": (
            ul.emergence.AdversarialOracle,
            {"patterns": 10, "relevant": 3, "tolerance": 0.1},
        ),
        "emergence.HonestOracle": (ul.emergence.HonestOracle, {"rows": sample, "tolerance": 0.0}),
        "emergence.NoisyOracle": (ul.emergence.NoisyOracle, {"rows": sample, "tolerance": 0.1, "seed": 0}),
        "emergence.Patterns": (
            lambda **o: ul.emergence.Patterns(**o).dataset(20),
            {"inputs": 20, "patterns": 20, "relevant": 3, "mixture": 0.5, "background": 0.5, "seed": 0},
        ),
        "emergence.Planted": (
            lambda **o: ul.emergence.Planted(**o).dataset(20),
            {"kind": "parity", "inputs": 10, "order": 3, "mixture": 0.5, "seed": 0},
        ),
        "emergence.TruncatedNet": (
            ul.emergence.TruncatedNet,
            {"w": numbers(4, 3), "b": numbers(4), "a": numbers(4)},
        ),
        "emergence.check_assumptions": (
            ul.emergence.check_assumptions,
            {"indicators": sample.indicators, "y": sample.y, "relevant": patterns.is_relevant()},
        ),
        "emergence.decompose": (
            ul.emergence.decompose,
            {
                "net": ul.emergence.TruncatedNet(
                    *(numbers(*shape, dtype=torch.float64) for shape in ((4, 20), (4,), (4,)))
                ),
                "sample": sample,
                "relevant": patterns.is_relevant(),
            },
        ),
        "emergence.decompose_module": (
            ul.emergence.decompose_module,
            {
                "model": nn.Sequential(nn.Linear(20, 4), nn.ReLU(), nn.Linear(4, 1)),
                "x": patterns.dataset(30).x,
                "y": patterns.dataset(30).y,
                "dictionary": patterns.dictionary(),
                "relevant": patterns.is_relevant(),
            },
        ),
        "emergence.explicit_network": (ul.emergence.explicit_network, {"patterns": patterns}),
        "emergence.find_relevant": (
            ul.emergence.find_relevant,
            {"oracle": ul.emergence.HonestOracle(sample), "patterns": 20, "relevant": 3},
        ),
        "emergence.fixed_feature_bound": (
            ul.emergence.fixed_feature_bound,
            {"features": 10, "norm": 1.0, "patterns": 20, "relevant": 3},
        ),
        "emergence.learning_conditions": (
            ul.emergence.learning_conditions,
            {"patterns": 20, "relevant": 3, "pairs": 10, "background": 0.1, "gamma": 0.5, "error": 0.1},
        ),
        "emergence.query_bound": (ul.emergence.query_bound, {"patterns": 20, "relevant": 3}),
        "emergence.subspace_overlap": (
            ul.emergence.subspace_overlap,
            {"found": numbers(5, 2, dtype=torch.float64), "hidden": numbers(5, 2, seed=1, dtype=torch.float64)},
        ),
        "estimators.AdaptiveTangentRegressor": (
            _fit(ul.estimators.AdaptiveTangentRegressor, rounds=2),
            {"X": table[:20], "y": table[:20, 0], "structure": "layers", "ridge": 0.01},
        ),
        "estimators.RecursiveFeatureClassifier": (
            _fit(ul.estimators.RecursiveFeatureClassifier, rounds=1),
            {"X": table, "y": labels, "ridge": 0.01},
        ),
        "estimators.RecursiveFeatureMachine": (
            _fit(ul.estimators.RecursiveFeatureMachine),
            {"X": table, "y": table[:, 0], "rounds": 1, "ridge": 0.01},
        ),
        "estimators.load_estimator": (ul.estimators.load_estimator, {"path": _kept_estimator(folder, table, labels)}),
        "estimators.draw_cells": (
            ul.estimators.draw_cells,
            {"estimator": _classifier(table[:, :2], labels), "X": table[:, :2], "y": labels, "resolution": 20},
        ),
        "estimators.draw_normals": (
            ul.estimators.draw_normals,
            {"estimator": _classifier(table, labels), "shape": (2, 2), "member": 0, "layer": 0},
        ),
        "estimators.draw_rules": (
            ul.estimators.draw_rules,
            {"explanation": _classifier(table, labels).paths(table[0])},
        ),
        "images.Cut": (ul.images.Cut, {"groups": 2, "how": "k-means", "restarts": 1, "seed": 0}),
        "images.ImageRecipe": (
            ul.images.ImageRecipe,
            {"epochs": 1, "batch": 4, "lr": 0.1, "optimiser": "sgd", "precision": "float32"},
        ),
        "images.ImageSpec": (ul.images.ImageSpec, {"widths": (3,), "blocks": (1,), "channels": 3, "classes": 3}),
        "images.Images": (
            ul.images.Images,
            {
                "name": "made",
                "split": "train",
                "pixels": images.pixels,
                "labels": images.labels,
                "classes": ("a", "b", "c"),
            },
        ),
        "images.Relabelling": (ul.images.Relabelling, {"easy": (0, 1), "labels": "balanced", "seed": 0}),
        "images.conv_spec": (ul.images.conv_spec, {"width": 3, "depth": 2, "dense": None}),
        "images.cut_classes": (
            ul.images.cut_classes,
            {"train": images, "test": images, "cut": ul.images.Cut(groups=2, restarts=1)},
        ),
        "images.fold_batch_norm": (
            ul.images.fold_batch_norm,
            {"net": ul.build(ul.images.ImageSpec((3,), (1,), classes=3))},
        ),
        "images.half_space_normals": (
            ul.images.half_space_normals,
            {"net": small, "layer": 0, "units": [(0, 1, 1)], "size": (8, 8)},
        ),
        "images.random_splits": (ul.images.random_splits, {"count": 2, "classes": 4, "seed": 0}),
        "images.relabel": (
            ul.images.relabel,
            {"images": images, "groups": torch.arange(12) % 2, "relabelling": ul.images.Relabelling((0,)), "count": 2},
        ),
        "images.resnet34_spec": (ul.images.resnet34_spec, {"classes": 3, "width": 0.1}),
        "images.resnet110_spec": (ul.images.resnet110_spec, {"classes": 3, "width": 0.1}),
        "images.train_images": (
            ul.images.train_images,
            {
                "net": small,
                "train": images,
                "test": images,
                "recipe": ul.images.ImageRecipe(1, 4, precision="float32", augment=False),
                "seed": 0,
            },
        ),
        "kernels.active_paths": (ul.kernels.active_paths, {"model": net, "x": x[:1], "output": 0, "limit": 1000}),
        "kernels.attribute_change": (
            ul.kernels.attribute_change,
            {"before": gated, "after": ul.DLGN(3, 2, width=4, depth=2, seed=1), "x": x},
        ),
        "kernels.binary_gram": (ul.kernels.binary_gram, {"a": x > 0, "b": y.new_zeros(4, 3) > 0}),
        "kernels.centered_alignment": (ul.kernels.centered_alignment, {"kernel": kernel, "targets": columns}),
        "kernels.gate_ties": (ul.kernels.gate_ties, dict(model)),
        "kernels.gated_value_kernel": (ul.kernels.gated_value_kernel, {"net": gated, "gates": gates, "x": x}),
        "kernels.kernel_flow": (
            ul.kernels.kernel_flow,
            {"kernel": kernel, "y": columns, "start": 0 * columns, "times": [0.1, 1.0]},
        ),
        "kernels.kernel_regression": (
            ul.kernels.kernel_regression,
            {"kernel": kernel, "y": columns, "cross": kernel[:2], "ridge": 0.1},
        ),
        "kernels.kernel_velocity": (
            ul.kernels.kernel_velocity,
            {"kernel": kernel, "later": kernel + torch.eye(6), "elapsed": 1.0},
        ),
        "kernels.label_kernel": (ul.kernels.label_kernel, {"targets": columns, "kind": "change", "start": 0 * columns}),
        "kernels.layer_overlap": (ul.kernels.layer_overlap, dict(model)),
        "kernels.neural_path_kernel": (ul.kernels.neural_path_kernel, {"model": biasless, "x": x}),
        "kernels.plan_overlap": (ul.kernels.plan_overlap, {**model, "memory": "100MB"}),
        "kernels.project_tangents": (ul.kernels.project_tangents, {**model, "dimension": 4, "seed": 0}),
        "kernels.spectrum": (ul.kernels.spectrum, {"kernel": kernel}),
        "kernels.tangent_diagonal": (ul.kernels.tangent_diagonal, dict(model)),
        "kernels.tangent_features": (ul.kernels.tangent_features, dict(model)),
        "kernels.top_normalise": (ul.kernels.top_normalise, {"kernel": kernel}),
        "kernels.trace_normalise": (ul.kernels.trace_normalise, {"kernel": kernel}),
        "models.Init": (ul.models.Init, {"scheme": "torch", "scale": 1.0}),
        "models.build_stack": (
            ul.models.build_stack,
            {"spec": ul.NetSpec(3, width=4, depth=2), "seeds": [0, 1], "betas": [4.0, 8.0]},
        ),
        "models.member": (
            ul.models.member,
            {"stack": ul.models.build_stack(ul.NetSpec(3, width=4, depth=2), [0, 1]), "index": 1},
        ),
        "models.to_standard_parametrisation": (
            ul.models.to_standard_parametrisation,
            {"net": ul.build(ul.NetSpec(3, width=4, depth=2, parametrisation="ntk"))},
        ),
        "probes.allocation": (ul.probes.allocation, {"first": x[:, 0].abs(), "second": x[:, 1].abs()}),
        "probes.cell_floor": (ul.probes.cell_floor, {"gates": gates, "y": y, "x": x}),
        "probes.count_cells": (ul.probes.count_cells, {"gates": gates}),
        "probes.count_path_regions": (ul.probes.count_path_regions, {"gates": gates, "most": 10**6}),
        "theory.Variances": (ul.theory.Variances, {"weights": (2.0, 2.0), "biases": (0.0, 0.0)}),
        "theory.circle_pieces": (ul.theory.circle_pieces, {"net": circle_net}),
        "theory.expected_value_kernel": (ul.theory.expected_value_kernel, {"net": biasless, "x": x, "deviation": 1.0}),
        "theory.nngp_kernel": (ul.theory.nngp_kernel, {"x": x.double(), "variances": variances}),
        "theory.ntk_limit": (ul.theory.ntk_limit, {"x": x.double(), "x2": x[:3].double(), "variances": variances}),
        "theory.overlap_limit": (ul.theory.overlap_limit, {"x": x.double(), "depth": 2}),
        "theory.path_experts": (
            ul.theory.path_experts,
            {"net": gated, "x": x, "paths": torch.tensor([[0, 1], [1, 0]])},
        ),
        "theory.path_gates": (ul.theory.path_gates, {"gates": gates, "paths": torch.tensor([[0, 1], [1, 0]])}),
        "theory.path_polyhedron": (ul.theory.path_polyhedron, {"net": gated, "path": (0, 1)}),
        "theory.path_sum": (ul.theory.path_sum, {"net": gated, "x": x, "most": 1000}),
        "theory.plane_cells": (ul.theory.plane_cells, {"net": flat, "box": ((-1.0, 1.0), (-1.0, 1.0))}),
        "theory.starting_variances": (
            ul.theory.starting_variances,
            {"spec": ul.NetSpec(3, width=4, depth=2), "branch": "value"},
        ),
        "theory.truncated_kernel_limit": (
            ul.theory.truncated_kernel_limit,
            {"x": unit, "other": unit, "weight_variance": 1.0, "bias_variance": 1.0, "outer_variance": 1.0},
        ),
        "theory.value_kernel_limit": (ul.theory.value_kernel_limit, {"x": x.double(), "values": variances}),
    }
    return [Call(name, *rest) for name, rest in found.items()]


def _classifier(table: Any, labels: Any) -> Any:
    return ul.HalfSpaceClassifier(width=4, members=2, epochs=1, random_state=0).fit(table, labels)


def _kept_estimator(folder: Path, table: Any, labels: Any) -> Path:
    path = folder / "estimator"
    _classifier(table, labels).save(path)
    return path


# --- wrong values ------------------------------------------------------------------------------------------------


class Unlike:
    """An object of a kind that nothing expects."""


def wrong_values(good: Any) -> Iterator[tuple[str, Any]]:
    """Values that a user may give by mistake in place of ``good``, each with its name."""
    yield "object", Unlike()
    yield "text", "nonsense"
    yield "class", nn.Linear
    if isinstance(good, Tensor):
        yield from _wrong_tensors(good)
    elif isinstance(good, np.ndarray):
        yield from ((name, value) for name, value in _wrong_arrays(good))
    elif isinstance(good, nn.Module):
        yield from _wrong_modules(good)
    elif isinstance(good, bool):
        yield "number", 3
    elif isinstance(good, int):
        yield from (("negative", -1), ("fraction", 1.5), ("nan", float("nan")), ("huge", 10**30), ("list", [good]))
    elif isinstance(good, float):
        yield from (
            ("nan", float("nan")),
            ("infinite", float("inf")),
            ("negative", -1.0),
            ("complex", 1j),
            ("list", [good]),
        )
    elif isinstance(good, (str, Path)):
        yield from (("empty", ""), ("number", 3), ("zero byte", "a\0b"), ("none", None))
    elif isinstance(good, (tuple, list)):
        yield from (("empty", type(good)()), ("number", 3), ("of objects", [Unlike()] * len(good)), ("of none", [None]))


def _wrong_tensors(good: Tensor) -> Iterator[tuple[str, Any]]:
    yield from (("none", None), ("number", 3.0), ("list", good.tolist()), ("no samples", good[:0]))
    yield from (("scalar", torch.tensor(1.0)), ("sparse", good.float().to_sparse()), ("meta", good.to("meta")))
    yield from (("objects", np.array([Unlike()] * len(good))), ("one axis more", good[..., None, None, None]))
    yield "unequal rows", [*good.tolist()[:-1], [1.0] * 9]
    yield "wider", torch.cat([good, good], -1)
    if good.ndim > 1:
        yield "one axis fewer", good[:, 0]
        yield "narrower", good[:, :-1] if good.shape[1] > 1 else good[:, :0]
    if good.is_floating_point():
        spoiled, endless = good.clone(), good.clone()
        spoiled.flatten()[-1:], endless.flatten()[-1:] = float("nan"), float("inf")
        yield from (("nan", spoiled), ("infinite", endless), ("complex", good.to(torch.complex64)))
        yield from (("whole numbers", good.long()), ("half precision", good.half()), ("zeros", torch.zeros_like(good)))


def _wrong_arrays(good: Any) -> Iterator[tuple[str, Any]]:
    yield from (("none", None), ("number", 3.0), ("no samples", good[:0]), ("one fewer", good[:-1]))
    yield from (("complex", good.astype(complex)), ("objects", np.array([Unlike()] * len(good))))
    if good.dtype.kind == "f":
        spoiled = good.copy()
        spoiled.flat[0] = np.nan
        yield "nan", spoiled


def _wrong_modules(good: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from (("none", None), ("function", lambda x: x), ("empty", nn.Sequential()), ("other width", nn.Linear(7, 2)))
    yield from (
        ("plain", plain_network()),
        ("meta", nn.Linear(3, 2, device="meta")),
        ("stack", ul.models.build_stack(ul.NetSpec(3, width=4, depth=2), [0, 1])),
    )
    spoiled = plain_network()
    with torch.no_grad():
        next(spoiled.parameters()).fill_(float("nan"))
    yield "nan", spoiled
