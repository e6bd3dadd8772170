"""What is trained, on which split it counts, and what the words mean: all fixed before any run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from unlazy.runtime import require

LAZY_GAP = 0.1
"""Lazy: the linearised network's predictions account for at least 99 % of the squared change of the function."""
RICH_GAP = 0.5
"""Rich: they miss at least a quarter of it. Mixed: between the two."""

NETS = ("relu", "dlgn", "conv", "transformer")
DATA = ("digits", "patterns", "planted", "text")
FITTED = (("relu", "transformer"), ("digits", "patterns"))
"""Thresholds see these networks on these data sets, and nothing else."""
SCORED = (("dlgn", "conv"), ("planted", "text"))
"""The verdict is scored on these: neither the network nor the data set was seen."""

ALPHAS = (0.1, 0.4, 2.0, 8.0, 32.0, 128.0, 512.0)
VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrow": {"width": 0.5},
    "wide": {"width": 4.0},
    "small start": {"init": 0.5},
    "large start": {"init": 2.0},
    "slow": {"rate": 0.1},
    "fast": {"rate": 1.5},
    "adam slow": {"optimiser": "adam", "rate": 1e-4},
    "adam": {"optimiser": "adam", "rate": 1e-3},
    "adam fast": {"optimiser": "adam", "rate": 1e-2},
    "ntk": {"parametrisation": "ntk"},
    "mup": {"parametrisation": "mup"},
}
"""The network as it is (no output scale, its start not subtracted), one thing changed at a time."""


@dataclass(frozen=True)
class Cell:
    """One training and its linearised twin.

    ``alpha``: what is trained is alpha (f - f_0) under the loss divided by alpha^2; ``None``: f itself. ``width`` and ``init``
    multiply the network's own. ``rate``: with ``gd`` (full batch, momentum 0.9) in units of 1 / largest curvature at the
    start, with ``adam`` the learning rate itself.
    """

    net: str
    data: str
    alpha: float | None = None
    width: float = 1.0
    init: float = 1.0
    optimiser: str = "gd"
    rate: float = 0.5
    parametrisation: str = "standard"
    seed: int = 0
    steps: int = 200

    def __post_init__(self) -> None:
        require(self.net in NETS and self.data in DATA, f"no such cell: {self.net} on {self.data}.")
        require(self.optimiser in ("gd", "adam"), f"optimiser is gd or adam, got {self.optimiser!r}.")
        dense = self.net in ("relu", "dlgn")
        require(dense or self.parametrisation == "standard", f"{self.net} has the standard parametrisation only.")
        one_rate = self.optimiser == "gd" or self.parametrisation == "standard"
        require(one_rate, "the linearised twin has one learning rate; take gd for other parametrisations.")

    @property
    def role(self) -> str:
        """``fit``, ``score``, or ``between``: one of network and data set is on each side."""
        for role, (nets, sets) in (("fit", FITTED), ("score", SCORED)):
            if self.net in nets and self.data in sets:
                return role
        return "between"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Settings:
    """``alphas`` on every network and data set; ``variations`` where cells are fitted or scored."""

    alphas: tuple[float, ...] = ALPHAS
    variations: tuple[str, ...] = tuple(VARIATIONS)
    nets: tuple[str, ...] = NETS
    data: tuple[str, ...] = DATA
    steps: int = 200
    seeds: int = 1
    widths: tuple[int, ...] = (32, 64, 128, 256, 512)
    width_seeds: int = 10
    width_steps: int = 200

    def cells(self) -> Iterator[Cell]:
        """Every training of the study, in a fixed order."""
        for net in self.nets:
            for data in self.data:
                for seed in range(self.seeds):
                    start = Cell(net, data, seed=seed, steps=self.steps)
                    yield from (replace(start, alpha=alpha) for alpha in self.alphas)
                    if start.role != "between":
                        yield from (replace(start, **VARIATIONS[name]) for name in self._possible(net))

    def _possible(self, net: str) -> list[str]:
        dense = net in ("relu", "dlgn")
        return [name for name in self.variations if dense or "parametrisation" not in VARIATIONS[name]]


SCALES = {
    "smoke": Settings(
        alphas=(0.4, 128.0),
        variations=("adam",),
        nets=("relu", "dlgn"),
        data=("patterns", "planted"),
        steps=15,
        widths=(16, 64),
        width_seeds=2,
        width_steps=10,
    ),
    "desk": Settings(nets=("relu", "dlgn"), data=("patterns", "planted"), variations=("plain", "adam"), steps=150),
    "paper": Settings(),
}
