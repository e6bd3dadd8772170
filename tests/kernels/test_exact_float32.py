"""Inside a measurement float32 means float32 on a GPU too, and what the user had chosen comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from unlazy import tangent_kernel
from unlazy.kernels.capture import evaluation_mode
from unlazy.runtime import exact_float32

BACKENDS: Any = torch.backends
PARTS = (BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn, BACKENDS.cuda.matmul)


def state() -> list[str]:
    return [part.fp32_precision for part in PARTS]


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before, old = state(), (BACKENDS.cudnn.allow_tf32, BACKENDS.cuda.matmul.allow_tf32)
    yield
    BACKENDS.cudnn.allow_tf32, BACKENDS.cuda.matmul.allow_tf32 = old
    for part, value in zip(PARTS, before, strict=True):
        part.fp32_precision = value


def choose_by_old_names() -> None:
    BACKENDS.cuda.matmul.allow_tf32 = True


def choose_by_new_names() -> None:
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    BACKENDS.cudnn.conv.fp32_precision = "ieee"


@pytest.mark.parametrize("choose", [lambda: None, choose_by_old_names, choose_by_new_names])
def test_rounding_is_off_inside_and_as_chosen_after(choose: Any) -> None:
    choose()
    before = state()
    with pytest.raises(RuntimeError, match="the user's"), exact_float32():
        assert state() == ["ieee"] * 3
        raise RuntimeError("the user's")
    assert state() == before


def test_old_names_can_be_read_in_and_after_a_measurement() -> None:
    choose_by_old_names()
    with exact_float32():
        assert not BACKENDS.cuda.matmul.allow_tf32
        assert not BACKENDS.cudnn.allow_tf32
        with torch.backends.cudnn.flags(enabled=False):  # reads all of them, and forgets the new ones when it ends
            pass
    assert state() == ["tf32"] * 3
    assert BACKENDS.cuda.matmul.allow_tf32
    assert BACKENDS.cudnn.allow_tf32


def test_kernels_are_computed_without_rounding() -> None:
    seen = []

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(state())
            return super().forward(x)

    tangent_kernel(Watched(3, 2), torch.randn(4, 3))
    assert seen
    assert all(found == ["ieee"] * 3 for found in seen)
    with evaluation_mode(nn.Linear(1, 1)):
        assert state() == ["ieee"] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="GPUs round, processors do not")
def test_convolutions_on_a_gpu_have_all_digits() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
    x = torch.randn(6, 3, 12, 12)
    net(x)
    exact = tangent_kernel(net, x, precision="float64")
    found = tangent_kernel(net.cuda(), x.cuda()).cpu().double()
    assert float((found - exact).norm() / exact.norm()) < 1e-6
