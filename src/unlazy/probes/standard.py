"""Probes for our own training loops: losses by group, active paths, kernels, half-spaces, outputs.

Each is a plain function ``(model, batch) -> dict of tensors``; a stack of networks gives a leading member axis.
One number per member becomes a curve, anything larger an array on disk.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unlazy.data.dataset import Dataset
from unlazy.kernels.compare import regression_loss
from unlazy.kernels.overlap import (
    free_path_kernel,
    hard_gates,
    overlap_kernel,
    path_count,
    path_count_from_gates,
)
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.net import GatedNet
from unlazy.probes.halfspaces import half_spaces
from unlazy.probes.paths import cell_floor, count_cells

Measured = dict[str, Tensor]


def losses(model: nn.Module, batch: Dataset) -> Measured:
    """Mean squared error on all samples and on each group, of any module."""
    with torch.no_grad():
        return _by_group("loss", (model(batch.x) - batch.y).square().mean(-1), batch)


def curves(model: GatedNet, batch: Dataset) -> Measured:
    """Losses as trained and with hard gates, and mean active paths, on all samples and on each group."""
    with torch.no_grad():
        gates = model.gates(batch.x)
        hard = gates.hard()
        as_trained = (model.value(batch.x, gates) - batch.y).square().mean(-1)  # [*S, n]
        measured = _by_group("loss", as_trained, batch)
        measured["loss_hard_gates"] = (model.value(batch.x, hard) - batch.y).square().mean((-2, -1))
        return measured | _by_group("paths", path_count_from_gates(hard), batch)


def _by_group(name: str, values: Tensor, batch: Dataset) -> Measured:
    means = {f"{name}_{group}": values[..., inside].mean(-1) for group, inside in batch.groups.items()}
    return {name: values.mean(-1)} | means


def kernels(model: GatedNet, batch: Dataset) -> Measured:
    """Overlap and tangent kernel of the batch."""
    return {"overlap": overlap_kernel(model, batch.x).float(), "tangent": tangent_kernel(model, batch.x)}


def portrait(model: GatedNet, batch: Dataset) -> Measured:
    """Output and path count at every sample, and the half-spaces of linear gates: what a page draws."""
    with torch.no_grad():
        measured = {"output": model(batch.x)[..., 0], "paths": path_count(model, batch.x).float()}
    if model.settings.has_half_space_gates:
        spaces = half_spaces(model)
        measured |= {"normals": spaces.normals, "offsets": spaces.offsets}
    return measured


def tangents(model: nn.Module, batch: Dataset) -> Measured:
    """Tangent kernel of any module."""
    return {"tangent": tangent_kernel(model, batch.x)}


def floors(model: GatedNet, batch: Dataset) -> Measured:
    """The least loss that these hard gates allow, member by member.

    ``cells``: activation patterns met. ``cell_floor``: least loss of any function constant (constant experts) or affine
    (otherwise) on each cell. ``free_paths_loss``: ridgeless regression with a free value on every path.
    """
    settings, gates = model.settings, hard_gates(model, batch.x)
    constant = settings.experts == "constant"
    start = batch.x.new_ones(()) if constant else batch.x @ batch.x.T
    kernel = free_path_kernel(gates, start.double(), settings.value_bias)
    stacked = [layer if model.members is not None else layer[None] for layer in gates]
    per_member = list(zip(*stacked, strict=True))
    floor = [cell_floor(layers, batch.y, None if constant else batch.x) for layers in per_member]
    measured = {
        "cells": torch.tensor([count_cells(layers) for layers in per_member], dtype=torch.float64),
        "cell_floor": torch.stack(floor),
        "free_paths_loss": regression_loss(kernel, batch.y).reshape(-1),
    }
    return measured if model.members is not None else {name: value[0] for name, value in measured.items()}
