"""``unlazy gram``: a kernel of a network on a data set, planned, then written to one .npy file tile by tile."""

from __future__ import annotations

import importlib
import json
import sys
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
    if kernel == "tangent":
        typer.echo(str(plan_tangent(net, x, memory=memory, held=False)))
    elif kernel == "overlap":
        typer.echo(str(plan_overlap(net, x, memory=memory, held=False)))
    else:
        typer.echo(f"{len(x)} x {len(x)} symmetric, units open on both multiplied over layers, float64")
    dtype = np.dtype(str(next(net.parameters()).dtype).removeprefix("torch.") if kernel == "tangent" else "float64")
    size = dtype.itemsize * len(x) ** 2
    in_words = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
    typer.echo(f"file: {out}, {in_words} ({len(x)} x {len(x)} {dtype})")
    if dry_run:
        return
    start = time.perf_counter()
    part = out.with_name(f".{out.name}.part")
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
        how = f"Path({name!r}).write_text(json.dumps(net.spec())) writes that of a network of ours"
        require(path.is_file(), f"there is no model spec {path}; {how}.")
        try:
            return build(json.loads(path.read_text()))
        except json.JSONDecodeError as error:
            raise InputError(f"{path} is not JSON ({error}); {how}.") from error
    module, colon, function = name.partition(":")
    require(bool(colon), f"{name!r} is no run folder, no .json spec and no package.module:function.")
    made = _made_by(module, function)
    if not isinstance(made, nn.Module):
        raise InputError(f"{name} must return a torch module, got {type(made).__name__}.")
    return made


def _made_by(module: str, function: str) -> Any:
    """What a function of a module gives without arguments; modules in the current folder are found like installed ones."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = getattr(importlib.import_module(module), function)
        return found if isinstance(found, nn.Module) else found()
    except (ImportError, AttributeError) as error:
        where = "mine:Net means Net in mine.py of this folder, or in an installed package mine"
        raise InputError(f"{module}:{function}: {error}; {where}.") from error
    except TypeError as error:
        raise InputError(f"{module}:{function} is called without arguments, but: {error}.") from error


def _model_of_run(run: Run) -> nn.Module:
    kept = run.last_checkpoint()
    spec = run.header["model"]
    if spec is None:
        raise InputError(
            f"{run.folder} watched a model of your own and keeps its numbers, not its code; "
            "name what makes the model instead: module:function, such as mine:Net for Net in mine.py."
        )
    require(kept is not None, f"{run.folder} has no checkpoint; give a JSON spec, or module:function.")
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
