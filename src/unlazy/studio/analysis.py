"""What takes long to work out from a run: spectra and layouts of neurons, each computed once."""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import StoreError
from unlazy.studio.answers import BadRequest, NotHere
from unlazy.studio.embedding import MOST_SHOWN, evenly, layout
from unlazy.studio.openrun import OpenRun, Stored
from unlazy.studio.probe import probe_of

MOST_STEPS = 60
MOST_POINTS = 600  # of a kernel whose eigenvalues are wanted
OPERATIONS = 4e9  # points cubed, over all steps of a spectrum: about a second
EIGENVALUES = 50


class Once:
    """A memory for the last ``most`` results; whoever asks for one that is being made waits for it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._making: dict[Hashable, Lock] = {}
        self._lock = Lock()

    def __call__(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result under ``key``, made now if it is not known."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            turn = self._making.setdefault(key, Lock())
        with turn:
            with self._lock:
                if key in self._kept:
                    return self._kept[key]
            try:
                value = make()
            finally:
                with self._lock:
                    self._making.pop(key, None)
            with self._lock:
                self._kept[key] = value
                while len(self._kept) > self.most:
                    self._kept.popitem(last=False)
            return value


def some_steps(opened: OpenRun, quantity: str, member: int, most: int = MOST_STEPS) -> list[int]:
    """At most so many of the steps at which a quantity was stored, first and last among them."""
    every = opened.steps(quantity, member)
    if not every:
        raise NotHere(f"{opened.key} has no {quantity!r}.")
    return [every[place] for place in evenly(len(every), most)]


@dataclass(frozen=True)
class Layouts:
    """Units on a plane: ``points [T, shown, 2]`` at ``steps``, ``shown`` among so many ``units``."""

    steps: list[int]
    units: int
    shown: NDArray[np.int64]
    points: NDArray[np.float32]
    problems: list[str]


def layouts(opened: OpenRun, quantity: str, member: int) -> Layouts:
    """Neurons on a plane at every step, without jumps; units beyond the first thousand are thinned evenly."""
    frames: list[NDArray[Any]] = []
    steps, problems = [], []
    for step in some_steps(opened, quantity, member):
        try:
            values = opened.stored(quantity, step, member).read()
            frame = values.reshape(-1, values.shape[-1])
            if not frames or frame.shape == frames[0].shape:
                frames.append(frame)
                steps.append(step)
        except (StoreError, ValueError, IndexError) as error:
            problems.append(str(error))
    if not frames or len(frames[0]) < 2:
        raise NotHere(f"{quantity} of {opened.key} cannot be drawn as points. {' '.join(problems)}".strip())
    shown = evenly(len(frames[0]), MOST_SHOWN)
    return Layouts(steps, len(frames[0]), shown, layout([frame[shown] for frame in frames]), problems)


def embedding(opened: OpenRun, quantity: str, member: int) -> dict[str, Any]:
    """The same as JSON."""
    found = layouts(opened, quantity, member)
    return {
        "steps": found.steps,
        "units": found.units,
        "shown": found.shown.tolist(),
        "points": base64.b64encode(found.points.astype("<f4").tobytes()).decode(),
        "problems": found.problems,
    }


def _kernels(
    opened: OpenRun, quantity: str, member: int
) -> Iterator[tuple[int, Stored, NDArray[np.float64], NDArray[np.float64] | None]]:
    """Step, file, kernel and targets, at as many steps as there is time for; large kernels thinned."""
    side = min(MOST_POINTS, _side(opened, quantity, member))
    for step in some_steps(opened, quantity, member, most=int(np.clip(OPERATIONS / side**3, 2, MOST_STEPS))):
        try:
            stored = opened.stored(quantity, step, member)
            kernel = stored.read()
        except (StoreError, ValueError):
            continue  # the run page names files that cannot be read
        if kernel.ndim != 2 or kernel.shape[0] != kernel.shape[1]:
            raise BadRequest(f"{quantity} is not square; it has no spectrum.")
        rows = evenly(len(kernel), MOST_POINTS)
        targets = probe_of(opened).targets(len(kernel), quantity)
        few = kernel[np.ix_(rows, rows)].astype(np.float64)
        yield step, stored, few, None if targets is None else targets[rows]


def spectrum(opened: OpenRun, quantity: str, member: int, known: Once) -> dict[str, Any]:
    """Leading eigenvalues over the trace and alignment with the targets, at every step; ``known``: of files seen before."""
    steps, values, alignment = [], [], []
    for step, stored, kernel, targets in _kernels(opened, quantity, member):
        try:
            values.append(known(stored.stamp(), partial(eigenvalues, kernel)))
        except np.linalg.LinAlgError:
            continue
        alignment.append(None if targets is None else centred_alignment(kernel, targets))
        steps.append(step)
    aligned = alignment if any(value is not None for value in alignment) else None
    return {"steps": steps, "values": values, "alignment": aligned}


def spectra(opened: OpenRun, quantity: str, member: int) -> tuple[list[int], NDArray[np.float64]]:
    """Steps and leading eigenvalues over the trace ``[T, rank]``."""
    found = spectrum(opened, quantity, member, Once(1))
    return found["steps"], np.array(found["values"], np.float64)


def alignments(opened: OpenRun, quantity: str, member: int) -> tuple[list[int], list[float | None]]:
    """Steps and centred alignment with the targets, without the cost of eigenvalues."""
    found = [
        (step, None if targets is None else centred_alignment(kernel, targets))
        for step, _, kernel, targets in _kernels(opened, quantity, member)
    ]
    return [step for step, _ in found], [value for _, value in found]


def _side(opened: OpenRun, quantity: str, member: int) -> int:
    """Points of a kernel, as far as can be told from the head of its last file."""
    last = some_steps(opened, quantity, member)[-1]
    try:
        shape, _ = opened.stored(quantity, last, member).shape()
    except StoreError:
        return MOST_POINTS
    return max(1, shape[-1]) if shape else 1


def eigenvalues(kernel: NDArray[np.float64]) -> list[float]:
    """The leading eigenvalues of a kernel over its trace, largest first."""
    finite = np.where(np.isfinite(kernel), kernel, 0)
    values = np.linalg.eigvalsh((finite + finite.T) / 2)[::-1][:EIGENVALUES]
    trace = float(np.trace(finite))
    return [float(f"{value:.6g}") for value in values / (trace if trace > 0 else 1.0)]


def centred_alignment(kernel: NDArray[np.float64], targets: NDArray[np.float64]) -> float | None:
    """Cosine between the centred kernel and the centred kernel of the targets."""
    finite = np.where(np.isfinite(kernel), kernel, 0)
    centred = finite - finite.mean(0) - finite.mean(1)[:, None] + finite.mean()
    y = targets - targets.mean(0)
    norm = float(np.linalg.norm(centred) * np.linalg.norm(y.T @ y))
    return float(np.einsum("ij,io,jo->", centred, y, y)) / norm if norm > 0 else None
