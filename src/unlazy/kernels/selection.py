"""What to differentiate, and by what: output directions and parameter selections."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from unlazy.models.net import GatedNet
from unlazy.runtime import InputError, Unsupported, require

Outputs = str | int | Sequence[int]


def select_parameters(model: nn.Module, parameters: str | Sequence[str]) -> dict[str, nn.Parameter]:
    """Names and parameters of a selection; raises where it is empty."""
    named = dict(model.named_parameters())
    if parameters == "all":
        chosen = named
    elif parameters == "trainable":
        chosen = {name: p for name, p in named.items() if p.requires_grad}
    elif parameters in ("gate", "value"):
        require(isinstance(model, GatedNet), f"parameters={parameters!r} needs a GatedNet; give names or patterns.")
        assert isinstance(model, GatedNet)
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
            f"it has no {parameters} parameters",
            f"There are: {known or 'none'}; or parameters='all'.",
        )
    return chosen


def output_directions(outputs: Outputs, out: Tensor) -> tuple[Tensor, str]:
    """Which combinations of outputs are differentiated ``[k, outputs]``, and how they are paired."""
    size = out.shape[1]
    identity = torch.eye(size, dtype=out.dtype, device=out.device)
    if outputs in ("trace", "full"):
        return identity, str(outputs)
    if outputs == "sum":
        return torch.ones(1, size, dtype=out.dtype, device=out.device), "trace"
    if isinstance(outputs, str):
        raise InputError(f"outputs must be 'trace', 'full', 'sum', an index or a list of them, got {outputs!r}.")
    indices = [outputs] if isinstance(outputs, int) else list(outputs)
    require(
        bool(indices) and all(-size <= index < size for index in indices),
        f"outputs {indices} are not all among the model's {size}.",
    )
    return identity[indices], "trace" if isinstance(outputs, int) else "full"


def own_parameters(module: nn.Module, picked: tuple[bool, bool]) -> list[nn.Parameter]:
    own = dict(module.named_parameters(recurse=False))
    return [own[name] for name, taken in zip(("weight", "bias"), picked, strict=True) if taken]


def direct_names(model: nn.Module, name: str) -> list[str]:
    """Exact names of the trainable parameters a module holds itself."""
    module = model.get_submodule(name)
    prefix = f"{name}." if name else ""
    return [f"{prefix}{own}" for own, p in module.named_parameters(recurse=False) if p.requires_grad]
