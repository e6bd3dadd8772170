"""From networks to numbers: identities on random networks, regions over training, the law of the value kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unlazy.kernels.compare import kernel_distance
from unlazy.kernels.overlap import hard_gates
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.net import GatedNet
from unlazy.probes.paths import count_cells
from unlazy.studies.halfspace.theorems import identities as exact
from unlazy.studies.halfspace.theorems.settings import KINDS, Settings, Size
from unlazy.studies.halfspace.theorems.train import Job
from unlazy.theory.regions import circle_pieces, count_path_parts
from unlazy.theory.value_kernel import draw_value_kernels, expected_value_kernel
from unlazy.training.fit import Progress

Values = dict[str, list[float]]


# --- random networks -------------------------------------------------------------------------------


def random_networks(settings: Settings, progress: Progress) -> Values:
    """``{name: one number per network}``, networks in order of seed, then of size."""
    compatible = {size: exact.compatible_patterns(size) for size in settings.sizes}
    values: Values = {}
    for seed in range(settings.seeds):
        for size in settings.sizes:
            for name, value in _one_size(settings, size, seed, compatible[size]).items():
                values.setdefault(name, []).append(value)
        progress(seed + 1, settings.seeds)
    return values


def _one_size(settings: Settings, size: Size, seed: int, compatible: Any) -> dict[str, float]:
    x, new = (exact.random_points(size, seed + shift, settings.points) for shift in (0, 10_000))
    nets = {kind: exact.random_network(kind, size, seed, x) for kind in KINDS}
    found: dict[str, float] = {}
    for kind, net in nets.items():
        found[f"path_sum_{kind}"] = exact.path_sum_error(net, x)
        found[f"lemma_{kind}"] = exact.lemma_error(net, x)
    for kind in ("relu", "relu-biases", "dlgn", "dlgn-biases"):
        net = nets[kind]
        found[f"overlap_{kind}"] = exact.overlap_error(net, x)
        found[f"union_{kind}"] = exact.union_mismatch(net, x, compatible)
        found[f"leaving_{kind}"] = exact.segments_leaving(net, x)
        found[f"ridge_{kind}"], found[f"ridgeless_{kind}"] = exact.regression_errors(net, x, new, seed)
    for kind in ("dlgn", "dlgn-biases"):
        found[f"polyhedron_{kind}"] = exact.polyhedron_mismatch(nets[kind], x)
    found["antipodal_dlgn"] = exact.antipodal_error(nets["dlgn"], x)
    found["normals_dlgn"] = exact.normal_movement(nets["dlgn"], seed)
    if size[0] == 2:
        for kind in ("relu", "dlgn"):
            found[f"split_{kind}"] = exact.split_share(nets[kind])
            found[f"change_{kind}"] = exact.region_change(nets[kind], seed)
    return found


def worked_examples(settings: Settings) -> dict[str, Any]:
    """What needs no random network: Figure 1's two examples, and patterns counted one by one."""
    return {
        "two_parts": exact.example_parts(),
        "steps": list(exact.STEPS),
        "jump_relu": [exact.example_jump(step, linear_gates=False) for step in exact.STEPS],
        "jump_dlgn": [exact.example_jump(step, linear_gates=True) for step in exact.STEPS],
        "pattern_count_error": [exact.pattern_count_error(size) for size in settings.sizes],
    }


# --- regions over training -------------------------------------------------------------------------


def regions(job: Job, progress: Callable[[], None]) -> dict[str, Any]:
    """``{epochs, values: {name: [epochs][members]}}``: exact counts on the whole circle, and what the data points see.

    ``cells``, ``cells_seen``: activation patterns; ``path_regions``: paths active somewhere, as a share of all; ``split``: share
    of these whose region falls into several parts, for bias-free networks (there a part of the circle is one of the plane).
    """
    x = job.stack.circle().dataset(torch.float64).x
    values: dict[str, list[list[float]]] = {}
    for epoch in job.settings.looks:
        counted = [_count(net, x) for net in job.networks(epoch)]
        for name in counted[0]:
            values.setdefault(name, []).append([row[name] for row in counted])
        progress()
    return {"epochs": list(job.settings.looks), "values": values}


def _count(net: GatedNet, x: Tensor) -> dict[str, float]:
    pieces = circle_pieces(net)
    parts = count_path_parts(pieces)
    found = {
        "cells": float(count_cells(pieces.gates)),
        "cells_seen": float(count_cells(hard_gates(net, x))),
        "path_regions": float((parts > 0).mean()),
    }
    if not net.settings.value_bias:
        found["split"] = float((parts > 1).sum() / max(1, (parts > 0).sum()))
    return found


# --- the law of the value kernel -------------------------------------------------------------------


def law(job: Job, settings: Settings, progress: Callable[[], None]) -> dict[str, Any]:
    """The kernel of the value weights, averaged over fresh weights, beside its exact mean; gates from several epochs.

    Per epoch and member: ``ratio`` of the traces and its standard ``error``; ``cosine_mean`` of averaged kernel and law;
    ``cosine_trained`` of the kernel at the trained values and the law. ``entries``: averaged and exact, seed 0, last epoch.
    """
    data = job.stack.circle().dataset(torch.float64).x
    x = data[:: -(-len(data) // settings.law_points)]
    names = ("ratio", "error", "cosine_mean", "cosine_trained")
    values: dict[str, list[list[float]]] = {name: [] for name in names}
    entries: dict[str, list[float]] = {}
    for epoch in settings.law_epochs:
        rows = []
        for seed, net in enumerate(job.networks(epoch)):
            drawn, wanted = _draw(net, x, settings.draws, seed + 1_000_000 * epoch)
            trained = tangent_kernel(net.hard(), x, parameters="value")
            ratio, error = _trace_ratio(drawn, wanted)
            near = [1 - float(kernel_distance(kernel, wanted)) for kernel in (drawn.mean(0), trained)]
            rows.append((ratio, error, *near))
            if seed == 0:
                entries = {"averaged": _upper(drawn.mean(0)), "exact": _upper(wanted)}
        for name, column in zip(names, zip(*rows, strict=True), strict=True):
            values[name].append(list(column))
        progress()
    return {"epochs": list(settings.law_epochs), "draws": settings.draws, "values": values, "entries": entries}


def law_on_random_networks(settings: Settings) -> Values:
    """How many standard errors the average over fresh values lies from the law, per random network."""
    found: Values = {}
    for kind in ("dlgn", "pwc"):
        scores = []
        for seed in range(settings.seeds):
            size = settings.sizes[seed % len(settings.sizes)]
            x = exact.random_points(size, seed, 6)
            drawn, wanted = _draw(exact.random_network(kind, size, seed, x), x, 4 * settings.draws, seed)
            ratio, error = _trace_ratio(drawn, wanted)
            scores.append((ratio - 1) / error)
        found[f"law_{kind}"] = scores
    return found


def _draw(net: GatedNet, x: Tensor, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """Kernels over fresh value weights of variance 1/width, and their exact mean."""
    deviation = net.settings.width**-0.5
    return draw_value_kernels(net, x, deviation, draws, seed), expected_value_kernel(net, x, deviation)


def _trace_ratio(drawn: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Mean and standard error, over draws, of the trace relative to its exact mean."""
    ratios = drawn.diagonal(dim1=1, dim2=2).sum(1) / wanted.diagonal().sum()
    return float(ratios.mean()), float(ratios.std() / len(ratios) ** 0.5)


def _upper(kernel: Tensor) -> list[float]:
    rows, columns = torch.triu_indices(*kernel.shape)
    return kernel[rows, columns].tolist()
