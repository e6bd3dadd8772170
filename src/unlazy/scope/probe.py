"""What a scope looks at: a fixed set of samples, their targets, and the groups they fall into."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unlazy.data.dataset import Dataset
from unlazy.kernels.capture import Inputs, check_inputs, predictions, samples
from unlazy.models.net import GatedNet
from unlazy.runtime import InputError, require, stream

Groups = Mapping[str, Any]
Choice = Callable[[Any], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Probe:
    """Samples ``x`` (a tensor, a tuple of arguments, a mapping of keyword arguments), targets as given and as columns.

    ``labels``: class numbers where the targets are classes. ``columns``: one-hot classes (-1, 1 for two classes and one
    output) or real targets.
    """

    x: Inputs
    y: Tensor
    labels: Int[Tensor, " n"] | None = None
    columns: Float[Tensor, "n o"] | None = None
    groups: Mapping[str, Bool[Tensor, " n"]] = field(default_factory=dict)
    loss: Loss | None = None

    def __len__(self) -> int:
        return samples(self.x)

    @cached_property
    def device(self) -> torch.device:
        return next(leaf.device for leaf in pytree.tree_leaves(self.x) if isinstance(leaf, Tensor))

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> Probe:
        """The same samples beside the model, real inputs in its precision."""

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.to(device, dtype if leaf.is_floating_point() else None)

        groups = {name: inside.to(device) for name, inside in self.groups.items()}
        moved = {name: pytree.tree_map(move, getattr(self, name)) for name in ("x", "y", "labels", "columns")}
        return replace(self, groups=groups, **moved)

    def some(self, rows: Int[Tensor, " m"]) -> Probe:
        """Some of the samples, in a given order."""

        def pick(leaf: Any) -> Any:
            return leaf[rows] if isinstance(leaf, Tensor) else leaf

        groups = {name: inside[rows] for name, inside in self.groups.items()}
        picked = {name: pytree.tree_map(pick, getattr(self, name)) for name in ("x", "y", "labels", "columns")}
        return replace(self, groups=groups, **picked)

    def order(self, seed: int) -> Int[Tensor, " n"]:
        """All samples so that the first m of them hold every class about equally: a random order, classes taking turns."""
        mixed = torch.randperm(len(self), generator=stream(seed, "rows"))
        if self.labels is None:
            return mixed
        labels, turn, seen = self.labels.cpu()[mixed], torch.zeros(len(self)), dict[int, int]()
        for place, label in enumerate(labels.tolist()):
            turn[place] = seen[label] = seen.get(label, -1) + 1
        return mixed[turn.argsort(stable=True)]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over shapes, precisions and bytes of inputs and targets, 16 hex digits."""
        digest = hashlib.sha256()
        for leaf in [*pytree.tree_leaves(self.x), self.y]:
            if isinstance(leaf, Tensor):
                digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode() + _bytes(leaf))
        return digest.hexdigest()[:16]

    @property
    def kind(self) -> str:
        """``points2d``, ``image``, ``tokens`` or ``vectors``: how a page may draw the samples."""
        first = next(leaf for leaf in pytree.tree_leaves(self.x) if isinstance(leaf, Tensor))
        if not first.is_floating_point():
            return "tokens"
        if first.shape[1:] == (2,):
            return "points2d"
        return "image" if first.ndim == 4 else "vectors"

    @property
    def image_shape(self) -> list[int] | None:
        return list(self.x.shape[1:]) if self.kind == "image" and isinstance(self.x, Tensor) else None

    @property
    def one_target(self) -> bool:
        """Whether all samples ask for the same: then nothing can align with the targets."""
        assert self.columns is not None
        return bool((self.columns == self.columns[:1]).all())


