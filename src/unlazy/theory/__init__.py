"""What the theorems say, as code: limits of unbounded width, sums over paths, regions.

``unlazy.theory`` offers the names below; ``unlazy.emergence`` and ``unlazy.adaptive`` offer those of the other two papers.
"""

from unlazy.checks import explain_errors
from unlazy.theory.arrangement import plane_cells
from unlazy.theory.enumerate import path_experts, path_gates, path_sum
from unlazy.theory.infinite_width import (
    Variances,
    nngp_kernel,
    ntk_limit,
    overlap_limit,
    starting_variances,
    value_kernel_limit,
)
from unlazy.theory.regions import Polyhedron, circle_pieces, path_polyhedron
from unlazy.theory.truncated_limit import truncated_kernel_limit
from unlazy.theory.value_kernel import expected_value_kernel

__all__ = [
    "Polyhedron",
    "Variances",
    "circle_pieces",
    "expected_value_kernel",
    "nngp_kernel",
    "ntk_limit",
    "overlap_limit",
    "path_experts",
    "path_gates",
    "path_polyhedron",
    "path_sum",
    "plane_cells",
    "starting_variances",
    "truncated_kernel_limit",
    "value_kernel_limit",
]

explain_errors(globals())
