"""A data set: tensors, with the name and options from which they can be made again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.runtime import require


@dataclass(frozen=True)
class Dataset:
    """Inputs ``x [n, ...]``, targets ``y [n, outputs]``, and named groups of samples as boolean masks ``[n]``.

    ``y [members, n, outputs]`` gives every member of a stack targets of its own on the same inputs.
    """

    name: str
    x: Float[Tensor, "n *d"]
    y: Float[Tensor, "*m o"]  # checked below
    groups: Mapping[str, Tensor] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.x.shape[0] > 0, f"data set {self.name!r} has no samples.")
        require(
            self.y.ndim in (2, 3) and self.x.shape[0] == self.y.shape[-2],
            f"data set {self.name!r}: {self.x.shape[0]} inputs but targets of shape {tuple(self.y.shape)}; "
            "[n, outputs] is expected, or [members, n, outputs].",
        )
        for what, values in (("inputs", self.x), ("targets", self.y)):
            bad = int((~torch.isfinite(values)).sum())
            require(bad == 0, f"data set {self.name!r}: {bad} of the {what} are NaN or infinite; clean them first.")

    def __len__(self) -> int:
        return int(self.x.shape[0])

    def __repr__(self) -> str:
        groups = f", groups {', '.join(self.groups)}" if self.groups else ""
        return f"Dataset({self.name!r}: x {list(self.x.shape)}, y {list(self.y.shape)}{groups})"

    def to(self, dtype: torch.dtype) -> Dataset:
        """The same data in another precision."""
        return replace(self, x=self.x.to(dtype), y=self.y.to(dtype))

    def on(self, device: str | torch.device) -> Dataset:
        """The same data on another device."""
        groups = {name: inside.to(device) for name, inside in self.groups.items()}
        return replace(self, x=self.x.to(device), y=self.y.to(device), groups=groups)

    def take(self, rows: Tensor | slice) -> Dataset:
        """The samples of some rows, as numbers, a mask or a slice."""
        groups = {name: inside[rows] for name, inside in self.groups.items()}
        return replace(self, x=self.x[rows], y=self.y[..., rows, :], groups=groups)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over shapes, precisions and bytes of inputs and targets, 16 hex digits."""
        digest = hashlib.sha256()
        for values in (self.x, self.y):
            digest.update(f"{tuple(values.shape)} {values.dtype}".encode())
            digest.update(values.contiguous().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """The entry ``data`` of a run: ``{name, options, fingerprint}``."""
        return {"name": self.name, "options": dict(self.options), "fingerprint": self.fingerprint}
