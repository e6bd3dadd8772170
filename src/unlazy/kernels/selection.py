"""What to differentiate, and by what: output directions and parameter selections."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from unlazy.kernels.gated import Gated
from unlazy.runtime import InputError, Unsupported, require

Outputs = str | int | Sequence[int]
Parameters = str | Sequence[str] | None


def select_parameters(model: nn.Module, parameters: Parameters) -> dict[str, nn.Parameter]:
    """Names and parameters of a selection (``None``: the trainable ones); raises where it is empty."""
    named = dict(model.named_parameters())
    if parameters == "all":
        chosen = named
    elif parameters is None or parameters == "trainable":
        chosen = {name: p for name, p in named.items() if p.requires_grad}
    elif parameters in ("gate", "value"):
        if not isinstance(model, Gated):
            raise InputError(f"parameters={parameters!r} needs a gated network of ours; give names or patterns.")
        chosen = dict(model.branch(str(parameters)))
    else:
        patterns = [parameters] if isinstance(parameters, str) else list(parameters)
        chosen = {name: p for name, p in named.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
        for pattern in patterns:
            if chosen and not any(fnmatchcase(name, pattern) for name in named):
                raise InputError(f"no parameter matches {pattern!r}; there are: {', '.join(list(named)[:5])}, ...")
    if not chosen:
        known = ", ".join(list(named)[:5]) + (", ..." if len(named) > 5 else "")
        raise Unsupported(
            type(model).__name__,
            f"it has no {'trainable' if parameters is None else parameters} parameters",
            f"There are: {known or 'none'}; or parameters='all'.",
        )
    return chosen


def output_directions(outputs: Outputs, out: Tensor) -> tuple[Tensor, str]:
    """Which combinations of outputs are differentiated ``[k, outputs]``, and how they are paired."""
    size = out.shape[1]
    if outputs in ("trace", "full"):
        return torch.eye(size, dtype=out.dtype, device=out.device), str(outputs)
    if outputs == "sum":
        return torch.ones(1, size, dtype=out.dtype, device=out.device), "trace"
    if isinstance(outputs, str):
        raise InputError(f"outputs must be 'trace', 'full', 'sum', an index or a list of them, got {outputs!r}.")
    single = _whole_number(outputs)
    indices = [single] if single is not None else [_whole_number(index) for index in outputs]  # type: ignore[union-attr]
    known = [index for index in indices if index is not None and -size <= index < size]
    require(bool(known) and len(known) == len(indices), f"outputs {outputs} are not all among the model's {size}.")
    directions = torch.zeros(len(known), size, dtype=out.dtype, device=out.device)
    directions[torch.arange(len(known)), known] = 1
    return directions, "full" if single is None else "trace"


def direction_count(outputs: Outputs, size: int) -> int:
    """How many directions :func:`output_directions` makes of so many outputs."""
    if isinstance(outputs, str):
        return 1 if outputs == "sum" else size
    return 1 if _whole_number(outputs) is not None else len(outputs)  # type: ignore[arg-type]


def _whole_number(index: Any) -> int | None:
    """A whole number, whichever library it comes from; ``None`` for anything else."""
    if isinstance(index, bool):
        raise InputError(f"outputs are numbered: an index or a list of them, got {index}.")
    try:
        return operator.index(index)
    except TypeError:
        return None


def own_parameters(module: nn.Module, picked: tuple[bool, bool]) -> list[nn.Parameter]:
    """Weight and bias of a module, those of them that are picked."""
    return [module._parameters[name] for name, taken in zip(("weight", "bias"), picked, strict=True) if taken]  # type: ignore[misc]


def trainable_by_module(model: nn.Module) -> dict[str, list[str]]:
    """Exact names of the trainable parameters that each module holds itself; a shared one belongs to the first that has it."""
    found: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found.setdefault(name.rpartition(".")[0], []).append(name)
    return found
