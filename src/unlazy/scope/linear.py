"""The network's tangent at the start of training: f_lin = f_0 + J_0 (theta - theta_0), by one product with the Jacobian.

Forward mode where a model has it, else the derivative of its gradient; either way checked against the plain gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, jvp

from unlazy.kernels import forward_mode
from unlazy.kernels.capture import Inputs, samples, take
from unlazy.kernels.forward_mode import plain_layers
from unlazy.runtime import Unsupported

AT_ONCE = 128  # samples pushed together
CHECKED_SAMPLES = 2
Named = Mapping[str, Tensor]
Push = Callable[[nn.Module, Named, Named, Named, Inputs], tuple[Tensor, Tensor]]


def push(model: nn.Module, at: Named, buffers: Named, moves: Named, x: Inputs, how: Push | None = None) -> Tensor:
    """f and J moves, side by side ``[2, n, o]``, at the parameters ``at`` and with the given buffers, in chunks of samples."""
    chosen = how or how_to_push(model, at, buffers, x)
    with plain_layers(model):
        parts = [
            torch.stack(chosen(model, at, buffers, moves, take(x, slice(start, start + AT_ONCE))))
            for start in range(0, samples(x), AT_ONCE)
        ]
    return torch.cat(parts, dim=1).detach()


def how_to_push(model: nn.Module, at: Named, buffers: Named, x: Inputs) -> Push:
    """The way that agrees with the gradient, <u, J v> = <J^T u, v> for random u and v; raises where none does."""
    few = take(x, slice(0, CHECKED_SAMPLES))
    random = torch.Generator().manual_seed(0)
    moves = {name: torch.randn(p.shape, generator=random, dtype=torch.float64).to(p) for name, p in at.items()}
    why = "it has no forward mode and no second derivative"
    with plain_layers(model):
        for way in (push_forward, push_twice):
            if way is push_forward and forward_mode.skips_padding(model):
                continue
            try:
                out, moved = way(model, at, buffers, moves, few)
            except (NotImplementedError, RuntimeError) as error:
                why = str(error).splitlines()[0].rstrip(".")
                continue
            u = torch.randn(out.shape, generator=random, dtype=torch.float64).to(out)
            back = _pulled(model, at, buffers, moves, few, u)
            if forward_mode.pairs_agree(u, moved, back):
                return way
            why = "its derivatives disagree with its gradient"
    raise Unsupported(type(model).__name__, why, "The other measures need first derivatives only.")


def push_forward(model: nn.Module, at: Named, buffers: Named, moves: Named, x: Inputs) -> tuple[Tensor, Tensor]:
    """One pass in forward mode."""
    forward_mode.load_forward_mode()
    frozen = {name: p.detach() for name, p in at.items()}
    with torch.no_grad():
        found = jvp(lambda values: called(model, {**values, **buffers}, x), (frozen,), (dict(moves),))
    return found[0], found[1]


def push_twice(model: nn.Module, at: Named, buffers: Named, moves: Named, x: Inputs) -> tuple[Tensor, Tensor]:
    """By differentiating the gradient."""
    leaves = {name: p.detach().clone().requires_grad_(True) for name, p in at.items()}
    with torch.enable_grad():
        out = called(model, {**leaves, **buffers}, x)
        moved = forward_mode.push_twice(out, leaves.values(), [moves[name] for name in leaves])
    return out.detach(), moved


def _pulled(model: nn.Module, at: Named, buffers: Named, moves: Named, x: Inputs, u: Tensor) -> Tensor:
    """<J^T u, moves> by the plain gradient."""
    leaves = {name: p.detach().clone().requires_grad_(True) for name, p in at.items()}
    with torch.enable_grad():
        out = called(model, {**leaves, **buffers}, x)
        found = torch.autograd.grad(out, list(leaves.values()), u, allow_unused=True)
    pairs = zip(leaves, found, strict=True)
    return torch.stack([(g * moves[name]).sum() for name, g in pairs if g is not None]).sum()


def called(model: nn.Module, values: Named, x: Inputs) -> Float[Tensor, "n o"]:
    options = dict(x) if isinstance(x, Mapping) else {}
    arguments = () if isinstance(x, Mapping) else tuple(x) if isinstance(x, tuple | list) else (x,)
    out: Tensor = functional_call(model, dict(values), arguments, options)
    return out.reshape(samples(x), -1)
