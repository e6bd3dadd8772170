"""Gate surgery: replace the gate of a unit that carries nothing by one whose border runs where the residual is large.

A unit acts on the output through its outgoing values alone. Once these are zero its gate may be replaced without a change of the
function, provided that the gates of the next layer, which read it, are corrected. With the rows w_j of the unit's layer, its old
row w_i, its new row w_i' and the next layer's matrix W,

    W' = W - W[:, i] a^T      where a solves      sum_j a_j w_j' = w_i' - w_i,

so that every later half-space stays where it was. The equation has a solution if the new row lies in the span of the old rows. In
the plane, or wherever a layer has more units than the input has coordinates, that is no restriction (rows then count as the
half-spaces' normals in input space); elsewhere the new row is projected to that span.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from unlazy.models.dense_layers import Affine
from unlazy.models.image_layers import ConvLayer, PooledLayer, Readout
from unlazy.models.image_net import GatedImageNet
from unlazy.models.net import GatedNet
from unlazy.runtime import InputError, Unsupported, require

Net = GatedNet | GatedImageNet
AIMS = ("residual", "random")
LARGEST_CORRECTION = 100.0  # the length of a; beyond it float32 would lose the later half-spaces
ROUNDING = 1e-8  # of a solution in float64, relative to the row


@dataclass(frozen=True)
class Unit:
    """One unit: its layer and index, both from 0, and its member if the network is a stack."""

    layer: int
    index: int
    member: int | None = None


@dataclass(frozen=True)
class Gate:
    """A gate in the coordinates that its layer reads: open where ``normal . z + offset >= 0``."""

    normal: Float[Tensor, " fan_in"]
    offset: float


def path_mass(net: Net, x: Float[Tensor, "*batch d"]) -> list[Float[Tensor, "*members units"]]:
    """Per layer and unit, the root mean square over samples of the sum of all paths through the unit.

    With gates held fixed, the output is linear in each unit, so this sum is exactly what the output loses without the unit.
    """
    with torch.no_grad():
        gates = list(net.gates(x))
    factors = [torch.ones_like(gate).requires_grad_() for gate in gates]
    with torch.enable_grad():
        out = net.value(x, [gate * factor for gate, factor in zip(gates, factors, strict=True)])
        squares = [torch.zeros(()) for _ in factors]
        for output in range(out.shape[-1]):
            through = torch.autograd.grad(out[..., output].sum(), factors, retain_graph=True)
            for layer, sums in enumerate(through):
                sums = sums.sum((2, 3)) if isinstance(net, GatedImageNet) and sums.ndim == 4 else sums
                squares[layer] = squares[layer] + sums.square().mean(-2)
    return [square.sqrt() for square in squares]


def eligible_layers(net: Net) -> list[int]:
    """The layers in which gates can be replaced without a change of the function.

    All layers of a dense network and of a ReLU network. Gates of a convolution spread over positions when the next one reads
    them, so of a convolutional network with a gating branch only the last layer.
    """
    _check_supported(net)
    layers = len(net.value_layers)
    return [layers - 1] if isinstance(net, GatedImageNet) and net.settings.gating == "linear" else list(range(layers))


def outgoing_values(net: Net, unit: Unit) -> Tensor:
    """The values through which a unit acts on the next layer, or on the output: a view, without gradient."""
    return _member(_affine_part(_value_reader(net, unit)).weight, unit)[:, unit.index]


def unit_tensors(net: Net, unit: Unit) -> list[tuple[nn.Parameter, Callable[[Tensor], Tensor]]]:
    """The parameters with numbers of a unit: its gate, its incoming and its outgoing values; each with what selects them.

    The function gives, of any tensor of the parameter's shape, the part that belongs to the unit.
    """

    def row(tensor: Tensor) -> Tensor:
        return (tensor if unit.member is None else tensor[unit.member])[unit.index]

    def column(tensor: Tensor) -> Tensor:
        return (tensor if unit.member is None else tensor[unit.member])[:, unit.index]

    found: list[tuple[nn.Parameter, Callable[[Tensor], Tensor]]] = []
    branches = [net.value_layers] if net.settings.gating == "own" else [net.gate_layers, net.value_layers]
    for module in (_affine_part(layers[unit.layer]) for layers in branches):
        found += [(parameter, row) for parameter in (module.weight, module.bias) if parameter is not None]
    return [*found, (_affine_part(_value_reader(net, unit)).weight, column)]


def aim_gate(
    net: Net, unit: Unit, x: Tensor, residual: Float[Tensor, "n o"], random: torch.Generator, aim: str = "residual"
) -> Gate:
    """A new gate for a unit, whose border runs through one of the samples ``x``.

    ``residual``: the aim draws this sample x* with probability proportional to its squared residual. The normal is the direction
    in which the residual changes around x*: the sum over samples of k_i r_i (z_i - z*), where z is what the layer reads, r_i the
    residual along that of x*, and k_i = exp(-|z_i - z*|^2 / median). ``random``: any sample is as likely, and normal numbers
    stand for r_i. Without a bias the normal is made orthogonal to z*. The gate has the median size of its layer.
    """
    require(aim in AIMS, f"aim must be one of {', '.join(AIMS)}; got {aim!r}.")
    z, q = _layer_inputs(net, unit, x, random)
    residual = residual.double()
    size = residual.square().sum(-1)
    by_residual = aim == "residual" and bool(size.sum() > 0)
    star = int(torch.multinomial(size if by_residual else torch.ones_like(size), 1, generator=random))
    if by_residual:
        signed = residual @ (residual[star] / residual[star].norm())
    else:
        signed = torch.randn(len(z), generator=random, dtype=torch.float64)
    away = z - z[star]
    distance = away.square().sum(-1)
    near = torch.exp(-distance / distance.median().clamp_min(1e-300))
    normal = (near * signed) @ away
    module = _affine_part(_gate_layers(net)[unit.layer])
    if _has_gate_reader(net, unit):
        span = _row_span(net, unit)
        normal = span @ (span.T @ normal)
    if module.bias is None:
        along = z[star] if not _has_gate_reader(net, unit) else span @ (span.T @ z[star])
        normal = normal - (normal @ along) / along.square().sum().clamp_min(1e-300) * along
    offset = 0.0 if module.bias is None else -float(normal @ z[star])
    mine = (z @ normal + offset).square().mean().sqrt()
    require(bool(mine > 0), f"the samples give no direction for a new gate of {unit}: do they all agree?")
    scale = float(q.square().mean(0).sqrt().median() / mine)
    return Gate(scale * normal, scale * offset)


def replace_gate(net: Net, unit: Unit, gate: Gate) -> bool:
    """Give a unit another gate and correct the gates that read it; returns whether that was possible.

    Raises unless the outgoing values of the unit are zero: the function would change. Nothing is replaced where the correction
    would be inexact or would have entries too large for float32.
    """
    if bool(outgoing_values(net, unit).any()):
        raise InputError(
            f"{unit} has outgoing values, so its gate cannot be replaced without a change of the function."
        )
    layers, place = _gate_layers(net), unit.layer
    module = _affine_part(layers[place])
    weight = _member(module.weight, unit)
    new_row = gate.normal.to(weight).reshape(weight.shape[1:])
    if _has_gate_reader(net, unit):
        reader = _affine_part(layers[place + 1])
        old_rows, old_offsets = _rows_for_solving(net, unit)
        new_rows, new_offsets = _rows_for_solving(net, unit, gate.normal, gate.offset)
        shift = new_rows[unit.index] - old_rows[unit.index]
        found = torch.linalg.lstsq(new_rows.T, shift[:, None], driver="gelsd").solution[:, 0]
        error = (found @ new_rows - shift).norm() / (shift.norm() + old_rows[unit.index].norm())
        if not bool(error < ROUNDING) or not bool(found.norm() < LARGEST_CORRECTION):
            return False
        next_weight = _member(reader.weight, unit)
        column = next_weight[:, unit.index].double()
        if reader.bias is not None:
            moved = new_offsets[unit.index] - old_offsets[unit.index] - found @ new_offsets
            _member(reader.bias, unit).sub_((column * moved).to(next_weight))
        next_weight.sub_(torch.outer(column, found).to(next_weight))
    weight[unit.index] = new_row
    if module.bias is not None:
        _member(module.bias, unit)[unit.index] = gate.offset
    return True


# --- parts of a network ----------------------------------------------------------------------------------------


def _check_supported(net: Net) -> None:
    """Raise ``Unsupported`` for networks whose gates are not affine in what the layer reads."""
    if not isinstance(net, GatedNet | GatedImageNet):
        raise Unsupported(type(net).__name__, "its gates are not known", "Surgery works on a GatedNet.")
    spec = net.settings
    nonlinear = bool(getattr(spec, "nonlinear_gate_layers", ()))
    if spec.gating not in ("linear", "own") or nonlinear:
        kind = "non-linear gate layers" if nonlinear else f"gating={spec.gating!r}"
        raise Unsupported(f"a network with {kind}", "its gates are not half-spaces", "Use gating='linear' or 'own'.")
    for layer in (*net.gate_layers, *net.value_layers, net.readout):
        _affine_part(layer)


def _affine_part(layer: nn.Module) -> Any:
    """The module of a layer that has its weight and bias; raises where something else acts after it."""
    if isinstance(layer, Readout):
        layer = layer.output if layer.dense is None else layer.dense
    elif isinstance(layer, PooledLayer):
        layer = layer.linear
    elif isinstance(layer, ConvLayer) and isinstance(layer.norm, nn.Identity) and layer.shortcut is None:
        layer = layer.conv
    if not isinstance(layer, Affine | nn.Conv2d | nn.Linear):
        remedy = "Use a plain network without batch-norm; to_standard_parametrisation removes multipliers."
        raise Unsupported(type(layer).__name__, "surgery rewrites plain weights", remedy)
    return layer


def _gate_layers(net: Net) -> nn.ModuleList:
    return net.value_layers if net.settings.gating == "own" else net.gate_layers


def _value_reader(net: Net, unit: Unit) -> nn.Module:
    """The value layer, or the readout, that reads a unit."""
    layers = net.value_layers
    return layers[unit.layer + 1] if unit.layer + 1 < len(layers) else net.readout


def _has_gate_reader(net: Net, unit: Unit) -> bool:
    """Whether another gate layer reads this unit's gate, so that it must be corrected."""
    return net.settings.gating == "linear" and unit.layer + 1 < len(net.gate_layers)


