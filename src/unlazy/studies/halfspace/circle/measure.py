"""From runs to a results table: per stack and member, the numbers that claims and figures speak of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unlazy.kernels.compare import kernel_distance, relative_change
from unlazy.probes.halfspaces import HalfSpaces, axial_resultant, share_like, share_near
from unlazy.probes.paths import allocation
from unlazy.store import Run
from unlazy.studies.halfspace.circle.settings import Stack
from unlazy.studies.results import plain

REACHED = 0.01  # the paper's "learned"
PLATEAU = 0.27  # top half fitted, bottom half not: the loss stands near 0.25
HALF_FITTED = 0.05  # a half counts as fitted at a tenth of its starting loss
ARTEFACT_HALF_CYCLES = 4  # what oscillates faster than this on the top half is an artefact there
TOP = torch.tensor([0.0, 1.0])
Values = dict[str, list[Any]]


def measure(stack: Stack, run: Run) -> dict[str, Any]:
    """``{members, epochs, values: {name: one entry per member}}``; ``None`` = never reached, or not a number."""
    unit = stack.recipe().steps_per_epoch(stack.circle().n)
    values = _curves(run, unit) | _kernels(run, unit) | _half_spaces(stack, run, unit) | _artefacts(stack, run, unit)
    return {
        "run": run.id,
        "members": run.members,
        "epochs": stack.epochs,
        "values": {name: plain(value) for name, value in values.items()},
    }


def _curves(run: Run, unit: int) -> dict[str, NDArray[Any]]:
    whole = run.scalars("loss")[0] % unit == 0  # the page's frames within an epoch do not count here
    epochs = run.scalars("loss")[0][whole] // unit
    loss, top, bottom, hard = (
        run.scalars(name)[1][whole] for name in ("loss", "loss_top", "loss_bottom", "loss_hard_gates")
    )
    paths_top, paths_bottom = (torch.from_numpy(run.scalars(f"paths_{half}")[1][whole]) for half in ("top", "bottom"))
    favour = allocation(paths_top, paths_bottom).numpy()
    plateau = _first_epoch(loss <= PLATEAU, epochs)
    values = {
        "epochs_to_reach": _first_epoch(loss < REACHED, epochs),
        "epochs_top": _first_epoch(top < HALF_FITTED, epochs),
        "epochs_bottom": _first_epoch(bottom < HALF_FITTED, epochs),
        "epochs_plateau": plateau,
        "loss_end": loss[-1],
        "loss_hard_gates_end": hard[-1],
        "allocation_plateau": _at_epoch(favour, epochs, plateau),
        "allocation_end": favour[-1],
    }
    for epoch in (0, 1, 3, 10, 30, 100, 200):
        if epoch in epochs:
            row = int(np.flatnonzero(epochs == epoch)[0])
            values |= {f"loss_{epoch}": loss[row], f"allocation_{epoch}": favour[row]}
    for name in ("cells", "cell_floor", "free_paths_loss"):
        recorded = run.scalars(name)[1]
        values |= {f"{name}_0": recorded[0], f"{name}_end": recorded[-1]}
    return values


def _kernels(run: Run, unit: int) -> dict[str, NDArray[Any]]:
    shown = run.array_steps("overlap")
    overlap = {step // unit: _tensor(run, "overlap", step) for step in shown}
    tangent = {step // unit: _tensor(run, "tangent", step) for step in shown}
    last = max(overlap)
    values: dict[str, Tensor] = {}
    for first, second in ((0, 3), (3, 200), (0, 200)):
        if first in overlap and second in overlap:
            values[f"overlap_cosine_{first}_{second}"] = 1 - kernel_distance(overlap[first], overlap[second])
    for epoch, kernel in tangent.items():
        names = [str(epoch)] + (["end"] if epoch == last else [])
        diagonal = kernel.diagonal(dim1=-2, dim2=-1)
        for name in names:
            values[f"tangent_top_share_{name}"] = diagonal[:, : diagonal.shape[1] // 2].sum(1) / diagonal.sum(1)
            if epoch:
                values[f"tangent_change_{name}"] = relative_change(kernel, tangent[0])
                values[f"tangent_distance_{name}"] = kernel_distance(kernel, tangent[0])
    return {name: value.numpy() for name, value in values.items()}


def _half_spaces(stack: Stack, run: Run, unit: int) -> dict[str, NDArray[Any]]:
    """Per member a list over layers; nothing for networks without half-spaces."""
    shown, data = run.array_steps("normals"), stack.circle().dataset()
    values: dict[str, Tensor] = {}
    for step in shown:
        normals = _tensor(run, "normals", step)  # [S, layers, units, 2]
        spaces = HalfSpaces(normals, _tensor(run, "offsets", step))
        for name in _moments(step // unit, step == shown[-1]):
            values[f"near_top_30_{name}"] = share_near(normals, TOP, 30)
            values[f"near_top_45_{name}"] = share_near(normals, TOP, 45)
            values[f"like_top_half_{name}"] = share_like(spaces, data.x, data.groups["top"])
            values[f"axial_{name}"] = axial_resultant(normals)
    return {name: value.numpy() for name, value in values.items()}


def _artefacts(stack: Stack, run: Run, unit: int) -> dict[str, NDArray[Any]]:
    """Root mean square of what oscillates too fast in the top half's residual."""
    data = stack.circle().dataset()
    top, target = data.groups["top"], data.y[:, 0]
    shown = run.array_steps("output")
    values = {}
    for step in shown:
        residual = _tensor(run, "output", step)[:, top] - target[top]
        for name in _moments(step // unit, step == shown[-1]):
            values[f"artefact_rms_{name}"] = fast_rms(residual, ARTEFACT_HALF_CYCLES).numpy()
    return values


def _moments(epoch: int, is_last: bool) -> list[str]:
    """The names under which an epoch enters the table: the epochs of the paper's figures, and the end."""
    return ([str(epoch)] if epoch in (0, 3, 200) else []) + (["end"] if is_last else [])


def fast_rms(signal: Tensor, half_cycles: int) -> Tensor:
    """Root mean square of the cosine components of a ``[..., n]`` signal with more than ``half_cycles`` half cycles.

    The basis cos(pi k (j + 1/2) / n), k = 0..n-1, is orthogonal and counts half cycles over the window; its even
    extension has no jump at the ends, so a slow residual does not leak into the fast part.
    """
    n = signal.shape[-1]
    k, j = torch.arange(n, dtype=torch.float64), torch.arange(n, dtype=torch.float64)
    basis = torch.cos(math.pi * k[:, None] * (j + 0.5) / n)
    basis = basis / basis.norm(dim=1, keepdim=True)
    fast = (signal.double() @ basis.T)[..., half_cycles + 1 :]
    return (fast.square().sum(-1) / n).sqrt()


def _first_epoch(reached: NDArray[np.bool_], epochs: NDArray[np.int64]) -> NDArray[np.float64]:
    """First recorded epoch at which each member's column is true; infinity if never."""
    first = np.where(reached.any(0), epochs[reached.argmax(0)], np.inf)
    return first.astype(np.float64)


def _at_epoch(
    series: NDArray[np.float64], epochs: NDArray[np.int64], wanted: NDArray[np.float64]
) -> NDArray[np.float64]:
    found = [
        series[int(np.flatnonzero(epochs == epoch)[0]), member] if np.isfinite(epoch) else np.nan
        for member, epoch in enumerate(wanted)
    ]
    return np.array(found)


def _tensor(run: Run, quantity: str, step: int) -> Tensor:
    return torch.from_numpy(run.array(quantity, step)).double()


def select(table: Mapping[str, Any], name: str, beta: float | None = None) -> NDArray[np.float64]:
    """One quantity of the members with this slope, in order of seed; never reached = infinity, layers as columns."""
    rows = [
        value
        for member, value in zip(table["members"], table["values"][name], strict=True)
        if beta is None or member["beta"] == beta
    ]
    chosen = np.array(rows, dtype=np.float64)  # None becomes nan
    return np.where(np.isnan(chosen), np.inf, chosen) if name.startswith("epochs") else chosen
