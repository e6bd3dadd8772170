"""The neural path kernel of every kind of network, against paths walked one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pathnets
from unlazy import Unsupported
from unlazy.kernels import reference
from unlazy.kernels.overlap import neural_path_kernel, overlap_kernel


def unbiased(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d):
            module.bias = None
    return model


@pytest.mark.parametrize(
    "name", ["dense", "conv1d", "conv2d", "grouped", "residual_from_the_input", "concatenated", "padded"]
)
def test_the_neural_path_kernel_sums_over_input_nodes(name: str) -> None:
    model, x = pathnets.build(name)
    model = unbiased(model)
    slow = reference.path_kernel_by_walking(model, x)
    torch.testing.assert_close(neural_path_kernel(model, x), slow, rtol=1e-12, atol=1e-12)
    assert slow.abs().max() > 0
    if name == "dense":
        torch.testing.assert_close(slow, (x @ x.T) * overlap_kernel(model, x), rtol=1e-12, atol=1e-12)


def test_no_neural_path_kernel_where_inputs_are_not_inputs() -> None:
    with pytest.raises(Unsupported, match=r"^0: .*bias"):
        neural_path_kernel(*pathnets.build("dense"))
    pooled = nn.Sequential(nn.AvgPool1d(2), nn.Conv1d(1, 2, 2, bias=False), nn.ReLU(), nn.Flatten())
    with pytest.raises(Unsupported, match="changed before the first weights"):
        neural_path_kernel(pooled, torch.randn(2, 1, 6))
