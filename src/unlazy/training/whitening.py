"""Whitened pictures: one fixed linear filter that takes out what neighbouring pixels have in common.

Neighbouring pixels of photographs are nearly equal, so most linear functions of a picture, and with them most half-spaces,
tell little more than its brightness. The filter is the middle row of the matrix C^(-1/2) that whitens square patches, C being
their covariance over training pictures, with a ridge. It is linear: a half-space of whitened pictures is one of pictures.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from unlazy.runtime import exact_float32, require

SIZE = 9  # pixels a side


def whitening_filter(
    pictures: Float[Tensor, "n c h w"], ridge: float, size: int = SIZE
) -> Float[Tensor, "c c size size"]:
    """The filter for pictures like these; ``ridge`` is relative to the mean eigenvalue of the patches' covariance.

    Every channel of what it makes of these pictures has variance one. All their patches are held at once: a few hundred
    pictures of 32 x 32 are enough.
    """
    require(ridge > 0, f"ridge must be positive, got {ridge!r}.")
    require(size % 2 == 1 and size >= 1, f"size must be odd, so that there is a middle pixel; got {size!r}.")
    count, channels, height, width = pictures.shape
    require(min(height, width) >= size, f"pictures of {height} x {width} have no patches of {size} x {size}.")
    several = count * (height - size + 1) * (width - size + 1) > 1
    require(several, f"a covariance needs at least two patches; {count} pictures of {height} x {width} have fewer.")
    patches = F.unfold(pictures.double(), size).transpose(1, 2).flatten(0, 1)
    values, vectors = torch.linalg.eigh(torch.cov(patches.T).reshape(patches.shape[1], -1))
    whitening = (vectors * (values.clamp(min=0) + ridge * values.mean()).rsqrt()) @ vectors.T
    middle = whitening.reshape(channels, size, size, channels, size, size)[:, size // 2, size // 2]
    spread = apply_filter(pictures.double(), middle).std((0, 2, 3))
    varied = float(values.mean()) > 0 and bool((spread > 0).all())
    require(varied, "these pictures have a channel that never changes, so that nothing can be whitened there.")
    return (middle / spread[:, None, None, None]).to(pictures.dtype)


def apply_filter(
    pictures: Float[Tensor, "n c h w"], filter_: Float[Tensor, "c c size size"]
) -> Float[Tensor, "n c h w"]:
    """Pictures under a filter, in the precision they come in; beyond their edges they are mirrored."""
    reach = filter_.shape[-1] // 2
    with torch.autocast(pictures.device.type, enabled=False), exact_float32():  # differences of nearly equal numbers
        return F.conv2d(F.pad(pictures, (reach,) * 4, mode="reflect"), filter_)
