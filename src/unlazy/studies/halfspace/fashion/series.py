"""What each stack showed over training, read from its run and kept in one small file."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import StoreError
from unlazy.store import Run, write_file
from unlazy.studies.halfspace.fashion.settings import Stack, Task

MIDDLE = 0.72  # the paper's middle point: test accuracy on the easy classes
CURVES = ("test_accuracy", "test_accuracy_hard_gates", "test_paths", "test_log_paths")
TRAIN = ("train_accuracy", "train_accuracy_hard_gates")
KERNELS = ("overlap", "tangent")
MOMENTS = ("start", "middle", "end")
FORMAT = 1
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """What one stack showed. T looks, S members, 10 classes.

    ``arrays``: the curves ``[T, S, 10]``; training accuracies at the end ``[1, S, 10]``; ``tangent_diagonal [K, S, 10]`` and
    KERNEL_contrast, KERNEL_spread ``[K, S]`` at the K looks with kernels; the class-averaged kernels ``[3, S, 10, 10]`` at the
    start, each member's middle (NaN: never) and the end.
    """

    run: str
    tasks: tuple[Task, ...]
    epochs: Array
    kernel_epochs: Array
    arrays: Mapping[str, Array]

    @property
    def easy(self) -> NDArray[np.bool_]:
        """``[S, 10]``: the classes each member finds easy."""
        return np.array([[c in task.easy for c in range(10)] for task in self.tasks])

    def of(self, labels: str) -> list[int]:
        """Numbers of the members that learn these labels, in order of seed."""
        return [index for index, task in enumerate(self.tasks) if task.labels == labels]

    def halves(self, name: str) -> tuple[Array, Array]:
        """Mean of a quantity over the easy and over the hard classes of every member, ``[T, S]`` each."""
        return half(self.arrays[name], self.easy), half(self.arrays[name], ~self.easy)

    def middle(self) -> list[int | None]:
        """Per member the first look at which the easy classes are at 72 % (test)."""
        return [_first(column >= MIDDLE) for column in self.halves("test_accuracy")[0].T]


def half(values: Array, inside: NDArray[np.bool_]) -> Array:
    """Mean over the classes of a half, ``[..., S, 10] -> [..., S]``."""
    mean: Array = np.where(inside, values, 0.0).sum(-1) / inside.sum(-1)
    return mean


# --- class-averaged kernels ----------------------------------------------------------------------


def contrast(kernel: Array, easy: NDArray[np.bool_]) -> Array:
    """How much a class-averaged kernel ``[..., 10, 10]`` falls into two blocks: 0 for none, about 1 for two separate ones.

    Mean over pairs of different classes of one half, less the mean over pairs across the halves, in units of the mean diagonal.
    """
    same = easy[..., :, None] == easy[..., None, :]
    different = ~np.eye(kernel.shape[-1], dtype=bool)
    blocks: Array = _pair_mean(kernel, same & different) - _pair_mean(kernel, ~same)
    return blocks / np.diagonal(kernel, axis1=-2, axis2=-1).mean(-1)


def spread(kernel: Array) -> Array:
    """Half the range of the entries over their mean: 0 for a constant kernel."""
    result: Array = (kernel.max((-2, -1)) - kernel.min((-2, -1))) / (2 * kernel.mean((-2, -1)))
    return result


def easy_sum(kernel: Array, easy: NDArray[np.bool_]) -> Array:
    """Sum of the easy classes' diagonal entries, of 100 in all: the paper's heat map has 72.9 in mid-training."""
    diagonal = np.diagonal(kernel, axis1=-2, axis2=-1)
    result: Array = 100 * np.where(easy, diagonal, 0.0).sum(-1) / diagonal.sum(-1)
    return result


def _pair_mean(kernel: Array, pairs: NDArray[np.bool_]) -> Array:
    mean: Array = np.where(pairs, kernel, 0.0).sum((-2, -1)) / pairs.sum((-2, -1))
    return mean


# --- from a run ----------------------------------------------------------------------------------


def collect(stack: Stack, run: Run) -> Series:
    """Everything worth keeping of a run."""
    unit = -(-stack.settings.images // stack.settings.batch)
    steps, kernel_steps = run.array_steps(CURVES[0]), run.array_steps(KERNELS[0])
    arrays = {name: _stacked(run, name, steps) for name in CURVES}
    arrays |= {name: _stacked(run, name, steps[-1:]) for name in TRAIN}
    arrays["tangent_diagonal"] = _stacked(run, "tangent_diagonal", kernel_steps)
    epochs, kernel_epochs = _single(np.array(steps) / unit), _single(np.array(kernel_steps) / unit)
    series = Series(run.id, tuple(stack.tasks()), epochs, kernel_epochs, arrays)
    shown = [[steps[0], steps[-1] if look is None else steps[look], steps[-1]] for look in series.middle()]
    for name in KERNELS:
        kernels = _stacked(run, name, kernel_steps)  # [K, S, 10, 10]
        arrays[f"{name}_contrast"] = _single(contrast(kernels, series.easy))
        arrays[f"{name}_spread"] = _single(spread(kernels))
        kept = np.full((len(MOMENTS), *kernels.shape[1:]), np.nan)
        for member, (moments, look) in enumerate(zip(shown, series.middle(), strict=True)):
            for row, step in enumerate(moments):
                if step in kernel_steps and not (row == 1 and look is None):
                    kept[row, member] = kernels[kernel_steps.index(step), member]
        arrays[name] = kept
    return series


def _stacked(run: Run, name: str, steps: Sequence[int]) -> Array:
    return _single(np.array([run.array(name, step) for step in steps]))


def _single(values: Array) -> Array:
    """Rounded as the file rounds: the same numbers before it is written and after it is read."""
    return values.astype(np.float32).astype(np.float64)


def _first(reached: NDArray[np.bool_]) -> int | None:
    return int(reached.argmax()) if reached.any() else None


# --- the compact file ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """All series of one scale with what made them: enough to judge and draw without the runs."""

    scale: str
    settings: dict[str, Any]
    provenance: dict[str, Any]
    series: dict[str, Series]

    def save(self, path: Path) -> None:
        """One NPZ file: a JSON header and 32-bit arrays."""
        stacks = {
            key: {"run": one.run, "tasks": [[task.labels, list(task.easy), task.seed] for task in one.tasks]}
            for key, one in self.series.items()
        }
        header = {"format": FORMAT, "scale": self.scale, "settings": self.settings, "provenance": self.provenance}
        text = json.dumps(header | {"stacks": stacks}, allow_nan=False)
        arrays = {"header": np.frombuffer(text.encode(), dtype=np.uint8)}
        for key, one in self.series.items():
            named = {"epochs": one.epochs, "kernel_epochs": one.kernel_epochs, **one.arrays}
            arrays |= {f"{key}/{name}": values.astype(np.float32) for name, values in named.items()}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        write_file(path, buffer.getvalue())

    @classmethod
    def load(cls, path: Path) -> Measured:
        """The inverse of ``save``."""
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
                header = json.loads(file["header"].tobytes())
                arrays = {name: file[name].astype(np.float64) for name in file.files if name != "header"}
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']}")
            series = {key: cls._series(key, kept, arrays) for key, kept in header["stacks"].items()}
        except (OSError, BadZipFile, ValueError, KeyError, EOFError) as error:
            raise StoreError(f"{path} is missing or damaged ({error}); delete it to measure again.") from error
        return cls(header["scale"], header["settings"], header["provenance"], series)

    @staticmethod
    def _series(key: str, kept: Mapping[str, Any], arrays: Mapping[str, Array]) -> Series:
        tasks = tuple(Task(labels, tuple(easy), seed) for labels, easy, seed in kept["tasks"])
        mine = {name.removeprefix(f"{key}/"): values for name, values in arrays.items() if name.startswith(f"{key}/")}
        return Series(kept["run"], tasks, mine.pop("epochs"), mine.pop("kernel_epochs"), mine)
