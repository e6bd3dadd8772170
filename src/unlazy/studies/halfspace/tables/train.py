"""Running cells within a time budget, and the compact file that keeps what they gave.

Several processes may work on one file: each takes cells that no other has locked, and adds its results under a lock.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from unlazy.data.images import Images, load_images
from unlazy.models.conv import GatedImageNet, ImageSpec, build_images
from unlazy.runtime import InputError, provenance, require, short_hash
from unlazy.store import Run, Writer, write_file
from unlazy.studies.halfspace.tables.measure import images_per_second, tangent_model, trace_model
from unlazy.studies.halfspace.tables.settings import Cell, Settings, cells, planned_seconds
from unlazy.training.fit import Progress
from unlazy.training.images import ImageRecipe, train_images
from unlazy.training.together import Stack, train_together

Result = dict[str, Any]
Tell = Callable[[str], None]
KEEP_EVERY = 10  # epochs between states of a residual network from which an interrupted training goes on


class Pictures:
    """Images of a scale, read once each."""

    def __init__(self, settings: Settings, folder: Path | None = None) -> None:
        self._settings, self._folder, self._read = settings, folder, dict[str, tuple[Images, Images]]()

    def get(self, name: str) -> tuple[Images, Images]:
        """The first images of both splits."""
        if name not in self._read:
            train = load_images(name, "train", self._folder).take(slice(self._settings.images))
            test = load_images(name, "test", self._folder).take(slice(self._settings.test_images))
            self._read[name] = train, test
        return self._read[name]


def cell_key(cell: Cell, pictures: Pictures) -> str:
    """What a finished cell is known by."""
    train, _ = pictures.get(cell.data)
    return cell.key(int(train.pixels.shape[1]), len(train.classes))


def run_cell(
    cell: Cell,
    pictures: Pictures,
    device: str,
    *,
    graphs: bool = True,
    weights: Path | None = None,
    runs: Path | None = None,
    scale: str = "paper",
    progress: Progress | None = None,
) -> Result:
    """Train and measure one cell.

    ``weights``: keep the trained network in this folder. ``runs``: record the training in a run folder in this one, from which a
    killed call goes on.
    """
    train, test = pictures.get(cell.data)
    made_by = made_by_on(device, pictures, cell.data)
    started = time.perf_counter()
    spec = cell.spec(int(train.pixels.shape[1]), len(train.classes))
    net = build_images(spec, seed=cell.seed)
    if cell.model == "tangent":
        found = tangent_model(net, train, test, device)
    elif cell.model == "trace":
        found = trace_model(net, train, test, device)
    else:
        found = train_recorded(
            recorded(cell, spec, len(train), runs, scale, device, made_by),
            *(net, train, test, cell.training()),
            seed=cell.seed,
            device=device,
            graphs=graphs,
            progress=progress,
        )
        found["training"] = cell.training().to_dict()
        if cell.recipe == "cost":
            found["images_per_second"] = round(images_per_second(net, test, device), 1)
        if weights is not None:
            keep_weights(net, weights / f"{name_of(cell.__dict__).replace('/', '-')}.safetensors")
    took = round(time.perf_counter() - started, 2)
    del net
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # graphs keep memory of their own
    return {
        "key": cell_key(cell, pictures),
        **cell.describe(),
        **found,
        "spec": spec.to_dict(),
        "seconds_in_all": took,
        "provenance": made_by,
    }


def recorded(
    cell: Cell,
    spec: ImageSpec,
    images: int,
    runs: Path | None,
    scale: str,
    device: str,
    made_by: Mapping[str, Any],
) -> AbstractContextManager[Writer | None]:
    """The writer of a cell's run folder; none where nobody asked for one, and none where time is what is measured."""
    if runs is None or cell.recipe == "cost":
        return nullcontext()
    about, header = described([cell], spec, cell.training(), images, scale, device, made_by)
    folder = runs / f"{cell.data}-{cell.layout}-{cell.model}-{short_hash(about)}"
    return writer_of(folder, header)


def train_recorded(opening: AbstractContextManager[Writer | None], *what: Any, **options: Any) -> Result:
    """``train_images`` into a run folder, if there is one, which is then finished."""
    with opening as writer:
        found = train_images(*what, writer=writer, keep_every=KEEP_EVERY, **options)
        if writer is not None:
            writer.finish()
    return found


def writer_of(folder: Path, header: Mapping[str, Any]) -> AbstractContextManager[Writer | None]:
    """The writer of a run folder; none where its run is finished: somebody threw the result away, so it is measured again."""
    if (folder / "run.json").exists() and Run(folder).status()["state"] == "finished":
        return nullcontext()
    return Writer(folder, header)


