"""Answers to the page: bytes with their headers, strict JSON, addresses, and the two ways to say no."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import quote

import numpy as np

from unlazy.runtime import UnlazyError


class NotHere(UnlazyError):  # noqa: N818
    """An address names nothing; the page gets 404 and the sentence."""


class BadRequest(UnlazyError):  # noqa: N818
    """An address is understood but asks for something impossible; the page gets 400 and the sentence."""


@dataclass(frozen=True)
class Answer:
    """Bytes, what they are, and how long they stay true. ``lasting``: the same address gives the same bytes for ever."""

    body: bytes
    media: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    lasting: bool = False

    @cached_property
    def etag(self) -> str:
        digest = hashlib.sha256(self.body)
        digest.update(repr(sorted(self.headers.items())).encode())
        return f'"{digest.hexdigest()[:24]}"'


def plain(value: Any) -> Any:
    """The same value as strict JSON has it: what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def as_json(value: Any) -> Answer:
    try:
        text = _dumps(value)
    except (ValueError, TypeError):  # something in it is not strict JSON
        text = _dumps(plain(value))
    return Answer(text.encode("utf-8", "replace"))


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def whole(text: str, name: str) -> int:
    """A whole number from an address, or one clear sentence."""
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise BadRequest(f"{name} must be a whole number, not {text[:40]!r}.")
    return int(text)


UNQUOTED = "~!*'()"


def address(*segments: object, **parameters: object) -> str:
    """A path as the page writes it: segments quoted (slashes of a key kept), parameters in order of name.

    The page quotes with encodeURIComponent, which leaves some signs alone.
    """
    path = "/api/" + "/".join(quote(str(segment), safe=f"/{UNQUOTED}") for segment in segments)
    query = "&".join(f"{name}={quote(str(value), safe=UNQUOTED)}" for name, value in sorted(parameters.items()))
    return f"{path}?{query}" if query else path
