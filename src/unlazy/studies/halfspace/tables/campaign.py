"""How far do hard gates go? Single tries of one change each, then the best of them on wide networks with a teacher.

``explore``: small networks, short trainings, one change against a common base; judged on the last tenth of the training images,
so that the test images take no part in choosing. ``best``: all training images, the chosen gates, width, patches of other
pictures and a ReLU ResNet-34 as teacher; judged on the test images. Every try is kept, with what it cost.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from unlazy.data.images import Images
from unlazy.models.conv import GatedImageNet, ImageSpec, build_images
from unlazy.models.gates import HardGate
from unlazy.models.resnet import resnet34_spec, resnet110_spec
from unlazy.runtime import InputError, require, short_hash
from unlazy.store import Writer, write_file
from unlazy.studies.halfspace.tables.settings import SCALES
from unlazy.studies.halfspace.tables.train import (
    Pictures,
    Tell,
    claimed,
    load,
    load_weights,
    locked,
    made_by_on,
    tenths,
    train_recorded,
    writer_of,
)
from unlazy.training.fit import Progress
from unlazy.training.images import ImageRecipe, accuracy, on_device

SMALL, DEEP, LONG_SMALL, LONG_DEEP = "small", "resnet-110", 8, 6
VALIDATION = 0.1  # of the training images
STAGES = ("explore", "best")


@dataclass(frozen=True)
class Try:
    """One training: a network, a recipe, and in words what is new about it."""

    stage: str
    name: str
    data: str
    layout: str
    spec: ImageSpec
    recipe: ImageRecipe
    gate_bias: bool = True
    teacher: ImageSpec | None = None
    teacher_recipe: ImageRecipe | None = None  # none: its weights must be there
    gates: Mapping[str, Any] = field(default_factory=dict)  # what Table 2 would take over

    @property
    def key(self) -> str:
        """Hash of everything that decides the result but the machine."""
        teacher = None if self.teacher is None else self.teacher.to_dict()
        how = None if self.teacher_recipe is None else self.teacher_recipe.to_dict()
        return short_hash(
            [self.stage, self.name, self.data, self.spec.to_dict(), self.recipe.to_dict(), self.gate_bias, teacher, how]
        )


def small_spec(classes: int = 10, *, width: float = 1.0) -> ImageSpec:
    """ResNet-18 for 32 x 32 pictures at half its width."""
    return ImageSpec(tuple(round(width * channels) for channels in (32, 64, 128, 256)), (2, 2, 2, 2), classes=classes)


def gate_choices() -> dict[str, dict[str, Any]]:
    """Ways to bring a gradient to hard gates, by name; the first is the base."""
    return {
        "base: beta 4": {"hard_beta": 4.0},
        "beta 1": {"hard_beta": 1.0},
        "beta 2": {"hard_beta": 2.0},
        "beta 10": {"hard_beta": 10.0},
        "normalised gates, beta 1": {"hard_beta": 1.0, "even_gates": True},
        "normalised gates, beta 2": {"hard_beta": 2.0, "even_gates": True},
        "normalised gates, beta 4": {"hard_beta": 4.0, "even_gates": True},
        "gate rate x 0.3": {"hard_beta": 4.0, "gate_lr": 0.3},
        "gate rate x 3": {"hard_beta": 4.0, "gate_lr": 3.0},
    }


def explore() -> list[Try]:
    """Every change by itself, on CIFAR-10; gate choices also on a deep narrow network."""
    base = ImageRecipe(LONG_SMALL, train_probe=5000)
    hard = replace(small_spec(), gate=HardGate(4.0))
    found = []
    for layout, spec, epochs in (
        (SMALL, small_spec(), LONG_SMALL),
        (DEEP, resnet110_spec(), LONG_DEEP),
    ):
        for name, gates in gate_choices().items():
            if layout == DEEP and name in ("beta 2", "beta 10", "gate rate x 0.3"):
                continue
            gated = replace(spec, gate=HardGate(gates["hard_beta"]), even_gates=gates.get("even_gates", False))
            recipe = replace(base, epochs=epochs, gate_lr=gates.get("gate_lr", 1.0))
            found.append(Try("explore", name, "cifar-10", layout, gated, recipe, gates=gates))
    others: dict[str, dict[str, Any]] = {
        "no gate bias": {"gate_bias": False},
        "constant experts": {"spec": replace(hard, experts="constant")},
        "rate x 0.5": {"recipe": replace(base, lr=0.15)},
        "rate x 2": {"recipe": replace(base, lr=0.6)},
        "twice as long": {"recipe": replace(base, epochs=2 * LONG_SMALL)},
        "twice as wide": {"spec": replace(small_spec(width=2.0), gate=HardGate(4.0))},
        "teacher": {"recipe": replace(base, distil=1.0), "teacher": small_spec().relu(), "teacher_recipe": base},
        "the ReLU twin": {"spec": hard.relu()},
        "rate x 4": {"recipe": replace(base, lr=1.2)},
        "half the batch": {"recipe": replace(base, batch=256)},
        "weight decay x 2": {"recipe": replace(base, weight_decay=1e-3)},
        "whitened pictures": {"recipe": replace(base, whiten=0.1)},
        "the ReLU twin, whitened pictures": {"spec": hard.relu(), "recipe": replace(base, whiten=0.1)},
        "the ReLU twin, rate x 2": {"spec": hard.relu(), "recipe": replace(base, lr=0.6)},
        "normalised gates, beta 1, rate x 2": {
            "spec": replace(small_spec(), gate=HardGate(1.0), even_gates=True),
            "recipe": replace(base, lr=0.6),
        },
    }
    for name, changes in others.items():
        made: dict[str, Any] = {"spec": hard, "recipe": base} | changes
        found.append(Try("explore", name, "cifar-10", SMALL, **made))
    return found


def best(gates: Mapping[str, Any], epochs: int) -> list[Try]:
    """Wide networks with a teacher, on both data sets."""
    found = []
    for data, classes in (("cifar-10", 10), ("cifar-100", 100)):
        wide = ImageSpec((128, 256, 512, 1024), (2, 2, 2, 2), classes=classes)
        for layout, spec in (("wide", wide), ("resnet-34", resnet34_spec(classes))):
            hard = replace(
                spec, gate=HardGate(gates.get("hard_beta", 4.0)), even_gates=bool(gates.get("even_gates", False))
            )
            recipe = ImageRecipe(epochs, distil=1.0, mixed=0.5, gate_lr=gates.get("gate_lr", 1.0), train_probe=10_000)
            teacher = resnet34_spec(classes).relu()
            found.append(Try("best", f"{layout}, teacher, patches", data, layout, hard, recipe, teacher=teacher))
    return found


# --- running -------------------------------------------------------------------------------------


def run_try(
    one: Try,
    pictures: Pictures,
    device: str,
    weights: Path | None = None,
    runs: Path | None = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Train and measure one try; ``runs``: where its run folder lies, from which a killed call goes on."""
    train, test = pictures.get(one.data)
    made_by = made_by_on(device, pictures, one.data)
    if one.stage == "explore":
        cut = len(train) - round(VALIDATION * len(train))
        train, test = train.take(slice(cut)), train.take(slice(cut, len(train)))
    started = time.perf_counter()
    channels = int(train.pixels.shape[1])
    net = build_images(replace(one.spec, channels=channels), seed=seed)
    if not one.gate_bias:
        for name, parameter in net.branch("gate"):
            if name.endswith("bias"):
                parameter.requires_grad_(False)  # batch-norm starts at zero
    teacher = None if one.teacher is None else teacher_of(one, channels, train, test, device, weights)
    found = train_recorded(
        recorded(one, runs, seed, len(train), made_by),
        *(net, train, test, one.recipe),
        seed=seed,
        device=device,
        teacher=teacher,
        progress=progress,
    )
    _, held_out = on_device(one.recipe, train, test, device=device)
    found["test_mirrored"] = accuracy(net.hard(), held_out, mirrored=True)
    found["mirrored"] = "mean of the outputs on a picture and on its mirror image, hard gates"
    took = round(time.perf_counter() - started, 2)
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    return {
        "key": one.key,
        "stage": one.stage,
        "try": one.name,
        "data": one.data,
        "layout": one.layout,
        "judged_on": "held-out training images" if one.stage == "explore" else "test images",
        "spec": one.spec.to_dict(),
        "recipe": one.recipe.to_dict(),
        "gates": dict(one.gates),
        "seed": seed,
        **found,
        "seconds_in_all": took,
        "provenance": made_by,
    }


