"""Images as the tangent studies take them: centred, of length one, and digits 2 against 3."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.data.images import load_images
from unlazy.runtime import require


def centred_units(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Every row minus its mean and of length 1."""
    centred = x - x.mean(1, keepdim=True)
    return centred / centred.norm(dim=1, keepdim=True)


def twos_and_threes(
    name: str, count: int, dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
    """The first digits 2 (-1) and 3 (+1) of a data set, each image minus its mean and of length 1."""
    images = load_images(name)
    images = images.take((images.labels == 2) | (images.labels == 3))
    require(count <= len(images), f"{name} has {len(images)} twos and threes, not {count}.")
    signs = 2.0 * (images.labels[:count] == 3).to(dtype) - 1
    return centred_units(images.flat()[:count].to(dtype)), signs
