"""The tangent kernel layer by layer, and the average gradient outer products of the same backward passes.

One pass gives both: a layer's share of the kernel pairs its inputs and its output gradients g, and W^T (mean of g g^T) W is the
AGOP of the network as a function of what the layer reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.utils import _pytree as pytree

from unlazy.kernels.capture import Inputs, Tap, evaluating, rows_by_sample, samples, take
from unlazy.kernels.engine import RulesBroke, TangentKernel, as_held
from unlazy.kernels.forward_mode import gives, plain_layers
from unlazy.kernels.layers import Call, Rows, Share
from unlazy.kernels.selection import own_parameters
from unlazy.models.dense import Affine, ConstantAffine
from unlazy.scope.linear import called
from unlazy.scope.standins import StandIn, stand_ins, tapped

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


class LayerTangents(TangentKernel):
    """The exact tangent kernel of a module, whose parts are kept apart; made once, used at every step of training."""

    _owners: list[nn.Module]
    _done: int = 0
    _moments: dict[nn.Module, Tensor] | None = None
    _together: bool | None = None  # whether gradients that no rule serves can be made together; found out at first use

    def __init__(self, model: nn.Module, x: Inputs, parameters: Sequence[str]) -> None:
        self._few, self._stand_ins = take(x, slice(0, 2)), dict[int, StandIn]()
        super().__init__(model, x, parameters=parameters)

    def _candidates(self) -> dict[nn.Module, tuple[bool, bool]]:
        """Layers with rules, and stand-ins for dense layers that are no modules."""
        found = super()._candidates()
        served = {id(p) for module, picked in found.items() for p in own_parameters(module, picked)}
        with evaluating(self.model):
            self._stand_ins = stand_ins(self.model, self._few, [p for p in self.chosen.values() if id(p) not in served])
        layers = [stand_in.layer for stand_in in self._stand_ins.values()]
        return found | {layer: (True, layer.bias is not None) for layer in layers}

    def _forward(self, x: Inputs) -> tuple[Tensor, list[Tap]]:
        with tapped(self._stand_ins, samples(x)) as more:
            out, taps = super()._forward(x)
        return out, taps + more

    def _describe(self) -> tuple[str, ...]:
        return ()  # nobody asks this kernel for its plan

    def by_layer(self, x: Inputs, names: dict[nn.Module, str]) -> Tangents:
        """Parts and moments on all samples; ``names``: how modules are called."""
        n = samples(x)
        holders = {id(p): name for module, name in names.items() for p in module.parameters(recurse=False)}
        added = {made.layer for made in self._stand_ins.values()}
        names = names | {made.layer: holders.get(weight, "") for weight, made in self._stand_ins.items()}
        self._owners, self._moments, self._done = [], {}, 0
        parts: dict[str, Tensor] = {}
        try:
            with self.ready():
                at_once = n * self.work_bytes // self.chunk <= AT_ONCE_BYTES
                pairs = self._layers_in_turn(x) if at_once else self._layers_together(x)
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

    def _layers_in_turn(self, x: Inputs) -> Iterator[tuple[nn.Module | None, Share]]:
        """Features of one layer after the other, let go of when used; ``None`` owns what no rule serves."""
        by_module = self._calls(*self._forward(x), self.directions, demote=False) if self.fast else {}
        for module in self.fast:
            if (module in by_module) == (module in self.idle):
                raise RulesBroke  # used by other samples than those it was checked on
            if module in by_module:
                found = self._apply(module, by_module.pop(module))
                if found is None:
                    raise RulesBroke
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
        for parameter in self._rest():
            width = parameter.numel()
            self._add(parts, holders.get(id(parameter), ""), [Rows(rows.j[..., first : first + width])])
            first += width

    def _add(self, parts: dict[str, Tensor], name: str, shares: list[Share]) -> None:
        n = len(shares[0].tensors()[0])
        block = torch.zeros(n, n, dtype=self.dtype, device=self.device)
        self.block(block, shares, shares, same=True)
        parts[name] = parts[name] + block if name in parts else block

    def _shares(self, x: Inputs) -> Iterator[Share]:
        """As in general, but gradients that no rule serves are made for many samples together where that works."""
        found = list(self._layers_in_turn(x))
        self._owners = [module for module, _ in found if module is not None]
        self._done += samples(x)
        empty = torch.zeros(samples(x), len(self.directions), 1, dtype=self.dtype, device=self.device)
        yield from [share for _, share in found] or [Rows(empty)]

    def _rest_rows(self, x: Inputs) -> Float[Tensor, "n k p"]:
        rest = self._rest()
        if self._together is None:
            few = take(x, slice(0, 1))
            expected = rows_by_sample(self.model, few, rest, self.directions)
            self._together = gives(lambda: self._rows_together(few), expected)
        return self._rows_together(x) if self._together else rows_by_sample(self.model, x, rest, self.directions)

    def _rows_together(self, x: Inputs) -> Float[Tensor, "n k p"]:
        """Every sample's gradients by batched backward passes over a batch of models of one sample each."""
        ids = {id(p) for p in self._rest()}
        chosen = {name: p.detach() for name, p in self.model.named_parameters() if id(p) in ids}
        order = [name for parameter in self._rest() for name, p in self.model.named_parameters() if p is parameter]

        def one(sample: Inputs) -> dict[str, Tensor]:
            alone = pytree.tree_map(lambda leaf: leaf[None] if isinstance(leaf, Tensor) else leaf, sample)
            pull = vjp(lambda values: called(self.model, values, alone)[0], chosen)[1]
            return vmap(lambda direction: pull(direction)[0])(self.directions)

        with plain_layers(self.model), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")
            found = vmap(one)(x)
        return torch.cat([found[name].flatten(2) for name in order], dim=-1)

    def _apply(self, module: nn.Module, calls: list[Call]) -> list[Share] | None:
        found = super()._apply(module, calls)
        if self._moments is not None and _readable(module) and self._done < AGOP_SAMPLES:
            for gradient in (gradient for call in calls for gradient in call.gradients):
                rows = _units_last(module, gradient[: AGOP_SAMPLES - self._done])
                self._moments[module] = self._moments.get(module, 0) + rows.T @ rows
        return found


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


def _units_last(module: nn.Module, gradient: Tensor) -> Float[Tensor, "rows out"]:
    if isinstance(module, CONVOLUTIONS):
        gradient = gradient.movedim(-1 - len(module.kernel_size), -1)
    return gradient.reshape(-1, gradient.shape[-1])
