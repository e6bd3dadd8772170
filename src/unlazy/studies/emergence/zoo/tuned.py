"""The best a fixed kernel does on one sample of the zoo: two shapes, several widths and ridges, chosen on held rows."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from unlazy.studies.emergence.common import Values, accuracy
from unlazy.studies.emergence.zoo.measure import ANIMALS, PROBED, Sample, Settings, found_by, with_seed
from unlazy.training.recursive_features import typical_distance

SHAPES = ("laplace", "gaussian")
WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""In units of the typical distance of two rows."""
RIDGES = (1e-4, 1e-2, 1e-1, 1.0)


def kernel_of(shape: str, x: Float64[Tensor, "n d"], z: Float64[Tensor, "m d"], width: float) -> Float64[Tensor, "n m"]:
    """exp(-|x - z| / width), or exp(-|x - z|^2 / (2 width^2))."""
    distances = torch.cdist(x, z) / width
    return (-distances).exp() if shape == "laplace" else (-distances.square() / 2).exp()


def kernel(settings: Settings, name: str, n: int, seed: int) -> Values:
    """Kernel ridge regression with the shape, width and ridge that are best on held rows."""
    data = with_seed(ANIMALS[name], seed)
    sample, hidden = Sample.of(data, n, settings), data.directions()
    x, y, held = sample.x.double(), sample.y.double(), sample.held_x.double()
    typical = typical_distance(x)
    best, shape, width, coefficients = -1.0, SHAPES[0], typical, y
    values: Values = {}
    for tried in ((shape, factor) for shape in SHAPES for factor in WIDTHS):
        gram, across = (kernel_of(tried[0], rows, x, tried[1] * typical) for rows in (x, held))
        for ridge in RIDGES:
            shifted = gram.clone()
            shifted.diagonal().add_(ridge)
            solved = torch.cholesky_solve(y[:, None], torch.linalg.cholesky(shifted))[:, 0]
            right = accuracy(across @ solved, sample.held_y.double())
            if right > best:
                best, shape, width, coefficients = right, tried[0], tried[1] * typical, solved
                values = {"kernel_shape": shape, "kernel_width": tried[1], "kernel_ridge": ridge}
    output = kernel_of(shape, sample.test_x.double(), x, width) @ coefficients
    rows = x[:PROBED].clone().requires_grad_()
    (pulls,) = torch.autograd.grad((kernel_of(shape, rows, x, width) @ coefficients).sum(), rows)
    return values | {
        "kernel_accuracy": accuracy(output, sample.test_y.double()),
        "kernel_recovered": found_by(pulls.T @ pulls / len(rows), sample.x, hidden),
    }