def described(
    own: Sequence[Cell],
    spec: ImageSpec,
    recipe: ImageRecipe,
    images: int,
    scale: str,
    device: str,
    made_by: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What identifies the run of cells that differ in their seeds alone, and the header of its folder."""
    settings = own[0].settings
    about = {
        "model_name": own[0].model,
        "model": spec.to_dict(),
        "training": recipe.to_dict(),
        "seeds": [cell.seed for cell in own],
        "device": device,
        "data": made_by["data_sha256"],
        "looks": list(settings.looks),
    }
    header = {
        "kind": "train",
        "study": settings.study,
        "scale": scale,
        "recipe": about,
        "members": [{"seed": cell.seed} for cell in own],
        "model": about["model"],
        "data": {"name": own[0].data, "images": images, "per_epoch": images // recipe.batch},
        "provenance": made_by,
    }
    return about, header


def made_by_on(device: str, pictures: Pictures, data: str) -> dict[str, Any]:
    """Provenance of a result on this device and data."""
    train, test = pictures.get(data)
    made_by = provenance("float32", device) | {"data_sha256": f"{train.fingerprint} {test.fingerprint}"}
    if torch.device(device).type == "cuda":
        made_by["device"] = torch.cuda.get_device_name()
    return made_by


def keep_weights(net: GatedImageNet, path: Path) -> None:
    """A trained network as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, safetensors.torch.save({name: value.contiguous() for name, value in net.state_dict().items()}))


def load_weights(net: GatedImageNet, path: Path) -> GatedImageNet:
    """The inverse of ``keep_weights``, into a network of the same spec."""
    net.load_state_dict(safetensors.torch.load(path.read_bytes()))
    return net.eval()


def run_stacks(
    wanted: Sequence[Cell],
    pictures: Pictures,
    device: str,
    runs: Path,
    scale: str,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Result]:
    """Train small networks together, all seeds of a model in one run folder; a killed call goes on where it was."""
    settings = wanted[0].settings
    train, test = pictures.get(wanted[0].data)
    channels, classes = int(train.pixels.shape[1]), len(train.classes)
    made_by, recipe = made_by_on(device, pictures, wanted[0].data), wanted[0].training()
    started = time.perf_counter()
    with ExitStack() as open_runs:
        stacks = []
        for model in dict.fromkeys(cell.model for cell in wanted):
            own = [cell for cell in wanted if cell.model == model]
            spec = own[0].spec(channels, classes)
            about, header = described(own, spec, recipe, len(train), scale, device, made_by)
            writer = open_runs.enter_context(Writer(runs / f"{model}-{short_hash(about)}", header))
            nets = [build_images(cell.spec(channels, classes), seed=cell.seed) for cell in own]
            stacks.append(Stack(model, nets, [cell.seed for cell in own], writer))
        found = train_together(stacks, train, test, recipe, device=device, looks=settings.looks, progress=progress)
        for stack in stacks:
            assert stack.writer is not None
            stack.writer.finish()
    took = round(time.perf_counter() - started, 2)
    return [
        {
            "key": cell_key(cell, pictures),
            **cell.describe(),
            **found[cell.model][[one.seed for one in wanted if one.model == cell.model].index(cell.seed)],
            "spec": cell.spec(channels, classes).to_dict(),
            "training": recipe.to_dict(),
            "seconds_in_all": took,
            "provenance": made_by,
        }
        for cell in wanted
    ]


