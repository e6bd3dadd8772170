"""What the noise of a constant rate hides: networks of Table 1, trained on from their last state at a tenth of the rate.

A network that a constant rate keeps shaking ends its epochs at better and worse points by chance. A few more epochs at a smaller
rate bring it to rest, so that what is left of a difference is not that noise. The paper's rate is constant: Table 1 shows the
networks as that leaves them, and claims look here only where they do not stand still there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from unlazy.data.images import Images, load_images
from unlazy.runtime import provenance, threads
from unlazy.store import Run, write_file
from unlazy.studies.halfspace.tables.dynamics import folders_in, jobs_of, network_of, trained_on
from unlazy.training.images import ImageRecipe, accuracies, on_device
from unlazy.training.together import Stack, train_together

SHARE = 0.1  # of the rate before
EPOCHS = 20
ACCURACIES = ("train_as_trained", "test_as_trained", "test_hard_gates")


def cool(
    folder: Path, train: Images, test: Images, epochs: int = EPOCHS, *, device: str = "cpu"
) -> list[dict[str, Any]]:
    """The networks of one run, each before and after ``epochs`` epochs at ``SHARE`` of its rate, with Adam begun anew."""
    run = Run(folder)
    recipe = ImageRecipe(**run.header["recipe"]["training"])
    last = max(job.step for job in jobs_of(folder))
    jobs = [job for job in jobs_of(folder) if job.step == last]
    nets = [network_of(job).to(device) for job in jobs]
    data, held_out = on_device(recipe, train, test, device=device)
    before = [accuracies(net, data, held_out) for net in nets]
    seeds = [int(run.members[job.member]["seed"]) for job in jobs]
    slower = replace(recipe, lr=SHARE * recipe.lr, epochs=epochs)
    looks = range(1, epochs + 1)
    after = train_together([Stack("", nets, seeds)], train, test, slower, device=device, looks=looks)[""]
    return [
        {
            "model": run.header["recipe"]["model_name"],
            "seed": seed,
            "epochs_before": last // int(run.header["data"]["per_epoch"]),
            "rate_before": recipe.lr,
            "epochs": epochs,
            "rate": slower.lr,
            "before": {name: old[name] for name in ACCURACIES},
            "after": {name: new[name] for name in ACCURACIES},
            "curve": new["curve"],
            "seconds": new["seconds"],
        }
        for seed, old, new in zip(seeds, before, after, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """All runs of a folder, one process each, into one file."""
    parser = argparse.ArgumentParser(description="Train networks of Table 1 on at a tenth of their rate.")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the run folders")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    chosen = parser.parse_args(arguments)
    folders = folders_in(chosen.runs)
    train = trained_on(folders[0], chosen.data)
    test = load_images(train.name, "test", chosen.data)
    made_by = provenance("float32", chosen.device) | {"data_sha256": f"{train.fingerprint} {test.fingerprint}"}
    jobs = [(folder, train, test, chosen.epochs, chosen.device) for folder in folders]
    with ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn")) as pool:
        found = [table for tables in pool.map(_one, jobs) for table in tables]
    write_file(chosen.out, (json.dumps({"networks": found, "provenance": made_by}, indent=1) + "\n").encode())
    sys.stdout.write(f"{len(found)} networks kept in {chosen.out}\n")


def _one(job: tuple[Path, Images, Images, int, str]) -> list[dict[str, Any]]:
    folder, train, test, epochs, device = job
    with threads(1):
        return cool(folder, train, test, epochs, device=device)


if __name__ == "__main__":
    main()
