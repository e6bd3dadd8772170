"""Fitted half-space estimators as files: safetensors with JSON (no pickle), and ONNX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unlazy.estimators.explanations import Regions
from unlazy.estimators.path_sum import PathSum
from unlazy.runtime import InputError, __version__, require

FORMAT = 1
_ARRAYS = ("_deviations", "_importances")  # absent from estimators with soft gates


def save_estimator(estimator: Any, path: str | Path) -> None:
    """Write a fitted estimator as one safetensors file: its numbers as arrays, everything else as JSON in the header."""
    from safetensors.numpy import save_file
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(estimator, "path_sum_")
    model: PathSum = estimator.path_sum_
    arrays: dict[str, Any] = {f"path_sum/{name}": array for name, array in model.arrays().items()}
    arrays |= {f"own/{name}": getattr(estimator, name) for name in _ARRAYS if hasattr(estimator, name)}
    if hasattr(estimator, "_regions"):
        regions = estimator._regions
        arrays |= {f"regions/{name}": getattr(regions, name) for name in ("patterns", "counts", "values")}
    facts: dict[str, Any] = {
        "format": FORMAT,
        "unlazy": __version__,
        "class": type(estimator).__name__,
        "settings": _settings(estimator),
        "beta": model.beta,
        "n_features_in_": estimator.n_features_in_,
        "n_iter_": estimator.n_iter_,
        "loss_curve_": estimator.loss_curve_,
        "validation_scores_": estimator.validation_scores_,
    }
    if hasattr(estimator, "feature_names_in_"):
        facts["feature_names_in_"] = estimator.feature_names_in_.tolist()
    if hasattr(estimator, "classes_"):
        facts["classes_"] = [estimator.classes_.dtype.str, estimator.classes_.tolist()]
    else:
        facts["_several_targets"] = estimator._several_targets
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(contiguous, str(path), metadata={"unlazy_estimator": json.dumps(facts)})


def read_estimator(path: str | Path, kinds: Mapping[str, Any]) -> Any:
    """The estimator that :func:`save_estimator` wrote; ``kinds``: the classes it may be of, by name."""
    from safetensors import SafetensorError, safe_open

    require(Path(path).is_file(), f"there is no file {path}.")
    try:
        with safe_open(str(path), framework="numpy") as file:
            facts = json.loads((file.metadata() or {}).get("unlazy_estimator", "null"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path} is no safetensors file: {error}.") from error
    require(facts is not None, f"{path} holds no estimator; estimator.save(path) writes one.")
    require(facts["format"] == FORMAT, f"{path} has format {facts['format']}; this version reads {FORMAT}.")
    require(facts["class"] in kinds, f"{path} holds a {facts['class']}; known are {', '.join(kinds)}.")
    settings = facts["settings"]
    if isinstance(settings.get("class_weight"), list):
        settings["class_weight"] = dict(settings["class_weight"])
    estimator: Any = kinds[facts["class"]](**settings)

    def group(prefix: str) -> dict[str, Any]:
        return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

    estimator.path_sum_ = PathSum.from_arrays(group("path_sum/"), facts["beta"])
    for name, array in group("own/").items():
        setattr(estimator, name, array)
    if regions := group("regions/"):
        estimator._regions = Regions(**regions)
    for name in ("n_features_in_", "n_iter_", "loss_curve_", "validation_scores_", "_several_targets"):
        if name in facts:
            setattr(estimator, name, facts[name])
    if "feature_names_in_" in facts:
        estimator.feature_names_in_ = np.array(facts["feature_names_in_"], dtype=object)
    if "classes_" in facts:
        kind, labels = facts["classes_"]
        estimator.classes_ = np.array(labels, dtype=np.dtype(kind))
    return estimator


def _settings(estimator: Any) -> dict[str, Any]:
    """The parameters as JSON values. A generator as ``random_state`` becomes ``None``: its state is spent."""
    found = estimator.get_params(deep=False)
    seed = found["random_state"]
    found["random_state"] = int(seed) if isinstance(seed, int | np.integer) else None
    if isinstance(found.get("class_weight"), dict):
        found["class_weight"] = [[_plain(key), _plain(value)] for key, value in found["class_weight"].items()]
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def write_onnx(model: PathSum, path: str | Path) -> None:
    """Write the scores as an ONNX graph in float64: input ``x [n, d]``, output ``scores [n, outputs]``. Needs onnx."""
    try:
        import onnx
        from onnx import TensorProto, helper, numpy_helper
    except ImportError as error:
        raise InputError("to_onnx needs the package onnx: pip install onnx.") from error

    constants, nodes = [], []

    def constant(name: str, array: Any) -> str:
        constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def node(kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def affine(source: str, name: str, weight: Any, bias: Any | None = None) -> str:
        """source @ weight^T + bias; the first axis of weight counts the members."""
        product = node("MatMul", [source, constant(f"{name}_weight", weight.transpose(0, 2, 1))], f"{name}_product")
        if bias is None:
            return product
        return node("Add", [product, constant(f"{name}_bias", bias[:, None, :])], f"{name}_sum")

    zero = constant("zero", np.zeros(()))
    values = ""
    for layer in range(model.layers):
        q = affine("x", f"gate{layer}", model.normals[:, layer], model.offsets[:, layer])
        if model.beta is None:
            is_open = node("GreaterOrEqual", [q, zero], f"open{layer}")
            gate = node("Cast", [is_open], f"gates{layer}", to=TensorProto.DOUBLE)
        else:
            steep = node("Mul", [q, constant(f"beta{layer}", np.array(model.beta))], f"steep{layer}")
            gate = node("Sigmoid", [steep], f"gates{layer}")
        if layer:
            before = affine(values, f"link{layer}", model.links[:, layer - 1])
        elif model.expert_normals is not None:
            before = affine("x", "expert", model.expert_normals, model.experts)
        else:
            before = constant("experts", model.experts[:, None, :])
        values = node("Mul", [gate, before], f"values{layer}")
    each = affine(values, "readout", model.readout)
    total = node("ReduceSum", [each, constant("members", np.array([0], dtype=np.int64))], "total", keepdims=0)
    node("Add", [total, constant("intercept", model.intercept)], "scores")
    size, outputs = model.normals.shape[-1], len(model.intercept)
    graph = helper.make_graph(
        nodes,
        "half_spaces",
        [helper.make_tensor_value_info("x", TensorProto.DOUBLE, ["n", size])],
        [helper.make_tensor_value_info("scores", TensorProto.DOUBLE, ["n", outputs])],
        constants,
    )
    written = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(written)
    onnx.save(written, str(path))
