"""A small image task and a quick recipe, for the tests that train image networks."""

from __future__ import annotations

from typing import Any

import torch

from unlazy.data.images import Images
from unlazy.models.spec import ImageSpec
from unlazy.training.images import ImageRecipe

SMALL = ImageSpec((6, 8), (1, 1), channels=2, classes=3)
QUICK = ImageRecipe(4, batch=16, lr=0.05, augment=False, smoothing=0.0)


def stripes(n: int, seed: int = 0, size: int = 8) -> Images:
    """Three classes that a small network learns at once: bright rows, bright columns, neither; with noise."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n,), generator=random)
    pixels = torch.randint(0, 120, (n, 2, size, size), generator=random)
    pixels[labels == 0, :, ::2] += 120
    pixels[labels == 1, :, :, ::2] += 120
    moments: dict[str, Any] = {"mean": (0.3, 0.4), "deviation": (0.2, 0.3)}
    return Images("stripes", "train", pixels.to(torch.uint8), labels, ("rows", "columns", "neither"), **moments)
