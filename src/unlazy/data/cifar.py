"""Read CIFAR's "python version" files, which are pickles, with an unpickler that cannot run code.

A pickle is a program: it may name any function and have it called. The published files name three NumPy objects, all to
rebuild their array of pixels. Inert stand-ins replace those three, and any other name is an error. So no file, damaged or
hostile, can reach a function of Python or NumPy.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import InputError, require

SHAPE = (3, 32, 32)


class _Immutable:
    """A stand-in that a pickle can name but not change: pickle's BUILD, which sets attributes, raises ``InputError``."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise InputError(f"it tries to change {type(self).__name__}")


class _ArrayClass(_Immutable):
    """Stands for ``numpy.ndarray``."""

    __slots__ = ()


class _ByteType:
    """Stands for the unsigned 8-bit element type, the only one in the files; attributes that a pickle sets are ignored."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


class _DtypeClass(_Immutable):
    """Stands for ``numpy.dtype``."""

    __slots__ = ()

    def __call__(self, code: object, *flags: object) -> _ByteType:
        require(code == b"u1", f"its array has elements of kind {code!r}, expected u1 (bytes)")
        return _ByteType()


class _Array:
    """Stands for an array; keeps the shape and the bytes that a pickle gives it."""

    __slots__ = ("raw", "shape")

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, column_order, raw = state
        require(
            isinstance(kind, _ByteType) and not column_order and isinstance(raw, bytes), "its array is not plain bytes"
        )
        self.shape, self.raw = shape, raw

    def numpy(self) -> NDArray[np.uint8]:
        """The array itself."""
        return np.frombuffer(self.raw, np.uint8).reshape(self.shape)


class _MakeArray(_Immutable):
    """Stands for ``numpy.core.multiarray._reconstruct``, which makes an array that is filled afterwards."""

    __slots__ = ()

    def __call__(self, kind: object, shape: object, code: object) -> _Array:
        require(isinstance(kind, _ArrayClass), f"it rebuilds {kind!r}, expected an array")
        return _Array()


ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _MakeArray(),
    ("numpy", "ndarray"): _ArrayClass(),
    ("numpy", "dtype"): _DtypeClass(),
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that finds the stand-ins and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in of a name; other names raise ``InputError``."""
        if (module, name) not in ALLOWED:
            raise InputError(f"it asks for {module}.{name}, which no CIFAR file needs; nothing of it was run")
        return ALLOWED[module, name]


def unpickle(data: bytes, origin: Path) -> dict[bytes, Any]:
    """The dictionary in ``data``, which came from ``origin``; text is left as bytes, arrays become NumPy's."""
    try:
        value = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        require(isinstance(value, dict), f"it holds {type(value).__name__}, expected a dictionary")
        require(all(isinstance(key, bytes) for key in value), "its keys are not plain text")
        return {key: item.numpy() if isinstance(item, _Array) else item for key, item in value.items()}
    except Exception as error:  # a damaged or hostile pickle may fail in any way
        raise InputError(f"{origin} is not a CIFAR file: {error}.") from error


def read_batch(data: bytes, origin: Path, labels_key: bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Pixels ``[n, 3, 32, 32]`` and labels ``[n]`` of one batch file."""
    content = unpickle(data, origin)
    for key in (b"data", labels_key):
        require(key in content, f"{origin} has no {key.decode()!r}; it has {', '.join(map(repr, content))}.")
    pixels, labels = content[b"data"], content[labels_key]
    width = int(np.prod(SHAPE))
    fits = isinstance(pixels, np.ndarray) and pixels.ndim == 2 and pixels.shape[1] == width
    require(fits, f"{origin}: pixels [n, {width}] expected, got {getattr(pixels, 'shape', type(pixels).__name__)}.")
    whole = isinstance(labels, list) and all(type(label) is int and 0 <= label < 256 for label in labels)
    require(whole and len(labels) == len(pixels), f"{origin}: {len(pixels)} labels from 0 to 255 expected.")
    return pixels.reshape(-1, *SHAPE), np.array(labels, dtype=np.uint8)


def read_names(data: bytes, origin: Path, key: bytes) -> tuple[str, ...]:
    """The class names in a ``meta`` file."""
    names = unpickle(data, origin).get(key)
    if not (isinstance(names, list) and all(isinstance(name, bytes) for name in names)):
        raise InputError(f"{origin} has no list of class names under {key.decode()!r}.")
    return tuple(name.decode("ascii", "replace") for name in names)