def as_probe(
    probe: Any,
    groups: Groups | None = None,
    loss: Loss | None = None,
) -> Probe:
    """Check what the caller gave; targets are turned into columns later, when the outputs are known."""
    if isinstance(probe, Probe):
        return probe
    if isinstance(probe, Dataset):
        require(probe.y.ndim == 2, "a scope looks at one network: targets [n, outputs], not one set per member.")
        x, y, own = probe.x, probe.y, dict(probe.groups)
    else:
        pair = isinstance(probe, tuple | list) and len(probe) == 2
        require(
            pair,
            f"probe is a pair (x, y) of tensors, got {_described(probe)}; of a loader, next(iter(loader)) is such a pair.",
        )
        x, y, own = probe[0], probe[1], {}
    x, y = pytree.tree_map(_as_tensor, x), _as_tensor(y)
    require(isinstance(y, Tensor), f"the probe's targets must be a tensor, got {_described(y)}.")
    check_inputs(x)
    n = samples(x)
    require(y.ndim >= 1 and y.shape[0] == n, f"the probe has {n} samples but targets of shape {tuple(y.shape)}.")
    require(n >= 2, "a probe needs at least 2 samples; 128 or more show something.")
    if y.is_floating_point():
        require(bool(torch.isfinite(y).all()), "some of the probe's targets are NaN or infinite.")
    named = {str(name): _mask(str(name), inside, n) for name, inside in {**own, **(groups or {})}.items()}
    return Probe(x, y, groups=named, loss=loss)


def with_columns(probe: Probe, out: Float[Tensor, "n o"]) -> Probe:
    """Targets as columns beside the model's outputs, and classes as groups where nobody named any."""
    y, width = probe.y, out.shape[1]
    if y.ndim > 1 and y.shape[1] > 1 and y.shape == out.shape and not y.is_floating_point():
        y = y.to(out.dtype)  # several answers a sample, each yes or no
    if y.is_floating_point():
        real = y.reshape(len(y), -1)
        require(
            real.shape == out.shape,
            f"the model gives {width} outputs a sample, the targets have {real.shape[1]} columns; "
            "give class numbers, targets of the same width, or output= to choose among the outputs.",
        )
        labels = real.argmax(1) if _one_hot(real) else None
    else:
        labels = y.long().reshape(len(y), -1)
        require(
            labels.shape[1] == 1,
            f"class numbers must be [n], got {tuple(y.shape)}; for a model that answers at every position give "
            "output= to choose one, such as output=lambda out: out[:, -1].",
        )
        labels = labels[:, 0]
        most = 2 if width == 1 else width
        fits = int(labels.min()) >= 0 and int(labels.max()) < most
        found = f"{int(labels.min())} to {int(labels.max())}"
        require(
            fits, f"class numbers run from {found}, but the model has {width} outputs, so they must be 0 to {most - 1}."
        )
    columns = target_columns(y, width).to(out.dtype)
    groups = dict(probe.groups)
    if not groups and labels is not None:
        groups = {str(number): labels == number for number in labels.unique().tolist()}
    return replace(probe, y=y, labels=labels, columns=columns, groups=groups)


def target_columns(y: Tensor, width: int) -> Float[Tensor, "n o"]:
    """Targets beside ``width`` outputs: real ones as they are, classes one-hot, or -1 and 1 for a single output."""
    if y.is_floating_point():
        return y.reshape(len(y), -1)
    labels = y.long().reshape(-1)
    return (labels[:, None] * 2.0 - 1) if width == 1 else F.one_hot(labels, width).double()


def losses(probe: Probe, out: Float[Tensor, "n o"]) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The loss on all samples and on each group: the user's own, cross-entropy for class numbers, else squared error."""
    if probe.loss is not None:
        own = probe.loss
        return own(out, probe.y).mean(), {
            name: own(out[inside], probe.y[inside]).mean() for name, inside in probe.groups.items()
        }
    assert probe.columns is not None
    if probe.y.is_floating_point():
        each = (out - probe.columns).square().mean(1)
    elif out.shape[1] == 1:
        each = F.softplus(-probe.columns[:, 0] * out[:, 0])
    else:
        assert probe.labels is not None
        each = F.cross_entropy(out, probe.labels, reduction="none")
    return each.mean(), {name: each[inside].mean() for name, inside in probe.groups.items()}


def right(probe: Probe, out: Float[Tensor, "n o"]) -> Bool[Tensor, " n"]:
    """Which samples are put into their class."""
    assert probe.labels is not None
    return (out[:, 0] > 0).long() == probe.labels if out.shape[1] == 1 else out.argmax(1) == probe.labels


