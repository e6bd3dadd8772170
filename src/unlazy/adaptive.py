"""Features that adapt: the adaptive tangent paper's models and penalties, averaged tangents, gradient outer products."""

from unlazy.checks import explain_errors
from unlazy.kernels.agop import Ansatz, agop, feature_ansatz, layer_agops
from unlazy.kernels.averaged_tangents import ParameterPath, averaged_diagonal, averaged_tangents, linearisation_quality
from unlazy.theory.adaptive_model import AdaptiveTangents
from unlazy.theory.adaptive_solutions import solve_structured, solve_unstructured
from unlazy.theory.difficulty import Difficulty, difficulty
from unlazy.theory.penalties import Power, circled_plus, effective_penalty
from unlazy.theory.tangent_layers import tangent_layers
from unlazy.training.feature_freeze import FeaturesFinished, Retraining, features_finished
from unlazy.training.linearised import GradientFlow, Linearised
from unlazy.training.recursive_features import FeatureMachine, laplace_kernel, recursive_features, top_directions

__all__ = [
    "AdaptiveTangents",
    "Ansatz",
    "Difficulty",
    "FeatureMachine",
    "FeaturesFinished",
    "GradientFlow",
    "Linearised",
    "ParameterPath",
    "Power",
    "Retraining",
    "agop",
    "averaged_diagonal",
    "averaged_tangents",
    "circled_plus",
    "difficulty",
    "effective_penalty",
    "feature_ansatz",
    "features_finished",
    "laplace_kernel",
    "layer_agops",
    "linearisation_quality",
    "recursive_features",
    "solve_structured",
    "solve_unstructured",
    "tangent_layers",
    "top_directions",
]

explain_errors(globals())
