"""Pairing two sets of samples: from shares to a block of the tangent kernel, in place and without large temporaries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.kernels.layers import Factors, Positions, Rows, Share, token_table
from unlazy.kernels.windows import Windows

SLIM = 128  # samples a side under which one product for all directions beats one for each pair
POSITION_ENTRIES = 2**22  # how many entries of a position-by-position product are held at once


class Bench:
    """Reused buffers: allocation costs as much as arithmetic here."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def __call__(self, slot: str, like: Tensor, rows: int, columns: int) -> Tensor:
        held, size = self._held.get(slot), rows * columns
        if held is None or held.numel() < size or held.dtype != like.dtype or held.device != like.device:
            held = self._held[slot] = like.new_empty(size)
        return held[:size].view(rows, columns)


def add_trace(out: Tensor, first: Sequence[Share], second: Sequence[Share], bench: Bench) -> None:
    """out[i, j] += sum over output directions of the paired gradients."""
    _check_sizes(out, first, second)
    for a, b in zip(first, second, strict=True):
        if isinstance(a, Rows) and isinstance(b, Rows):
            out.addmm_(a.j.flatten(1), b.j.flatten(1).T)
        elif isinstance(a, Windows) and isinstance(b, Windows):
            for left, right in _tap_pairs(a, b, bench, same=a is b):
                out.addmm_(left.flatten(1), right.flatten(1).T)
        elif isinstance(a, Factors) and isinstance(b, Factors):
            _add_factors(out, a, b, a.g.flatten(1), b.g.flatten(1), bench)
        else:
            assert isinstance(a, Positions)
            assert isinstance(b, Positions)
            g, h = (side.g.permute(0, 2, 1, 3).flatten(2) for side in (a, b))
            _add_positions([(out, g, h)], a, b, bench)


def add_full(out: Tensor, first: Sequence[Share], second: Sequence[Share], bench: Bench, *, same: bool) -> None:
    """out[k, l, i, j] += the paired gradients of direction k at i and l at j; ``same``: both sides are one set.

    Then the block (l, k) is the transpose of (k, l), and only one of them is computed.
    """
    _check_sizes(out, first, second)
    for a, b in zip(first, second, strict=True):
        if isinstance(a, Rows) and isinstance(b, Rows):
            _add_rows(out, a.j, b.j, bench, same=same)
        elif isinstance(a, Windows) and isinstance(b, Windows):
            for left, right in _tap_pairs(a, b, bench, same=same):
                _add_rows(out, left, right, bench, same=same)
        elif isinstance(a, Factors) and isinstance(b, Factors):
            inputs = _input_gram(a, b, bench)
            for k, m in _direction_pairs(out, same=same):
                product = bench("gradients", a.g, len(a.g), len(b.g))
                torch.mm(a.g[:, k], b.g[:, m].T, out=product)
                out[k, m].add_(product) if inputs is None else out[k, m].addcmul_(product, inputs)
        else:
            assert isinstance(a, Positions)
            assert isinstance(b, Positions)
            chosen = [(out[k, m], a.g[:, k], b.g[:, m]) for k, m in _direction_pairs(out, same=same)]
            _add_positions(chosen, a, b, bench)
    if same:
        for k in range(out.shape[0]):
            for m in range(k):
                out[k, m].copy_(out[m, k].T)


def _direction_pairs(out: Tensor, *, same: bool) -> list[tuple[int, int]]:
    return [(k, m) for k, m in itertools.product(range(out.shape[0]), repeat=2) if not same or m >= k]


