"""IDX, the format of MNIST: a magic number, the lengths of the axes, then bytes, all under gzip."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import InputError, require

BYTE = 0x08  # IDX's code for unsigned bytes, the only element type MNIST and its relatives use


def read_idx(data: bytes, origin: Path, axes: int) -> NDArray[np.uint8]:
    """The array in ``data``, which came from ``origin`` and should have that many axes."""
    try:
        plain = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{origin} is not a whole gzip file: {error}.") from error
    magic, found = bytes([0, 0, BYTE, axes]), plain[:4]
    require(
        found == magic,
        f"{origin} is not an IDX file of bytes with {axes} axes: it begins with {found.hex() or 'nothing'}, "
        f"expected {magic.hex()}.",
    )
    start = 4 + 4 * axes
    require(len(plain) >= start, f"{origin} ends inside its header.")
    shape = tuple(np.frombuffer(plain[4:start], ">u4").tolist())
    size, there = math.prod(shape), len(plain) - start
    require(there == size, f"{origin} should hold {size} values for its shape {shape}, found {there}.")
    return np.frombuffer(plain, np.uint8, offset=start).reshape(shape).copy()
