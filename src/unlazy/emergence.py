"""The emergence paper as code: pattern data, the truncated network, gradient steps, and bounds for fixed features."""

from unlazy.checks import explain_errors
from unlazy.data.patterns import Patterns, check_assumptions
from unlazy.data.planted import Planted, subspace_overlap
from unlazy.models.truncated import TruncatedNet
from unlazy.theory.bounds import fixed_feature_bound, learning_conditions, query_bound
from unlazy.theory.emergence import decompose, explicit_network
from unlazy.theory.queries import AdversarialOracle, HonestOracle, NoisyOracle, find_relevant
from unlazy.theory.two_layers import decompose_module

__all__ = [
    "AdversarialOracle",
    "HonestOracle",
    "NoisyOracle",
    "Patterns",
    "Planted",
    "TruncatedNet",
    "check_assumptions",
    "decompose",
    "decompose_module",
    "explicit_network",
    "find_relevant",
    "fixed_feature_bound",
    "learning_conditions",
    "query_bound",
    "subspace_overlap",
]

explain_errors(globals())
