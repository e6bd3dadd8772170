"""Tangent kernels by other software: the two recipes of torch.func, and other packages where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vjp, vmap

from unlazy.runtime import Unsupported

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

    def model_at(sample: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
        def function(values: dict[str, Tensor]) -> Tensor:
            out = functional_call(model, values, (sample[None],))[0]
            return out.sum()[None] if mode == "sum" else out

        return function

    def kernel_block(first: Tensor, second: Tensor) -> Tensor:
        out, pull, *_ = vjp(model_at(first), parameters)
        identity = torch.eye(out.numel(), dtype=out.dtype)
        block = vmap(lambda v: jvp(model_at(second), (parameters,), pull(v))[1])(identity)  # [a, b]
        return block if mode == "full" else block.diagonal().sum()

    return vmap(lambda a: vmap(lambda b: kernel_block(a, b))(x), chunk_size=1)(x)


def hand_written(model: nn.Module, x: Tensor, mode: str, chunk: int) -> Tensor:
    """What one writes by hand for a chain of dense layers and ReLUs: no autograd, (A A^T + 1) o (G G^T) layer by layer."""
    layers = [step for step in model.children() if isinstance(step, nn.Linear)]
    n, h = len(x), x
    entered, open_units = [], []
    with torch.no_grad():
        for layer in layers:
            entered.append(h)
            h = layer(h)
            open_units.append(h > 0)
            h = h if layer is layers[-1] else h.relu()
        size = h.shape[1]
        g = torch.ones(1, n, size) if mode == "sum" else torch.eye(size)[:, None].expand(size, n, size)
        kernel: Tensor | float = 0.0
        for number in reversed(range(len(layers))):
            inputs = entered[number] @ entered[number].T + 1
            if mode == "full":
                rows = g.transpose(0, 1).reshape(n * size, -1)
                kernel = kernel + (rows @ rows.T).view(n, size, n, size) * inputs[:, None, :, None]
            else:
                rows = g.transpose(0, 1).reshape(n, -1)
                kernel = kernel + (rows @ rows.T) * inputs
            if number:
                g = (g @ layers[number].weight) * open_units[number - 1]
        assert isinstance(kernel, Tensor)
        return kernel.transpose(1, 2) if mode == "full" else kernel


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


def neural_tangents_kernel(model: nn.Module, x: Tensor, mode: str, chunk: int) -> Tensor:
    """neural-tangents' empirical kernel (as of version 0.6.5), compiled once for each network and mode."""
    import numpy as np

    kernel, parameters = _neural_tangents(model, mode)
    found = torch.from_numpy(np.array(kernel(x.numpy(), None, parameters)))
    if mode == "trace":  # theirs is the mean over outputs
        return found * model(x[:1]).shape[1]
    return found[..., 0, 0] if mode == "sum" else found


@cache
def _neural_tangents(model: nn.Module, mode: str) -> tuple[Any, Any]:
    """The first of its two exact ways that runs with the JAX installed: structured derivatives, else Jacobians."""
    jax, neural_tangents = (importlib.import_module(name) for name in ("jax", "neural_tangents"))
    function, parameters, shape = _translate_to_jax(model, mode)
    ways = neural_tangents.NtkImplementation
    options = {"vmap_axes": 0, "trace_axes": (-1,) if mode == "trace" else ()}
    for way in (ways.STRUCTURED_DERIVATIVES, ways.JACOBIAN_CONTRACTION):
        kernel = jax.jit(neural_tangents.empirical_ntk_fn(function, implementation=way, **options))
        try:
            kernel(jax.numpy.zeros((2, *shape)), None, parameters)
        except (AttributeError, NotImplementedError, TypeError):
            continue
        return kernel, parameters
    raise Unsupported("neural-tangents", "none of its ways runs with the JAX installed", "Install jax 0.4.30.")


def _translate_to_jax(model: nn.Module, mode: str) -> tuple[Callable[[Any, Any], Any], list[Any], tuple[int, ...]]:
    """A chain of dense layers and ReLUs as a function of (parameters, inputs), its parameters, and the shape of one input."""
    jnp = importlib.import_module("jax.numpy")
    steps = list(model.children())
    weights = [
        (jnp.asarray(step.weight.detach().numpy().T), jnp.asarray(step.bias.detach().numpy()))
        for step in steps
        if isinstance(step, nn.Linear)
    ]

    def function(parameters: Any, inputs: Any) -> Any:
        remaining, state = iter(parameters), inputs
        for step in steps:
            if isinstance(step, nn.Linear):
                weight, bias = next(remaining)
                state = state @ weight + bias
            else:
                state = jnp.maximum(state, 0)
        return state.sum(-1, keepdims=True) if mode == "sum" else state

    return function, weights, (weights[0][0].shape[0],)


OPTIONAL = ("nngeometry", "neural_tangents")


@cache
def missing_peers() -> dict[str, str]:
    """Optional peers that are not timed, each with the reason."""
    reasons = {}
    for name in OPTIONAL:
        if importlib.util.find_spec(name) is None:
            reasons[name] = "not installed"
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # a package for another time breaks in its own way
            reasons[name] = f"does not import: {error}"
    return reasons


def is_dense_chain(model: nn.Module) -> bool:
    """Whether the model is a chain of dense layers and ReLUs, which :func:`hand_written` knows."""
    return all(isinstance(step, nn.Linear | nn.ReLU) for step in model.children())


def peers(model: nn.Module, few: int) -> dict[str, Peer]:
    """The functions to time with ``few`` samples; pair-by-pair products only for at most 20, as they take too long."""
    found: dict[str, Peer] = {"jacobian contraction": jacobian_contraction}
    if few <= 20:
        found["vector products"] = vector_products
    if "nngeometry" not in missing_peers():
        found["nngeometry"] = nngeometry_gram
    if is_dense_chain(model) and "neural_tangents" not in missing_peers():
        found["neural-tangents"] = neural_tangents_kernel
    return found
