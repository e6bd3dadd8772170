"""The probe set: the fixed samples that a scope measures on, their targets, their groups, and losses on them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from unlazy.data.dataset import Dataset
from unlazy.kernels.capture import Inputs, check_inputs, sample_count
from unlazy.runtime import require, stream

Groups = Mapping[str, Any]
Loss = Callable[[Tensor, Tensor], Tensor]
LOSS_FACTOR, LOSS_TIMES = 3.0, 3  # losses of training and probe set that differ by more, so often, are reported


@dataclass(frozen=True)
class ProbeSet:
    """Samples ``x`` (a tensor, a tuple of arguments, a mapping of keyword arguments), targets as given and as columns.

    ``labels``: class numbers where the targets are classes. ``columns``: one-hot classes (-1, 1 for two classes and one
    output) or real targets. ``position_groups``: groups of positions, where targets are class numbers ``[n, positions]``.
    ``texts``: the samples as people read them, such as decoded tokens.
    """

    x: Inputs
    y: Tensor
    labels: Int[Tensor, " n"] | None = None
    columns: Float[Tensor, "n o"] | None = None
    groups: Mapping[str, Bool[Tensor, " n"]] = field(default_factory=dict)
    loss: Loss | None = None
    position_groups: Mapping[str, Bool[Tensor, "n positions"]] = field(default_factory=dict)
    texts: tuple[str, ...] = ()

    def __len__(self) -> int:
        return sample_count(self.x)

    @cached_property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return next(leaf.device for leaf in pytree.tree_leaves(self.x) if isinstance(leaf, Tensor))

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> ProbeSet:
        """The same samples on a device, real tensors in this precision."""

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.to(device, dtype if leaf.is_floating_point() else None)

        groups = {name: inside.to(device) for name, inside in self.groups.items()}
        places = {name: inside.to(device) for name, inside in self.position_groups.items()}
        moved = {name: pytree.tree_map(move, getattr(self, name)) for name in ("x", "y", "labels", "columns")}
        return replace(self, groups=groups, position_groups=places, **moved)

    def subset(self, rows: Int[Tensor, " m"]) -> ProbeSet:
        """The samples with these numbers, in this order."""

        def pick(leaf: Any) -> Any:
            return leaf[rows] if isinstance(leaf, Tensor) else leaf

        groups = {name: inside[rows] for name, inside in self.groups.items()}
        places = {name: inside[rows] for name, inside in self.position_groups.items()}
        picked = {name: pytree.tree_map(pick, getattr(self, name)) for name in ("x", "y", "labels", "columns")}
        texts = tuple(self.texts[row] for row in rows.tolist()) if self.texts else ()
        return replace(self, groups=groups, position_groups=places, texts=texts, **picked)

    def balanced_order(self, seed: int) -> Int[Tensor, " n"]:
        """All sample numbers in a random order in which classes take turns: the first m hold every class about equally."""
        mixed = torch.randperm(len(self), generator=stream(seed, "rows"))
        if self.labels is None:
            return mixed
        labels, turn, counts = self.labels.cpu()[mixed], torch.zeros(len(self)), dict[int, int]()
        for place, label in enumerate(labels.tolist()):
            turn[place] = counts[label] = counts.get(label, -1) + 1
        return mixed[turn.argsort(stable=True)]

    def few(self, count: int, seed: int) -> ProbeSet:
        """At most so many of the samples, every class about equally; groups that keep no sample are dropped."""
        if count >= len(self):
            return self
        part = self.subset(self.balanced_order(seed)[:count].sort().values.to(self.device))
        groups = {name: inside for name, inside in part.groups.items() if bool(inside.any())}
        places = {name: inside for name, inside in part.position_groups.items() if bool(inside.any())}
        return replace(part, groups=groups, position_groups=places)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over shapes, precisions and bytes of inputs and targets, 16 hex digits."""
        digest = hashlib.sha256()
        for leaf in [*pytree.tree_leaves(self.x), self.y]:
            if isinstance(leaf, Tensor):
                digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode() + _tensor_bytes(leaf))
        return digest.hexdigest()[:16]

    @property
    def kind(self) -> str:
        """How a page may draw the samples: ``points2d``, ``image``, ``tokens`` or ``vectors``."""
        first = next(leaf for leaf in pytree.tree_leaves(self.x) if isinstance(leaf, Tensor))
        if not first.is_floating_point():
            return "tokens"
        if first.shape[1:] == (2,):
            return "points2d"
        return "image" if first.ndim == 4 else "vectors"

    @property
    def image_shape(self) -> list[int] | None:
        """Channels, height and width of images, else ``None``."""
        return list(self.x.shape[1:]) if self.kind == "image" and isinstance(self.x, Tensor) else None

    @property
    def loss_name(self) -> str:
        """What the loss on the probe set is, in words."""
        if self.loss is not None:
            return "your loss="
        if self.y.is_floating_point():
            return "squared error"
        one = self.labels is not None and self.columns is not None and self.columns.shape[1] == 1
        return "binary cross-entropy" if one else "cross-entropy"

    @property
    def has_one_target(self) -> bool:
        """Whether all samples have the same target: then nothing can align with the targets."""
        assert self.columns is not None
        return bool((self.columns == self.columns[:1]).all())

    def group_samples(self) -> dict[str, list[int]]:
        """The sample numbers of every group."""
        return {name: inside.nonzero()[:, 0].tolist() for name, inside in self.groups.items()}


