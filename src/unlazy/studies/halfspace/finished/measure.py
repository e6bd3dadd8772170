"""From copies and retrainings to a table: one entry per network and kind of gates, one number per seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from unlazy.store import Run
from unlazy.studies.halfspace.finished.settings import PLATEAU, Copies
from unlazy.studies.halfspace.moments import curve, plateau_epochs
from unlazy.studies.results import plain
from unlazy.training.finished import coarse, finished_at, kernel_losses, retrained_curves


def measure(copies: Copies, runs: Path) -> dict[str, Any]:
    """``{run, label, preset, arm, kind, seeds, values}``; values by ``QUANTITY_MOMENT``.

    ``retrained``: final loss of fresh experts. ``epochs_to_learn``: until 0.01. ``network``: the copied network's own loss.
    The rest: regression with kernels of that moment. ``time_finished``: t* among the copied epochs; ``time_plateau``.
    """
    nets, data, settings = copies.nets, copies.nets.data(), copies.retraining()
    run, trained = Run(copies.folder(runs)), Run(nets.folder(runs))
    loss, epochs = retrained_curves(run, data, settings, len(copies.moments))
    plateau = np.array([np.nan if epoch is None else epoch for epoch in plateau_epochs(nets, trained)])
    timed = [row for row, name in enumerate(copies.moments) if name != PLATEAU]
    times = [*copies.settings.copied, nets.epochs]
    values = {
        "time_finished": finished_at(times, loss[timed], settings.factor, settings.learned_loss(data)),
        "time_plateau": plateau,
    }
    few = coarse(data, settings.kernel_samples)
    own = curve(nets, trained, "loss_hard_gates" if copies.kind == "hard" else "loss")[1]  # [1 + epochs, seeds]
    for row, (name, net) in enumerate(zip(copies.moments, copies.networks(runs), strict=True)):
        found = {"retrained": loss[row], "epochs_to_learn": epochs[row]} | kernel_losses(net, few, settings)
        when = plateau if name == PLATEAU else np.full(nets.seeds, float(times[timed.index(row)]))
        found["network"] = np.array([own[int(e), seed] if e >= 0 else np.nan for seed, e in enumerate(when)])
        for quantity, numbers in found.items():
            unseen = np.isnan(plateau) if name == PLATEAU else np.zeros(nets.seeds, dtype=bool)
            values[f"{quantity}_{name}"] = np.where(unseen, np.nan, numbers)
    return {
        "run": run.id,
        "label": copies.label,
        "preset": nets.preset,
        "arm": nets.arm,
        "kind": copies.kind,
        "seeds": nets.seeds,
        "values": {name: plain(numbers) for name, numbers in values.items()},
    }
