"""Four data sets with 64 inputs of mean square 1: samples to train on, to measure on, and to judge on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from unlazy.data.images import load_images
from unlazy.data.interactions import Interaction
from unlazy.data.patterns import Patterns
from unlazy.runtime import stream

TRAINED, PROBED, JUDGED = 256, 64, 256
LETTERS, LENGTH = 8, 8


@dataclass(frozen=True)
class Task:
    """``train``, fresh samples for the ``probe`` set, and ``held`` ones on which the truth is measured; loss by name."""

    train: tuple[Tensor, Tensor]
    probe: tuple[Tensor, Tensor]
    held: tuple[Tensor, Tensor]
    loss: str

    @property
    def outputs(self) -> int:
        return int(self.train[1].shape[1])

    def probe_set(self) -> tuple[Tensor, Tensor]:
        """Half of it are training samples, half are fresh; classes as numbers, real targets as they are."""
        x = torch.cat([self.train[0][:PROBED], self.probe[0]])
        y = torch.cat([self.train[1][:PROBED], self.probe[1]])
        return x, (y.argmax(1) if self.loss == "cross-entropy" else y)


def task(name: str) -> Task:
    """``digits`` and ``text`` are classes under cross-entropy, ``patterns`` and ``planted`` signs under squared error."""
    x, y = {"digits": _digits, "patterns": _patterns, "planted": _planted, "text": _text}[name]()
    x = (x / x.square().mean().sqrt()).float()
    sizes = (TRAINED, PROBED, JUDGED)
    parts = list(zip(x.split(sizes), y.float().split(sizes), strict=True))
    return Task(parts[0], parts[1], parts[2], "cross-entropy" if name in ("digits", "text") else "squared")


Samples = tuple[Float[Tensor, "n d"], Float[Tensor, "n o"]]


def _digits() -> Samples:
    images = load_images("digits")
    chosen = images.take(torch.randperm(len(images), generator=stream(0, "calibration"))[: TRAINED + PROBED + JUDGED])
    return chosen.flat(standardise=True).double(), chosen.one_hot().double()


def _patterns() -> Samples:
    """The emergence paper's data: parity of 3 relevant patterns of 32, half of the samples with structure."""
    data = Patterns(inputs=64, patterns=32, relevant=3).dataset(TRAINED + PROBED + JUDGED)
    return data.x, data.y


def _planted() -> Samples:
    """The product of the signs of two of 64 normal inputs."""
    data = Interaction(TRAINED + PROBED + JUDGED, inputs=64, order=2, law="gaussian").dataset(dtype=torch.float64)
    return data.x, 2 * data.y[:, 1:] - 1


def _text() -> Samples:
    """Eight letters; does a come before b, and is there a c? Four classes."""
    n, random = TRAINED + PROBED + JUDGED, stream(0, "calibration", "text")
    letters = torch.randint(2, LETTERS, (n, LENGTH), generator=random)
    places = torch.rand(n, LENGTH, generator=random).argsort(1)
    rows = torch.arange(n)
    letters[rows, places[:, 0]], letters[rows, places[:, 1]] = 0, 1
    first = (places[:, 0] < places[:, 1]).long()
    third = (letters == 2).any(1).long()
    one_hot = F.one_hot(letters, LETTERS).double().flatten(1)
    return one_hot - one_hot.mean(), F.one_hot(2 * first + third, 4).double()