def _member(parameter: Tensor, unit: Unit) -> Tensor:
    """The numbers of the unit's own network: a view without gradient."""
    return parameter.detach() if unit.member is None else parameter.detach()[unit.member]


def _layer_inputs(net: Net, unit: Unit, x: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """What the unit's gate layer reads of every sample, ``[n, fan_in]``, and the layer's pre-activations ``[n, units]``.

    Of a convolution, at one position drawn at random.
    """
    own = net.settings.gating == "own"
    with torch.no_grad():
        q = net.pre_activations(x)
        states = [F.relu(pre) if own else pre for pre in q]
    before = x if unit.layer == 0 else states[unit.layer - 1]
    here = q[unit.layer]
    if isinstance(net, GatedNet):
        if unit.member is not None:
            before = before[unit.member] if before.ndim == 3 else before
            here = here[unit.member]
        return before.double(), here.double()
    conv = _affine_part(_gate_layers(net)[unit.layer])
    if isinstance(conv, nn.Linear):
        return (before.mean((2, 3)) if before.ndim == 4 else before).double(), here.double()
    assert isinstance(conv, nn.Conv2d)
    patches = F.unfold(before, conv.kernel_size, padding=conv.padding, stride=conv.stride)  # type: ignore[arg-type]
    place = int(torch.randint(patches.shape[-1], (1,), generator=random))
    return patches[..., place].double(), here.flatten(2)[..., place].double()


def _row_span(net: Net, unit: Unit) -> Float[Tensor, "fan_in r"]:
    """An orthonormal basis of the rows that a new row may be made of; all of space where that is no restriction."""
    weight = _member(_affine_part(net.gate_layers[unit.layer]).weight, unit)
    units, fan_in = weight.shape
    if unit.layer > 0 or units > fan_in:
        return torch.eye(fan_in, dtype=torch.float64)
    return torch.linalg.qr(weight.double().T).Q


def _rows_for_solving(
    net: Net, unit: Unit, normal: Tensor | None = None, offset: float = 0.0
) -> tuple[Float[Tensor, "units k"], Float[Tensor, " units"]]:
    """Rows and offsets of a dense unit's gate layer, with its own replaced by a new one if given.

    In input space if the layer has more units than the input coordinates: the rows then span all that can be reached, and the
    smallest correction is found. Otherwise in the coordinates of the layer before.
    """
    assert isinstance(net, GatedNet)
    rows, offsets = torch.eye(0), torch.zeros(0)
    in_input_space = net.settings.width > net.settings.inputs
    for number in range(0 if in_input_space else unit.layer, unit.layer + 1):
        module = _affine_part(net.gate_layers[number])
        weight = _member(module.weight, unit)
        matrix = weight.double().clone()
        vector = torch.zeros_like(matrix[:, 0]) if module.bias is None else _member(module.bias, unit).double().clone()
        if number == unit.layer and normal is not None:
            matrix[unit.index] = normal.to(weight.dtype).double()  # as it will be stored
            vector[unit.index] = offset
        if number == 0 or not in_input_space:
            rows, offsets = matrix, vector
        else:
            rows, offsets = matrix @ rows, matrix @ offsets + vector
    return rows, offsets
