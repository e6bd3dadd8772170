"""What the numbers of a Gram matrix depend on: code, kernel, options, weights, data, and what the model computes.

Weights and a printed module do not say what a ``forward`` does. So the identity also holds the outputs of the model on a few of
its own samples, a small block of the kernel, and the hash of the user's own classes. Outputs and block are kept as numbers and
compared within rounding: another machine, or another number of threads, may change their last digits.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unlazy.kernels.capture import Inputs, call_model, evaluation_mode, sample_count, take_samples
from unlazy.kernels.gram import Kernel, ready_context
from unlazy.kernels.tangent_engine import RuleMismatch
from unlazy.runtime import code_sha256

MOST_OUTPUTS = 64  # of a sample, in the fingerprint
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}  # relative to the largest number; gates may flip within rounding
KNOWN_PACKAGES = ("torch", "unlazy")  # their source is covered by versions and by the hash of this package
Numbers = list[float | None]


def job_identity(
    kernel: str, model: nn.Module, data: Sequence[Inputs], options: Mapping[str, Any], engine: Kernel
) -> dict[str, Any]:
    """The identity of a job, as JSON. ``data``: the rows, and the columns of a cross kernel."""
    return {
        "kernel": kernel,
        "options": json.loads(json.dumps(dict(options), sort_keys=True, default=str)),
        "model": content_checksum([type(model).__qualname__, repr(model)], model.state_dict()),
        "data": [content_checksum([], inputs) for inputs in data],
        "code": code_sha256(),
        "source": source_checksum(model),
        "function": function_fingerprint(model, data, engine),
    }


def different_parts(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Names of the parts in which two identities differ. Parts that one of them does not know are not compared: an older file
    names fewer, and the source of a class that was sent to a worker cannot be read there.

    Other weights, data or options compute something else too: then ``function`` is not named beside them.
    """
    known = [name for name, value in wanted.items() if None not in (value, found.get(name))]
    differs = [name for name in known if name != "function" and found[name] != wanted[name]]
    if set(differs) <= {"source"} and "function" in known and not same_function(found["function"], wanted["function"]):
        differs.append("function")
    return differs


def content_checksum(words: Sequence[str], tensors: Any) -> str:
    """SHA-256 of ``words`` and of every tensor in a tree: its path in the tree, type, shape and bytes."""
    digest = hashlib.sha256("\0".join(words).encode())
    for path, leaf in pytree.tree_flatten_with_path(tensors)[0]:
        digest.update(f"{pytree.keystr(path)} {getattr(leaf, 'dtype', type(leaf))} ".encode())
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)} ".encode())
            digest.update(leaf.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if leaf.numel() else b"")
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


# --- the user's source -------------------------------------------------------------------------------------


def source_checksum(model: nn.Module) -> str | None:
    """SHA-256 of the source of the model's own classes, without comments and layout; ``None`` if none can be read.

    Classes of torch and unlazy are left out. A helper function outside these classes is not covered: the fingerprint of what the
    model computes is there for that.
    """
    kinds = {type(module) for module in model.modules()}
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in KNOWN_PACKAGES]
    texts = sorted(text for text in map(_source_text, own) if text is not None)
    return hashlib.sha256("\0".join(texts).encode()).hexdigest() if texts else None


def _source_text(kind: type) -> str | None:
    try:
        text = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # typed at a prompt, or compiled
        return None
    try:
        return ast.unparse(ast.parse(text))
    except (SyntaxError, ValueError):
        return text


# --- what the model computes -------------------------------------------------------------------------------


def function_fingerprint(model: nn.Module, data: Sequence[Inputs], engine: Kernel) -> dict[str, Any]:
    """Outputs on the first, middle and last sample of every set, each in a batch of one, and a block of the kernel."""
    with torch.no_grad(), evaluation_mode(model):
        outputs = [
            call_model(model, take_samples(inputs, slice(at, at + 1)))[0, :MOST_OUTPUTS]
            for inputs in data
            for at in _few_samples(sample_count(inputs))
        ]
    return {
        "dtype": str(engine.dtype).removeprefix("torch."),
        "outputs": [_numbers(rows) for rows in outputs],
        "block": _small_block(data[0], engine),
    }


def _few_samples(n: int) -> list[int]:
    return sorted({0, n // 2, n - 1})


def _small_block(x: Inputs, engine: Kernel) -> Numbers | None:
    """The kernel of the first and the last sample, each with itself and with the other; their own entries give the scale.

    ``None`` if the rules of the layers do not fit these samples.
    """
    n, found = sample_count(x), []
    with ready_context(engine):
        try:
            first, last = (engine.features(take_samples(x, slice(at, at + 1))) for at in (0, n - 1))
            for left, right in ((first, first), (last, last), (first, last)):
                out = torch.empty((*engine.tail, 1, 1), dtype=engine.dtype, device=engine.device)
                engine.block(out, left, right, same=left is right)
                found.append(out.flatten()[: MOST_OUTPUTS**2])
        except RuleMismatch:
            return None
    return _numbers(torch.cat(found))


def _numbers(values: Tensor) -> Numbers:
    """Numbers for JSON; ``None`` for NaN and infinity."""
    return [value if math.isfinite(value) else None for value in values.double().tolist()]


def same_function(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether two fingerprints agree within rounding."""
    if found["dtype"] != wanted["dtype"] or len(found["outputs"]) != len(wanted["outputs"]):
        return False
    pairs = [*zip(found["outputs"], wanted["outputs"], strict=True)]
    if found["block"] is not None and wanted["block"] is not None:
        pairs.append((found["block"], wanted["block"]))
    tolerance = TOLERANCE.get(getattr(torch, wanted["dtype"]), 0.05)
    return all(_agree(a, b, tolerance) for a, b in pairs)


def _agree(a: Numbers, b: Numbers, tolerance: float) -> bool:
    if [value is None for value in a] != [value is None for value in b]:
        return False
    known = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    size = max((abs(value) for pair in known for value in pair), default=0.0)
    return all(abs(x - y) <= tolerance * size for x, y in known)
