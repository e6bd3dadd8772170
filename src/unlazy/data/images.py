"""Image data sets as tensors: MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100 from files, and digits, which need none."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from numpy.typing import NDArray
from torch import Tensor

from unlazy.data.cifar import read_batch, read_names
from unlazy.data.files import read_published_file
from unlazy.data.idx import read_idx
from unlazy.data.sources import SOURCES
from unlazy.runtime import InputError, data_folder, require

DIGITS_TRAIN = 1437
"""Digits in scikit-learn's order: the first 1437 are for training, the last 360 for testing."""

FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)

MOMENTS = {
    "mnist": ((0.13066,), (0.30811,)),
    "fashion-mnist": ((0.28604,), (0.35302,)),
    "cifar-10": ((0.49140, 0.48216, 0.44653), (0.24703, 0.24349, 0.26159)),
    "cifar-100": ((0.50708, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615)),
    "digits": ((0.30539,), (0.37551,)),
}
"""Mean and standard deviation of every channel over the training images, with pixels scaled to [0, 1]."""


@dataclass(frozen=True)
class Images:
    """Images as bytes with the class number of each; ``white`` is the byte that stands for 1.

    ``mean`` and ``deviation`` per channel belong to the training images of the whole data set, so that its two
    splits, and every part of them, are standardised alike.
    """

    name: str
    split: str
    pixels: UInt8[Tensor, "n c h w"]
    labels: Int64[Tensor, "n"]
    classes: tuple[str, ...]
    white: int = 255
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        what = f"images {self.name!r} ({self.split})"
        shape, labels = tuple(self.pixels.shape), tuple(self.labels.shape)
        require(len(shape) == 4 and shape[0] > 0, f"{what}: pixels [n, channels, height, width] expected, got {shape}.")
        require(labels == shape[:1], f"{what}: {shape[0]} pictures but labels of shape {labels}.")
        low, high = int(self.labels.min()), int(self.labels.max())
        count = len(self.classes)
        require(low >= 0 and high < count, f"{what}: labels from {low} to {high}, but there are {count} classes.")
        brightest = int(self.pixels.max())
        require(brightest <= self.white, f"{what}: a pixel of {brightest}, but white is {self.white}.")

    def __len__(self) -> int:
        return int(self.pixels.shape[0])

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.pixels.shape[1:]))
        return f"Images({self.name!r}, {self.split!r}: {len(self)} of {size}, {len(self.classes)} classes)"

    def floats(self, standardise: bool = False) -> Float32[Tensor, "n c h w"]:
        """Pixels in [0, 1]; ``standardise``: with mean 0 and deviation 1 over the training images in every channel."""
        values = self.pixels.to(torch.float32).div_(self.white)
        if standardise:
            channels = self.pixels.shape[1]
            require(
                len(self.mean) == len(self.deviation) == channels,
                f"images {self.name!r} have {channels} channels, but a mean for {len(self.mean)} and a deviation for "
                f"{len(self.deviation)}; give Images both, one number a channel, of the training images.",
            )
            mean, deviation = (torch.tensor(numbers)[:, None, None] for numbers in (self.mean, self.deviation))
            values.sub_(mean).div_(deviation)
        return values

    def flat(self, standardise: bool = False) -> Float32[Tensor, "n d"]:
        """``floats`` with every image as one row: channels, then rows, then columns."""
        return self.floats(standardise).flatten(1)

    def one_hot(self) -> Float32[Tensor, "n k"]:
        """1 at the class of each image, 0 elsewhere."""
        return torch.nn.functional.one_hot(self.labels, len(self.classes)).to(torch.float32)

    def take(self, rows: Tensor | slice) -> Images:
        """Some of the images."""
        return replace(self, pixels=self.pixels[rows], labels=self.labels[rows])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over shapes and bytes of pixels and labels, 16 hex digits."""
        digest = hashlib.sha256()
        for values in (self.pixels, self.labels):
            digest.update(f"{tuple(values.shape)} {values.dtype}".encode())
            digest.update(values.contiguous().cpu().numpy().data)
        return digest.hexdigest()[:16]


def load_images(name: str, split: str = "train", folder: Path | None = None) -> Images:
    """One split of mnist, fashion-mnist, cifar-10, cifar-100 (fine classes) or digits.

    Files are read from ``folder`` (default: ``UNLAZY_DATA``, or the user's cache folder) after a check of their checksums.
    ``unlazy data`` shows which files are there, ``unlazy data fetch`` downloads the rest. Digits (8 x 8, values 0 to 16)
    come with scikit-learn.

    >>> load_images("digits", "test").pixels.shape
    torch.Size([360, 1, 8, 8])
    """
    require(name in MOMENTS, f"there is no data set {name!r}; there are: {', '.join(MOMENTS)}.")
    require(split in ("train", "test"), f"split must be 'train' or 'test', got {split!r}.")
    if name == "digits":
        return _load_digits(split)
    root = data_folder() if folder is None else folder
    pixels, labels, classes = (_read_mnist if name.endswith("mnist") else _read_cifar)(name, split, root)
    return _make_images(name, split, pixels, labels, classes)


def _make_images(
    name: str,
    split: str,
    pixels: NDArray[np.uint8],
    labels: NDArray[np.uint8],
    classes: tuple[str, ...],
    white: int = 255,
) -> Images:
    """Arrays as :class:`Images`, with the moments of their data set."""
    mean, deviation = MOMENTS[name]
    wide_labels = torch.from_numpy(labels.astype(np.int64))
    return Images(name, split, torch.from_numpy(pixels), wide_labels, classes, white, mean, deviation)


def _read_mnist(name: str, split: str, root: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8], tuple[str, ...]]:
    start = {"train": "train", "test": "t10k"}[split]
    source = SOURCES[name]
    pixels = read_idx(*read_published_file(source, f"{start}-images-idx3-ubyte.gz", root), axes=3)
    labels = read_idx(*read_published_file(source, f"{start}-labels-idx1-ubyte.gz", root), axes=1)
    classes = tuple("0123456789") if name == "mnist" else FASHION_CLASSES
    return pixels[:, None], labels, classes


def _read_cifar(name: str, split: str, root: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8], tuple[str, ...]]:
    source = SOURCES[name]
    if name == "cifar-10":
        batches = [f"data_batch_{number}" for number in range(1, 6)] if split == "train" else ["test_batch"]
        meta, names_key, labels_key = "batches.meta", b"label_names", b"labels"
    else:
        batches, meta, names_key, labels_key = [split], "meta", b"fine_label_names", b"fine_labels"
    classes = read_names(*read_published_file(source, meta, root), names_key)
    parts = [read_batch(*read_published_file(source, batch, root), labels_key) for batch in batches]
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return pixels, labels, classes


def _load_digits(split: str) -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError("digits come with scikit-learn, which is not installed: pip install scikit-learn.") from None
    bunch = load_digits()
    rows = slice(DIGITS_TRAIN) if split == "train" else slice(DIGITS_TRAIN, None)
    pixels, labels = bunch.images[rows, None].astype(np.uint8), bunch.target[rows].astype(np.uint8)
    return _make_images("digits", split, pixels, labels, tuple("0123456789"), white=16)
