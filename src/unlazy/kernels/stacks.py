"""Tangent kernels of a stack of networks, all members at once."""

from __future__ import annotations

import torch
from torch import Tensor

from unlazy.kernels.capture import evaluation_mode, require_gradients
from unlazy.kernels.gated import with_exact_gradients
from unlazy.kernels.selection import Parameters, select_parameters
from unlazy.models.net import GatedNet


def stack_tangent_kernel(
    model: GatedNet, x: Tensor, outputs: str, parameters: Parameters, surrogate: bool, rows_at_once: int = 64
) -> Tensor:
    """All members at once, by batched backward passes: members share no parameter, so one serves all. ``[S, n, n]``."""
    chosen = list(select_parameters(model, parameters).values())
    own = model if surrogate else with_exact_gradients(model)
    others = [p for p in model.parameters() if not any(p is q for q in chosen)]
    with evaluation_mode(model), require_gradients(chosen, others):
        out = own(x)  # [S, n, outputs]
        members, n, size = out.shape
        picks = torch.eye(n * size, dtype=out.dtype, device=out.device).reshape(-1, n, size)
        parts = []
        for part in picks.split(rows_at_once):
            found = torch.autograd.grad(
                out.sum(0), chosen, part, retain_graph=True, is_grads_batched=True, allow_unused=True
            )
            pieces = [
                (p.new_zeros(len(part), *p.shape) if g is None else g).transpose(0, 1).reshape(members, len(part), -1)
                for p, g in zip(chosen, found, strict=True)
            ]
            parts.append(torch.cat(pieces, dim=-1))
        rows = torch.cat(parts, dim=1).unflatten(1, (n, size))  # [S, n, outputs, p]
    if outputs == "full":
        return torch.einsum("znap,zmbp->znmab", rows, rows)
    return torch.einsum("znap,zmap->znm", rows, rows)
