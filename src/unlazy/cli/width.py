"""``unlazy width``: the width check of a model that a function of the user makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer

from unlazy import plots
from unlazy.cli.progress import report_progress
from unlazy.cli.user_code import find_object
from unlazy.runtime import InputError, require
from unlazy.widths.check import width_check

OPTIMISERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def width_command(
    model: str,
    probe: str | None,
    widths: str,
    optimiser: str,
    rate: float,
    steps: int,
    seeds: int,
    figure: Path | None,
    *,
    as_json: bool,
) -> None:
    """Check the model and print the result as text or JSON; draw the figure if a file is named."""
    make_model = _find(model)
    require(callable(make_model), f"{model} must be a function of the width, got {type(make_model).__name__}.")
    given = _find(probe or f"{model.partition(':')[0]}:probe")
    data = given() if callable(given) else given
    require(figure is None or figure.suffix in (".png", ".pdf"), f"--figure is a .png or .pdf file, got {figure}.")
    with report_progress() as report:
        found = width_check(
            make_model,
            _parse_widths(widths),
            data,
            optimiser=_find_optimiser(optimiser, rate),
            steps=steps,
            seeds=seeds,
            progress=lambda done, total: report("networks", done, total),
        )
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else str(found))
    if figure is not None:
        plots.save_figure(found.figure(), figure.with_suffix(""))
        typer.echo(f"figure: {figure.with_suffix('.png')} and .pdf", err=True)


def _find(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    require(
        bool(colon and attribute), f"{name!r} must be module:name, such as mine:make_model for make_model in mine.py."
    )
    return find_object(module, attribute)


def _parse_widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise InputError(f"--widths are whole numbers such as 64,128,256; got {text!r}.") from None


def _find_optimiser(name: str, rate: float) -> Callable[..., torch.optim.Optimizer]:
    """An optimiser by its word, with this rate, or a function of the user: of the parameters, or of (model, width)."""
    if ":" in name:
        own: Callable[..., torch.optim.Optimizer] = _find(name)
        return own
    known = ", ".join(OPTIMISERS)
    require(name in OPTIMISERS, f"--optimiser is {known} or module:function, got {name!r}.")
    return lambda parameters: OPTIMISERS[name](parameters, rate)
