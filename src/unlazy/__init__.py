"""unlazy shows what a neural network learns while it trains.

Everything public stands here, grouped; anything else may change. Names load on first use, so that
``import unlazy`` is quick and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unlazy.runtime import InputError, StoreError, UnlazyError, Unsupported, __version__

if TYPE_CHECKING:
    from unlazy.data.dataset import Dataset
    from unlazy.data.images import Images, load_images
    from unlazy.data.patterns import Patterns, check_assumptions
    from unlazy.data.planted import Planted, recovered
    from unlazy.data.relabelled import Cut, Relabelling, cut_classes, random_splits, relabel
    from unlazy.data.synthetic import Circle
    from unlazy.kernels.agop import Ansatz, agop, feature_ansatz, layer_agops
    from unlazy.kernels.averaged import averaged_diagonal, averaged_tangents, linearisation_quality
    from unlazy.kernels.binary import binary_gram
    from unlazy.kernels.compare import (
        alignment,
        centered_alignment,
        effective_rank,
        kernel_distance,
        kernel_velocity,
        label_kernel,
        relative_change,
        spectrum,
        top_normalise,
        trace_normalise,
    )
    from unlazy.kernels.filed import GramFile, gram_file
    from unlazy.kernels.flow import kernel_flow
    from unlazy.kernels.gram import Plan
    from unlazy.kernels.overlap import (
        gate_ties,
        layer_overlap,
        neural_path_kernel,
        overlap_kernel,
        path_count,
        plan_overlap,
    )
    from unlazy.kernels.paths.walks import active_paths
    from unlazy.kernels.projection import Projected, project_tangents
    from unlazy.kernels.record import record
    from unlazy.kernels.regression import kernel_regression
    from unlazy.kernels.replay import ChangeShares, attribute_change, gated_value_kernel
    from unlazy.kernels.tangent import layer_kernels, plan_tangent, tangent_diagonal, tangent_features, tangent_kernel
    from unlazy.models.build import (
        DLGN,
        DeepLinearNet,
        ReLUNet,
        build,
        build_stack,
        in_standard_parametrisation,
        member,
    )
    from unlazy.models.conv import GatedImageNet, ImageSpec, build_images, conv_spec
    from unlazy.models.folding import fold_batch_norm, half_space_normals
    from unlazy.models.gates import Gates, HardGate, SoftGate
    from unlazy.models.net import GatedNet
    from unlazy.models.resnet import resnet34_spec, resnet110_spec
    from unlazy.models.spec import Init, NetSpec
    from unlazy.models.truncated import TruncatedNet
    from unlazy.probes.halfspaces import HalfSpaces, half_spaces
    from unlazy.probes.paths import allocation, cell_floor, count_cells, count_path_regions
    from unlazy.scope.history import History
    from unlazy.scope.schedule import Fixed
    from unlazy.scope.scope import Measure, Scope
    from unlazy.scope.sinks import MLflowSink, TensorBoardSink, WandbSink
    from unlazy.scope.verdict import Evidence, Verdict, judge
    from unlazy.store import Run, find_runs
    from unlazy.theory.adaptive import solve_structured, solve_unstructured
    from unlazy.theory.adaptive_model import AdaptiveTangents
    from unlazy.theory.arrangement import plane_cells
    from unlazy.theory.bounds import fixed_feature_bound, learning_conditions, query_bound
    from unlazy.theory.difficulty import Difficulty, difficulty
    from unlazy.theory.emergence import decompose, explicit_network
    from unlazy.theory.enumerate import path_experts, path_gates, path_sum
    from unlazy.theory.infinite_width import (
        Variances,
        nngp_kernel,
        ntk_limit,
        overlap_limit,
        starting_variances,
        value_kernel_limit,
    )
    from unlazy.theory.penalties import circled_plus, effective_penalty
    from unlazy.theory.queries import AdversarialOracle, HonestOracle, NoisyOracle, find_relevant
    from unlazy.theory.regions import Polyhedron, circle_pieces, path_polyhedron
    from unlazy.theory.truncated_limit import truncated_kernel_limit
    from unlazy.theory.two_layers import decompose_module
    from unlazy.theory.value_kernel import expected_value_kernel
    from unlazy.training.ensemble import Member
    from unlazy.training.finished import FeaturesFinished, Retraining, features_finished
    from unlazy.training.fit import Recipe, fit
    from unlazy.training.images import ImageRecipe, train_images
    from unlazy.training.linearised import GradientFlow, Linearised, linearise
    from unlazy.training.recursive_features import (
        FeatureMachine,
        laplace_kernel,
        recursive_features,
        top_directions,
    )

_HOME = {
    # watch
    "Scope": "scope.scope",
    "Verdict": "scope.verdict",
    "Evidence": "scope.verdict",
    "judge": "scope.verdict",
    "History": "scope.history",
    "TensorBoardSink": "scope.sinks",
    "WandbSink": "scope.sinks",
    "MLflowSink": "scope.sinks",
    "Measure": "scope.scope",
    "Fixed": "scope.schedule",
    # networks
    "build": "models.build",
    "build_stack": "models.build",
    "member": "models.build",
    "in_standard_parametrisation": "models.build",
    "ReLUNet": "models.build",
    "DLGN": "models.build",
    "DeepLinearNet": "models.build",
    "GatedNet": "models.net",
    "NetSpec": "models.spec",
    "Init": "models.spec",
    "ImageSpec": "models.conv",
    "GatedImageNet": "models.conv",
    "build_images": "models.conv",
    "conv_spec": "models.conv",
    "resnet34_spec": "models.resnet",
    "resnet110_spec": "models.resnet",
    "fold_batch_norm": "models.folding",
    "half_space_normals": "models.folding",
    "TruncatedNet": "models.truncated",
    "SoftGate": "models.gates",
    "HardGate": "models.gates",
    "Gates": "models.gates",
    # kernels
    "tangent_kernel": "kernels.tangent",
    "tangent_features": "kernels.tangent",
    "tangent_diagonal": "kernels.tangent",
    "layer_kernels": "kernels.tangent",
    "plan_tangent": "kernels.tangent",
    "gram_file": "kernels.filed",
    "GramFile": "kernels.filed",
    "project_tangents": "kernels.projection",
    "Projected": "kernels.projection",
    "Plan": "kernels.gram",
    "overlap_kernel": "kernels.overlap",
    "layer_overlap": "kernels.overlap",
    "neural_path_kernel": "kernels.overlap",
    "record": "kernels.record",
    "path_count": "kernels.overlap",
    "alignment": "kernels.compare",
    "centered_alignment": "kernels.compare",
    "kernel_distance": "kernels.compare",
    "relative_change": "kernels.compare",
    "effective_rank": "kernels.compare",
    "label_kernel": "kernels.compare",
    "trace_normalise": "kernels.compare",
    "top_normalise": "kernels.compare",
    "kernel_velocity": "kernels.compare",
    "spectrum": "kernels.compare",
    "kernel_regression": "kernels.regression",
    "active_paths": "kernels.paths.walks",
    "plan_overlap": "kernels.overlap",
    "binary_gram": "kernels.binary",
    "averaged_tangents": "kernels.averaged",
    "averaged_diagonal": "kernels.averaged",
    "linearisation_quality": "kernels.averaged",
    "gate_ties": "kernels.overlap",
    "kernel_flow": "kernels.flow",
    "gated_value_kernel": "kernels.replay",
    "attribute_change": "kernels.replay",
    "ChangeShares": "kernels.replay",
    "agop": "kernels.agop",
    "layer_agops": "kernels.agop",
    "feature_ansatz": "kernels.agop",
    "Ansatz": "kernels.agop",
    # probes
    "half_spaces": "probes.halfspaces",
    "HalfSpaces": "probes.halfspaces",
    "allocation": "probes.paths",
    "cell_floor": "probes.paths",
    "count_cells": "probes.paths",
    "count_path_regions": "probes.paths",
    # theory
    "nngp_kernel": "theory.infinite_width",
    "ntk_limit": "theory.infinite_width",
    "overlap_limit": "theory.infinite_width",
    "value_kernel_limit": "theory.infinite_width",
    "starting_variances": "theory.infinite_width",
    "Variances": "theory.infinite_width",
    "effective_penalty": "theory.penalties",
    "circled_plus": "theory.penalties",
    "solve_unstructured": "theory.adaptive",
    "solve_structured": "theory.adaptive",
    "AdaptiveTangents": "theory.adaptive_model",
    "difficulty": "theory.difficulty",
    "Difficulty": "theory.difficulty",
    "truncated_kernel_limit": "theory.truncated_limit",
    "explicit_network": "theory.emergence",
    "decompose": "theory.emergence",
    "decompose_module": "theory.two_layers",
    "learning_conditions": "theory.bounds",
    "fixed_feature_bound": "theory.bounds",
    "query_bound": "theory.bounds",
    "HonestOracle": "theory.queries",
    "NoisyOracle": "theory.queries",
    "AdversarialOracle": "theory.queries",
    "find_relevant": "theory.queries",
    "path_sum": "theory.enumerate",
    "path_gates": "theory.enumerate",
    "path_experts": "theory.enumerate",
    "circle_pieces": "theory.regions",
    "path_polyhedron": "theory.regions",
    "Polyhedron": "theory.regions",
    "plane_cells": "theory.arrangement",
    "expected_value_kernel": "theory.value_kernel",
    # data and training
    "Dataset": "data.dataset",
    "Circle": "data.synthetic",
    "load_images": "data.images",
    "Images": "data.images",
    "relabel": "data.relabelled",
    "cut_classes": "data.relabelled",
    "Cut": "data.relabelled",
    "Relabelling": "data.relabelled",
    "random_splits": "data.relabelled",
    "Patterns": "data.patterns",
    "check_assumptions": "data.patterns",
    "Planted": "data.planted",
    "recovered": "data.planted",
    "ImageRecipe": "training.images",
    "train_images": "training.images",
    "Member": "training.ensemble",
    "Recipe": "training.fit",
    "fit": "training.fit",
    "features_finished": "training.finished",
    "Retraining": "training.finished",
    "FeaturesFinished": "training.finished",
    "linearise": "training.linearised",
    "Linearised": "training.linearised",
    "GradientFlow": "training.linearised",
    "recursive_features": "training.recursive_features",
    "FeatureMachine": "training.recursive_features",
    "laplace_kernel": "training.recursive_features",
    "top_directions": "training.recursive_features",
    # runs on disk
    "Run": "store",
    "find_runs": "store",
}

__all__ = ["InputError", "StoreError", "UnlazyError", "Unsupported", "__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unlazy' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"unlazy.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
