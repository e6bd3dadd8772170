"""Labels that depend on a few hidden directions of their inputs, from easy to hard for features fixed in advance.

    patterns       parity of k structured patterns (see ``patterns``): single patterns carry information about the label
    parity         product of k coordinates of +-1 inputs: fewer than k of them carry none
    staircase      sign of z_1 + z_1 z_2 + ... + z_1 ... z_k: the same product, with steps that lead up to it
    single-index   Gaussian inputs, +1 where one hidden coordinate is large in size: an even bump, nothing linear in it
    multi-index    Gaussian inputs, sign of z_1 z_2 + z_3 z_4 + ...: hidden coordinates in pairs
    hierarchy      a random grammar: the class is written as two symbols, each of them as two others, and so on

All labels are -1 or +1, each with probability about 1/2; every input has mean 0 and the hidden directions are known.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from unlazy.data.dataset import Dataset
from unlazy.data.patterns import Patterns
from unlazy.runtime import require, stream

KINDS = ("patterns", "parity", "staircase", "single-index", "multi-index", "hierarchy")
EVEN_SPLIT = 0.6744897501960817  # half of a standard normal is larger than this in size


@dataclass(frozen=True)
class Planted:
    """Data of one of the ``KINDS``. ``order``: how many patterns, coordinates or levels decide; ``seed`` chooses which.

    ``mixture`` is that of ``Patterns``: gamma = (1 - mixture) / 2. In a hierarchy inputs are tokens, each one of ``symbols``,
    written one-hot; 2^order of them are the sentence, the others are noise.

    >>> Planted("parity", inputs=20, order=3).dataset(5).x.shape
    torch.Size([5, 20])
    """

    kind: str
    inputs: int = 30
    order: int = 3
    mixture: float = 0.5
    symbols: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        kinds = ", ".join(KINDS)
        require(self.kind in KINDS, f"kind must be one of {kinds}; got {self.kind!r}.")
        require(self.order >= 1, f"at least one direction is hidden, got order {self.order!r}.")
        if self.kind == "patterns":
            self.patterns()  # checks the sizes
            return
        if self.kind == "hierarchy":
            tokens = self.tokens
            even = self.symbols >= 2 and self.symbols % 2 == 0
            require(
                even, f"two classes share the pairs of symbols evenly if their number is even; got {self.symbols!r}."
            )
            require(
                tokens * self.symbols == self.inputs,
                f"{self.inputs} inputs are not a whole number of tokens of {self.symbols} symbols.",
            )
            require(
                2**self.order <= tokens, f"a sentence of {self.order} levels has {2**self.order} tokens, not {tokens}."
            )
            return
        require(self.order <= self.inputs, f"order {self.order} exceeds the number of inputs, {self.inputs}.")
        require(
            self.kind != "single-index" or self.order == 1, f"a single index is one direction; got order {self.order}."
        )
        require(
            self.kind != "multi-index" or self.order % 2 == 0,
            f"hidden directions come in pairs; got order {self.order}.",
        )
        require(
            self.kind != "staircase" or self.order % 2 == 1,
            f"a staircase of {self.order} steps can stand at 0, which has no sign; take an odd order.",
        )

    @property
    def tokens(self) -> int:
        """How many tokens an input of a hierarchy holds."""
        return self.inputs // self.symbols

    def patterns(self) -> Patterns:
        """The pattern distribution, with as many patterns as inputs."""
        return Patterns(self.inputs, self.inputs, self.order, mixture=self.mixture, seed=self.seed)

    def directions(self) -> Float64[Tensor, "d r"]:
        """An orthonormal basis of the hidden subspace: labels depend on x through its components along it alone.

        For patterns it is one direction, the sum of the relevant ones: the label depends on their count alone.
        """
        if self.kind == "patterns":
            patterns = self.patterns()
            return patterns.dictionary()[:, patterns.relevant_set()].sum(1, keepdim=True) / math.sqrt(self.order)
        if self.kind in ("single-index", "multi-index"):
            gaussian = torch.randn(
                self.inputs, self.order, generator=stream(self.seed, "directions"), dtype=torch.float64
            )
            return torch.linalg.qr(gaussian).Q
        identity = torch.eye(self.inputs, dtype=torch.float64)
        if self.kind == "hierarchy":
            return _contrast_basis(identity.reshape(self.tokens, self.symbols, -1)[self.relevant_places()])
        return identity[:, self.relevant_places()]

    def relevant_places(self) -> Int64[Tensor, " k"]:
        """Which coordinates decide; for a hierarchy which tokens, in the order of the sentence."""
        many, count = (self.tokens, 2**self.order) if self.kind == "hierarchy" else (self.inputs, self.order)
        return torch.randperm(many, generator=stream(self.seed, "places", self.kind))[:count]

    def draw(self, n: int, part: str = "train") -> tuple[Float64[Tensor, "n d"], Float64[Tensor, " n"]]:
        """``n`` inputs with their labels; other names of ``part`` are other samples. Coordinates have variance about 1."""
        require(n >= 1, f"a sample has at least one input, got n={n}.")
        generator = stream(self.seed, "planted", self.kind, part)
        if self.kind == "patterns":
            patterns = self.patterns()
            sample = patterns.draw(n, part)
            return sample.phi @ patterns.dictionary().T * math.sqrt(self.inputs), sample.y
        if self.kind == "hierarchy":
            return self._draw_sentences(n, generator)
        if self.kind in ("single-index", "multi-index"):
            x = torch.randn(n, self.inputs, generator=generator, dtype=torch.float64)
            hidden = x @ self.directions()
            if self.kind == "single-index":
                return x, torch.where(hidden[:, 0].abs() > EVEN_SPLIT, 1.0, -1.0).to(torch.float64)
            return x, torch.where((hidden[:, 0::2] * hidden[:, 1::2]).sum(1) >= 0, 1.0, -1.0).to(torch.float64)
        x = 2 * torch.randint(0, 2, (n, self.inputs), generator=generator).to(torch.float64) - 1
        products = x[:, self.relevant_places()].cumprod(1)
        return x, products[:, -1].clone() if self.kind == "parity" else torch.sign(products.sum(1))

    def grammar(self) -> list[Int64[Tensor, "symbols versions two"]]:
        """The grammar, top first: how each symbol of a level may be written as two symbols of the next.

        Every pair of symbols is one version of exactly one symbol (of one of the two classes at the top), so a sentence is read
        in one way only, and all sentences are equally likely. Which pair belongs to which symbol is drawn at random.
        """
        found = []
        for level in range(self.order):
            pairs = torch.randperm(self.symbols**2, generator=stream(self.seed, "grammar", level))
            count = 2 if level == 0 else self.symbols
            versions = pairs.reshape(count, -1)
            found.append(torch.stack([versions // self.symbols, versions % self.symbols], -1))
        return found

    def _draw_sentences(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and labels of a hierarchy: sentences of the grammar among random tokens."""
        classes = torch.randint(0, 2, (n,), generator=generator)
        sentence = classes[:, None]
        for rule in self.grammar():
            version = torch.randint(0, rule.shape[1], sentence.shape, generator=generator)
            sentence = rule[sentence, version].flatten(1)
        written = torch.randint(0, self.symbols, (n, self.tokens), generator=generator)
        written[:, self.relevant_places()] = sentence
        one_hot = torch.nn.functional.one_hot(written, self.symbols).to(torch.float64)
        share = 1 / self.symbols
        x = (one_hot - share) / math.sqrt(share * (1 - share))
        return x.flatten(1), 2 * classes.to(torch.float64) - 1

    def dataset(self, n: int, part: str = "train", dtype: torch.dtype = torch.float32) -> Dataset:
        """Inputs and labels ``[n, 1]`` of -1 and +1."""
        x, y = self.draw(n, part)
        return Dataset("planted", x.to(dtype), y[:, None].to(dtype), {}, asdict(self) | {"n": n, "part": part})


def _contrast_basis(blocks: Float64[Tensor, "tokens symbols d"]) -> Float64[Tensor, "d r"]:
    """A basis of the tokens' coordinates without their sums, which are constant: symbols - 1 directions a token."""
    symbols = blocks.shape[1]
    contrasts = torch.linalg.qr(torch.cat([torch.ones(symbols, 1), torch.eye(symbols)[:, 1:]], 1).to(torch.float64)).Q[
        :, 1:
    ]
    return torch.cat([block.T @ contrasts for block in blocks], 1)


def subspace_overlap(found: Float[Tensor, "d r"], hidden: Float64[Tensor, "d q"]) -> float:
    """Mean squared cosine between two subspaces of the same size, given by orthonormal bases.

    1 if they are the same, r/d for a random one.
    """
    require(found.shape == hidden.shape, f"bases of shapes {tuple(found.shape)} and {tuple(hidden.shape)} differ.")
    return float((found.to(torch.float64).T @ hidden).square().sum() / hidden.shape[1])
