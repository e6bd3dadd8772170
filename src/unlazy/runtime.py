"""Errors, environment variables, random streams, hashes and provenance, for the whole package.

Only this module reads environment variables. It imports torch inside functions, so that the command line starts fast.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import operator
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    import torch

__version__ = "0.2.0"


class UnlazyError(Exception):
    """Base of every error that this package raises on purpose; the message says what to do."""


class InputError(UnlazyError, ValueError):
    """An argument, setting or data set is outside what was expected."""


class StoreError(UnlazyError):
    """A run folder is missing, damaged, taken by another process, or cannot be written."""


class Unsupported(UnlazyError):  # noqa: N818
    """A quantity cannot be computed exactly for a module; names the module, the reason and the remedy."""

    def __init__(self, module: str, why: str, remedy: str) -> None:
        super().__init__(f"{module}: {why}. {remedy}")
        self.module, self.why, self.remedy = module, why, remedy

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.module, self.why, self.remedy)  # so that it can be pickled


class MissingFrameworkError(InputError, ImportError):
    """An optional framework that is not installed; says what brings it."""

    def __init__(self, name: str, package: str, error: ImportError) -> None:
        super().__init__(f"{name} cannot be imported ({error}); `pip install {package}` brings it.")


def framework(name: str, package: str) -> Any:
    """Import an optional framework, or say what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingFrameworkError(name, package, error) from error


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's code that called this package."""
    package, frame, level = str(Path(__file__).parent), sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def require(condition: bool, message: str) -> None:
    """Raise ``InputError(message)`` unless ``condition`` holds."""
    if not condition:
        raise InputError(message)


# --- environment ---------------------------------------------------------------------------------


def runs_folder() -> Path:
    """The folder of runs: ``UNLAZY_RUNS``, else ``runs`` in the current folder."""
    return Path(os.environ.get("UNLAZY_RUNS", "runs"))


def data_folder() -> Path:
    """The folder of data sets: ``UNLAZY_DATA``, else ``unlazy`` in the user's cache folder."""
    asked = os.environ.get("UNLAZY_DATA")
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(asked) if asked else (Path(cache) if cache else Path.home() / ".cache") / "unlazy"


def studio_token() -> str | None:
    """The secret that visitors of the studio need: ``UNLAZY_TOKEN``. A command line can be read by other users of a machine."""
    return os.environ.get("UNLAZY_TOKEN") or None


def chromium_path() -> str | None:
    """Path of the browser for the page tests: ``UNLAZY_CHROMIUM``, else Debian's Chromium, else ``None``."""
    asked = os.environ.get("UNLAZY_CHROMIUM")
    candidates = [asked] if asked else ["/usr/bin/chromium", "/usr/bin/chromium-browser"]
    return next((path for path in candidates if Path(path).exists()), None)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run a block with ``count`` torch threads; results have equal bits only at equal thread counts."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def exact_float32() -> Iterator[None]:
    """Run a block in which GPUs multiply float32 numbers without rounding them to 10 bits (no TF32)."""
    before = _float32_settings()
    for part, name, _ in before:
        setattr(part, name, False if name == "allow_tf32" else "ieee")
    try:
        yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)


def _float32_settings() -> list[tuple[Any, str, Any]]:
    """The present settings for float32 products on GPUs, as (part of torch, attribute, value).

    torch has old attributes (``allow_tf32``), which its own code still reads, and since 2.9 new ones (``fp32_precision``). The
    old ones raise an error when the new ones were set.
    """
    from torch import backends

    cudnn: Any = backends.cudnn  # its newer parts are unknown to type checkers
    found: list[tuple[Any, str, Any]] = []
    with suppress(RuntimeError):
        found = [(part, "allow_tf32", part.allow_tf32) for part in (cudnn, backends.cuda.matmul)]
    if hasattr(backends.cuda.matmul, "fp32_precision"):
        parts = (cudnn.conv, cudnn.rnn, backends.cuda.matmul)
        found += [(part, "fp32_precision", part.fp32_precision) for part in parts]
    return found


# --- random streams ------------------------------------------------------------------------------


def stream(seed: SupportsIndex, *key: str | int) -> torch.Generator:
    """A random generator that depends on ``(seed, *key)`` alone.

    The batch order of epoch 7 of seed 3 is always ``stream(3, "order", 7)``: whatever was drawn before, also after an
    interruption, and whichever other members train beside it.
    """
    import torch

    require(isinstance(seed, SupportsIndex), f"a seed is a whole number, got {seed!r}.")
    text = "/".join(str(part) for part in (operator.index(seed), *key))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1  # manual_seed takes 63 bits
    return torch.Generator().manual_seed(number)


# --- provenance ----------------------------------------------------------------------------------


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces, so that equal values give equal texts; raises for NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def short_hash(value: Any) -> str:
    """12 hex digits of the SHA-256 of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:12]


@cache
def code_sha256() -> str:
    """SHA-256 of the names and contents of the package's source files."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def provenance(dtype: str, device: str = "cpu") -> dict[str, Any]:
    """What produced a result: versions, code hash, platform, device, threads, precision and start time."""
    import torch

    return {
        "unlazy": __version__,
        "code_sha256": code_sha256(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": device,
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
