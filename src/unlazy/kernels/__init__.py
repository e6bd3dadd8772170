"""Kernels of networks: tangent, overlap and their variants, how to compare them, and Gram matrices larger than memory.

``unlazy.kernels`` offers the names below, beside those at the top of ``unlazy`` (``tangent_kernel``, ``overlap_kernel``,
``alignment``, ...).
"""

from unlazy.checks import explain_errors
from unlazy.kernels.binary import binary_gram
from unlazy.kernels.change_attribution import ChangeShares, attribute_change, gated_value_kernel
from unlazy.kernels.compare import (
    centered_alignment,
    kernel_velocity,
    label_kernel,
    spectrum,
    top_normalise,
    trace_normalise,
)
from unlazy.kernels.flow import kernel_flow
from unlazy.kernels.gram import Plan
from unlazy.kernels.overlap import gate_ties, layer_overlap, neural_path_kernel, plan_overlap
from unlazy.kernels.paths.walks import active_paths
from unlazy.kernels.projection import Projected, project_tangents
from unlazy.kernels.regression import kernel_regression
from unlazy.kernels.tangent import tangent_diagonal, tangent_features

__all__ = [
    "ChangeShares",
    "Plan",
    "Projected",
    "active_paths",
    "attribute_change",
    "binary_gram",
    "centered_alignment",
    "gate_ties",
    "gated_value_kernel",
    "kernel_flow",
    "kernel_regression",
    "kernel_velocity",
    "label_kernel",
    "layer_overlap",
    "neural_path_kernel",
    "plan_overlap",
    "project_tangents",
    "spectrum",
    "tangent_diagonal",
    "tangent_features",
    "top_normalise",
    "trace_normalise",
]

explain_errors(globals())
