"""What the swap study trains: two presets, six arms, three scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from unlazy.data.dataset import Dataset
from unlazy.runtime import require
from unlazy.studies.halfspace.circle.settings import ARMS, PRESETS, Stack
from unlazy.studies.halfspace.circle.settings import Settings as CircleSettings
from unlazy.studies.settings import all_known, plain_settings
from unlazy.training.fit import Recipe

TRAINED = ("relu", "pwc", "dlgn", "pwc-hard")
FROZEN = ("pwc-frozen", "pwc-frozen-hard")


@dataclass(frozen=True)
class Settings:
    """One scale: ``before`` epochs on the target, then ``after`` epochs with its halves swapped.

    Two controls: the same continuation without the swap, and ``after`` epochs on the swapped target from the start.
    """

    seeds: int
    before: int
    after: int
    width: int = 16
    depth: int = 5
    presets: tuple[str, ...] = ("author", "pilot")
    arms: tuple[str, ...] = TRAINED + FROZEN

    def __post_init__(self) -> None:
        require(self.seeds >= 1 and self.before >= 1, "seeds and epochs must be at least 1.")
        require(
            self.after >= self.before, "train at least as long after the swap as before it, or nothing can be told."
        )
        all_known("presets", self.presets, PRESETS)
        all_known("arms", self.arms, ARMS)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return plain_settings(self)

    def recipe(self, preset: str, arm: str) -> Recipe:
        """The circle study's recipe with every seed twice: two targets side by side."""
        sizes = CircleSettings(self.seeds, self.after, self.after, self.width, self.depth, all_betas=())
        recipe = Stack(preset, arm, sizes).recipe()
        return replace(recipe, members=recipe.members * 2, checkpoint_epochs=self.after, checkpoints_at=(self.before,))


SCALES = {
    # seconds: shapes and plumbing only, no claim is judged from it
    "smoke": Settings(
        seeds=2, before=2, after=3, width=4, depth=2, presets=("pilot",), arms=("relu", "pwc", "pwc-frozen")
    ),
    # under two minutes on two cores
    "desk": Settings(seeds=10, before=60, after=120, presets=("author",), arms=("relu", "pwc", *FROZEN)),
    "paper": Settings(seeds=10, before=200, after=300),
}


def swapped(data: Dataset) -> Dataset:
    """The same points with the targets of opposite points exchanged: each half gets the other's function."""
    half, rest = divmod(len(data), 2)
    require(rest == 0, f"halves of {len(data)} points cannot be swapped; take an even number.")
    return replace(data, y=data.y.roll(half, dims=0), options={**data.options, "swapped": True})
