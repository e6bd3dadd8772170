"""Labels of a decision tree with oblique splits: they jump at known hyperplanes and are constant elsewhere."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.data.dataset import Dataset
from unlazy.runtime import require, stream


@dataclass(frozen=True)
class ObliqueTree:
    """A full binary tree on normal inputs; its leaves are +1 and -1 in turn, so that both sides of a last split differ.

    A split is v . x >= c with a random unit normal v and c normal of size ``spread``. ``seed`` chooses the splits.

    >>> ObliqueTree(inputs=3, levels=2).dataset(5).y.shape
    torch.Size([5, 1])
    """

    inputs: int = 4
    levels: int = 3
    spread: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.inputs >= 1 and self.levels >= 1, "a tree needs at least one input and one level.")

    def splits(self) -> tuple[Float[Tensor, "splits d"], Float[Tensor, " splits"]]:
        """Normals and thresholds of the splits, level by level; the children of split i are 2i + 1 and 2i + 2."""
        random, count = stream(self.seed, "splits"), 2**self.levels - 1
        normals = torch.randn(count, self.inputs, generator=random, dtype=torch.float64)
        thresholds = self.spread * torch.randn(count, generator=random, dtype=torch.float64)
        return normals / normals.norm(dim=1, keepdim=True), thresholds

    def labels(self, x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """The leaf's label of every input."""
        normals, thresholds = self.splits()
        right = x.double() @ normals.T >= thresholds  # [n, splits]
        node = torch.zeros(len(x), dtype=torch.int64)
        for _ in range(self.levels):
            node = 2 * node + 1 + right.gather(1, node[:, None])[:, 0].long()
        return 1.0 - 2.0 * (node % 2).double()

    def draw(self, n: int, part: str = "train") -> Float[Tensor, "n d"]:
        """Normal inputs; other names of ``part`` are other samples."""
        return torch.randn(n, self.inputs, generator=stream(self.seed, "tree", part), dtype=torch.float64)

    def dataset(self, n: int, part: str = "train", dtype: torch.dtype = torch.float32) -> Dataset:
        """Inputs and labels ``[n, 1]`` of -1 and +1."""
        x = self.draw(n, part)
        options = asdict(self) | {"n": n, "part": part}
        return Dataset("oblique-tree", x.to(dtype), self.labels(x)[:, None].to(dtype), {}, options)
