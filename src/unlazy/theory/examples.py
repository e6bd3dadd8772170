"""The two ReLU networks of the half-space paper's Figure 1, rebuilt: a path region in two parts, and one that jumps.

The paper gives the regions; the weights are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from unlazy.models.build import build
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec, relu_spec

TWO_PART_PATH = (0, 0)
TWO_PARTS = ((0.5, 1.5), (2.5, 3.5))
JUMPING_PATH = (0, 0)
Numbers = Sequence[float] | Sequence[Sequence[float]]


def two_part_net() -> GatedNet:
    """One input. The path through the first unit of both layers is active on [0.5, 1.5] and on [2.5, 3.5].

    Unit 1 of layer 2 sees the zigzag relu(x) - 2 relu(x - 1) + 2 relu(x - 2) - 2 relu(x - 3) - 1/2; the other units of
    layer 2 are never open. (Figure 1, left.)
    """
    numbers: dict[str, Numbers] = {
        "value_layers.0.weight": [[1.0]] * 4,
        "value_layers.0.bias": [0.0, -1.0, -2.0, -3.0],
        "value_layers.1.weight": [[1.0, -2.0, 2.0, -2.0], *[[0.0] * 4] * 3],
        "value_layers.1.bias": [-0.5, -1.0, -1.0, -1.0],
        "readout.weight": [[1.0] * 4],
        "readout.bias": [0.0],
    }
    return _with_numbers(relu_spec(1, width=4, depth=2), numbers)


def jumping_net(eps: float, *, linear_gates: bool = False) -> GatedNet:
    """Two inputs. The path through the first unit of both layers is active on the right half-plane for eps > 0, on the first
    quadrant for eps <= 0, however small eps is. (Figure 1, right.)

    Layer 1 is relu(x1), relu(x2), relu(-x2); unit 1 of layer 2 sees relu(x2) + eps relu(-x2). ``linear_gates``: the DLGN
    whose gating network has the same weights; its half-space there is (1 - eps) x2 >= 0 and does not jump.
    """
    spec = relu_spec(2, width=3, depth=2, gate_bias=False, value_bias=False)
    if linear_gates:
        spec = replace(spec, gating="linear")
    first, second = [[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], [[0.0, 1.0, eps], *[[0.0] * 3] * 2]
    numbers: dict[str, Numbers] = {"readout.weight": [[1.0] * 3]}
    for branch in ("gate_layers", "value_layers") if linear_gates else ("value_layers",):
        numbers |= {f"{branch}.0.weight": first, f"{branch}.1.weight": second}
    return _with_numbers(spec, numbers)


def _with_numbers(spec: NetSpec, numbers: Mapping[str, Numbers]) -> GatedNet:
    net = build(spec, dtype=torch.float64)
    net.load_state_dict({name: torch.tensor(entries, dtype=torch.float64) for name, entries in numbers.items()})
    return net
