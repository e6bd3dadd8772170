"""The run folder of a scope: its writer, and taking up what an earlier scope began there."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unlazy.runtime import StoreError
from unlazy.scope.gates import open_gates
from unlazy.scope.measures import Instruments, Start
from unlazy.scope.probe import Probe
from unlazy.scope.verdict import Verdict
from unlazy.store import FORMAT, Run, Writer, write_file

KERNELS = ("tangent", "overlap")
QUANTITIES = {"gates": "gate_flips", "linear": "linearisation_error", "parameters": "parameter_motion"}


class Keeper(Writer):
    """The writer of a scope's folder. A scope has no say in the user's training, so nothing it saw is ever measured again:
    opening the folder once more keeps all complete measurements and goes on behind them, finished or not. ``overwrite``: or else
    drops them and begins anew.
    """

    def __init__(self, folder: Path, header: dict[str, Any], *, overwrite: bool = False) -> None:
        self._overwrite, self._status_before, self._new_header = overwrite, b"", {"format": FORMAT, **header}
        super().__init__(folder, header)

    def _resume(self, wanted: str) -> tuple[int, dict[str, Any]] | None:
        run = Run(self.folder)
        if self._overwrite:
            self._begin_anew(run)
            return None
        status = self.folder / "status.json"
        self._status_before = status.read_bytes() if status.exists() else b""
        if run.id != wanted:
            raise StoreError(
                f"{self.folder} holds another scope ({run.id}, not {wanted}): another model, probe set or choice of views. "
                "Choose another folder, or replace that one with Scope(..., overwrite=True)."
            )
        lines = run.lines
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists():
            os.truncate(metrics, lines[-1].end if lines else 0)
        named = {self.folder / "arrays" / f"{name}.npy" for line in lines for name in line.arrays.values()}
        named |= {self.folder / "checkpoints" / f"{line.checkpoint}.safetensors" for line in lines if line.checkpoint}
        self._sweep(named)
        return (lines[-1].step, {}) if lines else None

    def _begin_anew(self, run: Run) -> None:
        """Drop what an earlier scope kept here; the numbers go first, so that nobody reads them under the new name."""
        if run.header.get("kind") != "scope":
            raise StoreError(
                f"{self.folder} holds a run that no scope wrote, so it is not replaced. Choose another folder."
            )
        for name in ("metrics.jsonl", "verdict.json", "status.json"):
            (self.folder / name).unlink(missing_ok=True)
        self._start(self._new_header)
        self._sweep(set())

    def leave(self) -> None:
        """Go away as if the folder had not been opened."""
        if self._status_before:
            write_file(self.folder / "status.json", self._status_before)
        self.__exit__(None, None, None)

    def keep(self, verdict: Verdict) -> None:
        """``verdict.json``, replaced."""
        write_file(self.folder / "verdict.json", (json.dumps(verdict.to_dict(), indent=1) + "\n").encode())


def earlier(folder: Path, wanted: str) -> Run | None:
    """The run of an earlier scope with the same recipe that got as far as its first measurement, if there is one."""
    if not (folder / "run.json").exists():
        return None
    run = Run(folder)
    return run if run.id == wanted and run.lines else None


def resumed_instruments(before: Run, model: nn.Module, probe: Probe, views: tuple[str, ...], seed: int) -> Instruments:
    """Instruments whose start is the one of an earlier scope, read from its run."""
    place = place_of(model)[0]
    left_out = dict(before.header["recipe"]["scope"]["left_out"])
    by_look = {quantity: look for look, quantity in QUANTITIES.items()}
    left_out = {by_look.get(name, name): why for name, why in left_out.items()}
    rows: dict[str, Tensor | None] = {
        look: torch.tensor(some) for look, some in before.header["recipe"]["scope"]["rows"].items()
    }
    start = Start()
    kept = before.lines[0].checkpoint
    if kept is not None:
        tensors = {name: torch.from_numpy(array.copy()) for name, array in before.checkpoint(0).items()}
        own = dict(model.named_parameters())
        buffers = dict(model.named_buffers())
        start.parameters = {n: tensors[f"model/{n}"].to(p) for n, p in own.items() if f"model/{n}" in tensors}
        start.buffers = {n: tensors[f"buffer/{n}"].to(b) for n, b in buffers.items() if f"buffer/{n}" in tensors}
    for name in KERNELS:
        if before.array_steps(name):
            setattr(start, name, torch.from_numpy(before.array(name, 0)[0]).double().to(place))
    start.output = torch.from_numpy(before.array("output", 0)[0]).to(place)
    instruments = Instruments(model, probe, views, seed, start=start, left_out=left_out, rows=rows)
    for name in left_out:
        instruments.looks.pop(name, None)
    if kept is None:
        too_large = "the parameters of the start were too large to keep, and this scope was resumed"
        for name in ("parameters", "linear", "gates"):
            if instruments.looks.pop(name, None):
                instruments.left_out[name] = too_large
    elif "gates" in instruments.looks:
        early = copy.deepcopy(model)
        with torch.no_grad():
            early.load_state_dict({**start.parameters, **start.buffers}, strict=False)
            start.gates = open_gates(early, instruments.part("gates").x)
    for name in KERNELS:
        steps = before.array_steps(name)
        if steps and name in instruments.looks:
            instruments.remember(name, steps[-1], torch.from_numpy(before.array(name, steps[-1])[0]).double().to(place))
    return instruments


def place_of(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and precision of a model: those of its first real parameter."""
    first = next(p for p in model.parameters() if p.is_floating_point())
    return first.device, first.dtype
