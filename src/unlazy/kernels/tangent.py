"""The empirical tangent kernel: inner products of parameter gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.models.net import GatedNet
from unlazy.runtime import InputError, Unsupported, require


def tangent_kernel(
    model: nn.Module,
    x: Tensor,
    *,
    outputs: str = "trace",
    parameters: str = "trainable",
    surrogate: bool = False,
    chunk: int = 64,
) -> Tensor:
    """Theta(x, x') = <grad f(x), grad f(x')>, summed over outputs (``"trace"``, ``[n, n]``) or for every pair
    of outputs (``"full"``, ``[n, n, O, O]``). A stack of networks gives a leading member axis.

    ``parameters``: ``"trainable"`` (what training moves), ``"all"`` (frozen ones too), or ``"gate"`` / ``"value"`` of a
    :class:`GatedNet`. With hard gates the exact kernel is over the value parameters (gates are locally
    constant); ``surrogate=True`` asks for gradients through the soft backward instead, which is *not* the Jacobian
    of the function.
    """
    require(outputs in ("trace", "full"), f"outputs must be 'trace' or 'full', got {outputs!r}.")
    rows = tangent_features(model, x, parameters=parameters, surrogate=surrogate, chunk=chunk)  # [*S, n, O, p]
    if outputs == "full":
        return torch.einsum("...nap,...mbp->...nmab", rows, rows)
    return torch.einsum("...nap,...map->...nm", rows, rows)


def tangent_features(
    model: nn.Module, x: Tensor, *, parameters: str = "trainable", surrogate: bool = False, chunk: int = 64
) -> Float[Tensor, "*members n o p"]:
    """grad f_o(x_i) over the chosen parameters, by batched backward passes of ``chunk`` rows at a time.

    For models whose samples do not interact (in evaluation mode). The slow twin that trusts nothing is
    :func:`unlazy.kernels.reference.tangent_features`.
    """
    chosen, exact = _choose(model, parameters, surrogate)
    members = model.members if isinstance(model, GatedNet) else None
    flags = [(parameter, parameter.requires_grad) for parameter in chosen]
    was_training = model.training
    try:
        model.eval()
        for parameter in chosen:
            parameter.requires_grad_(True)
        out = exact(x)
        if not isinstance(out, Tensor):
            raise InputError(f"the model must return one tensor, got {type(out).__name__}.")
        out = out.unsqueeze(-1) if out.ndim == (1 if members is None else 2) else out  # [*S, n, O]
        n, size = out.shape[-2:]
        flat = out if members is None else out.sum(0)  # members share no parameter: one backward serves all
        picks = torch.eye(n * size, dtype=out.dtype, device=out.device).reshape(-1, n, size)
        rows = []
        for part in picks.split(chunk):
            gradients = torch.autograd.grad(
                flat, chosen, part, retain_graph=True, is_grads_batched=True, allow_unused=True
            )
            rows.append(_flatten(gradients, chosen, len(part), members))
        jacobian = torch.cat(rows, dim=-2)  # [*S, n * O, p]
        return jacobian.unflatten(-2, (n, size))
    finally:
        model.train(was_training)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _choose(model: nn.Module, parameters: str, surrogate: bool) -> tuple[list[nn.Parameter], nn.Module]:
    """The parameters to differentiate by, and the module whose autograd is exact for them."""
    if parameters in ("trainable", "all"):
        chosen = [p for p in model.parameters() if p.requires_grad or parameters == "all"]
    else:
        require(isinstance(model, GatedNet), f"parameters={parameters!r} needs a GatedNet; others: 'trainable', 'all'.")
        assert isinstance(model, GatedNet)
        chosen = [p for _, p in model.branch(parameters)]
    if not chosen:
        raise Unsupported(type(model).__name__, f"it has no {parameters} parameters", "Choose another selection.")
    if isinstance(model, GatedNet) and not surrogate and not model.exact_gates():
        return chosen, model.hard()
    return chosen, model


def _flatten(gradients: Sequence[Tensor | None], chosen: list[nn.Parameter], rows: int, members: int | None) -> Tensor:
    """Gradients ``[rows, *S, ...]`` per parameter as one ``[*S, rows, p]``; unused parameters give zeros."""
    lead = 0 if members is None else 1
    parts = []
    for gradient, parameter in zip(gradients, chosen, strict=True):
        full = parameter.new_zeros(rows, *parameter.shape) if gradient is None else gradient
        full = full if members is None else full.transpose(0, 1)
        parts.append(full.detach().flatten(lead + 1) if full.ndim > lead + 1 else full.detach().unsqueeze(-1))
    return torch.cat(parts, dim=-1)
