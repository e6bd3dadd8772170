"""unlazy shows what a neural network learns while it trains.

The names most people need stand here; the rest by topic: ``unlazy.scope``, ``unlazy.models``, ``unlazy.kernels``,
``unlazy.probes`` (half-spaces, paths, cells), ``unlazy.theory`` (limits, path sums, regions), ``unlazy.emergence``,
``unlazy.adaptive``, ``unlazy.images`` and ``unlazy.estimators`` (for scikit-learn). Anything else may change. Names load on
first use, so that ``import unlazy`` is quick and does not import torch.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from unlazy.runtime import InputError, StoreError, UnlazyError, Unsupported
from unlazy.runtime import __version__ as __version__

if TYPE_CHECKING:
    from unlazy import adaptive, emergence, estimators, images, kernels, models, probes, scope, theory
    from unlazy.claims.claim import Claim, Part, Quantity, Shown
    from unlazy.data.circle import Circle
    from unlazy.data.dataset import Dataset
    from unlazy.data.images import load_images
    from unlazy.estimators.half_space import HalfSpaceClassifier, HalfSpaceRegressor
    from unlazy.estimators.kernel_machines import TangentKernelClassifier, TangentKernelRidge
    from unlazy.kernels.compare import alignment, effective_rank, kernel_distance, relative_change
    from unlazy.kernels.gate_calls import record
    from unlazy.kernels.gram_on_disk import gram_file
    from unlazy.kernels.gram_tiles import GramFile
    from unlazy.kernels.operator import tangent_operator
    from unlazy.kernels.overlap import overlap_kernel, path_count
    from unlazy.kernels.tangent import layer_kernels, plan_tangent, tangent_kernel
    from unlazy.models.build import DLGN, DeepLinearNet, ReLUNet, build
    from unlazy.models.gates import HardGate, SoftGate
    from unlazy.models.spec import NetSpec
    from unlazy.probes.halfspaces import half_spaces
    from unlazy.scope.scope import Scope
    from unlazy.scope.verdict import Verdict, judge
    from unlazy.store import Run, find_runs
    from unlazy.studies.study import Figure, Study
    from unlazy.studies.table import Rows
    from unlazy.training.ensemble import Member
    from unlazy.training.fit import Recipe, fit
    from unlazy.training.linearised import linearise
    from unlazy.training.twin import linearised_twin
    from unlazy.widths.check import width_check

_TOPICS = ("adaptive", "emergence", "estimators", "images", "kernels", "models", "probes", "scope", "theory")

_HOME = {
    # watch a training
    "Scope": "scope.scope",
    "Verdict": "scope.verdict",
    "judge": "scope.verdict",
    "width_check": "widths.check",
    # kernels of any network, and how to compare them
    "tangent_kernel": "kernels.tangent",
    "layer_kernels": "kernels.tangent",
    "plan_tangent": "kernels.tangent",
    "tangent_operator": "kernels.operator",
    "overlap_kernel": "kernels.overlap",
    "path_count": "kernels.overlap",
    "record": "kernels.gate_calls",
    "gram_file": "kernels.gram_on_disk",
    "GramFile": "kernels.gram_tiles",
    "alignment": "kernels.compare",
    "kernel_distance": "kernels.compare",
    "relative_change": "kernels.compare",
    "effective_rank": "kernels.compare",
    # networks of gates and experts
    "DLGN": "models.build",
    "ReLUNet": "models.build",
    "DeepLinearNet": "models.build",
    "build": "models.build",
    "NetSpec": "models.spec",
    "HardGate": "models.gates",
    "SoftGate": "models.gates",
    "half_spaces": "probes.halfspaces",
    # scikit-learn estimators that explain themselves
    "HalfSpaceClassifier": "estimators.half_space",
    "HalfSpaceRegressor": "estimators.half_space",
    "TangentKernelRidge": "estimators.kernel_machines",
    "TangentKernelClassifier": "estimators.kernel_machines",
    # data and training
    "Dataset": "data.dataset",
    "Circle": "data.circle",
    "load_images": "data.images",
    "fit": "training.fit",
    "Recipe": "training.fit",
    "Member": "training.ensemble",
    "linearise": "training.linearised",
    "linearised_twin": "training.twin",
    # runs on disk
    "Run": "store",
    "find_runs": "store",
    # studies and their claims
    "Study": "studies.study",
    "Figure": "studies.study",
    "Rows": "studies.table",
    "Claim": "claims.claim",
    "Part": "claims.claim",
    "Quantity": "claims.claim",
    "Shown": "claims.claim",
}

__all__ = ["InputError", "StoreError", "UnlazyError", "Unsupported", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _TOPICS:
        return importlib.import_module(f"unlazy.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'unlazy' has no attribute {name!r}{_topic_hint(name)}")
    value = getattr(importlib.import_module(f"unlazy.{_HOME[name]}"), name)
    value = importlib.import_module("unlazy.checks").explained(value)
    value.__module__ = "unlazy"  # help() and error messages say unlazy.Scope, the name users import
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_TOPICS])


def _topic_hint(name: str) -> str:
    """The address of a public name that lives in a topic, as an addition to an error message."""
    if name.startswith("_") or find_spec(f"unlazy.{name}") is not None:
        return ""  # a module that is about to be imported: searching the topics would load torch
    homes = [topic for topic in _TOPICS if name in importlib.import_module(f"unlazy.{topic}").__all__]
    return f"; it is unlazy.{homes[0]}.{name}" if homes else ""
