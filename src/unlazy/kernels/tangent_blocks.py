"""Blocks of the tangent kernel from the features (shares) of two sets of samples, filled in place without large temporaries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.kernels.convolution_windows import Windows
from unlazy.kernels.layer_rules import Factors, Positions, Products, Rows, Share, sum_tensors, token_table
from unlazy.kernels.tiling import Band, Tile, cut_bands, cut_tiles

FEW_ROWS = 128  # rows of the products of all directions of few samples
SLIM = 64  # samples a side under which one product for all directions beats one for each pair
POSITION_ENTRIES = 2**22  # how many entries of a position-by-position product are held at once
BLOCK, DEVICE_BLOCK = 512, 2048  # pairs of samples are added up in squares of this side, which stay in the cache
DIAGONAL, DEVICE_DIAGONAL = 64, 1024  # side of the squares on the diagonal, where one direction gains nothing


class Buffers:
    """Tensors by name that are used again for every block: allocating them costs as much as the arithmetic."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def __call__(self, slot: str, like: Tensor, *shape: int) -> Tensor:
        held, size = self._held.get(slot), math.prod(shape)
        if held is None or held.numel() < size or held.dtype != like.dtype or held.device != like.device:
            held = self._held[slot] = like.new_empty(size)
        return held[:size].view(shape)


def fill_trace(out: Tensor, first: Sequence[Share], second: Sequence[Share], buffers: Buffers, *, same: bool) -> None:
    """out[i, j] = sum over output directions of the paired gradients: all directions side by side are one."""
    left = [_merge_directions(share) for share in first]
    right = left if second is first else [_merge_directions(share) for share in second]
    fill_full(out[None, None], left, right, buffers, same=same)


def fill_full(out: Tensor, first: Sequence[Share], second: Sequence[Share], buffers: Buffers, *, same: bool) -> None:
    """out[k, l, i, j] = the paired gradients of direction k at i and l at j; ``same``: both sides are one set.

    Then out[l, k, j, i] is the same number: only blocks above the diagonal are computed, and on the diagonal one of each
    two directions; the rest is copied.
    """
    _check_sizes(out, first, second)
    blocks = _blocks(out, same=same)
    outer = [(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, Factors) and isinstance(b, Factors)]
    if not outer or not outer[0][0].weight:
        out.zero_()
    if outer and same and out.shape[2] <= SLIM and not out.is_cuda:
        _fill_few_factors(out, [a for a, _ in outer], buffers)
    for block in blocks if outer and not (same and out.shape[2] <= SLIM and not out.is_cuda) else []:
        _fill_factors(out, block, outer, buffers, same=same)
    for a, b in zip(first, second, strict=True):
        assert type(a) is type(b), "both sides hold a layer in one form"
        if isinstance(a, Rows) and isinstance(b, Rows):
            _add_rows(out, blocks, a.j, b.j, buffers, same=same)
        elif isinstance(a, Windows) and isinstance(b, Windows):
            for left, right in _tap_pairs(a, b, buffers, same=same):
                shaped = [side.view(len(side), out.shape[0], -1) for side in (left, right)]
                _add_rows(out, blocks, shaped[0], shaped[1], buffers, same=same)
        elif isinstance(a, Positions) and isinstance(b, Positions):
            for block in blocks:
                for tile in block.tiles():
                    _add_positions(out, tile, a, b, buffers, _directions(out, block, same=same))
    if same:
        _mirror(out, blocks)


def _merge_directions(share: Share) -> Share:
    """All directions side by side as one: its products are sums over directions."""
    if isinstance(share, Rows):
        return Rows(share.j.flatten(1)[:, None])
    if isinstance(share, Factors):
        return Factors(share.a, share.g.flatten(1)[:, None], share.weight, share.bias)
    if isinstance(share, Positions):
        return share.with_tensors([share.a, share.g.permute(0, 2, 1, 3).flatten(2)[:, None]])
    return share


def _blocks(out: Tensor, *, same: bool) -> list[Band]:
    side, diagonal = (DEVICE_BLOCK, DEVICE_DIAGONAL) if out.is_cuda else (BLOCK, DIAGONAL)
    return cut_bands(out.shape[2], out.shape[3], side, symmetric=same, least=diagonal if out.shape[0] == 1 else side)


