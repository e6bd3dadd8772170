"""The tangent kernel one output direction at a time, for models whose exact kernel fits neither memory nor time.

For a vector u of random signs over the outputs, E[(J_i^T u) . (J_j^T u)] is the trace of J_i J_j^T: the kernel, without bias.
One direction costs one backward pass, whatever the number of outputs. The directions are rows of a Hadamard matrix, drawn
without replacement, under common random signs: all rows together give the kernel exactly, so the error follows from how much
the kernels of single rows differ. The same directions serve at every step, so that a kernel that does not change has distance 0.

A layer is held as what it reads and the gradient at what it gives, never as its gradient by the parameters. Layers that take
too much that way, and parameters that no rule serves, are *folded*: signs, drawn anew for every direction, and a sum over every
8191st entry, which keeps inner products without bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.kernels.capture import Inputs, Tap, sample_count, take_samples
from unlazy.kernels.gram import USABLE, TooLittleMemory, size_text
from unlazy.kernels.layer_rules import Call, Factors, Positions, Rows, Share, token_table
from unlazy.kernels.projection import fold_columns
from unlazy.kernels.tangent_engine import as_held
from unlazy.runtime import stream
from unlazy.scope.layers import LayerTangents, Tangents, module_width

REST = -1  # number of what no rule serves
FOLDED = 8191  # numbers a sample; a prime, so that columns of a weight do not fall onto each other
FOLD_ENTRIES = 2**20  # of an explicit gradient that is folded at once
PAIR_BYTES = 2**25  # for temporary products of two samples' positions
CHUNK_SHARE = 0.25  # of the memory for activations and gradients of the samples that pass the model at a time
ROW_COPIES = 3  # of explicit gradients while they are made
SIGN_PIECE = 2**20  # signs that are drawn at once
DRAWN_MEANS = 100_000
WIDEST_MOMENT = 4096  # units of a layer whose mean g g^T is kept


# --- directions of the outputs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Directions:
    """``count`` directions of the outputs: each output itself where there are no more of them, else rows of random signs."""

    outputs: int
    count: int
    seed: int

    @property
    def are_all(self) -> bool:
        """Whether these are all outputs, so that nothing is random."""
        return self.count >= self.outputs

    @property
    def population(self) -> int:
        """How many directions there are to draw from; the mean of the kernels of all of them is the exact kernel."""
        return self.outputs if self.are_all else 1 << (self.outputs - 1).bit_length()

    def __len__(self) -> int:
        return min(self.count, self.outputs)

    def row(self, number: int, like: Tensor) -> Float[Tensor, "1 outputs"]:
        """Direction ``number``, in the precision and on the device of ``like``."""
        found = torch.zeros(1, self.outputs, dtype=like.dtype, device=like.device)
        if self.are_all:
            found[0, number] = math.sqrt(self.outputs)
            return found
        row = int(torch.randperm(self.population, generator=stream(self.seed, "rows"))[number])
        for piece, start in enumerate(range(0, self.outputs, SIGN_PIECE)):
            stop = min(start + SIGN_PIECE, self.outputs)
            bits = torch.arange(start, stop, dtype=torch.int32) & row
            for shift in (16, 8, 4, 2, 1):
                bits ^= bits >> shift
            random = stream(self.seed, "signs", piece)
            signs = torch.randint(0, 2, (stop - start,), generator=random, dtype=torch.int32)
            found[0, start:stop] = (1 - 2 * ((bits ^ signs) & 1)).to(found)
        return found


# --- the kernel in one direction -------------------------------------------------------------------------------


class DirectionTangents(LayerTangents):
    """The kernel of the outputs' product with one direction after another; made once, used at every step of training.

    ``folded``: numbers of the layers whose gradients are folded; ``REST`` is that of parameters that no rule serves.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Inputs,
        parameters: Sequence[str],
        memory: str | int | None = None,
        sample_bytes: int = 0,
        method: str = "auto",
    ) -> None:
        self.layer_bytes: dict[int, int] = {}
        self.folded: frozenset[int] = frozenset()
        self._number, self._seed, self._pair_bytes, self._rest_samples = 0, 0, PAIR_BYTES, 1
        super().__init__(model, x, parameters, memory, sample_bytes, outputs="sum", method=method)
        item = self._no_outputs.element_size()
        rest = sum(p.numel() for p in self._rest())
        self._rest_bytes = ROW_COPIES * rest * item
        self.outputs = self._no_outputs.shape[1]
        if rest:
            self.layer_bytes[REST] = rest * item

    def arrange(self, n: int, count: int, budget: int, folded: frozenset[int] | None = None) -> bool:
        """Plan ``n`` samples and ``count`` directions within so many bytes; whether they fit. Allocates nothing.

        Layers are folded, the largest first, until they fit, unless ``folded`` says which.

        Beside what the layers hold: the samples that pass the model at a time, temporary products, a square of samples for every
        layer, and one for every direction, now and at the start. Copies of the parameters are not counted.
        """
        item, sizes = self._no_outputs.element_size(), dict(self.layer_bytes)
        small = dict.fromkeys(sizes, FOLDED * item)
        if REST in sizes:
            small[REST] = sum(min(p.numel(), FOLDED) * item for p in self._rest())
        squares = n * n * (item * (2 * len(sizes) + 4) + 8 * (2 * count + 3))
        free = USABLE * budget - 2 * self.fixed_bytes - self._moment_bytes - squares
        passing = self.work + sum(sizes.values())
        self.budget, self.chunk = budget, max(1, min(n, int(CHUNK_SHARE * free / passing)))
        self._rest_samples = max(1, min(self.chunk, int(CHUNK_SHARE * free / (self.work + self._rest_bytes + 1))))
        self._pair_bytes = max(1, min(PAIR_BYTES, int(free / 8)))
        room = free - self.chunk * passing - self._pair_bytes
        chosen = set(folded or ())
        for place in sorted(sizes, key=lambda place: -sizes[place]):
            held = sum(small[p] if p in chosen else size for p, size in sizes.items())
            if folded is not None or n * held <= room:
                break
            if small[place] < sizes[place]:
                chosen.add(place)
        self.folded = frozenset(chosen)
        return n * sum(small[p] if p in chosen else size for p, size in sizes.items()) <= room

    def most_samples(self, n: int, least: int, count: int, budget: int, folded: frozenset[int] | None = None) -> int:
        """The most samples, at most ``n``, that fit; raises ``TooLittleMemory`` if ``least`` do not. Arranged for them."""
        while not self.arrange(n, count, budget, folded):
            if n <= least:
                raise TooLittleMemory(
                    f"{size_text(budget)} is too small for the tangent kernel of {n} samples: one sample takes "
                    f"{size_text(self.work)} while it passes the model. Give more memory."
                )
            n = max(least, n * 3 // 4)
        return n

    def in_direction(self, x: Inputs, directions: Directions, number: int, names: dict[nn.Module, str]) -> Tangents:
        """The kernel of one direction, layer by layer."""
        self._number, self._seed = number, directions.seed
        self.directions = directions.row(number, self._no_outputs)
        return self.by_layer(x, names)

    def _check_memory(self) -> None:
        self.fixed_bytes = self._no_outputs.shape[1] * self._no_outputs.element_size()  # what fits is planned later

    def _takes_layers_in_turn(self, n: int) -> bool:
        return False

    def _has_moment(self, module: nn.Module) -> bool:
        """Not the output layer, whose gradient is the direction itself, nor layers whose g g^T would be large."""
        if not super()._has_moment(module):
            return False
        width = module_width(module)
        return width != self._no_outputs.shape[1] and width <= WIDEST_MOMENT

    def _bytes_per_sample(self, seen: tuple[list[Tap], dict[nn.Module, list[Call]]]) -> tuple[int, int]:
        """As in general, but without the parameters that no rule serves; and what every layer takes."""
        for place, module in enumerate(self.fast):
            if module in seen[1]:
                shares = self._apply(module, seen[1][module]) or []
                tensors = [tensor for share in shares for tensor in as_held(share).tensors()]
                self.layer_bytes[place] = sum(tensor.numel() * tensor.element_size() for tensor in tensors) // 2
        touched = sum(tap.output.numel() * tap.output.element_size() for tap in seen[0]) // 2
        return max(1, sum(self.layer_bytes.values())), 5 * touched

    def _make_shares(self, module: nn.Module, calls: list[Call]) -> list[Share] | None:
        """Dense layers stay as factors: their explicit gradient would take as much as the weight, for every sample."""
        weight, bias = self.fast[module]
        dense = isinstance(module, nn.Linear) and weight and all(call.input.ndim > 2 for call in calls)
        if not dense:
            return super()._make_shares(module, calls)
        entered = [call.input.flatten(1, -2) for call in calls]
        gradients = [call.gradient.movedim(0, 1).flatten(2, -2) for call in calls]
        return [Positions(torch.cat(entered, dim=1), torch.cat(gradients, dim=2), weight, bias)]

    def _layers_in_turn(self, x: Inputs) -> Iterator[tuple[nn.Module | None, Share]]:
        places = {module: place for place, module in enumerate(self.fast)}
        for module, share in super()._layers_in_turn(x):
            small = isinstance(share, Rows) and share.j.shape[-1] <= FOLDED
            if module is not None and places[module] in self.folded and not small:
                yield module, Rows(self._fold(share, places[module]))
            else:
                yield module, share

    def _fold(self, share: Share, place: int) -> Float[Tensor, "n 1 r"]:
        """The share's explicit gradient folded, one sample after the other."""
        tensors = share.tensors()
        found = tensors[-1].new_zeros(len(tensors[0]), 1, FOLDED)
        for sample in range(len(found)):
            one = share.with_tensors([tensor[sample : sample + 1] for tensor in tensors])
            random, offset = stream(self._seed, "fold", self._number, place), 0
            for rows in _explicit_pieces(one):
                fold_columns(rows, found[sample], offset, random)
                offset += rows.shape[1]
        return found

    def _rest_rows(self, x: Inputs) -> Float[Tensor, "n 1 p"]:
        """Gradients by parameters that no rule serves, a few samples at a time; folded where they take too much."""
        n, parts = sample_count(x), []
        for start in range(0, n, self._rest_samples):
            rows = super()._rest_rows(take_samples(x, slice(start, min(start + self._rest_samples, n))))[:, 0]
            if REST in self.folded:
                pieces = rows.split([p.numel() for p in self._rest()], dim=1)
                rows = torch.cat([self._fold_rest(piece, place) for place, piece in enumerate(pieces)], dim=1)
            parts.append(rows)
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:, None]

    def _fold_rest(self, rows: Float[Tensor, "n p"], place: int) -> Float[Tensor, "n r"]:
        if rows.shape[1] <= FOLDED:
            return rows
        random, found = stream(self._seed, "fold rest", self._number, place), rows.new_zeros(len(rows), FOLDED)
        for start in range(0, rows.shape[1], FOLD_ENTRIES):
            fold_columns(rows[:, start : start + FOLD_ENTRIES], found, start, random)
        return found

    def _rest_widths(self) -> list[int]:
        widest = FOLDED if REST in self.folded else math.inf
        return [int(min(p.numel(), widest)) for p in self._rest()]

    def _add(self, parts: dict[str, Tensor], name: str, shares: list[Share]) -> None:
        (share,) = shares
        if isinstance(share, Positions):
            block = _pair_positions(share, self._pair_bytes)
            parts[name] = parts[name] + block if name in parts else block
        else:
            super()._add(parts, name, shares)


