"""Running cells within a time budget, and the compact file that keeps what they gave."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unlazy.data.images import Images, load_images
from unlazy.models.conv import build_images
from unlazy.runtime import InputError, provenance, require
from unlazy.store import write_file
from unlazy.studies.halfspace.tables.measure import images_per_second, tangent_model, trace_model
from unlazy.studies.halfspace.tables.settings import Cell, Settings, cells, planned_seconds
from unlazy.training.images import train_images

Result = dict[str, Any]
Tell = Callable[[str], None]


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


def run_cell(cell: Cell, pictures: Pictures, device: str, *, graphs: bool = True) -> Result:
    """Train and measure one cell."""
    train, test = pictures.get(cell.data)
    made_by = provenance("float32", device) | {"data_sha256": f"{train.fingerprint} {test.fingerprint}"}
    if torch.device(device).type == "cuda":
        made_by["device"] = torch.cuda.get_device_name()
    started = time.perf_counter()
    net = build_images(cell.spec(int(train.pixels.shape[1]), len(train.classes)), seed=cell.seed)
    if cell.model == "tangent":
        found = tangent_model(net, train, test, device)
    elif cell.model == "trace":
        found = trace_model(net, train, test, device)
    else:
        found = train_images(net, train, test, cell.training(), seed=cell.seed, device=device, graphs=graphs)
        if cell.recipe == "cost":
            found["images_per_second"] = round(images_per_second(net, test, device), 1)
    took = round(time.perf_counter() - started, 2)
    del net
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # graphs keep memory of their own
    return {
        "key": cell_key(cell, pictures),
        **cell.describe(),
        **found,
        "seconds_in_all": took,
        "provenance": made_by,
    }


def run(
    settings: Settings,
    path: Path,
    scale: str,
    *,
    device: str = "cpu",
    data: Path | None = None,
    seconds: float | None = None,
    only: str = "",
    graphs: bool = True,
    tell: Tell = lambda _: None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Result]:
    """Every cell that is not in the file yet and fits into the time that is left; the file is replaced after each.

    ``only``: cells whose ``data/layout/model/recipe/seed`` contains these words (separated by commas, all of them).
    """
    pictures, started = Pictures(settings, data), time.perf_counter()
    done = {result["key"]: result for result in load(path)["cells"]} if path.exists() else {}
    words = [word for word in only.split(",") if word]
    wanted = [cell for cell in cells(settings) if all(word in name_of(cell.__dict__) for word in words)]
    require(len(wanted) > 0, f"no cell of the table matches {only!r}.")
    for number, cell in enumerate(wanted):
        progress(number, len(wanted))
        if cell_key(cell, pictures) in done:
            continue
        left = float("inf") if seconds is None else seconds - (time.perf_counter() - started)
        guess = expected_seconds(cell, list(done.values()))
        if guess > left:
            tell(f"left out {name_of(cell.__dict__)}: needs about {guess:.0f} s, {left:.0f} s are left")
            continue
        try:
            result = run_cell(cell, pictures, device, graphs=graphs)
        except RuntimeError as error:  # of the device, mostly its memory: the other cells may still fit
            tell(f"failed {name_of(cell.__dict__)}: {error}")
            continue
        done[result["key"]] = result
        save(path, settings, scale, list(done.values()))
        test, hard = result["test_as_trained"], result.get("test_hard_gates", float("nan"))
        took = result["seconds_in_all"]
        how = ", captured" if result.get("graphs") else ""
        tell(f"{name_of(result)}: test {test:.4f}, hard gates {hard:.4f}, {took:.1f} s (guess {guess:.0f}){how}")
    progress(len(wanted), len(wanted))
    return list(done.values())


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