def _directions(out: Tensor, block: Band, *, same: bool) -> list[tuple[int, int]]:
    """Pairs of directions; on the diagonal one of each two, since the other is its transpose."""
    halved = same and block.is_on_diagonal
    return [(k, m) for k, m in itertools.product(range(out.shape[0]), repeat=2) if not halved or m >= k]


def _mirror(out: Tensor, blocks: list[Band]) -> None:
    """Copy the blocks above the diagonal to below it: computed products are symmetric only up to rounding."""
    for block in blocks:
        made = block.pairs_of(out)  # [k, m, tiles, height, width]
        if not block.is_on_diagonal:
            block.mirror().pairs_of(out).copy_(made.transpose(0, 1).mT)
            continue
        own = made.diagonal(dim1=0, dim2=1).movedim(-1, 0)
        own.copy_(own.triu() + own.triu(1).mT)
        for k in range(1, out.shape[0]):
            made[k, :k].copy_(made[:k, k].mT)


def _add_rows(out: Tensor, blocks: list[Band], left: Tensor, right: Tensor, buffers: Buffers, *, same: bool) -> None:
    """Explicit gradients ``[n, k, p]``: direction by direction, or, where that makes slim products, all at once."""
    if out.shape[0] == 1 or min(out.shape[2:]) >= SLIM:
        for block in blocks:
            target = block.pairs_of(out)
            for k, m in _directions(out, block, same=same):
                target[k, m].baddbmm_(block.rows_of(left[:, k]), block.columns_of(right[:, m]))
        return
    a, b = left.flatten(0, 1), right.flatten(0, 1)  # [n k, p]
    product = buffers("all directions", a, len(a), len(b))
    for rows, columns in cut_tiles(len(a), len(b), BLOCK, BLOCK, symmetric=same, least=DIAGONAL):
        torch.mm(a[rows], b[columns].T, out=product[rows, columns])
        if same and rows != columns:
            product[columns, rows] = product[rows, columns].T
    k = out.shape[0]
    out.add_(product.view(len(a) // k, k, len(b) // k, k).permute(1, 3, 0, 2))


def _tap_pairs(a: Windows, b: Windows, buffers: Buffers, *, same: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Both sides' explicit gradients ``[n, k m, c]``, one tap of the filter after another."""
    if same:
        for rows in a.tap_rows(buffers, "left"):
            yield rows, rows
        return
    yield from zip(a.tap_rows(buffers, "left"), b.tap_rows(buffers, "right"), strict=True)


def _check_sizes(out: Tensor, first: Sequence[Share], second: Sequence[Share]) -> None:
    """Assert that shares have as many samples as the block: others would be broadcast without an error."""
    for side, shares in ((-2, first), (-1, second)):
        assert all(len(tensor) == out.shape[side] for share in shares for tensor in share.tensors())


def _fill_factors(
    out: Tensor, block: Band, shares: Sequence[tuple[Factors, Factors]], buffers: Buffers, *, same: bool
) -> None:
    """(a_i . a_j + bias) (g_ik . g_jm), all layers one after the other while a block is in the cache; the first one writes."""
    target = block.pairs_of(out)
    inputs = [_input_gram(block, a, b, buffers, number) for number, (a, b) in enumerate(shares)]
    product = buffers("gradients", shares[0][0].g, *block.shape)
    for k, m in _directions(out, block, same=same):
        for number, ((a, b), gram) in enumerate(zip(shares, inputs, strict=True)):
            left, right = block.rows_of(a.g[:, k]), block.columns_of(b.g[:, m])
            if gram is None:
                target[k, m].baddbmm_(left, right)
                continue
            torch.bmm(left, right, out=product)
            if number == 0:
                torch.mul(product, gram, out=target[k, m])
            else:
                target[k, m].addcmul_(product, gram)


def _fill_few_factors(out: Tensor, shares: Sequence[Factors], buffers: Buffers) -> None:
    """The same for few samples of one set: a product of some directions with all that follow, not one for each pair."""
    k, n = out.shape[0], out.shape[2]
    inputs = []
    for number, share in enumerate(shares):
        gram = torch.mm(share.a, share.a.T, out=buffers(f"inputs {number}", share.a, n, n)) if share.weight else None
        inputs.append(gram.add_(1) if gram is not None and share.bias else gram)
    gradients = [share.g.transpose(0, 1).reshape(k * n, -1) for share in shares]
    step = max(1, FEW_ROWS // n)
    for start in range(0, k, step):
        stop = min(start + step, k)
        shape = stop - start, n, k - start, n
        total = out[0, 0] if k == 1 else buffers("few", out, (stop - start) * n, (k - start) * n)
        product = buffers("gradients", out, *total.shape)
        for number, (g, gram) in enumerate(zip(gradients, inputs, strict=True)):
            left, right = g[start * n : stop * n], g[start * n :].T
            if gram is None:
                total.addmm_(left, right) if number else torch.mm(left, right, out=total)
                continue
            torch.mm(left, right, out=product)
            if number:
                total.view(shape).addcmul_(product.view(shape), gram[:, None])
            else:
                torch.mul(product.view(shape), gram[:, None], out=total.view(shape))
        if k > 1:
            out[start:stop, start:] = total.view(shape).transpose(1, 2)


def _input_gram(block: Band, a: Factors, b: Factors, buffers: Buffers, number: int) -> Tensor | None:
    """a_i . a_j (weight) + 1 (bias); ``None`` where it is 1 throughout."""
    if not a.weight:
        return None
    gram = buffers(f"inputs {number}", a.a, *block.shape)
    torch.bmm(block.rows_of(a.a), block.columns_of(b.a), out=gram)
    return gram.add_(1) if a.bias else gram


def _add_positions(
    out: Tensor, tile: Tile, a: Positions, b: Positions, buffers: Buffers, directions: Sequence[tuple[int, int]]
) -> None:
    """out[k, l, i, j] += sum over t, s of (a_it . a_js + bias) (g_ikt . g_jls).

    A few samples i at a time; what the inputs give is made once for all pairs of directions.
    """
    rows, columns = tile
    entered, gradients = b.a[columns].flatten(0, 1), [b.g[columns, m].flatten(0, 1) for m in range(out.shape[0])]
    t, s, width = a.a.shape[1], b.a.shape[1], columns.stop - columns.start
    step = max(1, POSITION_ENTRIES // max(1, t * s * width))
    for start in range(rows.start, rows.stop, step):
        part = slice(start, min(start + step, rows.stop))
        size = (part.stop - start) * t
        inputs = None
        if a.weight:
            inputs = buffers("inputs", a.g, size, width * s)
            if a.a.is_floating_point():
                torch.mm(a.a[part].flatten(0, 1), entered.T, out=inputs)
            else:
                torch.eq(a.a[part].reshape(-1, 1), entered.reshape(1, -1), out=inputs)
            inputs = inputs.add_(1) if a.bias else inputs
        for k, m in directions:
            product = buffers("gradients", a.g, size, width * s)
            torch.mm(a.g[part, k].flatten(0, 1), gradients[m].T, out=product)
            product = product if inputs is None else product.mul_(inputs)
            summed = product.view(-1, t, width * s).sum(1)
            out[k, m, part, columns] += summed.view(-1, width, s).sum(-1)


# --- a few samples, each sample with itself, and explicitly ---------------------------------------------------


def small_gram(shares: Sequence[Share]) -> Float[Tensor, "n n"]:
    """The kernel of a few samples, summed over directions; plain products without blocks."""
    return sum_tensors([_small_gram(share) for share in shares])


def _small_gram(share: Share) -> Tensor:
    if isinstance(share, Factors):
        inputs = share.a @ share.a.T * share.weight + share.bias
        return inputs * (share.g.flatten(1) @ share.g.flatten(1).T)
    if isinstance(share, Positions):
        entered, gradients = share.a.flatten(0, 1), share.g.transpose(1, 2).flatten(2).flatten(0, 1)
        if entered.is_floating_point():
            inputs = entered @ entered.T * share.weight + share.bias
        else:
            inputs = (entered[:, None] == entered).to(gradients)
        n, t = share.a.shape[:2]
        return (inputs * (gradients @ gradients.T)).view(n, t, n, t).sum((1, 3))
    rows = (share.j if isinstance(share, Rows) else share.rows()).flatten(1)
    return rows @ rows.T


def explicit_rows(shares: Sequence[Share]) -> list[Tensor]:
    """Every share as explicit gradients ``[n, k, p]``."""
    rows = []
    for share in shares:
        if isinstance(share, Rows):
            rows.append(share.j)
        elif isinstance(share, Windows | Products):
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


def diagonal_blocks(share: Share) -> Float[Tensor, "n k k"]:
    """The kernel of every sample with itself, for all pairs of directions."""
    if isinstance(share, Rows):
        return share.j @ share.j.mT
    if isinstance(share, Windows | Products):
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
