"""The gates' product in one pass over memory on a GPU, forward and backward.

Networks of many thin layers are bound by memory, and written with plain operations the backward pass of a gate reads and
writes every number a dozen times. The kernels here are compiled on first use and tried against the plain formulas; where that
fails, for whatever reason, the plain formulas stay in use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

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
    """Both passes as single GPU kernels, or ``None`` where they cannot be had or do not agree with the plain formulas."""
    try:
        forward, backward = _compiled(beta, soft=soft)
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


def _compiled(beta: float, *, soft: bool) -> tuple[Forward, Backward]:
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