def _explicit_pieces(share: Share) -> Iterator[Float[Tensor, "1 p"]]:
    """The gradient of one sample in one direction, some entries at a time."""
    if isinstance(share, Factors):
        share = Positions(share.a[:, None], share.g[:, :, None], share.weight, share.bias)
    if isinstance(share, Positions) and share.a.is_floating_point():
        width = max(1, FOLD_ENTRIES // share.a.shape[-1])
        for g in share.g[0, 0].split(width, dim=1) if share.weight else ():
            yield (g.T @ share.a[0]).reshape(1, -1)
        if share.bias:
            yield share.g[0, 0].sum(0)[None]
        return
    rows = share.j if isinstance(share, Rows) else token_table(share) if isinstance(share, Positions) else share.rows()
    yield from rows.flatten(1).split(FOLD_ENTRIES, dim=1)


def _pair_positions(share: Positions, room: int) -> Float[Tensor, "n n"]:
    """sum over t, s of (a_it . a_js + bias) (g_it . g_js), in temporary tensors of about ``room`` bytes."""
    a, g = share.a, share.g[:, 0]
    n, t, m = g.shape
    found, item = g.new_zeros(n, n), g.element_size()
    if not a.is_floating_point():
        tokens = a.unique()
        if len(tokens) <= t * t:
            width = max(1, room // (item * n * m))
            for some in tokens.split(width):
                place = torch.searchsorted(some, a).clamp(max=len(some) - 1)
                used = g * (some[place] == a)[..., None]
                table = g.new_zeros(n, len(some), m).scatter_add_(1, place[..., None].expand_as(g), used).flatten(1)
                found.addmm_(table, table.T)
            return found
    elif t * t * (a.shape[-1] + m) >= m * a.shape[-1]:  # explicit gradients cost less, some output units at a time
        width = max(1, room // (item * n * a.shape[-1]))
        for some in g.split(width, dim=2):
            rows = torch.bmm(some.mT, a).flatten(1)
            found.addmm_(rows, rows.T)
        if share.bias:
            sums = g.sum(1)
            found.addmm_(sums, sums.T)
        return found
    all_a, all_g = a.flatten(0, 1), g.flatten(0, 1)
    step = max(1, room // (2 * item * t * n * t))
    for start in range(0, n, step):
        own = slice(start, start + step)
        if a.is_floating_point():
            inputs = a[own].flatten(0, 1) @ all_a.T + float(share.bias)
        else:
            inputs = (a[own].reshape(-1, 1) == all_a).to(g)
        found[own] = inputs.mul_(g[own].flatten(0, 1) @ all_g.T).view(-1, t, n, t).sum((1, 3))
    return found


# --- the estimate and its error --------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelEstimate:
    """Unbiased estimates of one kernel, one per direction; their mean is the estimate.

    ``population``: how many directions there are, if all of them together give the exact kernel; else ``None``.
    """

    each: Float[Tensor, "k n n"]
    population: int | None = None

    @property
    def kernel(self) -> Float[Tensor, "n n"]:
        return self.each.mean(0)

    @property
    def left(self) -> float:
        """The share of the variance that is left after directions were drawn without replacement."""
        return 1.0 if self.population is None else 1 - len(self.each) / self.population

    def entry_errors(self) -> Float[Tensor, "n n"]:
        """Standard error of every entry."""
        return self.each.std(0) * math.sqrt(self.left / len(self.each))

    def entry_bounds(self) -> Float[Tensor, "n n"]:
        """How far entries may be off: 95 % of them are closer to the exact kernel than this; see :func:`interval_factor`."""
        return interval_factor(len(self.each)) * self.entry_errors()

    def error(self) -> float:
        """Relative standard error in Frobenius norm, |K - estimate| / |K|."""
        return float(self.entry_errors().norm() / self.kernel.norm())

    def error_of(self, number: Callable[..., Tensor], start: KernelEstimate | None = None) -> Tensor:
        """Error of ``number(kernel)``, or ``number(kernel, start)`` from the same directions: standard error and bias together.

        Both by the jackknife: the number is computed again without each of the directions.
        """
        k, both = len(self.each), [self] if start is None else [self, start]
        sums = [estimate.each.sum(0) for estimate in both]
        without = torch.stack(
            [number(*((s - e.each[one]) / (k - 1) for s, e in zip(sums, both, strict=True))) for one in range(k)]
        )
        whole = number(*(estimate.kernel for estimate in both))
        variance = (k - 1) * (without - without.mean()).square().mean() * self.left
        bias = (k - 1) * (without.mean() - whole) * self.left
        return (variance + bias.square()).sqrt()


@cache
def interval_factor(count: int) -> float:
    """How many standard errors hold 95 % of means of ``count`` squared normal numbers, found by drawing 100,000 of them.

    An entry of the kernel in a random direction is a square of a nearly normal number where one direction of the outputs
    rules, the case with the most skewed noise; Student's factor, for normal noise, would hold too few. The less skewed, the more
    than 95 % it holds.
    """
    squares = torch.randn(DRAWN_MEANS, count, generator=stream(0, "interval"), dtype=torch.float64).square()
    off = (squares.mean(1) - 1).abs() / (squares.std(1) / math.sqrt(count))
    return float(off.quantile(0.95))
