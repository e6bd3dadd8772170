"""Ties of gates and pools: counted per layer and input, closed or open as the network has it."""

from __future__ import annotations

import torch
from torch import nn

import cases
from unlazy.kernels.overlap import gate_ties, path_count


def test_ties_are_counted_per_layer_and_input() -> None:
    model = nn.Sequential(
        nn.Conv1d(1, 2, 2, bias=False), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(4, 3), nn.ReLU6()
    )
    model[0].weight.data = torch.tensor([[[1.0, 1.0]], [[1.0, -1.0]]])
    model[4].weight.data.zero_()
    model[4].bias.data = torch.tensor([6.0, 0.0, 1.0])
    x = torch.tensor([[[0.0, 0.0, 0.0, 0.0, 0.0]], [[1.0, 2.0, 1.0, 5.0, 0.0]]])
    ties = gate_ties(model, x)
    assert {name: values.tolist() for name, values in ties.items()} == {"1#1": [8, 0], "2#1": [0, 1], "5#1": [2, 2]}


def test_ties_of_pools_of_every_geometry() -> None:
    """Cells whose maximum is reached twice, found by looking at each window."""
    x = torch.randint(0, 3, (3, 2, 7, 6), generator=torch.Generator().manual_seed(0)).float()
    for kernel, stride, padding, dilation, ceil in (
        ((2, 3), (1, 2), (1, 1), (2, 1), True),
        ((3, 3), (2, 2), (0, 0), (1, 1), False),
    ):
        pool = nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=ceil)
        out = pool(x)
        wanted = [0, 0, 0]
        for n in range(3):
            for c in range(2):
                for i in range(out.shape[2]):
                    for j in range(out.shape[3]):
                        seen = [
                            float(x[n, c, p, q])
                            for p in range(
                                i * stride[0] - padding[0],
                                i * stride[0] - padding[0] + kernel[0] * dilation[0],
                                dilation[0],
                            )
                            for q in range(
                                j * stride[1] - padding[1],
                                j * stride[1] - padding[1] + kernel[1] * dilation[1],
                                dilation[1],
                            )
                            if 0 <= p < 7 and 0 <= q < 6
                        ]
                        wanted[n] += max(seen) > 0 and seen.count(max(seen)) > 1
        assert gate_ties(nn.Sequential(pool, nn.ReLU()), x)["0#1"].tolist() == wanted
        assert min(wanted) > 0


def test_a_tie_is_closed_for_relu() -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 1))
    assert path_count(model, torch.zeros(2, 2)).tolist() == [0.0, 0.0]
    assert gate_ties(model, torch.zeros(2, 2))["1#1"].tolist() == [3, 3]


def test_ties_of_our_networks() -> None:
    net = cases.net("pwc-no-bias")
    ties = gate_ties(net, torch.zeros(2, 2, dtype=torch.float64))
    assert {name: values.tolist() for name, values in ties.items()} == {f"layer {i}": [3, 3] for i in (1, 2, 3)}
    assert path_count(net, torch.zeros(2, 2, dtype=torch.float64)).tolist() == [27.0, 27.0]  # eta >= 0 is open
    assert gate_ties(cases.net("linear"), cases.points("linear")) == {}