def _add_rows(out: Tensor, left: Tensor, right: Tensor, bench: Bench, *, same: bool) -> None:
    """Explicit gradients ``[n, k, p]``: direction by direction, or, where that makes slim products, all at once."""
    if min(out.shape[2:]) >= SLIM:
        for k, m in _direction_pairs(out, same=same):
            out[k, m].addmm_(left[:, k], right[:, m].T)
        return
    a, b = left.flatten(0, 1), right.flatten(0, 1)  # [n k, p]
    product = bench("all directions", a, len(a), len(b))
    halves = [slice(0, len(a) // 2), slice(len(a) // 2, len(a))] if same else [slice(0, len(a))]
    for number, rows in enumerate(halves):
        for columns in halves[number:] if same else [slice(0, len(b))]:
            torch.mm(a[rows], b[columns].T, out=product[rows, columns])
    if same:
        product[halves[1], halves[0]] = product[halves[0], halves[1]].T
    k = out.shape[0]
    out.add_(product.view(len(a) // k, k, len(b) // k, k).permute(1, 3, 0, 2))


def _tap_pairs(a: Windows, b: Windows, bench: Bench, *, same: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Both sides' explicit gradients ``[n, k, p]``, one tap of the filter after another."""
    k = a.directions
    if same:
        for rows in a.tap_rows(bench, "left"):
            yield rows.view(len(rows), k, -1), rows.view(len(rows), k, -1)
        return
    for left, right in zip(a.tap_rows(bench, "left"), b.tap_rows(bench, "right"), strict=True):
        yield left.view(len(left), k, -1), right.view(len(right), k, -1)


def _check_sizes(out: Tensor, first: Sequence[Share], second: Sequence[Share]) -> None:
    """A share with another number of samples would be broadcast in silence."""
    for side, shares in ((-2, first), (-1, second)):
        assert all(len(tensor) == out.shape[side] for share in shares for tensor in share.tensors())


def _input_gram(a: Factors, b: Factors, bench: Bench) -> Tensor | None:
    """a_i . a_j (weight) + 1 (bias); ``None`` where it is 1 throughout."""
    if not a.weight:
        return None
    gram = bench("inputs", a.a, len(a.a), len(b.a))
    torch.mm(a.a, b.a.T, out=gram)
    return gram.add_(1) if a.bias else gram


def _add_factors(out: Tensor, a: Factors, b: Factors, g: Tensor, h: Tensor, bench: Bench) -> None:
    inputs = _input_gram(a, b, bench)
    if inputs is None:
        out.addmm_(g, h.T)
        return
    product = bench("gradients", g, len(g), len(h))
    torch.mm(g, h.T, out=product)
    out.addcmul_(product, inputs)


def _add_positions(targets: list[tuple[Tensor, Tensor, Tensor]], a: Positions, b: Positions, bench: Bench) -> None:
    """For every (out, g, h): out[i, j] += sum over t, s of (a_it . a_js + bias) (g_it . h_js), ``g [n, t, m]``.

    A few samples i at a time; what the inputs give is made once for all targets.
    """
    (n, t), (m, s) = a.a.shape[:2], b.a.shape[:2]
    step = max(1, POSITION_ENTRIES // max(1, t * s * m))
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        size = (part.stop - start) * t
        inputs = None
        if a.weight:
            inputs = bench("inputs", a.g, size, m * s)
            if a.a.is_floating_point():
                torch.mm(a.a[part].flatten(0, 1), b.a.flatten(0, 1).T, out=inputs)
            else:
                torch.eq(a.a[part].reshape(-1, 1), b.a.reshape(1, -1), out=inputs)
            inputs = inputs.add_(1) if a.bias else inputs
        for out, g, h in targets:
            product = bench("gradients", g, size, m * s)
            torch.mm(g[part].flatten(0, 1), h.flatten(0, 1).T, out=product)
            product = product if inputs is None else product.mul_(inputs)
            rows = product.view(-1, t, m * s).sum(1)
            out[part] += rows.view(-1, m, s).sum(-1)


# --- each sample with itself, and explicitly ----------------------------------------------------------------


def explicit_rows(shares: Sequence[Share]) -> list[Tensor]:
    """Every share as explicit gradients ``[n, k, p]``."""
    rows = []
    for share in shares:
        if isinstance(share, Rows):
            rows.append(share.j)
        elif isinstance(share, Windows):
            rows.append(share.rows())
        elif isinstance(share, Factors):
            if share.weight:
                rows.append(torch.einsum("nkm,nd->nkmd", share.g, share.a).flatten(2))
            if share.bias:
                rows.append(share.g)
        else:
            rows += _position_rows(share)
    return rows


def _position_rows(share: Positions) -> list[Tensor]:
    if not share.a.is_floating_point():
        return [token_table(share)]
    rows = [torch.einsum("nktm,ntd->nkmd", share.g, share.a).flatten(2)] if share.weight else []
    return rows + ([share.g.sum(2)] if share.bias else [])


def own_block(share: Share) -> Float[Tensor, "n k k"]:
    """Every sample paired with itself."""
    if isinstance(share, Rows):
        return share.j @ share.j.mT
    if isinstance(share, Windows):
        rows = share.rows()
        return rows @ rows.mT
    if isinstance(share, Factors):
        squares = share.a.square().sum(-1) * share.weight + share.bias
        return squares[:, None, None] * (share.g @ share.g.mT)
    if share.a.is_floating_point():
        inputs = share.a @ share.a.mT * share.weight + share.bias
    else:
        inputs = (share.a[:, :, None] == share.a[:, None, :]).to(share.g.dtype)
    return torch.einsum("nts,nktm,nlsm->nkl", inputs, share.g, share.g)
