"""Compiled products of open units: equal to the plain ones, used where they pay, and never missed without numba."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unlazy import InputError
from unlazy.kernels.overlap import overlap_from_gates
from unlazy.kernels.paths import compiled_product
from unlazy.kernels.paths.compiled_product import CompiledProduct


def coins(n: int, widths: list[int], seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.rand(n, width, generator=random) < 0.6 for width in widths]


def whole_numbers(a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
    product = torch.ones(len(a[0]), len(b[0]), dtype=torch.float64)
    for left, right in zip(a, b, strict=True):
        product *= left.double() @ right.double().T
    return product


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    assert compiled_product.compile_fill() is not None
    monkeypatch.setattr(compiled_product, "WORTH", 0)


@pytest.mark.usefixtures("always")
@settings(max_examples=40)
@given(
    st.integers(1, 150), st.integers(1, 600), st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(0, 99)
)
def test_compiled_products_are_exact(n: int, m: int, widths: list[int], seed: int) -> None:
    a, b = coins(n, widths, seed), coins(m, widths, seed + 100)
    assert torch.equal(overlap_from_gates(a, b), whole_numbers(a, b))
    assert torch.equal(overlap_from_gates(b, b), whole_numbers(b, b))
    rounded = overlap_from_gates(b, b, dtype=torch.float32)
    assert torch.equal(rounded, whole_numbers(b, b).float())


@pytest.mark.usefixtures("always")
def test_compiled_products_say_when_they_overflow() -> None:
    gates = [torch.ones(3, 2000, dtype=torch.bool)] * 12
    with pytest.raises(InputError, match="log=True"):
        overlap_from_gates(gates, gates, dtype=torch.float32)


def test_without_numba_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_product, "WORTH", 0)
    monkeypatch.setattr(compiled_product, "compile_fill", lambda: None)
    monkeypatch.setattr(CompiledProduct, "block", None)  # not even touched
    gates = coins(70, [130, 20], 3)
    assert torch.equal(overlap_from_gates(gates, gates), whole_numbers(gates, gates))


def test_few_pairs_are_not_worth_compiling_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("compiled for a handful of pairs")

    monkeypatch.setattr(compiled_product, "compile_fill", refuse)
    gates = coins(20, [64, 64], 5)
    assert torch.equal(overlap_from_gates(gates, gates), whole_numbers(gates, gates))
