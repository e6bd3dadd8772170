"""Cutting matrices of pairs: every pair once, little more, and views that hold what they say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unlazy.kernels import tangent_blocks
from unlazy.kernels.layer_rules import Factors, Positions, Rows, Share
from unlazy.kernels.tangent_blocks import Buffers, fill_full, fill_trace, small_gram
from unlazy.kernels.tiling import cut_bands

Sizes = st.integers(1, 300)


@given(Sizes, st.integers(1, 60), st.integers(1, 60))
@settings(max_examples=80)
def test_bands_cover_the_upper_half_with_little_more(n: int, least: int, more: int) -> None:
    side = least + more
    seen = torch.zeros(n, n, dtype=torch.int64)
    for band in cut_bands(n, n, side, symmetric=True, least=least):
        count, height, width = band.shape
        assert max(height, width) <= side
        assert count * height * width <= side * side
        assert len(list(band.tiles())) == count
        band.pairs_of(seen).add_(1)
    assert seen.max() == 1
    assert (seen.triu() == torch.ones(n, n, dtype=torch.int64).triu()).all()
    assert seen.tril(-1).sum() <= n * least / 2


@given(Sizes, Sizes, st.integers(1, 100))
@settings(max_examples=40)
def test_bands_of_two_sets_cover_all(n: int, m: int, side: int) -> None:
    seen = torch.zeros(n, m, dtype=torch.int64)
    for band in cut_bands(n, m, side, symmetric=False, least=1):
        band.pairs_of(seen).add_(1)
    assert (seen == 1).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_views_of_a_band_are_its_tiles(symmetric: bool) -> None:
    n, k, d = 37, 3, 5
    samples = torch.randn(n + 2, k, d)[1:-1, 1]  # neither first in its storage nor contiguous
    out = torch.randn(2, n, 2 * n)[..., n:]
    for band in cut_bands(n, n, 16, symmetric=symmetric, least=4):
        for i, (rows, columns) in enumerate(band.tiles()):
            assert torch.equal(band.rows_of(samples)[i], samples[rows])
            assert torch.equal(band.columns_of(samples)[i], samples[columns].T)
            assert torch.equal(band.pairs_of(out)[:, i], out[:, rows, columns])
            assert torch.equal(band.mirror().pairs_of(out)[:, i], out[:, columns, rows])


def shares(n: int, k: int) -> list[Share]:
    """One of every form, with a bias alone among the factors."""
    random = torch.Generator().manual_seed(n)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    return [
        Factors(normal(n, 4), normal(n, k, 3), weight=True, bias=True),
        Factors(normal(n, 6), normal(n, k, 2), weight=False, bias=True),
        Rows(normal(n, k, 7)),
        Positions(normal(n, 5, 3), normal(n, k, 5, 2), weight=True, bias=True),
        Positions(torch.randint(5, (n, 4), generator=random), normal(n, k, 4, 2), weight=True, bias=False, tokens=5),
    ]


@pytest.mark.parametrize("n", [3, 8, 29, 64])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kinds", [slice(0, 5), slice(1, 5), slice(2, 5), slice(0, 1)])
def test_pairs_do_not_depend_on_the_cut(
    monkeypatch: pytest.MonkeyPatch, n: int, same: bool, k: int, kinds: slice
) -> None:
    """Against explicit gradients in one product; what stood in the room before must not matter."""
    monkeypatch.setattr(tangent_blocks, "DIAGONAL", 4)
    monkeypatch.setattr(tangent_blocks, "BLOCK", 16)
    monkeypatch.setattr(tangent_blocks, "SLIM", 8)
    first = shares(n, k)[kinds]
    second = first if same else shares(n + 5, k)[kinds]
    left, right = (torch.cat(tangent_blocks.explicit_rows(side), -1) for side in (first, second))
    full = torch.full((k, k, len(left), len(right)), torch.nan, dtype=torch.float64)
    fill_full(full, first, second, Buffers(), same=same)
    torch.testing.assert_close(full, torch.einsum("nkp,mlp->klnm", left, right), rtol=1e-12, atol=1e-12)
    trace = torch.full((len(left), len(right)), torch.nan, dtype=torch.float64)
    fill_trace(trace, first, second, Buffers(), same=same)
    torch.testing.assert_close(trace, torch.einsum("nkp,mkp->nm", left, right), rtol=1e-12, atol=1e-12)
    if same:
        torch.testing.assert_close(small_gram(first), trace, rtol=1e-12, atol=1e-12)
        assert torch.equal(trace, trace.T)
        assert torch.equal(full, full.transpose(0, 1).mT)
