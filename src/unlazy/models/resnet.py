"""Residual networks for pictures of 32 x 32: no pooling but at the end, shortcuts that change shape are 1 x 1 convolutions."""

from __future__ import annotations

from typing import Any

from unlazy.models.conv import ImageSpec
from unlazy.runtime import require


def resnet34_spec(classes: int = 10, *, width: float = 1.0, **choices: Any) -> ImageSpec:
    """3, 4, 6, 3 blocks of 64, 128, 256, 512 channels; ``width`` multiplies the channels."""
    return ImageSpec(_wide((64, 128, 256, 512), width), (3, 4, 6, 3), classes=classes, **choices)


def resnet110_spec(classes: int = 10, *, width: float = 1.0, **choices: Any) -> ImageSpec:
    """Three times 18 blocks of 16, 32, 64 channels; ``width`` multiplies the channels."""
    return ImageSpec(_wide((16, 32, 64), width), (18, 18, 18), classes=classes, **choices)


def _wide(widths: tuple[int, ...], factor: float) -> tuple[int, ...]:
    require(factor > 0, f"a width factor must be positive, got {factor!r}.")
    return tuple(max(1, round(width * factor)) for width in widths)
