"""Pairing two sets of samples: from shares to a block of the tangent kernel, in place and without large temporaries."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.kernels.layers import Factors, Positions, Rows, Share, token_table

POSITION_ENTRIES = 2**22  # how many entries of a position-by-position product are held at once


class Bench:
    """Reused buffers of a block's size: allocation costs as much as arithmetic here."""

    def __init__(self) -> None:
        self._held: dict[tuple[object, ...], Tensor] = {}

    def __call__(self, slot: str, like: Tensor, rows: int, columns: int) -> Tensor:
        key = (slot, rows, columns, like.dtype, like.device)
        if key not in self._held:
            self._held[key] = like.new_empty(rows, columns)
        return self._held[key]


def add_trace(out: Tensor, first: Sequence[Share], second: Sequence[Share], bench: Bench) -> None:
    """out[i, j] += sum over output directions of the paired gradients."""
    _check_sizes(out, first, second)
    for a, b in zip(first, second, strict=True):
        if isinstance(a, Rows) and isinstance(b, Rows):
            out.addmm_(a.j.flatten(1), b.j.flatten(1).T)
        elif isinstance(a, Factors) and isinstance(b, Factors):
            _add_factors(out, a, b, a.g.flatten(1), b.g.flatten(1), bench)
        else:
            assert isinstance(a, Positions)
            assert isinstance(b, Positions)
            _add_positions(out, a, b, a.g.permute(0, 2, 1, 3).flatten(2), b.g.permute(0, 2, 1, 3).flatten(2))


def add_full(out: Tensor, first: Sequence[Share], second: Sequence[Share], bench: Bench, *, same: bool) -> None:
    """out[k, l, i, j] += the paired gradients of direction k at i and l at j; ``same``: both sides are one set.

    Then the block (l, k) is the transpose of (k, l), and only one of them is computed.
    """
    _check_sizes(out, first, second)
    for a, b in zip(first, second, strict=True):
        inputs = _input_gram(a, b, bench) if isinstance(a, Factors) and isinstance(b, Factors) else None
        for k, m in itertools.product(range(out.shape[0]), repeat=2):
            if same and m < k:
                continue
            target = out[k, m]
            if isinstance(a, Rows) and isinstance(b, Rows):
                target.addmm_(a.j[:, k], b.j[:, m].T)
            elif isinstance(a, Factors) and isinstance(b, Factors):
                product = bench("gradients", a.g, len(a.g), len(b.g))
                torch.mm(a.g[:, k], b.g[:, m].T, out=product)
                target.add_(product) if inputs is None else target.addcmul_(product, inputs)
            else:
                assert isinstance(a, Positions)
                assert isinstance(b, Positions)
                _add_positions(target, a, b, a.g[:, k], b.g[:, m])
    if same:
        for k in range(out.shape[0]):
            for m in range(k):
                out[k, m].copy_(out[m, k].T)


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


def _add_positions(out: Tensor, a: Positions, b: Positions, g: Tensor, h: Tensor) -> None:
    """out[i, j] += sum over t, s of (a_it . a_js + bias) (g_it . h_js), ``g [n, t, m]``, a few samples i at a time."""
    t, s = g.shape[1], h.shape[1]
    step = max(1, POSITION_ENTRIES // max(1, t * s * len(h)))
    for start in range(0, len(g), step):
        part = slice(start, start + step)
        product = g[part].flatten(0, 1) @ h.flatten(0, 1).T  # [i t, j s]
        if a.weight:
            if a.a.is_floating_point():
                inputs = a.a[part].flatten(0, 1) @ b.a.flatten(0, 1).T
            else:
                inputs = (a.a[part].reshape(-1, 1) == b.a.reshape(1, -1)).to(product.dtype)
            product *= inputs + 1 if a.bias else inputs
        out[part] += product.view(-1, t, len(h), s).sum((1, 3))


# --- each sample with itself, and explicitly ----------------------------------------------------------------


def explicit_rows(shares: Sequence[Share]) -> list[Tensor]:
    """Every share as explicit gradients ``[n, k, p]``."""
    rows = []
    for share in shares:
        if isinstance(share, Rows):
            rows.append(share.j)
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
    if isinstance(share, Factors):
        squares = share.a.square().sum(-1) * share.weight + share.bias
        return squares[:, None, None] * (share.g @ share.g.mT)
    if share.a.is_floating_point():
        inputs = share.a @ share.a.mT * share.weight + share.bias
    else:
        inputs = (share.a[:, :, None] == share.a[:, None, :]).to(share.g.dtype)
    return torch.einsum("nts,nktm,nlsm->nkl", inputs, share.g, share.g)
