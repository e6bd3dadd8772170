"""Where a measurement goes: the history in memory, the run folder, and whatever else the user named."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unlazy.runtime import provenance, short_hash
from unlazy.scope.folder import KERNELS, QUANTITIES, Keeper, place_of
from unlazy.scope.history import Array, History
from unlazy.scope.measures import Instruments, Start
from unlazy.scope.probe import Probe
from unlazy.scope.tangent import Measured
from unlazy.scope.told import as_number

START_BYTES = 2**26  # of parameters, kept in the run so that a resumed scope knows where training began
PROBE_BYTES = 2**24  # of inputs, kept in the run so that a page can draw them
ARRAY_NAMES = {"log_paths": "paths"}


class Record:
    """One training's measurements on their way out. ``own``: names that are the scope's, grown by whoever measures."""

    def __init__(self, history: History, keeper: Keeper | None, sinks: Iterable[Any], own: set[str]) -> None:
        self.history, self.keeper, self.sinks, self.own = history, keeper, list(sinks), own
        self.measurements, self._refused = 0, set[str]()

    def write(
        self,
        step: int,
        measured: Measured,
        about: Mapping[str, float],
        *,
        user: Mapping[str, Any] | None = None,
        once: Mapping[str, Array] | None = None,
        start: Mapping[str, Array] | None = None,
    ) -> None:
        """What was measured, the user's numbers and numbers ``about`` the measurement; ``once``, ``start``: of the beginning."""
        scalars, arrays = _split(measured)
        self._add_user(scalars, user or {})
        scalars |= about
        self.history.add(step, scalars, arrays)
        self.measurements += 1 if scalars.keys() & self.own else 0
        if self.keeper is not None:
            curves = {name: np.array([value]) for name, value in scalars.items()}
            kept = {name: array[None] for name, array in {**arrays, **(once or {})}.items()}
            self.keeper.record(step, curves, kept, None if start is None else dict(start))
        for sink in list(self.sinks):
            self._tell(sink, partial(getattr(sink, "write", None) or sink, step, dict(scalars)))

    def leave(self) -> None:
        """Leave the folder as it was found."""
        assert self.keeper is not None
        self.keeper.leave()
        self.keeper = None

    def close(self, error: BaseException | None) -> None:
        """Let folder and sinks go."""
        if self.keeper is not None:
            self.keeper.__exit__(None if error is None else type(error), error, None)
        for sink in self.sinks:
            if hasattr(sink, "close"):
                self._tell(sink, sink.close)

    def _add_user(self, scalars: dict[str, float], user: Mapping[str, Any]) -> None:
        """The user's numbers beside ours, as ``train_NAME`` where a name is taken; what is no number is said once."""
        for name, value in user.items():
            known = name in scalars or (name in self.history.scalars and not name.startswith("train_"))
            clash = known and name in self.own
            number = as_number(value)
            if number is not None:
                scalars[f"train_{name}" if clash else name] = number
            elif name not in self._refused:
                self._refused.add(name)
                warnings.warn(f"{name} is not a number but {value!r}, and is not kept.", stacklevel=10)

    def _tell(self, sink: Any, do: Callable[[], Any]) -> None:
        try:
            do()
        except Exception as error:
            self.sinks = [other for other in self.sinks if other is not sink]
            warnings.warn(f"{type(sink).__name__} failed and gets nothing more: {error!r}", stacklevel=3)


def _split(measured: Measured) -> tuple[dict[str, float], dict[str, Array]]:
    """Numbers, and arrays under the names of the store."""
    scalars = {name: float(value) for name, value in measured.items() if value.ndim == 0}
    arrays = {ARRAY_NAMES.get(name, name): plain(value) for name, value in measured.items() if value.ndim > 0}
    return scalars, {name: array.astype(np.float32) if name in KERNELS else array for name, array in arrays.items()}


def plain(tensor: Tensor) -> Array:
    """As numpy knows it."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).cpu().numpy()


# --- what a run says about itself ------------------------------------------------------------------------------


def basis_of(model: Any, probe: Probe, views: tuple[str, ...], seed: int) -> dict[str, Any]:
    """What makes two scopes the same one; ``model``: a spec, or its description."""
    data = {"name": "probe", "options": {}, "fingerprint": probe.fingerprint}
    return {"model": model, "data": data, "views": list(views), "groups": groups_of(probe), "seed": seed}


def header_of(basis: Mapping[str, Any], instruments: Instruments, budget: float, spec: Any) -> dict[str, Any]:
    """``run.json``."""
    about = {
        "views": basis["views"],
        "budget": budget if np.isfinite(budget) else None,
        "groups": basis["groups"],
        "layers": instruments.layers,
        "left_out": left_out_of(instruments),
        "notes": instruments.notes,
        "rows": rows_of(instruments),
        "probe_kind": instruments.probe.kind,
        "image_shape": instruments.probe.image_shape,
    }
    place, dtype = place_of(instruments.model)
    return {
        "id": short_hash(dict(basis)),
        "kind": "scope",
        "study": None,
        "scale": None,
        "recipe": {"model": basis["model"], "data": basis["data"], "scope": about},
        "members": [{}],
        "model": spec,
        "data": basis["data"],
        "provenance": provenance(str(dtype).removeprefix("torch."), str(place)),
    }


def history_of(instruments: Instruments, *, keep_all: bool) -> History:
    """An empty history that knows what will be measured."""
    probe = instruments.probe
    assert probe.columns is not None
    return History(
        groups_of(probe),
        instruments.layers,
        left_out_of(instruments),
        keep_all=keep_all,
        notes=instruments.notes,
        rows=rows_of(instruments),
        targets=plain(probe.columns),
    )


def probe_arrays(probe: Probe) -> dict[str, Array]:
    """The probe set, which is written at step 0 only."""
    kept = {"probe_y": probe.y.detach().cpu().numpy()}
    if isinstance(probe.x, Tensor) and probe.x.is_floating_point() and _bytes([probe.x]) <= PROBE_BYTES:
        kept["probe_x"] = probe.x.detach().float().cpu().numpy()
    return kept


def start_arrays(start: Start) -> dict[str, Array] | None:
    """Parameters and buffers of the start, where they are small enough to keep."""
    if _bytes([*start.parameters.values(), *start.buffers.values()]) > START_BYTES:
        return None
    named = {f"model/{name}": p for name, p in start.parameters.items()}
    named |= {f"buffer/{name}": b for name, b in start.buffers.items()}
    return {name: plain(tensor) for name, tensor in named.items()}


def left_out_of(instruments: Instruments) -> dict[str, str]:
    """What is missing, by the names of quantities, and why."""
    return {QUANTITIES.get(name, name): why for name, why in instruments.left_out.items()}


def groups_of(probe: Probe) -> dict[str, list[int]]:
    """Sample numbers of every group."""
    return {name: inside.nonzero()[:, 0].tolist() for name, inside in probe.groups.items()}


def rows_of(instruments: Instruments) -> dict[str, list[int]]:
    """The samples that a look takes, where not all."""
    return {look: rows.tolist() for look, rows in instruments.rows.items() if rows is not None}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
