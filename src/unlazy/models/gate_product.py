"""Gate times value, rule(q) v, in few passes over memory, forward and backward.

Networks of many thin layers are bound by memory. Written with plain operations, the backward pass of a gate reads and writes
every number a dozen times. On a GPU one compiled kernel does each pass. The kernels are compiled on first use and compared
with the plain formulas; where compiling or the comparison fails, the plain formulas are used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.models.gates import GateRule, SoftGate

TINY = 1e-6
QUICK_TYPES = (torch.float32, torch.bfloat16)
Forward = Callable[[Tensor, Tensor], Tensor]
Backward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

FORWARD = """
template <typename T> T gate_forward(T q, T v) {{
    {value}
    return T(value);
}}
"""
BACKWARD = """
template <typename T> void gate_backward(T g, T q, T v, T& to_gate, T& to_value) {{
    float soft = 1.0f / (1.0f + ::exp(-{beta}f * float(q)));
    to_gate = T(float(g) * float(v) * {beta}f * soft * (1.0f - soft));
    to_value = T({share} * float(g));
}}
"""


def plain_forward(q: Tensor, v: Tensor, beta: float, *, soft: bool) -> Tensor:
    """sigmoid(beta q) v, or 1[q >= 0] v."""
    return torch.sigmoid(beta * q) * v if soft else torch.where(q >= 0, v, 0)


def plain_backward(grad: Tensor, q: Tensor, v: Tensor, beta: float, *, soft: bool) -> tuple[Tensor, Tensor]:
    """Gradients for q, through the soft gate in any case, and for v."""
    share = torch.sigmoid(beta * q)
    to_gate = (grad * v).mul_(beta) * (share * (1 - share))
    to_value = share * grad if soft else torch.where(q >= 0, grad, 0)
    return to_gate.to(q.dtype), to_value.to(v.dtype)


@cache
def gate_kernels(beta: float, *, soft: bool) -> tuple[Forward, Backward] | None:
    """Forward and backward pass as one GPU kernel each; ``None`` if they do not compile or disagree with the plain formulas."""
    try:
        forward, backward = _compile_kernels(beta, soft=soft)
        random = torch.Generator(device="cuda").manual_seed(0)
        for dtype in QUICK_TYPES:
            g, q, v = (torch.randn(3, 64, generator=random, device="cuda", dtype=dtype) for _ in range(3))
            found = forward(q, v), *backward(g, q, v)
            wanted = (
                plain_forward(q.double(), v.double(), beta, soft=soft),
                *plain_backward(g.double(), q.double(), v.double(), beta, soft=soft),
            )
            close = 1e-5 if dtype == torch.float32 else 1e-2
            if not all(
                torch.allclose(a.double(), b, rtol=close, atol=close) for a, b in zip(found, wanted, strict=True)
            ):
                return None
    except (RuntimeError, AttributeError, TypeError):
        return None
    return forward, backward


def _compile_kernels(beta: float, *, soft: bool) -> tuple[Forward, Backward]:
    """Forward and backward pass as CUDA code, compiled by torch on first use."""
    from torch.cuda import jiterator

    value = f"float value = float(v) / (1.0f + ::exp(-{beta!r}f * float(q)));"
    if not soft:
        value = "float value = float(q) >= 0.0f ? float(v) : 0.0f;"
    share = "soft" if soft else "(float(q) >= 0.0f ? 1.0f : 0.0f)"
    forward: Forward = jiterator._create_jit_fn(FORWARD.format(value=value))
    backward: Backward = jiterator._create_multi_output_jit_fn(
        BACKWARD.format(beta=repr(beta), share=share), num_outputs=2
    )
    return forward, backward


class _GateProduct(torch.autograd.Function):
    """rule(q) v forward; backward through sigmoid(beta q) for q. It keeps q and v for the backward pass and nothing else."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, v: Tensor, beta: float, soft: bool, quick: bool) -> Tensor:
        ctx.save_for_backward(q, v)
        ctx.beta, ctx.soft = beta, soft
        ctx.kernels = gate_kernels(beta, soft=soft) if quick and q.dtype == v.dtype in QUICK_TYPES else None
        return ctx.kernels[0](q, v) if ctx.kernels else plain_forward(q, v, beta, soft=soft)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (grad,), (q, v) = grads, ctx.saved_tensors
        if ctx.kernels and grad.dtype == q.dtype:
            to_gate, to_value = ctx.kernels[1](grad, q, v)
        else:
            to_gate, to_value = plain_backward(grad, q, v, ctx.beta, soft=ctx.soft)
        return to_gate, to_value, None, None, None  # autograd sums broadcast axes


def multiply_by_gate(rule: GateRule, q: Tensor, v: Tensor, *, quick: bool = False) -> Tensor:
    """rule(q) * v with few passes over memory; ``quick``: use the compiled GPU kernels where they exist."""
    soft = isinstance(rule, SoftGate)
    if rule.beta is not None and q.requires_grad and (quick or not soft):
        result: Tensor = _GateProduct.apply(q, v, rule.beta, soft, quick)
        return result
    return rule(q).to(v.dtype) * v if isinstance(rule, SoftGate) else torch.where(q >= 0, v, 0)


def divide_by_channel_size(q: Float[Tensor, "n *rest"]) -> Float[Tensor, "n *rest"]:
    """q with every channel divided by its root mean square over batch and positions: the half-spaces stay the same.

    The root mean square counts as a constant: no gradient goes through it.
    """
    over = tuple(axis for axis in range(q.ndim) if axis != 1)
    with torch.autocast(q.device.type, enabled=False):  # it would copy q to float32 first
        wide = torch.promote_types(q.dtype, torch.float32)
        norm = torch.linalg.vector_norm(q.detach(), dim=over, keepdim=True, dtype=wide)
    size = norm / (q.numel() / q.shape[1]) ** 0.5
    return q / (size + TINY).to(q.dtype)