def parse_probe_set(
    probe: Any, groups: Groups | None = None, loss: Loss | None = None, texts: Sequence[str] = ()
) -> ProbeSet:
    """The probe set from what the user gave: a pair ``(x, y)`` or a ``Dataset``; raises ``InputError`` if it is neither.

    Targets are turned into columns later, by :func:`add_target_columns`, when the outputs are known.
    """
    if isinstance(probe, ProbeSet):
        return probe
    if isinstance(probe, Dataset):
        require(probe.y.ndim == 2, "a scope watches one network: targets [n, outputs], not one set per member.")
        x, y, own = probe.x, probe.y, dict(probe.groups)
    else:
        pair = isinstance(probe, tuple | list) and len(probe) == 2
        require(
            pair,
            f"probe is a pair (x, y) of tensors, got {describe_type(probe)}; of a loader, next(iter(loader)) is such a pair.",
        )
        x, y, own = probe[0], probe[1], {}
    x, y = pytree.tree_map(_as_tensor, x), _as_tensor(y)
    require(isinstance(y, Tensor), f"the probe's targets must be a tensor, got {describe_type(y)}.")
    check_inputs(x)
    n = sample_count(x)
    require(y.ndim >= 1 and y.shape[0] == n, f"the probe has {n} samples but targets of shape {tuple(y.shape)}.")
    require(n >= 2, "a probe needs at least 2 samples; 128 or more show something.")
    if y.is_floating_point():
        require(bool(torch.isfinite(y).all()), "some of the probe's targets are NaN or infinite.")
    given = {str(name): torch.as_tensor(inside) for name, inside in {**own, **(groups or {})}.items()}
    places = {name: inside for name, inside in given.items() if inside.dtype == torch.bool and inside.ndim == 2}
    for name, inside in places.items():
        fits = inside.shape == y.shape and not y.is_floating_point()
        require(
            fits, f"group {name!r} must be [n] = [{n}], or like class numbers [n, positions], got {list(inside.shape)}."
        )
    named = {name: _group_mask(name, inside, n) for name, inside in given.items() if name not in places}
    require(not isinstance(texts, str), "texts must be a list with the text of every sample, got one text.")
    kept = tuple(texts)
    require(
        len(kept) in (0, n) and all(isinstance(text, str) for text in kept),
        f"texts must be {n} texts, one a sample of the probe; got {len(kept)} of "
        f"{', '.join(sorted({type(text).__name__ for text in kept})) or 'nothing'}.",
    )
    return ProbeSet(x, y, groups=named, loss=loss, position_groups=places, texts=kept)


def add_target_columns(probe: ProbeSet, out: Float[Tensor, "n o"]) -> ProbeSet:
    """The probe set with targets as columns that match the model's outputs, and classes as groups if the user named none."""
    if probe.columns is not None:
        return probe
    y, width = probe.y, out.shape[1]
    if y.ndim > 1 and y.shape[1] > 1 and y.shape == out.shape and not y.is_floating_point():
        y = y.to(out.dtype)  # several answers a sample, each yes or no
    if is_yes_or_no(y, out) and probe.loss is None:
        y = y.reshape(-1).long()
    if y.is_floating_point():
        real = y.reshape(len(y), -1)
        require(
            real.shape == out.shape,
            f"the model gives {width} outputs a sample, the targets have {real.shape[1]} columns; "
            "give class numbers, targets of the same width, or output= to choose among the outputs.",
        )
        labels = real.argmax(1) if _is_one_hot(real) else real[:, 0].long() if is_yes_or_no(y, out) else None
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


