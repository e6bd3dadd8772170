"""``unlazy gram``: a kernel of a network on a data set, planned, then written to one .npy file tile by tile."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from torch import Tensor, nn

from unlazy.cli.progress import reporting
from unlazy.data.images import load_images
from unlazy.kernels.overlap import layer_overlap, overlap_kernel, plan_overlap
from unlazy.kernels.tangent import plan_tangent, tangent_kernel
from unlazy.models.build import build, build_stack, member
from unlazy.runtime import InputError, require
from unlazy.store import Run

KERNELS = ("tangent", "overlap", "layer-overlap")


def gram_command(
    model: str, data: str, kernel: str, out: Path, memory: str | None, limit: int | None, *, dry_run: bool
) -> None:
    """Plan, and unless it is a dry run, compute."""
    require(kernel in KERNELS, f"kernel must be one of {', '.join(KERNELS)}; got {kernel!r}.")
    require(out.suffix == ".npy", f"the kernel is written as .npy; got {out}.")
    net, x = load_model(model), load_inputs(data, limit)
    try:
        with torch.no_grad():
            net(x[:1])
    except RuntimeError as error:
        raise InputError(f"{model} does not take samples of shape {tuple(x.shape[1:])}: {error}") from error
    if kernel == "tangent":
        typer.echo(str(plan_tangent(net, x, memory=memory, held=False)))
    elif kernel == "overlap":
        typer.echo(str(plan_overlap(net, x, memory=memory, held=False)))
    else:
        typer.echo(f"{len(x)} x {len(x)} symmetric, units open on both multiplied over layers, float64")
    if dry_run:
        return
    start = time.perf_counter()
    part = out.with_name(f".{out.name}.part")
    dtype = np.dtype(str(next(net.parameters()).dtype).removeprefix("torch.")) if kernel == "tangent" else np.float64
    room = np.lib.format.open_memmap(part, mode="w+", dtype=dtype, shape=(len(x), len(x)))
    try:
        with reporting() as report:
            compute: Any = {"tangent": tangent_kernel, "overlap": overlap_kernel, "layer-overlap": layer_overlap}[
                kernel
            ]
            compute(net, x, memory=memory, out=room, progress=lambda done, total: report("tiles", done, total))
        room.flush()
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    typer.echo(f"{out}: {len(x)} x {len(x)} in {time.perf_counter() - start:.1f} s")


def load_model(name: str) -> nn.Module:
    """A run folder (first member, last checkpoint), a JSON model spec, or ``package.module:function`` that makes a module."""
    path = Path(name)
    if path.is_dir():
        return _model_of_run(Run(path))
    if path.suffix == ".json":
        require(path.is_file(), f"there is no model spec {path}.")
        return build(json.loads(path.read_text()))
    module, colon, function = name.partition(":")
    require(bool(colon), f"{name!r} is no run folder, no .json spec and no package.module:function.")
    try:
        made: Any = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise InputError(f"{name}: {error}.") from error
    require(isinstance(made, nn.Module), f"{name} must return a torch module, got {type(made).__name__}.")
    return made


def _model_of_run(run: Run) -> nn.Module:
    kept = run.last_checkpoint()
    spec = run.header["model"]
    require(kept is not None and spec is not None, f"{run.folder} has no checkpoint of one of our networks.")
    assert kept is not None
    numbers = {
        name.removeprefix("model/"): torch.from_numpy(np.asarray(array))
        for name, array in kept[1].items()
        if name.startswith("model/")
    }
    betas = [entry["beta"] for entry in run.members]
    slopes = None if None in betas else betas
    dtype = next(iter(numbers.values())).dtype
    stack = build_stack(spec, [entry["seed"] for entry in run.members], slopes, dtype=dtype)
    stack.load_state_dict(numbers)
    return member(stack, 0)


def load_inputs(name: str, limit: int | None) -> Tensor:
    """A .npy file, or a data set: ``digits``, ``cifar-10``, ``mnist:test``. Flat for grey images, as images for coloured ones."""
    if name.endswith(".npy"):
        require(Path(name).is_file(), f"there is no file {name}.")
        x = torch.from_numpy(np.load(name, allow_pickle=False)).float()
    else:
        dataset, _, split = name.partition(":")
        images = load_images(dataset, split or "train")
        x = images.floats(standardise=True) if images.pixels.shape[1] > 1 else images.flat()
    return x if limit is None else x[:limit]
