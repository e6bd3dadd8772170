"""What is copied when, and how fresh experts are trained under it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from unlazy.models.net import GatedNet
from unlazy.runtime import require, short_hash
from unlazy.store import Run
from unlazy.studies.halfspace.moments import ARMS, PAPER_EPOCHS, Nets, Networks, plateau_epochs, stack_at
from unlazy.training.finished import Retraining, retrain_experts

STUDY = "features-finished"
PLATEAU, END = "plateau", "end"


@dataclass(frozen=True)
class Settings(Networks):
    """One scale of the study. ``hard_arms``: arms whose gates are copied a second time, as half-spaces."""

    retrain_epochs: int = field(kw_only=True)
    copied: tuple[int, ...] = PAPER_EPOCHS
    arms: tuple[str, ...] = ("pwc", "dlgn", "relu", "pwc-large", "dlgn-large", "relu-large")
    hard_arms: tuple[str, ...] = ("pwc", "dlgn")
    factor: float = 2.0
    learned: float = 0.02
    ridge: float = 1e-3
    kernel_samples: int = 256

    def __post_init__(self) -> None:
        require(
            all(epoch < self.epochs for epoch in self.copied),
            "gates are copied before the end; the end comes by itself.",
        )


SCALES = {
    # seconds: shapes and plumbing only, no claim is judged from it
    "smoke": Settings(
        seeds=2,
        epochs=4,
        retrain_epochs=3,
        copied=(0, 1, 3),
        width=4,
        depth=3,
        presets=("author",),
        arms=("pwc", "relu"),
        hard_arms=("pwc",),
        kernel_samples=50,
    ),
    # under two minutes on two cores
    "desk": Settings(
        seeds=10,
        epochs=200,
        retrain_epochs=200,
        copied=(0, 3, 10, 30, 100),
        arms=("pwc", "relu"),
        hard_arms=("pwc",),
    ),
    "paper": Settings(seeds=20, epochs=600, retrain_epochs=300),
}


@dataclass(frozen=True)
class Copies:
    """All copies of one stack of networks, with one kind of gates: one retraining."""

    nets: Nets
    kind: str
    settings: Settings

    @property
    def key(self) -> str:
        return self.nets.key + ("-hard" if self.kind == "hard" else "")

    @property
    def label(self) -> str:
        return self.nets.label + (", copied as hard gates" if self.kind == "hard" else "")

    @property
    def moments(self) -> list[str]:
        """Names of the copies, in the order in which they are stacked."""
        return [*(str(epoch) for epoch in self.settings.copied), PLATEAU, END]

    def retraining(self) -> Retraining:
        wanted = self.settings
        return Retraining(
            epochs=wanted.retrain_epochs,
            lr=self.nets.lr,
            batch=self.nets.batch,
            gates=self.kind,
            factor=wanted.factor,
            learned=wanted.learned,
            ridge=wanted.ridge,
            kernel_samples=wanted.kernel_samples,
        )

    def networks(self, runs: Path) -> list[GatedNet]:
        """The networks at every moment; a seed that never came down to the plateau is copied at the end instead."""
        run, last = Run(self.nets.folder(runs)), self.nets.epochs
        plateau = [last if epoch is None else epoch for epoch in plateau_epochs(self.nets, run)]
        moments: list[int | list[int]] = [*self.settings.copied, plateau, last]
        return [stack_at(self.nets, run, epochs) for epochs in moments]

    def folder(self, runs: Path) -> Path:
        recipe = self.nets.recipe().to_dict(self.nets.data(), self.nets.measures())
        wanted = {"networks": recipe, "moments": self.moments, "retraining": asdict(self.retraining())}
        return runs / STUDY / f"{self.key}-{short_hash(wanted)}"

    def retrain(self, runs: Path, scale: str) -> None:
        """Fresh experts under every copy; from wherever the run stands to its end."""
        retrain_experts(
            self.networks(runs), self.nets.data(), self.retraining(), self.folder(runs), study=STUDY, scale=scale
        )


def all_copies(settings: Settings) -> list[Copies]:
    """Every retraining of the study."""
    soft = [Copies(nets, "as trained", settings) for nets in settings.networks()]
    return soft + [Copies(nets, "hard", settings) for nets in settings.networks() if nets.arm in settings.hard_arms]


def is_large(arm: str) -> bool:
    return ARMS[arm].start == "he"
