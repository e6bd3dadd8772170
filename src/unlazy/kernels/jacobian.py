"""The Jacobian J of a module's outputs by its parameters: J v, J^T u and rows of J. No other file computes them.

* :func:`jvp_at` gives f and J v at given parameter values, in chunks of samples. :func:`choose_jvp` picks how.
* :class:`ModuleJacobian` gives J v (differentiable by v), J^T u and the rows of J for a frozen copy of a module.
* :func:`rows_by_sample` and :func:`rows_by_vmap` give rows of J: sample by sample, or all samples at once.

J v takes one pass in forward mode. A module without forward mode, or with one that disagrees with the module's gradient,
takes a *double backward*: the gradient is differentiated. A check on two samples decides: <u, J v> must equal <J^T u, v>.
A module with neither raises ``Unsupported``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from unlazy.kernels.capture import (
    Inputs,
    call_model,
    evaluation_mode,
    output_rows,
    require_gradients,
    sample_count,
    take_samples,
)
from unlazy.runtime import Unsupported, require

JVP_SAMPLES, VJP_SAMPLES = 128, 256  # samples in one pass
CHECKED_SAMPLES = 2
ROW_BYTES = 2**28  # of explicit rows held at once
Named = Mapping[str, Tensor]
Jvp = Callable[[nn.Module, Named, Named, Named, Inputs], tuple[Tensor, Tensor]]
Call = tuple[tuple[Any, ...], dict[str, Any]]  # how a module is called: arguments and keyword arguments


# --- J v at given parameter values ---------------------------------------------------------------------------


def jvp_at(
    model: nn.Module,
    values: Named,
    buffers: Named,
    v: Named,
    x: Inputs,
    method: Jvp,
    at_once: int | None = None,
) -> Float[Tensor, "2 n o"]:
    """f and J v, side by side ``[2, n, o]``, for parameters ``values`` and ``buffers`` in place of the model's own.

    ``v``: a direction, by parameter name. ``method``: what :func:`choose_jvp` gave for this model. ``at_once``: samples in one
    pass, ``JVP_SAMPLES`` by default.
    """
    size = at_once or JVP_SAMPLES
    with elementary_layers(model):
        parts = [
            torch.stack(method(model, values, buffers, v, take_samples(x, slice(start, start + size))))
            for start in range(0, sample_count(x), size)
        ]
    return torch.cat(parts, dim=1).detach()


def choose_jvp(model: nn.Module, values: Named, buffers: Named, x: Inputs, *, remedy: str) -> Jvp:
    """``forward_mode_jvp`` or ``double_backward_jvp``: the first that agrees with the gradient.

    Raises ``Unsupported`` with ``remedy`` if neither does.
    """
    few = take_samples(x, slice(0, CHECKED_SAMPLES))
    random = torch.Generator().manual_seed(0)
    v = {name: torch.randn(p.shape, generator=random, dtype=torch.float64).to(p) for name, p in values.items()}
    methods: list[Jvp] = [double_backward_jvp] if has_padding_row(model) else [forward_mode_jvp, double_backward_jvp]

    def product(method: Jvp) -> Tensor:
        return method(model, values, buffers, v, few)[1]

    with elementary_layers(model):
        number, why = _first_correct(
            [partial(product, method) for method in methods],
            lambda u: _pairing_by_gradient(model, values, buffers, v, few, u),
            random,
            coarsest_eps(values.values()),
        )
    if number is None:
        raise Unsupported(type(model).__name__, why, remedy)
    return methods[number]


def jvp_memory_factor(method: Jvp) -> float:
    """Memory of J v in units of a forward pass: 3 for values and tangents, 6 for the graph of a gradient."""
    return 6.0 if method is double_backward_jvp else 3.0


def forward_mode_jvp(model: nn.Module, values: Named, buffers: Named, v: Named, x: Inputs) -> tuple[Tensor, Tensor]:
    """f and J v by one pass in forward mode."""
    frozen = {name: p.detach() for name, p in values.items()}
    with torch.no_grad():
        return _forward_mode(lambda at: call_with(model, {**at, **buffers}, x), frozen, v)


def double_backward_jvp(model: nn.Module, values: Named, buffers: Named, v: Named, x: Inputs) -> tuple[Tensor, Tensor]:
    """f and J v by differentiating the gradient."""
    leaves = {name: p.detach().clone().requires_grad_(True) for name, p in values.items()}
    with torch.enable_grad():
        out = call_with(model, {**leaves, **buffers}, x)
        moved = _double_backward(out, leaves.values(), [v[name] for name in leaves])
    return out.detach(), moved


def call_with(model: nn.Module, values: Named, x: Inputs) -> Float[Tensor, "n o"]:
    """Outputs of the model at ``x`` with ``values`` in place of its parameters and buffers; the model is not changed."""
    arguments, options = as_call(x)
    return output_rows(call_with_tensors(model, values, (arguments, options)), sample_count(x))


def call_with_tensors(model: nn.Module, values: Named, called: Call) -> Any:
    """What the model returns with ``values`` in place of its parameters and buffers, tied ones everywhere.

    Every place of a tensor is named once: ``torch.func.functional_call`` finds tied tensors by itself, but leaves plain tensors
    behind in a module that is registered under two names.
    """
    by_tensor = {id(tensor): values[name] for name, tensor in _named_tensors(model) if name in values}
    placed = {
        f"{path}.{key}" if path else key: by_tensor[id(tensor)]
        for path, module in model.named_modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and id(tensor) in by_tensor
    }
    return functional_call(model, placed, *called, tie_weights=False)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _pairing_by_gradient(
    model: nn.Module, values: Named, buffers: Named, v: Named, x: Inputs, u: Tensor
) -> Float[Tensor, ""]:
    """<J^T u, v> from the plain gradient, of which one tensor at a time is held: all of them are as large as the model."""
    leaves = {name: p.detach().requires_grad_(True) for name, p in values.items()}
    total = torch.zeros((), dtype=u.dtype, device=u.device)

    def add(leaf: Tensor, direction: Tensor) -> None:
        assert leaf.grad is not None
        total.add_((leaf.grad * direction).sum())
        leaf.grad = None

    for name, leaf in leaves.items():
        leaf.register_post_accumulate_grad_hook(partial(add, direction=v[name]))
    with torch.enable_grad():
        out = call_with(model, {**leaves, **buffers}, x)
        if out.requires_grad:
            torch.autograd.backward(out, u, inputs=list(leaves.values()))
    return total


# --- a module and its Jacobian -------------------------------------------------------------------------------


class ModuleJacobian(nn.Module):
    """A copy of a module in evaluation mode, and its Jacobian J by the parameters ``names``, taken as one vector."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.base = _copy_module(model).eval().requires_grad_(False)
        self.names = tuple(names)
        self._forward_mode: bool | None = None  # found out at the first call
        self._shared: bool | None = None

    def in_float64(self) -> ModuleJacobian:
        """The same in float64."""
        if all(parameter.dtype == torch.float64 for parameter in self.base.parameters()):
            return self
        return ModuleJacobian(self.base, self.names).double()

    def vector(self) -> Float[Tensor, "p"]:
        """The chosen parameters, flattened one after another."""
        return torch.cat([parameter.reshape(-1) for parameter in self._chosen()])

    def split(self, vector: Float[Tensor, "p"]) -> dict[str, Tensor]:
        """A vector as tensors by parameter name: the inverse of :meth:`vector`."""
        chosen = self._chosen()
        pieces = vector.split([parameter.numel() for parameter in chosen])
        return {n: v.view_as(p).to(p.dtype) for n, v, p in zip(self.names, pieces, chosen, strict=True)}

    def outputs(self, x: Inputs) -> Float[Tensor, "n o"]:
        """f(x), without gradient."""
        with self._ready(), torch.no_grad():
            return call_model(self.base, x)

    def at(self, values: Named, called: Call) -> Tensor:
        """The module's output with ``values`` in place of its own parameters, as the module shapes it."""
        with self._ready():
            return call_with_tensors(self.base, values, called)

    def jvp(self, vector: Float[Tensor, "p"], called: Call, others: Named | None = None) -> tuple[Tensor, Tensor]:
        """f and J vector, shaped as the module shapes its output; gradients flow to the vector.

        ``others``: values of parameters that are not among ``names``; gradients flow to them too.
        """
        with self._ready():
            if self._forward_mode is None:
                self._forward_mode = self._has_forward_mode(called)
            if self._forward_mode:
                return self._forward_mode_jvp(vector, called, others)
            if others:
                raise Unsupported(
                    type(self.base).__name__,
                    "it has no forward mode, which a network with only some layers linearised needs",
                    "Linearise all trained parameters.",
                )
            with torch.no_grad():
                out = self.base(*called[0], **called[1])
            return out, _DoubleBackwardJvp.apply(vector, self, called)

    def vjp(self, weights: Float[Tensor, "n o"], x: Inputs) -> Float[Tensor, "p"]:
        """J^T weights: the sum over samples and outputs of weights times gradients."""
        total = torch.zeros_like(self.vector())
        with self._ready():
            for part in _chunks(x, VJP_SAMPLES):
                total += self._vjp(weights[part], as_call(take_samples(x, part)))
        return total

    def push(self, vectors: Float[Tensor, "c p"], x: Inputs) -> Float[Tensor, "c n o"]:
        """J v for each of ``c`` vectors v, all samples in one pass.

        One vector takes forward mode. Several share the graph of one gradient (double backward), which takes half the time;
        not with convolutions, whose second derivatives are slow.
        """
        called = as_call(x)
        with self._ready():
            if self._forward_mode is None:
                self._forward_mode = self._has_forward_mode(called)
            if self._forward_mode and (len(vectors) == 1 or not self._shares_gradient_graph(called)):
                with torch.no_grad():
                    return torch.stack([self._forward_mode_jvp(vector, called)[1] for vector in vectors])
            return self._push_through_gradient(vectors, called)

    def pull(self, weights: Float[Tensor, "c n o"], x: Inputs) -> Float[Tensor, "c p"]:
        """J^T u for each of ``c`` weights u, all samples in one pass: one forward pass, and a backward pass for each u."""
        arguments, options = as_call(x)
        chosen = self._chosen()
        result = weights.new_empty(len(weights), sum(parameter.numel() for parameter in chosen))
        with self._ready(), require_gradients(chosen, []), torch.enable_grad():
            out = self.base(*arguments, **options)
            for number, u in enumerate(weights):
                found = _gradient(
                    out, chosen, u.reshape(out.shape).to(out.dtype), retain_graph=number + 1 < len(weights)
                )
                torch.cat([gradient.reshape(-1) for gradient in _fill_zeros(found, chosen)], out=result[number])
        return result

    def rows(
        self, x: Inputs, directions: Float[Tensor, "k o"] | None = None
    ) -> Iterator[tuple[slice, Float[Tensor, "c k p"]]]:
        """J itself, some samples at a time, each part with its slice of the samples.

        ``directions``: combinations of outputs in place of the outputs themselves.
        """
        with self._ready():
            first = take_samples(x, slice(0, 1))
            with torch.no_grad():
                out = call_model(self.base, first)
            if directions is None:
                directions = torch.eye(out.shape[1], dtype=out.dtype, device=out.device)
            chosen = self._chosen()
            expected = rows_by_sample(self.base, first, chosen, directions)
            batched = is_close_to(lambda: rows_by_vmap(self.base, self._values(), first, directions), expected)
            for part in _chunks(x, max(1, ROW_BYTES // (8 * expected.numel()))):
                some = take_samples(x, part)
                if batched:
                    yield part, rows_by_vmap(self.base, self._values(), some, directions)
                else:
                    yield part, rows_by_sample(self.base, some, chosen, directions)

    @contextmanager
    def _ready(self) -> Iterator[None]:
        with evaluation_mode(self.base), elementary_layers(self.base):
            yield

    def _chosen(self) -> list[nn.Parameter]:
        return [self.base.get_parameter(name) for name in self.names]

    def _values(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in zip(self.names, self._chosen(), strict=True)}

    def _forward_mode_jvp(self, vector: Tensor, called: Call, others: Named | None = None) -> tuple[Tensor, Tensor]:
        fixed = dict(others or {})
        return _forward_mode(
            lambda at: call_with_tensors(self.base, {**fixed, **at}, called), self._values(), self.split(vector)
        )

    def _double_backward_jvp(self, vector: Tensor, called: Call) -> Tensor:
        chosen = self._chosen()
        with require_gradients(chosen, []), torch.enable_grad():
            out = self.base(*called[0], **called[1])
            return _double_backward(out, chosen, self.split(vector.detach()).values())

    def _push_through_gradient(self, vectors: Tensor, called: Call) -> Float[Tensor, "c n o"]:
        """J v for every v by double backward; the graph of the gradient is built once."""
        chosen = self._chosen()
        with require_gradients(chosen, []), torch.enable_grad():
            out = self.base(*called[0], **called[1])
            if not out.requires_grad:  # no chosen parameter reaches the output
                return torch.zeros_like(out).expand(len(vectors), *out.shape)
            u = torch.zeros_like(out, requires_grad=True)
            pulled = torch.autograd.grad(out, chosen, u, create_graph=True, allow_unused=True)
            used = [(name, g) for name, g in zip(self.names, pulled, strict=True) if g is not None]
            moved = []
            for number, vector in enumerate(vectors):
                moves = self.split(vector)
                (found,) = torch.autograd.grad(
                    [g for _, g in used],
                    u,
                    [moves[name] for name, _ in used],
                    retain_graph=number + 1 < len(vectors),
                )
                moved.append(found)
        return torch.stack(moved)

    def _shares_gradient_graph(self, called: Call) -> bool:
        """Whether several J v go through the graph of one gradient: no convolutions, and two samples agree."""
        if self._shared is None:
            convolutions = (nn.modules.conv._ConvNd,)
            self._shared = False
            if not any(isinstance(module, convolutions) for module in self.base.modules()):
                few: Call = take_samples(called, slice(0, CHECKED_SAMPLES))
                random, like = torch.Generator().manual_seed(1), self.vector()
                v = torch.randn(2, len(like), generator=random, dtype=torch.float64).to(like)
                with torch.no_grad():
                    expected = torch.stack([self._forward_mode_jvp(each, few)[1] for each in v])
                self._shared = is_close_to(lambda: self._push_through_gradient(v, few), expected)
        return self._shared

    def _vjp(self, weights: Tensor, called: Call) -> Float[Tensor, "p"]:
        chosen = self._chosen()
        with require_gradients(chosen, []), torch.enable_grad():
            out = self.base(*called[0], **called[1])
            found = _gradient(out, chosen, weights.reshape(out.shape).to(out.dtype))
        return torch.cat([gradient.reshape(-1) for gradient in _fill_zeros(found, chosen)])

    def _has_forward_mode(self, called: Call) -> bool:
        """Whether forward mode exists and agrees with the gradient. If not, double backward must, or the call raises."""
        few: Call = take_samples(called, slice(0, CHECKED_SAMPLES))
        with torch.no_grad():
            out = self.base(*few[0], **few[1])
        require(isinstance(out, Tensor), f"the model must return one tensor, got {type(out).__name__}; wrap it.")
        random = torch.Generator().manual_seed(0)
        like = self.vector()
        v = torch.randn(like.shape, generator=random, dtype=torch.float64).to(like)

        def by_forward_mode() -> Tensor:
            with torch.no_grad():
                return self._forward_mode_jvp(v, few)[1]

        def by_double_backward() -> Tensor:
            return self._double_backward_jvp(v, few)

        padded = has_padding_row(self.base)
        ways = [by_double_backward] if padded else [by_forward_mode, by_double_backward]
        eps = coarsest_eps(self._chosen())
        number, why = _first_correct(ways, lambda u: (self._vjp(u, few) * v).sum(), random, eps)
        if number is None:
            raise Unsupported(
                self._last_module_entered(v, few),
                f"it has no forward mode and no second derivative ({why})",
                "Closed forms need gradients only: linearise(...).flow(x, y).outputs(times, new).",
            )
        return ways[number] is by_forward_mode

    def _last_module_entered(self, vector: Tensor, called: Call) -> str:
        """Type name of the innermost module that forward mode was in when it failed."""
        entered = [self.base]
        handles = [
            module.register_forward_pre_hook(lambda module, inputs: entered.append(module))
            for module in self.base.modules()
        ]
        try:
            with torch.no_grad():
                self._forward_mode_jvp(vector, called)
        except (NotImplementedError, RuntimeError):
            return type(entered[-1]).__name__
        finally:
            for handle in handles:
                handle.remove()
        return type(self.base).__name__


class _DoubleBackwardJvp(torch.autograd.Function):
    """J vector by double backward. It is linear in the vector, so its own gradient is J^T."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, jacobian: ModuleJacobian, called: Call) -> Tensor:
        ctx.jacobian, ctx.called = jacobian, called
        return jacobian._double_backward_jvp(vector, called)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None, None]:
        with ctx.jacobian._ready():
            return ctx.jacobian._vjp(weights, ctx.called), None, None


# --- rows of J -----------------------------------------------------------------------------------------------


def rows_by_sample(
    model: nn.Module, x: Inputs, parameters: list[nn.Parameter], directions: Float[Tensor, "k o"]
) -> Float[Tensor, "n k p"]:
    """Gradients of ``directions @ f(x_i)``: one forward pass a sample, one backward pass a direction. Always exact."""
    rows = []
    with require_gradients(parameters, [p for p in model.parameters() if not any(p is q for q in parameters)]):
        for i in range(sample_count(x)):
            with torch.enable_grad():
                out = call_model(model, take_samples(x, slice(i, i + 1)))[0]
            for k, direction in enumerate(directions):
                found = _gradient(out, parameters, direction, retain_graph=k + 1 < len(directions))
                rows.append(torch.cat([_as_real(gradient).reshape(-1) for gradient in _fill_zeros(found, parameters)]))
    return torch.stack(rows).unflatten(0, (-1, len(directions)))


def rows_by_vmap(
    model: nn.Module, values: Named, x: Inputs, directions: Float[Tensor, "k o"]
) -> Float[Tensor, "n k p"]:
    """The same for all samples at once, by ``torch.vmap``; not every model allows it, so compare with one sample first.

    ``values``: the parameters of the gradient, by name, in the order of its columns.
    """

    def sample_rows(sample: Inputs) -> dict[str, Tensor]:
        alone = pytree.tree_map(lambda leaf: leaf[None] if isinstance(leaf, Tensor) else leaf, sample)
        pull = vjp(lambda at: call_with(model, at, alone)[0], dict(values))[1]
        return vmap(lambda direction: pull(direction)[0])(directions)

    with elementary_layers(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        found = vmap(sample_rows)(x)
    return torch.cat([found[name].flatten(2) for name in values], dim=-1)


# --- single products, and checks of them ---------------------------------------------------------------------


def _forward_mode(function: Callable[[dict[str, Tensor]], Tensor], at: Named, v: Named) -> tuple[Tensor, Tensor]:
    """The function's value and its derivative along ``v``."""
    _compile_forward_mode()
    found = jvp(function, (dict(at),), (dict(v),))
    return found[0], found[1]


@cache
def _compile_forward_mode() -> None:
    """PyTorch compiles a few rules at the first use of forward mode and warns that its own way is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.neg, (torch.zeros(1),), (torch.zeros(1),))


def _double_backward(out: Tensor, leaves: Iterable[Tensor], v: Iterable[Tensor]) -> Tensor:
    """J v as the derivative of <J^T u, v> by u, shaped as ``out``, which was computed from the leaves."""
    if not out.requires_grad:  # none of them reaches it
        return torch.zeros_like(out)
    u = torch.zeros_like(out, requires_grad=True)
    pulled = torch.autograd.grad(out, list(leaves), u, create_graph=True, allow_unused=True)
    parts = [(g * move).sum() for g, move in zip(pulled, v, strict=True) if g is not None]
    return torch.autograd.grad(torch.stack(parts).sum(), u)[0]


def _gradient(
    out: Tensor, leaves: Sequence[Tensor], u: Tensor, *, retain_graph: bool = False
) -> Sequence[Tensor | None]:
    """J^T u by leaf; ``None`` for leaves that ``out`` was not computed from."""
    if not out.requires_grad:
        return [None] * len(leaves)
    return torch.autograd.grad(out, leaves, u, retain_graph=retain_graph, allow_unused=True)


def _fill_zeros(found: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


def _as_real(gradient: Tensor) -> Tensor:
    """A complex parameter counts as two real ones."""
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


@contextmanager
def elementary_layers(model: nn.Module) -> Iterator[None]:
    """Attention and recurrent layers run as elementary operations in the block: fused ones have first derivatives only."""
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            for library in (torch.backends.mkldnn, torch.backends.cudnn):
                enabled, *_ = library.set_flags(_enabled=False)
                stack.callback(library.set_flags, _enabled=enabled)
        yield


def has_padding_row(model: nn.Module) -> bool:
    """Whether an embedding has a padding row: the row gets no gradient, but forward mode would move it."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return any(isinstance(module, kinds) and module.padding_idx is not None for module in model.modules())


def _first_correct(
    ways: Sequence[Callable[[], Tensor]], pairing: Callable[[Tensor], Tensor], random: torch.Generator, eps: float
) -> tuple[int | None, str]:
    """Index of the first way to compute J v that agrees with the gradient, or ``None``; and why the last way failed.

    ``pairing(u)`` is <J^T u, v> from the plain gradient; it must equal <u, J v> up to rounding, for a random u. ``eps``: unit of
    rounding of the parameters, which may be coarser than that of the outputs.
    """
    why = "it has no forward mode and no second derivative"
    for number, way in enumerate(ways):
        try:
            moved = way()
        except (NotImplementedError, RuntimeError) as error:  # an operation has no such derivative
            text = str(error).splitlines()[0].rstrip(".")
            why = f"one of its operations has no forward mode and no second derivative (torch: {text})"
            continue
        u = torch.randn(moved.shape, generator=random, dtype=torch.float64).to(moved)
        back = pairing(u)
        bound = 1e4 * max(eps, torch.finfo(moved.dtype).eps) * float(u.norm() * moved.norm() + back.abs())
        if float(((u * moved).sum() - back).abs()) <= bound:
            return number, ""
        why = "its derivatives disagree with its gradient"
    return None, why


def coarsest_eps(tensors: Iterable[Tensor]) -> float:
    """The largest unit of rounding of these tensors."""
    return max(torch.finfo(tensor.dtype).eps for tensor in tensors)


def is_close_to(compute: Callable[[], Tensor], expected: Tensor) -> bool:
    """Whether ``compute()`` runs here at all and gives ``expected`` up to rounding."""
    try:
        found = compute()
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    bound = 1e4 * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    return torch.allclose(found, expected, rtol=0, atol=bound)


# --- small things --------------------------------------------------------------------------------------------


def as_call(x: Inputs) -> Call:
    """How a model is called with these inputs: arguments and keyword arguments."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (tuple(x) if isinstance(x, tuple | list) else (x,)), {}


def _chunks(x: Inputs, size: int) -> list[slice]:
    n = sample_count(x)
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _copy_module(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:  # of tensors that a forward pass left behind
        remedy = "Use torch.nn.utils.parametrizations, or linearise before the first forward pass."
        raise Unsupported(
            type(model).__name__, "it cannot be copied, as the old weight_norm and spectral_norm", remedy
        ) from error
