"""Which studies there are, without importing any of them (or torch)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

from unlazy.claims.nearest import nearest
from unlazy.runtime import InputError

SCALES = ("smoke", "desk", "paper")


@dataclass(frozen=True)
class StudyEntry:
    """A study by name: its paper, one line of help, and the module that has ``reproduce``."""

    name: str
    paper: str
    help: str
    module: str

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


STUDIES = (
    StudyEntry(
        "circle",
        "half-space",
        "Half-spaces turn toward the easy half of a circle (Figures 2-6, 9, 10; claims C7-C15).",
        "unlazy.studies.halfspace.circle.study",
    ),
    StudyEntry(
        "theorems",
        "half-space",
        "Path sums, overlap, path regions and frozen gates, exactly (Figure 1; claims C1-C6, C26).",
        "unlazy.studies.halfspace.theorems.study",
    ),
    StudyEntry(
        "fashion",
        "half-space",
        "Do paths gather on easily labelled classes of Fashion-MNIST, or on certain images? (Figures 7, 11-16; C16-C19).",
        "unlazy.studies.halfspace.fashion.study",
    ),
    StudyEntry(
        "features-finished",
        "half-space",
        "When are the gates finished? Copied at seven moments, frozen, fresh experts trained on them (C27).",
        "unlazy.studies.halfspace.finished.study",
    ),
    StudyEntry(
        "kernel-attribution",
        "half-space",
        "What moves the tangent kernel: the gates, the weights, or both? (C28).",
        "unlazy.studies.halfspace.attribution.study",
    ),
    StudyEntry(
        "spectral-bias",
        "half-space",
        "Does a fixed kernel learn the easy half first as well? (C29).",
        "unlazy.studies.halfspace.spectral.study",
    ),
    StudyEntry(
        "failures",
        "half-space",
        "Where DLGNs are said to fail: fast targets, exclusive-or, small data, with ReLU nets beside them (F1-F3).",
        "unlazy.studies.halfspace.failures.study",
    ),
    StudyEntry(
        "quadratic",
        "half-space",
        "Quadratic against linear gates at the same number of parameters (F4).",
        "unlazy.studies.halfspace.quadratic.study",
    ),
    StudyEntry(
        "swap",
        "half-space",
        "The halves of the circle change places in mid-training: who follows? (F6).",
        "unlazy.studies.halfspace.swap.study",
    ),
    StudyEntry(
        "table1",
        "half-space",
        "Convolutional networks on CIFAR-10: ReLU, gated, linear, tangent features, costs (Table 1; C20-C23, C25, F5).",
        "unlazy.studies.halfspace.tables.table1",
    ),
    StudyEntry(
        "table2",
        "half-space",
        "ResNet-34 and ResNet-110 on CIFAR with soft and hard gates (Table 2; C24).",
        "unlazy.studies.halfspace.tables.table2",
    ),
    StudyEntry(
        "lemmas",
        "emergence",
        "Explicit network, first gradient, and what each step says of each pattern (Lemmas 4-6; B1-B4).",
        "unlazy.studies.emergence.lemmas",
    ),
    StudyEntry(
        "weights",
        "emergence",
        "Weights gather on the sum of relevant patterns in two steps (Figure 2; B5, B6).",
        "unlazy.studies.emergence.weights",
    ),
    StudyEntry(
        "fixed-features",
        "emergence",
        "A network that learns features beside the best fixed ones (Figure 1, Theorem 2; B7-B10).",
        "unlazy.studies.emergence.fixed_features.study",
    ),
    StudyEntry(
        "clusters",
        "emergence",
        "Do weights on MNIST 0/1, and on CIFAR-10, gather into two directions? (Figure 3; B11).",
        "unlazy.studies.emergence.clusters",
    ),
    StudyEntry(
        "teacher-student",
        "emergence",
        "A student of images mixed with noise: which part does it learn? (Figure 4; B12).",
        "unlazy.studies.emergence.teacher_student",
    ),
    StudyEntry(
        "zoo",
        "emergence",
        "Planted features of six kinds: who finds them, from how many samples? Networks, DLGN, kernels, feature machines.",
        "unlazy.studies.emergence.zoo.study",
    ),
    StudyEntry(
        "penalties",
        "tangent",
        "What adaptation makes of a penalty (Figure 2; L4, L11).",
        "unlazy.studies.tangent.penalties",
    ),
    StudyEntry(
        "adaptive",
        "tangent",
        "Both theorems against direct minimisation, and on digits (L1-L3, L5, L7).",
        "unlazy.studies.tangent.adaptive",
    ),
    StudyEntry(
        "label-alignment",
        "tangent",
        "Kernels turn toward what is learned (Figures 1, 3; L6, L8, L9).",
        "unlazy.studies.tangent.label_alignment.study",
    ),
    StudyEntry(
        "sample-size",
        "tangent",
        "Fixed and adaptive tangent features and the network, on small training sets (Figure 4 of arXiv v2; L10).",
        "unlazy.studies.tangent.sample_size.study",
    ),
    StudyEntry(
        "difficulty",
        "tangent",
        "Do wrongly labelled points bend the kernel most? Scored beside loss and gradient norm.",
        "unlazy.studies.tangent.difficulty",
    ),
    StudyEntry(
        "calibration",
        "scope",
        "Where the verdict's thresholds come from: networks beside their linearised twins.",
        "unlazy.studies.scope.calibration.study",
    ),
)


class Reproduce(Protocol):
    """What a study module offers: train, measure, judge, draw. Returns the results it wrote."""

    def __call__(
        self,
        scale: str,
        *,
        runs: Path,
        results: Path,
        seeds: int | None,
        workers: int,
        progress: Callable[[str, int, int], None],
    ) -> dict[str, Any]: ...


def find_studies(name: str) -> list[StudyEntry]:
    """The study of this name, or all studies of the paper of this name."""
    found = [entry for entry in STUDIES if name in (entry.name, entry.paper)]
    if not found:
        known = sorted({entry.name for entry in STUDIES} | {entry.paper for entry in STUDIES})
        meant = nearest(name, known)
        hint = f"did you mean {meant}? `unlazy studies` lists all" if meant else f"there is: {', '.join(known)}"
        raise InputError(f"there is no study or paper {name!r}; {hint}.")
    return found


def check_scale(scale: str) -> str:
    if scale not in SCALES:
        raise InputError(f"scale must be one of {', '.join(SCALES)}; got {scale!r}.")
    return scale


SettingsOf = TypeVar("SettingsOf")


def settings_of(scales: Mapping[str, SettingsOf], scale: str, seeds: int | None, *fields: str) -> SettingsOf:
    """The settings of a scale, with another number of seeds (in ``fields``, or ``seeds``) if one is given."""
    settings = scales[check_scale(scale)]
    if seeds is None:
        return settings
    if seeds < 1:
        raise InputError(f"seeds must be at least 1, got {seeds}.")
    return replace(settings, **dict.fromkeys(fields or ("seeds",), seeds))  # type: ignore[type-var]
