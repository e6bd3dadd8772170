"""Kernels along each training, and how they compare with what was learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from unlazy.kernels.averaged import Path as Way
from unlazy.kernels.averaged import averaged_tangents, linearisation_quality, states_of
from unlazy.kernels.compare import alignment, centered_alignment, kernel_distance
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build
from unlazy.store import Run
from unlazy.studies.results import Progress
from unlazy.studies.tangent.images import twos_and_threes
from unlazy.studies.tangent.label_alignment.train import TASKS, Settings

NEAR, NEAREST, FAR = 0.1, 0.02, 0.5  # shares of the images: those nearest to y = 0, and those farthest from it


def measure(settings: Settings, run: Run, progress: Progress) -> tuple[dict[str, Any], dict[str, Any]]:
    """``VALUE_TASK`` by name, one per seed; and for the figures the kernels and curves of the first seed."""
    x = twos_and_threes(settings.data, settings.images)[0][: settings.looked_at].to(settings.device)
    spec = settings.spec(x.shape[1])
    smooth = run.array("smooth", 0)[:, : settings.looked_at, 0]  # [seeds, n]
    kept = [run.checkpoint(epoch) for epoch in settings.trajectory()]
    values: dict[str, list[Any]] = {}
    shown: dict[str, Any] = {}
    for member in range(len(TASKS) * settings.seeds):
        task, seed = TASKS[member // settings.seeds], member % settings.seeds
        states = [{name: tensor.to(x.device) for name, tensor in state.items()} for state in states_of(kept, member)]
        ends, net = [states[0], states[-1]], build(spec).to(x.device)
        way = Way(ends, settings.points)
        averaged = averaged_tangents(net, way, x)
        along = averaged_tangents(net, Way(states, max(2, settings.points // (len(states) - 1)), "gauss"), x)
        single, mean = linearisation_quality(net, way, x)
        kernel = averaged.kernel()
        ordinary = []
        for state in ends:
            net.load_state_dict(state)
            ordinary.append(tangent_kernel(net, x))
        near_zero = np.abs(smooth[seed])
        diagonal, first = (k.diagonal().double().cpu().numpy() for k in (kernel, ordinary[0]))
        found = {
            "similarity": averaged.similarity(),
            "similarity_centred": float(centered_alignment(kernel, averaged.change)),
            "similarity_start": float(alignment(ordinary[0], averaged.change)),
            "similarity_end": float(alignment(ordinary[1], averaged.change)),
            "similarity_trajectory": along.similarity(),
            "kernels_agree": float(kernel_cosine(kernel, along.kernel())),
            "snr_trajectory": along.signal_to_noise(),
            "way_over_line": length_of(states) / length_of(ends),
            "near_over_far_trajectory": near_over_far(along.kernel().diagonal().double().cpu().numpy(), near_zero),
            "near_over_far": near_over_far(diagonal, near_zero),
            "nearest_over_far": near_over_far(diagonal, near_zero, NEAREST),
            "near_over_far_relative": near_over_far(diagonal / first, near_zero),
            "near_over_far_start": near_over_far(first, near_zero),
            "rank_correlation": rank_correlation(diagonal, near_zero),
            "snr_mean": mean,
            "snr_best_single": max(single),
            "fit": float((averaged.end[:, 0].cpu() - _target(smooth[seed], task)).square().mean()),
        }
        for name, value in found.items():
            values.setdefault(f"{name}_{task}", []).append(value)
        if seed == 0:
            order = np.argsort(smooth[seed])
            shown[task] = {
                "kernel": kernel.cpu().numpy()[np.ix_(order, order)],
                "smooth": smooth[seed][order],
                "end": averaged.end[:, 0].cpu().numpy()[order],
                "diagonal": diagonal[order],
                "single": single,
                "mean": mean,
            }
        progress("kernels", member + 1, len(TASKS) * settings.seeds)
    return values, shown


def kernel_cosine(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """1 for kernels that differ by a factor alone."""
    return 1 - kernel_distance(first, second)


def length_of(states: Sequence[Mapping[str, torch.Tensor]]) -> float:
    """Of the broken line through all parameters of these networks."""
    steps = (torch.cat([(last[n] - first[n]).flatten() for n in first]) for first, last in pairwise(states))
    return float(sum(step.double().norm() for step in steps))


def near_over_far(diagonal: np.ndarray, distance: np.ndarray, share: float = NEAR) -> float:
    """Mean over the share of the points nearest to y = 0 (a tenth), over the mean of the farther half."""
    order = np.argsort(distance)
    near, far = order[: max(1, int(share * len(order)))], order[int((1 - FAR) * len(order)) :]
    return float(diagonal[near].mean() / diagonal[far].mean())


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's."""
    ranks = [np.argsort(np.argsort(values)).astype(float) for values in (first, second)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _target(smooth: np.ndarray, task: str) -> torch.Tensor:
    return torch.from_numpy(smooth if task == "smooth" else np.sign(smooth))