# --- the output of any model -----------------------------------------------------------------------------------


class Chosen(nn.Module):
    """A model seen through the one tensor of its output that counts."""

    def __init__(self, model: nn.Module, choose: Choice) -> None:
        super().__init__()
        self.model, self.choose = model, choose

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        return self.choose(self.model(*arguments, **options))


def logits_of(out: Any) -> Tensor:
    """The tensor of a dict, a tuple or an output object that stands for predictions: ``logits``, or the only candidate."""
    found = predictions(out)
    if found is not None:
        return found
    fields = dict(out) if isinstance(out, Mapping) else {}
    parts = list(fields.values()) if fields else list(out) if isinstance(out, Sequence) else []
    held = f" with {', '.join(map(str, fields))}" if fields else ""
    example = "out['logits']" if fields else "out[0]" if parts else "out.scores"
    raise InputError(
        f"the model returns {_described(out)}{held}; say which tensor counts: output=lambda out: {example}, for example."
    )


def chosen_output(model: nn.Module, probe: Probe, output: Choice | None) -> nn.Module:
    """The model as a function to ``[n, outputs]``: itself where it is one already, else seen through ``output``."""
    x, n = probe.x, len(probe)
    with torch.no_grad():
        try:
            raw = model(**x) if isinstance(x, Mapping) else model(*x) if isinstance(x, tuple | list) else model(x)
        except Exception as error:  # whatever a stranger's model raises
            raise InputError(
                f"the model cannot be called with the probe's x, {_shapes(x)}: {error}. Give x as the model gets it in training, "
                "samples first."
            ) from error
        out = (output or logits_of)(raw)
    require(isinstance(out, Tensor), f"output= must return a tensor, got {_described(out)}.")
    shape = tuple(out.shape)
    require(out.ndim >= 1 and shape[0] == n, f"the model must give one row per sample: {n} samples, output {shape}.")
    if not out.is_floating_point():
        raise InputError(f"the model's output must be real numbers, got {out.dtype}; choose the scores with output=.")
    if out.ndim > 2 and not probe.y.is_floating_point():
        raise InputError(
            f"the model answers {shape} for {n} samples; choose one row of scores per sample with output=, "
            "such as output=lambda out: out[:, -1]."
        )
    if isinstance(model, GatedNet) or (isinstance(raw, Tensor) and output is None):
        return model
    return Chosen(model, output or logits_of)


# --- their parts -----------------------------------------------------------------------------------------------


def _as_tensor(leaf: Any) -> Any:
    return torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf


def _bytes(leaf: Tensor) -> bytes:
    plain = leaf.detach().cpu().contiguous()
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _one_hot(columns: Float[Tensor, "n o"]) -> bool:
    zero_or_one = bool(((columns == 0) | (columns == 1)).all())
    return columns.shape[1] > 1 and zero_or_one and bool((columns.sum(1) == 1).all())


def _mask(name: str, inside: Any, n: int) -> Bool[Tensor, " n"]:
    inside = torch.as_tensor(inside)
    if inside.dtype != torch.bool:
        indices = inside.long()
        fits = indices.numel() > 0 and int(indices.min()) >= 0 and int(indices.max()) < n
        require(fits, f"group {name!r} must hold sample numbers between 0 and {n - 1}.")
        inside = torch.zeros(n, dtype=torch.bool).index_fill(0, indices, True)
    require(inside.shape == (n,), f"group {name!r} must be [n] = [{n}], got {tuple(inside.shape)}.")
    require(bool(inside.any()), f"group {name!r} holds no sample.")
    return inside


def _shapes(x: Inputs) -> str:
    """Shapes and precisions of what a model is called with.

    >>> _shapes({"a": torch.zeros(2, 3)})
    'a torch.float32 [2, 3]'
    """
    if isinstance(x, Tensor):
        return f"{x.dtype} {list(x.shape)}"
    if isinstance(x, Mapping):
        return ", ".join(f"{name} {_shapes(leaf)}" for name, leaf in x.items())
    return ", ".join(map(_shapes, x)) if isinstance(x, tuple | list) else type(x).__name__


def _described(value: Any) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
