"""Products with the Jacobian of any module by chosen parameters, at their present values: J v, J^T w, and its rows.

J v is computed in forward mode (one pass). What has no forward mode, or whose forward mode disagrees with its gradient
(checked at the first call), goes by differentiating the gradient; what has neither is refused, by name.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vmap
from torch.utils import _pytree as pytree

from unlazy.kernels.capture import Inputs, call, evaluating, requiring, rows_by_sample, samples, take
from unlazy.kernels.forward_mode import gives, load_forward_mode, pairs_agree, plain_layers, push_twice, skips_padding
from unlazy.kernels.tangent import tangent_kernel
from unlazy.runtime import Unsupported, require

CHECKED_SAMPLES = 2
AT_ONCE = 256  # samples in one backward pass
WORK_BYTES = 2**28  # of explicit rows held at once
Call = tuple[tuple[Any, ...], dict[str, Any]]  # how a module is called: arguments and keyword arguments


class Tangents(nn.Module):
    """A copy of a module, held in evaluation mode, and its derivatives by the parameters ``names``, seen as one vector."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.base = _copied(model).eval().requires_grad_(False)
        self.names = tuple(names)
        self._forward_mode: bool | None = None  # found out at the first call

    def wide(self) -> Tangents:
        """The same in float64."""
        if all(parameter.dtype == torch.float64 for parameter in self.base.parameters()):
            return self
        return Tangents(self.base, self.names).double()

    def vector(self) -> Float[Tensor, "p"]:
        """The chosen parameters, flattened one after another."""
        return torch.cat([parameter.reshape(-1) for parameter in self._chosen()])

    def split(self, vector: Float[Tensor, "p"]) -> dict[str, Tensor]:
        """The inverse: by name, in their shapes."""
        chosen = self._chosen()
        pieces = vector.split([parameter.numel() for parameter in chosen])
        return {n: v.view_as(p).to(p.dtype) for n, v, p in zip(self.names, pieces, chosen, strict=True)}

    def start(self, x: Inputs) -> Float[Tensor, "n o"]:
        """f(x), without gradient."""
        with self._ready(), torch.no_grad():
            return call(self.base, x)

    def push(self, vector: Float[Tensor, "p"], called: Call) -> tuple[Tensor, Tensor]:
        """f and J vector, shaped as the module shapes its output; gradients flow to the vector."""
        with self._ready():
            if self._forward_mode is None:
                self._forward_mode = self._has_forward_mode(called)
            if self._forward_mode:
                return self._push_forward(vector, called)
            with torch.no_grad():
                start = self.base(*called[0], **called[1])
            return start, _DoubleBackward.apply(vector, self, called)

    def pull(self, weights: Float[Tensor, "n o"], x: Inputs) -> Float[Tensor, "p"]:
        """J^T weights = sum over samples and outputs of weights times gradients."""
        total = torch.zeros_like(self.vector())
        with self._ready():
            for part in _parts(x, AT_ONCE):
                total += self._pull(weights[part], _as_call(take(x, part)))
        return total

    def rows(self, x: Inputs) -> Iterator[tuple[slice, Float[Tensor, "c o p"]]]:
        """J itself, some samples at a time: gradients batched where that works (checked), else one by one."""
        with self._ready():
            first = take(x, slice(0, 1))
            with torch.no_grad():
                out = call(self.base, first)
            directions = torch.eye(out.shape[1], dtype=out.dtype, device=out.device)
            chosen = self._chosen()
            expected = rows_by_sample(self.base, first, chosen, directions)
            batched = gives(lambda: self._rows_together(first), expected)
            for part in _parts(x, max(1, WORK_BYTES // (8 * expected.numel()))):
                some = take(x, part)
                rows = self._rows_together(some) if batched else rows_by_sample(self.base, some, chosen, directions)
                yield part, rows

    def kernel(self, x: Inputs, x2: Inputs | None = None, memory: str | int | None = None) -> Float[Tensor, "a b"]:
        """J(x) J(x2)^T over all pairs of samples and outputs, ``[n o, m o]``."""
        full = tangent_kernel(self.base, x, x2, outputs="full", parameters=list(self.names), memory=memory)
        return full.transpose(1, 2).flatten(2).flatten(0, 1)

    # --- how -------------------------------------------------------------------------------------------------

    @contextmanager
    def _ready(self) -> Iterator[None]:
        with evaluating(self.base), plain_layers(self.base):
            yield

    def _chosen(self) -> list[nn.Parameter]:
        return [self.base.get_parameter(name) for name in self.names]

    def _values(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in zip(self.names, self._chosen(), strict=True)}

    def _push_forward(self, vector: Tensor, called: Call) -> tuple[Tensor, Tensor]:
        load_forward_mode()
        found = jvp(lambda at: functional_call(self.base, at, *called), (self._values(),), (self.split(vector),))
        return found[0], found[1]

    def _push_twice(self, vector: Tensor, called: Call) -> Tensor:
        """By differentiating the gradient."""
        chosen = self._chosen()
        with requiring(chosen, []), torch.enable_grad():
            out = self.base(*called[0], **called[1])
            return push_twice(out, chosen, self.split(vector.detach()).values())

    def _pull(self, weights: Tensor, called: Call) -> Float[Tensor, "p"]:
        chosen = self._chosen()
        with requiring(chosen, []), torch.enable_grad():
            out = self.base(*called[0], **called[1])
            found: Sequence[Tensor | None] = [None] * len(chosen)
            if out.requires_grad:
                found = torch.autograd.grad(out, chosen, weights.reshape(out.shape).to(out.dtype), allow_unused=True)
        pieces = [torch.zeros_like(p) if g is None else g for p, g in zip(chosen, found, strict=True)]
        return torch.cat([piece.reshape(-1) for piece in pieces])

    def _rows_together(self, x: Inputs) -> Float[Tensor, "c o p"]:
        def one(at: dict[str, Tensor], sample: Inputs) -> Tensor:
            alone = pytree.tree_map(lambda leaf: leaf[None], sample)
            return functional_call(self.base, at, *_as_call(alone)).flatten()

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")
            found = vmap(jacrev(one), (None, 0))(self._values(), x)
        return torch.cat([found[name].flatten(2) for name in self.names], dim=-1)

    # --- which way -------------------------------------------------------------------------------------------

    def _has_forward_mode(self, called: Call) -> bool:
        """Whether forward mode exists and agrees with the gradient, <u, J v> = <J^T u, v>; else the other way must."""
        few: Call = take(called, slice(0, CHECKED_SAMPLES))
        with torch.no_grad():
            out = self.base(*few[0], **few[1])
        require(isinstance(out, Tensor), f"the model must return one tensor, got {type(out).__name__}; wrap it.")
        random = torch.Generator().manual_seed(0)
        like = self.vector()
        v = torch.randn(like.shape, generator=random, dtype=torch.float64).to(like)

        def agrees(moved: Tensor) -> bool:
            u = torch.randn(moved.shape, generator=random, dtype=torch.float64).to(moved)
            return pairs_agree(u, moved, (self._pull(u, few) * v).sum())

        if not skips_padding(self.base):
            try:
                with torch.no_grad():
                    if agrees(self._push_forward(v, few)[1]):
                        return True
            except (NotImplementedError, RuntimeError):
                pass
        try:
            agreed = agrees(self._push_twice(v, few))
            why = "its second derivative disagrees with its gradient"
        except (NotImplementedError, RuntimeError) as error:
            agreed, why = False, str(error).splitlines()[0].rstrip(".")
        if not agreed:
            raise Unsupported(
                self._last_entered(v, few),
                f"it has no forward mode and no second derivative ({why})",
                "Closed forms need gradients only: linearise(...).flow(x, y).outputs(times, new).",
            )
        return False

    def _last_entered(self, vector: Tensor, called: Call) -> str:
        """The innermost module that forward mode was in when it stopped."""
        entered = [self.base]
        handles = [
            module.register_forward_pre_hook(lambda module, inputs: entered.append(module))
            for module in self.base.modules()
        ]
        try:
            with torch.no_grad():
                self._push_forward(vector, called)
        except (NotImplementedError, RuntimeError):
            return type(entered[-1]).__name__
        finally:
            for handle in handles:
                handle.remove()
        return type(self.base).__name__


class _DoubleBackward(torch.autograd.Function):
    """J vector by differentiating the gradient; it is linear in the vector, so its own gradient is J^T."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, tangents: Tangents, called: Call) -> Tensor:
        ctx.tangents, ctx.called = tangents, called
        return tangents._push_twice(vector, called)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None, None]:
        with ctx.tangents._ready():
            return ctx.tangents._pull(weights, ctx.called), None, None


def widen(x: Inputs) -> Inputs:
    """Real numbers as float64."""
    return pytree.tree_map(
        lambda leaf: leaf.double() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf, x
    )


def _as_call(x: Inputs) -> Call:
    if isinstance(x, Mapping):
        return (), dict(x)
    return (tuple(x) if isinstance(x, tuple | list) else (x,)), {}


def _parts(x: Inputs, size: int) -> list[slice]:
    n = samples(x)
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:  # of tensors that a forward pass left behind
        remedy = "Use torch.nn.utils.parametrizations, or linearise before the first forward pass."
        raise Unsupported(
            type(model).__name__, "it cannot be copied, as the old weight_norm and spectral_norm", remedy
        ) from error