def recorded(
    one: Try, runs: Path | None, seed: int, images: int, made_by: Mapping[str, Any]
) -> AbstractContextManager[Writer | None]:
    """The writer of a try's run folder; none where nobody asked for one, or where it is finished."""
    if runs is None:
        return nullcontext()
    recipe = {"try": one.key, "device": made_by["device"], "seed": seed, "training": one.recipe.to_dict()}
    header = {
        "kind": "train",
        "study": "campaign",
        "scale": "paper",
        "recipe": recipe,
        "members": [{"seed": seed}],
        "model": one.spec.to_dict(),
        "data": {"name": one.data, "images": images, "per_epoch": images // one.recipe.batch},
        "provenance": made_by,
    }
    return writer_of(runs / f"{one.data}-{one.layout}-{short_hash(recipe)}", header)


def teacher_of(
    one: Try, channels: int, train: Images, test: Images, device: str, weights: Path | None
) -> GatedImageNet:
    """The teacher: trained here if the try says how, else the ReLU ResNet-34 of Table 2's first seed."""
    assert one.teacher is not None
    net = build_images(replace(one.teacher, channels=channels), seed=1)
    if one.teacher_recipe is not None:
        train_recorded(nullcontext(), net, train, test, one.teacher_recipe, seed=1, device=device)
        return net.eval()
    path = (weights or Path()) / f"{one.data}-resnet-34-relu-main-0.safetensors"
    if weights is None or not path.exists():
        raise InputError(f"the teacher's weights are not in {path}; run its cell of Table 2 with --weights first.")
    return load_weights(net, path)


def chosen_gates(tries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The gate choice with the best held-out accuracy in the mean over layouts, among those tried on all of them."""
    scores: dict[str, dict[str, float]] = {}
    for one in tries:
        if one["stage"] == "explore" and one["gates"]:
            scores.setdefault(one["try"], {})[one["layout"]] = one["test_hard_gates"]
    layouts = {layout for by_layout in scores.values() for layout in by_layout}
    means = {name: sum(by.values()) / len(by) for name, by in scores.items() if set(by) == layouts}
    require(len(means) > 0, "no gate choice was tried on every layout.")
    return gate_choices()[max(means, key=lambda name: means[name])]


def run(
    tries: Sequence[Try],
    path: Path,
    pictures: Pictures,
    device: str,
    weights: Path | None,
    tell: Tell,
    runs: Path | None = None,
    follow: Tell = lambda _: None,
) -> list[dict[str, Any]]:
    """Every try that is not in the file yet, in order; several processes may share the file."""
    for one in tries:
        with claimed(path.parent / f".{one.key}.lock") as mine:
            if not mine or one.key in {done["key"] for done in _done(path)}:
                continue
            try:
                progress = tenths(follow, f"{one.data} {one.layout} {one.name}")
                result = run_try(one, pictures, device, weights, runs, progress)
            except (RuntimeError, InputError) as error:
                tell(f"failed {one.data} {one.layout} {one.name}: {error}")
                continue
            add(path, result)
            tell(
                f"{one.data} {one.layout} {one.name}: hard gates {result['test_hard_gates']:.4f}, mirrored "
                f"{result['test_mirrored']:.4f}, {result['seconds']:.1f} s of {result['seconds_in_all']:.1f} s"
            )
    return _done(path)


def add(path: Path, result: Mapping[str, Any]) -> None:
    """One more try in the file, whoever else adds some."""
    with locked(path):
        kept = {"study": "campaign", "scale": "paper", "cells": [*_done(path), dict(result)]}
        write_file(path, (json.dumps(kept, indent=1, allow_nan=False) + "\n").encode())


def _done(path: Path) -> list[dict[str, Any]]:
    return list(load(path)["cells"]) if path.exists() else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Run tries of one stage."""
    parser = argparse.ArgumentParser(description="How far do hard gates go?")
    parser.add_argument("--stage", choices=STAGES, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", type=Path, default=None)
    parser.add_argument(
        "--runs", type=Path, default=None, help="folder of run folders, from which a killed call goes on"
    )
    parser.add_argument("--gates", type=Path, default=None, help="write (explore) or read (best) the chosen gates here")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--only", default="", help="words that 'data layout name' must contain, by commas")
    chosen = parser.parse_args(arguments)

    def tell(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    gates = json.loads(chosen.gates.read_text()) if chosen.stage == "best" and chosen.gates is not None else {}
    tries = explore() if chosen.stage == "explore" else best(gates, chosen.epochs)
    words = [word for word in chosen.only.split(",") if word]
    tries = [one for one in tries if all(word in f"{one.data} {one.layout} {one.name}" for word in words)]
    pictures = Pictures(SCALES["paper", 2], chosen.data)
    done = run(tries, chosen.out, pictures, chosen.device, chosen.weights, tell, chosen.runs, follow=tell)
    if chosen.stage == "explore" and chosen.gates is not None:
        found = chosen_gates(done)
        write_file(chosen.gates, json.dumps(found).encode())
        tell(f"chosen: {found}")
    missing = [one.name for one in tries if one.key not in {kept["key"] for kept in done}]
    if missing:
        raise SystemExit(f"not kept: {', '.join(missing)}.")


if __name__ == "__main__":
    main()