def run(
    settings: Settings,
    path: Path,
    scale: str,
    *,
    device: str = "cpu",
    data: Path | None = None,
    runs: Path | None = None,
    weights: Path | None = None,
    seconds: float | None = None,
    only: str = "",
    graphs: bool = True,
    tell: Tell = lambda _: None,
    follow: Tell = lambda _: None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Result]:
    """Every cell that is not in the file yet and fits into the time that is left; the file is replaced after each.

    ``only``: cells of which every one of these words (separated by commas) is the data, layout, model, recipe or seed; words
    with a bar between them are alternatives. ``runs``: where trainings keep their run folders (small networks, which are trained
    together, always do: beside the file if nothing is said). ``follow`` hears how far a training is, in tenths.
    """
    pictures, started = Pictures(settings, data), time.perf_counter()
    wanted = [cell for cell in cells(settings) if matches(cell, only)]
    require(len(wanted) > 0, f"no cell of the table matches {only!r}.")
    stacked = [cell for cell in wanted if cell.in_stack() and cell_key(cell, pictures) not in _done(path)]
    if stacked:
        told = f"{len(stacked)} networks together"
        tenth = tenths(follow, told)

        def both(done: int, total: int) -> None:
            progress(done, total)
            tenth(done, total)

        for result in run_stacks(stacked, pictures, device, runs or path.parent / "runs", scale, both):
            add(path, settings, scale, result)
            tell(f"{_said(result)} ({told})")
    for number, cell in enumerate(wanted):
        progress(number, len(wanted))
        key = cell_key(cell, pictures)
        with claimed(path.parent / f".{key}.lock") as mine:
            if not mine or key in _done(path):
                continue
            left = float("inf") if seconds is None else seconds - (time.perf_counter() - started)
            guess = expected_seconds(cell, list(_done(path).values()))
            if guess > left:
                tell(f"left out {name_of(cell.__dict__)}: needs about {guess:.0f} s, {left:.0f} s are left")
                continue
            options: dict[str, Any] = {"graphs": graphs, "weights": weights, "runs": runs, "scale": scale}
            try:
                result = run_cell(cell, pictures, device, **options, progress=tenths(follow, name_of(cell.__dict__)))
            except RuntimeError as error:  # of the device, mostly its memory: the other cells may still fit
                tell(f"failed {name_of(cell.__dict__)}: {error}")
                continue
            add(path, settings, scale, result)
            how = ", captured" if result.get("graphs") else ""
            tell(f"{_said(result)} (guess {guess:.0f}){how}")
    progress(len(wanted), len(wanted))
    return list(_done(path).values())


def tenths(follow: Tell, name: str) -> Progress:
    """Tells how far a training is, ten times at most."""

    def progress(done: int, total: int) -> None:
        if 10 * done // total > 10 * (done - 1) // total:
            follow(f"{name}: epoch {done} of {total}")

    return progress


def not_kept(settings: Settings, kept: Sequence[Result], only: str, data: Path | None = None) -> list[str]:
    """Names of the wanted cells that a file does not have."""
    pictures, keys = Pictures(settings, data), {result["key"] for result in kept}
    wanted = [cell for cell in cells(settings) if matches(cell, only)]
    return [name_of(cell.__dict__) for cell in wanted if cell_key(cell, pictures) not in keys]


def matches(cell: Cell, only: str) -> bool:
    """Whether every word is one of the cell's five parts."""
    parts = name_of(cell.__dict__).split("/")
    return all(any(one in parts for one in word.split("|")) for word in only.split(",") if word)


def _said(result: Result) -> str:
    test, hard = result["test_as_trained"], result.get("test_hard_gates", float("nan"))
    return f"{name_of(result)}: test {test:.4f}, hard gates {hard:.4f}, {result['seconds_in_all']:.1f} s"


def _done(path: Path) -> dict[str, Result]:
    return {result["key"]: result for result in load(path)["cells"]} if path.exists() else {}


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether this process is the one that holds the lock; the lock ends with the block, or with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process changes this file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def add(path: Path, settings: Settings, scale: str, result: Result) -> None:
    """One more cell in the file, whoever else adds some."""
    with locked(path):
        save(path, settings, scale, list((_done(path) | {result["key"]: result}).values()))


def name_of(cell: Mapping[str, Any]) -> str:
    """``data/layout/model/recipe/seed``."""
    return "/".join(str(cell[part]) for part in ("data", "layout", "model", "recipe", "seed"))


def expected_seconds(cell: Cell, done: Sequence[Result]) -> float:
    """By the epochs of the same network that were measured, else by plan."""
    for result in done:
        same = all(result[part] == getattr(cell, part) for part in ("layout", "model"))
        if same and result["epochs"] > 0 and result["recipe"] != "cost":
            return float(result["seconds_in_all"]) * cell.epochs / result["epochs"]
    return planned_seconds(cell)


def save(path: Path, settings: Settings, scale: str, results: Sequence[Result]) -> None:
    """The whole file or nothing."""
    kept = {"study": settings.study, "scale": scale, "settings": settings.to_dict(), "cells": list(results)}
    write_file(path, (json.dumps(kept, indent=1, allow_nan=False) + "\n").encode())


def load(path: Path) -> dict[str, Any]:
    """A file of measured cells."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is no file of measured cells ({error}).") from error
    require(isinstance(kept, dict) and "cells" in kept, f"{path} has no cells.")
    return dict(kept)


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Cells of both files; where both have one, that of the second."""
    require(first["study"] == second["study"], f"cells of {first['study']} and of {second['study']} do not mix.")
    together = {cell["key"]: cell for cell in (*first["cells"], *second["cells"])}
    return {**second, "cells": list(together.values())}
