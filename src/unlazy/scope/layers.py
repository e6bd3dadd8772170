"""The tangent kernel layer by layer, and the average gradient outer products of the same backward passes.

One pass gives both: a layer's share of the kernel pairs its inputs and its output gradients g, and W^T (mean of g g^T) W is the
AGOP of the network as a function of what the layer reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.kernels.capture import Inputs, Tap, evaluation_mode, sample_count, take_samples
from unlazy.kernels.gram import USABLE
from unlazy.kernels.jacobian import is_close_to, rows_by_sample, rows_by_vmap
from unlazy.kernels.layer_rules import Call, Rows, Share
from unlazy.kernels.selection import Outputs, own_parameters
from unlazy.kernels.tangent_engine import WORK_SHARE, RuleMismatch, TangentKernel, as_held
from unlazy.models.dense_layers import Affine, ConstantAffine
from unlazy.scope.functional_linear import StandIn, stand_ins, tapped

AT_ONCE_BYTES = 2**30  # of activations and gradients, so that layers can be paired one after the other
AGOP_SAMPLES = 16  # enough: their outer products are summed over outputs and positions
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Tangents:
    """The kernel's parts by module name, which add up to it exactly, and the mean g g^T of the layers that have one."""

    parts: dict[str, Float[Tensor, "n n"]]
    moments: dict[str, Float[Tensor, "out out"]]

    @property
    def kernel(self) -> Float[Tensor, "n n"]:
        return torch.stack(list(self.parts.values())).sum(0)

    def plus(self, other: Tangents, weight: float) -> Tangents:
        """This and ``weight`` times the other."""

        def add(own: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: own.get(name, 0) + weight * tensor for name, tensor in more.items()}

        return Tangents(add(self.parts, other.parts), add(self.moments, other.moments))


