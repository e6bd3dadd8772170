"""What every product with a Jacobian needs: forward mode made ready, a way around it, and the check that either is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel


@cache
def load_forward_mode() -> None:
    """PyTorch compiles a few rules at the first use of forward mode, by means it calls deprecated itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.neg, (torch.zeros(1),), (torch.zeros(1),))


@contextmanager
def plain_layers(model: nn.Module) -> Iterator[None]:
    """Attention and recurrent layers from elementary operations: the fused ones have first derivatives only."""
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            for library in (torch.backends.mkldnn, torch.backends.cudnn):
                enabled, *_ = library.set_flags(_enabled=False)
                stack.callback(library.set_flags, _enabled=enabled)
        yield


def skips_padding(model: nn.Module) -> bool:
    """An embedding's padding row gets no gradient, but forward mode would move it."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return any(isinstance(module, kinds) and module.padding_idx is not None for module in model.modules())


def push_twice(out: Tensor, leaves: Iterable[Tensor], moves: Iterable[Tensor]) -> Tensor:
    """J moves without forward mode: the derivative of <J^T u, moves> by u, shaped as ``out``, which depends on the leaves."""
    u = torch.zeros_like(out, requires_grad=True)
    pulled = torch.autograd.grad(out, list(leaves), u, create_graph=True, allow_unused=True)
    parts = [(g * move).sum() for g, move in zip(pulled, moves, strict=True) if g is not None]
    return torch.autograd.grad(torch.stack(parts).sum(), u)[0]


def pairs_agree(u: Tensor, moved: Tensor, back: Float[Tensor, ""]) -> bool:
    """Whether <u, J v> is <J^T u, v>, but for rounding."""
    bound = 1e4 * torch.finfo(moved.dtype).eps * float(u.norm() * moved.norm() + back.abs())
    return float(((u * moved).sum() - back).abs()) <= bound


def gives(rule: Callable[[], Tensor], expected: Tensor) -> bool:
    """Whether a faster way works here at all, and gives the same but for rounding."""
    try:
        found = rule()
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    bound = 1e4 * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    return torch.allclose(found, expected, rtol=0, atol=bound)