def is_yes_or_no(y: Tensor, out: Float[Tensor, "n o"]) -> bool:
    """Whether real targets are the classes 0 and 1 of a model with one logit.

    Outputs that all lie between 0 and 1 may be probabilities: then it is not known which loss is meant.
    """
    if not y.is_floating_point() or y.numel() != len(y) or out.shape[1] != 1:
        return False
    both = bool(((y == 0) | (y == 1)).all()) and bool((y != y.flatten()[0]).any())
    return both and not bool(((out > 0) & (out < 1)).all())


def target_columns(y: Tensor, width: int) -> Float[Tensor, "n o"]:
    """Targets for ``width`` outputs: real targets as they are, classes one-hot, or -1 and 1 for a single output."""
    if y.is_floating_point():
        return y.reshape(len(y), -1)
    labels = y.long().reshape(-1)
    return (labels[:, None] * 2.0 - 1) if width == 1 else F.one_hot(labels, width).double()


@dataclass
class LossComparison:
    """Compares the loss that the training reports with the loss on the probe set, and says once if they are of different size."""

    apart: int = 0

    def note(self, probe: ProbeSet, on_probe: float, in_training: float, at_start: float) -> str | None:
        """A note, when the two differed by more than ``LOSS_FACTOR`` for the ``LOSS_TIMES``-th time.

        Losses below a thousandth of the first one count as that much: near zero a factor means nothing.
        """
        least = 1e-3 * abs(at_start)
        sizes = sorted(max(abs(value), least) for value in (on_probe, in_training))
        if not all(map(math.isfinite, sizes)) or sizes[1] <= LOSS_FACTOR * sizes[0]:
            return None
        self.apart += 1
        if self.apart != LOSS_TIMES:
            return None
        causes = [] if probe.loss is not None else ["the training has another loss: then give it to the scope as loss="]
        if on_probe > in_training:
            causes.append("the probe set has samples that were not trained on, and they are fitted worse")
        return (
            f"the loss on the probe set ({probe.loss_name}) is {on_probe:.3g} where the training reports {in_training:.3g}. "
            f"Possible causes: {'; or '.join(causes) or 'the training adds other terms to its loss'}"
        )


def probe_losses(probe: ProbeSet, out: Float[Tensor, "n o"]) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The loss on all samples and on each group: the user's own, cross-entropy for classes, else squared error."""
    each = sample_losses(probe, out)
    if each is None:
        own = probe.loss
        assert own is not None
        return own(out, probe.y).mean(), {
            name: own(out[inside], probe.y[inside]).mean() for name, inside in probe.groups.items()
        }
    return each.mean(), {name: each[inside].mean() for name, inside in probe.groups.items()}


def sample_losses(probe: ProbeSet, out: Float[Tensor, "n o"]) -> Float[Tensor, " n"] | None:
    """The loss of each sample; ``None`` with a loss of the user's, which may be known for all samples together only."""
    if probe.loss is not None:
        return None
    assert probe.columns is not None
    if probe.y.is_floating_point():
        return (out - probe.columns).square().mean(1)
    if out.shape[1] == 1:
        return F.softplus(-probe.columns[:, 0] * out[:, 0])
    assert probe.labels is not None
    return F.cross_entropy(out, probe.labels, reduction="none")


def correct_samples(probe: ProbeSet, out: Float[Tensor, "n o"]) -> Bool[Tensor, " n"]:
    """Which samples the outputs put into their own class."""
    assert probe.labels is not None
    return (out[:, 0] > 0).long() == probe.labels if out.shape[1] == 1 else out.argmax(1) == probe.labels


def _as_tensor(leaf: Any) -> Any:
    return torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf


def _tensor_bytes(leaf: Tensor) -> bytes:
    plain = leaf.detach().cpu().contiguous()
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _is_one_hot(columns: Float[Tensor, "n o"]) -> bool:
    zero_or_one = bool(((columns == 0) | (columns == 1)).all())
    return columns.shape[1] > 1 and zero_or_one and bool((columns.sum(1) == 1).all())


def _group_mask(name: str, inside: Any, n: int) -> Bool[Tensor, " n"]:
    inside = torch.as_tensor(inside)
    if inside.dtype != torch.bool:
        indices = inside.long()
        fits = indices.numel() > 0 and int(indices.min()) >= 0 and int(indices.max()) < n
        require(fits, f"group {name!r} must hold sample numbers between 0 and {n - 1}.")
        inside = torch.zeros(n, dtype=torch.bool).index_fill(0, indices, True)
    require(inside.shape == (n,), f"group {name!r} must be [n] = [{n}], got {tuple(inside.shape)}.")
    require(bool(inside.any()), f"group {name!r} holds no sample.")
    return inside


def describe_type(value: Any) -> str:
    """The type of a value, and the length of a tuple or list, as text."""
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
