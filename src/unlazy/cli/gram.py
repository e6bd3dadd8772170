"""``unlazy gram``: computes a kernel of a network on a data set tile by tile, into a .npy file or a .zarr array.

Several processes or a cluster may fill a .zarr array, and it resumes after a crash.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from torch import Tensor, nn

from unlazy.cli.progress import report_progress
from unlazy.cli.user_code import find_object
from unlazy.data.images import load_images
from unlazy.kernels.capture import sample_count
from unlazy.kernels.gram_on_disk import gram_file, plan_file
from unlazy.kernels.gram_tiles import KERNELS, GramJob
from unlazy.kernels.overlap import layer_overlap, overlap_kernel
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build, build_stack, member
from unlazy.runtime import InputError, require
from unlazy.store import Run


@dataclass(frozen=True)
class Spread:
    """Who computes a .zarr array: this process with so many workers, a Dask cluster, or one of several jobs."""

    cluster: str | None = None
    workers: int | None = None
    shard: str | None = None
    tile: int | None = None

    def __post_init__(self) -> None:
        many = [name for name in ("cluster", "workers", "shard") if getattr(self, name) is not None]
        require(len(many) <= 1, f"--{' and --'.join(many)} do not go together: each says who computes the tiles.")
        require(self.workers is None or self.workers >= 1, f"--workers is at least 1, got {self.workers}.")

    @property
    def devices(self) -> list[str] | None:
        """One device for each worker of this process; ``None`` without ``--workers``."""
        return None if self.workers is None else ["cpu"] * self.workers

    def share(self) -> tuple[int, int]:
        """The share and the number of shares: ``"2/8"`` gives ``(2, 8)``; ``(0, 1)`` without ``--shard``."""
        if self.shard is None:
            return 0, 1
        number, slash, shards = self.shard.partition("/")
        require(
            bool(slash) and number.isdigit() and shards.isdigit() and int(number) < int(shards),
            f"--shard is such as 0/8 to 7/8, got {self.shard!r}.",
        )
        return int(number), int(shards)


def gram_command(
    model: str,
    data: str,
    kernel: str,
    out: Path,
    memory: str | None,
    limit: int | None,
    spread: Spread,
    *,
    dry_run: bool,
) -> None:
    """Print the plan and compute the kernel. ``dry_run``: only print the plan."""
    require(kernel in KERNELS, f"kernel must be one of {', '.join(KERNELS)}; got {kernel!r}.")
    require(out.suffix in (".npy", ".zarr"), f"the kernel is written as .npy or .zarr; got {out}.")
    require(
        out.suffix == ".zarr" or spread == Spread(),
        "tiles are shared out for a .zarr array only: --out kernel.zarr.",
    )
    share = spread.share()
    job = GramJob(kernel, load_model(model), load_inputs(data, limit), memory=memory, devices=spread.devices)
    engine = job.engine()
    plan = plan_file(job, engine, spread.tile)
    typer.echo(str(plan))
    dtype = np.dtype(str(engine.dtype).removeprefix("torch."))
    size = dtype.itemsize * plan.rows**2
    in_words = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
    typer.echo(f"file: {out}, {in_words} ({plan.rows} x {plan.rows} {dtype})")
    if dry_run:
        return
    start = time.perf_counter()
    with report_progress() as report:
        follow = partial(report, "tiles")
        if out.suffix == ".npy":
            _write_npy(job, out, dtype, follow)
            left = 0
        else:
            with _client(spread) as client:
                file = gram_file(
                    *(out, job.model, job.x),
                    kernel=kernel,
                    tile=spread.tile,
                    memory=memory,
                    shard=share,
                    client=client,
                    devices=spread.devices,
                    progress=follow,
                )
            left = sum(not file.has_receipt(place) for place in file.places())
    typer.echo(f"{out}: {plan.rows} x {plan.rows} in {time.perf_counter() - start:.1f} s")
    if left:
        typer.echo(f"{left} tiles are left to the other shares")


def _write_npy(job: GramJob, out: Path, dtype: np.dtype[Any], progress: Callable[[int, int], None]) -> None:
    """Compute the kernel into a .npy file; a failed computation leaves no file."""
    n, part = sample_count(job.x), out.with_name(f".{out.name}.part")
    require(not out.is_dir(), f"{out} is a folder; name the file to write.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        room = np.lib.format.open_memmap(part, mode="w+", dtype=dtype, shape=(n, n))
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror}.") from error
    compute: Any = {"tangent": tangent_kernel, "overlap": overlap_kernel, "layer-overlap": layer_overlap}[job.kernel]
    try:
        compute(job.model, job.x, memory=job.memory, out=room, progress=progress)
        room.flush()
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _client(spread: Spread) -> Iterator[Any]:
    """Connect to the Dask cluster that the options name; yields ``None`` if they name none."""
    if spread.cluster is None:
        yield None
        return
    try:
        from distributed import Client
    except ImportError as error:
        raise InputError("a cluster needs Dask: pip install 'unlazy[cluster]'.") from error
    try:
        with Client(spread.cluster, timeout=20) as client:
            yield client
    except OSError as error:
        raise InputError(f"no Dask scheduler answers at {spread.cluster} ({error}).") from error


def load_model(name: str) -> nn.Module:
    """Load a model from a run folder (first member, last checkpoint), a JSON spec, or ``package.module:function``."""
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
    made = _call_function(module, function)
    if not isinstance(made, nn.Module):
        raise InputError(f"{name} must return a torch module, got {type(made).__name__}.")
    return made


def _call_function(module: str, function: str) -> Any:
    """Call a function of a module without arguments."""
    found = find_object(module, function)
    try:
        return found if isinstance(found, nn.Module) else found()
    except TypeError as error:
        raise InputError(f"{module}:{function} is called without arguments, but: {error}.") from error


def _model_of_run(run: Run) -> nn.Module:
    """The first member of a run, from its last checkpoint."""
    checkpoint = run.last_checkpoint()
    spec = run.header["model"]
    if spec is None:
        raise InputError(
            f"{run.folder} watched a model of your own and keeps its numbers, not its code; "
            "name what makes the model instead: module:function, such as mine:Net for Net in mine.py."
        )
    require(checkpoint is not None, f"{run.folder} has no checkpoint; give a JSON spec, or module:function.")
    assert checkpoint is not None
    numbers = {
        name.removeprefix("model/"): torch.from_numpy(np.asarray(array))
        for name, array in checkpoint[1].items()
        if name.startswith("model/")
    }
    betas = [entry["beta"] for entry in run.members]
    slopes = None if None in betas else betas
    dtype = next(iter(numbers.values())).dtype
    stack = build_stack(spec, [entry["seed"] for entry in run.members], slopes, dtype=dtype)
    stack.load_state_dict(numbers)
    return member(stack, 0)


def load_inputs(name: str, limit: int | None) -> Tensor:
    """Load inputs from a .npy file or a data set such as ``digits`` or ``mnist:test``; grey images are flattened."""
    if name.endswith(".npy"):
        require(Path(name).is_file(), f"there is no file {name}.")
        try:
            x = torch.from_numpy(np.load(name, allow_pickle=False)).float()
        except (ValueError, TypeError, EOFError, OSError) as error:
            raise InputError(f"{name} is no array of numbers in numpy's format ({type(error).__name__}).") from error
    else:
        dataset, _, split = name.partition(":")
        images = load_images(dataset, split or "train")
        x = images.floats(standardise=True) if images.pixels.shape[1] > 1 else images.flat()
    return x if limit is None else x[:limit]
