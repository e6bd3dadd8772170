"""The run folder of a scope: its writer, its header, and the arrays it holds besides measurements."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from unlazy.runtime import StoreError, provenance, short_hash
from unlazy.scope.measurements import Measurements, Start, to_numpy
from unlazy.scope.probe_set import ProbeSet
from unlazy.scope.run_origin import run_origin
from unlazy.scope.user_model import device_and_dtype
from unlazy.store import FORMAT, Run, Writer, write_file

START_BYTES = 2**26  # of parameters, kept in the run so that a resumed scope knows where training began
LONGEST_TEXT = 300  # characters of the text of a sample
PROBE_BYTES = 2**24  # of inputs, kept in the run so that a page can draw them


class ScopeWriter(Writer):
    """Writes the run folder of a scope. An existing run of the same scope is continued, finished or not, and keeps all complete
    measurements: a scope cannot repeat the user's training. ``overwrite``: drop the existing run and begin anew.
    """

    def __init__(
        self,
        folder: Path,
        header: dict[str, Any],
        *,
        overwrite: bool = False,
        tags: Iterable[str] = (),
        notes: str = "",
    ) -> None:
        self._overwrite, self._status_before, self._new_header = overwrite, b"", {"format": FORMAT, **header}
        super().__init__(folder, header)
        if (tags or notes) and not (folder / "labels.json").exists():  # else people may have changed them since
            Run(folder).set_labels(tags=list(tags), notes=notes)

    def _resume(self, wanted: str) -> tuple[int, dict[str, Any]] | None:
        run = Run(self.folder)
        if self._overwrite:
            self._discard_run(run)
            return None
        status = self.folder / "status.json"
        self._status_before = status.read_bytes() if status.exists() else b""
        wanted = identity_hash(self._new_header)
        if identity_hash(run.header) != wanted:
            raise StoreError(
                f"{self.folder} holds another scope ({identity_hash(run.header)}, not {wanted}): another model, probe set or "
                "choice of views. Choose another folder, or replace that one with Scope(..., overwrite=True)."
            )
        lines = run.lines
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists():
            os.truncate(metrics, lines[-1].end if lines else 0)
        named = {self.folder / "arrays" / f"{name}.npy" for line in lines for name in line.arrays.values()}
        named |= {self.folder / "checkpoints" / f"{line.checkpoint}.safetensors" for line in lines if line.checkpoint}
        self._delete_unnamed_files(named)
        return (max(line.step for line in lines), {}) if lines else None

    def _discard_run(self, run: Run) -> None:
        """Delete the run of an earlier scope; its numbers go first, so that nobody takes them for those of the new run."""
        if run.header.get("kind") != "scope":
            raise StoreError(
                f"{self.folder} holds a run that no scope wrote, so it is not replaced. Choose another folder."
            )
        if self.folder.resolve() != self.folder.absolute():
            raise StoreError(
                f"{self.folder} leads through a link and is not replaced. The run itself is {self.folder.resolve()}."
            )
        for name in ("metrics.jsonl", "verdict.json", "status.json", "labels.json"):
            (self.folder / name).unlink(missing_ok=True)
        self._start(self._new_header)
        self._delete_unnamed_files(set())

    def close_unchanged(self) -> None:
        """Close the folder and restore the status it had when it was opened."""
        if self._status_before:
            write_file(self.folder / "status.json", self._status_before)
        self.__exit__(None, None, None)

    def update_header(self, measurements: Measurements) -> None:
        """Write into ``run.json`` what was found since: measures of the start that had to wait, notes, measures left out."""
        header = Run(self.folder).header
        header["recipe"]["scope"] |= _what_is_measured(measurements)
        self._start(header)

    def write_verdict(self, verdict: Mapping[str, Any]) -> None:
        """Replace ``verdict.json`` by the given plain values."""
        write_file(self.folder / "verdict.json", (json.dumps(verdict, indent=1) + "\n").encode())


def scope_identity(model: Any, probe: ProbeSet, views: tuple[str, ...], seed: int) -> dict[str, Any]:
    """What two scopes must have in common to write one run. ``model``: a spec or a description."""
    data = {"name": "probe", "options": {}, "fingerprint": probe.fingerprint}
    return {"model": model, "data": data, "views": list(views), "groups": probe.group_samples(), "seed": seed}


def identity_hash(header: Mapping[str, Any]) -> str:
    """The hash of a scope's identity, from the header of its run; up to version 0.1 it was the run's id."""
    return str(header.get("identity") or header["id"])


def run_header(
    identity: Mapping[str, Any],
    measurements: Measurements,
    budget: float,
    spec: Any,
    model: nn.Module,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """The contents of ``run.json``.

    ``spec``: of a network of ours, else ``None``. ``model``: the user's. ``config``: flat settings of the training.

    Trainings that differ in their learning rate alone have one identity, so the id is that of the identity and a random number.
    """
    about = {
        "views": identity["views"],
        "budget": budget if np.isfinite(budget) else None,
        "groups": measurements.probe.group_samples(),
        "layers": measurements.layers,
        "samples": len(measurements.probe),
        **_what_is_measured(measurements),
        "probe_kind": measurements.probe.kind,
        "image_shape": measurements.probe.image_shape,
    }
    device, dtype = device_and_dtype(measurements.model)
    origin = run_origin(model)
    return {
        "id": short_hash([dict(identity), secrets.token_hex(8)]),
        "identity": short_hash(dict(identity)),
        "kind": "scope",
        "study": None,
        "scale": None,
        "recipe": {"model": identity["model"], "data": identity["data"], "scope": about},
        "members": [{}],
        "model": spec,
        "data": identity["data"],
        "config": dict(config),
        "summary": origin.pop("summary"),
        "provenance": provenance(str(dtype).removeprefix("torch."), str(device)) | origin,
    }


def _what_is_measured(measurements: Measurements) -> dict[str, Any]:
    """``left_out``, ``notes``, ``rows``, and ``waiting``: measures whose values at the start are still to be taken."""
    return {
        "left_out": measurements.left_out_quantities(),
        "notes": measurements.notes,
        "rows": measurements.sampled_rows(),
        "waiting": list(measurements.waiting),
    }


def probe_arrays(probe: ProbeSet) -> dict[str, NDArray[Any]]:
    """Targets of the probe set, and its inputs where they are small; written at step 0 only.

    Targets at every position are kept as the columns that match the outputs.
    """
    y = probe.columns if probe.columns is not None and not probe.y.is_floating_point() and probe.y.ndim > 1 else probe.y
    arrays = {"probe_y": y.detach().float().cpu().numpy() if y is probe.columns else y.detach().cpu().numpy()}
    if isinstance(probe.x, Tensor) and probe.x.is_floating_point() and _total_bytes([probe.x]) <= PROBE_BYTES:
        arrays["probe_x"] = probe.x.detach().float().cpu().numpy()
    if probe.texts:
        arrays["probe_text"] = text_bytes(probe.texts)
    return arrays


def text_bytes(texts: Sequence[str]) -> NDArray[np.uint8]:
    """Texts as UTF-8 bytes ``[n, longest]``, cut to ``LONGEST_TEXT`` characters and filled with zeros.

    >>> text_bytes(["ab", "c"])
    array([[97, 98],
           [99,  0]], dtype=uint8)
    """
    short = [text.replace("\0", " ")[:LONGEST_TEXT] + "…" * (len(text) > LONGEST_TEXT) for text in texts]
    encoded = [text.encode("utf-8", "replace") for text in short]
    longest = max(1, *map(len, encoded))
    return np.frombuffer(b"".join(text.ljust(longest, b"\0") for text in encoded), np.uint8).reshape(-1, longest)


def start_arrays(start: Start) -> dict[str, NDArray[Any]] | None:
    """Parameters and buffers of the start; ``None`` where they are too large to keep."""
    if _total_bytes([*start.parameters.values(), *start.buffers.values()]) > START_BYTES:
        return None
    named = {f"model/{name}": p for name, p in start.parameters.items()}
    named |= {f"buffer/{name}": b for name, b in start.buffers.items()}
    return {name: to_numpy(tensor) for name, tensor in named.items()}


def _total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
