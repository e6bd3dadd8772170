"""The half-spaces of a linearly gated network, and where their normals point."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unlazy.models.net import GatedNet
from unlazy.runtime import Unsupported, require


@dataclass(frozen=True)
class HalfSpaces:
    """Unit i of layer l is open where normals[l, i] . x + offsets[l, i] >= 0."""

    normals: Float[Tensor, "*members layers units d"]
    offsets: Float[Tensor, "*members layers units"]


def half_spaces(net: GatedNet) -> HalfSpaces:
    """Effective weights v_{l,i} = row i of W_l ... W_1 and offsets c_l = W_l c_{l-1} + b_l of every unit.

    Read off the gating branch itself: it is affine in x, so its value at 0 is the offset and its change along
    each input coordinate is the normal. No formula per layer type is needed.
    """
    if not isinstance(net, GatedNet):
        raise Unsupported(
            type(net).__name__,
            "it is not a GatedNet, so its gating branch is not known",
            "Half-spaces are those of a DLGN; gates of other networks: overlap_kernel and path_count.",
        )
    if not net.settings.has_half_space_gates:
        raise Unsupported(
            f"GatedNet({net.settings.gating_words})",
            "its gates are not half-spaces of the input",
            "Half-spaces exist for gating='linear' without nonlinear_gate_layers; net.pre_activations(x) works for every gating.",
        )
    weight = next(net.parameters())
    points = torch.cat([weight.new_zeros(1, net.settings.inputs), torch.eye(net.settings.inputs).to(weight)])
    with torch.no_grad():
        q = torch.stack(net.pre_activations(points), dim=-3)  # [*S, layers, 1 + d, units]
    offsets = q[..., 0, :]
    return HalfSpaces((q[..., 1:, :] - q[..., :1, :]).mT, offsets)


def share_near_direction(
    normals: Float[Tensor, "*any units d"], direction: Tensor, degrees: float
) -> Float[Tensor, "*any"]:
    """Share of units whose normal lies within ``degrees`` of a direction. Chance in the plane: degrees / 180."""
    require(0 < degrees <= 180, f"degrees must lie in (0, 180], got {degrees!r}.")
    direction = direction.to(normals)
    cosine = normals @ direction / (normals.norm(dim=-1) * direction.norm())
    return (cosine >= math.cos(math.radians(degrees))).double().mean(-1)


def axial_resultant(normals: Float[Tensor, "*any units 2"]) -> Float[Tensor, "*any"]:
    """How much planar normals share an axis, v and -v counted alike: |mean exp(2 i angle)|, 0 spread to 1 one axis.

    A boundary line has no side, so its direction is axial. Products of random matrices cluster by themselves:
    compare with the same network at its start.
    """
    angle = torch.atan2(normals[..., 1], normals[..., 0])
    return torch.hypot(torch.cos(2 * angle).mean(-1), torch.sin(2 * angle).mean(-1))


def share_matching_group(
    spaces: HalfSpaces, x: Float[Tensor, "n d"], group: Bool[Tensor, " n"], overlap: float = 0.75
) -> Float[Tensor, "*members layers"]:
    """Share of units that are open on (about) a group of samples and closed elsewhere.

    A unit counts when |open and group| / |open or group| >= ``overlap``. Unlike :func:`share_near_direction` this
    counts the offset too: a half-space that points at the group but holds all samples does not match.
    """
    q = spaces.normals @ x.to(spaces.normals).T + spaces.offsets[..., None]  # [*S, layers, units, n]
    open_ = q >= 0
    common, either = (open_ & group).sum(-1), (open_ | group).sum(-1)
    return (common >= overlap * either).double().mean(-1)
