"""Kernel movement against width: it falls in the NTK parametrisation and stays in the maximal-update one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from unlazy.claims.verdict import interval
from unlazy.kernels.compare import kernel_distance
from unlazy.models.build import build_stack
from unlazy.models.spec import Init, relu_spec
from unlazy.probes.classes import dense_tangent_kernel
from unlazy.runtime import provenance, short_hash, threads
from unlazy.store import write_file
from unlazy.studies.scope.calibration.data import task
from unlazy.studies.scope.calibration.settings import Settings

PARAMETRISATIONS = ("ntk", "mup")
SAMPLES, DEPTH, RATE = 64, 2, 0.3


def measure_widths(settings: Settings, folder: Path) -> dict[str, Any]:
    """Movement of every seed at every width, ``[width][seed]``, and fitted exponents; kept in ``folder``."""
    wanted = {"widths": settings.widths, "seeds": settings.width_seeds, "steps": settings.width_steps, "version": 1}
    path = folder / f"widths-{short_hash(wanted)}.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    found: dict[str, Any] = {"widths": list(settings.widths), "provenance": provenance("float64")}
    with threads(1):
        for parametrisation in PARAMETRISATIONS:
            rate = learning_rate(parametrisation, settings)
            rows = [moved(parametrisation, width, rate, settings) for width in settings.widths]
            found[parametrisation] = {name: [row[name] for row in rows] for name in rows[0]}
    write_file(path, (json.dumps(found) + "\n").encode())
    return found


def exponents(widths: ArrayLike, movement: ArrayLike) -> dict[str, Any]:
    """Slope of log movement against log width for each seed; their median and its 95 % interval."""
    x, y = np.log(np.asarray(widths, dtype=float)), np.log(np.asarray(movement, dtype=float))
    centred = x - x.mean()
    slopes: NDArray[np.float64] = centred @ y / (centred @ centred)
    return {"each": slopes.tolist(), "median": float(np.median(slopes)), "interval": list(interval(slopes))}


def learning_rate(parametrisation: str, settings: Settings) -> float:
    """``RATE`` over the largest curvature of the narrowest networks at the start; the same at every width."""
    x, _ = _samples()
    net = _stack(parametrisation, settings.widths[0], settings)
    top = torch.linalg.eigvalsh(dense_tangent_kernel(net, x))[:, -1].mean()
    return RATE / (2 * float(top) / SAMPLES)


def moved(parametrisation: str, width: int, rate: float, settings: Settings) -> dict[str, list[float]]:
    """Gradient descent on squared errors; how far the tangent kernels of all seeds went, and the losses they reached."""
    x, y = _samples()
    net = _stack(parametrisation, width, settings)
    start = dense_tangent_kernel(net, x)
    optimiser = torch.optim.SGD(net.parameter_groups(rate, "sgd"))
    for _ in range(settings.width_steps):
        optimiser.zero_grad()
        (net(x) - y).square().mean((-2, -1)).sum().backward()
        optimiser.step()
    end = dense_tangent_kernel(net, x)
    with torch.no_grad():
        losses = (net(x) - y).square().mean((-2, -1))
    change = torch.linalg.matrix_norm(end - start) / torch.linalg.matrix_norm(start)
    return {"change": change.tolist(), "distance": kernel_distance(end, start).tolist(), "loss": losses.tolist()}


def _samples() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = task("patterns").train
    return x[:SAMPLES].double(), y[:SAMPLES].double()


def _stack(parametrisation: str, width: int, settings: Settings) -> Any:
    spec = relu_spec(64, 1, width=width, depth=DEPTH, init=Init("he"), parametrisation=parametrisation)
    return build_stack(spec, range(settings.width_seeds), dtype=torch.float64)
