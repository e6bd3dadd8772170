"""Slow and simple versions of the kernels, which fast code is tested against. For small inputs, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unlazy.kernels.paths.walks import walk
from unlazy.runtime import require


def tangent_features(model: nn.Module, x: Tensor) -> Tensor:
    """grad f_o(x_i) by trainable parameters: a forward and a backward pass per sample and output. ``[n, O, p]``."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for sample in x:
        out = model(sample[None])[0].reshape(-1)
        for value in out:
            gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
            pieces = [
                (torch.zeros_like(p) if g is None else g).reshape(-1)
                for p, g in zip(parameters, gradients, strict=True)
            ]
            rows.append(torch.cat(pieces))
    return torch.stack(rows).reshape(len(x), -1, rows[0].numel())


def tangent_kernel(model: nn.Module, x: Tensor) -> Tensor:
    """The tangent kernel of every pair of samples and outputs, ``[n, n, O, O]``."""
    rows = tangent_features(model, x)
    n, size, _ = rows.shape
    kernel = rows.new_zeros(n, n, size, size)
    for i, j in itertools.product(range(n), repeat=2):
        for a, b in itertools.product(range(size), repeat=2):
            kernel[i, j, a, b] = rows[i, a] @ rows[j, b]
    return kernel


def overlap_kernel(gates: Sequence[Tensor]) -> Tensor:
    """List every path and count those that are open on both inputs. ``gates``: booleans ``[n, m]``."""
    paths = list(itertools.product(*(range(layer.shape[-1]) for layer in gates)))
    require(len(paths) <= 100_000, f"{len(paths)} paths are too many to walk one by one; use overlap_kernel.")
    n = gates[0].shape[0]
    kernel = torch.zeros(n, n, dtype=torch.float64)
    for path in paths:
        active = [all(bool(layer[i, unit]) for layer, unit in zip(gates, path, strict=True)) for i in range(n)]
        for i, j in itertools.product(range(n), repeat=2):
            kernel[i, j] += active[i] and active[j]
    return kernel


def overlap_by_walking(model: nn.Module, x: Tensor, *, output: int = 0, bias_paths: bool = False) -> Tensor:
    """The overlap kernel of any small network: list the active paths of every input, intersect the lists. ``[n, n]``."""
    found = [set(walk(model, x[i : i + 1], bias_paths=bias_paths).output_paths[output]) for i in range(len(x))]
    return torch.tensor([[float(len(a & b)) for b in found] for a in found], dtype=torch.float64)


def path_kernel_by_walking(model: nn.Module, x: Tensor, *, output: int = 0) -> Tensor:
    """The neural path kernel likewise: every common path, input edge included, times the inputs it begins at. ``[n, n]``."""
    found = [set(walk(model, x[i : i + 1], inputs=True).output_paths[output]) for i in range(len(x))]
    flat = x.double().flatten(1)
    kernel = torch.zeros(len(x), len(x), dtype=torch.float64)
    for i, j in itertools.product(range(len(x)), repeat=2):
        for path in found[i] & found[j]:
            begin = path[0][1]
            kernel[i, j] += flat[i, begin] * flat[j, begin]
    return kernel