class LayerTangents(TangentKernel):
    """The exact tangent kernel of a module, whose parts are kept apart; made once, used at every step of training."""

    follows_functions = False  # stand-ins do
    _owners: list[nn.Module]
    _done: int = 0
    _moments: dict[nn.Module, Tensor] | None = None
    _together: bool | None = None  # whether gradients that no rule serves can be made together; found out at first use

    def __init__(
        self,
        model: nn.Module,
        x: Inputs,
        parameters: Sequence[str],
        memory: str | int | None = None,
        sample_bytes: int = 0,
        outputs: Outputs = "trace",
        method: str = "auto",
    ) -> None:
        """``sample_bytes``: what one sample's forward pass allocates, of which the engine knows the watched layers only."""
        self._few, self._stand_ins = take_samples(x, slice(0, 2)), dict[int, StandIn]()
        super().__init__(model, x, outputs=outputs, parameters=parameters, method=method, memory=memory)
        self.work += sample_bytes * (self.count if self._rest() else 2)
        self.chunk = max(1, min(self.chunk, int(WORK_SHARE * self.budget) // max(1, self.work)))
        widths = [module_width(module) for module in self.fast if self._has_moment(module)]
        widest, moments = max(widths, default=0), sum(width**2 for width in widths)
        self._moment_bytes = self._no_outputs.element_size() * moments + 4 * 8 * widest**2  # correlated in float64

    def _modules_with_rule(self) -> dict[nn.Module, tuple[bool, bool]]:
        """Layers with rules, and stand-ins for dense layers that are no modules."""
        found = super()._modules_with_rule()
        served = {id(p) for module, picked in found.items() for p in own_parameters(module, picked)}
        with evaluation_mode(self.model):
            self._stand_ins = stand_ins(self.model, self._few, [p for p in self.chosen.values() if id(p) not in served])
        layers = [stand_in.layer for stand_in in self._stand_ins.values()]
        return found | {layer: (True, layer.bias is not None) for layer in layers}

    def _forward(self, x: Inputs) -> tuple[Tensor, list[Tap]]:
        with tapped(self._stand_ins, sample_count(x)) as more:
            out, taps = super()._forward(x)
        return out, taps + more

    def _describe_methods(self) -> tuple[str, ...]:
        return ()  # nobody asks this kernel for its plan

    def most_rows(self, budget: int) -> int:
        """How many samples :meth:`by_layer` can take within so many bytes: their features, and a part of them while they
        are made; and a square of samples for every layer.
        """
        free = USABLE * budget - self.fixed_bytes - self._moment_bytes - self.chunk * (self.work + self.feature_bytes)
        square = self._no_outputs.element_size() * (len(self.fast) + len(self._rest()) + 4)
        half = self.feature_bytes / (2 * square)
        return max(0, int(math.sqrt(half**2 + max(0.0, free) / square) - half))

    def by_layer(self, x: Inputs, names: dict[nn.Module, str]) -> Tangents:
        """Parts and moments on all samples; ``names``: how modules are called."""
        n = sample_count(x)
        holders = {id(p): name for module, name in names.items() for p in module.parameters(recurse=False)}
        added = {made.layer for made in self._stand_ins.values()}
        names = names | {made.layer: holders.get(weight, "") for weight, made in self._stand_ins.items()}
        self._owners, self._moments, self._done = [], {}, 0
        parts: dict[str, Tensor] = {}
        try:
            with self.ready():
                pairs = self._layers_in_turn(x) if self._takes_layers_in_turn(n) else self._layers_together(x)
                for module, share in pairs:
                    if module is None:
                        assert isinstance(share, Rows)
                        self._add_rest(parts, share, holders)
                    else:
                        self._add(parts, names[module], [share])
            own = {module: total for module, total in self._moments.items() if module not in added}
            moments = {names[module]: total / min(n, AGOP_SAMPLES) for module, total in own.items()}
        finally:
            self._moments = None
        return Tangents(parts, moments)

    def _takes_layers_in_turn(self, n: int) -> bool:
        """Whether activations and gradients of all samples fit at once."""
        fits = n * (self.work + self.feature_bytes) + self.fixed_bytes + self._moment_bytes <= self.budget
        return fits and n * (self.work_bytes - self.fixed_bytes) // self.chunk <= AT_ONCE_BYTES

    def _layers_in_turn(self, x: Inputs) -> Iterator[tuple[nn.Module | None, Share]]:
        """Features of one layer after the other, let go of when used; ``None`` owns what no rule serves."""
        by_module = self._calls(*self._forward(x), self.directions, demote=False) if self.fast else {}
        for module in self.fast:
            if (module in by_module) == (module in self.idle):
                raise RuleMismatch  # used by other samples than those it was checked on
            if module in by_module:
                found = self._apply(module, by_module.pop(module))
                if found is None:
                    raise RuleMismatch
                yield from ((module, as_held(share)) for share in found)
        if self._rest():
            yield None, Rows(self._rest_rows(x))

    def _layers_together(self, x: Inputs) -> Iterator[tuple[nn.Module | None, Share]]:
        """Features of all layers, made some samples at a time."""
        shares = self.features(x)
        yield from zip(self._owners, shares, strict=False)
        if self._rest():
            yield None, shares[-1]

    def _add_rest(self, parts: dict[str, Tensor], rows: Rows, holders: dict[int, str]) -> None:
        """Columns of explicit gradients, by the module that holds the parameter."""
        first = 0
        for parameter, width in zip(self._rest(), self._rest_widths(), strict=True):
            self._add(parts, holders.get(id(parameter), ""), [Rows(rows.j[..., first : first + width])])
            first += width

    def _rest_widths(self) -> list[int]:
        """How many columns each parameter that no rule serves has in the explicit gradients."""
        return [parameter.numel() for parameter in self._rest()]

    def _add(self, parts: dict[str, Tensor], name: str, shares: list[Share]) -> None:
        n = len(shares[0].tensors()[0])
        block = torch.zeros(n, n, dtype=self.dtype, device=self.device)
        self.block(block, shares, shares, same=True)
        parts[name] = parts[name] + block if name in parts else block

    def _shares(self, x: Inputs) -> Iterator[Share]:
        """As in general, but gradients that no rule serves are made for many samples together where that works."""
        found = list(self._layers_in_turn(x))
        self._owners = [module for module, _ in found if module is not None]
        self._done += sample_count(x)
        empty = torch.zeros(sample_count(x), len(self.directions), 1, dtype=self.dtype, device=self.device)
        yield from [share for _, share in found] or [Rows(empty)]

    def _rest_rows(self, x: Inputs) -> Float[Tensor, "n k p"]:
        rest = self._rest()
        if self._together is None:
            few = take_samples(x, slice(0, 1))
            expected = rows_by_sample(self.model, few, rest, self.directions)
            self._together = is_close_to(lambda: self._rows_together(few), expected)
        return self._rows_together(x) if self._together else rows_by_sample(self.model, x, rest, self.directions)

    def _rows_together(self, x: Inputs) -> Float[Tensor, "n k p"]:
        """Rows of all samples at once, columns in the order of the parameters that no rule serves."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        values = {names[id(p)]: p.detach() for p in self._rest()}
        return rows_by_vmap(self.model, values, x, self.directions)

    def _apply(self, module: nn.Module, calls: list[Call]) -> list[Share] | None:
        found = self._make_shares(module, calls)
        if self._moments is not None and self._has_moment(module) and self._done < AGOP_SAMPLES:
            for gradient in (gradient for call in calls for gradient in call.gradients):
                rows = _units_last(module, gradient[: AGOP_SAMPLES - self._done])
                self._moments[module] = self._moments.get(module, 0) + rows.T @ rows
        return found

    def _has_moment(self, module: nn.Module) -> bool:
        """Whether the mean g g^T of a layer is kept."""
        return _readable(module)

    def _make_shares(self, module: nn.Module, calls: list[Call]) -> list[Share] | None:
        return super()._apply(module, calls)


def agop_correlation(module: nn.Module, moment: Float[Tensor, "out out"]) -> float:
    """Pearson correlation of the entries of W^T W and of the layer's AGOP, W^T M W, without forming either.

    Both are sandwiches of W, so with G = W W^T and s = W 1 all sums over their entries are traces of products of G and M.
    """
    weight = module.weight.detach().flatten(1).to(moment.dtype).double()  # type: ignore[operator]
    moment = moment.double()
    gram, sums, size = weight @ weight.T, weight.sum(1), weight.shape[1] ** 2
    product = moment @ gram
    mean_own, mean_other = sums @ sums / size, sums @ moment @ sums / size
    own = gram.square().sum() - size * mean_own**2
    other = (product * product.T).sum() - size * mean_other**2
    both = (product * gram.T).sum() - size * mean_own * mean_other
    spread = (own * other).clamp(min=0).sqrt()
    return float(both / spread) if float(spread) > 0 else float("nan")


def _readable(module: nn.Module) -> bool:
    """Dense layers, and convolutions of one group."""
    if isinstance(module, CONVOLUTIONS):
        return module.groups == 1
    return isinstance(module, nn.Linear | Affine) and not isinstance(module, ConstantAffine) and module.weight.ndim == 2


def module_width(module: nn.Module) -> int:
    """How many output units a dense layer or a convolution has."""
    return module.weight.shape[0]  # type: ignore[index,return-value]


def _units_last(module: nn.Module, gradient: Tensor) -> Float[Tensor, "rows out"]:
    if isinstance(module, CONVOLUTIONS):
        gradient = gradient.movedim(-1 - len(module.kernel_size), -1)
    return gradient.reshape(-1, gradient.shape[-1])
