"""Pictures as bytes on the device, and the batches of an epoch: shuffled, flipped, shifted and mixed there.

Order, flips, shifts and patches of an epoch belong to (seed, epoch) and are the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from unlazy.data.images import Images
from unlazy.runtime import stream
from unlazy.training.whitening import apply_filter, whitening_filter

CROP = 4  # pixels a picture may shift by, each way
WHITENED_BY = 348  # pictures, the first ones, that decide the whitening filter


@dataclass(frozen=True)
class DeviceImages:
    """Pictures as bytes on the device, channels last; ``layout``: how their numbers are to lie in memory; ``whitening``: a
    filter that they pass before a network sees them."""

    pixels: UInt8[Tensor, "n h w c"]
    labels: Int64[Tensor, "n"]
    low: Float[Tensor, "c"]
    range: Float[Tensor, "c"]
    layout: torch.memory_format = torch.contiguous_format
    whitening: Float[Tensor, "c c k k"] | None = None

    @classmethod
    def from_images(
        cls,
        images: Images,
        device: str,
        *,
        standardise: bool = True,
        layout: torch.memory_format = torch.contiguous_format,
    ) -> DeviceImages:
        """Put pictures on a device."""
        mean = torch.tensor(images.mean if standardise else (0.0,) * images.pixels.shape[1], device=device)
        deviation = torch.tensor(images.deviation if standardise else (1.0,) * images.pixels.shape[1], device=device)
        pixels = images.pixels.permute(0, 2, 3, 1).contiguous().to(device)
        return cls(pixels, images.labels.to(device), mean * images.white, deviation * images.white, layout)

    def __len__(self) -> int:
        return len(self.pixels)

    def with_whitening(self, ridge: float) -> DeviceImages:
        """The same pictures with the filter that whitens them."""
        plain = replace(self, whitening=None)
        return replace(self, whitening=whitening_filter(plain.floats(self.pixels[:WHITENED_BY]), ridge))

    def floats(self, pixels: UInt8[Tensor, "k h w c"]) -> Float[Tensor, "k c h w"]:
        """Numbers for a network, as ``Images.floats``."""
        numbers = ((pixels.float() - self.low) / self.range).permute(0, 3, 1, 2)
        if self.whitening is not None:
            numbers = apply_filter(numbers, self.whitening)
        return numbers.contiguous(memory_format=self.layout)

    def batches(
        self, seed: int, epoch: int, size: int, *, augment: bool, mixed: float = 0.0
    ) -> Iterator[tuple[Float[Tensor, "k c h w"], Int64[Tensor, "k"]]]:
        """All whole batches of an epoch, flipped and shifted if asked for.

        ``mixed``: the chance of a picture to get a patch of another one of its batch; it keeps its own label.
        """
        n, height, width, _ = self.pixels.shape
        order = self.epoch_order(seed, epoch)
        rows, columns = _source_pixels(n, height, width, seed, epoch, order.device) if augment else (None, None)
        patches = _patch_masks(n, height, width, seed, epoch, mixed).to(order.device) if mixed > 0 else None
        for start in range(0, n - size + 1, size):
            chosen = order[start : start + size]
            if rows is None or columns is None:
                pixels = self.pixels[chosen]
            else:
                here = slice(start, start + size)
                pixels = self.pixels[chosen[:, None, None], rows[here, :, None], columns[here, None, :]]
            if patches is not None:
                pixels = torch.where(patches[start : start + size, ..., None], pixels.roll(1, 0), pixels)
            yield self.floats(pixels), self.labels[chosen]

    def epoch_order(self, seed: int, epoch: int) -> Int64[Tensor, "n"]:
        """The pictures in the order of an epoch."""
        return torch.randperm(len(self), generator=stream(seed, "order", epoch)).to(self.pixels.device)


def _source_pixels(
    n: int, height: int, width: int, seed: int, epoch: int, device: torch.device
) -> tuple[Int64[Tensor, "n h"], Int64[Tensor, "n w"]]:
    """The row and the column from which each pixel of an epoch's flipped and shifted pictures is taken."""
    random = stream(seed, "augment", epoch)
    shift = torch.randint(-CROP, CROP + 1, (2, n, 1), generator=random).to(device)
    flip = torch.randint(0, 2, (n, 1), generator=random).to(device).bool()
    across = torch.arange(width, device=device)
    rows = mirror_index(torch.arange(height, device=device) + shift[0], height)
    return rows, mirror_index(torch.where(flip, width - 1 - across, across) + shift[1], width)


def mirror_index(place: Int64[Tensor, "n k"], size: int) -> Int64[Tensor, "n k"]:
    """Row or column numbers beyond the edges, mirrored into the picture (at least ``CROP`` + 1 wide)."""
    return (size - 1 - (size - 1 - place.abs()).abs()).clamp(0, size - 1)


def _patch_masks(n: int, height: int, width: int, seed: int, epoch: int, mixed: float) -> Bool[Tensor, "n h w"]:
    """Masks of the pixels that an epoch's pictures take from another one: a rectangle whose share of the area is uniform."""
    random = stream(seed, "patches", epoch)
    chosen = torch.rand(n, generator=random) < mixed
    side = torch.rand(n, generator=random).sqrt()
    inside = []
    for size in (height, width):
        middle = torch.randint(size, (n,), generator=random)
        half = (side * size / 2)[:, None]
        inside.append(((torch.arange(size) + 0.5)[None] - (middle + 0.5)[:, None]).abs() <= half)
    return inside[0][:, :, None] & inside[1][:, None, :] & chosen[:, None, None]
