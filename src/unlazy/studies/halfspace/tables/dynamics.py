"""Kernels of fixed images along the training of Table 1's networks, from their run folders: alignment, distance, velocity, paths.

One job is one state of one network; jobs run in several processes and are kept on disk, so an interrupted call goes on. Overlaps
count paths through hard gates. The tangent kernel is that of the function as trained; where training used hard gates, its exact
one, over the value parameters.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unlazy.data.images import Images, load_images
from unlazy.kernels.compare import centered_alignment, kernel_distance, kernel_velocity
from unlazy.kernels.overlap import overlap_kernel
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.conv import GatedImageNet, build_images
from unlazy.runtime import provenance, require, threads
from unlazy.store import Run, write_file
from unlazy.studies.halfspace.tables.compare import Training
from unlazy.studies.halfspace.tables.settings import MODELS

KERNELS = ("overlap", "tangent")
PER_CLASS = 50
TOP = 0.01  # of the images
Kernels = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Job:
    """One state of one network."""

    folder: Path
    step: int
    member: int

    @property
    def kept_in(self) -> Path:
        return self.folder / "kernels" / f"{self.step:08d}-{self.member}.npz"


def fixed_images(images: Images, per_class: int = PER_CLASS) -> Images:
    """The first images of every class, class by class."""
    rows = [torch.nonzero(images.labels == label)[:per_class, 0] for label in range(len(images.classes))]
    return images.take(torch.cat(rows))


def folders_in(runs: Path) -> list[Path]:
    """The run folders of Table 1's networks in a folder, at least one."""
    found = sorted(path.parent for path in runs.glob("*/run.json"))
    found = [folder for folder in found if Run(folder).header["study"] == "table1"]
    require(len(found) > 0, f"there are no runs of table1 in {runs}.")
    return found


def trained_on(folder: Path, data: Path | None = None) -> Images:
    """The training images of a run."""
    about = Run(folder).header["data"]
    return load_images(about["name"], "train", data).take(slice(about["images"]))


def jobs_of(folder: Path) -> list[Job]:
    """Every state that a run has kept."""
    run = Run(folder)
    steps = [line.step for line in run.lines if line.checkpoint is not None]
    return [Job(folder, step, member) for step in steps for member in range(len(run.members))]


def network_of(job: Job) -> GatedImageNet:
    """The network in that state."""
    run = Run(job.folder)
    net = build_images(run.header["model"])
    kept = run.checkpoint(job.step)
    net.load_state_dict({name: torch.from_numpy(kept[f"model/{name}"][job.member]) for name in net.state_dict()})
    return net.eval()


def kernels_of(net: GatedImageNet, x: Tensor) -> Kernels:
    """Common active paths and the trace of the tangent kernel."""
    return {"overlap": overlap_kernel(net, x).numpy(), "tangent": tangent_kernel(net, x).float().numpy()}


def do(job: Job, images: Images) -> Job:
    """Compute and keep the kernels of one job."""
    with threads(1):
        found = kernels_of(network_of(job), images.floats())
    job.kept_in.parent.mkdir(parents=True, exist_ok=True)
    temporary = job.kept_in.with_suffix(".tmp.npz")
    np.savez(temporary, overlap=found["overlap"], tangent=found["tangent"])
    temporary.replace(job.kept_in)
    return job


def do_all(
    folders: Sequence[Path], images: Images, workers: int = 1, tell: Callable[[str], None] = lambda _: None
) -> None:
    """Every job that is not on disk yet; the ends of training first, so that a short time shows the most."""
    missing = [job for folder in folders for job in jobs_of(folder) if not job.kept_in.exists()]
    last = {folder: max((job.step for job in missing if job.folder == folder), default=0) for folder in folders}
    missing.sort(key=lambda job: (job.member, job.step not in (0, last[job.folder]), job.step))
    if workers == 1:
        for job in missing:
            do(job, images)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(do, job, images) for job in missing]):
            job = done.result()
            tell(f"kernels of {job.folder.name} at {job.step}, member {job.member}")


