"""Labels that depend on several inputs at once: the exclusive-or of a few coordinates."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unlazy.data.dataset import Dataset
from unlazy.runtime import require, stream

LAWS = ("signs", "gaussian")


@dataclass(frozen=True)
class Interaction:
    """Independent inputs, and a class that is the product of the signs of ``order`` of them.

        class(x) = 1 if the product over the relevant coordinates j of sign(x_j) is positive, else 0

    Fewer than ``order`` of these coordinates together carry no information about the class. ``law``: inputs are ``signs``
    (-1 or 1 with equal chance) or ``gaussian`` (standard normal). ``seed`` draws the inputs, ``choice`` the relevant
    coordinates: data sets that differ in order and choice alone have the same inputs.

    >>> Interaction(n=8, order=3).dataset().y.shape
    torch.Size([8, 2])
    """

    n: int = 4000
    inputs: int = 20
    order: int = 2
    law: str = "signs"
    seed: int = 0
    choice: int = 0

    def __post_init__(self) -> None:
        require(isinstance(self.n, int) and self.n >= 1, f"n must be a whole number of at least 1, got {self.n!r}.")
        require(
            isinstance(self.order, int) and 1 <= self.order <= self.inputs,
            f"order must lie between 1 and the number of inputs, {self.inputs}; got {self.order!r}.",
        )
        require(self.law in LAWS, f"law must be one of {', '.join(LAWS)}; got {self.law!r}.")

    def relevant(self) -> tuple[int, ...]:
        """The coordinates that decide the class, sorted."""
        shuffled = torch.randperm(self.inputs, generator=stream(self.choice, "relevant", self.order))
        return tuple(sorted(shuffled[: self.order].tolist()))

    def points(self, split: str = "train") -> Float[Tensor, "n d"]:
        """The inputs; every split is a fresh draw."""
        random = stream(self.seed, "interaction", self.law, split)
        if self.law == "signs":
            return 2 * torch.randint(0, 2, (self.n, self.inputs), generator=random).double() - 1
        return torch.randn(self.n, self.inputs, generator=random, dtype=torch.float64)

    def labels(self, x: Float[Tensor, "n d"]) -> Int[Tensor, " n"]:
        """The class of each row, 0 or 1."""
        negative = (x[:, list(self.relevant())] < 0).sum(1)
        return 1 - negative % 2

    def dataset(self, split: str = "train", dtype: torch.dtype = torch.float32) -> Dataset:
        """Inputs and one-hot classes."""
        x = self.points(split)
        y = torch.nn.functional.one_hot(self.labels(x), 2)
        options = asdict(self) | {"split": split, "relevant": list(self.relevant())}
        return Dataset("interaction", x.to(dtype), y.to(dtype), {}, options)
