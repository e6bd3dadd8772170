"""Estimators for tables, in the manner of scikit-learn: half-space networks that explain every prediction.

``HalfSpaceClassifier``, ``HalfSpaceRegressor``, ``TangentKernelRidge`` and ``TangentKernelClassifier`` stand at the top of
``unlazy``. Here is what they return, and what goes beyond them.
"""

from unlazy.checks import explain_errors
from unlazy.estimators.distillation import DistilledRules
from unlazy.estimators.drawing import CellsDisplay, draw_cells, draw_normals, draw_rules
from unlazy.estimators.explanations import EstimatorHalfSpaces, Explanation, Regions
from unlazy.estimators.flips import Flip
from unlazy.estimators.half_space import load_estimator
from unlazy.estimators.kernel_machines import (
    AdaptiveTangentRegressor,
    RecursiveFeatureClassifier,
    RecursiveFeatureMachine,
)
from unlazy.estimators.path_sum import ActivePath, PathSum

__all__ = [
    "ActivePath",
    "AdaptiveTangentRegressor",
    "CellsDisplay",
    "DistilledRules",
    "EstimatorHalfSpaces",
    "Explanation",
    "Flip",
    "PathSum",
    "RecursiveFeatureClassifier",
    "RecursiveFeatureMachine",
    "Regions",
    "draw_cells",
    "draw_normals",
    "draw_rules",
    "load_estimator",
]

explain_errors(globals())