def dynamics(folder: Path, labels: Tensor, classes: int) -> list[dict[str, Any]]:
    """Per network of a run: its kernels followed through the states that have been measured."""
    run = Run(folder)
    per_epoch = int(run.header["data"]["per_epoch"])
    targets = torch.nn.functional.one_hot(labels, classes).double()
    found = []
    for member, about in enumerate(run.members):
        jobs = [job for job in jobs_of(folder) if job.member == member and job.kept_in.exists()]
        if not jobs:
            continue
        states = [dict(np.load(job.kept_in)) for job in jobs]
        epochs = [job.step / per_epoch for job in jobs]
        recipe = run.header["recipe"]
        how = {"trained_for": recipe["training"]["epochs"], "rate": recipe["training"]["lr"]}
        table: dict[str, Any] = {"model": recipe["model_name"], "seed": about["seed"], **how, "epochs": epochs}
        for kind in KERNELS:
            kernels = [torch.from_numpy(state[kind]).double() for state in states]
            table[f"{kind}_alignment"] = [_plain(centered_alignment(kernel, targets)) for kernel in kernels]
            table[f"{kind}_distance"] = [_plain(kernel_distance(kernel, kernels[0])) for kernel in kernels]
            table[f"{kind}_velocity"] = [
                _plain(kernel_velocity(kernels[k], kernels[k + 1], epochs[k + 1] - epochs[k]))
                for k in range(len(kernels) - 1)
            ]
        table["tangent_top_share"] = [top_share(state["tangent"]) for state in states]
        table["log10_paths_by_class"] = [log_paths(state["overlap"], labels.numpy(), classes) for state in states]
        found.append(table)
    return found


def alike(networks: Sequence[Mapping[str, Any]]) -> dict[tuple[Training, str], list[Mapping[str, Any]]]:
    """Networks that differ in their seeds alone, by training and model; shorter trainings first, models as in the tables."""
    found: dict[tuple[Training, str], list[Mapping[str, Any]]] = {}
    for net in networks:
        found.setdefault(((net["trained_for"], net["rate"]), net["model"]), []).append(net)
    order = list(MODELS)
    return dict(sorted(found.items(), key=lambda item: (item[0][0], order.index(item[0][1]))))


def top_share(kernel: NDArray[Any], part: float = TOP) -> float:
    """What share of the trace the few images with the largest entries on the diagonal hold: ``part`` if all are alike."""
    largest = np.sort(kernel.diagonal().astype(np.float64))[::-1]
    return round(float(largest[: max(1, round(part * len(largest)))].sum() / largest.sum()), 6)


def log_paths(overlap: NDArray[Any], labels: NDArray[Any], classes: int) -> list[float]:
    """Mean over a class's images of log10(active paths), images with no active path left out (all: -1)."""
    counts = overlap.diagonal()
    with np.errstate(divide="ignore"):
        logs = np.log10(counts)
    means = []
    for label in range(classes):
        own = logs[(labels == label) & (counts > 0)]
        means.append(round(float(own.mean()), 6) if len(own) else -1.0)
    return means


def _plain(value: Tensor) -> float | None:
    """A number for JSON; ``None`` where it has no meaning (a constant kernel has no centred alignment)."""
    number = float(value)
    return round(number, 9) if np.isfinite(number) else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Kernels of all runs in a folder, in several processes, into one file."""
    parser = argparse.ArgumentParser(description="Kernels along the training of Table 1's networks.")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the run folders")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--workers", type=int, default=1)
    chosen = parser.parse_args(arguments)
    folders = folders_in(chosen.runs)
    images = fixed_images(trained_on(folders[0], chosen.data))

    def write(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    do_all(folders, images, chosen.workers, write)
    save(chosen.out, folders, images)
    write(f"kept in {chosen.out}")


def save(path: Path, folders: Sequence[Path], images: Images) -> None:
    """One file for all runs."""
    write_file(path, (json.dumps(dynamics_of(folders, images), allow_nan=False) + "\n").encode())


def dynamics_of(folders: Sequence[Path], images: Images) -> dict[str, Any]:
    """All networks of all runs, as one plain table."""
    found = [table for folder in folders for table in dynamics(folder, images.labels, len(images.classes))]
    made_by = provenance("float32", "cpu") | {"images_sha256": images.fingerprint}
    return {"images": len(images), "classes": list(images.classes), "networks": found, "provenance": made_by}


if __name__ == "__main__":
    main()
