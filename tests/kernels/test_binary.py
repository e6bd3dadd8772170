"""Products of zeros and ones are whole numbers, whatever the device computes them with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unlazy import InputError
from unlazy.kernels import binary
from unlazy.kernels.binary import Bits, binary_gram
from unlazy.kernels.tiling import cut_tiles


def coins(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.6


@pytest.fixture(params=["integers", "floats"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs with 8-bit products, where there are any, and without."""
    if request.param == "floats":
        monkeypatch.setattr(binary, "_has_fast_integers", lambda device: False)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("places", [1, 2, 7, 15, 16, 17, 100, 128, 1001])
def test_gram_of_booleans_is_the_integer_product(places: int) -> None:
    a, b = coins(37, places), coins(5, places, seed=1)
    assert torch.equal(binary_gram(a, b).long(), a.long() @ b.long().T)
    assert torch.equal(binary_gram(a).long(), a.long() @ a.long().T)


@pytest.mark.usefixtures("ways")
def test_more_rows_than_a_tile() -> None:
    a, b = coins(1100, 40), coins(530, 40, seed=1)
    assert torch.equal(binary_gram(a).long(), a.long() @ a.long().T)
    assert torch.equal(binary_gram(a, b).long(), a.long() @ b.long().T)


@given(st.integers(1, 700), st.integers(1, 300), st.integers(1, 300))
@settings(max_examples=60)
def test_tiles_cover_the_upper_half_with_little_more(n: int, height: int, width: int) -> None:
    seen = torch.zeros(n, n, dtype=torch.int64)
    for rows, columns in cut_tiles(n, n, height, width, symmetric=True):
        assert rows.stop - rows.start <= height
        assert columns.stop - columns.start <= width
        seen[rows, columns] += 1
    assert seen.max() == 1
    assert (seen.triu() == torch.ones(n, n, dtype=torch.int64).triu()).all()
    assert seen.tril(-1).sum() <= n * min(height, 128) / 2
    whole = torch.zeros(n, 50, dtype=torch.int64)
    for rows, columns in cut_tiles(n, 50, height, width, symmetric=False):
        whole[rows, columns] += 1
    assert (whole == 1).all()


@pytest.mark.usefixtures("ways")
def test_long_rows_lose_nothing() -> None:
    """Where a short format would have begun to round: 70,001 places, nearly all open."""
    a = torch.ones(3, 70_001, dtype=torch.bool)
    a[1, 0], a[2, :2] = False, False
    assert binary_gram(a).tolist() == [[70_001, 70_000, 69_999], [70_000, 70_000, 69_999], [69_999] * 3]


def test_rows_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(InputError, match="longer than"):
        binary_gram(torch.zeros(1, 2**24 + 1, dtype=torch.bool))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 60))
@settings(max_examples=60)
def test_padding_for_devices_that_want_it(n: int, m: int, places: int) -> None:
    a, b = coins(n, places), coins(m, places, seed=1)
    if places < 16:  # a single place is what the integer product cannot do
        a, b = a.repeat(1, 16), b.repeat(1, 16)
    assert torch.equal(binary._aligned_product(a, b).long(), a.long() @ b.long().T)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("places", [1, 2, 26, 32, 33, 64, 65, 130, 255, 256, 300])
@pytest.mark.parametrize("leading", [(), (3,), (2, 5)])
def test_held_rows_are_counted_however_they_are_held(places: int, leading: tuple[int, ...]) -> None:
    a, b = coins(*leading, 9, places), coins(*leading, 4, places, seed=1)
    held, other = Bits.from_rows(a), Bits.from_rows(b)
    wanted = a.long() @ b.long().mT
    assert torch.equal(held.count_common(other).long(), wanted)
    assert torch.equal(held.take_rows(slice(2, 5)).count_common(other).long(), wanted[..., 2:5, :])
    assert torch.equal(held.count_open()[..., 0].long(), a.sum(-1))
    parts = Bits.join([Bits.from_rows(a[..., :3, :]), Bits.from_rows(a[..., 3:, :])])
    assert torch.equal(parts.count_common(other).long(), wanted)


def test_a_full_row_of_short_words_does_not_overflow() -> None:
    held = Bits.from_rows(torch.ones(2, 3, 300, dtype=torch.bool))
    assert (held.count_common(held) == 300).all()


@pytest.mark.parametrize("places", [1, 20, 33, 64, 200])
@pytest.mark.parametrize("leading", [(), (4,)])
def test_the_room_that_rows_take_is_known_before(places: int, leading: tuple[int, ...]) -> None:
    held = Bits.from_rows(coins(*leading, 10, places)).held
    assert held.nbytes == 10 * Bits.row_bytes(len(leading) * 4 or 1, places, bool(leading), "cpu")
    assert not leading or places < 8 or held.nbytes < 4 * 10 * places
