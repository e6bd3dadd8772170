"""What others offer for the same kernel: torch.func's two recipes always, other packages where they are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vjp, vmap

Peer = Callable[[nn.Module, Tensor, str, int], Tensor]


def jacobian_contraction(model: nn.Module, x: Tensor, mode: str, chunk: int) -> Tensor:
    """torch.func's first recipe: per-sample Jacobians by vmap(jacrev), then their inner products."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def single(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        out = functional_call(model, values, (sample[None],))[0]
        return out.sum()[None] if mode == "sum" else out

    rows = vmap(jacrev(single), (None, 0), chunk_size=chunk)(parameters, x)
    equation = "nap,mbp->nmab" if mode == "full" else "nap,map->nm"
    return sum(torch.einsum(equation, j.flatten(2), j.flatten(2)) for j in rows.values())  # type: ignore[return-value]


def vector_products(model: nn.Module, x: Tensor, mode: str, chunk: int) -> Tensor:
    """torch.func's second recipe: tangent kernels as vjp followed by jvp, pair by pair, no Jacobian kept."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def at(sample: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
        def function(values: dict[str, Tensor]) -> Tensor:
            out = functional_call(model, values, (sample[None],))[0]
            return out.sum()[None] if mode == "sum" else out

        return function

    def pair(first: Tensor, second: Tensor) -> Tensor:
        out, pull, *_ = vjp(at(first), parameters)
        identity = torch.eye(out.numel(), dtype=out.dtype)
        block = vmap(lambda v: jvp(at(second), (parameters,), pull(v))[1])(identity)  # [a, b]
        return block if mode == "full" else block.diagonal().sum()

    return vmap(lambda a: vmap(lambda b: pair(a, b))(x), chunk_size=1)(x)


def nngeometry_gram(model: nn.Module, x: Tensor, mode: str, chunk: int) -> Tensor:
    """NNGeometry's Gram matrix (as of version 0.4)."""
    from nngeometry.gram import GramMatrix
    from torch.utils.data import DataLoader, TensorDataset

    def function(*batch: Tensor) -> Tensor:
        out = model(batch[0])
        return out.sum(1, keepdim=True) if mode == "sum" else out

    full = GramMatrix(model, DataLoader(TensorDataset(x), batch_size=chunk), function).to_torch()  # [O, n, O, m]
    full = full.permute(1, 3, 0, 2)
    return full if mode == "full" else full.diagonal(dim1=2, dim2=3).sum(-1)


def peers(few: int) -> dict[str, Peer]:
    """The recipes to time for ``few`` samples: pair-by-pair products only where they end this year."""
    found: dict[str, Peer] = {"jacobian contraction": jacobian_contraction}
    if few <= 20:
        found["vector products"] = vector_products
    if importlib.util.find_spec("nngeometry") is not None:
        found["nngeometry"] = nngeometry_gram
    return found
